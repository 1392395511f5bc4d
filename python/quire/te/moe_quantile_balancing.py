"""Quantile balancing: what bias each expert would need to be chosen, counted in a histogram over the tokens."""

import enum

import torch

from quire.checks import check_type
from quire.loading.devices import is_known

_WHAT = "fused_topk_with_score_function"


class QBHistogramMode(enum.IntEnum):
    """Ways in which TransformerEngine counts. All give the same counts, and there is one way here."""

    TWO_KERNEL = 0
    FUSED_ATOMIC = 1


_MODES = (*QBHistogramMode, *[mode.name.lower() for mode in QBHistogramMode])


def check_quantile_balancing(
    logits: torch.Tensor,
    topk: int,
    histogram: torch.Tensor | None,
    bin_bounds: torch.Tensor | None,
    mode: str | int | None,
    *,
    score_function: str,
    expert_bias: torch.Tensor | None,
    grouped: bool,
) -> None:
    """Raises ValueError or TypeError for options that do not fit each other or logits. On the CPU the values of
    bin_bounds are checked too. On other devices and in compiled functions that check does not wait: it raises
    RuntimeError when it is known."""
    if any([option is None for option in (histogram, bin_bounds, mode)]):
        raise ValueError(
            f"{_WHAT}: qb_histogram, qb_bin_bounds and qb_histogram_mode must be provided together; got "
            f"{type(histogram).__name__}, {type(bin_bounds).__name__} and {mode!r}"
        )
    if mode not in _MODES:
        raise ValueError(f"{_WHAT}: qb_histogram_mode must be 'two_kernel' or 'fused_atomic', got {mode!r}")
    if score_function != "sigmoid" or expert_bias is None or grouped:
        raise ValueError(
            f"{_WHAT}: quantile balancing only supports score_function 'sigmoid' with an expert_bias and without "
            f"groups of experts; got {score_function!r}, expert_bias={type(expert_bias).__name__} and "
            f"{'num_groups or group_topk' if grouped else 'no groups'}"
        )
    check_type(_WHAT, torch.Tensor, logits=logits, qb_histogram=histogram, qb_bin_bounds=bin_bounds)
    experts = logits.shape[-1]
    if not 1 <= topk < experts:
        raise ValueError(
            f"{_WHAT}: quantile balancing compares with the first expert that is not chosen; topk must be from 1 to "
            f"{experts - 1} for {experts} experts, got {topk}"
        )
    if histogram.dtype != torch.int32 or histogram.dim() != 2 or len(histogram) != experts or not histogram.shape[1]:
        raise ValueError(
            f"{_WHAT}: qb_histogram must be int32 [num_experts, num_bins] with num_experts = {experts} and at least "
            f"one bin; got {histogram.dtype} {list(histogram.shape)}"
        )
    if bin_bounds.dtype != torch.float32 or bin_bounds.shape != (2,):
        raise ValueError(
            f"{_WHAT}: qb_bin_bounds must be float32 [2], the lower and the upper bound; got {bin_bounds.dtype} "
            f"{list(bin_bounds.shape)}"
        )
    _check_values(bin_bounds.detach())


def _check_values(bin_bounds: torch.Tensor) -> None:
    lower, upper = bin_bounds.unbind()
    valid, rule = bin_bounds.isfinite().all() & (lower < upper), "qb_bin_bounds must be finite with lower < upper"
    if not is_known(bin_bounds):
        torch._assert_async(valid, f"{_WHAT}: {rule}")
    elif not valid:
        raise ValueError(f"{_WHAT}: {rule}; got {bin_bounds.tolist()}")


def count_required_biases(
    histogram: torch.Tensor, logits: torch.Tensor, topk: int, expert_bias: torch.Tensor, bin_bounds: torch.Tensor
) -> None:
    """Adds 1 to histogram[e, bin] for each expert e and each token of logits [*, E]. The bin is that of the bias with
    which the score of e would be equal to the cutoff: of the choice scores of the token, the one after the topk
    greatest. Bins have equal widths between the bounds, and the outer ones count what is beyond. NaN is in the first
    bin. Arguments must have passed check_quantile_balancing()."""
    with torch.no_grad():
        scores = logits.detach().float().reshape(-1, logits.shape[-1]).sigmoid()
        cutoff = (scores + expert_bias.float()).topk(topk + 1).values[:, -1:]
        lower, upper = bin_bounds.unbind()
        bins = ((cutoff - scores - lower) * (histogram.shape[1] / (upper - lower))).floor()
        bins = bins.nan_to_num(nan=0.0).clamp(0, histogram.shape[1] - 1).long()
        histogram.t().scatter_add_(0, bins, torch.ones_like(bins, dtype=torch.int32))
