"""Options of quire.Linear: gradients that go elsewhere, other ways backward."""

import copy
import functools
import gc
import pickle

import pytest
import torch

import quire
from every_recipe import ALL, DELAYED, IN_ANY_PRECISION, every_recipe, ways
from pairwise import pairwise
from quire import recipe as recipes
from steps import same, step

pytestmark = pytest.mark.any_device


@pytest.fixture
def run(compiler):
    """(layer, function of x, x, recipe, compiled) -> y, dx, dw, db from the same random state."""

    def of_one_step(layer, function, x, recipe, compiled=False):
        layer.sr_state[1] = 0
        function = compiler(function) if compiled else function
        return step(layer, x, recipe, function=function, dx=x.requires_grad, backward_dw=False)

    return of_one_step


# ---------------------------------------------------------------- gradients of the weight


@pytest.mark.parametrize(
    ("recipe", "compiled", "dtype"), pairwise(list(IN_ANY_PRECISION), [False, True], [torch.float32, torch.bfloat16])
)
def test_main_grad_receives_the_gradient_that_autograd_would(
    recipe, compiled, dtype, run, make_layer, make_x, equal_bits
):
    recipe, x, plain = IN_ANY_PRECISION[recipe], make_x(33, 96), make_layer()
    fused = quire.Linear(96, 64, params_dtype=torch.bfloat16, fuse_wgrad_accumulation=True)
    fused.load_state_dict(plain.state_dict())
    fused.sr_state.copy_(plain.sr_state)
    fused.weight.main_grad = torch.ones(64, 96, dtype=dtype)
    expected = run(plain, plain, x, recipe)
    got = run(fused, fused, x, recipe, compiled)
    assert got[2] is None
    assert same(got[:2] + got[3:], expected[:2] + expected[3:])
    # Products are rounded to main_grad's dtype, autograd's to the dtype of the result: float32 has more bits.
    error = (fused.weight.main_grad.float() - 1 - expected[2].float()).abs()
    assert (error <= 2**-7 * (expected[2].float().abs() + 1)).all() and fused.weight.main_grad.count_nonzero() > 0
    if dtype == torch.bfloat16 and recipe is not DELAYED:  # whose scales are others now
        fused.weight.overwrite_main_grad = True
        run(fused, fused, x, recipe, compiled)
        assert equal_bits(fused.weight.main_grad, expected[2])


def test_the_first_microbatch_overwrites_main_grad_and_the_others_add(make_x):
    torch.manual_seed(0)
    layer = quire.Linear(96, 64, params_dtype=torch.bfloat16, fuse_wgrad_accumulation=True)
    layer.weight.main_grad = torch.full((64, 96), torch.nan)
    sums = []
    for first in (True, False, False):
        with quire.autocast(recipe=recipes.MXFP8BlockScaling()):
            layer(make_x(5, 96), is_first_microbatch=first).sum().backward()
        sums.append(layer.weight.main_grad.clone())
    assert sums[0].isfinite().all()
    torch.testing.assert_close(sums[2], 3 * sums[0])


@pytest.mark.parametrize(
    ("recipe", "kind", "compiled"),
    pairwise(["high_precision", "mxfp8", "delayed"], ["linear", "grouped"], [False, True]),
)
def test_a_delayed_gradient_of_the_first_microbatch_overwrites_main_grad_too(recipe, kind, compiled, compiler, make_x):
    recipe = IN_ANY_PRECISION[recipe]
    options = {"params_dtype": torch.bfloat16, "fuse_wgrad_accumulation": True}
    make = quire.Linear if kind == "linear" else functools.partial(quire.GroupedLinear, 1)
    torch.manual_seed(0)
    now = make(96, 64, **options)
    later = make(96, 64, delay_wgrad_compute=True, **options)
    later.load_state_dict(now.state_dict())
    later.sr_state.copy_(now.sr_state)
    more = () if kind == "linear" else ([5],)
    sums = {now: [], later: []}
    for layer in sums:
        (weight,) = (getattr(layer, name) for name in layer.weight_names)
        weight.main_grad = torch.full((64, 96), torch.nan)

        def call(x, first, layer=layer):
            return layer(x, *more, is_first_microbatch=first)

        function = compiler(call) if compiled else call
        for first in (True, False, None):
            with quire.autocast(enabled=recipe is not None, recipe=recipe):
                function(make_x(5, 96), first).sum().backward()
            if layer is later:
                layer.backward_dw()
            sums[layer].append(weight.main_grad.clone())
    assert all(torch.equal(a, b) for a, b in zip(sums[now], sums[later], strict=True))
    assert sums[later][0].isfinite().all() and not torch.equal(sums[later][0], sums[later][1])


