"""Delayed scaling of a layer: every scale that is used, and the state, against numpy (numerics.md 1.4-1.7)."""

import numpy as np
import pytest
import torch

import quire
from python.delayed.delayed_reference import (
    RECIPE,
    Layer,
    backward,
    cast,
    forward,
    stored,
    train_step,
    used_scales,
    varied,
)
from quire.recipe import DelayedScaling, Float8CurrentScaling, Format, MXFP8BlockScaling
from steps import assert_rounded

pytestmark = pytest.mark.any_device


@pytest.fixture
def layer():
    torch.manual_seed(0)
    return quire.Linear(16, 32)


RECIPES = {
    "short": DelayedScaling(amax_history_len=1),
    "max": RECIPE,
    "most recent": DelayedScaling(amax_history_len=4, amax_compute_algo="most_recent"),
    "margin": DelayedScaling(amax_history_len=3, margin=2),
    "negative margin": DelayedScaling(amax_history_len=3, margin=-1),
    "e4m3": DelayedScaling(amax_history_len=2, fp8_format=Format.E4M3),
    "long": DelayedScaling(),
    "longer than any": DelayedScaling(amax_history_len=1500),
}


def model_of(recipe):
    element = "e4m3" if recipe.fp8_format == Format.E4M3 else "e5m2"
    return Layer(recipe.amax_history_len, element, algorithm=recipe.amax_compute_algo, margin=recipe.margin)


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_the_ordinary_cycle_uses_the_scales_of_the_contract(layer, recipe):
    model = model_of(recipe)
    for step in range(8):
        train_step(layer, model, step, recipe)


def test_results_are_the_products_of_tensors_cast_with_those_scales(layer):
    model = Layer()
    for step in range(6):
        x, dy = varied(step, 8, 16).requires_grad_(), varied(step, 8, 32, seed=1)
        layer.zero_grad()
        with quire.debug.operands() as records:
            with quire.autocast(recipe=RECIPE):
                y = layer(x)
            y.backward(dy)
        model.step()
        (x_codes, xq), (w_codes, wq) = cast(x, model.fwd.scale[0]), cast(layer.weight, model.fwd.scale[1])
        dy_codes, dyq = cast(dy, model.bwd.scale[0], "e5m2")
        for record, codes in zip(records, (x_codes, w_codes, dy_codes), strict=True):
            np.testing.assert_array_equal(record.tensor.rowwise_data.cpu().numpy(), codes)
        for ours, exact, size in (
            (y, xq @ wq.T + layer.bias.detach().cpu().double().numpy(), np.abs(xq) @ np.abs(wq.T)),
            (x.grad, dyq @ wq, np.abs(dyq) @ np.abs(wq)),
            (layer.weight.grad, dyq.T @ xq, np.abs(dyq.T) @ np.abs(xq)),
        ):
            assert (
                np.abs(ours.detach().cpu().double().numpy() - exact) <= 40 * 2.0**-24 * (size + np.abs(exact))
            ).all()
        dy = dy.double().cpu()
        assert_rounded(layer.bias.grad, dy.sum(0), dy.abs().sum(0), len(dy))
        model.forward(x, layer.weight)
        model.backward(dy)


def test_without_grad_amaxes_are_collected_and_nothing_else_changes(layer):
    model = Layer()
    train_step(layer, model, 0)
    with torch.no_grad():
        for step in range(1, 4):
            forward(layer, model, varied(step, 8, 16))
            model.check(layer.delayed)
    with torch.inference_mode():
        forward(layer, model, varied(4, 8, 16))
    for step in range(5, 8):
        train_step(layer, model, step)


def test_a_frozen_weight_and_an_input_without_gradient_change_nothing_about_scales(layer):
    model = Layer()
    layer.weight.requires_grad_(False)
    for step in range(3):
        x, dy = varied(step, 8, 16), varied(step, 8, 32, seed=1)
        y = forward(layer, model, x)
        y.backward(dy)  # only the bias has a gradient: dy is not quantized
        model.check(layer.delayed)
        train_step(layer, model, step + 10)


def test_gradients_are_accumulated_over_microbatches_with_scales_that_move_on(layer):
    model = Layer()
    for step in range(3):
        layer.zero_grad()
        for micro in range(3):
            train_step(layer, model, 3 * step + micro)


def test_several_forwards_of_one_autocast_share_scales_and_the_largest_amax_counts(layer):
    model = Layer()
    for step in range(0, 12, 3):
        xs = [varied(step + i, 8, 16).requires_grad_() for i in range(3)]
        dys = [varied(step + i, 8, 32, seed=1) for i in range(3)]
        with quire.debug.operands() as records:
            with quire.autocast(recipe=RECIPE):
                ys = [layer(x) for x in xs]
            for y, dy in zip(ys, dys, strict=True):
                y.backward(dy)
        model.step()
        assert used_scales(records, "x") == [stored(model.fwd.scale[0])] * 3
        assert used_scales(records, "dy") == [stored(model.bwd.scale[0])] * 3
        for x, dy in zip(xs, dys, strict=True):
            model.forward(x, layer.weight)
            model.backward(dy)
        model.check(layer.delayed)


