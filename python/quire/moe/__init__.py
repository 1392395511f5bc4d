"""The parts of a mixture of experts: routing and permutation (docs/moe.md)."""

from quire.moe.permutation import Permuted, permute, unpermute
from quire.moe.routing import (
    Routing,
    limit_capacity,
    load_balancing_loss,
    route,
    scores,
    tokens_per_expert,
    update_expert_bias_,
)

__all__ = [
    "Permuted",
    "Routing",
    "limit_capacity",
    "load_balancing_loss",
    "permute",
    "route",
    "scores",
    "tokens_per_expert",
    "unpermute",
    "update_expert_bias_",
]
