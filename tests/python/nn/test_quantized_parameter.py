"""quantized_model_init: layers whose weights are QuantizedTensors, against layers that quantize plain weights."""

import copy
import threading

import pytest
import torch

import quire
from quire import QuantizedTensor, QuantSpec
from quire.functional import linear_prequantized
from quire.recipe import CustomRecipe, DelayedScaling, Float8BlockScaling, MXFP8BlockScaling, NVFP4BlockScaling
from steps import assert_of_codes, same

pytestmark = pytest.mark.any_device


@pytest.fixture
def make_pair(device):
    """(recipe, dtype=bfloat16, **options) -> a layer with a plain weight, and the same with a quantized one."""

    def make(recipe, dtype=torch.bfloat16, **options):
        torch.manual_seed(1)
        plain = quire.Linear(96, 64, params_dtype=dtype).to(device)
        torch.manual_seed(1)
        with quire.quantized_model_init(recipe=recipe, **options):
            return plain, quire.Linear(96, 64, params_dtype=dtype).to(device)

    return make


def test_the_weight_is_a_parameter_of_codes(any_recipe, make_pair, device):
    plain, layer = make_pair(any_recipe)
    text = any_recipe.linear_spec().split(",")[1].removeprefix("w=")
    assert any_recipe.weight_spec == text == QuantSpec(text).text
    assert isinstance(layer.weight, torch.nn.Parameter) and isinstance(layer.weight, QuantizedTensor)
    assert layer.weight.requires_grad and layer.weight.is_leaf and layer.weight.dtype == torch.bfloat16
    assert same(layer.weight, quire.quantize(plain.weight.detach(), text, columnwise=True))
    assert list(layer.state_dict()) == list(plain.state_dict()) and torch.equal(layer.bias, plain.bias)
    assert [name for name, _ in layer.named_parameters()] == ["weight", "bias"]


def test_memory_is_what_the_format_promises():
    bytes_per_value = {"nvfp4": 4.5 / 8, "mxfp8": 8.25 / 8, "fp8_block": 1.0, "fp8_current": 1.0}
    for name, expected in bytes_per_value.items():
        with quire.quantized_model_init(recipe=quire.recipe.from_name(name)):
            layer = quire.Linear(1024, 512, bias=False)
        stored = sum(t.untyped_storage().nbytes() for t in layer.weight.buffers().values())
        values = 1024 * 512
        # Scales of 2D blocks: a byte for each line of a 16 x 16 tile, four bytes for 128 x 128.
        assert stored == layer.weight.nbytes and 2 * values * expected <= stored <= 2 * values * expected + 1024
        layer.weight.update_usage(columnwise_usage=False)
        assert layer.weight.nbytes * 2 == stored
        others = [v for v in vars(layer.weight).values() if isinstance(v, torch.Tensor)]
        assert sum(t.nbytes for t in others) == layer.weight.nbytes and layer.weight.data_ptr() == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_step_is_that_of_a_plain_weight(any_recipe, make_pair, make_x, step, dtype, device):
    plain, layer = make_pair(any_recipe, dtype)
    x = make_x(40, 96, dtype=dtype)
    result = step(layer, x, any_recipe)
    assert result == step(plain, x, any_recipe) and type(result.dw) is torch.Tensor and result.dw.dtype == dtype


def test_a_compiled_step_has_the_same_bits(recipe, make_pair, make_x, step, compiler):
    plain, layer = make_pair(recipe)
    x = make_x(40, 96)
    compiled = compiler(layer)
    assert step(layer, x, recipe, compiled) == step(plain, x, recipe) and compiler.graphs == 1
    with torch.no_grad():
        layer.weight.mul_(0.5)
    expected = step(layer, x, recipe)
    assert step(layer, x, recipe, compiled) == expected and compiler.graphs == 1


@pytest.mark.parametrize(
    "wanted", [(True, False, False), (False, True, False), (False, False, True), (True, True, False)]
)
def test_only_some_gradients_are_wanted(recipe, make_pair, make_x, step, compiler, wanted, device):
    plain, layer = make_pair(recipe)
    x = make_x(40, 96, requires_grad=wanted[0])
    for module in (plain, layer):
        module.weight.requires_grad_(wanted[1])
        module.bias.requires_grad_(wanted[2])
    expected = step(plain, x, recipe)
    assert step(layer, x, recipe) == expected
    if recipe.stochastic:  # the recipe with the most state stands for all
        assert step(layer, x, recipe, compiler(layer)) == expected


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_inference(any_recipe, mode, make_pair, make_x, equal_bits, device):
    plain, layer = make_pair(any_recipe)
    x = make_x(7, 96, requires_grad=False)
    with mode(), quire.autocast(recipe=any_recipe):
        assert equal_bits(layer(x), plain(x))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_compiled_inference(mode, make_pair, make_x, compiler, equal_bits):
    recipe = NVFP4BlockScaling()
    plain, layer = make_pair(recipe)
    x = make_x(7, 96, requires_grad=False)
    with mode(), quire.autocast(recipe=recipe):
        assert equal_bits(compiler(layer)(x), plain(x))


