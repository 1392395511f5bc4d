"""GPTQ: weights are rounded column by column, and the columns still to come make up for each error.

Frantar, Ashkboos, Hoefler, Alistarh: "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained
Transformers", 2022. One thing is added: scale bytes are chosen, for each row and block, as those with the least error
of the block among the format's own and its neighbours.
"""

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from quire.functional import quantize
from quire.loading.float_mode import subnormals_kept
from quire.tensor import QuantizedTensor, QuantSpec
from quire.tensor.order import in_order

# --- elements of a format, to which single values are rounded, and codes in the buffers of a quantized tensor
#
# Elements are what quire decodes from each code. They are counted in units of the smallest one above 0; all are whole
# multiples of it. A scale is the value of the code for 1 unit under the stored bytes, as quire decodes it.


@dataclass(frozen=True)
class ByteScales:
    """Scale bytes that belong to values of one row. count: how many values share a byte. steps: by how much to move a
    byte to get others that may fit better. largest: the byte of the largest finite scale."""

    count: int
    steps: tuple[int, ...]
    largest: int


#: A step changes an NVFP4 scale by about a tenth, four steps by about a half; an MX scale by a factor of 2.
_BYTES = {
    "nvfp4": ByteScales(16, (-2, -1, 0, 1, 2, 4), 0x7E),
    "mxfp4": ByteScales(32, (-1, 0), 254),
    "mxfp8": ByteScales(32, (-1, 0), 254),
}
_TILES = {"16x16", "32x32"}


