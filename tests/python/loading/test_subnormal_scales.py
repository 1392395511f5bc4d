"""What Python and PyTorch compute on scales and amaxes keeps subnormal numbers, also where the caller flushes them to
zero (numerics.md 0.7)."""

import copy

import pytest
import torch

import quire
from python.io.checkpoint_files import Files, modelopt_config, modelopt_fp8
from python.loading.subnormals import ONE, THREE, TINY, bits
from quire.loading.float_mode import subnormals_kept

pytestmark = pytest.mark.alone


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
    options = {"for_inference": True, "tokens": None, "min_features": 1}
    converted = quire.convert(copy.deepcopy(model), "x=fp8_tensor:given,w=fp8_row,dy=mxfp8", **options)
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