def test_torch_autocast(recipe, make_pair, make_x, step, compiler):
    plain, layer = make_pair(recipe, torch.float32)
    x = make_x(40, 96, dtype=torch.float32)

    def under(function):
        def run(x):
            with torch.autocast("cpu", torch.bfloat16):
                return function(x)

        return run

    expected = step(plain, x, recipe, under(plain))
    assert step(layer, x, recipe, under(layer)) == expected and expected.y.dtype == torch.bfloat16
    assert step(layer, x, recipe, compiler(under(layer))) == expected


def test_without_a_recipe_the_layer_computes_with_decoded_values(recipe, make_pair, make_x, step, device):
    plain, layer = make_pair(recipe)
    with torch.no_grad():
        plain.weight.copy_(layer.weight)
    assert step(layer, make_x(40, 96), None) == step(plain, make_x(40, 96), None)


@pytest.mark.cpu_only
def test_without_a_recipe_torch_autocast_decodes_to_its_dtype(recipe, make_pair, make_x):
    _, layer = make_pair(recipe)
    with torch.autocast("cpu", torch.float16):
        y = layer(make_x(40, 96))
    decoded = layer.weight.dequantize(torch.float16)  # not by way of bfloat16
    assert same(y, torch.nn.functional.linear(make_x(40, 96).half(), decoded, layer.bias.half()))


def test_weights_made_for_inference_have_one_direction(recipe, make_pair, make_x, equal_bits, device):
    with torch.no_grad():
        plain, layer = make_pair(recipe)
        assert layer.weight.rowwise_data is not None and layer.weight.columnwise_data is None
        with quire.autocast(recipe=recipe):
            assert equal_bits(layer(make_x(7, 96)), plain(make_x(7, 96)))
    with quire.autocast(recipe=recipe), pytest.raises(RuntimeError, match="w is given without columnwise_data"):
        layer(make_x(7, 96))
    with quire.autocast(recipe=recipe):
        layer(make_x(7, 96, requires_grad=False)).sum().backward()  # dw needs columnwise x only
    assert type(layer.weight.grad) is torch.Tensor


def test_another_recipe_is_refused_in_words(make_pair, make_x, compiler):
    _, layer = make_pair(MXFP8BlockScaling())
    words = (
        "Recipe mismatch for the weight: it is quantized as mxfp8:nan, and the active recipe, NVFP4BlockScaling, "
        "quantizes weights as nvfp4:16x16:nan. If"
    )
    for function in (layer, compiler(layer)):
        with quire.autocast(recipe=NVFP4BlockScaling()), pytest.raises(RuntimeError, match=words):
            function(make_x(4, 96))
    with quire.autocast(recipe=CustomRecipe({"x": "mxfp8", "w": "mxfp8", "dy": "mxfp8:e5m2"}.get)):
        layer(make_x(4, 96)).sum().backward()  # the spec for w is what counts


def test_contexts_nest_and_are_per_thread():
    def kind():
        weight = quire.Linear(32, 32).weight
        return weight.spec_text if isinstance(weight, QuantizedTensor) else None

    seen = []
    with quire.quantized_model_init():
        assert kind() == quire.recipe.default().weight_spec
        with quire.quantized_model_init(recipe=NVFP4BlockScaling()):
            assert kind() == "nvfp4:16x16:nan"
            with quire.quantized_model_init(enabled=False):
                assert kind() is None
        assert kind() == "mxfp8:nan"
        thread = threading.Thread(target=lambda: seen.append(kind()))
        thread.start()
        thread.join()
        with pytest.raises(ZeroDivisionError), quire.quantized_model_init(recipe=NVFP4BlockScaling()):
            raise ZeroDivisionError
        assert kind() == "mxfp8:nan"
    assert kind() is None and seen == [None]
    with pytest.raises(TypeError, match="quantized_model_init: recipe must be a recipe of quire.recipe.*got 8"):
        quire.quantized_model_init(recipe=8).__enter__()


