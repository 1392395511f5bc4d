"""The operators as plain functions of tensors and texts."""

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch._ops import OpOverload
from torch.compiler import is_dynamo_compiling

from quire.checks import check_type, check_type_or_none, describe, signed64
from quire.loading import library
from quire.loading.deferred import assume_constant_result
from quire.loading.devices import check_device, runs_later
from quire.loading.transforms import requires_grad
from quire.tensor import (
    BUFFER_NAMES,
    QuantizedActivation,
    QuantizedTensor,
    QuantSpec,
    as_matrix,
    from_results,
    named_buffers,
)
from quire.tensor.spec import as_spec

#: The buffers of a quantized operand, in the order of quire.tensor.BUFFER_NAMES and None where absent, or () for none.
Buffers = Sequence[torch.Tensor | None]

#: Operators as functions that give None where anybody but the kernel and autograd has a say in the call
#: (src/quire_python); not for Dynamo, which knows operators only.
DIRECT = library.direct()
# A graph has guards for each step of torch.ops.quire.linear.
_LINEAR, _LINEAR_PREQUANTIZED = torch.ops.quire.linear, torch.ops.quire.linear_prequantized


def _try_directly(name: str) -> None:
    """Lets code that Inductor generates try a direct call. Such code calls torch.ops.quire.NAME.default, which calls
    its attribute _op. PyTorch has no public way to do this (src/quire_python/README.md)."""
    operator = getattr(torch.ops.quire, name).default
    dispatched = operator._op

    def call(*args: Any, **kwargs: Any) -> torch.Tensor:
        y = None if DIRECT is None else getattr(DIRECT, name)(*args, **kwargs)
        return dispatched(*args, **kwargs) if y is None else y

    operator._op = call


if DIRECT is not None:
    for _name in ("linear", "linear_prequantized"):
        _try_directly(_name)


def operators() -> Iterator[OpOverload]:
    """All operators of quire, each in all of its overloads."""
    for name in torch._C._dispatch_get_all_op_names():
        if name.startswith("quire::"):
            packet, _, overload = name.removeprefix("quire::").partition(".")
            yield getattr(getattr(torch.ops.quire, packet), overload or "default")


def _call(name: str, *args: Any, **kwargs: Any) -> Any:
    """The results of an operator: of an eager call directly, where that is possible."""
    if not is_dynamo_compiling() and DIRECT is not None:
        results = getattr(DIRECT, name)(*args, **kwargs)
        if results is not None:
            return results
    return getattr(torch.ops.quire, name)(*args, **kwargs)


def linear(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    recipe: str,
    dtype: torch.dtype,
    *,
    sr_state: torch.Tensor | None = None,
) -> torch.Tensor:
    """y = x w^T + bias. x [*, K], w [N, K], bias [N]: each float32, float16 or bfloat16 -> y [*, N] in `dtype`.

    recipe: the text of a LinearSpec (quire/spec/linear_spec.h; numerics.md 6.1, 6.8, 6.9, 7.8).
    sr_state: int64 [2] {seed, counter}, needed for gradients if dy is rounded stochastically (numerics.md 0.11).
    First derivatives only. Raises RuntimeError if an argument does not fit.
    """
    if not is_dynamo_compiling() and DIRECT is not None:
        y = DIRECT.linear(x, w, bias, recipe, dtype, sr_state)
        if y is not None:
            return y
    return _LINEAR(x, w, bias, recipe, dtype, sr_state)


