"""quire.GroupedLinear.forward(out=, dgrad_out=): memory of the caller's for y and dx."""

import pytest
import torch
from torch._dynamo.decorators import mark_unbacked

import quire
from every_recipe import DELAYED, IN_ANY_PRECISION, some, ways
from pairwise import pairwise
from python.nn.grouped_layers import SPLITS, grouped, grouped_step, inputs
from quire.recipe import Float8CurrentScaling, MXFP8BlockScaling

FORMS = {
    "separate": {},
    "stacked": {"single_grouped_weight": True, "single_grouped_bias": True},
    "main_grad": {"fuse_wgrad_accumulation": True},
}
#: Beside every class, backward passes of x and w themselves, and of values of codes.
RECIPES = IN_ANY_PRECISION | some("mxfp8_high_precision", "mxfp8_dequantized")


def compiled_for_few(compiled, options, recipe):
    return not compiled or recipe in ("high_precision", "nvfp4", "delayed", "mxfp8_dequantized")


def memory(rows, width, dtype=torch.bfloat16):
    return torch.full((rows, width), float("nan"), dtype=dtype)


def halves(t):
    """The rows that belong to groups, and those behind them."""
    return t.flatten(0, -2).split([sum(SPLITS), t.shape[:-1].numel() - sum(SPLITS)])


def with_main_grads(layer):
    for weight in layer.weights("").values():
        weight.main_grad = torch.zeros(weight.shape)
    return layer


@pytest.mark.parametrize(
    ("compiled", "options", "recipe"), pairwise([False, True], list(FORMS), list(RECIPES), allowed=compiled_for_few)
)
def test_results_are_there_and_have_the_same_bits(compiled, options, recipe, compiler, equal_bits):
    options, recipe = FORMS[options], RECIPES[recipe]
    x, dy = inputs(SPLITS)
    out, dgrad_out = memory(len(x), 64), memory(len(x), 96)
    runs = []
    for given in ({}, {"out": out, "dgrad_out": dgrad_out}):
        layer = with_main_grads(grouped(**options))
        layer.sr_state.copy_(torch.tensor([5, 0]))
        function = compiler(layer) if compiled and given else layer
        runs.append([])
        for scale in (1, 40):  # the same memory in every step
            y, dx, *others = grouped_step(layer, x * scale, dy, SPLITS, recipe, function=function, **given)
            assert not dx[sum(SPLITS) :].any()
            runs[-1] += [halves(y)[0].clone(), dx.clone(), *(g if g is None else g.clone() for g in others)]
            runs[-1] += [weight.main_grad.clone() for weight in layer.weights("").values()]
            if given:
                assert equal_bits(out, y) and equal_bits(halves(dgrad_out)[0], halves(dx)[0])
                before = memory(3, 1) if scale == 1 else torch.full((3, 1), 7.0, dtype=x.dtype)
                assert equal_bits(halves(out)[1], before.expand(3, 64))
                assert equal_bits(halves(dgrad_out)[1], before.expand(3, 96))
                assert not out.requires_grad and out.grad_fn is None
                assert (y.data_ptr() == out.data_ptr()) != compiled
                out.fill_(7), dgrad_out.fill_(7)
    for ours, wanted in zip(runs[1], runs[0], strict=True):
        assert (ours is None and wanted is None) or equal_bits(ours, wanted)
    assert compiler.graphs == int(compiled)


@ways
def test_a_gradient_that_is_rounded_is_there_too(compiled, compiler, equal_bits):
    layer, ends = grouped(), torch.tensor(SPLITS).cumsum(0)
    text = Float8CurrentScaling().linear_spec(fp8_grad=True)
    x, dy = inputs(SPLITS)
    weights, results = list(layer.weights("").values()), []
    for given in ({}, {"dgrad_out": memory(len(x), 96)}):
        leaf = x.clone().requires_grad_()

        def product(leaf, given=given):
            return quire.functional.grouped_linear(leaf, weights, [], ends, text, dtype=leaf.dtype, **given)[0]

        (compiler(product) if compiled else product)(leaf).backward(dy)
        results += [leaf.grad, *given.values()]
    assert equal_bits(results[0], results[1]) and equal_bits(halves(results[0])[0], halves(results[2])[0])
    assert halves(results[2])[1].isnan().all()


