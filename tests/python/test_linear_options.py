"""Options of quire.Linear: quantized inputs and outputs, gradients that go elsewhere, other ways backward."""

import copy
import functools
import gc

import pytest
import torch

import quire
from quire import recipe as recipes

DELAYED = recipes.DelayedScaling(amax_history_len=4)
ALL = {
    "fp8_current": recipes.Float8CurrentScaling(),
    "fp8_block": recipes.Float8BlockScaling(),
    "mxfp8": recipes.MXFP8BlockScaling(),
    "nvfp4": recipes.NVFP4BlockScaling(),
    "delayed": DELAYED,
}
every_recipe = pytest.mark.parametrize("recipe", ALL.values(), ids=ALL)
in_any_precision = pytest.mark.parametrize("recipe", [None, *ALL.values()], ids=["high_precision", *ALL])
ways = pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])


@pytest.fixture
def run(compiler):
    """(layer, function of x, x, recipe, compiled) -> y, dx, dw, db from the same random state."""

    def step(layer, function, x, recipe, compiled=False):
        layer.zero_grad()
        layer.sr_state[1] = 0
        x = x.detach().requires_grad_(x.requires_grad)
        with quire.autocast(enabled=recipe is not None, recipe=recipe):
            y = (compiler(function) if compiled else function)(x)
        y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(5)).to(y.dtype))
        return [y.detach(), x.grad, layer.weight.grad, layer.bias.grad]

    return step


def assert_same(a, b, equal_bits):
    for left, right in zip(a, b, strict=True):
        assert (left is None and right is None) or equal_bits(left, right)


# ---------------------------------------------------------------- gradients of the weight


@in_any_precision
@ways
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_main_grad_receives_the_gradient_that_autograd_would(
    recipe, compiled, dtype, run, make_layer, make_x, equal_bits
):
    x, plain = make_x(33, 96), make_layer()
    fused = quire.Linear(96, 64, params_dtype=torch.bfloat16, fuse_wgrad_accumulation=True)
    fused.load_state_dict(plain.state_dict())
    fused.sr_state.copy_(plain.sr_state)
    fused.weight.main_grad = torch.ones(64, 96, dtype=dtype)
    expected = run(plain, plain, x, recipe)
    got = run(fused, fused, x, recipe, compiled)
    assert got[2] is None
    assert_same(got[:2] + got[3:], expected[:2] + expected[3:], equal_bits)
    # Products are rounded to main_grad's dtype, autograd's to the dtype of the result: float32 has more bits.
    error = (fused.weight.main_grad.float() - 1 - expected[2].float()).abs()
    assert (error <= 2**-7 * (expected[2].float().abs() + 1)).all() and fused.weight.main_grad.count_nonzero() > 0
    if dtype == torch.bfloat16 and recipe is not DELAYED:  # whose scales are others now
        fused.weight.overwrite_main_grad = True
        run(fused, fused, x, recipe, compiled)
        assert equal_bits(fused.weight.main_grad, expected[2])


def test_the_first_microbatch_overwrites_main_grad_and_the_others_add(make_x, equal_bits):
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


@ways
@pytest.mark.parametrize("kind", ["linear", "grouped"])
@pytest.mark.parametrize("recipe", [None, ALL["mxfp8"], DELAYED], ids=["high_precision", "mxfp8", "delayed"])
def test_a_delayed_gradient_of_the_first_microbatch_overwrites_main_grad_too(recipe, kind, compiled, compiler, make_x):
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


@in_any_precision
@ways
@pytest.mark.parametrize("fused", [False, True])
def test_a_delayed_weight_gradient_is_computed_by_backward_dw(
    recipe, compiled, fused, run, make_layer, make_x, equal_bits
):
    plain, x = make_layer(), make_x(33, 96)
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


def test_in_high_precision_dtypes_must_agree_where_gradients_go_elsewhere(make_x):
    layer = quire.Linear(96, 64, params_dtype=torch.float32, fuse_wgrad_accumulation=True)
    layer.weight.main_grad = torch.zeros(64, 96)
    with pytest.raises(TypeError, match="outside torch.autocast weight must have the dtype of x"):
        layer(make_x(5, 96))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(make_x(5, 96))
    y.sum().backward()
    assert y.dtype == torch.bfloat16 and layer.weight.main_grad.any()


