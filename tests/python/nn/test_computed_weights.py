"""Weights that are computed whenever they are read (parametrized), or before each call by a hook (pruned): a call
computes each of them once, and has the bits of a layer with these values."""

import copy
import functools

import pytest
import torch
from torch.nn.utils import parametrizations, parametrize, prune

import quire
from every_feature import LAYERS
from every_recipe import IN_ANY_PRECISION
from quire.nn.product_module import ProductModule
from steps import call, same, step

RECIPES = ("mxfp8", "delayed", "high_precision")
#: They refuse such weights.
OF_PARAMETERS = ("Linear, delayed wgrad",)
PLACES = [name for name in LAYERS if name not in OF_PARAMETERS]
WITHOUT_OPTIONS = ("MoE", "converted")


class Halved(torch.nn.Module):
    """Of how many computations the process knows."""

    count = 0

    def forward(self, weight):
        Halved.count += 1
        return 0.5 * weight


KINDS = {
    "parametrized": lambda layer, name: parametrize.register_parametrization(layer, name, Halved()),
    "weight_norm": parametrizations.weight_norm,
    "pruned": lambda layer, name: prune.ln_structured(layer, name, 0.25, n=2, dim=0),
}


def parts(model):
    return [
        (layer, name) for layer in model.modules() if isinstance(layer, ProductModule) for name in layer.weight_names
    ]


def computed(name, kind):
    """A layer with such weights, and a plain one with their values and the same random states."""
    torch.manual_seed(0)
    layer = LAYERS[name]()
    plain = copy.deepcopy(layer)
    for (part, weight), (other, _) in zip(parts(layer), parts(plain), strict=True):
        KINDS[kind](part, weight)
        with torch.no_grad():
            getattr(other, weight).copy_(getattr(part, weight))
    return layer, plain


def y_and_dx(layer, recipe, function=call, **options):
    x = torch.randn(24, 64, generator=torch.Generator().manual_seed(1))
    return step(layer, x, IN_ANY_PRECISION[recipe], function=functools.partial(function, layer), **options)[:2]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", PLACES)
def test_results_are_those_of_the_values(name, kind, recipe):
    layer, plain = computed(name, kind)
    assert same(y_and_dx(layer, recipe), y_and_dx(plain, recipe))


@pytest.mark.parametrize(
    "name, first",
    [(name, first) for name in PLACES for first in (None, True, False) if first is None or name not in WITHOUT_OPTIONS],
)
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_call_computes_each_weight_once(name, recipe, first):
    """As torch.nn.Linear does: a parametrization may draw random numbers, or count its calls (spectral_norm)."""
    layer, _ = computed(name, "parametrized")
    options = {} if first is None else {"is_first_microbatch": first}
    with quire.autocast(recipe=IN_ANY_PRECISION[recipe], enabled=recipe != "high_precision"):
        if first is False:
            call(layer, torch.randn(24, 64), is_first_microbatch=True)
        Halved.count = 0
        call(layer, torch.randn(24, 64), **options)
    assert Halved.count == len(parts(layer))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("checkpoint", [torch.utils.checkpoint.checkpoint, quire.checkpoint])
@pytest.mark.parametrize("name", PLACES)
def test_a_checkpoint_recomputes_them(name, checkpoint, kind):
    """PyTorch's leaves a recomputation by an exception, which passes through the layers."""
    layer, plain = computed(name, kind)

    def checkpointed(layer, x):
        return checkpoint(call, layer, x, use_reentrant=False)

    found = y_and_dx(layer, "mxfp8", checkpointed, backward=lambda: quire.autocast(recipe="mxfp8"))
    assert same(found, y_and_dx(plain, "mxfp8"))
    assert all(p.grad is not None for p in layer.parameters())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", PLACES)
def test_codes_that_are_kept_are_those_of_the_newest_values(name, kind):
    """A hook computes a weight at the next call only."""
    layer, _ = computed(name, kind)
    x = torch.randn(24, 64)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.mul_(1.5)
        quire.quantize_weights(layer, "mxfp8")
        with quire.autocast(recipe="mxfp8"):
            kept = call(layer, x)
        for part, _ in parts(layer):
            for product in part.products:
                setattr(part, f"{product}_kept_weight" if product else "kept_weight", None)
        with quire.autocast(recipe="mxfp8"):
            assert same(kept, call(layer, x))


@pytest.mark.parametrize("option", ["delay_wgrad_compute", "fuse_wgrad_accumulation"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["Linear", "LayerNormLinear", "LayerNormMLP", "GroupedLinear"])
def test_gradients_that_nobody_would_read_are_refused(name, kind, option):
    layer = LAYERS[name](**{option: True})
    for part, weight in parts(layer):
        KINDS[kind](part, weight)
    words = f"{option}=True .* is computed from other tensors .*without {option}"
    with quire.autocast(recipe="mxfp8"), pytest.raises(NotImplementedError, match=words):
        call(layer, torch.randn(24, 64))


def test_a_computed_weight_with_a_main_grad_of_its_own_gets_the_gradient_there():
    layer, plain = (copy.deepcopy(LAYERS["Linear"](fuse_wgrad_accumulation=True)) for _ in range(2))
    plain.load_state_dict(layer.state_dict())
    weight = layer.weight * 1
    weight.main_grad, plain.weight.main_grad = (torch.zeros(32, 64) for _ in range(2))
    x = torch.randn(24, 64)
    with quire.autocast(recipe="mxfp8"):
        torch.func.functional_call(layer, {"weight": weight}, x).sum().backward()
        plain(x).sum().backward()
    assert weight.main_grad.count_nonzero() and same(weight.main_grad, plain.weight.main_grad)


def test_keeping_codes_does_not_iterate_as_a_call_in_training_does():
    layer = torch.nn.utils.spectral_norm(quire.Linear(64, 32)).train()
    before = layer.weight_u.clone()
    quire.quantize_weights(layer, "mxfp8")
    assert same(layer.weight_u, before)
