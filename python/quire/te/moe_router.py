"""TransformerEngine's names for routing (transformer_engine.pytorch.router)."""

import enum

import torch

from quire import functional
from quire.checks import check_type
from quire.loading.devices import is_known
from quire.moe import routing
from quire.te.arguments import positional

# --- quantile balancing: what bias each expert would need to be chosen, counted in a histogram over the tokens


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


# --- routing


class RoutingMapFormat(enum.IntEnum):
    """BYTEMAP: bool [*, E]. BITMAP_U8: uint8 [*, ceil(E / 8)], expert e is bit e % 8 of byte e // 8."""

    BYTEMAP = 0
    BITMAP_U8 = 1


#: By their names, and by their numbers, which the members equal.
_FORMATS = {key: format for format in RoutingMapFormat for key in (format.name.lower(), int(format))}


@positional(
    *("scaling_factor", "score_function", "expert_bias", "routing_map_format", "topk_indices"),
    *("qb_histogram", "qb_bin_bounds", "qb_histogram_mode"),
)
def fused_topk_with_score_function(
    logits: torch.Tensor,
    topk: int,
    use_pre_softmax: bool,
    num_groups: int | None,
    group_topk: int | None,
    *,
    scaling_factor: float | None,
    score_function: str,
    expert_bias: torch.Tensor | None,
    routing_map_format: str | int = RoutingMapFormat.BYTEMAP,
    topk_indices: torch.Tensor | None = None,
    qb_histogram: torch.Tensor | None = None,
    qb_bin_bounds: torch.Tensor | None = None,
    qb_histogram_mode: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(probs [*, E] in logits' dtype, 0 for experts that were not chosen; routing_map as routing_map_format says, or
    topk_indices [*, topk], written to, if that is given). quire.moe.route() gives weights and ids as they are.

    use_pre_softmax: softmax over all experts, not over the chosen ones. "sigmoid" and "sqrtsoftplus" scores are divided
    by their sum if topk > 1, and take an expert_bias.

    qb_histogram: int32 [E, bins], to which the biases that each expert would need are added: for each token, the bias
    with which its score would equal the first choice score that is not chosen. qb_bin_bounds: float32 [2], the bounds
    of the bins, which have equal widths; the outer bins count what is beyond. qb_histogram_mode: "two_kernel" or
    "fused_atomic", which give the same counts. The three go together, with "sigmoid", an expert_bias and no groups.
    """
    balancing = (qb_histogram, qb_bin_bounds, qb_histogram_mode)
    counts = any([option is not None for option in balancing])
    if counts:
        check_quantile_balancing(
            logits,
            topk,
            *balancing,
            score_function=score_function,
            expert_bias=expert_bias,
            grouped=num_groups is not None or group_topk is not None,
        )
    softmax = score_function == "softmax"
    if expert_bias is not None and softmax:
        raise ValueError(
            "fused_topk_with_score_function: expert_bias is for score_function 'sigmoid' and 'sqrtsoftplus', got "
            "'softmax'; quire.moe.route takes one with any"
        )
    weights, ids = routing.route(
        logits,
        topk,
        score_function=score_function,
        softmax_after_topk=softmax and not use_pre_softmax,
        renormalize=not softmax and topk > 1,
        expert_bias=expert_bias,
        num_groups=num_groups if group_topk else None,
        group_topk=group_topk or None,
        scaling_factor=1.0 if scaling_factor is None else scaling_factor,
    )
    probs = torch.zeros_like(logits).scatter(-1, ids.long(), weights.to(logits.dtype))
    routing_output = _routing_of(ids, logits.shape[-1], routing_map_format, topk_indices)
    if counts:  # last: what raises above has counted nothing
        count_required_biases(qb_histogram, logits, topk, expert_bias, qb_bin_bounds)
    return probs, routing_output


def fused_compute_score_for_moe_aux_loss(
    logits: torch.Tensor,
    topk: int,
    score_function: str,
    routing_map_format: str | int = RoutingMapFormat.BYTEMAP,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(routing_map of the topk best scores, scores float32 [*, E] of sum 1, differentiable in logits)."""
    check_type("fused_compute_score_for_moe_aux_loss", torch.Tensor, logits=logits)
    _, ids = functional.route(logits.detach(), None, f"{score_function}:topk={topk}")
    routing_map = _routing_map(ids, logits.shape[-1], routing_map_format)
    return routing_map, routing.scores(logits, score_function)


@positional("coeff")
def fused_moe_aux_loss(
    probs: torch.Tensor,
    tokens_per_expert: torch.Tensor,
    total_num_tokens: int | torch.Tensor,
    num_experts: int,
    topk: int,
    *,
    coeff: float,
) -> torch.Tensor:
    """coeff * num_experts / (topk * total_num_tokens^2) * sum(probs.sum(0) * tokens_per_expert), a scalar in the dtype
    of probs [T, n * num_experts]; total_num_tokens may be a tensor. n > 1: a loss per sequence, summed."""
    check_type("fused_moe_aux_loss", torch.Tensor, probs=probs, tokens_per_expert=tokens_per_expert)
    check_type("fused_moe_aux_loss", int, num_experts=num_experts)
    if probs.dim() != 2 or num_experts < 1 or probs.shape[1] % num_experts:
        raise ValueError(
            f"fused_moe_aux_loss: probs must be [T, n * num_experts] for num_experts = {num_experts}, "
            f"got {list(probs.shape)}"
        )
    sequences = probs.shape[1] / num_experts
    loss = routing.load_balancing_loss(
        probs, tokens_per_expert, topk=topk, coeff=coeff / sequences, total_num_tokens=total_num_tokens
    )
    return loss.to(probs.dtype)


def _format(value: str | int) -> RoutingMapFormat:
    if isinstance(value, str | int) and value in _FORMATS:
        return _FORMATS[value]
    raise ValueError(f"routing_map_format must be 'bytemap' (0) or 'bitmap_u8' (1), got {value!r}")


def _routing_of(
    ids: torch.Tensor, num_experts: int, routing_map_format: str | int, topk_indices: torch.Tensor | None
) -> torch.Tensor:
    if topk_indices is None:
        return _routing_map(ids, num_experts, routing_map_format)
    if _format(routing_map_format) != RoutingMapFormat.BYTEMAP:
        raise ValueError(
            "fused_topk_with_score_function: topk_indices replace the routing map; leave routing_map_format out"
        )
    return topk_indices.copy_(ids)


def _routing_map(ids: torch.Tensor, num_experts: int, routing_map_format: str | int) -> torch.Tensor:
    chosen = torch.zeros(*ids.shape[:-1], num_experts, dtype=torch.bool, device=ids.device)
    chosen = chosen.scatter(-1, ids.long(), True)
    if _format(routing_map_format) == RoutingMapFormat.BYTEMAP:
        return chosen
    bits = torch.nn.functional.pad(chosen, (0, -num_experts % 8)).unflatten(-1, (-1, 8))
    values = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=ids.device)
    return (bits * values).sum(-1, dtype=torch.uint8)
