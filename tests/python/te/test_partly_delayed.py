"""CustomRecipes under which some operands of a matmul have delayed scaling and the others do not, against products of
decoded operands in float64, whose delayed scales follow from amaxes that are written down here."""

import itertools

import pytest
import torch
from quire.te.recipe import CustomRecipe

import quire
import quire.te as te
from steps import assert_rounded

pytestmark = pytest.mark.any_device

NAMES = {"input": "x", "weight": "w", "grad_output": "dy"}
SUBSETS = [*itertools.combinations(("x", "w", "dy"), 1), *itertools.combinations(("x", "w", "dy"), 2)]
LARGEST = {"x": 448.0, "w": 448.0, "dy": 57344.0}
LENGTH, MARGIN, STEPS = 2, 1, 5


def recipe_of(delayed, other):
    def factory(role):
        operand = NAMES[role.tensor_type]
        if operand in delayed:
            return te.DelayedScalingRequest(amax_history_len=LENGTH, margin=MARGIN)
        return spec_of(operand, other)

    return CustomRecipe(factory)


def spec_of(operand, family):
    return f"{family}:e5m2:nan" if operand == "dy" else f"{family}:nan"


class Scales:
    """scale: of each operand that has delayed scaling, for the next step."""

    def __init__(self, delayed, other):
        self.other, self.amaxes, self.scale = other, {name: [] for name in delayed}, dict.fromkeys(delayed, 1.0)

    def decoded(self, operand, t):
        """Along the last dimension, and along the first."""
        options = {"scale": torch.tensor([self.scale[operand]])} if operand in self.scale else {}
        spec = spec_of(operand, "fp8_tensor" if options else self.other)
        rows = quire.quantize(t, spec, **options).dequantize()
        columns = quire.quantize(t, spec, rowwise=False, columnwise=True, **options).dequantize()
        if options:
            self.amaxes[operand].append(float(t.abs().max()))
        return rows.double(), columns.double()

    def step(self):
        for operand, amaxes in self.amaxes.items():
            self.scale[operand] = LARGEST[operand] / max(amaxes[-LENGTH:]) / 2**MARGIN


def data(step):
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(32, size, generator=generator) * 1.7**-step for size in (64, 96)]


def check_product(found, a, b, bias=None):
    """found is a b^T + bias within the bound of numerics.md 7.5."""
    bias = torch.zeros(len(b)).double() if bias is None else bias.detach().double()
    assert_rounded(found, a @ b.T + bias, a.abs() @ b.abs().T + bias.abs(), a.shape[1] + 12)


@pytest.mark.parametrize("other", ["fp8_tensor", "mxfp8"])
@pytest.mark.parametrize("delayed", SUBSETS, ids="+".join)
def test_products_are_those_of_the_decoded_operands(delayed, other, compiler):
    for compiled in (False, True):
        torch.manual_seed(0)
        layer, recipe, scales = quire.Linear(64, 96), recipe_of(delayed, other), Scales(delayed, other)
        function = compiler(layer) if compiled else layer
        for step in range(STEPS):
            x, dy = data(step)
            x.requires_grad_()
            with te.autocast(recipe=recipe):
                y = function(x)
            dx, dw = torch.autograd.grad(y, [x, layer.weight], dy)
            each = {"x": x.detach(), "w": layer.weight.detach(), "dy": dy}
            rows, columns = ({name: scales.decoded(name, t)[i] for name, t in each.items()} for i in (0, 1))
            for amaxes in scales.amaxes.values():
                amaxes.pop()  # each was measured twice
            check_product(y, rows["x"], rows["w"], layer.bias)
            check_product(dx, rows["dy"], columns["w"].T)
            check_product(dw, columns["dy"].T, columns["x"].T)
            scales.step()
            with torch.no_grad():
                layer.weight *= 0.6
        assert len(set(scales.scale.values()) - {1.0}) == len(delayed)
    assert compiler.graphs <= 2  # one more after the first step, whose scales are other tensors


def results(layer, recipe, *arguments):
    found = []
    for step in range(3):
        x = data(step)[0].requires_grad_()
        with te.autocast(recipe=recipe):
            y = layer(x, *arguments)
        found += [y.detach(), *torch.autograd.grad(y.square().sum(), [x, *layer.parameters()])]
    return found


@pytest.mark.parametrize("delayed", SUBSETS, ids="+".join)
def test_other_layers_compute_the_same(delayed):
    recipe = recipe_of(delayed, "fp8_tensor")
    torch.manual_seed(0)
    fused, norm, linear = quire.LayerNormLinear(64, 96), quire.LayerNorm(64), quire.Linear(64, 96)
    norm.load_state_dict(
        {name.removeprefix("layer_norm_"): p for name, p in fused.named_parameters() if "norm" in name}
    )
    linear.load_state_dict({name: p for name, p in fused.named_parameters() if "norm" not in name})
    apart = torch.nn.Sequential(norm, linear)
    # The state before the next step, which is of all layers.
    expected, found = ((*results(each, recipe), *states(of)) for each, of in ((apart, linear), (fused, fused)))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    grouped = quire.GroupedLinear(2, 64, 96)
    grouped.load_state_dict({f"{name}{group}": p for group in (0, 1) for name, p in linear.named_parameters()})
    alone = quire.Linear(64, 96)
    alone.load_state_dict(linear.state_dict())
    both = [results(grouped, recipe, [32, 0])[0], results(alone, recipe)[0]]
    assert torch.equal(*both)


def states(layer):
    return [t for t in quire.delayed_state(layer)["delayed"].values() if isinstance(t, torch.Tensor)]


@pytest.mark.parametrize("delayed", [("w",), ("x", "w")], ids="+".join)
def test_codes_of_a_first_microbatch_are_used_again(delayed):
    torch.manual_seed(0)
    layer, recipe = quire.Linear(64, 96), recipe_of(delayed, "fp8_tensor")
    x = data(0)[0]
    for _ in range(2):
        with te.autocast(recipe=recipe):
            first = layer(x, is_first_microbatch=True)
            assert torch.equal(layer(x, is_first_microbatch=False), first) and torch.equal(layer(x), first)
    assert layer.microbatch_weight is not None
    other = quire.Linear(64, 96)
    with te.autocast(recipe=recipe):
        other(x)
    assert other.microbatch_weight is None


@pytest.mark.parametrize("delayed", [("x",), ("dy",), ("x", "dy")])
def test_an_operation_that_quantizes_knows_which_operands_have_delayed_scaling(delayed):
    operation, scales, recipe = te.ops.Quantize(backward=True), Scales(delayed, "mxfp8"), recipe_of(delayed, "mxfp8")
    torch.manual_seed(0)
    for step in range(STEPS):
        x, dy = (torch.randn(8, 32) * 3.0 ** (step % 3)).requires_grad_(), torch.randn(8, 32) / 5.0**step
        with te.autocast(recipe=recipe):
            y = operation(x)
        y.backward(dy)
        assert torch.equal(y.detach().dequantize().double(), scales.decoded("x", x.detach())[0])
        assert torch.equal(x.grad.double(), scales.decoded("dy", dy)[0])
        scales.step()
