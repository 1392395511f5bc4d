"""A conversion of a model changes its parameters. Everything else that it holds keeps its dtype and its values."""

import copy
import io
import pickle

import numpy
import pytest
import torch

import quire
from every_feature import LAYERS
from every_recipe import ALL, STATIC
from python.conversion import precision_ranks
from quire import moe
from steps import call

RECIPE = STATIC["static_nvfp4"]


def _quantized(name):
    with quire.quantized_model_init(recipe=ALL["nvfp4"], keep_master=True):
        return LAYERS[name]()


#: Name -> what makes it. All layers; those with static scales; and with quantized parameters.
HOLDERS = {
    **LAYERS,
    **{
        f"{name}, static": lambda name=name: LAYERS[name](recipe=RECIPE)
        for name in ("Linear", "LayerNormLinear", "LayerNormMLP", "GroupedLinear", "MoE")
    },
    "Linear, quantized": lambda: _quantized("Linear"),
    "LayerNormMLP, quantized": lambda: _quantized("LayerNormMLP"),
    "a quantized stack": lambda: _quantized("GroupedLinear, one weight"),
}


def held(model):
    """Name -> tensor, of all that is no plain parameter: buffers, states in attributes, and what is stored in quantized
    parameters."""
    found = {}

    def collect(name, value):
        if isinstance(value, quire.QuantizedTensor):
            found.update({f"{name}.{key}": tensor for key, tensor in value.named().items() if tensor is not None})
        elif isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter):
            found[name] = value
        elif type(value).__name__ == "DelayedState":
            for key, tensor in vars(value).items():
                collect(f"{name}.{key}", tensor)

    for path, module in model.named_modules():
        for name, value in {**vars(module), **module._buffers, **module._parameters}.items():
            collect(f"{path}.{name}".removeprefix("."), value)
    return found


def filled(holder):
    """A model in which no state has the value that it begins with."""
    torch.manual_seed(0)
    model, recipe = HOLDERS[holder](), ALL["nvfp4" if "quantized" in holder else "delayed"]
    for name, buffer in model.named_buffers():
        size = torch.rand(buffer.shape, generator=torch.Generator().manual_seed(len(name)))
        buffer.copy_(size + 0.5)  # of 24 bits
    x = torch.randn(24, 1, 64) if holder == "TransformerLayer" else torch.randn(24, 64)
    with quire.autocast(recipe=recipe):
        call(model, x).sum().backward()
    model.zero_grad()
    return model


def loaded_into_a_converted_model(model, make):
    other = make().bfloat16()
    other.load_state_dict(model.state_dict())
    return other


def assigned_in_another_dtype(model, make):
    state = {
        name: value.double() if type(value) is torch.Tensor and value.is_floating_point() else value
        for name, value in model.state_dict().items()
    }
    other = make()
    other.load_state_dict(state, assign=True)
    return other


def saved(model, make):
    file = io.BytesIO()
    torch.save(model.bfloat16(), file)
    file.seek(0)
    return torch.load(file, weights_only=False)


#: Name -> (what it does to a model, whether states outside of the state dict go with it).
CONVERSIONS = {
    "bfloat16()": (lambda model, make: model.bfloat16(), True),
    "half()": (lambda model, make: model.half(), True),
    "double()": (lambda model, make: model.double(), True),
    "double().float()": (lambda model, make: model.double().float(), True),
    "bfloat16().float()": (lambda model, make: model.bfloat16().float(), True),
    "to(dtype)": (lambda model, make: model.to(torch.bfloat16), True),
    "to(device, dtype)": (lambda model, make: model.to("cpu", torch.float16), True),
    "to(tensor)": (lambda model, make: model.to(torch.empty(1, dtype=torch.bfloat16)), True),
    "type(dtype)": (lambda model, make: model.type(torch.bfloat16), True),
    "of its parent": (lambda model, make: torch.nn.ModuleList([model]).bfloat16()[0], True),
    "to_empty": (lambda model, make: model.bfloat16().to_empty(device="cpu"), True),
    "share_memory": (lambda model, make: model.bfloat16().share_memory(), True),
    "deepcopy": (lambda model, make: copy.deepcopy(model.bfloat16()), True),
    "pickle": (lambda model, make: pickle.loads(pickle.dumps(model.bfloat16())), True),
    "torch.save": (saved, True),
    "load_state_dict": (loaded_into_a_converted_model, False),
    "load_state_dict, assign": (assigned_in_another_dtype, False),
}
#: Those that a quantized parameter refuses, because its values are of a narrower dtype, and those that discard it.
NOT_QUANTIZED = {"double()", "double().float()", "to_empty"}