def test_copies_of_a_layer_keep_their_own_operands(make_x):
    layer = quire.Linear(96, 64, params_dtype=torch.bfloat16, delay_wgrad_compute=True)
    with quire.autocast():
        layer(make_x(5, 96)).sum().backward()
    other = copy.deepcopy(layer)
    with pytest.raises(RuntimeError, match="no backward pass"):
        other.backward_dw()
    layer.backward_dw()
    assert layer.weight.grad.any()


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
def test_a_kept_input_gives_the_same_bits(name, compiled, run, make_layer, make_x, equal_bits):
    plain, x = make_layer(), make_x(33, 96)
    layer = quire.Linear(96, 64, params_dtype=torch.bfloat16, save_original_input=True)
    layer.load_state_dict(plain.state_dict())
    layer.sr_state.copy_(plain.sr_state)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.data_ptr()) or t, lambda t: t):
        found = run(layer, layer, x, ALL[name], compiled)
    assert compiled or x.data_ptr() in kept
    assert_same(found, run(plain, plain, x, ALL[name]), equal_bits)


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
    assert_same(rounded[:1] + rounded[2:], plain[:1] + plain[2:], equal_bits)
    if recipe.delayed():
        assert layer.delayed.bwd_amax[1] == plain[1].abs().max()


# ---------------------------------------------------------------- quantized inputs and outputs


@every_recipe
@pytest.mark.parametrize("grad", [False, True])
def test_a_quantized_input_gives_the_bits_of_a_plain_one(recipe, grad, make_layer, make_x, equal_bits):
    original, x = make_layer(), make_x(33, 96, requires_grad=grad)
    scale = torch.ones(1) if recipe.delayed() else None
    results = []
    for quantized in (False, True):
        layer = copy.deepcopy(original)
        leaf = x.detach().requires_grad_(grad)
        q = quire.quantize(leaf, recipe.input_spec, columnwise=True, scale=scale) if quantized else leaf
        if quantized:
            assert isinstance(q, quire.QuantizedActivation if grad else quire.QuantizedTensor)
        with quire.autocast(recipe=recipe):
            y = layer(q)
        y.sum().backward()
        results.append([y.detach(), leaf.grad, layer.weight.grad])
    assert_same(*results, equal_bits)


@ways
def test_delayed_scaling_of_a_quantized_input_moves_the_other_slots(compiled, compiler, make_layer, make_x):
    layer, x = make_layer(), make_x(33, 96)
    function = compiler(layer) if compiled else layer
    for _ in range(2):
        q = quire.quantize(x, "fp8_tensor", columnwise=True)
        with quire.autocast(recipe=DELAYED):
            function(q).sum().backward()
    w = layer.weight.detach().float().abs().max()
    assert torch.equal(layer.delayed.fwd_scale, torch.stack([torch.ones(()), 448 / w, torch.ones(())]))
    assert layer.delayed.bwd_scale[0] != 1


@pytest.mark.parametrize("name", ["fp8_current", "mxfp8"])
def test_a_missing_direction_of_a_quantized_input_is_made(name, make_layer, make_x, equal_bits):
    layer, x, recipe = make_layer(), make_x(33, 96), ALL[name]
    with quire.autocast(recipe=recipe):
        layer(quire.quantize(x, recipe.input_spec)).sum().backward()
        dw, decoded = layer.weight.grad, quire.quantize(x.detach(), recipe.input_spec).dequantize()
        layer.zero_grad()
        layer(x if name == "fp8_current" else decoded).sum().backward()  # exact, or of the decoded values
    assert equal_bits(dw, layer.weight.grad)


@every_recipe
@ways
def test_layers_chain_without_decoding(recipe, compiled, compiler, make_x, equal_bits):
    torch.manual_seed(2)
    first = torch.nn.ModuleList([quire.Linear(96, 96, params_dtype=torch.bfloat16) for _ in range(2)])
    x = make_x(33, 96)

    def chain(layers, x):
        return layers[1](layers[0](x, fp8_output=True))

    def steps(layers, x):
        y = layers[0](x)
        scale = layers[0].delayed.fwd_scale[2:3] if recipe.delayed() else None
        return layers[1](quire.quantize(y, recipe.input_spec, columnwise=True, scale=scale))

    results = []
    for function in (compiler(chain) if compiled else chain, steps):
        layers, leaf = copy.deepcopy(first), x.detach().requires_grad_()
        for layer in layers:  # the scales of x, w and y differ
            layer.delayed.fwd_scale = torch.tensor([2.0, 4.0, 8.0])
        with quire.autocast(recipe=recipe):
            y = function(layers, leaf)
        y.sum().backward()
        results.append([y.detach(), leaf.grad, *(layer.weight.grad for layer in layers)])
        if recipe.delayed() and function is not steps:
            assert layers[0].delayed.fwd_amax[2] > 0
    assert_same(*results, equal_bits)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("name", ["mxfp8", "nvfp4"])
