"""torch.utils.flop_counter counts the matmuls of quire's layers: 2 m n k of each, as of torch.nn.Linear."""

import pytest
import torch
from torch import distributed
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.flop_counter import FlopCounterMode

import quire
from every_recipe import TABLE
from quire.distributed import Parallel

TOKENS, IN, OUT = 64, 128, 256
#: Of one matmul.
ONE = 2 * TOKENS * IN * OUT

LAYERS = {
    "Linear": (lambda **options: quire.Linear(IN, OUT, **options), 1),
    "LayerNormLinear": (lambda **options: quire.LayerNormLinear(IN, OUT, **options), 1),
    "LayerNormMLP": (lambda **options: quire.LayerNormMLP(IN, OUT, **options), 2),
    "GroupedLinear": (lambda **options: quire.GroupedLinear(2, IN, OUT, **options), 1),
}


def flops(function):
    with FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops()


def passes(layer, recipe, x=None, backward=True):
    groups = ([TOKENS // 2, TOKENS // 2],) if isinstance(layer, quire.GroupedLinear) else ()
    with quire.autocast(enabled=recipe is not None, recipe=recipe):
        y = layer(torch.randn(TOKENS, IN, requires_grad=True) if x is None else x, *groups)
    if backward:
        y.sum().backward()


def test_torch_counts_so():
    assert flops(lambda: passes(torch.nn.Linear(IN, OUT), None)) == 3 * ONE


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("recipe", TABLE)
def test_layers_in_training_and_inference(recipe, kind):
    make, matmuls = LAYERS[kind]
    layer, recipe = make(), TABLE[recipe]
    assert flops(lambda: passes(layer, recipe)) == 3 * matmuls * ONE
    with torch.no_grad():
        assert flops(lambda: passes(layer, recipe, backward=False)) == matmuls * ONE


@pytest.mark.parametrize("kind", LAYERS)
def test_gradients_that_are_not_wanted_or_deferred(kind):
    make, matmuls = LAYERS[kind]
    frozen, x = make().requires_grad_(False), torch.randn(TOKENS, IN, requires_grad=True)
    assert flops(lambda: passes(frozen, TABLE["mxfp8"], x)) == 2 * matmuls * ONE
    layer = make(delay_wgrad_compute=True)
    assert flops(lambda: passes(layer, TABLE["mxfp8"])) == 2 * matmuls * ONE
    assert flops(layer.backward_dw) == matmuls * ONE
    layer = make(fuse_wgrad_accumulation=True)
    for name in layer.weight_names:
        weight = layer.get_parameter(name)
        weight.main_grad = torch.zeros_like(weight)
    assert flops(lambda: passes(layer, TABLE["nvfp4"])) == 3 * matmuls * ONE


def test_kept_codes_and_quantized_weights():
    layer = quire.Linear(IN, OUT)
    quire.quantize_weights(layer)
    with quire.quantized_model_init(recipe=TABLE["mxfp8"]):
        quantized = quire.Linear(IN, OUT)
    for one in (layer, quantized):
        assert flops(lambda one=one: passes(one, TABLE["mxfp8"])) == 3 * ONE


@pytest.mark.parametrize("recipe", ["mxfp8", "delayed", "high_precision"])
@pytest.mark.parametrize("mode", ["column", "row"])
def test_a_process_counts_its_part(mode, recipe):
    distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        layer = quire.Linear(IN, OUT, parallel=Parallel(mode, distributed.group.WORLD))
        x = torch.randn(TOKENS, IN if mode == "column" else IN // 2, requires_grad=True)
        assert flops(lambda: passes(layer, TABLE[recipe], x)) == 3 * ONE // 2
    finally:
        distributed.destroy_process_group()
