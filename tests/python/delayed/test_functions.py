"""Delayed scaling with functions of the user, and what a step does to scales, in compiled functions."""

import pytest
import torch

import pytorch
import quire
from python.delayed.delayed_reference import varied
from python.delayed.delayed_training import make_model, nothing, snapshot, train_with_changes
from quire.recipe import DelayedScaling
from steps import same

pytestmark = pytest.mark.any_device


def mean(history):
    return history.mean(0)


def halved(amax, scale, largest, recipe):
    return recipe.fp8_format.value[0] / amax.clamp(min=1e-30) / 2 + 0 * scale + 0 * largest


class Kept:
    """A function that has a state."""

    def __init__(self):
        self.calls = 0

    def __call__(self, history):
        self.calls += 1
        return history.amax(0) * 2


UNFUSED = {
    "amax": {"amax_compute_algo": mean},
    "scale": {"scaling_factor_compute_algo": halved},
    "both": {"amax_compute_algo": mean, "scaling_factor_compute_algo": halved},
    "lambda": {"amax_compute_algo": lambda history: history.amax(0)},
}


@pytest.mark.parametrize(
    ("options", "made", "backend"),
    [
        *((name, "before", "aot_eager") for name in UNFUSED),
        ("both", "before", "inductor"),
        ("both", "within", "aot_eager"),
    ],
)
def test_functions_of_the_user_are_called_by_a_step_in_a_graph(options, made, backend, compiler):
    options = UNFUSED[options]
    recipe = DelayedScaling(amax_history_len=4, margin=1, **options)

    def run(model):
        def function(x):
            own = recipe if made == "before" else DelayedScaling(amax_history_len=4, margin=1, **options)
            with quire.autocast(recipe=own):
                return model(x)

        return function

    eager, model = make_model(), make_model()
    expected = train_with_changes(eager, run(eager), around=nothing)
    found = train_with_changes(model, compiler(run(model), backend=backend), around=nothing)
    assert same(found, expected) and compiler.graphs == 1
    assert not torch.equal(model[0].delayed.fwd_scale, torch.ones(3))


@pytest.mark.parametrize("options", [{}, {"amax_compute_algo": mean}], ids=["fused", "unfused"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_step_makes_new_scales_and_leaves_those_that_others_hold(options, compiled, compiler):
    model = make_model()
    recipe = DelayedScaling(amax_history_len=4, **options)

    def function(x):
        with quire.autocast(recipe=recipe):
            return model(x)

    function = compiler(function) if compiled else function
    function(varied(0, 8, 16)).sum().backward()
    held = [getattr(layer.delayed, name) for layer in model[::2] for name in ("fwd_scale", "bwd_scale")]
    values = [tensor.clone() for tensor in held]
    function(varied(1, 8, 16))
    new = [getattr(layer.delayed, name) for layer in model[::2] for name in ("fwd_scale", "bwd_scale")]
    assert all(torch.equal(tensor, value) for tensor, value in zip(held, values, strict=True))
    assert not any(torch.equal(tensor, value) for tensor, value in zip(new, values, strict=True))


@pytorch.fails_before("2.13", "Dynamo does not call __repr__ of an object of a class that it does not know")
def test_a_function_with_a_state_is_called_once_for_each_state_and_step(compiler):
    model, algorithm = make_model(), Kept()
    recipe = DelayedScaling(amax_history_len=4, amax_compute_algo=algorithm)

    def function(x):
        with quire.autocast(recipe=recipe):
            return model(x)

    function = compiler(function)
    for step in range(4):
        function(varied(step, 8, 16)).sum().backward()
        assert algorithm.calls == 4 * step  # two layers, forward and backward; nothing has been collected at first


def test_a_function_that_raises_within_a_graph_changes_nothing(compiler):
    model, returns = make_model(), [None]

    def algorithm(history):
        return history.amax(0) if returns[0] is None or history.shape[1] == 3 else returns[0]

    recipe = DelayedScaling(amax_history_len=4, amax_compute_algo=algorithm)

    def run(x):
        with quire.autocast(recipe=recipe):
            return model(x)

    function = compiler(run)
    for step in range(2):
        function(varied(step, 8, 16)).sum().backward()
    before = snapshot(model)
    returns[0] = torch.zeros(7)  # for backward, which is the second to be asked
    with pytest.raises(TypeError, match=r"amax_compute_algo must return a torch.float32 tensor of shape \[2\]"):
        function(varied(2, 8, 16))
    assert same(snapshot(model), before) and quire.active_recipe() is None
    returns[0] = None
    function(varied(2, 8, 16)).sum().backward()
    assert not same(snapshot(model), before)