def test_initial_values_are_kept_when_asked(recipe, make_pair):
    plain, layer = make_pair(recipe, preserve_high_precision_init_val=True)
    kept = layer.weight.get_high_precision_init_val()
    assert type(kept) is torch.Tensor and torch.equal(kept, plain.weight) and kept.dtype == plain.weight.dtype
    assert torch.equal(copy.deepcopy(layer).weight.get_high_precision_init_val(), kept)
    layer.weight.clear_high_precision_init_val()
    assert layer.half().weight.get_high_precision_init_val() is None
    layer.weight.clear_high_precision_init_val()
    _, layer = make_pair(recipe)
    assert not hasattr(layer.weight, "get_high_precision_init_val")
    with pytest.raises(ValueError, match="this weight is on the meta device; construct"):
        with quire.quantized_model_init(preserve_high_precision_init_val=True):
            quire.Linear(32, 32, device="meta")


@pytest.mark.parametrize("keep_master", [False, True])
def test_a_layer_is_made_on_the_meta_device_and_initialised_later(recipe, make_pair, keep_master):
    plain, _ = make_pair(recipe)
    with quire.quantized_model_init(recipe=recipe, keep_master=keep_master):
        layer = quire.Linear(96, 64, params_dtype=torch.bfloat16, device="meta")
    assert layer.weight.is_meta and isinstance(layer.weight, QuantizedTensor)
    layer.to_empty(device="cpu")
    torch.manual_seed(1)
    layer.reset_parameters()
    if keep_master:  # draws float32 numbers
        assert same(layer.weight, quire.quantize(layer.weight.master, recipe.weight_spec, columnwise=True))
        assert layer.weight.master.abs().max() > 0
    else:
        assert same(layer.weight, quire.quantize(plain.weight.detach(), recipe.weight_spec, columnwise=True))


def test_plain_checkpoints_load_and_quantized_ones_load_into_plain_layers(recipe, make_pair, make_x, step, device):
    plain, layer = make_pair(recipe)
    torch.manual_seed(7)
    other = quire.Linear(96, 64, params_dtype=torch.bfloat16).to(device)
    layer.load_state_dict(other.state_dict())
    layer.sr_state.copy_(other.sr_state)
    assert step(layer, make_x(40, 96), recipe) == step(other, make_x(40, 96), recipe)
    plain.load_state_dict(layer.state_dict())
    assert torch.equal(plain.weight, layer.weight.dequantize()) and type(plain.weight) is torch.nn.Parameter


def test_a_copy_of_a_layer_is_its_own(make_pair, make_x, step, device):
    recipe = Float8BlockScaling()
    _, layer = make_pair(recipe)
    x = make_x(8, 96)
    other, before = copy.deepcopy(layer), step(layer, x, recipe)
    with torch.no_grad():
        other.weight.zero_()
    assert step(layer, x, recipe) == before


def test_delayed_scaling_leaves_the_slot_of_a_quantized_weight_alone(make_pair, make_x, compiler, equal_bits):
    recipe = DelayedScaling(amax_history_len=2, amax_compute_algo="most_recent")
    runs = []
    for compiles in (False, True):
        _, layer = make_pair(recipe)
        function, results = compiler(layer) if compiles else layer, []
        for scale in (1.0, 50.0, 0.02):
            x = (make_x(40, 96).detach() * scale).requires_grad_()
            with quire.autocast(recipe=recipe):
                y = function(x)
            y.backward(y.detach())
            results += [y.detach(), x.grad, layer.weight.grad.clone()]
            assert layer.delayed.fwd_amax[0] == x.abs().max() and layer.delayed.fwd_amax[1] == 0
        assert layer.delayed.fwd_scale[1] == 1 and layer.delayed.fwd_scale[0] != 1
        runs.append(results)
    assert all(equal_bits(a, b) for a, b in zip(*runs, strict=True))
    x = quire.quantize(make_x(40, 96), "fp8_tensor", scale=torch.ones(1))
    assert_of_codes(runs[0][0], layer, x, recipe)
    with quire.autocast(False, recipe=recipe, calibrating=True):
        layer(make_x(40, 96))
    assert layer.delayed.fwd_amax[1] == 0 and layer.delayed.fwd_amax[0] > 0


@pytest.mark.parametrize("mode", ["high_precision", "dequantized"])
@pytest.mark.parametrize("frozen", [False, True])
def test_backward_without_codes_uses_the_decoded_weight(make_x, compiler, mode, frozen):
    recipe = f"x=mxfp8,w=nvfp4:16x16,dy=mxfp8,backward={mode}"
    weight = quire.quantize(make_x(64, 96).detach(), "nvfp4:16x16").requires_grad_(not frozen)

    def function(x, weight):
        return linear_prequantized(x, weight, None, recipe, torch.bfloat16, w_buffers=weight.buffer_list())

    for run in (function, compiler(function)):
        x = make_x(40, 96)
        y = run(x, weight)
        y.backward(torch.ones_like(y))
        assert torch.equal(x.grad, torch.ones(40, 64).bfloat16() @ weight.detach().dequantize())
