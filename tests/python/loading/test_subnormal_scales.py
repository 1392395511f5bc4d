"""What Python and PyTorch compute on scales and amaxes keeps subnormal numbers, also where the caller flushes them to
zero (numerics.md 0.7)."""

import copy

import pytest
import torch

import quire
from python.io.checkpoint_files import Files, modelopt_config, modelopt_fp8
from quire.loading.float_mode import subnormals_kept
from quire.te.ops.pointwise import _RoundedGradient
from quire.te.pytorch import DType, Float8Quantizer, Float8Tensor

pytestmark = pytest.mark.alone

#: 2^-140 and 3 * 2^-140, by their bits; all numbers below 2^-126 are subnormal.
TINY, THREE = (torch.tensor([bits << 9], dtype=torch.int32).view(torch.float32) for bits in (1, 3))


@pytest.fixture
def flushing():
    """Sets the mode when it is called."""

    def start():
        if not torch.set_flush_denormal(True):
            pytest.skip("this CPU cannot flush subnormals to zero")

    yield start
    torch.set_flush_denormal(False)


def bits(t):
    return t.detach().contiguous().reshape(-1).view(torch.int32).tolist()


#: The bits of TINY; those of its multiples are as many times as large.
ONE = 1 << 9


def test_the_mode_of_the_caller_holds_again_after_each_use_and_each_error(flushing):
    smallest = torch.finfo(torch.float64).tiny
    flushing()
    with subnormals_kept():
        assert smallest * 0.5 != 0
    with pytest.raises(KeyError), subnormals_kept():
        raise KeyError
    assert smallest * 0.5 == 0
    torch.set_flush_denormal(False)
    with subnormals_kept():
        assert smallest * 0.5 != 0
    assert smallest * 0.5 != 0


@pytest.mark.parametrize("before, wanted", [(torch.zeros(1), 3 * ONE), (THREE * 2, 6 * ONE)])
def test_a_quantizer_with_a_scale_keeps_the_larger_of_two_subnormal_amaxes(flushing, before, wanted):
    x, amax = torch.cat([TINY, -THREE]).repeat(16), before.clone()
    quantizer = Float8Quantizer(torch.ones(1), amax, DType.kFloat8E4M3)
    flushing()
    quantizer(x)
    assert bits(amax) == [wanted]


def test_a_gradient_that_is_rounded_keeps_a_subnormal_amax(flushing):
    amaxes, gradient = torch.zeros(2), THREE.expand(4, 32).contiguous()
    x = torch.ones(4, 32, requires_grad=True)
    y = _RoundedGradient.apply(x, "fp8_tensor", torch.ones(1), amaxes)
    flushing()
    y.backward(gradient)
    assert bits(amaxes) == [3 * ONE, 0]


def test_a_tensor_of_given_codes_has_the_subnormal_amax_of_its_values(flushing):
    codes = torch.tensor([[2.0, -3.0, 0.5, 1.0]]).to(torch.float8_e4m3fn).view(torch.uint8)
    flushing()
    made = Float8Tensor(shape=(1, 4), dtype=torch.float32, data=codes, fp8_scale_inv=TINY, fp8_dtype=DType.kFloat8E4M3)
    assert bits(made.rowwise_amax) == [3 * ONE]


@pytest.mark.parametrize("of_user", ["amax_compute_algo", "scaling_factor_compute_algo"])
def test_a_step_with_a_function_of_the_user_sees_subnormal_amaxes(flushing, of_user):
    functions = {
        "amax_compute_algo": lambda history: history.amax(0),
        "scaling_factor_compute_algo": lambda amax, scale, largest, recipe: torch.where(amax > 0, 7.0, scale),
    }
    recipe = quire.recipe.DelayedScaling(amax_history_len=2, **{of_user: functions[of_user]})
    layer, x = quire.Linear(32, 32), TINY.expand(4, 32).contiguous().requires_grad_()
    torch.nn.init.ones_(layer.weight)
    flushing()
    for _ in range(2):  # the second ends the first's step
        with quire.autocast(recipe=recipe):
            y = layer(x)
        y.backward(torch.ones_like(y))
    torch.set_flush_denormal(False)
    # 448 / 2^-140 is beyond float32: the largest number. The scale was 1.
    wanted = torch.finfo(torch.float32).max if of_user == "amax_compute_algo" else 7.0
    states = [value for value in vars(layer).values() if isinstance(value, quire.delayed.DelayedState)]
    assert [state.fwd_newest[0].item() for state in states] == [wanted]


def test_a_static_scale_of_a_small_amax_is_subnormal(flushing):
    x = TINY.expand(4, 32) * 1024  # 2^-130
    model = torch.nn.Sequential(torch.nn.Linear(32, 32, bias=False))
    wanted = [round(2**10 / 448 * ONE)]  # 2^-130 / 448, rounded to a multiple of 2^-149
    quiet = quire.calibrate(model, [x], "x=fp8_tensor:given,w=fp8_row,dy=mxfp8")
    flushing()
    report = quire.calibrate(model, [x], "x=fp8_tensor:given,w=fp8_row,dy=mxfp8")
    torch.set_flush_denormal(False)
    assert report.layers == quiet.layers and report.layers[0].amax == 2.0**-130
    converted = quire.quantize_model(copy.deepcopy(model), "x=fp8_tensor:given,w=fp8_row,dy=mxfp8")
    torch.set_flush_denormal(True)
    report.apply(converted)
    torch.set_flush_denormal(False)
    assert bits(next(b for name, b in converted.named_buffers() if "input_scale" in name)) == wanted


def test_gptq_rounds_weights_with_the_smallest_scales_alike(flushing):
    model = torch.nn.Sequential(torch.nn.Linear(64, 32, bias=False))
    with torch.no_grad():
        model[0].weight.mul_(2.0**-120)
    x = [torch.randn(8, 64)]

    def quantized():
        made = quire.quantize_model(copy.deepcopy(model), "mxfp8", method="gptq", batches=x)
        weight = made[0].weight
        return weight.rowwise_data.clone(), weight.rowwise_scale.clone()

    wanted = quantized()
    assert int(wanted[1].min()) == 0  # 2^-127
    flushing()
    found = quantized()
    assert all(map(torch.equal, found, wanted))


def checkpoint(folder):
    tensors, _ = modelopt_fp8("a", 48, 64, scale=THREE.reshape(()))
    return Files(tensors | {"a.input_scale": TINY.reshape(())}, modelopt_config("FP8")).write(folder)


def test_subnormal_scales_of_a_checkpoint_are_read_loaded_and_written(flushing, tmp_path):
    folder = checkpoint(tmp_path / "in")
    flushing()
    stored = quire.io.read(folder)["a.weight"]
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(64, 48, bias=False)})
    quire.io.load(model, folder)
    quire.io.save(model, tmp_path / "out", like=folder)
    torch.set_flush_denormal(False)
    assert bits(stored.weight.rowwise_scale) == [3 * ONE] and bits(stored.weight.rowwise_amax) == [448 * 3 * ONE]
    assert bits(next(b for name, b in model.named_buffers() if "input_scale" in name)) == [ONE]
    assert not quire.io.diff(folder, tmp_path / "out")
