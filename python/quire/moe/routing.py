"""Routing of tokens to experts, and balancing the loads of experts (moe-reference.md 1)."""

from typing import NamedTuple

import torch

from quire import functional
from quire.checks import check_dense, check_type, check_type_or_none, describe
from quire.tensor import DTYPES

SCORE_FUNCTIONS = ("softmax", "sigmoid", "sqrtsoftplus")
_LARGEST = torch.finfo(torch.float32).max


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
    num_experts: int | None = None,
) -> str:
    """The options of route() as the operator's text, for a topk of at least 1. Raises its errors.

    num_experts: for the errors that the operator raises when it sees the logits. None: leave them to it.
    """
    numbers = {"topk": topk, "num_groups": num_groups, "group_topk": group_topk, "group_best": group_best}
    check_type_or_none("route", int, **numbers)
    check_type("route", bool, softmax_after_topk=softmax_after_topk, renormalize=renormalize)
    check_type("route", float | int, scaling_factor=scaling_factor)
    # These would be errors about the operator's text, which the caller has not written.
    if score_function not in SCORE_FUNCTIONS:
        raise RuntimeError(f"route: score_function must be one of {SCORE_FUNCTIONS}, got {score_function!r}")
    if softmax_after_topk and score_function != "softmax":
        raise RuntimeError(
            f"route: softmax_after_topk is for softmax, got {score_function!r}, which scores each expert alone; leave "
            "it out"
        )
    if softmax_after_topk and renormalize:
        raise RuntimeError(
            "route: renormalize has nothing to do after softmax_after_topk, whose weights have sum 1; leave one of "
            "them out"
        )
    if not 0 <= scaling_factor <= _LARGEST:
        raise RuntimeError(
            "route: scaling_factor must be finite in float32 and not negative, got "
            f"{describe(scaling_factor)}; pass 1.0 for none"
        )
    if num_groups is not None or group_topk is not None or group_best is not None:
        _check_groups(topk, num_groups, group_topk, group_best, num_experts)
    options = [f"{name}={int(value)}" for name, value in numbers.items() if value is not None]
    options += ["after_topk"] * softmax_after_topk + ["renormalize"] * renormalize
    return ":".join([score_function, *options, f"scaling_factor={float(scaling_factor)}"])