class Grid:
    """The elements of a spec, and where its scales are. bytes: None if scales span rows, or are float32."""

    def __init__(self, spec: QuantSpec) -> None:
        self.spec = spec
        self.bytes = None if _TILES.intersection(spec.options) else _BYTES.get(spec.family)
        self.packed, codes, elements = _elements(spec.text)
        self._codes = torch.tensor(codes, dtype=torch.uint8, device="cpu")
        self._elements = torch.tensor(elements, dtype=torch.float32, device="cpu")
        self._unit = codes[elements.index(1.0)]
        between = (self._elements[1:] + self._elements[:-1]) / 2
        # A tie goes to the even code: where that is the lower one, the upper one begins above the tie.
        upper_is_even = self._codes[1:] % 2 == 0
        self._ends = torch.where(upper_is_even, between, torch.nextafter(between, torch.full_like(between, torch.inf)))

    def rounded(self, u: torch.Tensor) -> torch.Tensor:
        """The element nearest to each value of u, ties to even, saturated."""
        return self._elements.to(u.device)[self._index(u)]

    def codes(self, u: torch.Tensor) -> torch.Tensor:
        """uint8 data of elements [N, K], packed as the format packs them."""
        codes = self._codes.to(u.device)[self._index(u)]
        if not self.packed:
            return codes
        if codes.shape[-1] % 2:
            codes = torch.nn.functional.pad(codes, (0, 1))
        return codes[..., ::2] | (codes[..., 1::2] << 4)

    def _index(self, u: torch.Tensor) -> torch.Tensor:
        return torch.bucketize(u.contiguous(), self._ends.to(u.device), right=True)

    def scales(self, q: QuantizedTensor) -> torch.Tensor:
        """float32 [N, K], the value of 1 unit at each place of q."""
        unit = self._unit | self._unit << 4 if self.packed else self._unit
        data = torch.full_like(q.rowwise_data, unit)
        if self.packed and q.shape[-1] % 2:
            data[..., -1] = self._unit
        buffers = q.buffers() | {"rowwise_data": data}
        return QuantizedTensor.from_buffers(buffers, q.spec, q.shape).dequantize()

    def block_bytes(self, block: torch.Tensor, amax: torch.Tensor | None) -> torch.Tensor:
        """uint8 [candidates, N]: the scale byte that the format gives each row of a block [N, up to bytes.count], and
        bytes near it."""
        given = None if amax is None else (amax, None)
        base = quantize(block, self.spec, amax=given).rowwise_scale.reshape(-1).to(torch.int16)
        steps = torch.tensor(self.bytes.steps, dtype=torch.int16, device=block.device)
        return (base + steps[:, None]).clamp(0, self.bytes.largest).to(torch.uint8)

    def scale_of_bytes(self, scale: torch.Tensor, amax: torch.Tensor | None) -> torch.Tensor:
        """float32, the value of 1 unit under each scale byte [candidates, N]."""
        count = scale.numel()
        data = torch.full((count, 1), self._unit, dtype=torch.uint8, device=scale.device)
        buffers = {"rowwise_data": data, "rowwise_scale": scale.reshape(count, 1)}
        if amax is not None:
            buffers["rowwise_amax"] = amax if amax.numel() == 1 else amax.repeat(count // amax.numel())
        return QuantizedTensor.from_buffers(buffers, self.spec, (count, 1)).dequantize().view(scale.shape)


@functools.cache
def _elements(spec: str) -> tuple[bool, list[int], list[float]]:
    """Whether two codes share a byte; the codes in ascending order of their elements, each element once; and the
    elements."""
    count = 256
    q = quantize(torch.ones(1, count, dtype=torch.float32, device="cpu"), spec, columnwise=False)
    packed = q.rowwise_data.shape[-1] < count
    codes = torch.arange(count, dtype=torch.uint8, device="cpu")
    data = codes[: count // 2] % 16 if packed else codes
    decoded = QuantizedTensor.from_buffers(q.buffers() | {"rowwise_data": data[None]}, spec, q.shape).dequantize()[0]
    values = decoded[::2][:16] if packed else decoded
    # -0 comes after +0, and is left out.
    of_value = {value: code for code, value in reversed(list(enumerate(values.tolist()))) if abs(value) < torch.inf}
    unit = min(value for value in of_value if value > 0)
    ordered = sorted(of_value)
    return packed, [of_value[value] for value in ordered], [round(value / unit) * 1.0 for value in ordered]


# --- rounding one weight


#: Columns that are rounded together where no scale byte belongs to fewer.
_COLUMNS = 128


@dataclass
class Moments:
    """gram: float64 [K, K], the sum of x^T x over all rows x of a layer's input. rows: their number."""

    gram: torch.Tensor
    rows: int = 0

    @classmethod
    def zeros(cls, features: int, device: torch.device) -> "Moments":
        return cls(torch.zeros(features, features, dtype=torch.float64, device=device))

    def add(self, x: torch.Tensor) -> None:
        """x: float32 [rows, K]."""
        self.gram += x.t() @ x
        self.rows += len(x)

    def finite(self) -> bool:
        return bool(self.gram.isfinite().all())


@subnormals_kept()
def gptq(weight: torch.Tensor, moments: Moments, spec: str, damping: float) -> QuantizedTensor:
    """The weight [N, K] under `spec`, rowwise, with the least squared error of the layer's result that this order of
    columns finds. damping: what is added to the diagonal of the Gram matrix, relative to its mean.

    Columns of x that were always 0 have no influence; their weights are rounded to nearest. Raises LinAlgError if the
    damped Gram matrix cannot be factorized.
    """
    grid = Grid(QuantSpec(in_order(spec, False)))
    order = _order(moments.gram.diagonal(), grid.bytes.count if grid.bytes else 1)
    base = quantize(weight, grid.spec, columnwise=False)
    columns = _Columns(
        weight.to(torch.float32)[:, order], order, _inverse_factor(moments.gram[order][:, order], damping)
    )
    finish = _by_bytes if grid.bytes else _by_given_scales
    elements, buffers = finish(grid, base, columns)
    buffers = base.buffers() | buffers | {"rowwise_data": grid.codes(elements[:, order.argsort()])}
    return QuantizedTensor.from_buffers(buffers, grid.spec, weight.shape, weight.dtype)


def _inverse_factor(gram: torch.Tensor, damping: float) -> torch.Tensor:
    """float32 [K, K], the upper Cholesky factor of the inverse of the damped Gram matrix, which is written to, times a
    power of 2. Raises LinAlgError if there is none."""
    diagonal = gram.diagonal()
    dead = diagonal == 0
    diagonal += damping * diagonal.mean() + dead
    # A power of 4 changes no bit of the codes, and keeps the factor and squares of errors within float32.
    gram *= 2.0 ** -(math.frexp(float(diagonal.mean()))[1] // 2 * 2)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(gram))
    return torch.linalg.cholesky(inverse, upper=True).float()


def _order(diagonal: torch.Tensor, count: int) -> torch.Tensor:
    """int64 [K], the order in which columns are rounded: those with the largest inputs first, which later ones make up
    for. The `count` columns that share a scale byte follow each other. diagonal: of the Gram matrix."""
    whole = len(diagonal) // count * count
    blocks = diagonal[:whole].view(-1, count)
    first = blocks.sum(1).argsort(descending=True, stable=True)
    within = blocks.argsort(dim=1, descending=True, stable=True)
    rest = diagonal[whole:].argsort(descending=True, stable=True) + whole
    return torch.cat([(first[:, None] * count + within[first]).flatten(), rest])


@dataclass
class _Columns:
    """target: float32 [N, K], what is to be rounded, which is written to. order: the column of the weight that each of
    its columns is. upper: float32 [K, K], the upper Cholesky factor of the inverse of the damped Gram matrix."""

    target: torch.Tensor
    order: torch.Tensor
    upper: torch.Tensor

    def blocks(self, count: int) -> Iterator[slice]:
        for begin in range(0, self.target.shape[1], count):
            yield slice(begin, min(begin + count, self.target.shape[1]))

    def spread(self, block: slice, errors: torch.Tensor) -> None:
        """Lets the columns behind a block make up for its errors [N, columns]."""
        self.target[:, block.stop :] -= errors @ self.upper[block, block.stop :]


def _by_given_scales(
    grid: Grid, base: QuantizedTensor, columns: _Columns
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Elements [N, K] under the scales that the format gives the original weight, and no other buffers."""
    scales, elements = grid.scales(base)[:, columns.order], torch.empty_like(columns.target)
    for block in columns.blocks(_COLUMNS):
        own = columns.target[None, :, block], scales[None, :, block]
        rounded, errors, _ = _round(grid, *own, columns.upper[block, block])
        elements[:, block] = rounded[0]
        columns.spread(block, errors[0])
    return elements, {}


def _by_bytes(grid: Grid, base: QuantizedTensor, columns: _Columns) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Elements [N, K], and for each block of a row the scale byte with the least error. Amaxes above the bytes are
    those of the original weight."""
    target, count = columns.target, grid.bytes.count
    elements, scale = torch.empty_like(target), base.rowwise_scale.clone()
    rows = torch.arange(len(target), dtype=torch.int64, device=target.device)
    for block in columns.blocks(count):
        given = grid.block_bytes(target[:, block], base.rowwise_amax)
        scales = grid.scale_of_bytes(given, base.rowwise_amax)[:, :, None].expand(-1, -1, block.stop - block.start)
        tried = target[None, :, block].expand(len(given), -1, -1)
        rounded, errors, loss = _round(grid, tried, scales, columns.upper[block, block])
        best = loss.argmin(0)
        elements[:, block] = rounded[best, rows]
        scale[:, columns.order[block.start] // count] = given[best, rows]
        columns.spread(block, errors[best, rows])
    return elements, {"rowwise_scale": scale}


def _round(
    grid: Grid, w: torch.Tensor, scales: torch.Tensor, upper: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rounds columns one after the other. w, scales: [candidates, N, columns]; upper: [columns, columns] ->
    elements [candidates, N, columns], the errors that further columns make up for, and their loss [candidates, N]."""
    w, elements, errors = w.clone(), torch.empty_like(w), torch.empty_like(w)
    inverse = torch.where(scales == 0, 0.0, 1 / scales)
    for j in range(w.shape[2]):
        elements[:, :, j] = grid.rounded(w[:, :, j] * inverse[:, :, j])
        errors[:, :, j] = (w[:, :, j] - elements[:, :, j] * scales[:, :, j]) / upper[j, j]
        w[:, :, j + 1 :] -= errors[:, :, j, None] * upper[j, j + 1 :]
    return elements, errors, errors.square().sum(2)
