"""Delayed scaling in compiled functions: bit for bit what eager does, in one graph, autocast outside or inside."""

import copy
import functools
import gc

import pytest
import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import quire
from pairwise import pairwise
from python.delayed.delayed_reference import varied
from python.delayed.delayed_training import STATE, delayed, make_model, nothing, snapshot, train_with_changes
from quire.recipe import DelayedScaling, MXFP8BlockScaling
from steps import same


def save_the_second_product(context, op, *args, **kwargs):
    wide = op is torch.ops.quire.linear_fwd.default and args[4] == 32
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


@pytest.mark.parametrize(
    ("place", "body", "backend"), pairwise(["outside", "inside"], list(BODIES), ["aot_eager", "inductor"])
)
def test_training_is_that_of_eager(compiler, place, body, backend):
    body = BODIES[body]
    eager = make_model()
    expected = train_with_changes(eager, lambda x: body(eager, x), around=delayed)
    model = make_model()

    def inside(x):
        with quire.autocast(recipe=DelayedScaling(amax_history_len=4)):
            return body(model, x)

    function = inside if place == "inside" else lambda x: body(model, x)
    found = train_with_changes(
        model, compiler(function, backend=backend), around=delayed if place == "outside" else nothing
    )
    assert same(found, expected)
    assert compiler.graphs == 1


@pytest.mark.parametrize("first", [13, 2, 3, 64, 1024], ids="{} tokens first".format)  # all but 13: sizes of states
@pytest.mark.parametrize("place", ["outside", "inside"])
def test_batches_of_any_size_share_a_graph_and_the_state(compiler, place, first):
    tokens = (first, 5, 33, 16)
    eager, model = make_model(), make_model()
    expected = train_with_changes(eager, eager, tokens, around=delayed)

    def inside(x):
        with quire.autocast(recipe=DelayedScaling(amax_history_len=4)):
            return model(x)

    compiled = compiler(inside if place == "inside" else model, dynamic=True)
    found = train_with_changes(model, compiled, tokens, around=delayed if place == "outside" else nothing)
    assert same(found, expected) and compiler.graphs == 1


@pytest.mark.parametrize("make", [quire.LayerNormLinear, quire.LayerNormMLP])
def test_a_norm_whose_scale_is_a_view_of_a_state_with_symbolic_sizes_is_one_graph(compiler, make):
    torch.manual_seed(0)
    eager = make(48, 32)
    model = copy.deepcopy(eager)
    compiled = compiler(model, dynamic=True)
    for tokens in (13, 5, 33):
        x = varied(tokens, tokens, 48)
        with delayed():
            assert same([compiled(x)], [eager(x)])
    assert compiler.graphs == 1


@pytest.mark.parametrize(
    "backend", ["inductor"]
)  # "aot_eager" writes state by copy_, which bumps the version of bwd_amax
@pytest.mark.parametrize("body", ["plain", "checkpoint"])
@pytest.mark.parametrize("place", ["outside", "inside"])
def test_forwards_before_backwards_use_the_scales_of_their_own_forward(compiler, place, body, backend):
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
    assert same(found, expected) and compiler.graphs == 1


@torch._functorch.config.patch(donated_buffer=False)
@pytest.mark.parametrize("place", ["outside", "inside"])
def test_a_graph_that_is_kept_gives_the_same_gradient_again(compiler, equal_bits, place):
    model = make_model()
    train_with_changes(model, model, around=delayed)

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


def test_evaluation_between_training_steps_collects_and_compiles_once_more(compiler):
    def run(model, train_function, function):
        out = []
        for step in range(4):
            out += train_with_changes(model, train_function, (8,), around=nothing)
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
    assert same(run(model, compiled, compiled), expected)
    assert compiler.graphs == 2


def test_several_recipes_and_autocasts_in_one_graph(compiler):
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

    expected = train_with_changes(twin, nested(twin), around=nothing)
    assert same(train_with_changes(model, compiler(nested(model)), around=nothing), expected)
    assert compiler.graphs == 1


def test_layers_that_share_a_compiled_block_share_its_graph(compiler):
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

    assert same(step(model), step(eager))
    assert compiler.graphs == 1


def test_changing_the_length_of_the_history_recompiles_nothing_outside(compiler):
    def run(model, function):
        out = []
        for length in (4, 2, 8, 1):
            around = functools.partial(quire.autocast, recipe=DelayedScaling(amax_history_len=length))
            out += train_with_changes(model, function, (8, 8, 8), around)
        return out

    eager, model = make_model(), make_model()
    assert same(run(model, compiler(model)), run(eager, eager))
    assert compiler.graphs == 1


def test_calibration_in_a_graph(compiler, equal_bits):
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
    assert same(snapshot(model), snapshot(eager))


def test_a_layer_made_later_is_updated_by_the_graph(compiler):
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
        out = train_with_changes(model, function, (8, 8), around=nothing)
        torch.manual_seed(1)
        late.append(quire.Linear(16, 16))
        return (
            out + train_with_changes(model, function, (8, 8, 8), around=nothing) + snapshot(torch.nn.Sequential(*late))
        )

    assert same(run(True), run(False))


def test_layers_that_nothing_refers_to_do_not_get_into_a_graph(compiler):
    def run(compiled):
        model = make_model()

        def function(x):
            with quire.autocast(recipe=DelayedScaling(amax_history_len=4)):
                return model(x)

        function = compiler(function) if compiled else function
        out = train_with_changes(model, function, (8,), around=nothing)
        gc.collect()
        return out + train_with_changes(model, function, (8, 8), around=nothing)

    expected = run(False)
    gc.disable()  # garbage lives until the graph has been traced
    try:
        garbage = make_model()
        garbage.itself = [garbage]
        del garbage
        assert same(run(True), expected) and compiler.graphs == 1
    finally:
        gc.enable()
