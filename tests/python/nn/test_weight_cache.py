"""Weights quantized once for several forward passes: how often, and that codes are never stale."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import quire
from every_recipe import ALL, every_recipe
from pairwise import pairwise

pytestmark = pytest.mark.any_device


class WeightQuantizations(TorchDispatchMode):
    """Counts how often a weight of that shape is quantized, apart or within a product."""

    def __init__(self, shape):
        super().__init__()
        self.shape, self.count = shape, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        ops = torch.ops.quire
        if func is ops.quantize.default and args[0].shape == self.shape:
            self.count += 1
        if func is ops.linear_fwd.default and not args[9]:
            self.count += 1
        return func(*args, **(kwargs or {}))


def make_linear(dtype=torch.float32):
    torch.manual_seed(1)
    return quire.Linear(64, 48, params_dtype=dtype)


def forward(layer, x, recipe, **options):
    layer.sr_state[1] = 0
    with quire.autocast(recipe=recipe):
        y = layer(x, **options)
    return y


@every_recipe
def test_microbatches_after_the_first_use_its_codes(recipe):
    layer, plain = make_linear(), make_linear()
    with WeightQuantizations(layer.weight.shape) as counted:
        for first in (True, False, False):
            x = torch.randn(5, 64, requires_grad=True)
            results = []
            for model, options in ((layer, {"is_first_microbatch": first}), (plain, {})):
                x.grad = None
                before = counted.count
                y = forward(model, x, recipe, **options)
                y.sum().backward()
                if model is plain:
                    counted.count = before
                results.append((y.detach(), x.grad.clone()))
            if not recipe.delayed():  # there the layers' scales move apart: one does not collect its weight's amax
                assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert counted.count == 1
    assert torch.equal(layer.weight.grad, plain.weight.grad) or recipe.delayed()


def test_a_weight_that_is_not_quantized_does_not_move_its_slot():
    layer, recipe = make_linear(), ALL["delayed"]
    forward(layer, torch.randn(5, 64), recipe, is_first_microbatch=True).sum().backward()
    forward(layer, torch.randn(5, 64), recipe, is_first_microbatch=False).sum().backward()
    scale = layer.delayed.fwd_scale[1].clone()
    assert scale != 1 and layer.delayed.fwd_amax[1] == 0 and layer.delayed.fwd_amax[0] > 0
    forward(layer, torch.randn(5, 64), recipe, is_first_microbatch=False)
    assert layer.delayed.fwd_scale[1] == scale


@pytest.mark.parametrize("first", [None, False])
def test_the_kept_codes_are_used_only_by_those_that_ask(first):
    layer = make_linear()
    with WeightQuantizations(layer.weight.shape) as counted:
        forward(layer, torch.randn(5, 64), ALL["mxfp8"], is_first_microbatch=True)
        forward(layer, torch.randn(5, 64), ALL["mxfp8"], is_first_microbatch=first)
        forward(layer, torch.randn(5, 64), ALL["fp8_current"], is_first_microbatch=first)  # another spec
    assert counted.count == (3 if first is None else 2)


def test_codes_of_another_spec_are_not_used():
    layer, x = make_linear(), torch.randn(5, 64)
    quire.quantize_weights(layer, ALL["mxfp8"])
    with WeightQuantizations(layer.weight.shape) as counted:
        assert torch.equal(forward(layer, x, ALL["fp8_current"]), forward(make_linear(), x, ALL["fp8_current"]))
        assert torch.equal(forward(layer, x, ALL["mxfp8"]), forward(make_linear(), x, ALL["mxfp8"]))
    assert counted.count == 3  # all but the last of the layer


def optimizers():
    return {
        "sgd": lambda p: torch.optim.SGD(p, 0.1),
        "adamw": lambda p: torch.optim.AdamW(p, 0.1, foreach=True),
        "fused_adamw": lambda p: torch.optim.AdamW(p, 0.1, fused=True),
        "fused_sgd": lambda p: torch.optim.SGD(p, 0.1, fused=True),
    }


@every_recipe
@pytest.mark.parametrize("optimizer", optimizers())
def test_a_weight_is_quantized_once_an_optimizer_step(recipe, optimizer):
    layer, plain = make_linear(), make_linear()
    optimizer, reference = (optimizers()[optimizer](m.parameters()) for m in (layer, plain))
    with WeightQuantizations(layer.weight.shape) as counted:
        quire.quantize_weights(layer, recipe, optimizer)
        for steps in range(1, 4):
            for _ in range(2):
                x = torch.randn(5, 64)
                y = forward(layer, x, recipe)
                y.square().sum().backward()
                before = counted.count
                expected = forward(plain, x, recipe)
                expected.square().sum().backward()
                counted.count = before
                if not recipe.delayed():
                    assert torch.equal(y, expected)
            optimizer.step(), reference.step()
            optimizer.zero_grad(), reference.zero_grad()
            assert counted.count == steps + 1


def test_weights_that_are_kept_move_their_slot_of_delayed_scaling():
    """Else they would be quantized by the scale 1 for ever: codes of small weights would be subnormal, or 0."""
    layer, recipe = make_linear(), ALL["delayed"]
    with torch.no_grad():
        layer.weight.mul_(1e-4)
    optimizer = torch.optim.SGD(layer.parameters(), 1e-6)
    quire.quantize_weights(layer, recipe, optimizer)
    amaxes = [layer.weight.detach().abs().max()]
    for _ in range(2):
        forward(layer, torch.randn(5, 64), recipe).sum().backward()
        optimizer.step()
        amaxes.append(layer.weight.detach().abs().max())
    with quire.autocast(recipe=recipe):
        pass
    assert layer.delayed.fwd_scale[1] == 448 / max(amaxes)
    quire.quantize_weights(layer, recipe)
    codes = layer.kept_weight.buffers[0].view(torch.float8_e4m3fn).float()
    assert codes.abs().max() > 400  # the format is used to its end


def write_through_data(layer):
    layer.weight.data.copy_(torch.randn(48, 64))


def load(layer):
    layer.load_state_dict(quire.Linear(64, 48).state_dict())


def fused_step(layer):
    layer.weight.grad = torch.ones(48, 64)
    torch.optim.AdamW([layer.weight], 0.1, fused=True).step()


def one_element(layer):
    layer.weight.data.view(-1)[17] += 1e-3


@pytest.mark.cpu_only
@pytest.mark.parametrize(
    ("change", "way", "compiled", "grad"),
    pairwise(
        [write_through_data, load, fused_step, one_element],
        ["quantize_weights", "is_first_microbatch"],
        [False, True],
        [False, True],
    ),
)
def test_stale_codes_are_never_used(change, way, compiled, grad, compiler):
    layer, recipe, x = make_linear(), ALL["mxfp8"], torch.randn(5, 64)
    options = {} if way == "quantize_weights" else {"is_first_microbatch": False}

    def use(x):
        return layer(x, **options)

    function = compiler(use) if compiled else use
    with torch.set_grad_enabled(grad), quire.autocast(recipe=recipe):
        quire.quantize_weights(layer) if way == "quantize_weights" else layer(x, is_first_microbatch=True)
        assert torch.equal(function(x), make_linear()(x))
        change(layer)
        with pytest.raises(RuntimeError, match="the weight has changed since it was quantized"):
            function(x)
            quire.synchronize()  # kernels of a device say then which weights they refuse
        quire.quantize_weights(layer) if way == "quantize_weights" else layer(x, is_first_microbatch=True)
        other = make_linear()
        other.load_state_dict(layer.state_dict())
        assert torch.equal(function(x), other(x))


def test_codes_outlive_switches_between_train_and_eval_and_between_grad_modes():
    layer, recipe, x = make_linear(), ALL["nvfp4"], torch.randn(5, 64, requires_grad=True)
    with torch.no_grad():
        quire.quantize_weights(layer, recipe)
    expected = forward(make_linear(), x, recipe)
    with WeightQuantizations(layer.weight.shape) as counted:
        for training in (False, True, False):
            layer.train(training)
            with torch.set_grad_enabled(training):
                y = forward(layer, x, recipe)
            assert torch.equal(y, expected)
            if training:
                y.sum().backward()
    assert counted.count == 0 and x.grad is not None


@every_recipe
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_microbatches_need_two_graphs_and_give_the_bits_of_eager(recipe, backend, compiler):
    layer, eager = make_linear(), make_linear()
    function = compiler(lambda x, first: layer(x, is_first_microbatch=first), backend=backend)
    for _ in range(2):
        inputs = [torch.randn(5, 64) for _ in range(3)]
        results = []
        for call, model in ((function, layer), (lambda x, f: eager(x, is_first_microbatch=f), eager)):
            model.zero_grad()
            model.sr_state[1] = 0
            outputs, backwards = [], []
            for i, x in enumerate(inputs):
                with quire.autocast(recipe=recipe):
                    outputs.append(call(x, i == 0))
                backwards.append(outputs[-1].sum())
                if backend == "aot_eager":  # which checks versions of state where other backends do not
                    backwards.pop().backward()
            for loss in backwards:
                loss.backward()
            results.append([*(y.detach() for y in outputs), model.weight.grad.clone()])
            with torch.no_grad():
                model.weight -= 0.1 * model.weight.grad
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert compiler.graphs == 2


def test_moving_or_converting_drops_the_codes():
    layer = make_linear()
    quire.quantize_weights(layer, ALL["mxfp8"])
    assert layer.kept_weight is not None
    assert layer.double().float().kept_weight is None


def test_nothing_to_quantize_is_refused_before_anything_changes():
    with pytest.raises(ValueError, match="nothing to quantize: Sequential has no layer of quire; call quire.convert"):
        quire.quantize_weights(torch.nn.Sequential(torch.nn.Linear(32, 32)), "mxfp8")


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4", "fp8_delayed"])
def test_codes_that_were_made_in_inference_mode_train(recipe):
    layer = quire.Linear(64, 64)
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    for _ in range(2):
        with torch.inference_mode():
            quire.quantize_weights(layer, recipe, optimizer)
        with quire.autocast(recipe=recipe):
            layer(torch.randn(32, 64)).sum().backward()
        assert layer.weight.grad.count_nonzero()
        with torch.inference_mode():
            optimizer.step()


def test_weights_are_quantized_once_a_step_however_often_it_is_asked_for(monkeypatch):
    layer, other = quire.Linear(64, 64), quire.Linear(64, 64)
    optimizer = torch.optim.SGD([*layer.parameters(), *other.parameters()], 0.1)
    for recipe in ("nvfp4", "mxfp8", "mxfp8"):
        for model in (layer, other):
            quire.quantize_weights(model, recipe, optimizer)
    calls = []
    monkeypatch.setattr("quire.nn.cache._keep", lambda module, _, recipe: calls.append((module, recipe)))
    optimizer.step()
    assert calls == [(model, quire.recipe.MXFP8BlockScaling()) for model in (layer, other)]
