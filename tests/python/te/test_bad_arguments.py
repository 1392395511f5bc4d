"""Arguments of a wrong kind for what only quire.te has: refused in words that say what was expected, or what to use."""

import pytest
import torch

from quire import te

X = torch.ones(4, 32)

# What is done, its exception, and words that must be in it, in that order.
CASES = {
    "a loss of no scores": (
        lambda: te.fused_moe_aux_loss([1.0], X, 4, 2, 1, coeff=1.0),
        TypeError,
        "fused_moe_aux_loss: probs must be a tensor, got [1.0]",
    ),
    "a loss of no experts": (
        lambda: te.fused_moe_aux_loss(X, X, 4, 0, 1, coeff=1.0),
        ValueError,
        "fused_moe_aux_loss: probs must be [T, n * num_experts] for num_experts = 0, got [4, 32]",
    ),
    "padding to nothing": (lambda: te.Fp8Padding(2, 0), ValueError, "align_size must be at least 1, or None"),
    "padding to a text": (lambda: te.Fp8Unpadding(2, "8"), TypeError, "align_size must be an int, got '8'"),
    "tensor parallelism of no group": (
        lambda: te.Linear(64, 32, tp_size=2),
        NotImplementedError,
        "Linear: tp_size=2 without tp_group is not available without parallel_mode; pass parallel_mode, and",
    ),
    "a function that quire has not": (
        lambda: te.parallel_cross_entropy,
        AttributeError,
        "not available: ... Use torch.nn.functional.cross_entropy",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_an_argument_of_a_wrong_kind_is_refused_in_words(name):
    act, error, words = CASES[name]
    with pytest.raises(error) as refused:
        act()
    text = " ".join(str(refused.value).split())
    for part in words.split(" ... "):
        assert part in text
        text = text.partition(part)[2]