def test_a_quantized_activation_crosses_borders_of_graphs(name, backend, compiler, make_layer, make_x, equal_bits):
    first, second, recipe = make_layer(96, 96), make_layer(96, 64), ALL[name]
    make = compiler(lambda x: first(x, fp8_output=True), backend=backend)
    use = compiler(lambda q: second(q), backend=backend)
    results = []
    for producer, consumer in ((lambda x: first(x, fp8_output=True), second), (make, use), (make, second)):
        for layer in (first, second):
            layer.zero_grad()
            layer.sr_state[1] = 0
        x = make_x(33, 96)
        with quire.autocast(recipe=recipe):
            q = producer(x)
            assert isinstance(q, quire.QuantizedActivation) and q.requires_grad
            y = consumer(q)
        y.backward(torch.ones_like(y))
        results.append([y.detach(), x.grad, first.weight.grad, second.weight.grad])
    assert_same(results[1], results[0], equal_bits)
    assert_same(results[2], results[0], equal_bits)


@ways
def test_an_output_spec_gives_a_quantized_tensor_where_nothing_wants_a_gradient(compiled, compiler, make_layer, make_x):
    layer, x = make_layer(), make_x(5, 96)
    function = (
        compiler(lambda t: layer(t, output_spec="fp8_row")) if compiled else lambda t: layer(t, output_spec="fp8_row")
    )
    with torch.no_grad(), quire.autocast():
        q = function(x)
        expected = quire.quantize(layer(x), "fp8_row")
    assert type(q) is quire.QuantizedTensor and q.spec == quire.QuantSpec("fp8_row")
    assert torch.equal(q.rowwise_data, expected.rowwise_data) and torch.equal(q.dequantize(), expected.dequantize())


@ways
def test_a_quantized_output_with_only_a_bias_gradient(compiled, compiler, make_layer, make_x):
    layer, x = make_layer(), make_x(5, 96, requires_grad=False)
    layer.weight.requires_grad_(False)
    function = compiler(lambda t: layer(t, fp8_output=True)) if compiled else lambda t: layer(t, fp8_output=True)
    with quire.autocast():
        y = function(x)
    y.dequantize().float().sum().backward()
    assert torch.equal(layer.bias.grad, torch.full((64,), 5.0).bfloat16())


def test_a_quantized_activation_decodes_with_a_gradient_and_is_a_pytree(make_x):
    x = make_x(33, 64)
    q = quire.quantize(x, "mxfp8")
    torch.autograd.backward(q.dequantize(), 3 * torch.ones(33, 64).bfloat16())
    assert torch.equal(x.grad, 3 * torch.ones(33, 64).bfloat16())
    assert torch.equal(q.dequantize(), quire.quantize(x.detach(), "mxfp8").dequantize())
    leaves, spec = torch.utils._pytree.tree_flatten(q)
    again = torch.utils._pytree.tree_unflatten(leaves, spec)
    assert again.spec == q.spec and again.shape == q.shape and again.carrier is q.carrier
    assert "mxfp8" in repr(q) and q.carrier.untyped_storage().nbytes() == 2


def test_a_quantized_tensor_that_wants_a_gradient_is_refused_as_input(make_layer, make_x):
    q = quire.quantize(make_x(5, 96, requires_grad=False), "mxfp8").requires_grad_()
    with quire.autocast(), pytest.raises(RuntimeError, match="has no gradient; quantize the tensor that has one with"):
        make_layer()(q)


def test_return_bias_and_init_method(make_x):
    layer = quire.Linear(96, 64, return_bias=True, init_method=torch.nn.init.ones_, name="proj")
    assert torch.equal(layer.weight, torch.ones(64, 96)) and not layer.bias.any() and layer.name == "proj"
    torch.nn.init.ones_(layer.bias)
    for enabled in (False, True):
        with quire.autocast(enabled):
            y, bias = layer(torch.ones(2, 96))
        assert bias is layer.bias and torch.equal(y, torch.full((2, 64), 96.0))
