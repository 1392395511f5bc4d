"""NaN and Inf do not vanish under any recipe (numerics.md 1.8, 1.9): 4-bit codes have no NaN, and codes saturate."""

import math

import pytest
import torch

import quire
from every_recipe import ALL, DEFAULTS, VARIANTS, each
from steps import step

pytestmark = pytest.mark.any_device

every_kind = each(ALL | {name: recipe for name, recipe in VARIANTS.items() if name != "custom"})
each_value = pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])

MODELS = {
    "Linear": lambda: torch.nn.Sequential(quire.Linear(64, 64, bias=False), quire.Linear(64, 64, bias=False)),
    "LayerNormMLP": lambda: quire.LayerNormMLP(64, 96),
    "MoE": lambda: quire.MoE(64, 96, 4, 2),
}


@each_value
@every_kind
def test_a_weight_that_is_not_finite_does_not_vanish(recipe, value, make_layer, make_x):
    layer, x = make_layer(bias=False), make_x(48, 96)
    with torch.no_grad():
        layer.weight[5, 7] = value
    y, dx, _ = step(layer, x, recipe, dy=torch.ones_like)
    assert not y[:, 5].isfinite().any() and not dx[:, 7].isfinite().any()


@each_value
@every_kind
def test_an_input_that_is_not_finite_does_not_vanish(recipe, value, make_layer, make_x):
    layer, x = make_layer(bias=False), make_x(48, 96).detach()
    x[3, 9] = value
    y, _, dw = step(layer, x, recipe, dy=torch.ones_like)
    assert not y[3].isfinite().any() and not dw[:, 9].isfinite().any()


@each_value
@every_kind
def test_a_gradient_that_is_not_finite_does_not_vanish(recipe, value, make_layer, make_x):
    layer, x = make_layer(bias=False), make_x(48, 96)
    dy = torch.ones(48, 64, dtype=x.dtype)
    dy[2, 4] = value
    _, dx, dw = step(layer, x, recipe, dy=lambda y: dy)
    assert not dx[2].isfinite().any() and not dw[4].isfinite().any()


@each_value
@each(DEFAULTS)
def test_what_is_not_finite_stays_in_its_group(recipe, value):
    layer = quire.GroupedLinear(3, 64, 64, bias=False)
    x = torch.randn(96, 64)
    x[40, 5] = value
    with quire.autocast(recipe=recipe):
        y = layer(x, torch.tensor([32, 16, 48]))
    y.backward(torch.ones_like(y))
    assert not y[40].isfinite().any() and y[:32].isfinite().all() and y[48:].isfinite().all()
    assert [weight.grad.isfinite().all().item() for weight in layer.parameters()] == [True, False, True]


@each_value
@each(DEFAULTS)
def test_a_prepacked_weight_that_is_not_finite_does_not_vanish(recipe, value):
    with quire.quantized_model_init(recipe=recipe):
        layer = quire.Linear(64, 64, bias=False)
    weight = torch.randn(64, 64)
    weight[5, 7] = value
    with torch.no_grad(), quire.autocast(recipe=recipe):
        layer.weight.copy_(weight)
        plain = layer(torch.ones(4, 64))
        quire.prepack_weights(layer)
        packed = layer(torch.ones(4, 64))
    assert not packed[:, 5].isfinite().any() and torch.equal(plain.isnan(), packed.isnan())


@every_kind
def test_a_finite_call_stays_finite(recipe, make_layer, make_x):
    assert all(tensor.isfinite().all() for tensor in step(make_layer(), make_x(48, 96), recipe, dy=torch.ones_like))


@every_kind
def test_grad_scaler_sees_an_overflow_and_skips_the_step(recipe, make_layer, make_x):
    layer, x = make_layer(bias=False, dtype=torch.float32), make_x(48, 96, dtype=torch.float32)
    optimizer, scaler = torch.optim.SGD(layer.parameters(), lr=1.0), torch.amp.GradScaler("cpu", init_scale=4.0)
    before = layer.weight.detach().clone()
    with quire.autocast(recipe=recipe):
        y = layer(x)
    scaler.scale(y.sum() * torch.finfo(torch.float32).max).backward()  # dy is Inf, as a float16 that overflows
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(layer.weight, before) and scaler.get_scale() == 2.0


@every_kind
@pytest.mark.parametrize("kind", MODELS)
def test_a_run_that_diverges_ends_as_nan(kind, recipe):
    torch.manual_seed(0)
    model = MODELS[kind]()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e25)
    losses = []
    for _ in range(6):
        with quire.autocast(recipe=recipe):
            losses.append(model(torch.randn(32, 64)).square().mean())
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
    assert losses[0].isfinite() and losses[-1].isnan()
