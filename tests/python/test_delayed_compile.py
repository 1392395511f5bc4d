"""Delayed scaling in compiled functions: bit for bit what eager does, in one graph, autocast outside or inside."""

import copy
import functools
import gc

import pytest
import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import quire
from delayed_reference import RECIPE, varied
from quire.recipe import DelayedScaling, MXFP8BlockScaling

STATE = ("fwd_scale", "bwd_scale", "fwd_amax", "bwd_amax", "fwd_history", "bwd_history")


@pytest.fixture
def make_model():
    def make():
        torch.manual_seed(0)
        return torch.nn.Sequential(quire.Linear(16, 32), torch.nn.ReLU(), quire.Linear(32, 16))

    return make


def save_the_second_product(context, op, *args, **kwargs):
    wide = op is torch.ops.quire.linear_fwd.default and args[3] == 32
    return CheckpointPolicy.MUST_SAVE if wide else CheckpointPolicy.PREFER_RECOMPUTE


def selective(model, x):
    contexts = functools.partial(create_selective_checkpoint_contexts, save_the_second_product)
    return checkpoint(model, x, use_reentrant=False, context_fn=contexts)


BODIES = {
    "plain": lambda model, x: model(x),
    "twice": lambda model, x: model(model(x)),
    "checkpoint": lambda model, x: checkpoint(model, x, use_reentrant=False),
    "selective": selective,
}


def snapshot(model):
    kept = [p.grad for p in model.parameters()]
    for layer in model:
        if isinstance(layer, quire.Linear):
            kept += [getattr(layer.delayed, name) for name in STATE]
    return [tensor.clone() for tensor in kept if tensor is not None]


def train(model, function, tokens=(8, 8, 8, 8, 8), around=quire.autocast, optimizer=True):
    """Steps of `function` with backward inside `around`; results, gradients and states after every one of them."""
    out = []
    for step, m in enumerate(tokens):
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(3.0 if step % 2 else 0.4)
        x = varied(step, m, 16, low=-3, high=3).requires_grad_()
        with around():
            y = function(x)
            y.backward(varied(step, *y.shape, seed=1))
        out += [y.detach().clone(), x.grad.clone(), *snapshot(model)]
    return out


def delayed():
    return quire.autocast(recipe=RECIPE)


def nothing():
    return quire.autocast(enabled=False)


def equal(a, b, same):
    return len(a) == len(b) and all(same(p, q) for p, q in zip(a, b, strict=True))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
@pytest.mark.parametrize("place", ["outside", "inside"])
def test_training_is_that_of_eager(make_model, compiler, equal_bits, place, body, backend):
    eager = make_model()
    expected = train(eager, lambda x: body(eager, x), around=delayed)
    model = make_model()

    def inside(x):
        with quire.autocast(recipe=DelayedScaling(amax_history_len=4)):
            return body(model, x)

    function = inside if place == "inside" else lambda x: body(model, x)
    found = train(model, compiler(function, backend=backend), around=delayed if place == "outside" else nothing)
    assert equal(found, expected, equal_bits)
    assert compiler.graphs == 1


@pytest.mark.parametrize("place", ["outside", "inside"])
def test_batches_of_any_size_share_a_graph_and_the_state(make_model, compiler, equal_bits, place):
    tokens = (8, 5, 33, 2, 16)
    eager, model = make_model(), make_model()
    expected = train(eager, eager, tokens, around=delayed)

    def inside(x):
        with quire.autocast(recipe=DelayedScaling(amax_history_len=4)):
            return model(x)

    compiled = compiler(inside if place == "inside" else model, dynamic=True)
    found = train(model, compiled, tokens, around=delayed if place == "outside" else nothing)
    assert equal(found, expected, equal_bits) and compiler.graphs == 1