@pytest.mark.parametrize(("recipe", "compiled"), [*((name, False) for name in IN_ANY_PRECISION), ("nvfp4", True)])
def test_without_gradients_and_with_other_shapes(recipe, compiled, compiler, equal_bits):
    recipe = IN_ANY_PRECISION[recipe]
    layer, x = grouped(), inputs(SPLITS, beyond=3)[0].view(5, 38, 96)
    function = compiler(layer) if compiled else layer
    for shape in ((5, 38, 64), (190, 64)):
        out, dgrad_out = memory(*shape[:-1], 64) if len(shape) == 2 else memory(190, 64).view(shape), memory(190, 96)
        with quire.autocast(enabled=recipe is not None, recipe=recipe), torch.no_grad():
            y = function(x, torch.tensor(SPLITS), out=out, dgrad_out=dgrad_out)
            assert equal_bits(halves(y)[0], halves(layer(x, torch.tensor(SPLITS)))[0])
        assert equal_bits(out.view(y.shape), y) and halves(y)[1].isnan().all() and dgrad_out.isnan().all()
        own = x.clone().requires_grad_()
        with quire.autocast(enabled=recipe is not None, recipe=recipe):
            function(own, torch.tensor(SPLITS), out=out, dgrad_out=dgrad_out).sum().backward()
        assert own.grad.shape == x.shape and equal_bits(halves(dgrad_out)[0], halves(own.grad)[0])
        assert halves(dgrad_out)[1].isnan().all() and not halves(own.grad)[1].any()


def test_memory_has_dx_of_this_product_alone_and_gradients_add_up(equal_bits):
    layer, recipe = grouped(), MXFP8BlockScaling()
    x, dy = inputs(SPLITS)
    expected = grouped_step(layer, x, dy, SPLITS, recipe)[1]
    leaf, dgrad_out = x.clone().requires_grad_(), memory(len(x), 96)
    for _ in range(2):  # x.grad must not become the memory, which is written again
        with quire.autocast(recipe=recipe):
            y = layer(leaf, SPLITS, dgrad_out=dgrad_out)
        torch.autograd.backward([y, leaf], [dy, torch.ones_like(x)])
        assert equal_bits(halves(dgrad_out)[0], halves(expected)[0])
    assert equal_bits(leaf.grad, (expected + 1) * 2)


def test_memory_is_left_alone_where_x_needs_no_gradient(recipe):
    layer = grouped()
    x, dy = inputs(SPLITS)
    dgrad_out = memory(len(x), 96)
    with quire.autocast(recipe=recipe):
        layer(x, SPLITS, dgrad_out=dgrad_out).backward(dy)
    assert dgrad_out.isnan().all() and layer.weight0.grad.any()


def test_a_result_that_backward_needs_is_not_overwritten_unnoticed():
    layer, (x, dy) = grouped(), inputs(SPLITS, beyond=0)
    out = memory(len(x), 64)
    y = layer(x, SPLITS, out=out)
    squared = y * y
    layer(x, SPLITS, out=out)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        squared.backward(dy)


def test_what_saved_the_memory_for_its_backward_finds_it_changed():
    layer, out = grouped(), torch.zeros(sum(SPLITS), 64, dtype=torch.bfloat16)
    x = inputs(SPLITS, beyond=0)[0]
    factor = torch.ones_like(out, requires_grad=True)
    for grad in (False, True):
        earlier = factor * out
        with torch.set_grad_enabled(grad):
            layer(x, SPLITS, out=out)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            earlier.sum().backward()


