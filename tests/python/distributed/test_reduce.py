"""Sums over processes in float32, in the order of ranks (Parallel.reduce)."""

import itertools

import pytest
import torch

from python.distributed.reduce_ranks import (
    Case,
    adds_float32_in_the_order_of_ranks,
    leaves_sums_of_gradients_to_others,
    refuses_what_is_no_spec,
    sums_the_gradient_of_a_returned_bias,
)

#: Of a weight divided by rows y is a sum, by columns the gradient of x.
SHARDED = list(itertools.product(("column", "row"), (False, True)))


@pytest.mark.parametrize(("mode", "sequence"), SHARDED)
@pytest.mark.parametrize("reduce", ["float32", "mxfp8", "nvfp4", "fp8_tensor:e5m2"])
def test_results_of_ranks_are_added_in_float32(two, reduce, mode, sequence):
    for dtype in (torch.float32, torch.bfloat16):
        for tokens in ((64,), (14,), (2,), (0,), (6, 5), *(() if sequence else ((7,), (3, 11)))):
            two.run(adds_float32_in_the_order_of_ranks, Case(mode, reduce, sequence, tokens, dtype))


@pytest.mark.parametrize(("mode", "sequence"), SHARDED)
@pytest.mark.parametrize("reduce", ["float32", "mxfp8"])
def test_results_of_ranks_in_high_precision_are_added_in_float32(two, reduce, mode, sequence):
    for dtype, bias in ((torch.float32, True), (torch.bfloat16, False)):
        case = Case(mode, reduce, sequence, (14,), dtype, recipe=None, bias=bias)
        two.run(adds_float32_in_the_order_of_ranks, case)


@pytest.mark.parametrize(("mode", "sequence"), SHARDED)
@pytest.mark.parametrize("reduce", ["float32", "mxfp8"])
def test_results_of_ranks_are_added_in_float32_by_a_graph(two, reduce, mode, sequence):
    case = Case(mode, reduce, sequence, (14,), torch.bfloat16, compile=True)
    two.run(adds_float32_in_the_order_of_ranks, case)


def test_a_reduction_that_is_no_spec_is_refused(two):
    two.run(refuses_what_is_no_spec)


@pytest.mark.parametrize("tokens", [32, 7])
@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4", None])
def test_a_framework_can_sum_gradients_itself(two, recipe, tokens):
    for kind, mode in (("Linear", "row"), ("LayerNormLinear", "column"), ("LayerNormMLP", "column")):
        two.run(leaves_sums_of_gradients_to_others, kind, mode, recipe, tokens)


@pytest.mark.parametrize("way", ["eager", "compiled", "exact"])
@pytest.mark.parametrize("kind", ["Linear", "LayerNormMLP"])
def test_a_bias_that_is_returned_has_the_gradient_of_all_tokens(two, kind, way):
    for reduces in (True, False):
        two.run(sums_the_gradient_of_a_returned_bias, kind, reduces, way)
