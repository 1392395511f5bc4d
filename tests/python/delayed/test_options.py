"""Delayed scaling: recomputation, calibration, exceptions, threads, functions of the user (numerics.md 1.6, 1.7)."""

import concurrent.futures
import contextlib
import functools
import itertools
import threading
import time

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import quire
from python.delayed.delayed_reference import RECIPE, Layer, forward, stored, train_step, used_scales, varied
from quire.autocast import active_recipe, active_rule
from quire.delayed import state
from quire.recipe import DelayedScaling

pytestmark = pytest.mark.any_device


@pytest.fixture
def layer():
    torch.manual_seed(0)
    return quire.Linear(16, 32)


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_uses_the_scales_of_the_forward_and_collects_once(layer, reentrant):
    model = Layer()
    for step in range(5):
        x, dy = varied(step, 8, 16).requires_grad_(), varied(step, 8, 32, seed=1)
        with quire.debug.operands() as records, quire.autocast(recipe=RECIPE):
            checkpoint(layer, x, use_reentrant=reentrant).backward(dy)
        model.step()
        assert used_scales(records, "x") == [stored(model.fwd.scale[0])] * 2
        assert used_scales(records, "w") == [stored(model.fwd.scale[1])] * 2
        assert used_scales(records, "dy") == [stored(model.bwd.scale[0])]
        model.forward(x, layer.weight)
        model.backward(dy)
        model.check(layer.delayed)


def test_an_autocast_that_is_recomputed_ends_no_step(layer):
    def block(x):
        with quire.autocast(recipe=RECIPE):
            return layer(x)

    model = Layer()
    for step in range(4):
        x, dy = varied(step, 8, 16).requires_grad_(), varied(step, 8, 32, seed=1)
        with quire.debug.operands() as records:
            checkpoint(block, x, use_reentrant=False).backward(dy)
        model.step()
        assert used_scales(records, "x") == [stored(model.fwd.scale[0])] * 2
        model.forward(x, layer.weight)
        model.backward(dy)
        model.check(layer.delayed)


def test_recorded_scales_serve_a_recomputation_after_other_steps(layer):
    model, recorded = Layer(), quire.delayed.RecordedScales()
    train_step(layer, model, 0)
    x = varied(1, 8, 16).requires_grad_()
    with recorded:
        forward(layer, model, x)
    fwd, bwd = model.fwd.scale.copy(), model.bwd.scale.copy()
    for step in range(2, 7):
        train_step(layer, model, step)
    assert (fwd[:2] != model.fwd.scale[:2]).all() and bwd[0] != model.bwd.scale[0]
    for _ in range(2):
        with quire.debug.operands() as records:
            with recorded, quire.autocast(recipe=RECIPE):
                y = layer(x)
            y.backward(dy := varied(7, 8, 32, seed=1))
        for role, scale in (("x", fwd[0]), ("w", fwd[1]), ("dy", bwd[0])):
            assert used_scales(records, role) == [stored(scale)]
        model.step()
        model.backward(dy)  # and x and w are not collected again
    model.check(layer.delayed)


def test_calibrating_collects_in_high_precision(layer, equal_bits):
    model = Layer()
    x, y = varied(0, 8, 16), None
    with torch.no_grad():
        with quire.autocast(enabled=False, calibrating=True, recipe=RECIPE):
            y = layer(x)
        assert equal_bits(y, torch.nn.functional.linear(x, layer.weight, layer.bias))
        model.forward(x, layer.weight)
        with quire.autocast(enabled=False, calibrating=True):  # the default recipe has no state
            layer(varied(1, 8, 16))
        with quire.autocast(enabled=False, recipe=RECIPE):
            layer(varied(1, 8, 16))
    assert layer.delayed.fwd_amax.tolist() == model.fwd.history[0].tolist()
    train_step(layer, model, 2)  # the first quantized step has calibrated scales