@ways
def test_a_weight_that_hooks_wait_for_gets_zeros(compiled, compiler, make_x):
    layer = quire.Linear(96, 64, params_dtype=torch.bfloat16, fuse_wgrad_accumulation=True)
    layer.weight.main_grad = torch.zeros(64, 96)
    layer.weight.grad_added_to_main_grad = False
    called = []
    layer.weight.register_post_accumulate_grad_hook(lambda p: called.append(p.grad_added_to_main_grad))
    with quire.autocast():
        (compiler(layer) if compiled else layer)(make_x(5, 96)).sum().backward()
    assert called == [True] and not layer.weight.grad.any() and layer.weight.main_grad.any()


def test_fused_accumulation_without_main_grad_is_refused_in_words(make_x):
    layer = quire.Linear(96, 64, params_dtype=torch.bfloat16, fuse_wgrad_accumulation=True)
    with (
        quire.autocast(),
        pytest.raises(RuntimeError, match="needs weight.main_grad, a contiguous .* of weight's shape"),
    ):
        layer(make_x(5, 96))


@pytest.mark.parametrize(
    ("recipe", "compiled", "fused"), pairwise(list(IN_ANY_PRECISION), [False, True], [False, True])
)
def test_a_delayed_weight_gradient_is_computed_by_backward_dw(
    recipe, compiled, fused, run, make_layer, make_x, equal_bits
):
    recipe, plain, x = IN_ANY_PRECISION[recipe], make_layer(), make_x(33, 96)
    layer = quire.Linear(96, 64, params_dtype=torch.bfloat16, delay_wgrad_compute=True, fuse_wgrad_accumulation=fused)
    layer.load_state_dict(plain.state_dict())
    layer.sr_state.copy_(plain.sr_state)
    layer.weight.main_grad = torch.zeros(64, 96, dtype=torch.bfloat16)
    expected = run(plain, plain, x, recipe)
    got = run(layer, layer, x, recipe, compiled)
    assert got[2] is None and layer.need_backward_dw() and not plain.need_backward_dw()
    layer.backward_dw()
    assert equal_bits(layer.weight.main_grad if fused else layer.weight.grad, expected[2])
    with pytest.raises(RuntimeError, match="backward_dw: no backward pass has kept operands"):
        layer.backward_dw()


@ways
def test_gradients_go_elsewhere_in_high_precision_too(compiled, compiler, make_x, equal_bits):
    """Of a layer of two products, of ranks above two, and where the weight needs none."""
    torch.manual_seed(0)
    plain = quire.LayerNormMLP(96, 64, params_dtype=torch.bfloat16)
    fused = quire.LayerNormMLP(96, 64, params_dtype=torch.bfloat16, fuse_wgrad_accumulation=True)
    fused.load_state_dict(plain.state_dict())
    for weight in (fused.fc1_weight, fused.fc2_weight):
        weight.main_grad = torch.zeros(weight.shape, dtype=torch.bfloat16)
    x = make_x(3, 5, 96)
    results = [(compiler(layer) if compiled else layer)(x) for layer in (plain, fused)]
    for y in results:
        y.sum().backward()
    assert equal_bits(*results)
    for name in ("fc1_weight", "fc2_weight"):
        assert getattr(fused, name).grad is None
        assert equal_bits(getattr(fused, name).main_grad, getattr(plain, name).grad)
    assert equal_bits(fused.fc1_bias.grad, plain.fc1_bias.grad)
    fused.requires_grad_(False)
    assert not fused(x.detach()).requires_grad


