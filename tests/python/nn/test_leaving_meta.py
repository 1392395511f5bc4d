"""Layers that are made on the meta device and get their values later, by every way that frameworks use."""

import pytest
import torch

import quire
from every_feature import LAYERS
from every_recipe import ALL, in_any_precision
from steps import call, same, train

pytestmark = pytest.mark.any_device

every_layer = pytest.mark.parametrize("name", LAYERS)


def assign(layer, values):
    """torchtune, transformers until 4."""
    layer.load_state_dict(values, assign=True)


def one_by_one(layer, values):
    """transformers from 5 on."""
    for name, value in values.items():
        owner, _, last = name.rpartition(".")
        kind = torch.nn.Parameter if last in layer.get_submodule(owner)._parameters else torch.clone
        setattr(layer.get_submodule(owner), last, kind(value))


def behind_its_back(layer, values):
    """accelerate's set_module_tensor_to_device."""
    for name, value in values.items():
        owner, _, last = name.rpartition(".")
        module = layer.get_submodule(owner)
        if last in module._parameters:
            module._parameters[last] = torch.nn.Parameter(value)
        else:
            module._buffers[last] = value


def behind_its_back_and_to(layer, values):
    """accelerate's load_checkpoint_and_dispatch, which ends with Module.to."""
    behind_its_back(layer, values)
    layer.to("cpu")


def swapped(layer, values):
    """assign() where parameters stay the same objects."""
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        layer.load_state_dict(values, assign=True)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


def emptied(layer, values):
    """Memory first, values afterwards: fully_shard."""
    layer.to_empty(device="cpu").load_state_dict(values)


def halves(layer, values):
    """A checkpoint in several files."""
    names = list(values)
    for some in (names[: len(names) // 2], names[len(names) // 2 :]):
        layer.load_state_dict({name: values[name] for name in some}, strict=False, assign=True)


WAYS = {way.__name__: way for way in (assign, one_by_one, behind_its_back, behind_its_back_and_to, swapped)}
WAYS |= {way.__name__: way for way in (emptied, halves)}
every_way = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


def pair(name, way):
    """A layer that always had values, and one that got the same ones after the meta device."""
    torch.manual_seed(1)
    there = LAYERS[name]()
    later = LAYERS[name](device="meta")
    assert all(parameter.is_meta for parameter in later.parameters())
    way(later, {key: value.clone() for key, value in there.state_dict().items()})
    return there, later


@every_layer
@in_any_precision
def test_what_left_the_meta_device_does_not_train_otherwise_than_what_was_never_there(name, recipe):
    there, later = pair(name, assign)
    quire.set_rng_state(later, quire.rng_state(there))
    assert same(train(there, recipe), train(later, recipe))
    assert quire.delayed_state(there).keys() == quire.delayed_state(later).keys()


@pytest.mark.cpu_only
@every_layer
@every_way
def test_no_state_stays_behind_on_the_meta_device(name, way):
    there, later = pair(name, way)
    seed = torch.randint(2**63 - 1, (1,), generator=torch.default_generator.clone_state()).item()
    train(later, ALL["nvfp4"], steps=1)  # before anything else could move states
    states = quire.rng_state(later)
    assert states.keys() == quire.rng_state(there).keys() and all(count == 1 for _, count in states.values())
    assert seed in [first for first, _ in states.values()]
    train(later, ALL["delayed"], steps=2)
    found = quire.delayed_state(later)
    assert found and all((state["scale_fwd"] != 1).any() for state in found.values())


def test_scales_are_not_lost_where_parameters_were_replaced_unseen():
    there, later = pair("LayerNormMLP", behind_its_back)
    train(there, ALL["delayed"])
    quire.set_delayed_state(later, quire.delayed_state(there))
    assert str(quire.delayed_state(later)) == str(quire.delayed_state(there))


def test_states_are_not_given_up_while_weights_are_away():
    layer = LAYERS["Linear"]()
    train(layer, ALL["nvfp4"], steps=2)
    before, values = quire.rng_state(layer)[""], layer.state_dict()
    layer.load_state_dict({name: value.to("meta") for name, value in values.items()}, assign=True)
    layer.load_state_dict(values, assign=True)
    assert torch.equal(quire.rng_state(layer)[""], before)
    layer.to_empty(device="cpu")
    assert torch.equal(quire.rng_state(layer)[""], before)


@pytest.mark.parametrize("recipe", [ALL["nvfp4"], ALL["delayed"]], ids=["nvfp4", "delayed"])
def test_a_compiled_layer_does_not_mix_devices(recipe, compiler):
    there, later = pair("LayerNormMLP", assign)
    quire.set_rng_state(later, quire.rng_state(there))
    function = compiler(call)
    assert same(train(there, recipe), train(later, recipe, function=function))
    _, unseen = pair("LayerNormMLP", behind_its_back)
    with pytest.raises(Exception, match=r"state is on meta, and a compiled function .* call .to\('cpu'\) on the model"):
        train(unseen, recipe, steps=1, function=function)
    unseen.to("cpu")
    train(unseen, recipe, steps=1, function=function)
