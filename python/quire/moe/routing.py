"""Routing of tokens to experts, and balancing the loads of experts (moe-reference.md 1)."""

from typing import NamedTuple

import torch

from quire import functional
from quire.checks import check_type, check_type_or_none

SCORE_FUNCTIONS = ("softmax", "sigmoid", "sqrtsoftplus")


class Routing(NamedTuple):
    """The routing of the tokens by a quire.MoE that is called with return_routing=True, for losses and statistics.

    Attributes:
        logits: float32 [T, E], differentiable.
        topk_weights: float32 [T, top_k], 0 for a dropped entry.
        topk_ids: int32 [T, top_k], -1 for a dropped entry.
        tokens_per_expert: int32 [E], the loads that the router chose, which count entries that were dropped too.
    """

    logits: torch.Tensor
    topk_weights: torch.Tensor
    topk_ids: torch.Tensor
    tokens_per_expert: torch.Tensor


def route(
    logits: torch.Tensor,
    topk: int,
    *,
    score_function: str = "softmax",
    softmax_after_topk: bool = False,
    renormalize: bool = False,
    expert_bias: torch.Tensor | None = None,
    num_groups: int | None = None,
    group_topk: int | None = None,
    group_best: int | None = None,
    scaling_factor: float = 1.0,
    capacity: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(topk_weights float32 `[*, topk]`, topk_ids int32 `[*, topk]`) of logits `[*, E]`, the best expert first.

    Of equal scores the expert with the smaller index is first.

    Args:
        logits: float32, float16 or bfloat16, converted to float32; topk_weights have first derivatives in logits.
        topk: the number of experts of each token.
        score_function: "softmax" over the experts, or "sigmoid" or "sqrtsoftplus" of each logit.
        softmax_after_topk: experts are chosen by their logits, and the weights are the softmax of the chosen logits.
        renormalize: weights are divided by their sum.
        expert_bias: [E], float32, float16 or bfloat16, added to the scores only for the choice of experts. It has no
            gradient.
        num_groups: the number of equal groups of consecutive experts. The score of a group is the sum over its
            group_best best experts. None: there are no groups.
        group_topk: how many groups a token chooses from.
        group_best: how many of a group's best scores are summed. None: topk // group_topk.
        scaling_factor: multiplies the weights last.
        capacity: the number of entries that each expert accepts; limit_capacity() then drops the others. None: no entry
            is dropped. For a loss or an expert_bias that balances loads, leave it None, count the loads of these
            topk_ids, and call limit_capacity() afterwards.

    Raises:
        RuntimeError: if an argument does not fit.
        TypeError: if one has a wrong type.
    """
    check_type("route", torch.Tensor, logits=logits)
    check_type_or_none("route", torch.Tensor, expert_bias=expert_bias)
    check_type("route", int, topk=topk)
    if topk < 1:
        raise RuntimeError(f"route: topk must be from 1 to the number of experts, {logits.shape[-1]}, got {topk}")
    text = routing_text(
        topk,
        score_function=score_function,
        softmax_after_topk=softmax_after_topk,
        renormalize=renormalize,
        num_groups=num_groups,
        group_topk=group_topk,
        group_best=group_best,
        scaling_factor=scaling_factor,
    )
    weights, ids = functional.route(logits, expert_bias, text)
    return (weights, ids) if capacity is None else limit_capacity(weights, ids, logits.shape[-1], capacity)


def routing_text(
    topk: int,
    *,
    score_function: str = "softmax",
    softmax_after_topk: bool = False,
    renormalize: bool = False,
    num_groups: int | None = None,
    group_topk: int | None = None,
    group_best: int | None = None,
    scaling_factor: float = 1.0,
) -> str:
    """The options of route() as the operator's text, for a topk of at least 1. Raises its errors for values without a
    text."""
    numbers = {"topk": topk, "num_groups": num_groups, "group_topk": group_topk, "group_best": group_best}
    check_type_or_none("route", int, **numbers)
    check_type("route", float | int, scaling_factor=scaling_factor)
    # This would be an error about the operator's text, which the caller has not written.
    if score_function not in SCORE_FUNCTIONS:
        raise RuntimeError(f"route: score_function must be one of {SCORE_FUNCTIONS}, got {score_function!r}")
    options = [f"{name}={int(value)}" for name, value in numbers.items() if value is not None]
    options += ["after_topk"] * softmax_after_topk + ["renormalize"] * renormalize
    return ":".join([score_function, *options, f"scaling_factor={float(scaling_factor)}"])


def limit_capacity(
    topk_weights: torch.Tensor, topk_ids: torch.Tensor, num_experts: int, capacity: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(topk_weights, topk_ids) of the entries that experts accept: each accepts `capacity` entries, in token order.
    Further entries have the id -1 and the weight 0.

    The numbers
    that load_balancing_loss() and update_expert_bias_() need are the numbers of topk_ids before this call: an expert
    whose entries are dropped would otherwise seem to have no more load than the others.

    Args:
        topk_weights: float32 `[*, topk]`, those of `route`. Differentiable.
        topk_ids: int32 `[*, topk]`, those of `route`.
        num_experts: the number of experts.
        capacity: the number of entries that each expert accepts.

    Raises:
        RuntimeError: for ids or a capacity that do not fit.
        TypeError: for arguments of a wrong type.
    """
    check_type("limit_capacity", torch.Tensor, topk_weights=topk_weights, topk_ids=topk_ids)
    check_type("limit_capacity", int, num_experts=num_experts, capacity=capacity)
    if topk_weights.shape != topk_ids.shape:
        raise RuntimeError(
            "limit_capacity: topk_weights and topk_ids must have the same shape; got "
            f"{list(topk_weights.shape)} and {list(topk_ids.shape)}; pass both results of route()"
        )
    ids = functional.limit_capacity(topk_ids, num_experts, capacity)
    return torch.where(ids >= 0, topk_weights, 0.0), ids


def scores(logits: torch.Tensor, score_function: str = "softmax") -> torch.Tensor:
    """float32 scores `[*, E]` of logits `[*, E]`, divided by their sum, differentiable: for load_balancing_loss().

    Args:
        logits: `[*, E]`, float32, float16 or bfloat16.
        score_function: that of route().

    Raises:
        ValueError: for another one.
        TypeError: if logits is not a tensor.
    """
    check_type("scores", torch.Tensor, logits=logits)
    logits = logits.float()
    if score_function == "softmax":
        return logits.softmax(-1)
    if score_function == "sigmoid":
        values = logits.sigmoid()
    elif score_function == "sqrtsoftplus":
        values = torch.nn.functional.softplus(logits).sqrt()
    else:
        raise ValueError(f"scores: score_function must be one of {SCORE_FUNCTIONS}, got {score_function!r}")
    return values / (values.sum(-1, keepdim=True) + 1e-20)


def tokens_per_expert(topk_ids: torch.Tensor, num_experts: int) -> torch.Tensor:
    """int32 [num_experts]: the number of entries of topk_ids, int32 `[*, k]`, for each expert; -1 is not counted. To
    balance loads, pass ids before limit_capacity() has dropped any (or Routing.tokens_per_expert).

    Args:
        topk_ids: int32 `[*, k]`. -1 is not counted.
        num_experts: the number of experts.

    Raises:
        TypeError: for what is no tensor.
        RuntimeError: for ids that are not int32, on the CPU also for ids that are not experts.
    """
    check_type("tokens_per_expert", torch.Tensor, topk_ids=topk_ids)
    _, ends = functional.expert_rows(topk_ids.reshape(-1, 1), num_experts)
    return ends.diff(prepend=ends.new_zeros(1))


def load_balancing_loss(
    probs: torch.Tensor,
    tokens_per_expert: torch.Tensor,
    *,
    topk: int,
    coeff: float = 1.0,
    total_num_tokens: int | torch.Tensor | None = None,
) -> torch.Tensor:
    """coeff * E / (topk * T^2) * sum over e of tokens_per_expert[e] * sum over t of probs[t, e]: a float32 scalar. It
    is `coeff` when experts have equal loads, and larger when tokens prefer loaded experts. It is 0 if there are no
    tokens.

    Args:
        probs: [T, E]. Scores of all experts, differentiable.
        tokens_per_expert: [E]. The loads that the router chose, before entries are dropped (Routing.tokens_per_expert);
            treated as a constant. With loads after dropping, the loss would be smaller where more is dropped. For the
            loss over all ranks, sum it over ranks, and pass total_num_tokens (a number or a tensor, T by default) for
            all ranks too.
        topk: the number of experts of each token.
        coeff: the factor of the loss.
        total_num_tokens: the number of tokens of all ranks, an int or a tensor. None: T.

    Raises:
        ValueError: for other shapes.
        TypeError: for arguments that are not tensors.
    """
    check_type("load_balancing_loss", torch.Tensor, probs=probs, tokens_per_expert=tokens_per_expert)
    _check_loads("load_balancing_loss", tokens_per_expert, "probs", probs, 2)
    tokens = probs.shape[0] if total_num_tokens is None else total_num_tokens
    if not isinstance(tokens, torch.Tensor):
        tokens = torch.full((), tokens, dtype=torch.float32, device=probs.device)
    tokens = tokens.float().clamp(min=1)
    load = tokens_per_expert.detach().float() / tokens
    return (probs.float().sum(0) / tokens * load).sum() * (coeff * probs.shape[1] / topk)


def update_expert_bias_(expert_bias: torch.Tensor, tokens_per_expert: torch.Tensor, rate: float) -> torch.Tensor:
    """expert_bias += rate * sign(mean load - load), in place and outside of autograd: balances loads without a loss.

    Args:
        expert_bias: [E], floating-point. It is changed in place.
        tokens_per_expert: [E], integers. The loads that the router chose, before entries are dropped
            (Routing.tokens_per_expert), summed over all ranks.
        rate: the step.

    Returns:
        The tensor expert_bias.

    Raises:
        ValueError: for other shapes or dtypes.
        TypeError: for arguments that are not tensors.
    """
    check_type("update_expert_bias_", torch.Tensor, expert_bias=expert_bias, tokens_per_expert=tokens_per_expert)
    _check_loads("update_expert_bias_", tokens_per_expert, "expert_bias", expert_bias, 1)
    loads = tokens_per_expert.dtype
    if loads.is_floating_point or loads.is_complex or loads == torch.bool or not expert_bias.is_floating_point():
        raise ValueError(
            "update_expert_bias_: tokens_per_expert must hold integers, and expert_bias floating-point numbers; got "
            f"{loads} and {expert_bias.dtype}; convert them with .long() and .float()"
        )
    load = tokens_per_expert.long()
    with torch.no_grad():
        return expert_bias.add_(torch.sign(load.sum() - len(load) * load).to(expert_bias.dtype), alpha=rate)


def _check_loads(what: str, load: torch.Tensor, name: str, other: torch.Tensor, dimensions: int) -> None:
    if load.dim() != 1 or other.dim() != dimensions or load.shape[0] != other.shape[-1]:
        raise ValueError(
            f"{what}: tokens_per_expert must be [E] for {name} {'[T, E]' if dimensions == 2 else '[E]'}; got "
            f"{list(load.shape)} and {list(other.shape)}; use quire.moe.tokens_per_expert(topk_ids, num_experts)"
        )
