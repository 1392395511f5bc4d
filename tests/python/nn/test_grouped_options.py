"""Where gradients of quire.GroupedLinear's weights go, and x that is quantized as it is computed."""

import pytest
import torch

import quire
from every_recipe import params, some
from python.nn.grouped_layers import SPLITS, grouped, grouped_step, inputs
from quire.functional import activation, grouped_linear

FORMS = [
    pytest.param({}, id="separate"),
    pytest.param({"single_grouped_weight": True, "single_grouped_bias": True}, id="stacked"),
]


#: Of each kind of backward pass one.
KINDS = some("high_precision", "mxfp8", "nvfp4", "mxfp8_dequantized", "mxfp8_high_precision")


@pytest.fixture(params=params(KINDS))
def recipe(request):
    return request.param


@pytest.mark.parametrize("options", FORMS)
def test_gradients_are_added_to_main_grad(recipe, options, equal_bits):
    layer = grouped(fuse_wgrad_accumulation=True, **options)
    x, dy = inputs(SPLITS)
    plain = grouped(**options)
    plain.sr_state.copy_(layer.sr_state)
    wanted = grouped_step(plain, x, dy, SPLITS, recipe)
    for weight in layer.weights("").values():
        weight.main_grad = torch.full(weight.shape, 7.0, dtype=torch.float32)
        weight.overwrite_main_grad = True
    grouped_step(layer, x, dy, SPLITS, recipe)
    products = [weight.main_grad.clone() for weight in layer.weights("").values()]
    for weight, product, gradient in zip(layer.weights("").values(), products, wanted[2:], strict=False):
        assert equal_bits(product.bfloat16(), gradient)
        weight.main_grad.fill_(2.0)
        weight.overwrite_main_grad = False
    layer.sr_state[1] = 0
    ours = grouped_step(layer, x, dy, SPLITS, recipe)
    assert equal_bits(ours[0], wanted[0]) and equal_bits(ours[1], wanted[1])
    for weight, product in zip(layer.weights("").values(), products, strict=True):
        assert weight.grad is None and equal_bits(weight.main_grad, 2 + product)


@pytest.mark.parametrize("options", FORMS)
def test_delayed_weight_gradients_are_the_same(recipe, options, equal_bits):
    layer = grouped(delay_wgrad_compute=True, **options)
    x, dy = inputs(SPLITS)
    plain = grouped(**options)
    plain.sr_state.copy_(layer.sr_state)
    wanted = grouped_step(plain, x, dy, SPLITS, recipe)
    ours = grouped_step(layer, x, dy, SPLITS, recipe)
    assert all(weight.grad is None for weight in layer.weights("").values())
    layer.backward_dw()
    ours = [*ours[:2], *(getattr(layer, name).grad for name in (*layer.weight_names, *layer.bias_names))]
    assert all(equal_bits(a, b) for a, b in zip(ours, wanted, strict=True))
    with pytest.raises(RuntimeError, match="no backward pass has kept operands"):
        layer.backward_dw()


@pytest.mark.parametrize("name", ["swiglu", "gelu", "clamped_swiglu:limit=1.5"])
def test_a_result_that_is_quantized_for_groups_gives_the_same_bits(any_recipe, name, equal_bits):
    """activation() with offsets, and its buffers for grouped_linear(), against the same in two steps."""
    layer, recipe = grouped(), any_recipe
    text = recipe.linear_spec()
    offsets = torch.tensor(SPLITS).cumsum(0)
    h = torch.randn(sum(SPLITS) + 3, 192 if "glu" in name else 96).bfloat16().requires_grad_()
    dy = inputs(SPLITS)[1]
    weights, results = list(layer.weights("").values()), []
    for fused in (True, False):
        layer.zero_grad()
        h.grad = None
        state = {"sr_state": torch.tensor([5, 0])}
        if fused:
            options = {"spec": recipe.input_spec, "rowwise": True, "columnwise": True}
            a, state["x_buffers"] = activation(h, name, h.dtype, offsets=offsets, **options)
            assert a.untyped_storage().nbytes() == 2  # a carrier, which holds nothing
        else:
            a, _ = activation(h, name, h.dtype)
        y, *_ = grouped_linear(a, weights, [], offsets, text, dtype=h.dtype, **state)
        y.backward(dy)
        assert not h.grad[sum(SPLITS) :].count_nonzero()  # +0 with offsets, zeros of either sign without
        results.append([y.detach(), h.grad[: sum(SPLITS)], *(weight.grad for weight in weights)])
    assert all(equal_bits(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("options", [{"single_grouped_bias": True}, {"ep_group": "ep", "single_grouped_weight": True}])
def test_stacked_parameters_that_cannot_be_sharded_are_refused_with_the_options_that_exclude_each_other(options):
    words = (
        "^quire.GroupedLinear: with parallel, single_grouped_weight does not go with an ep_group, nor "
        "single_grouped_bias with bias=True; leave"
    )
    with pytest.raises(NotImplementedError, match=words):
        quire.GroupedLinear(2, 64, 64, parallel=quire.distributed.Parallel("column", None, size=2), **options)
