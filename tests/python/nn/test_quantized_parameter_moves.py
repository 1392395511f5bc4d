"""What others have hung on a quantized parameter is there after Module.to and its kin, as on a plain one."""

import pytest
import torch

import quire
from every_feature import LAYERS
from quire import QuantizedTensor

pytestmark = pytest.mark.any_device

RECIPE = quire.recipe.MXFP8BlockScaling()
MOVES = {
    "to the same": lambda m: m.to("cpu"),
    "cpu": lambda m: m.cpu(),
    "to the same dtype": lambda m: m.float(),
    "half": lambda m: m.half(),
    "to bfloat16 and back": lambda m: m.to(torch.bfloat16).float(),
    "to meta": lambda m: m.to("meta"),
    "to_empty": lambda m: m.to_empty(device="cpu"),
    "share_memory": lambda m: m.share_memory(),
}
ATTRIBUTES = {
    "main_grad": lambda p: torch.zeros(p.shape),
    "grad_added_to_main_grad": lambda p: False,
    "overwrite_main_grad": lambda p: True,
    "tensor_model_parallel": lambda p: {"dim": 0},
}
every_move = pytest.mark.parametrize("move", MOVES.values(), ids=MOVES)
every_layer = pytest.mark.parametrize("name", ["Linear", "LayerNormMLP", "GroupedLinear, one weight", "MoE"])


def quantized(name, on=True):
    torch.manual_seed(1)
    with quire.quantized_model_init(on, recipe=RECIPE, preserve_high_precision_init_val=True):
        return LAYERS[name]()


@every_layer
@every_move
def test_no_attribute_is_dropped(name, move):
    layer = quantized(name)
    given = {}
    for key, parameter in layer.named_parameters():
        if isinstance(parameter, QuantizedTensor):
            given[key] = {attribute: make(parameter) for attribute, make in ATTRIBUTES.items()}
            vars(parameter).update(given[key])
    initial = {key: layer.get_parameter(key).get_high_precision_init_val() for key in given}
    move(layer)
    assert given
    for key, attributes in given.items():
        parameter = layer.get_parameter(key)
        assert all(getattr(parameter, attribute) is value for attribute, value in attributes.items())
        assert parameter.get_high_precision_init_val() is initial[key]


@every_layer
@every_move
def test_no_hook_is_dropped_that_a_plain_parameter_keeps(name, move):
    calls = []
    for quantizes in (False, True):
        layer, called = quantized(name, quantizes), []
        for key, parameter in layer.named_parameters():
            parameter.register_hook(lambda _, key=key, called=called: called.append((key, "hook")))
            parameter.register_post_accumulate_grad_hook(lambda _, key=key, called=called: called.append((key, "post")))
        move(layer)
        for parameter in layer.parameters():
            parameter.sum().backward()
        calls.append(called)
    assert set(calls[0]) <= set(calls[1]) and len(set(calls[1])) == len(calls[1])
    assert len(calls[0]) in (0, 2 * len(list(layer.parameters())))