#: Of these all conversions are tried, of the others every third one, in turn.
WHOLE = {"Linear", "Linear, quantized", "MoE"}


def pairs(holders, whole):
    for i, holder in enumerate(holders):
        for j, conversion in enumerate(CONVERSIONS):
            if "quantized" in holder and conversion in NOT_QUANTIZED:
                continue
            if holder in whole or (i + j) % 3 == 0:
                yield holder, conversion


@pytest.mark.parametrize(("holder", "conversion"), pairs(HOLDERS, WHOLE))
def test_what_is_no_parameter_keeps_its_dtype_and_its_bits(holder, conversion, equal_bits):
    convert, whole = CONVERSIONS[conversion]
    model = filled(holder)
    before = {name: tensor.clone() for name, tensor in held(model).items()}
    in_the_file = set(model.state_dict())
    after = held(convert(model, HOLDERS[holder]))
    assert before and (not whole or before.keys() == after.keys())
    for name in before.keys() & after.keys():
        assert after[name].dtype == before[name].dtype, name
        if (whole or name in in_the_file) and "wgrad_stash" not in name:  # whose number is each copy's own
            assert equal_bits(after[name], before[name]), name


def test_small_updates_of_a_bias_add_up_in_a_converted_mixture():
    model = quire.MoE(64, 96, 4, 2, expert_bias=True).bfloat16()
    model.expert_bias.fill_(1.0)
    expected = numpy.full(4, 1.0, numpy.float32)
    for _ in range(200):
        moe.update_expert_bias_(model.expert_bias, torch.tensor([8, 8, 0, 0]), 0.001)
        expected += numpy.float32(0.001) * numpy.float32([-1, -1, 1, 1])
    assert model.expert_bias.tolist() == expected.tolist()


def test_a_loaded_correction_bias_chooses_the_same_experts_in_a_converted_mixture():
    torch.manual_seed(0)
    model = quire.MoE(64, 96, 16, 4, expert_bias=True, score_function="sigmoid")
    bias = 4.0 + 0.01 * torch.rand(16)
    state, model = model.state_dict() | {"expert_bias": bias}, model.bfloat16()
    model.load_state_dict(state)
    x = torch.randn(512, 64, dtype=torch.bfloat16)
    _, routing = model(x, return_routing=True)
    scores = routing.logits.detach().double().sigmoid() + bias
    chosen = torch.zeros_like(scores, dtype=torch.bool).scatter(1, routing.topk_ids.long(), True)
    least, most = scores.where(chosen, 9.0).amin(1), scores.where(~chosen, 0.0).amax(1)
    # Of a score from 4 to 5, a sum and a sigmoid are each rounded by 2^-22 at most; a bias in bfloat16 by 2^-7.
    assert (chosen.sum(1) == 4).all() and (least >= most - 2**-20).all()


@pytest.mark.parametrize("name", ["expert_bias", "fc1.input_scale"])
def test_a_state_that_another_tool_has_converted_is_refused(name):
    model = quire.MoE(64, 96, 4, 2, expert_bias=True, recipe=RECIPE)
    for buffer in model.buffers():
        buffer.fill_(1.0)
    owner, _, last = name.rpartition(".")
    model.get_submodule(owner)._buffers[last] = torch.ones(4, dtype=torch.bfloat16)
    with quire.autocast(recipe=RECIPE), pytest.raises(TypeError, match=f"{last} must be float32, got torch.bfloat16"):
        model(torch.randn(8, 64))
    model.load_state_dict({key: value.float() for key, value in model.state_dict().items()}, assign=True)
    with quire.autocast(recipe=RECIPE):
        assert model(torch.randn(8, 64)).isfinite().all()


@pytest.mark.parametrize("work", [precision_ranks.fully_sharded, precision_ranks.old_fsdp])
def test_mixed_precision_of_shards_leaves_states_alone(two, work):
    two.run(work)


def test_buffers_that_old_fsdp_converts_are_refused(two):
    for message in two.run(precision_ranks.old_fsdp_that_converts_buffers):
        assert "expert_bias must be float32, got torch.bfloat16" in message and "buffer_dtype=torch.float32" in message
