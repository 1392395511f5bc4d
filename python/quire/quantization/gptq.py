"""GPTQ: weights are rounded column by column, and the columns still to come make up for each error.

Frantar, Ashkboos, Hoefler, Alistarh: "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained
Transformers", 2022. One thing is added: scale bytes are chosen, for each row and block, as those with the least error
of the block among the format's own and its neighbours.
"""

from dataclasses import dataclass

import torch

from quire.functional import quantize
from quire.quantization.grid import Grid
from quire.tensor import QuantizedTensor, QuantSpec
from quire.tensor.order import in_order

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


def gptq(weight: torch.Tensor, moments: Moments, spec: str, damping: float) -> QuantizedTensor:
    """The weight [N, K] under `spec`, rowwise, with the least squared error of the layer's result that this order of
    columns finds. damping: what is added to the diagonal of the Gram matrix, relative to its mean.

    Columns of x that were always 0 have no say; their weights are rounded to nearest.
    """
    grid = Grid(QuantSpec(in_order(spec, False)))
    base = quantize(weight, grid.spec, columnwise=False)
    finish = _by_bytes if grid.bytes else _by_given_scales
    elements, scale = finish(grid, base, weight.to(torch.float32, copy=True), _inverse_factor(moments, damping))
    buffers = base.buffers() | {"rowwise_data": grid.codes(elements)}
    if scale is not None:
        buffers["rowwise_scale"] = scale
    return QuantizedTensor.from_buffers(buffers, grid.spec, weight.shape, weight.dtype)


def _inverse_factor(moments: Moments, damping: float) -> torch.Tensor:
    """float32 [K, K], the upper Cholesky factor of the inverse of the damped Gram matrix."""
    gram = moments.gram.clone()
    diagonal = gram.diagonal()
    dead = diagonal == 0
    diagonal += damping * diagonal.mean() + dead
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(gram))
    return torch.linalg.cholesky(inverse, upper=True).float()


def _by_given_scales(
    grid: Grid, base: QuantizedTensor, target: torch.Tensor, upper: torch.Tensor
) -> tuple[torch.Tensor, None]:
    """Elements [N, K] under the scales that the format gives the original weight. target: the weight, which is written
    to."""
    scales, elements = grid.scales(base), torch.empty_like(target)
    for begin in range(0, target.shape[1], _COLUMNS):
        block = slice(begin, min(begin + _COLUMNS, target.shape[1]))
        rounded, errors, _ = _round(grid, target[None, :, block], scales[None, :, block], upper[block, block])
        elements[:, block] = rounded[0]
        target[:, block.stop :] -= errors[0] @ upper[block, block.stop :]
    return elements, None


def _by_bytes(
    grid: Grid, base: QuantizedTensor, target: torch.Tensor, upper: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Elements [N, K], and for each block of a row the scale byte with the least error. Amaxes above the bytes are
    those of the original weight."""
    elements, scale = torch.empty_like(target), base.rowwise_scale.clone()
    rows = torch.arange(len(target), device=target.device)
    for number, begin in enumerate(range(0, target.shape[1], grid.bytes.count)):
        block = slice(begin, min(begin + grid.bytes.count, target.shape[1]))
        given = grid.block_bytes(target[:, block], base.rowwise_amax)
        scales = grid.scale_of_bytes(given, base.rowwise_amax)[:, :, None].expand(-1, -1, block.stop - begin)
        tried = target[None, :, block].expand(len(given), -1, -1)
        rounded, errors, loss = _round(grid, tried, scales, upper[block, block])
        best = loss.argmin(0)
        elements[:, block], scale[:, number] = rounded[best, rows], given[best, rows]
        target[:, block.stop :] -= errors[best, rows] @ upper[block, block.stop :]
    return elements, scale


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