def linear_prequantized(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    recipe: str,
    dtype: torch.dtype,
    *,
    x_buffers: Buffers = (),
    w_buffers: Buffers = (),
    sr_state: torch.Tensor | None = None,
    w_fingerprint: torch.Tensor | None = None,
) -> torch.Tensor:
    """linear() of operands that can already be quantized.

    x_buffers, w_buffers: the six buffers of the operand under its spec, or () to quantize it here. With buffers, the
        tensor of the operand is not read: it gives the shape and dtype and receives the gradient. Columnwise buffers
        are needed for the gradient of the other operand.

    sr_state: as for linear().
    w_fingerprint: fingerprint(w) at the time w_buffers were made. A call after w has changed raises an error.

    Raises RuntimeError if an argument does not fit.
    """
    if not is_dynamo_compiling() and DIRECT is not None:
        y = DIRECT.linear_prequantized(
            x, w, bias, recipe, dtype, x_buffers, w_buffers, sr_state, w_fingerprint=w_fingerprint
        )
        if y is not None:
            return y
    return _LINEAR_PREQUANTIZED(x, w, bias, recipe, dtype, x_buffers, w_buffers, sr_state, w_fingerprint=w_fingerprint)


def grouped_linear(
    x: torch.Tensor,
    w: Sequence[torch.Tensor],
    bias: Sequence[torch.Tensor],
    offsets: torch.Tensor | None,
    recipe: str,
    *,
    dtype: torch.dtype,
    **state: Buffers | torch.Tensor | bool | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """linear() of each group of rows of x, with a separate w and bias for each group: (y, x_amax, w_amax). First
    derivatives only.

    x [*, K] -> y [*, N] in `dtype`. w: E matrices [N, K], or one [E, N, K] in a list. bias: E vectors [N], one [E, N],
        or none.
    offsets: int32 or int64 [E], the row at which each group ends; it begins where the previous group ends. A group can
        be empty; the gradient of its weight is then zero. Rows after the last group give zero and get a zero gradient.
        None: one group has all rows.
    recipe: as for linear(); "" or "kernels=batch_invariant" for matmuls of the unquantized x and w.

    The result of each group has the same bits as linear() of its rows alone: blocks, amaxes and transforms do not cross
    groups (numerics.md 0.19). On CUDA devices this holds of codes; matmuls of groups have kernels of their own (7.6).
    state, by keyword, each optional:
    x_buffers: the six buffers of x that activation() returns for these offsets (also norm(), without offsets).
    w_buffers: six buffers for each w. An operand whose buffers are passed is not read (linear_prequantized).
    w_fingerprint: int64 [E], fingerprint() of each w when w_buffers were made; a call after a w has changed raises an
    error.
    sr_state: as for linear(); group e uses seed + e.
    main_grad, a list like w, overwrite_main_grad: backward adds the gradient of w to main_grad (or overwrites it), and
        w gets no gradient.
    wgrad_stash: int64 [2] {number, count} on the CPU. Backward keeps the operands of w's gradient, and
        overwrite_main_grad, for stashed_wgrad(), and w gets no gradient.
    placeholder: if w gets no gradient for one of these reasons, it gets zeros, for hooks that wait for a gradient.
    fwd_scale, bwd_scale, bwd_amax: delayed scaling (numerics.md 1.5), float32 [3 E], [2 E], [2 E]. Backward uses the
        present scales and writes its amaxes to bwd_amax. x_amax and w_amax are the amaxes [E] of this call; without
        fwd_scale they have no meaning.
    out, dgrad_out: memory to which the rows of groups of y and dx are copied (GroupedLinear.forward).

    Raises RuntimeError if an argument does not fit.
    """
    lists = [state.pop(name, ()) for name in ("x_buffers", "w_buffers", "main_grad")]
    return _call("grouped_linear", x, w, bias, offsets, recipe, dtype, *lists, **state)


def norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    normalization: str,
    dtype: torch.dtype,
    *,
    eps: float = 1e-5,
    zero_centered: bool = False,
    **quantized: str | bool | torch.Tensor | None,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """ "LayerNorm" or "RMSNorm" of the last dimension of x (numerics.md 11.2): (y, buffers). First derivatives only.

    x [*, K], weight [K], bias [K] in weight's dtype or None; float32, float16 or bfloat16 each -> y [*, K] in `dtype`.

    quantized, by keyword, each optional:
    spec, rowwise, columnwise: y is quantized in the pass that computes it, to the same bytes as quantize(y, ...).
        buffers are its six buffers, empty where absent. y is then a carrier: a tensor of y's shape with the memory of
        one element. Do not read its values; it only receives the gradient. Pass y and buffers to linear_prequantized().
    keep_y: return y itself as well.
    scale: as for quantize().

    Raises RuntimeError if an argument does not fit.
    """
    y, *buffers = torch.ops.quire.norm(x, weight, bias, normalization, eps, zero_centered, dtype, **quantized)
    return y, buffers


def activation(
    x: torch.Tensor, name: str, dtype: torch.dtype, **quantized: str | bool | torch.Tensor | None
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """An activation function of x (numerics.md 11.3), quantized as in norm(): (y, buffers). First derivatives only.

    x [*, H], or [*, 2H] for a gated activation -> y [*, H] in `dtype`. name: "gelu", "swiglu", ...; the RuntimeError
    for an unknown name lists all. offsets, by keyword: the ends of groups of rows, as in grouped_linear(), which
    accepts the buffers. scale is then float32 [E], and rows after the last group give zero.
    """
    y, *buffers = _call("activation", x, name, dtype, **quantized)
    return y, buffers


def activation_gradient(dy: torch.Tensor, x: torch.Tensor, name: str) -> torch.Tensor:
    """The gradient of activation() by x, in x's dtype; dy is that of y (numerics.md 11.3). It has no gradient."""
    return torch.ops.quire.activation_bwd(dy, x, name)


@functools.cache
def activations() -> dict[str, tuple[int, list[str]]]:
    """The names that activation() takes -> input columns for one column of y, names of parameters."""
    rows = map(str.split, torch.ops.quire.activations().splitlines())
    return {name: (int(inputs), parameters) for name, inputs, *parameters in rows}


def activation_text(what: str, name: str, parameters: Mapping[str, float] | None) -> str:
    """The text of an activation and its parameters for the operators. what: the module, for errors. Raises
    NotImplementedError for an unknown name, TypeError or ValueError for other parameters."""
    if name not in activations():
        raise NotImplementedError(
            f"{what}: activation={name!r} is not available; use one of {', '.join(activations())}"
        )
    check_type_or_none(what, Mapping, activation_params=parameters)
    given, (_, known) = parameters or {}, activations()[name]
    if wrong := [key for key in given if key not in known]:
        raise ValueError(f"{what}: activation_params has {wrong[0]!r}, but {name} takes {', '.join(known) or 'none'}")
    for key, value in given.items():
        if not isinstance(value, torch.Tensor):
            check_type(what, float | int, **{key: value})
        if not math.isfinite(value) or (key == "limit" and value < 0):
            rule = "finite and at least 0" if key == "limit" else "finite"
            raise ValueError(f"{what}: {key} of activation_params must be {rule}, got {value}")
    return ":".join([name, *(f"{key}={float(value)!r}" for key, value in given.items())])


def activation_inputs(name: str) -> int:
    """Input columns per output column: 2 for a gated activation, whose first half is the gate; else 1."""
    inputs, _ = activations()[name]
    return inputs


def operand_buffers(w: torch.Tensor, spec: str, columnwise: bool, parallel: str = "") -> list[torch.Tensor]:
    """The six buffers of an operand, as linear_prequantized() takes them: rowwise, and columnwise too if requested.
    parallel: as for parallel_linear(); w is one rank's shard, and the buffers have both directions."""
    if parallel:
        return torch.ops.quire.quantize_weight_part(w.detach(), spec, parallel)
    return torch.ops.quire.quantize(w.detach(), spec, True, columnwise, 0, 0, None)


def input_buffers(
    x: torch.Tensor, spec: str, scale: torch.Tensor, offsets: torch.Tensor | None, columnwise: bool
) -> list[torch.Tensor | None]:
    """The six buffers of x, which has a static scale (the option `given` of spec). offsets: each group of rows has one
    of the scales."""
    if offsets is None:
        return torch.ops.quire.quantize(x.detach(), spec, True, columnwise, 0, 0, scale)
    rows, columns = torch.ops.quire.grouped_quantize(x.detach(), offsets, spec, False, scale), (None, None, None)
    if columnwise:
        columns = torch.ops.quire.grouped_quantize(x.detach(), offsets, spec, True, scale)
    return [*rows, *columns]


def quantize(
    x: torch.Tensor,
    spec: QuantSpec | str,
    rowwise: bool = True,
    columnwise: bool = False,
    seed: int | None = None,
    *,
    offset: int = 0,
    scale: torch.Tensor | None = None,
    amax: tuple[torch.Tensor | None, torch.Tensor | None] | None = None,
) -> QuantizedTensor | QuantizedActivation:
    """Codes, scales and amaxes of x under `spec` (numerics.md 1-5).

    Args:
        x: float32, float16 or bfloat16, any sizes and strides. Without dimensions it has the buffers of a tensor [1].
        spec: a QuantSpec or its text.
        rowwise: whether to compute codes with blocks along K. Both directions are computed in one pass.
        columnwise: whether to compute codes with blocks along M.
        seed: a 64-bit number, signed or unsigned, of the random stream (numerics.md 0.11), which both directions use. A
            spec with stochastic rounding needs a seed.
        offset: the place in the random stream: a 64-bit number, signed or unsigned.
        scale: float32 [1]. Without the option `given`: multiplies x before the cast, instead of a scale from x's own
            amax; fp8_tensor only (numerics.md 1.5). Its value is not checked: under 0 and NaN all decodes to NaN, and
            under infinity to 0 or NaN. With the option `given`, which needs it: the static scale, stored unchanged. It
            is the scale of fp8_tensor, the amax of nvfp4, or the global scale of the option `global` (numerics.md 2.5,
            5.9).
        amax: rowwise and columnwise amaxes as amax() returns them, instead of x's own amaxes: those of a larger tensor
            of which x is a part, or those of earlier tensors (numerics.md 5.9). One of the two can be None and is then
            measured.

    Returns:
        A QuantizedTensor. If x requires a gradient and grad mode is on, returns a QuantizedActivation; in backward the
            gradient passes through unchanged, as for the identity.

    Raises:
        ValueError: for a wrong spec, or a missing or out-of-range seed.
        RuntimeError: for a dtype or layout of x that is not taken, for a scale or amax of another size, dtype or device
            or that the spec does not take, and if rowwise and columnwise are both False.
        TypeError: for an argument of another type.

    Examples:
        >>> q = quire.quantize(torch.randn(32, 64), "mxfp8")
        >>> q.rowwise_data.dtype, q.rowwise_scale.shape
        (torch.uint8, torch.Size([32, 2]))
    """
    check_type("quantize", torch.Tensor, x=x)
    check_type("quantize", bool, rowwise=rowwise, columnwise=columnwise)
    check_type_or_none("quantize", torch.Tensor, scale=scale)
    spec = as_spec("quantize", spec)
    if spec.stochastic and seed is None:
        raise ValueError(f"quantize: {spec} rounds stochastically and needs a seed; pass seed= an int")
    if amax is not None and not (isinstance(amax, list | tuple) and len(amax) == 2):
        raise TypeError(
            f"quantize: amax must be a pair of amaxes, rowwise and columnwise, got {describe(amax)}; quire.amax "
            "returns one, and either can be None"
        )
    rowwise_amax, columnwise_amax = (None, None) if amax is None else amax
    check_type_or_none("quantize", torch.Tensor, rowwise_amax=rowwise_amax, columnwise_amax=columnwise_amax)
    arguments = (rowwise, columnwise, signed64(seed or 0, "seed"), signed64(offset, "offset"), scale)
    arguments += (rowwise_amax, columnwise_amax)
    matrix = as_matrix(x)
    if torch.is_grad_enabled() and requires_grad(x):
        carrier, *results = torch.ops.quire.quantize_through(matrix, spec.text, *arguments)
        named = named_buffers(results, rowwise, columnwise)
        carrier = carrier if x.dim() else carrier.reshape(())
        return QuantizedActivation(carrier, tuple([named[name] for name in BUFFER_NAMES]), spec.text)
    results = torch.ops.quire.quantize(matrix, spec.text, *arguments)
    return from_results(results, spec.text, x.shape, x.dtype, (rowwise, columnwise), scale=scale)


def amax(
    x: torch.Tensor, spec: QuantSpec | str, rowwise: bool = True, columnwise: bool = False
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The amaxes above the block level that quantize(x, spec) would measure, rowwise and columnwise (numerics.md 1.2,
    5.2): float32 [1], or one for each of the M rows and K columns (fp8_row, row_scaled); None for a direction that is
    not requested.

    quantize(x, spec, amax=amax(x, spec)) gives the same bytes as quantize(x, spec). Between the two calls, amaxes can
    be reduced over ranks that hold parts of one tensor. If each part is quantized with the largest amax, its bytes are
    the same as in the whole tensor.

    Args:
        x: float32, float16 or bfloat16, of any shape.
        spec: a QuantSpec or its text, with a scale or an amax above the level of blocks.
        rowwise: whether to compute the rowwise amax.
        columnwise: whether to compute the columnwise amax.

    Raises:
        TypeError: for an argument of another type.
        ValueError: for a wrong spec.
        RuntimeError: for specs whose scales depend only on blocks (mxfp8, mxfp4, fp8_block), for another dtype or
            layout of x, and if rowwise and columnwise are both False.
    """
    check_type("amax", torch.Tensor, x=x)
    check_type("amax", bool, rowwise=rowwise, columnwise=columnwise)
    spec = as_spec("amax", spec)
    found = torch.ops.quire.amax(as_matrix(x.detach()), spec.text, rowwise, columnwise)
    return found[0] if rowwise else None, found[1] if columnwise else None


def dequantize(q: QuantizedTensor | QuantizedActivation, dtype: torch.dtype | None = None) -> torch.Tensor:
    """q.dequantize(dtype).

    Args:
        q: a QuantizedTensor or a QuantizedActivation.
        dtype: float32, float16 or bfloat16. None: the dtype of q.

    Returns:
        The decoded values, a plain tensor.

    Raises:
        TypeError: for a plain tensor, and for what is no dtype.
        RuntimeError: for another dtype.
        ValueError: if q stores only columnwise codes of its Hadamard transform.
    """
    if not isinstance(q, QuantizedTensor | QuantizedActivation):
        raise TypeError(
            f"dequantize: expected what quire.quantize returns, got {describe(q)}; a plain tensor has no codes"
        )
    return q.dequantize(dtype)


def fingerprint(x: torch.Tensor) -> torch.Tensor:
    """int64 [1], a 64-bit hash of x, in any dtype that quantize() takes. It changes when x changes."""
    return torch.ops.quire.fingerprint(x)


def synchronize(device: torch.device | str | None = None) -> None:
    """Waits for a device, and raises the error in the values of a tensor that a kernel of quire has found there, if any
    (docs/troubleshooting.md).

    Args:
        device: None: the current accelerator. On a CPU there is nothing to wait for.

    Raises:
        RuntimeError: for that error, for a device that PyTorch or this machine does not have, and for one on which
            quire cannot compute.
        TypeError: for what names no device.
    """
    check_device("synchronize", device)
    device = torch.accelerator.current_accelerator(check_available=True) if device is None else torch.device(device)
    if device is None:
        return
    if runs_later(device):
        torch.accelerator.synchronize(device)
    torch.ops.quire.raise_reported(str(device))


# --- a mixture of experts (docs/moe.md); quire.moe has the same for users, with checks


def route(logits: torch.Tensor, expert_bias: torch.Tensor | None, routing: str) -> tuple[torch.Tensor, torch.Tensor]:
    """logits [*, E], expert_bias [E] -> topk_weights float32 [*, topk], differentiable, and topk_ids int32 [*, topk].

    routing: "FUNCTION:topk=N[:OPTION]...", such as "softmax:topk=2:renormalize"; the RuntimeError for a wrong text
    lists the options.
    """
    return _call("route", logits, expert_bias, routing)


def limit_capacity(topk_ids: torch.Tensor, num_experts: int, capacity: int) -> torch.Tensor:
    """topk_ids, with -1 where `capacity` earlier entries, in row-major order, have the same expert."""
    return torch.ops.quire.limit_capacity(topk_ids, num_experts, capacity)


def expert_rows(topk_ids: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """topk_ids int32 [T, k], -1 for no expert -> row_map int32 [T, k], offsets int32 [num_experts].

    row_map: the row of each entry when entries are sorted by expert, with a stable sort; -1 for no row. offsets: the
    end of each expert's rows; if num_experts is 0 (unknown), an empty tensor.
    """
    return _call("expert_rows", topk_ids, num_experts)


def chunk_rows(sizes: torch.Tensor, order: torch.Tensor | None, align: int, rows: int) -> torch.Tensor:
    """row_map int32 [rows, 1]: the new position of each row when chunks of `sizes` rows, int32 or int64 [G], are
    reordered. order: which chunk is first, second, ...; None keeps the order. Each chunk begins at a multiple of align.
    Rows after the last chunk stay behind it."""
    return torch.ops.quire.chunk_rows(sizes, order, align, rows)


def permute_rows(
    x: torch.Tensor, row_map: torch.Tensor, rows: int, weights: torch.Tensor | None = None
) -> torch.Tensor:
    """y [rows, K] with y[row_map[t, s]] = x[t] * weights[t, s], and 0 in all other rows; -1 in row_map writes no row.
    Differentiable.

    x [T, K]: float32, float16, bfloat16, or without weights uint8. row_map int32, weights float32 [T, S].
    """
    return _call("permute", x, row_map, weights, rows)


def unpermute_rows(y: torch.Tensor, row_map: torch.Tensor, weights: torch.Tensor | None = None) -> torch.Tensor:
    """x [T, K], where x[t] is the sum over s of y[row_map[t, s]] * weights[t, s], in this order and in float32, then
    rounded to y's dtype. Differentiable."""
    return _call("unpermute", y, row_map, weights)


# --- weight gradients that a backward pass left


def stashed_wgrad(stash: torch.Tensor, grads: Sequence[torch.Tensor], overwrite: bool = True) -> bool:
    """Computes the oldest weight gradient whose operands a backward pass kept under `stash` (grouped_linear:
    wgrad_stash). Writes or adds the gradient to grads: [N, K], or for groups one tensor for each group or one for all.
    It is added unless `overwrite` is set here or overwrite_main_grad was set in its call. Returns False if no operands
    are kept. Not for compiled functions."""
    kept, tokens, recipe, kept_overwrite = torch.ops.quire.wgrad_take_(stash)
    overwrite |= kept_overwrite
    # The buffers of dy and x, or these themselves; and of groups offsets behind them.
    operands, offsets = (kept[:-1], kept[-1]) if len(kept) % 2 else (kept, None)
    if len(operands) == 2:
        needs_w, of_w = 2, ([], [])  # which dw does not need
        dy, x = operands
        dw = torch.ops.quire.linear_unquantized_bwd(dy, offsets, x, *of_w, x.shape[-1], recipe, x.dtype, needs_w)[1]
        _writing("accumulate_", grads)(dw, overwrite)
    elif operands:
        _writing("wgrad_", grads)(*operands, offsets, tokens, recipe, overwrite)
    return bool(kept)


def _writing(operator: str, grads: Sequence[torch.Tensor]) -> Callable:
    """The operator that writes to one tensor, or the one that writes to a list of them."""
    if len(grads) == 1:
        return functools.partial(getattr(torch.ops.quire, operator), grads[0])
    return functools.partial(getattr(torch.ops.quire, f"grouped_{operator}"), grads)


def drop_stashed_wgrads(number: int) -> None:
    """Deletes the operands that are kept under that number."""
    torch.ops.quire.wgrad_drop(number)


# ------------------------------------------------------------ layers that are sharded over ranks


def parallel_linear(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    recipe: str,
    parallel: str,
    *,
    dtype: torch.dtype,
    **state: Buffers | torch.Tensor | bool | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """linear() of a weight that is sharded over ranks: (y, x_amax, w_amax), as grouped_linear() returns them. First
    derivatives only.

    parallel: quire.distributed.Parallel(...).text, which says what each rank has of x, w, bias and y.
    state: as for grouped_linear(), of one group, without x_buffers, out and dgrad_out. part: Parallel(...).place(),
    for gradients that round stochastically. input_scale: float32 [1], the scale of x under a spec with the option
    `given`, the same on every process.

    Raises RuntimeError if an argument does not fit, or a collective fails.
    """
    lists = [state.pop(name, ()) for name in ("w_buffers", "main_grad")]
    return torch.ops.quire.parallel_linear(x, w, bias, recipe, dtype, parallel, *lists, **state)


def parallel_grouped_linear(
    x: torch.Tensor,
    w: Sequence[torch.Tensor],
    bias: Sequence[torch.Tensor],
    offsets: torch.Tensor,
    recipe: str,
    *,
    parallel: str,
    part: torch.Tensor,
    dtype: torch.dtype,
    **state: Buffers | torch.Tensor | bool | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """grouped_linear() of weights that are sharded over ranks, which all have the same tokens. First derivatives
    only.

    w, bias: this rank's shard of each, as parallel_linear() has it of one. part: Parallel(...).place(). parallel:
    Parallel(...).text, without sequence. state: as for grouped_linear(), without x_buffers, out and dgrad_out.
    input_scale: as for parallel_linear(), one for each group: float32 [E].

    Raises RuntimeError if an argument does not fit, or a collective fails.
    """
    lists = [state.pop(name, ()) for name in ("w_buffers", "main_grad")]
    call = torch.ops.quire.parallel_grouped_linear
    return call(x, w, bias, offsets, part, recipe, dtype, parallel, *lists, **state)


def start_gather(t: torch.Tensor, size: int, group: str) -> torch.Tensor:
    """Begins to gather [size * d0, ...] of each rank's [d0, ...]. torch.ops._c10d_functional.wait_tensor() gives them.
    With gloo on another device than the CPU it is an all-to-all, because gloo's gather reads memory of the device by
    the host there."""
    t = t.contiguous()
    if not runs_later(t.device) or not sent_by_gloo(group, t.device.type):
        return torch.ops._c10d_functional.all_gather_into_tensor(t, size, group)
    splits = [t.shape[0]] * size
    return torch.ops._c10d_functional.all_to_all_single(torch.cat([t] * size), splits, splits, group)


@assume_constant_result
def sent_by_gloo(group: str, device: str) -> bool:
    """Whether gloo sends the tensors of a type of device for the group of that name."""
    return torch.ops.quire.sent_by_gloo(group, device)


def agree_on(t: torch.Tensor, text: str, group: str) -> None:
    """Raises RuntimeError unless every rank of the group of that name passes this text. To a graph it writes t."""
    torch.ops.quire.agree_on_(t, text, group)


def name_next_caller(layer: str) -> None:
    """Says which layer the next parallel_linear() of this thread belongs to. Errors of its collectives, forward and
    backward, name it."""
    torch.ops.quire.next_caller(layer)


def forget_agreed(group: str) -> None:
    """Forgets what the ranks of the group of that name have said to one another in compiled code: the name is now
    another group's."""
    torch.ops.quire.forget_agreed(group)


def sum_gradient(t: torch.Tensor, parallel: str) -> torch.Tensor:
    """The values of t, a parameter that every rank has and uses for its own tokens. Its gradient is the sum over the
    group of `parallel`, which is as for parallel_linear()."""
    return torch.ops.quire.sum_gradient(t, parallel)
