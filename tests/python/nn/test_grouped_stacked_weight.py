"""quire.GroupedLinear with one quantized weight for all groups gives the bits of one quantized weight for each."""

import copy
import io

import pytest
import torch

import quire
from every_recipe import ALL, DELAYED, every_recipe, ways
from python.nn.grouped_layers import SPLITS, grouped, grouped_step, inputs
from quire import recipe as recipes

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=False),
    "foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
}


def pair(recipe, init=None, **options):
    """A layer with a weight for each group, and one with one for all, that have the same codes."""
    layers = []
    for single in (False, True):
        with quire.quantized_model_init(recipe=recipe, **(init or {})):
            layers.append(grouped(single_grouped_weight=single, single_grouped_bias=single, **options))
        layers[-1].sr_state.copy_(torch.tensor([5, 0]))
    return layers


def weights_of(layer):
    return layer.group_weights("")


def equal_codes(a, b, equal_bits):
    for one, other in zip(weights_of(a), weights_of(b), strict=True):
        for name, tensor in one.named().items():
            assert (tensor is None) == (other.named()[name] is None)
            assert tensor is None or equal_bits(tensor, other.named()[name]), name
    return True


def split(layer, results):
    """y, dx, and gradients by group, whatever the form."""
    y, dx, *gradients = results
    flat = []
    for gradient in gradients:
        flat += list(gradient) if layer.weight_names == ("weight",) else [gradient]
    return [y, dx, *flat]


def same_steps(layers, recipe, equal_bits, functions=None, **options):
    x, dy = inputs(SPLITS)
    runs = []
    for layer, function in zip(layers, functions or layers, strict=True):
        runs.append(split(layer, grouped_step(layer, x, dy, SPLITS, recipe, function=function, **options)))
    return all(equal_bits(a, b) for a, b in zip(*runs, strict=True))


def test_it_gives_the_same_bits(any_recipe, equal_bits):
    layers = pair(any_recipe)
    assert type(layers[1].weight) is quire.QuantizedStack and isinstance(layers[1].weight, torch.nn.Parameter)
    assert equal_codes(*layers, equal_bits)
    for _ in range(2):
        assert same_steps(layers, any_recipe, equal_bits)
    assert type(layers[1].weight.grad) is torch.Tensor and layers[1].weight.grad.shape == (6, 64, 96)
    with torch.no_grad(), quire.autocast(recipe=any_recipe):
        ys = [layer(inputs(SPLITS)[0], torch.tensor(SPLITS)) for layer in layers]
    assert equal_bits(*ys)


@ways
def test_under_delayed_scaling(compiled, compiler, equal_bits):
    layers = pair(DELAYED)
    functions = [compiler(layer) for layer in layers] if compiled else None
    for _ in range(3):
        assert same_steps(layers, DELAYED, equal_bits, functions)
        with quire.autocast(recipe=DELAYED):  # entering ends the step
            pass
        assert equal_bits(layers[0].delayed.fwd_scale, layers[1].delayed.fwd_scale)


def test_in_high_precision_and_while_calibrating(equal_bits):
    layers = pair(DELAYED)
    assert same_steps(layers, None, equal_bits)
    x = inputs(SPLITS)[0]
    with quire.autocast(enabled=False, calibrating=True, recipe=DELAYED):
        ys = [layer(x, SPLITS) for layer in layers]
    assert equal_bits(*ys) and equal_bits(layers[0].delayed.fwd_amax, layers[1].delayed.fwd_amax)


@pytest.mark.parametrize("override", ["dequantized", "high_precision"])
def test_other_backward_passes(override, equal_bits):
    recipe = recipes.MXFP8BlockScaling(backward_override=override)
    assert same_steps(pair(recipe), recipe, equal_bits)


