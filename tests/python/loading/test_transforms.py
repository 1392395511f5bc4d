"""Transforms of functions over layers: gradients per sample, and regions that a compiler compiles once for all."""

import copy
import gc

import pytest
import torch
from torch.func import functional_call, grad, vmap

import pytorch
import quire
from quire.recipe import DelayedScaling, MXFP8BlockScaling, NVFP4BlockScaling

pytestmark = pytest.mark.any_device

SAMPLES = 3
LAYERS = {
    "linear": lambda: quire.Linear(64, 32),
    "layernorm_linear": lambda: quire.LayerNormLinear(64, 32),
    "layernorm_mlp": lambda: quire.LayerNormMLP(64, 32),
}


def rewind(module):
    """Sets all counters of random streams to 0."""
    for part in module.modules():
        for name, state in vars(part).items():
            if name.endswith("sr_state"):
                state[1] = 0


def per_sample(layer):
    """A layer -> parameters, and a function of parameters and samples whose results are the gradients of each."""
    parameters = {name: p.detach() for name, p in layer.named_parameters()}

    def loss(parameters, x):
        return functional_call(layer, parameters, (x,)).square().sum()

    return parameters, grad(loss), vmap(grad(loss), in_dims=(None, 0))


def gradients_agree(layer, recipe, compiled=lambda function: function):
    x = torch.randn(SAMPLES, 16, 64)
    parameters, of_one, of_each = per_sample(layer)
    with quire.autocast(recipe=recipe):
        rewind(layer)
        batched = compiled(of_each)(parameters, x)
        for sample in range(SAMPLES):
            rewind(layer)  # samples of one backward pass have one random stream
            alone = of_one(parameters, x[sample])
            if not all(torch.equal(batched[name][sample], alone[name]) for name in parameters):
                return False
    return True


@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)
def test_gradients_per_sample_are_not_refused_and_have_the_bits_of_samples_alone(make, recipe):
    torch.manual_seed(0)
    assert gradients_agree(make(), recipe)


@pytest.mark.parametrize("backward", ["dequantized", "high_precision"])
def test_gradients_per_sample_from_unquantized_operands_are_not_refused(backward):
    torch.manual_seed(0)
    assert gradients_agree(LAYERS["linear"](), MXFP8BlockScaling(backward_override=backward))


def test_gradients_per_sample_of_experts_are_not_refused():
    layer, x = quire.GroupedLinear(2, 64, 32), torch.randn(SAMPLES, 16, 64)
    parameters = {name: p.detach() for name, p in layer.named_parameters()}

    def loss(parameters, x):
        return functional_call(layer, parameters, (x, [12, 4])).square().sum()

    with quire.autocast(recipe=MXFP8BlockScaling()):
        batched = vmap(grad(loss), in_dims=(None, 0))(parameters, x)
        for sample in range(SAMPLES):
            alone = grad(loss)(parameters, x[sample])
            assert all(torch.equal(batched[name][sample], alone[name]) for name in parameters)


def test_a_batch_of_samples_is_not_one_backward_pass_each():
    layer = quire.Linear(64, 32)
    rewind(layer)
    parameters, _, of_each = per_sample(layer)
    with quire.autocast(recipe=NVFP4BlockScaling()):
        of_each(parameters, torch.randn(SAMPLES, 16, 64))
    assert layer.sr_state[1] == 1


@pytest.mark.parametrize("recipe", [NVFP4BlockScaling(), MXFP8BlockScaling()], ids=["nvfp4", "mxfp8"])
def test_compiled_gradients_per_sample_are_not_refused(recipe, compiler):
    torch.manual_seed(0)
    assert gradients_agree(LAYERS["linear"](), recipe, compiler)
    assert compiler.graphs == 1


def test_delayed_scaling_does_not_lose_the_amax_of_a_sample():
    torch.manual_seed(0)
    layer, x = quire.Linear(64, 32), torch.randn(SAMPLES, 16, 64)
    parameters, _, of_each = per_sample(layer)
    with quire.autocast(recipe=DelayedScaling()):
        of_each(parameters, x)
        assert layer.delayed.fwd_amax[0] == x.abs().max()


def test_no_samples_are_refused_in_words():
    layer = quire.Linear(64, 32)
    parameters, _, of_each = per_sample(layer)
    with quire.autocast(recipe=MXFP8BlockScaling()), pytest.raises(ValueError, match="vmap over no samples"):
        of_each(parameters, torch.randn(0, 16, 64))


class Blocks(torch.nn.Module):
    """Layers that are all one region to torch.compile."""

    def __init__(self, count, **options):
        super().__init__()
        self.layers = torch.nn.ModuleList(quire.Linear(64, 64, **options) for _ in range(count))

    def forward(self, x):
        for layer in self.layers:
            x = block(layer, x)
        return x


@torch.compiler.nested_compile_region
def block(layer, x):
    return torch.relu(layer(x))


def trained(model, function, recipe):
    """y, gradients of x and of all parameters, and counters, after two steps from one random state."""
    rewind(model)
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    model.zero_grad()
    for p in model.parameters():
        if hasattr(p, "main_grad"):
            p.main_grad.zero_()
    for _ in range(2):
        with quire.autocast(recipe=recipe):
            y = function(x)
        y.square().sum().backward()
    gradients = [getattr(p, "main_grad", p.grad) for p in model.parameters()]
    counters = [layer.sr_state[1] for layer in model.layers]
    return [t.clone() for t in (y.detach(), x.grad, *gradients, *counters)]


