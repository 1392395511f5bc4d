"""Between a forward pass and its backward: exceptions, other recipes, layers that are moved, copied or written to."""

import copy

import pytest
import torch

import quire
from every_recipe import ALL, DELAYED, every_recipe
from pairwise import pairwise

pytestmark = pytest.mark.any_device

ways = pytest.mark.parametrize("forward", ["eager", "compiled"], indirect=True)


@pytest.fixture
def forward(request, make_layer, make_x, compiler):
    """(recipe) -> (layer, x, y) of one forward pass; always with the same numbers."""
    compiled = getattr(request, "param", "eager") == "compiled"

    def run(recipe):
        layer, x = make_layer(dtype=torch.float32), make_x(16, 96, dtype=torch.float32)
        with quire.autocast(recipe=recipe):
            return layer, x, (compiler(layer) if compiled else layer)(x)

    return run


def gradients(layer, x, y):
    y.square().sum().backward()
    return x.grad, layer.weight.grad, layer.bias.grad


def tensors_of(layer):
    return {name: value.clone() for name, value in vars(layer.delayed).items() if isinstance(value, torch.Tensor)}


@every_recipe
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_an_exception_inside_of_autocast_leaves_it_as_it_was(recipe, compiled, make_layer, make_x, compiler):
    other, twin = make_layer(), make_layer()
    for own, fails in ((other, True), (twin, False)):
        layer = compiler(own, dynamic=True) if compiled else own
        for _ in range(3):
            with quire.autocast(recipe=recipe):
                y = layer(make_x(8, 96))
                if fails:
                    with pytest.raises(Exception, match="agree on K"), quire.autocast(recipe=ALL["fp8_current"]):
                        layer(make_x(8, 95))
            y.sum().backward()
            try:
                with quire.autocast(recipe=recipe):
                    if fails:
                        raise KeyError
            except KeyError:
                pass
            assert quire.active_recipe() is None
    mine, expected = tensors_of(other), tensors_of(twin)
    assert torch.equal(other.weight.grad, twin.weight.grad) and torch.equal(other.sr_state, twin.sr_state)
    if recipe.delayed():  # scales and histories; the numbers of rules differ
        assert all(torch.equal(mine[name], expected[name]) for name in expected if name != "usage")


@every_recipe
@ways
def test_a_second_backward_pass_is_refused_and_counts_for_nothing(recipe, forward):
    layer, x, y = forward(recipe)
    y.sum().backward()
    before = [t.clone() for t in (layer.sr_state, layer.weight.grad, layer.delayed.bwd_amax)]
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        y.sum().backward()
    after = (layer.sr_state, layer.weight.grad, layer.delayed.bwd_amax)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@every_recipe
@ways
def test_backward_is_that_of_its_forward_under_another_recipe(recipe, forward):
    expected = gradients(*forward(recipe))
    for other in ALL.values():
        layer, x, y = forward(recipe)
        with quire.autocast(recipe=other):  # a step of delayed scaling may end here
            found = gradients(layer, x, y)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@every_recipe
@ways
def test_a_copy_between_forward_and_backward_has_no_part_in_it(recipe, forward):
    expected = gradients(*forward(recipe))
    layer, x, y = forward(recipe)
    other = copy.deepcopy(layer)
    state = other.sr_state.clone()
    found = gradients(layer, x, y)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert other.weight.grad is None and torch.equal(other.sr_state, state) and not other.delayed.bwd_amax.any()


MOVES = {
    "bfloat16": lambda m: m.to(torch.bfloat16),
    "float64": lambda m: m.double(),
    "meta": lambda m: m.to("meta"),
}


@pytest.mark.parametrize(
    ("recipe", "forward", "move"), pairwise(list(ALL), ["eager", "compiled"], list(MOVES)), indirect=["forward"]
)
def test_a_layer_moved_between_forward_and_backward_does_as_torch_does(recipe, move, forward, make_x):
    recipe, move = ALL[recipe], MOVES[move]
    layer, x, y = forward(recipe)
    twin = torch.nn.Linear(96, 64)
    twin_x = x.detach().requires_grad_()
    twin_y = twin(twin_x)
    results = []
    for module, leaf, result in ((layer, x, y), (twin, twin_x, twin_y)):
        move(module)
        try:
            result.sum().backward()
            results.append(
                [None if t is None else (t.dtype, t.device, t.shape) for t in (leaf.grad, module.weight.grad)]
            )
        except RuntimeError as error:
            results.append(str(error)[:60])
    assert results[0] == results[1]
    if not layer.weight.is_meta and layer.weight.dtype != torch.float64:
        with quire.autocast(recipe=recipe):
            layer(make_x(4, 96)).sum().backward()  # as usable as before


@ways
def test_a_weight_written_between_forward_and_backward_counts_as_it_was(forward):
    expected = gradients(*forward(ALL["mxfp8"]))
    layer, x, y = forward(ALL["mxfp8"])
    with torch.no_grad():
        layer.weight.zero_()
    found = gradients(layer, x, y)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_calibration_that_fails_collects_nothing(make_layer, make_x):
    layer = make_layer()
    before = tensors_of(layer)
    with quire.autocast(False, calibrating=True, recipe=DELAYED), pytest.raises(RuntimeError):
        layer(make_x(8, 95))
    assert all(torch.equal(value, before[name]) for name, value in tensors_of(layer).items() if name in before)
