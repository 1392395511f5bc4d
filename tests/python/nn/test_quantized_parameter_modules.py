"""LayerNormLinear and LayerNormMLP with quantized weights, against the same modules with plain ones."""

import pytest
import torch

import quire
from quire import QuantizedTensor
from quire.recipe import DelayedScaling

pytestmark = pytest.mark.any_device

MODULES = {
    "linear": lambda **o: quire.LayerNormLinear(64, 96, **o),
    "linear_rms": lambda **o: quire.LayerNormLinear(64, 96, normalization="RMSNorm", bias=False, **o),
    "mlp": lambda **o: quire.LayerNormMLP(64, 96, activation="swiglu", **o),
    "mlp_checkpoint": lambda **o: quire.LayerNormMLP(64, 96, checkpoint=True, **o),
}


def pair(make, recipe, **options):
    modules = []
    for quantizes in (False, True):
        torch.manual_seed(1)
        with quire.quantized_model_init(quantizes, recipe=recipe):
            modules.append(make(params_dtype=torch.bfloat16, **options))
    return modules


def gradients(module, function, recipe, x):
    """y, the gradient of x and of every parameter."""
    module.zero_grad()
    for state in module.sr_states().values():
        state[1] = 0
    x = x.detach().requires_grad_()
    with quire.autocast(recipe=recipe):
        y = function(x)
        y.backward(y.detach() * 0.1)
    return [y.detach(), x.grad, *(parameter.grad for parameter in module.parameters())]


@pytest.mark.parametrize("make", MODULES.values(), ids=MODULES)
def test_a_step_is_that_of_plain_weights(make, recipe, make_x, compiler, equal_bits):
    plain, quantized = pair(make, recipe)
    names = [name for name, p in quantized.named_parameters() if isinstance(p, QuantizedTensor)]
    assert names == [name for name, _ in plain.named_parameters() if name in ("weight", "fc1_weight", "fc2_weight")]
    assert list(quantized.state_dict()) == list(plain.state_dict())
    expected = gradients(plain, plain, recipe, make_x(40, 64))
    for function in (quantized, compiler(quantized)):
        found = gradients(quantized, function, recipe, make_x(40, 64))
        assert all(type(b) is torch.Tensor and equal_bits(a, b) for a, b in zip(expected, found, strict=True))
    assert compiler.graphs == 1
    with torch.no_grad(), quire.autocast(recipe=recipe):
        assert equal_bits(quantized(make_x(7, 64)), plain(make_x(7, 64)))


@pytest.mark.parametrize("make", MODULES.values(), ids=MODULES)
def test_delayed_scaling_and_calibration_leave_the_slots_of_weights_alone(make, make_x, compiler, equal_bits):
    recipe, runs = DelayedScaling(amax_history_len=2), []
    for compiles in (False, True):
        _, module = pair(make, recipe)
        function, results = compiler(module) if compiles else module, []
        for scale in (1.0, 20.0, 0.1):
            results += gradients(module, function, recipe, make_x(40, 64) * scale)
        with quire.autocast(False, recipe=recipe, calibrating=True):
            module(make_x(40, 64))
        states = [module.of(product, "delayed") for product in module.products]
        assert all(state.fwd_amax[0] > 0 and state.fwd_amax[1] == 0 and state.fwd_scale[1] == 1 for state in states)
        runs.append(results)
    assert all(equal_bits(a, b) for a, b in zip(*runs, strict=True))


def test_another_recipe_is_refused_in_words(make_x):
    _, module = pair(MODULES["mlp"], quire.recipe.MXFP8BlockScaling())
    with quire.autocast(recipe=quire.recipe.NVFP4BlockScaling()):
        with pytest.raises(RuntimeError, match="quantized as mxfp8:nan, and the active recipe, NVFP4BlockScaling"):
            module(make_x(4, 64))


@pytest.mark.cpu_only
def test_modules_are_made_on_the_meta_device_and_initialised_later(recipe):
    plain, _ = pair(MODULES["mlp"], recipe)
    with quire.quantized_model_init(recipe=recipe):
        module = MODULES["mlp"](params_dtype=torch.bfloat16, device="meta")
    module.to_empty(device="cpu")
    torch.manual_seed(1)
    module.reset_parameters()
    for name in ("fc1_weight", "fc2_weight"):
        expected = quire.quantize(getattr(plain, name).detach(), recipe.weight_spec, columnwise=True)
        assert torch.equal(getattr(module, name).columnwise_data, expected.columnwise_data)
