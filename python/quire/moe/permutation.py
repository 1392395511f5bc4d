"""Permutes rows of tokens into expert order and back (moe-reference.md 2)."""

from typing import NamedTuple

import torch

from quire import functional
from quire.checks import check_type, check_type_or_none
from quire.tensor import QuantizedActivation, QuantizedTensor
from quire.tensor.buffers import from_list
from quire.tensor.spec import TILES


class Permuted(NamedTuple):
    """The result of permute().

    Attributes:
        rows: [num_rows, K]. The rows of expert 0, then the rows of expert 1, and so on, each in token order; 0 after
            the last expert's rows.
        offsets: int32 [num_experts]. The end of each expert's rows.
        row_map: int32 [T, k]. The row of each token's k-th expert, -1 for no row. An argument of unpermute().
    """

    rows: torch.Tensor
    offsets: torch.Tensor
    row_map: torch.Tensor


def permute(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    num_experts: int,
    *,
    weights: torch.Tensor | None = None,
    num_rows: int | None = None,
) -> Permuted:
    """Copies each token of x [T, K] once for each of its experts in topk_ids, int32 [T, k], and sorts the copies by
    expert. An id of -1 is no expert. See Permuted.

    Args:
        x: float32, float16 or bfloat16, with first derivatives; or a QuantizedTensor, whose codes and scales are moved
            unchanged.
        topk_ids: int32 [T, k], the experts of each token. -1 is no expert.
        num_experts: the number of experts. 0: unknown; then offsets of the result are empty.
        weights: float32 [T, k], multiply the rows (routing probabilities on the input); differentiable.
        num_rows: T * k by default; a smaller number must be enough for all rows.

    Returns:
        A Permuted.

    Raises:
        TypeError: for an argument of another type.
        RuntimeError: if an argument does not fit, on the CPU also for ids that are not experts.
        NotImplementedError: for a QuantizedTensor whose rows share scales, that needs a gradient or that has weights.
    """
    check_type("permute", torch.Tensor | QuantizedActivation, x=x)
    check_type("permute", torch.Tensor, topk_ids=topk_ids)
    check_type("permute", int, num_experts=num_experts)
    check_type_or_none("permute", torch.Tensor, weights=weights)
    check_type_or_none("permute", int | torch.SymInt, num_rows=num_rows)
    # A graph leaves it to the operator, which takes sizes that nobody knows yet.
    values = not torch.compiler.is_compiling() and isinstance(x, torch.Tensor)
    matrices = values and topk_ids.dim() == x.dim() == 2
    if matrices and x.shape[0] != topk_ids.shape[0]:
        raise RuntimeError(
            f"permute: topk_ids must have a row for each of the {x.shape[0]} tokens of x; got {list(topk_ids.shape)}"
        )
    row_map, offsets = functional.expert_rows(topk_ids, num_experts)
    return Permuted(
        permute_any(x, row_map, row_map.numel() if num_rows is None else num_rows, weights), offsets, row_map
    )


def unpermute(y: torch.Tensor, row_map: torch.Tensor, weights: torch.Tensor | None = None) -> torch.Tensor:
    """[T, K] in y's dtype: for each token the sum of its rows of y [num_rows, K], multiplied by weights float32 [T, k].

    The sum is computed in float32, in the order of the token's experts, starting with the first. So the bits are always
    the same. The result is 0 for a token without rows. First derivatives in y and weights.

    Args:
        y: [num_rows, K], the rows of the experts.
        row_map: int32 [T, k], that of `permute`.
        weights: float32 [T, k]. None: 1.

    Raises:
        TypeError: for what is no tensor.
        RuntimeError: if dtypes or sizes do not fit, on the CPU also for rows that y does not have.
    """
    check_type("unpermute", torch.Tensor, y=y, row_map=row_map)
    check_type_or_none("unpermute", torch.Tensor, weights=weights)
    return functional.unpermute_rows(y, row_map, weights)


def permute_any(
    x: torch.Tensor | QuantizedTensor, row_map: torch.Tensor, rows: int, weights: torch.Tensor | None = None
) -> torch.Tensor:
    """functional.permute_rows(), also for a QuantizedTensor."""
    quantized = isinstance(x, QuantizedTensor | QuantizedActivation)
    if isinstance(x, QuantizedActivation) or (quantized and x.requires_grad and torch.is_grad_enabled()):
        raise NotImplementedError(
            f"permute: codes have no gradient, and x, a {type(x).__name__}, has one; permute values and then quantize "
            "the rows, or detach() it"
        )
    check_type("permute", torch.Tensor, x=x)
    if not quantized:
        return functional.permute_rows(x, row_map, rows, weights)
    if weights is not None:
        raise NotImplementedError(
            "permute: codes cannot be multiplied by weights; pass them to unpermute(), or dequantize"
        )
    return _permute_codes(x, row_map, rows)


def _permute_codes(q: QuantizedTensor, row_map: torch.Tensor, rows: int) -> QuantizedTensor:
    """The rowwise codes and scales of q [T, K] permuted; columnwise ones do not follow and are left out."""
    family, *options = q.spec_text.split(":")  # QuantSpec would break a graph here
    if shared := [option for option in options if option in TILES]:
        raise NotImplementedError(
            f"permute: rows of {q.spec_text} share scales or tiles ({shared[0]}), so they cannot move alone; permute, "
            "then quantize, or use a spec without it"
        )
    data, scale, amax, *_ = q.buffer_list()
    if data is None or q.dim() != 2:
        raise NotImplementedError(
            f"permute: a QuantizedTensor must be a matrix with rowwise codes, got shape {list(q.shape)} with "
            f"{'no ' if data is None else ''}rowwise codes; quantize with rowwise=True, and view() it as a matrix"
        )

    def moved(buffer: torch.Tensor) -> torch.Tensor:
        return functional.permute_rows(buffer, row_map, rows)

    if family == "fp8_row":
        scale = moved(scale[:, None])[:, 0]
    elif family == "fp8_block":  # blocks come first (numerics.md 3.3)
        scale = moved(scale.t().contiguous()).t().contiguous()
    elif family != "fp8_tensor":
        scale = moved(scale)
    if "row_scaled" in options and amax is not None:  # absent where there are no rows
        amax = moved(amax[:, None])[:, 0]
    return from_list([moved(data), scale, amax, None, None, None], q.spec_text, (rows, q.shape[1]), q.dtype)