def _check_groups(
    topk: int, num_groups: int | None, group_topk: int | None, group_best: int | None, num_experts: int | None
) -> None:
    if num_groups is None and group_topk is None:
        raise RuntimeError(f"route: group_best is for groups; pass num_groups and group_topk too, got {group_best}")
    if num_groups is None or group_topk is None:
        raise RuntimeError(
            f"route: num_groups and group_topk belong together, got {num_groups} and {group_topk}; pass both or none"
        )
    for name, value in (("num_groups", num_groups), ("group_topk", group_topk), ("group_best", group_best)):
        if value is not None and value < 1:
            raise RuntimeError(f"route: {name} must be at least 1 or None, got {value}")
    if group_topk > num_groups:
        raise RuntimeError(f"route: group_topk must not exceed num_groups = {num_groups}, got {group_topk}")
    if group_best is None and topk < group_topk:
        raise RuntimeError(
            f"route: group_best would be topk // group_topk = {topk} // {group_topk} = 0; pass group_best"
        )
    if num_experts is None:
        return
    if num_experts % num_groups:
        raise RuntimeError(f"route: num_groups must divide the number of experts, {num_experts}, got {num_groups}")
    size, best = num_experts // num_groups, topk // group_topk if group_best is None else group_best
    if best > size:
        raise RuntimeError(f"route: group_best must not exceed the experts of a group, {size}, got {best}")
    if topk > group_topk * size:
        raise RuntimeError(
            f"route: topk must not exceed the experts of group_topk groups, {group_topk} * {size}, got {topk}"
        )


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
        RuntimeError: for weights, ids or a capacity that do not fit.
        TypeError: for arguments of a wrong type.
    """
    check_type("limit_capacity", torch.Tensor, topk_weights=topk_weights, topk_ids=topk_ids)
    check_type("limit_capacity", int, num_experts=num_experts, capacity=capacity)
    if topk_weights.shape != topk_ids.shape:
        raise RuntimeError(
            "limit_capacity: topk_weights and topk_ids must have the same shape; got "
            f"{list(topk_weights.shape)} and {list(topk_ids.shape)}; pass both results of route()"
        )
    if topk_weights.dtype != torch.float32:
        raise RuntimeError(
            f"limit_capacity: topk_weights must be float32, got {topk_weights.dtype}; pass both results of route()"
        )
    if topk_weights.device != topk_ids.device:
        raise RuntimeError(
            f"limit_capacity: topk_weights and topk_ids must be on one device, got {topk_weights.device} and "
            f"{topk_ids.device}; move one with .to(device)"
        )
    ids = functional.limit_capacity(topk_ids, num_experts, capacity)
    return torch.where(ids >= 0, topk_weights, 0.0), ids


def scores(logits: torch.Tensor, score_function: str = "softmax") -> torch.Tensor:
    """float32 scores `[*, E]` of logits `[*, E]`, divided by their sum, differentiable: for load_balancing_loss().

    Args:
        logits: `[*, E]`, float32, float16 or bfloat16.
        score_function: that of route().

    Raises:
        ValueError: for another score_function, and for logits without a dimension.
        TypeError: if logits is not a dense tensor of such a dtype.
    """
    check_type("scores", torch.Tensor, logits=logits)
    check_dense("scores", logits=logits)
    if logits.dtype not in DTYPES:
        raise TypeError(
            f"scores: logits must be float32, float16 or bfloat16, got {logits.dtype}; convert them with .float()"
        )
    if logits.dim() == 0:
        raise ValueError("scores: logits must have at least 1 dimension, got a scalar; use .reshape(1)")
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
        TypeError: for topk_ids that is no tensor, or num_experts that is no int.
        RuntimeError: for ids that are not int32, on the CPU also for ids that are not experts.
    """
    check_type("tokens_per_expert", torch.Tensor, topk_ids=topk_ids)
    check_type("tokens_per_expert", int, num_experts=num_experts)
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
        topk: the number of experts of each token, from 1 to E.
        coeff: the factor of the loss.
        total_num_tokens: the number of tokens of all ranks, an int or a tensor. None: T.

    Raises:
        ValueError: for other shapes, dtypes or devices, and for numbers out of range.
        TypeError: for arguments of another type.
    """
    what = "load_balancing_loss"
    check_type(what, torch.Tensor, probs=probs, tokens_per_expert=tokens_per_expert)
    check_type(what, int, topk=topk)
    check_type(what, float | int, coeff=coeff)
    check_type_or_none(what, int | torch.SymInt | torch.Tensor, total_num_tokens=total_num_tokens)
    _check_loads(what, tokens_per_expert, "probs", probs, 2)
    if not probs.is_floating_point():
        raise ValueError(f"{what}: probs must be floating-point, got {probs.dtype}; pass quire.moe.scores(logits)")
    if not 1 <= topk <= probs.shape[1]:
        raise ValueError(f"{what}: topk must be from 1 to the number of experts, {probs.shape[1]}, got {topk}")
    if not abs(coeff) <= _LARGEST:
        raise ValueError(f"{what}: coeff must be finite, got {describe(coeff)}")
    tokens = _tokens(what, probs.shape[0] if total_num_tokens is None else total_num_tokens, probs)
    load = tokens_per_expert.detach().float() / tokens
    return (probs.float().sum(0) / tokens * load).sum() * (coeff * probs.shape[1] / topk)


def _tokens(what: str, total: int | torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
    """The number of tokens, at least 1, as float32. Of a rank whose rows are padding it may be less than rows of
    probs."""
    if isinstance(total, torch.Tensor):
        if total.numel() != 1 or total.is_complex() or total.dtype == torch.bool:
            raise ValueError(
                f"{what}: total_num_tokens must be one number, got {total.dtype} {list(total.shape)}; sum the numbers "
                "of all ranks"
            )
        if total.is_meta and not probs.is_meta:
            raise ValueError(f"{what}: total_num_tokens must have a value, got a tensor on meta; pass an int")
        return total.float().reshape(()).clamp(min=1)
    # A graph may not know the number yet. All rows may be padding.
    if not torch.compiler.is_compiling() and isinstance(total, int) and total < 0:
        raise ValueError(
            f"{what}: total_num_tokens must be at least 0, got {total}; leave it None for the {probs.shape[0]} tokens "
            "of probs"
        )
    return torch.full((), total, dtype=torch.float32, device=probs.device).clamp(min=1)


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
        ValueError: for other shapes, dtypes or devices, and for a rate that is not finite in expert_bias.dtype. The
            bias is then unchanged.
        TypeError: for arguments of another type.
    """
    what = "update_expert_bias_"
    check_type(what, torch.Tensor, expert_bias=expert_bias, tokens_per_expert=tokens_per_expert)
    check_type(what, float | int, rate=rate)
    _check_loads(what, tokens_per_expert, "expert_bias", expert_bias, 1)
    loads = tokens_per_expert.dtype
    if loads.is_floating_point or not expert_bias.is_floating_point():
        raise ValueError(
            f"{what}: tokens_per_expert must hold integers, and expert_bias floating-point numbers; got {loads} and "
            f"{expert_bias.dtype}; convert them with .long() and .float()"
        )
    if not abs(rate) <= torch.finfo(expert_bias.dtype).max:
        raise ValueError(f"{what}: rate must be finite in {expert_bias.dtype}, got {describe(rate)}")
    load = tokens_per_expert.long()
    with torch.no_grad():
        return expert_bias.add_(torch.sign(load.sum() - len(load) * load).to(expert_bias.dtype), alpha=rate)


def _check_loads(what: str, load: torch.Tensor, name: str, other: torch.Tensor, dimensions: int) -> None:
    check_dense(what, **{name: other, "tokens_per_expert": load})
    if load.dim() != 1 or other.dim() != dimensions or load.shape[0] != other.shape[-1]:
        raise ValueError(
            f"{what}: tokens_per_expert must be [E] for {name} {'[T, E]' if dimensions == 2 else '[E]'}; got "
            f"{list(load.shape)} and {list(other.shape)}; use quire.moe.tokens_per_expert(topk_ids, num_experts)"
        )
    if load.is_complex() or load.dtype == torch.bool:
        raise ValueError(f"{what}: tokens_per_expert must hold numbers, got {load.dtype}; convert it with .long()")
    if load.device != other.device:
        raise ValueError(
            f"{what}: tokens_per_expert and {name} must be on one device; got {load.device} and {other.device}; move "
            "one with .to(device)"
        )