def test_one_graph_for_every_number_of_rows(compiler, equal_bits):
    layer, recipe = grouped(), MXFP8BlockScaling()
    compiled = compiler(layer)
    for splits in (SPLITS, [0] * 6, [0, 1, 0, 0, 0, 0], [9, 8, 7, 6, 5, 4]):
        x, dy = inputs(splits, beyond=0)
        expected = grouped_step(layer, x, dy, splits, recipe)
        out, dgrad_out = memory(len(x), 64), memory(len(x), 96)

        def call(x, m_splits, out=out, dgrad_out=dgrad_out):
            for tensor in (x, out, dgrad_out):
                mark_unbacked(tensor, 0)
            return compiled(x, m_splits, out=out, dgrad_out=dgrad_out)

        ours = grouped_step(layer, x, dy, splits, recipe, function=call)
        assert all(equal_bits(a, b) for a, b in zip([*ours, out, dgrad_out], [*expected, *expected[:2]], strict=True))
    assert compiler.graphs == 1


WRONG = {
    "shape": (lambda x: {"out": memory(8, 63)}, r"out must be \[8, 64\](, or \[8, 64\])?, got \[8, 63\]"),
    "rows": (lambda x: {"dgrad_out": memory(7, 96)}, r"dgrad_out must be \[8, 96\](, or \[8, 96\])?, got \[7, 96\]"),
    "dtype": (lambda x: {"out": memory(8, 64).float()}, "out must be contiguous BFloat16 on cpu.*got Float"),
    "strides": (lambda x: {"out": memory(64, 8).t()}, "out must be contiguous .* got not contiguous"),
    "device": (lambda x: {"dgrad_out": memory(8, 96).to("meta")}, "one device|on cpu.*meta"),
    "gradient": (lambda x: {"out": memory(8, 64).requires_grad_()}, "out is written and gets no gradient; pass it det"),
    "gradient of dx": (lambda x: {"dgrad_out": memory(8, 96).requires_grad_()}, "dgrad_out must not require a gradi"),
    "x": (lambda x: {"dgrad_out": x.detach()}, "dgrad_out shares memory with another argument"),
    "each other": (lambda x: dict(zip(("out", "dgrad_out"), shared(x), strict=True)), "out shares memory with another"),
}


def shared(x):
    base = torch.full((8 * 96,), float("nan"), dtype=x.dtype)
    return base[: 8 * 64].view(8, 64), base.view(8, 96)


@pytest.mark.parametrize(
    ("given", "message", "error"),
    [(*wrong, ValueError if name in ("shape", "rows") else RuntimeError) for name, wrong in WRONG.items()],
    ids=WRONG,
)
@pytest.mark.parametrize("recipe", [None, DELAYED], ids=["high_precision", "delayed"])
def test_memory_that_does_not_fit_is_refused_before_anything_is_written(recipe, given, message, error):
    layer = grouped([4, 4])
    x = inputs([8], beyond=0)[0].requires_grad_()
    before = x.detach().clone()
    given = given(x)
    with quire.autocast(enabled=recipe is not None, recipe=recipe), pytest.raises(error, match=message):
        layer(x, [4, 4], **given)
    assert torch.equal(x.detach(), before) and not layer.delayed.fwd_amax.any()
    assert all(t.is_meta or t.isnan().all() or torch.equal(t, before) for t in (g.detach() for g in given.values()))


def test_other_kinds_of_memory_are_refused(recipe):
    layer, x = grouped([4, 4]), inputs([8], beyond=0)[0]
    with pytest.raises(TypeError, match="out must be a tensor, got"):
        layer(x, [4, 4], out=[])
    weight = layer.weight0.detach()
    with pytest.raises(RuntimeError, match="dgrad_out shares memory with another argument"):
        quire.GroupedLinear.forward(layer, weight[:8], [4, 4], dgrad_out=weight[4:12])