@pytest.mark.parametrize("keep_master", [False, True], ids=["codes", "master"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_optimizers_leave_the_same_codes(optimizer, keep_master, recipe, equal_bits):
    layers = pair(recipe, {"keep_master": keep_master})
    before = weights_of(layers[1])[0].rowwise_data.clone()
    optimizers = [optimizer(layer.parameters()) for layer in layers]
    for _ in range(3):
        assert same_steps(layers, recipe, equal_bits)
        for one in optimizers:
            one.step()
    assert equal_codes(*layers, equal_bits)
    assert not equal_bits(before, weights_of(layers[1])[0].rowwise_data)


@every_recipe
def test_state_dicts_load_into_either_form(recipe, equal_bits):
    each, single = pair(recipe, {"keep_master": True})  # which decoding would lose
    for source, target in ((each, single), (single, each)):
        with torch.no_grad():
            for weight in source.weights("").values():
                weight.mul_(0.3)
        assert not equal_bits(weights_of(each)[0].master, weights_of(single)[0].master)
        target.load_state_dict(source.state_dict())
        assert equal_codes(each, single, equal_bits)
    file = io.BytesIO()
    torch.save(single.state_dict(), file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    for state_dict in (saved, each.state_dict()):
        other = pair(recipe)[1]
        other.load_state_dict(state_dict, assign=True)
        assert equal_codes(other, each, equal_bits) and type(other.weight) is quire.QuantizedStack


@every_recipe
def test_state_dicts_of_plain_weights_load_too(recipe, equal_bits):
    each, single = pair(recipe)
    for form in (False, True):
        plain = grouped(single_grouped_weight=form, single_grouped_bias=form)
        with torch.no_grad():
            for parameter in plain.parameters():
                parameter.mul_(-0.3)
        each.load_state_dict(plain.state_dict())
        single.load_state_dict(plain.state_dict())
        assert equal_codes(each, single, equal_bits)
        plain.load_state_dict(single.state_dict())
        values = torch.stack([weight.dequantize() for weight in weights_of(single)])
        assert equal_bits(torch.stack(list(weights_of(plain))), values)


@every_recipe
def test_moves_and_copies(recipe, equal_bits):
    each, single = pair(recipe, {"keep_master": True})
    for moved in (copy.deepcopy(single), copy.deepcopy(single).to("cpu"), copy.deepcopy(single).float()):
        assert equal_codes(each, moved, equal_bits)
    assert copy.deepcopy(single).float().weight.dtype == torch.float32
    assert same_steps([each, copy.deepcopy(single)], recipe, equal_bits)


@every_recipe
def test_it_takes_the_memory_of_its_codes(recipe):
    each, single = pair(recipe)
    plain = 6 * 64 * 96 * 2
    assert single.weight.nbytes == sum(weight.nbytes for weight in weights_of(each))
    assert single.weight.nbytes < (0.7 if recipe.nvfp4() else 1.1) * plain  # both directions
    with torch.no_grad(), quire.quantized_model_init(recipe=recipe):
        rowwise = grouped(single_grouped_weight=True)
    # 8 bits are half of 16, and 96 of them have at most 4 bytes of scales, 0.02 of their values in bfloat16.
    assert rowwise.weight.columnwise_data is None and rowwise.weight.nbytes < 0.55 * plain
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in single.weight.buffers().values()}
    assert sum(storages.values()) == single.weight.nbytes


@pytest.mark.parametrize(("recipe", "compiled"), [*((name, False) for name in ALL), ("nvfp4", True)])
def test_main_grad_and_microbatches(recipe, compiled, compiler, equal_bits):
    recipe = ALL[recipe]
    layers = pair(recipe, fuse_wgrad_accumulation=True)
    for layer in layers:
        for weight in layer.weights("").values():
            weight.main_grad = torch.full(weight.shape, 2.0)
    functions = [compiler(layer) for layer in layers] if compiled else layers
    x, dy = inputs(SPLITS)
    for first in (True, False, None):
        runs = [
            grouped_step(layer, x, dy, SPLITS, recipe, function=function, is_first_microbatch=first)[:2]
            for layer, function in zip(layers, functions, strict=True)
        ]
        assert all(equal_bits(a, b) for a, b in zip(*runs, strict=True))
        grads = [
            torch.stack([weight.main_grad for weight in layers[0].weights("").values()]),
            layers[1].weight.main_grad,
        ]
        assert equal_bits(*grads) and (grads[0] != 2).any()


@every_recipe
def test_delayed_weight_gradients(recipe, equal_bits):
    layers = pair(recipe, delay_wgrad_compute=True)
    x, dy = inputs(SPLITS)
    for layer in layers:
        grouped_step(layer, x, dy, SPLITS, recipe)
        layer.backward_dw()
    assert equal_bits(layers[1].weight.grad, torch.stack([w.grad for w in layers[0].weights("").values()]))


@every_recipe
def test_it_is_prepacked_and_unpacked(recipe, equal_bits):
    layers = pair(recipe)
    before = copy.deepcopy(layers[1])
    for layer in layers:
        quire.prepack_weights(layer)
    assert layers[1].weight.spec_text.endswith("interleaved") and equal_codes(*layers, equal_bits)
    assert same_steps(layers, recipe, equal_bits)
    quire.unpack_weights(layers[1])
    assert equal_codes(layers[1], before, equal_bits)


@every_recipe
def test_weights_are_reset_alike(recipe, equal_bits):
    layers = pair(recipe)
    before = weights_of(layers[1])[0].rowwise_data.clone()
    for layer in layers:
        torch.manual_seed(11)
        layer.reset_parameters()
    assert equal_codes(*layers, equal_bits) and not equal_bits(weights_of(layers[1])[0].rowwise_data, before)


def test_kept_codes_and_runners_take_it(equal_bits):
    recipe = recipes.NVFP4BlockScaling()
    each, single = pair(recipe)
    quire.quantize_weights(single, recipe)
    assert single.kept_weight is None
    x, weights = inputs([2], beyond=0)[0], torch.rand(2, 2)
    ids = torch.tensor([[0, 3], [5, 5]], dtype=torch.int32)
    w2 = [quire.quantize(torch.randn(96, 32), recipe.weight_spec) for _ in SPLITS]
    ys = []
    for w13 in ([weight.detach() for weight in weights_of(each)], single.weight):
        with quire.runners.register(quire.runners.MoERunner(w13, w2)) as runner:
            ys.append(quire.nvfp4_moe(x, weights, ids, runner, 96))
    assert equal_bits(*ys) and ys[0].any()


def test_it_keeps_initial_values(equal_bits):
    layer = pair(recipes.MXFP8BlockScaling(), {"preserve_high_precision_init_val": True})[1]
    assert equal_bits(layer.weight.get_high_precision_init_val(), grouped(single_grouped_weight=True).weight.detach())


@pytest.mark.parametrize(("recipe", "compiled"), [*((name, False) for name in ALL), ("nvfp4", True)])
def test_a_mixture_of_experts_with_it(recipe, compiled, compiler, equal_bits):
    recipe = ALL[recipe]
    layers, runs = [], []
    for single in (False, True):
        torch.manual_seed(0)
        with quire.quantized_model_init(recipe=recipe):
            layers.append(quire.MoE(64, 96, 5, 2, single_grouped_weight=single, params_dtype=torch.bfloat16))
    layers[1].load_state_dict(layers[0].state_dict())
    for layer in layers:
        for linear in (layer.fc1, layer.fc2):
            linear.sr_state.copy_(torch.tensor([5, 0]))
        x = torch.randn(19, 64, generator=torch.Generator().manual_seed(1)).bfloat16().requires_grad_()
        with quire.autocast(recipe=recipe):
            y = (compiler(layer) if compiled else layer)(x)
        y.sum().backward()
        grads = [
            torch.stack([w.grad for w in linear.weights("").values()]).flatten(0, -3)
            for linear in (layer.fc1, layer.fc2)
        ]
        runs.append([y.detach(), x.grad, layer.router.weight.grad, *grads])
    assert type(layers[1].fc1.weight) is quire.QuantizedStack
    assert all(equal_bits(a, b) for a, b in zip(*runs, strict=True))
    assert compiler.graphs == 2 * compiled


def test_a_bias_of_all_groups_is_returned_as_it_is():
    x = torch.randn(5, 32)
    for kind in ("weight", "bias"):
        layer = quire.GroupedLinear(2, 32, 16, return_bias=True, **{f"single_grouped_{kind}": True})
        assert (layer.single_grouped_weight, layer.single_grouped_bias) == (kind == "weight", kind == "bias")
        y, bias = layer(x, [2, 3])
        if kind == "bias":
            assert bias is layer.bias
        else:
            assert all(one is other for one, other in zip(bias, (layer.bias0, layer.bias1), strict=True))
        layer.return_bias = False
        each = bias if kind == "bias" else torch.stack(bias)
        torch.testing.assert_close(y + each.repeat_interleave(torch.tensor([2, 3]), 0), layer(x, [2, 3]))
