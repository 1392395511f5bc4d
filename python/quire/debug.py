"""Single steps of quire's arithmetic with plain tensors, and records of quantization. For tests and debugging: slow and
simple."""

import contextlib
import math
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from quire.checks import check_type, check_type_or_none, signed64
from quire.nn.own_context import in_eager_mode
from quire.nn.running_layers import paths_of, told
from quire.tensor import QuantizedTensor, QuantSpec, as_matrix, named_buffers


def cast(x: torch.Tensor, format: str) -> torch.Tensor:
    """The code of each element of x, without a scale: uint8 of x's shape, one code in each byte (numerics.md 1.1, 1.2).

    Args:
        x: float32, float16 or bfloat16, of any shape.
        format: the element format: "e4m3", "e5m2", "e2m1", "e3m2" or "e2m3".

    Raises:
        TypeError: unless x is a tensor and format a text.
        RuntimeError: for another dtype or format.
    """
    check_type("debug.cast", torch.Tensor, x=x)
    check_type("debug.cast", str, format=format)
    return torch.ops.quire.debug_cast(as_matrix(x), format).reshape(x.shape)


def rht(x: torch.Tensor, signs: bool = True) -> torch.Tensor:
    """The Hadamard transform of groups of 16 tokens: x [M, K] -> bfloat16 [K, 16 * ceil(M / 16)], transposed
    (numerics.md 0.10, 5.3).

    Args:
        x: float32, float16 or bfloat16 `[*, K]`; M is the number of rows. Missing rows of the last group count as 0.
        signs: the random signs of the recipes; False: the plain Hadamard matrix.

    Raises:
        TypeError: unless x is a tensor and signs a bool.
        RuntimeError: for another dtype.
    """
    check_type("debug.rht", torch.Tensor, x=x)
    check_type("debug.rht", bool, signs=signs)
    return torch.ops.quire.debug_rht(x, signs)


def swizzle(scale: torch.Tensor) -> torch.Tensor:
    """Scales in the layout of tiles of 128 x 4 that block-scaled tensor cores read (numerics.md 4.5).

    Args:
        scale: uint8 [outer, blocks].

    Returns:
        Uint8 [outer rounded up to 128, blocks rounded up to 4], padded with 0.

    Raises:
        TypeError: unless scale is a tensor.
        RuntimeError: for another dtype or number of dimensions.
    """
    check_type("debug.swizzle", torch.Tensor, scale=scale)
    return torch.ops.quire.debug_swizzle(scale)


def unswizzle(swizzled: torch.Tensor, rows: int, cols: int) -> torch.Tensor:
    """The inverse of swizzle(): the uint8 matrix [rows, cols] that was its argument.

    Args:
        swizzled: the result of `swizzle`.
        rows: the number of rows of the argument of `swizzle`.
        cols: the number of its columns.

    Raises:
        TypeError: unless swizzled is a tensor and the sizes are ints.
        RuntimeError: if swizzled does not have the dtype and the number of elements that swizzle() returns.
    """
    check_type("debug.unswizzle", torch.Tensor, swizzled=swizzled)
    check_type("debug.unswizzle", int, rows=rows, cols=cols)
    return torch.ops.quire.debug_unswizzle(swizzled, rows, cols)


def philox(seed: int, offset: int, blocks: torch.Tensor) -> torch.Tensor:
    """The random words of stochastic rounding: four 32-bit words for each block of 16 elements (numerics.md 0.11).

    Args:
        seed: a 64-bit integer, signed or unsigned.
        offset: a 64-bit integer, signed or unsigned.
        blocks: int64 [n], the numbers of the blocks.

    Returns:
        Int64 [n, 4].

    Raises:
        TypeError: for a seed or offset that is not an int, and for blocks that are no tensor.
        ValueError: for a seed or offset of more than 64 bits.
        RuntimeError: for other blocks.
    """
    check_type("debug.philox", torch.Tensor, blocks=blocks)
    return torch.ops.quire.debug_philox(blocks, signed64(seed, "seed"), signed64(offset, "offset"))


