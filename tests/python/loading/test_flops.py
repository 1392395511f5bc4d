"""torch.utils.flop_counter counts the matmuls of quire's layers: 2 m n k of each, as of torch.nn.Linear."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import quire
from every_recipe import TABLE
from quire.distributed import Parallel
from ranks import rank_of

pytestmark = pytest.mark.any_device

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


@pytest.mark.cpu_only
@pytest.mark.parametrize("recipe", ["mxfp8", "delayed", "high_precision"])
@pytest.mark.parametrize("mode", ["column", "row"])
def test_a_process_counts_its_part(mode, recipe):
    with rank_of(0, 2) as group:
        layer = quire.Linear(IN, OUT, parallel=Parallel(mode, group))
        x = torch.randn(TOKENS, IN if mode == "column" else IN // 2, requires_grad=True)
        assert flops(lambda: passes(layer, TABLE[recipe], x)) == 3 * ONE // 2


def test_other_ways_to_run_a_layer():
    layer, x = quire.Linear(IN, OUT), torch.randn(TOKENS, IN)
    with quire.autocast(recipe="mxfp8"):
        assert flops(lambda: quire.checkpoint(layer, x.requires_grad_()).sum().backward()) == 4 * ONE
        with torch.inference_mode():
            assert flops(lambda: layer(x.detach())) == ONE
        assert flops(lambda: quire.Linear(IN, OUT, device="meta")(torch.empty(TOKENS, IN, device="meta"))) == ONE


@pytest.mark.parametrize("recipe", ["high_precision", "mxfp8"])
def test_a_mixture_counts_the_rows_of_its_experts_and_the_router(recipe):
    experts, top_k = 4, 2
    mixture = quire.MoE(IN, OUT, experts, top_k=top_k)  # swiglu: the first matmul has 2 OUT results
    router = 2 * TOKENS * IN * experts
    assert flops(lambda: passes(mixture, TABLE[recipe])) == 3 * (top_k * 3 * ONE + router)
