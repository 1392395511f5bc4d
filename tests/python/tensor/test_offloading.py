"""Tools that move weights between devices make parameters by type(p)(value, requires_grad=...), write them into
module._parameters, and tell tied ones by their address. accelerate does; integrations/test_offloading.py runs it."""

import copy

import numpy as np
import pytest
import torch

import quire
from every_recipe import ALL
from python.tensor.tensor_specs import SPECS

pytestmark = pytest.mark.any_device


def away_and_back(model):
    """What accelerate's cpu_offload does around each forward pass: weights on the meta device, then those it kept."""
    kept = {name: value.to("cpu") for name, value in model.state_dict().items()}
    for device in ("meta", torch.get_default_device()):
        for prefix, module in model.named_modules():
            for name, old in module._parameters.items():
                if old is not None:
                    value = old if device == "meta" else kept[f"{prefix}.{name}".lstrip(".")].to(old.dtype)
                    value = value.to(device)
                    module._parameters[name] = type(old)(value, requires_grad=old.requires_grad)
        if device == "meta":
            assert all(parameter.is_meta for parameter in model.parameters())


def stored(q):
    return {name: None if t is None else t.clone() for name, t in q.named().items()}


def assert_same_bytes(q, before):
    assert q.named().keys() == before.keys()
    for name, tensor in q.named().items():
        assert (tensor is None) == (before[name] is None)
        if tensor is not None:
            assert tensor.dtype == before[name].dtype and tensor.shape == before[name].shape
            assert torch.equal(tensor.contiguous().view(torch.uint8), before[name].contiguous().view(torch.uint8))


@pytest.mark.parametrize("stacked", [False, True], ids=["matrix", "stack"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("spec", SPECS)
def test_the_class_of_a_quantized_parameter_makes_one_of_a_quantized_tensor(spec, dtype, stacked):
    q = quire.quantize(torch.randn(128, 128).to(dtype), spec)
    q = quire.QuantizedStack.of([q, q]) if stacked else q
    for given in (q, torch.nn.Parameter(q, requires_grad=False), q.to("meta")):
        for requires_grad in (False, True):
            made = type(given)(given, requires_grad=requires_grad)
            assert type(made) is type(q) and isinstance(made, torch.nn.Parameter)
            assert made.requires_grad == requires_grad and made.is_leaf
            assert (made.spec, made.shape, made.dtype, made.device) == (q.spec, q.shape, dtype, given.device)
            for name, tensor in made.named().items():
                assert (tensor is None) == (q.named()[name] is None)
                assert tensor is None or tensor.data_ptr() == given.named()[name].data_ptr()


@pytest.mark.parametrize("keep_master", [False, True], ids=["codes", "master"])
@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4", "fp8_current"])
def test_weights_that_went_away_and_came_back_have_the_same_bytes_and_results(recipe, keep_master):
    x = torch.randn(16, 64)
    with quire.quantized_model_init(recipe=ALL[recipe], keep_master=keep_master):
        layers = [quire.Linear(64, 64), quire.LayerNormMLP(64, 96), quire.MoE(64, 96, 4, 2)]
    model = torch.nn.Sequential(*layers)
    there = copy.deepcopy(model)
    weights = {name: p for name, p in model.named_parameters() if isinstance(p, quire.QuantizedTensor)}
    assert len(weights) > 4
    before = {name: stored(q) for name, q in weights.items()}
    away_and_back(model)
    for name, parameter in model.named_parameters():
        if name in weights:
            assert type(parameter) is type(weights[name]) and parameter is not weights[name]
            assert parameter.requires_grad and isinstance(parameter, torch.nn.Parameter)
            assert_same_bytes(parameter, before[name])
    quire.set_rng_state(model, quire.rng_state(there))
    for run in (model, there):
        with quire.autocast(recipe=ALL[recipe]):
            run.y = run(x)
        run.y.sum().backward()
    assert torch.equal(model.y, there.y)
    for moved, stayed in zip(model.parameters(), there.parameters(), strict=True):
        assert torch.equal(moved.grad, stayed.grad)


def test_addresses_are_none_and_tell_apart_what_does_not_share_codes():
    x = torch.randn(64, 64)
    first, second = quire.quantize(x, "mxfp8"), quire.quantize(x, "mxfp8")
    stack = quire.QuantizedStack.of([first, second])
    all_of_them = (first, second, first.clone(), copy.deepcopy(first), stack, stack[1])
    assert all(q.data_ptr() == 0 and not q.data_ptr() != 0 and not q.data_ptr() for q in all_of_them)
    known = {q.data_ptr(): q for q in all_of_them}
    assert len(known) == len(all_of_them)
    for alias in (first.detach(), torch.nn.Parameter(first, False), first.view(2, 32, 64)):
        assert known[alias.data_ptr()] is first
    assert known[stack[0].data_ptr()] is stack and x.data_ptr() not in known
    assert first.to("meta").data_ptr() in {x.to("meta").data_ptr(): "no memory"}


REFUSED = {
    "plain": (lambda q: type(q)(torch.zeros(64, 64)), r"QuantizedTensor\(tensor\): .* got .*[Oo]ffload.* to the CPU"),
    "plain on the way": (
        lambda q: type(q)(q.dequantize(), requires_grad=False),
        r"which has no codes.* load_state_dict\(\), or quantize them with quire.quantize",
    ),
    "a matrix for a stack": (lambda q: quire.QuantizedStack(q), r"expected a QuantizedStack, got QuantizedTensor"),
    "numpy": (lambda q: q.numpy(), "QuantizedTensor.numpy: it stores codes and scales, .* use dequantize.*mmap=True"),
    "bits by numpy": (
        lambda q: q.view(torch.int32).cpu().numpy(),
        r"QuantizedTensor.view\(torch.int32\).numpy: .* use dequantize\(\).*mmap=True",
    ),
    "bits of a part by numpy": (lambda q: np.asarray(q[3:5].view(torch.uint8)), r"view\(torch.uint8\).numpy"),
}


@pytest.mark.parametrize(("call", "message"), REFUSED.values(), ids=REFUSED)
def test_values_without_codes_are_refused(call, message):
    q = quire.quantize(torch.randn(64, 64), "mxfp8")
    before = stored(q)
    with pytest.raises(TypeError, match=f"(?s){message}"):
        call(q)
    assert_same_bytes(q, before)
