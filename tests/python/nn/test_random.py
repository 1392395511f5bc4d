"""Stochastic rounding: where its random numbers come from, and how a run can be continued exactly."""

import pytest
import torch

import quire
from quire.recipe import MXFP8BlockScaling, NVFP4BlockScaling

pytestmark = pytest.mark.any_device

NV = NVFP4BlockScaling()


def gradients_of_steps(layers, x, steps, recipe=NV):
    """Gradients of each step."""
    out = []
    for _ in range(steps):
        layers.zero_grad()
        with quire.autocast(recipe=recipe):
            y = layers(x)
        y.float().square().sum().backward()
        out.append([p.grad.clone() for p in layers.parameters()])
    return out


@pytest.fixture
def model():
    torch.manual_seed(2)
    return torch.nn.Sequential(quire.Linear(48, 64), torch.nn.ReLU(), quire.Linear(64, 32, bias=False)).bfloat16()


@pytest.fixture
def x(make_x):
    return make_x(40, 48)


def counters(model):
    return [state[1].item() for state in quire.rng_state(model).values()]


def test_seeds_differ_between_layers_and_repeat_with_torch_seed(model):
    seeds = [state[0].item() for state in quire.rng_state(model).values()]
    assert len(set(seeds)) == 2 and all(seed >= 0 for seed in seeds)
    torch.manual_seed(2)
    again = quire.Linear(48, 64)
    assert again.sr_state.tolist() == [seeds[0], 0]


def test_the_counter_advances_once_per_backward_and_layer(model, x):
    gradients_of_steps(model, x, 3)
    assert counters(model) == [3, 3]
    with quire.autocast(recipe=NV):
        model(x), model(x)
    assert counters(model) == [3, 3]


def test_rounding_differs_from_step_to_step_and_only_by_the_counter(model, x, equal_bits):
    first, second = gradients_of_steps(model, x, 2)
    assert not equal_bits(first[0], second[0])
    for layer in (model[0], model[2]):
        layer.sr_state[1] = 0
    (again,) = gradients_of_steps(model, x, 1)
    assert all(equal_bits(a, b) for a, b in zip(first, again, strict=True))


def test_rounding_differs_with_the_seed(model, x, equal_bits):
    (first,) = gradients_of_steps(model, x, 1)
    state = {name: torch.tensor([value[0] + 1, 0]) for name, value in quire.rng_state(model).items()}
    quire.set_rng_state(model, state)
    (second,) = gradients_of_steps(model, x, 1)
    assert not equal_bits(first[2], second[2])


def test_the_two_directions_of_dy_draw_from_the_offsets_of_the_contract(model, x):
    layer = model[2]
    layer.sr_state.copy_(torch.tensor([2**62 + 5, 3]))
    h = torch.randn(40, 64).bfloat16().requires_grad_()
    dy = torch.randn(40, 32).bfloat16()
    with quire.debug.operands() as records, quire.autocast(recipe=NV):
        layer(h).backward(dy)
    used = next(record.tensor for record in records if record.role == "dy")
    rowwise = quire.quantize(dy, used.spec, seed=2**62 + 5, offset=6)
    columnwise = quire.quantize(dy, used.spec, rowwise=False, columnwise=True, seed=2**62 + 5, offset=7)
    assert torch.equal(used.rowwise_data, rowwise.rowwise_data)
    assert torch.equal(used.columnwise_data, columnwise.columnwise_data)


def test_a_recipe_that_rounds_to_nearest_uses_no_state(model, x):
    for recipe in (MXFP8BlockScaling(), NVFP4BlockScaling(disable_stochastic_rounding=True)):
        gradients_of_steps(model, x, 2, recipe)
    assert counters(model) == [0, 0]


def test_a_run_can_be_continued_exactly(model, x, equal_bits):
    gradients_of_steps(model, x, 2)
    kept = quire.rng_state(model)
    expected = gradients_of_steps(model, x, 2)
    assert counters(model) == [4, 4] and [v[1].item() for v in kept.values()] == [2, 2]  # a copy, not a view
    quire.set_rng_state(model, kept)
    for a, b in zip(expected, gradients_of_steps(model, x, 2), strict=True):
        assert all(equal_bits(p, q) for p, q in zip(a, b, strict=True))


def test_the_state_is_named_by_module_and_not_in_the_state_dict(model):
    assert list(quire.rng_state(model)) == ["0", "2"]
    assert list(quire.rng_state(model[0])) == [""]
    assert list(model.state_dict()) == ["0.weight", "0.bias", "2.weight"]
    assert quire.rng_state(torch.nn.Linear(4, 4)) == {}


GOOD = torch.tensor([1, 2])
BAD = [
    ({"0": GOOD}, "layers that the state has not: '2'"),
    ({"0": GOOD, "2": GOOD, "3": GOOD}, "layers that the model has not: '3'"),
    (
        {"0": GOOD, "2": torch.tensor([1.0, 2.0])},
        r"random state of '2' must have values and be dense int64 of shape \[2\], got torch.float32",
    ),
    ({"0": GOOD, "2": torch.tensor([1, 2, 3])}, r"got torch.int64 \[3\]"),
    ({"0": GOOD, "2": [1, 2]}, r"got \[1, 2\]"),
    ({"0": GOOD, "2": GOOD.to("meta")}, r"'2' must have values and .*, got torch.int64 \[2\] on meta"),
    ({"0": GOOD, "2": GOOD.to_sparse()}, r"dense int64 of shape \[2\], got torch.int64 \[2\] torch.sparse_coo"),
    ({"0": GOOD, "2": GOOD, 3: GOOD, "a": GOOD}, "the model has not: 'a', 3"),
]


@pytest.mark.parametrize("state, words", BAD)
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(state, words, model):
    before = quire.rng_state(model)
    with pytest.raises(ValueError, match=f"set_rng_state: .*{words}"):
        quire.set_rng_state(model, state)
    after = quire.rng_state(model)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_state_of_layers_on_meta_may_be_there_too(model):
    state = quire.rng_state(model)
    quire.set_rng_state(model.to("meta"), {name: value.to("meta") for name, value in state.items()})
    with pytest.raises(TypeError, match="^set_rng_state: model must be a torch.nn.Module, got 3"):
        quire.set_rng_state(3, state)


def test_compiled_training_rounds_as_eager_training(model, x, compiler, equal_bits):
    eager = gradients_of_steps(model, x, 3)
    for layer in (model[0], model[2]):
        layer.sr_state[1] = 0
    compiled = gradients_of_steps(compiler(model), x, 3)
    assert compiler.graphs == 1 and counters(model) == [3, 3]
    for a, b in zip(eager, compiled, strict=True):
        assert all(equal_bits(p, q) for p, q in zip(a, b, strict=True))