def test_an_exception_inside_leaves_no_trace_but_the_amaxes_of_what_ran(layer):
    model = Layer()
    train_step(layer, model, 0)
    with pytest.raises(ZeroDivisionError):
        forward(layer, model, varied(1, 8, 16)) / (1 // 0)
    train_step(layer, model, 2)
    with pytest.raises(RuntimeError, match="x and w must agree on K"), quire.autocast(recipe=RECIPE):
        layer(torch.full((8, 15), 1e30))
    model.step()
    model.check(layer.delayed)
    train_step(layer, model, 3)


def on(place, function, *arguments):
    """What a thread runs: it does not have the default device of the thread that started it."""
    with place:
        return function(*arguments)


def test_threads_do_not_end_each_others_steps():
    def train(seed, results):
        torch.manual_seed(seed)
        layer, model = quire.Linear(16, 32), Layer()
        for step in range(20):
            layer.weight.data *= 3.0 if step % 2 else 0.1
            x, dy = varied(step, 8, 16, seed=seed).requires_grad_(), varied(step, 8, 32, seed=seed + 9)
            with quire.autocast(recipe=RECIPE):
                y = layer(x)
            y.backward(dy)
            model.step()
            model.forward(x, layer.weight)
            model.backward(dy)
        results[seed] = (layer, model)

    results = {}
    place = torch.get_default_device()
    threads = [threading.Thread(target=on, args=(place, train, seed, results)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 8
    for layer, model in results.values():
        model.check(layer.delayed)


def test_threads_that_reserve_a_state_together_get_the_same_histories(monkeypatch):
    grown, together, found = state._grown, threading.Barrier(4), []

    def slow(*arguments):
        time.sleep(0.02)  # lets the others run
        return grown(*arguments)

    def reserve():
        together.wait()
        shared.reserve(1)
        found.append((shared.fwd_history, shared.bwd_history))

    monkeypatch.setattr(state, "_grown", slow)
    shared = state.DelayedState()
    threads = [threading.Thread(target=reserve) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4 and None not in found[0]
    assert all(one is first for pair in found for one, first in zip(pair, found[0], strict=True))


def mean(history):
    return history.mean(0)


def halved(amax, scale, largest, recipe):
    assert isinstance(recipe, DelayedScaling)
    return largest / amax.clamp(min=1e-30) / 2


UNFUSED = {
    "amax": (functools.partial(DelayedScaling, amax_compute_algo=mean), mean, None),
    "scale": (functools.partial(DelayedScaling, scaling_factor_compute_algo=halved), lambda h: h.amax(0), halved),
    "recent": (
        functools.partial(DelayedScaling, amax_compute_algo="most_recent", scaling_factor_compute_algo=halved),
        lambda h: h[0],
        halved,
    ),
}


@pytest.mark.parametrize("make, amax_of, scale_of", UNFUSED.values(), ids=UNFUSED)
def test_functions_of_the_user_take_the_unfused_path(layer, make, amax_of, scale_of):
    recipe, length = make(margin=1, amax_history_len=3), 3
    fwd, bwd = (torch.zeros(length, 3), torch.ones(3)), (torch.zeros(length, 2), torch.ones(2))
    for step in range(5):
        x, dy = varied(step, 8, 16).requires_grad_(), varied(step, 8, 32, seed=1)
        with quire.debug.operands() as records, quire.autocast(recipe=recipe):
            layer(x).backward(dy)
        if step:
            for (history, scale), largest in ((fwd, 448.0), (bwd, 57344.0)):
                amax = amax_of(history)
                if scale_of:
                    scale.copy_(scale_of(amax, scale, largest, recipe))
                else:
                    scale.copy_(torch.where(amax > 0, (largest / amax) / 2, scale))
                history.copy_(history.roll(-1, 0))
                history[0] = 0
        assert used_scales(records, "x") == [stored(fwd[1][0])] and used_scales(records, "dy") == [stored(bwd[1][0])]
        fwd[0][0] = torch.stack([x.detach().abs().max(), layer.weight.detach().abs().max(), torch.zeros(())])
        bwd[0][0, 0] = dy.abs().max()


@pytest.mark.parametrize("returns", [1.0, torch.zeros(4), torch.zeros(3, dtype=torch.float64)], ids=repr)
def test_a_function_that_returns_something_else_is_named(layer, returns):
    recipe = DelayedScaling(amax_compute_algo=lambda history: returns)
    with quire.autocast(recipe=recipe):
        layer(varied(0, 8, 16))
    with pytest.raises(TypeError, match="amax_compute_algo must return a torch.float32 tensor of shape"):
        with quire.autocast(recipe=recipe):
            pass
    assert active_recipe() is None and layer.delayed.fwd_scale.tolist() == [1] * 3
    with quire.autocast(recipe=DelayedScaling(amax_compute_algo=lambda history: history[0])):
        assert layer.delayed.fwd_scale[0] != 1, "entered anew, as the outermost one, with a function that is right"


def test_a_function_that_raises_leaves_its_layers_alone_and_others_to_their_steps(layer):
    def raises(amax, scale, largest, recipe):
        raise ArithmeticError("of the user")

    other = quire.Linear(16, 8)
    broken = DelayedScaling(scaling_factor_compute_algo=raises)
    with quire.autocast(recipe=broken):
        layer(varied(0, 8, 16))
    with contextlib.suppress(ArithmeticError), quire.autocast(recipe=RECIPE):
        pass
    before = quire.delayed_state(layer)
    for _ in range(2):
        with quire.autocast(recipe=RECIPE):
            other(varied(1, 8, 16))
    assert other.delayed.fwd_scale[0] != 1 and layer.delayed.fwd_scale.tolist() == [1] * 3
    with pytest.raises(ArithmeticError, match="of the user"), quire.autocast(recipe=broken):
        pass
    after = quire.delayed_state(layer)
    assert all(str(after[name]) == str(before[name]) for name in before)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("place", ["outside", "inside"])
def test_an_exported_program_has_the_scales_as_constants_and_collects_nothing(layer, equal_bits, place, strict):
    class Inside(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def forward(self, x):
            with quire.autocast(recipe=RECIPE):
                return self.layer(x)

    model = Layer()
    for step in range(3):
        train_step(layer, model, step)
    x = torch.randn(8, 16)
    with torch.no_grad():
        with quire.autocast(place == "outside", recipe=RECIPE):
            program = torch.export.export(layer if place == "outside" else Inside(), (x,), strict=strict)
        for p in (program, program.run_decompositions()):
            found = p.module()(3 * x)
            model.check(layer.delayed)
            with quire.autocast(recipe=RECIPE):
                assert equal_bits(layer(3 * x), found)
            layer.delayed.fwd_amax.copy_(torch.from_numpy(model.fwd.history[0]))


@pytest.mark.parametrize(
    "make", [lambda: quire.Linear(64, 32), lambda: quire.LayerNormMLP(64, 32)], ids=["linear", "layernorm_mlp"]
)
def test_a_decomposed_program_does_not_want_gradients_of_codes(make, equal_bits):
    torch.manual_seed(0)
    layer, x = make(), torch.randn(8, 64)  # in grad mode, with parameters that want gradients
    with quire.autocast(recipe=RECIPE):
        program = torch.export.export(layer, (x,)).run_decompositions()
        assert equal_bits(program.module()(x).detach(), layer(x).detach())


def test_a_history_that_another_thread_makes_longer_does_not_lose_an_amax():
    def histories(meanwhile):
        torch.manual_seed(0)
        layer = quire.Linear(16, 8)

        def largest(history):
            thread = threading.Thread(target=meanwhile, args=(layer.delayed,))
            thread.start()
            thread.join()
            return history.amax(0)

        for step in range(3):
            with quire.autocast(recipe=DelayedScaling(amax_history_len=4, amax_compute_algo=largest)):
                layer(varied(step, 8, 16)).sum().backward()
        return layer.delayed.fwd_history[:4], layer.delayed.bwd_history[:4]

    # In a thread of its own, with which its rules go: others would go on calling `largest`.
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        place = torch.get_default_device()
        expected = thread.submit(on, place, histories, lambda state: None).result()
        longer = itertools.count(1025, 1000)
        found = thread.submit(on, place, histories, lambda state: state.reserve(next(longer))).result()
    assert all(history[1:].any() for history in expected)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def test_the_slot_of_a_weight_that_was_not_quantized_anew_does_not_roll(layer):
    model, state = Layer(), layer.delayed
    train_step(layer, model, 0)
    for step in range(1, 4):
        with quire.autocast(recipe=RECIPE):
            model.step()
            x = varied(step, 8, 16)
            quire.delayed.collect(state, active_rule(), x.abs().max()[None], None)
            model.forward(x)
        model.check(state)
    assert model.fwd.history[:, 1].tolist() == [0, 0, 0, model.fwd.history[3, 1]] and model.fwd.history[3, 1] > 0