def test_forwards_before_backwards_use_the_scales_of_their_own_forward(layer):
    model = Layer()
    for step in range(0, 9, 3):
        passes = []
        for i in range(3):
            x, dy = varied(step + i, 8, 16).requires_grad_(), varied(step + i, 8, 32, seed=1)
            y = forward(layer, model, x)
            passes.append((x, y, dy, model.fwd.scale.copy(), model.bwd.scale.copy()))
        for x, y, dy, fwd, bwd in passes:
            with quire.debug.operands() as records:
                (dx,) = torch.autograd.grad(y, x, dy)
            assert used_scales(records, "dy") == [stored(bwd[0])]
            (_, dyq), (_, wq) = cast(dy, bwd[0], "e5m2"), cast(layer.weight, fwd[1])
            bound = np.abs(dyq) @ np.abs(wq) * 40 * 2.0**-24
            assert (np.abs(dx.cpu().double().numpy() - dyq @ wq) <= bound).all()
            model.backward(dy)
        model.check(layer.delayed)


def test_a_backward_between_two_steps_still_uses_the_scales_of_its_forward(layer):
    model = Layer()
    for step in range(3):
        train_step(layer, model, step)
    y, kept = forward(layer, model, varied(3, 8, 16).requires_grad_()), model.bwd.scale.copy()
    for step in range(4, 9):
        train_step(layer, model, step)
    assert kept[0] != model.bwd.scale[0]
    with quire.debug.operands() as records:
        y.backward(dy := varied(9, 8, 32, seed=1))
    assert used_scales(records, "dy") == [stored(kept[0])]
    model.backward(dy)
    model.check(layer.delayed)


def test_a_graph_that_is_kept_gives_the_same_gradient_again(layer, equal_bits):
    model = Layer()
    train_step(layer, model, 0)
    x = varied(1, 8, 16).requires_grad_()
    y, dy = forward(layer, model, x), varied(1, 8, 32, seed=1)
    first = torch.autograd.grad(y, x, dy, retain_graph=True)[0]
    with quire.autocast(recipe=RECIPE):
        pass  # a step between the two
    assert equal_bits(torch.autograd.grad(y, x, dy)[0], first)


def test_batches_of_any_size_share_the_state(layer):
    model = Layer()
    for step, tokens in enumerate((8, 1, 33, 7)):
        train_step(layer, model, step, tokens=tokens)


def test_an_empty_batch_collects_nothing_of_x(layer):
    model = Layer()
    train_step(layer, model, 0)
    with quire.autocast(recipe=RECIPE):
        model.step()
        layer(torch.zeros(0, 16, requires_grad=True)).sum().backward()
    model.fwd.collect(1, layer.weight.detach().abs().max())
    model.check(layer.delayed)


@pytest.mark.parametrize("lengths", [(4, 2, 6, 3), (2, 1500, 4)], ids=str)
def test_a_history_is_cut_and_padded_when_its_length_changes(layer, lengths):
    model, step = Layer(lengths[0]), 0
    for length in lengths:
        for position in range(4):
            if position == 1:  # the step before still belongs to the old length
                model.fwd.resize(length)
                model.bwd.resize(length)
            x, dy = varied(step, 8, 16).requires_grad_(), varied(step, 8, 32, seed=1)
            y = forward(layer, model, x, DelayedScaling(amax_history_len=length))
            if position == 0:
                model.fwd.resize(length)
                model.bwd.resize(length)
            backward(model, y, dy)
            step += 1
        with quire.autocast(recipe=DelayedScaling(amax_history_len=length)):
            model.step()
        model.check(layer.delayed)


def test_layers_with_different_recipes_each_follow_their_own():
    torch.manual_seed(0)
    first, second, third = (quire.Linear(16, 16) for _ in range(3))
    recipes = [RECIPES["max"], RECIPES["most recent"], RECIPES["margin"]]
    models = [model_of(recipe) for recipe in recipes]
    for step in range(5):
        x = varied(step, 8, 16).requires_grad_()
        with quire.debug.operands() as records:
            with quire.autocast(recipe=recipes[0]):  # nested ones end no step
                h = first(x)
                with quire.autocast(recipe=recipes[1]):
                    k = second(h)
                with quire.autocast(recipe=recipes[2]):
                    y = third(k)
            y.backward(varied(step, 8, 16, seed=1))
        for model in models:
            model.step()
        assert used_scales(records, "x") == [stored(model.fwd.scale[0]) for model in models]
        assert used_scales(records, "dy") == [stored(model.bwd.scale[0]) for model in reversed(models)]
        for model, layer, record in zip(models, (first, second, third), (x, h, k), strict=True):
            model.forward(record, layer.weight)
        for model, layer in zip(models, (first, second, third), strict=True):
            model.bwd.collect(0, layer.delayed.bwd_amax[0])
            model.check(layer.delayed)


def test_a_layer_that_does_not_run_keeps_its_state(layer):
    torch.manual_seed(0)
    other, model, idle = quire.Linear(16, 32), Layer(), Layer()
    train_step(other, idle, 0)
    for step in range(4):
        train_step(layer, model, step)
        if step == 0:
            idle.step()  # what it collected when it ran
        idle.check(other.delayed)
    train_step(other, idle, 9)


@pytest.mark.parametrize("between", [MXFP8BlockScaling(), Float8CurrentScaling(), None], ids=str)
def test_other_recipes_and_plain_layers_leave_the_state_alone(layer, between):
    model = Layer()
    for step in range(4):
        train_step(layer, model, step)
        with quire.autocast(between is not None, recipe=between):
            layer(varied(step, 8, 16, seed=2)).sum().backward()
        model.check(layer.delayed)


def test_a_disabled_autocast_around_changes_nothing(layer):
    model = Layer()
    for step in range(3):
        with quire.autocast(enabled=False):
            train_step(layer, model, step)