@pytest.mark.cpu_only
def test_in_high_precision_dtypes_must_agree_where_gradients_go_elsewhere(make_x):
    layer = quire.Linear(96, 64, params_dtype=torch.float32, fuse_wgrad_accumulation=True)
    layer.weight.main_grad = torch.zeros(64, 96)
    with pytest.raises(TypeError, match="outside torch.autocast weight must have the dtype of x"):
        layer(make_x(5, 96))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(make_x(5, 96))
    y.sum().backward()
    assert y.dtype == torch.bfloat16 and layer.weight.main_grad.any()


def test_frameworks_learn_when_a_delayed_gradient_is_there(make_x):
    layers = [
        quire.Linear(96, 64, delay_wgrad_compute=True),
        quire.LayerNormMLP(96, 64, delay_wgrad_compute=True),
        quire.GroupedLinear(2, 96, 64, delay_wgrad_compute=True),
    ]
    for layer in layers:
        called, arguments = [], [[3, 2]] if hasattr(layer, "num_gemms") else []
        weights = [parameter for name, parameter in layer.named_parameters() if "weight" in name and "norm" not in name]
        marked = [parameter for parameter in layer.parameters() if hasattr(parameter, "skip_backward_post_hook")]
        assert len(weights) == len(marked) == len(layer.weight_names) and all(
            a is b for a, b in zip(weights, marked, strict=True)
        )
        layer.register_wgrad_accumulation_and_reduce_hooks(
            lambda weights=weights, called=called: called.append([weight.grad is not None for weight in weights])
        )
        layer(make_x(5, 96).float(), *arguments).sum().backward()
        assert not called
        layer.backward_dw()
        assert called == [[True] * len(weights)]
        with pytest.raises(RuntimeError, match="no backward pass has kept operands"):
            layer.backward_dw()
        assert len(called) == 1
    options = {"device": "meta", "delay_wgrad_compute": True}
    for made in (
        quire.Linear(96, 64, **options),
        quire.GroupedLinear(2, 96, 64, single_grouped_weight=True, **options),
    ):
        assert made.to_empty(device="cpu").weight.skip_backward_post_hook
        made.load_state_dict({name: t.detach().clone() for name, t in made.state_dict().items()}, assign=True)
        assert made.weight.skip_backward_post_hook
        made.weight = torch.nn.Parameter(made.weight.detach().clone())
        assert made.weight.skip_backward_post_hook
        assert copy.deepcopy(made).weight.skip_backward_post_hook
        assert pickle.loads(pickle.dumps(made)).weight.skip_backward_post_hook
    plain = quire.Linear(96, 64)
    plain.register_wgrad_accumulation_and_reduce_hooks(lambda: called.append("plain"))
    plain.backward_dw()
    assert len(called) == 1 and not hasattr(plain.weight, "skip_backward_post_hook")


def test_a_gradient_computed_later_is_not_made_on_the_default_device(make_x):
    layer = quire.Linear(96, 64, params_dtype=torch.bfloat16, delay_wgrad_compute=True)
    with quire.autocast():
        layer(make_x(5, 96)).sum().backward()
    with torch.device("meta"):
        layer.backward_dw()
    assert layer.weight.grad.device == layer.weight.device and layer.weight.grad.any()


def test_copies_of_a_layer_keep_their_own_operands(make_x):
    layer = quire.Linear(96, 64, params_dtype=torch.bfloat16, delay_wgrad_compute=True)
    with quire.autocast():
        layer(make_x(5, 96)).sum().backward()
    other = copy.deepcopy(layer)
    with pytest.raises(RuntimeError, match="no backward pass"):
        other.backward_dw()
    layer.backward_dw()
    assert layer.weight.grad.any()


def test_delayed_weight_gradients_do_not_replace_what_is_there(make_x):
    layer = quire.Linear(96, 64, params_dtype=torch.bfloat16, delay_wgrad_compute=True)
    grads = []
    for _ in range(2):
        with quire.autocast():
            layer(make_x(5, 96)).sum().backward()
        layer.backward_dw()
        grads.append(layer.weight.grad.clone())
    assert grads[0].any() and torch.equal(grads[1], 2 * grads[0])