def delayed_update(
    history: torch.Tensor,
    scale: torch.Tensor,
    amax: torch.Tensor,
    *,
    algorithm: str = "max",
    maximum: float = 448.0,
    margin: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The state of delayed scaling after one step: the new (history, scale). The arguments do not change (numerics.md
    1.6).

    Args:
        history: float32 [L, n], the amaxes of L steps.
        scale: float32 [n].
        amax: float32 [n], the amaxes of the present step, perhaps reduced over ranks. They are used instead of row 0 of
            history, and become the last row of the result.
        algorithm: "max" or "most_recent".
        maximum: the largest value of the element format: 448 for E4M3, 57344 for E5M2.
        margin: the scale leaves a factor of 2^margin to the largest value, -255 to 255.

    Raises:
        RuntimeError: for shapes that do not agree or an unknown algorithm.
        ValueError: for a maximum that is not positive and finite or a margin out of range.
        TypeError: if one of the two is not a number, another argument is not a tensor, or algorithm is not a text.
    """
    what = "debug.delayed_update"
    check_type(what, torch.Tensor, history=history, scale=scale, amax=amax)
    check_type(what, str, algorithm=algorithm)
    check_type(what, int, margin=margin)
    check_type(what, float | int, maximum=maximum)
    if not 0 < maximum < math.inf or not -255 <= margin <= 255:
        raise ValueError(
            f"{what}: maximum must be finite and above 0, and margin between -255 and 255; got {maximum!r} and "
            f"{margin!r}"
        )
    return torch.ops.quire.debug_delayed_update(history, scale, amax, algorithm, float(maximum), margin)


@dataclass(frozen=True, eq=False)
class Operand:
    """An operand of a matmul, as operands() records it.

    Attributes:
        role: "x", "w" or "dy".
        tensor: a QuantizedTensor [M, K] with the codes, scales and amaxes. K is the last dimension, and M the product
            of the others.
    """

    role: str
    tensor: QuantizedTensor


_recording = threading.Lock()
_counting = threading.Lock()


@contextlib.contextmanager
def operands() -> Iterator[list[Operand]]:
    """Yields a list. After the context ends, the list has a copy of every operand that was quantized within the context
    and read by a matmul, in order. Each group of a GroupedLinear is one operand, except on devices whose kernels take
    all groups at once.

    It covers all threads of the process, eager and compiled code, forward and backward.

    Raises:
        RuntimeError: within another operands().
    """
    records: list[Operand] = []
    with _alone(_recording, "operands is already recording", torch.ops.quire.debug_record):
        try:
            yield records
        finally:
            torch.ops.quire.debug_record(False)
            records += _recorded()


@contextlib.contextmanager
def _alone(lock: threading.Lock, what: str, switch: Callable[[bool], None]) -> Iterator[None]:
    """Switches an observation of the whole process on and off, for one caller at a time."""
    if not lock.acquire(blocking=False):
        raise RuntimeError(f"quire.debug.{what} in this process; leave that context first")
    try:
        switch(True)
        yield
    finally:
        switch(False)
        lock.release()


def _recorded() -> Iterator[Operand]:
    buffers = torch.ops.quire.debug_recorded()
    for i, line in enumerate(torch.ops.quire.debug_recorded_text().splitlines()):
        role, spec, sizes = line.split(" ")
        six = buffers[6 * i : 6 * i + 6]
        rowwise, columnwise = (tuple(six[first].shape) != (0,) for first in (0, 3))
        shape = tuple(int(size) for size in sizes.split(","))
        named = named_buffers(six, rowwise, columnwise)
        yield Operand(role, QuantizedTensor(QuantSpec(spec), shape, torch.float32, **named))


#: The product that reads an operand's codes of one direction (numerics.md 6.1).
_PRODUCTS = {
    ("x", "rowwise"): "fprop",
    ("w", "rowwise"): "fprop",
    ("dy", "rowwise"): "dgrad",
    ("w", "columnwise"): "dgrad",
    ("dy", "columnwise"): "wgrad",
    ("x", "columnwise"): "wgrad",
}


@dataclass(frozen=True)
class Counts:
    """What became of the values that were quantized for one operand of matmuls.

    Attributes:
        role: "x", "w" or "dy"; "" if no matmul of a Linear has read the codes.
        spec: the text of the spec.
        direction: "rowwise" or "columnwise".
        tensors: the number of quantized tensors.
        elements: the number of their elements.
        saturated: how many became the largest code, as docs/observing.md defines it.
        underflowed: how many became zero, as docs/observing.md defines it.
        nonfinite: how many are NaN or infinite, as docs/observing.md defines it.
        amax: the largest magnitude of the finite ones.
        error: the norm of what rounding changed, relative to the norm of the values, of those that are finite before
            and after; NaN if there are none.
        layer: the path of the layer in the model that statistics() was given; "" for the model itself, for what none
            of its layers has quantized, and without a model.
    """

    role: str
    spec: str
    direction: str
    tensors: int
    elements: int
    saturated: int
    underflowed: int
    nonfinite: int
    amax: float = 0.0
    error: float = 0.0
    layer: str = ""

    @property
    def product(self) -> str:
        return _PRODUCTS.get((self.role, self.direction), "")


def _share(count: int, elements: int) -> str:
    """As a percentage. A count above 0 never looks like 0."""
    text = f"{count / max(elements, 1):.3%}"
    return "<0.001%" if count > 0 and float(text[:-1]) == 0 else text


class Statistics(list[Counts]):
    """A list of Counts: one for each combination of layer, role, spec and direction, layers in the order of the model.
    str() gives a table, in which the counts are shares of the elements.
    """

    def __str__(self) -> str:
        by_layer = any([row.layer for row in self])
        head = ["role", "product", "direction", "spec", "tensors", "elements"]
        head += ["saturated", "underflowed", "nonfinite", "amax", "error"]
        rows = [["layer"] * by_layer + head] + [
            [
                *[row.layer or "-"] * by_layer,
                *(row.role or "-", row.product or "-", row.direction, row.spec, str(row.tensors), str(row.elements)),
                *(_share(n, row.elements) for n in (row.saturated, row.underflowed, row.nonfinite)),
                *(f"{row.amax:.4g}", "-" if math.isnan(row.error) else f"{row.error:.3%}"),
            ]
            for row in self
        ]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


@contextlib.contextmanager
def statistics(model: torch.nn.Module | None = None) -> Iterator[Statistics]:
    """Yields a list. After the context ends, the list has the counts of all values that were quantized within the
    context.

    It covers all threads of the process, eager and compiled code, forward and backward. Within the context quantization
    is many times slower.

    Args:
        model: with a model, the counts are by layer. Within the context compiled functions then run in eager mode in
            all threads, and their results can differ (docs/inference.md). Programs that were exported count for the
            module that calls them.

    Raises:
        TypeError: if model is not a module or None.
        RuntimeError: within another statistics().
    """
    check_type_or_none("debug.statistics", torch.nn.Module, model=model)
    rows = Statistics()
    with _alone(_counting, "statistics is already counting", torch.ops.quire.debug_count):
        try:
            with contextlib.nullcontext() if model is None else _by_layer(model):
                yield rows
        finally:
            torch.ops.quire.debug_count(False)
            rows += _counted()
            if model is not None:
                order = {path: i for i, path in enumerate(paths_of(model).values())}
                rows.sort(key=lambda row: order.get(row.layer, len(order)))


@contextlib.contextmanager
def _by_layer(model: torch.nn.Module) -> Iterator[None]:
    with in_eager_mode(), told(model, torch.ops.quire.debug_count_for):
        yield


def _counted() -> Iterator[Counts]:
    for line in torch.ops.quire.debug_counted().splitlines():
        layer, role, spec, direction, *counts, amax, error = line.split("\t")
        # The same object for each NaN: rows with one are equal then.
        measured = math.nan if error == "nan" else float(error)
        yield Counts(role, spec, direction, *map(int, counts), float(amax), measured, layer)