#: So says its error, of every operator that writes to an argument there.
INDUCTOR = pytest.param(3, "inductor", marks=pytorch.fails_since("2.14", "auto_functionalized_v2 is not an OpOverload"))


@pytest.mark.parametrize(("count", "backend"), [(1, "aot_eager"), (3, "aot_eager"), INDUCTOR])
def test_a_region_compiled_once_does_not_refuse_a_backward_pass_that_counts(count, backend, compiler, equal_bits):
    torch.manual_seed(0)
    model, recipe = Blocks(count), NVFP4BlockScaling()
    eager = trained(model, model, recipe)
    compiled = trained(model, compiler(model, backend=backend), recipe)
    assert all(map(equal_bits, eager, compiled))
    assert [int(t) for t in compiled[-count:]] == [2] * count


def test_a_region_compiled_once_does_not_refuse_gradients_that_go_elsewhere(compiler, equal_bits):
    torch.manual_seed(0)
    model = Blocks(3, bias=False, fuse_wgrad_accumulation=True)
    for p in model.parameters():
        p.main_grad = torch.zeros_like(p, dtype=torch.float32)
    eager = trained(model, model, NVFP4BlockScaling())
    compiled = trained(model, compiler(model), NVFP4BlockScaling())
    assert all(map(equal_bits, eager, compiled))
    assert all(p.main_grad.any() for p in model.parameters())


ENDING = {
    "a layer with kept operands": lambda: quire.Linear(8, 8, delay_wgrad_compute=True),
    "a runner": lambda: quire.runners.register(quire.runners.LinearRunner(torch.randn(16, 32))),
}


@pytest.mark.parametrize("name", ENDING)
def test_the_end_of_an_object_is_no_part_of_a_graph_that_is_made_meanwhile(name):
    held = [ENDING[name]()]

    class Adds(torch.nn.Module):
        def forward(self, x):
            held.clear()  # as the garbage collector does at any time
            gc.collect()
            return x + 1

    exported = torch.export.export(Adds(), (torch.randn(3),))
    assert [node.op for node in exported.graph.nodes] == ["placeholder", "call_function", "output"]


@pytest.mark.parametrize("recipe", ["mxfp8", "fp8_delayed"])
@pytest.mark.parametrize("make", ["new", "copied"])
def test_layers_are_made_and_copied_within_a_transform(make, recipe):
    layer, x = quire.Linear(64, 64), torch.randn(32, 64)

    def loss(x):
        torch.manual_seed(0)
        with quire.autocast(recipe=recipe):
            return (quire.Linear(64, 64) if make == "new" else copy.deepcopy(layer))(x).square().sum()

    expected = x.clone().requires_grad_()
    loss(expected).backward()
    assert torch.equal(torch.func.grad(loss)(x), expected.grad)
    with quire.autocast(recipe=recipe):
        layer(x).sum().backward()
    assert layer.weight.grad.count_nonzero()


@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)
def test_what_the_older_vmap_cannot_batch_is_refused_with_the_newer_one_as_remedy(make, recipe):
    torch.manual_seed(0)
    layer, x = make(), torch.randn(4, 64)

    def summed(x):
        return layer(x).sum(0)

    with quire.autocast(recipe=recipe):
        rewind(layer)
        expected = torch.func.jacrev(summed)(x)
        rewind(layer)
        if recipe.delayed():
            with pytest.raises(RuntimeError, match="use torch.func.jacrev"):
                torch.autograd.functional.jacobian(summed, x, vectorize=True)
        else:
            assert torch.equal(torch.autograd.functional.jacobian(summed, x, vectorize=True), expected)
    assert expected.shape == (summed(x).shape[0], 4, 64)


def of_codes(spec, layer=None):
    """A function of samples that quantizes them: the sum of the squares of what they are decoded to, or of the result
    of a layer that multiplies their codes."""

    def loss(x):
        q = quire.quantize(x, spec, columnwise=True)
        if layer is None:
            return q.dequantize().square().sum()
        with quire.autocast(recipe=spec.partition(":")[0]):
            return layer(q).square().sum()

    return loss


@pytest.mark.parametrize("spec", ["mxfp8", "nvfp4:rht"])
@pytest.mark.parametrize("multiplied", [False, True], ids=["decoded", "multiplied"])
def test_samples_that_are_quantized_within_a_transform_have_the_gradients_of_backward(multiplied, spec):
    torch.manual_seed(0)
    x, layer = torch.randn(SAMPLES, 16, 64), quire.Linear(64, 32)
    loss = of_codes(spec, layer if multiplied else None)
    expected = x[0].clone().requires_grad_()
    rewind(layer)
    loss(expected).backward()
    rewind(layer)
    assert torch.equal(grad(loss)(x[0]), expected.grad) and expected.grad.count_nonzero()
    if not multiplied:
        with pytest.raises(
            RuntimeError, match="dequantize.. with a gradient cannot be batched by torch.func.vmap; use"
        ):
            vmap(grad(loss))(x)
        return
    rewind(layer)
    batched = vmap(grad(loss))(x)
    rewind(layer)
    assert torch.equal(batched[0], grad(loss)(x[0]))


def test_a_gradient_of_a_quantized_weight_by_a_transform_is_refused_with_the_remedy():
    with quire.quantized_model_init(recipe="mxfp8"):
        layer = quire.Linear(64, 32)
    _, of_one, _ = per_sample(layer)
    with quire.autocast(recipe="mxfp8"), pytest.raises(TypeError, match="take its gradient by backward"):
        of_one(dict(layer.named_parameters()), torch.randn(16, 64))