def test_kept_operands_go_with_their_layer(make_x):
    layer = quire.Linear(96, 64, params_dtype=torch.bfloat16, delay_wgrad_compute=True)
    with quire.autocast():
        layer(make_x(5, 96)).sum().backward()
        layer(make_x(5, 96)).sum().backward()
    stash = layer.wgrad_stash.clone()
    assert torch.ops.quire.wgrad_take_(stash)[0]
    del layer
    gc.collect()
    assert torch.ops.quire.wgrad_take_(stash)[0] == []


# ---------------------------------------------------------------- what backward starts from


@pytest.mark.parametrize("name", ["fp8_current", "fp8_block", "mxfp8", "nvfp4"])
@ways
def test_a_kept_input_gives_the_same_bits(name, compiled, run, make_layer, make_x):
    plain, x = make_layer(), make_x(33, 96)
    layer = quire.Linear(96, 64, params_dtype=torch.bfloat16, save_original_input=True)
    layer.load_state_dict(plain.state_dict())
    layer.sr_state.copy_(plain.sr_state)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.data_ptr()) or t, lambda t: t):
        found = run(layer, layer, x, ALL[name], compiled)
    assert compiled or x.data_ptr() in kept
    assert same(found, run(plain, plain, x, ALL[name]))


def test_a_kept_input_under_delayed_scaling_is_refused_in_words(make_x):
    layer = quire.Linear(96, 64, params_dtype=torch.bfloat16, save_original_input=True)
    with quire.autocast(recipe=DELAYED), pytest.raises(ValueError, match="does not go with DelayedScaling"):
        layer(make_x(5, 96))


@pytest.mark.parametrize("kind", [recipes.Float8CurrentScaling, recipes.MXFP8BlockScaling, recipes.NVFP4BlockScaling])
@pytest.mark.parametrize("mode", ["high_precision", "dequantized"])
@ways
def test_backward_override(kind, mode, compiled, run, make_layer, make_x, equal_bits):
    layer, x, recipe = make_layer(), make_x(33, 96), kind(backward_override=mode)
    y, dx, dw, _ = run(layer, layer, x, recipe, compiled)
    with torch.no_grad(), quire.autocast(recipe=kind()):
        assert equal_bits(y, layer(x))
    a, b = x.detach(), layer.weight.detach()
    if mode == "dequantized":
        a, b = quire.quantize(a, recipe.input_spec).dequantize(), quire.quantize(b, recipe.weight_spec).dequantize()
    dy = torch.randn(33, 64, generator=torch.Generator().manual_seed(5)).bfloat16()
    assert equal_bits(dx, dy @ b) and equal_bits(dw, dy.t() @ a)


@every_recipe
@ways
def test_fp8_grad_rounds_dx_to_the_format_of_gradients(recipe, compiled, run, make_layer, make_x, equal_bits):
    layer, x = make_layer(), make_x(33, 96)
    other = copy.deepcopy(layer)
    plain = run(other, other, x, recipe)
    rounded = run(layer, lambda t: layer(t, fp8_grad=True), x, recipe, compiled)
    spec = recipe.linear_spec(fp8_grad=True).split("dx=")[1]
    expected = quire.quantize(plain[1], spec, scale=torch.ones(1) if recipe.delayed() else None).dequantize()
    assert equal_bits(rounded[1], expected)
    assert same(rounded[:1] + rounded[2:], plain[:1] + plain[2:])
    if recipe.delayed():
        assert layer.delayed.bwd_amax[1] == plain[1].abs().max()


def test_return_bias_and_init_method(make_x):
    layer = quire.Linear(96, 64, return_bias=True, init_method=torch.nn.init.ones_, name="proj")
    assert torch.equal(layer.weight, torch.ones(64, 96)) and not layer.bias.any() and layer.name == "proj"
    torch.nn.init.ones_(layer.bias)
    for enabled in (False, True):
        with quire.autocast(enabled):
            y, bias = layer(torch.ones(2, 96))
        assert bias is layer.bias and torch.equal(y, torch.full((2, 64), 96.0))