@pytest.mark.parametrize(
    "backend", ["inductor"]
)  # "aot_eager" writes state by copy_, which bumps the version of bwd_amax
@pytest.mark.parametrize("body", ["plain", "checkpoint"])
@pytest.mark.parametrize("place", ["outside", "inside"])
def test_forwards_before_backwards_use_the_scales_of_their_own_forward(
    make_model, compiler, equal_bits, place, body, backend
):
    def run(model, function, around):
        out = []
        for step in range(0, 9, 3):
            passes = []
            for i in range(3):
                x = varied(step + i, 8, 16, low=-3, high=3).requires_grad_()
                with around():
                    passes.append((x, function(x)))
            for i, (x, y) in enumerate(passes):
                y.backward(varied(step + i, 8, 16, seed=1))
                out += [y.detach().clone(), x.grad.clone()]
            out += snapshot(model)
        return out

    eager, model = make_model(), make_model()
    expected = run(eager, eager, delayed)  # not recomputed: with the scales of its forward by construction

    def inside(x):
        with quire.autocast(recipe=DelayedScaling(amax_history_len=4)):
            return BODIES[body](model, x)

    function = inside if place == "inside" else lambda x: BODIES[body](model, x)
    found = run(model, compiler(function, backend=backend), delayed if place == "outside" else nothing)
    assert equal(found, expected, equal_bits) and compiler.graphs == 1


@torch._functorch.config.patch(donated_buffer=False)
@pytest.mark.parametrize("place", ["outside", "inside"])
def test_a_graph_that_is_kept_gives_the_same_gradient_again(make_model, compiler, equal_bits, place):
    model = make_model()
    train(model, model, around=delayed)

    def inside(x):
        with quire.autocast(recipe=DelayedScaling(amax_history_len=4)):
            return model(x)

    x, dy = varied(5, 8, 16).requires_grad_(), varied(5, 8, 16, seed=1)
    with delayed() if place == "outside" else nothing():
        y = compiler(inside if place == "inside" else model, backend="inductor")(x)
    first = torch.autograd.grad(y, x, dy, retain_graph=True)[0]
    with delayed():
        pass  # a step between the two
    assert equal_bits(torch.autograd.grad(y, x, dy)[0], first)


def test_evaluation_between_training_steps_collects_and_compiles_once_more(make_model, compiler, equal_bits):
    def run(model, train_function, function):
        out = []
        for step in range(4):
            out += train(model, train_function, (8,), around=nothing)
            model.eval()
            with torch.no_grad():
                out += [function(varied(step, 4, 16, seed=2)), *snapshot(model)]
            model.train()
        return out

    def inside(model):
        def function(x):
            with quire.autocast(recipe=DelayedScaling(amax_history_len=4)):
                return model(x)

        return function

    eager, model = make_model(), make_model()
    expected = run(eager, inside(eager), inside(eager))
    compiled = compiler(inside(model))
    assert equal(run(model, compiled, compiled), expected, equal_bits)
    assert compiler.graphs == 2


def test_several_recipes_and_autocasts_in_one_graph(compiler, equal_bits):
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(quire.Linear(16, 16) for _ in range(4)))
    twin = copy.deepcopy(model)

    def nested(layers):
        def function(x):
            with quire.autocast(recipe=DelayedScaling(amax_history_len=4)):
                x = layers[0](x)
                with quire.autocast(recipe=DelayedScaling(amax_history_len=3, margin=1)):
                    x = layers[1](x)
            with quire.autocast(recipe=MXFP8BlockScaling()):
                x = layers[3](x)
                with quire.autocast(recipe=DelayedScaling(amax_history_len=2, amax_compute_algo="most_recent")):
                    return layers[2](x)

        return function

    expected = train(twin, nested(twin), around=nothing)
    assert equal(train(model, compiler(nested(model)), around=nothing), expected, equal_bits)
    assert compiler.graphs == 1


def test_layers_that_share_a_compiled_block_share_its_graph(compiler, equal_bits):
    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = quire.Linear(16, 16)

        def forward(self, x):
            return self.linear(x).relu()

    torch.manual_seed(0)
    model = torch.nn.Sequential(*(Block() for _ in range(12)))
    eager = copy.deepcopy(model)
    blocks = compiler(Block.forward)
    for block in model:
        block.forward = functools.partial(blocks, block)

    def step(m):
        def states():
            return [getattr(block.linear.delayed, name).clone() for block in m for name in STATE]

        out = []
        for i in range(3):
            x = varied(i, 8, 16, low=-2, high=2).requires_grad_()
            with delayed():
                y = m(x)
            y.backward(varied(i, 8, 16, seed=1))
            out += [y.detach(), x.grad, *states()]
        return out

    assert equal(step(model), step(eager), equal_bits)
    assert compiler.graphs == 1


