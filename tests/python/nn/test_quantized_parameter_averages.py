"""What PyTorch offers for averaging and flattening parameters, on quantized ones, against plain ones that hold the same
values."""

import warnings

import pytest
import torch
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn, get_swa_multi_avg_fn

import quire
from steps import same

pytestmark = pytest.mark.any_device

RECIPE = quire.recipe.MXFP8BlockScaling()
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
every_master = pytest.mark.parametrize("master", [True, False], ids=["master", "no master"])
AVERAGES = {
    "ema": {"multi_avg_fn": get_ema_multi_avg_fn(0.9)},
    "ema, one by one": {"avg_fn": get_ema_avg_fn(0.9)},
    "swa": {"multi_avg_fn": get_swa_multi_avg_fn()},
    "default": {},
}


def layer(dtype, master):
    torch.manual_seed(0)
    with quire.quantized_model_init(recipe=RECIPE, keep_master=master):
        return quire.Linear(64, 32, params_dtype=dtype)


def change(layer, step):
    with torch.no_grad():
        for parameter in layer.parameters():
            values = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(step))
            parameter.copy_(values)


@every_dtype
@every_master
@pytest.mark.parametrize("options", AVERAGES.values(), ids=AVERAGES)
def test_an_average_is_not_refused_and_not_of_rounded_masters(dtype, master, options):
    one = layer(dtype, master)
    in_place = "multi_avg_fn" in options  # others compute a new tensor, in the nominal dtype
    plain = torch.nn.Linear(64, 32, dtype=torch.float32 if master and in_place else dtype)
    average, expected = AveragedModel(one, **options), AveragedModel(plain, **options)
    for step in range(3):
        change(one, step)
        average.update_parameters(one)
        with torch.no_grad():
            plain.weight.copy_(one.weight.master if master else one.weight.dequantize())
            plain.bias.copy_(one.bias)
        expected.update_parameters(plain)
        found, weight = average.module.weight, expected.module.weight.detach()
        if master:
            codes = quire.quantize(found.master, RECIPE.weight_spec).rowwise_data
            assert same(found.master.to(weight.dtype), weight) and torch.equal(found.rowwise_data, codes)
        else:
            with torch.no_grad():
                weight.copy_(quire.quantize(weight, RECIPE.weight_spec).dequantize())
            assert same(found.dequantize(), weight)


def test_lerp_takes_plain_tensors_of_the_nominal_dtype():
    weight, end = layer(torch.bfloat16, True).weight.detach(), torch.randn(32, 64).bfloat16()
    expected = weight.master.clone().lerp_(end.float(), 0.3)
    assert torch.equal(weight.lerp_(end, 0.3).master, expected)
    expected.lerp_(end.float(), torch.full((32, 64), 0.25))
    assert torch.equal(weight.lerp_(end, torch.full((32, 64), 0.25).bfloat16()).master, expected)


@every_dtype
@every_master
def test_a_vector_goes_into_parameters(dtype, master):
    one = layer(dtype, master)
    vector = parameters_to_vector(one.parameters()).detach() * 2
    pointer = one.weight.rowwise_data.data_ptr()
    vector_to_parameters(vector, one.parameters())
    expected = quire.quantize(vector[: 32 * 64].view(32, 64), RECIPE.weight_spec)
    assert torch.equal(one.weight.rowwise_data, expected.rowwise_data) and one.weight.rowwise_data.data_ptr() == pointer
    assert torch.equal(one.bias, vector[32 * 64 :].to(one.bias.dtype))
    if master:
        assert torch.equal(one.weight.master, vector[: 32 * 64].view(32, 64).float())


@pytest.mark.slow  # Inductor alone caches
def test_no_cache_warns_of_a_hash_that_is_missing(compiler):
    one, x = layer(torch.float32, False), torch.randn(4, 64)
    with warnings.catch_warnings(record=True) as warned, quire.autocast(recipe=RECIPE):
        compiler(one, backend="inductor")(x).sum().backward()
    assert not any("_stable_hash_for_caching" in str(each.message) for each in warned)
    q, same, other = (quire.quantize(torch.randn(32, 64), spec) for spec in ("mxfp8", "mxfp8", "mxfp8:e5m2"))
    assert q._stable_hash_for_caching() == same._stable_hash_for_caching() == q.clone()._stable_hash_for_caching()
    kinds = (
        q,
        other,
        q.half(),
        q.view(2, 16, 64),
        quire.quantize(torch.randn(32, 64), "mxfp8", columnwise=True),
        q[:16],
    )
    assert len({kind._stable_hash_for_caching() for kind in kinds}) == len(kinds)