def test_changing_the_length_of_the_history_recompiles_nothing_outside(make_model, compiler, equal_bits):
    def run(model, function):
        out = []
        for length in (4, 2, 8, 1):
            around = functools.partial(quire.autocast, recipe=DelayedScaling(amax_history_len=length))
            out += train(model, function, (8, 8, 8), around)
        return out

    eager, model = make_model(), make_model()
    assert equal(run(model, compiler(model)), run(eager, eager), equal_bits)
    assert compiler.graphs == 1


def test_calibration_in_a_graph(make_model, compiler, equal_bits):
    def function(model):
        def calibrate(x):
            with quire.autocast(enabled=False, calibrating=True, recipe=DelayedScaling(amax_history_len=4)):
                return model(x)

        return calibrate

    eager, model = make_model(), make_model()
    with torch.no_grad():
        x = varied(0, 8, 16)
        expected, found = function(eager)(x), compiler(function(model))(x)
    assert equal_bits(found, expected) and eager[0].delayed.fwd_amax[0] > 0
    assert equal(snapshot(model), snapshot(eager), equal_bits)


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


@pytest.mark.parametrize("options", UNFUSED.values(), ids=UNFUSED)
@pytest.mark.parametrize("made, backend", [("before", "inductor"), ("before", "aot_eager"), ("within", "aot_eager")])
def test_functions_of_the_user_are_called_by_a_step_in_a_graph(
    options, made, backend, make_model, compiler, equal_bits
):
    recipe = DelayedScaling(amax_history_len=4, margin=1, **options)

    def run(model):
        def function(x):
            own = recipe if made == "before" else DelayedScaling(amax_history_len=4, margin=1, **options)
            with quire.autocast(recipe=own):
                return model(x)

        return function

    eager, model = make_model(), make_model()
    expected = train(eager, run(eager), around=nothing)
    found = train(model, compiler(run(model), backend=backend), around=nothing)
    assert equal(found, expected, equal_bits) and compiler.graphs == 1
    assert not torch.equal(model[0].delayed.fwd_scale, torch.ones(3))


@pytest.mark.parametrize("options", [{}, {"amax_compute_algo": mean}], ids=["fused", "unfused"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_step_makes_new_scales_and_leaves_those_that_others_hold(options, compiled, make_model, compiler):
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


def test_a_function_with_a_state_is_called_once_for_each_state_and_step(make_model, compiler):
    model, algorithm = make_model(), Kept()
    recipe = DelayedScaling(amax_history_len=4, amax_compute_algo=algorithm)

    def function(x):
        with quire.autocast(recipe=recipe):
            return model(x)

    function = compiler(function)
    for step in range(4):
        function(varied(step, 8, 16)).sum().backward()
        assert algorithm.calls == 4 * step  # two layers, forward and backward; nothing has been collected at first


def test_a_function_that_raises_within_a_graph_changes_nothing(make_model, compiler, equal_bits):
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
    assert equal(snapshot(model), before, equal_bits) and quire.active_recipe() is None
    returns[0] = None
    function(varied(2, 8, 16)).sum().backward()
    assert not equal(snapshot(model), before, equal_bits)


def test_a_layer_made_later_is_updated_by_the_graph(make_model, compiler, equal_bits):
    def run(compiled):
        model = make_model()
        late = []

        def function(x):
            with quire.autocast(recipe=DelayedScaling(amax_history_len=4)):
                x = model(x)
                for layer in late:
                    x = layer(x)
                return x

        function = compiler(function) if compiled else function
        out = train(model, function, (8, 8), around=nothing)
        torch.manual_seed(1)
        late.append(quire.Linear(16, 16))
        return out + train(model, function, (8, 8, 8), around=nothing) + snapshot(torch.nn.Sequential(*late))

    assert equal(run(True), run(False), equal_bits)


def test_layers_that_nothing_refers_to_do_not_get_into_a_graph(make_model, compiler, equal_bits):
    def run(compiled):
        model = make_model()

        def function(x):
            with quire.autocast(recipe=DelayedScaling(amax_history_len=4)):
                return model(x)

        function = compiler(function) if compiled else function
        out = train(model, function, (8,), around=nothing)
        gc.collect()
        return out + train(model, function, (8, 8), around=nothing)

    expected = run(False)
    gc.disable()  # garbage lives until the graph has been traced
    try:
        garbage = make_model()
        garbage.itself = [garbage]
        del garbage
        assert equal(run(True), expected, equal_bits) and compiler.graphs == 1
    finally:
        gc.enable()
