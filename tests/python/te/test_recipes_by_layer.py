"""CustomRecipes whose quantizers differ by layer, or by matmul of a layer, beside layers under recipes of their own."""

import copy
import threading

import pytest
import torch
from quire.te.recipe import CustomRecipe

import pytorch
import quire
import quire.te as te
from quire import recipe as recipes
from steps import same

pytestmark = pytest.mark.any_device

E4M3, E5M2 = te.DType.kFloat8E4M3, te.DType.kFloat8E5M2
CURRENT, MXFP8 = recipes.Float8CurrentScaling(), recipes.MXFP8BlockScaling()
DELAYED = {"amax_history_len": 3, "margin": 1}


def current(role):
    return te.Float8CurrentScalingQuantizer(E5M2 if role.tensor_type == "grad_output" else E4M3)


def mxfp8(role):
    return te.MXFP8Quantizer(E4M3)


def nothing(role):
    return None


def delayed(role):
    return te.DelayedScalingRequest(**DELAYED)


#: How a factory treats a matmul, and the recipe that does the same.
WAYS = {
    "current": (current, CURRENT),
    "mxfp8": (mxfp8, MXFP8),
    "high precision": (nothing, None),
    "delayed": (delayed, recipes.DelayedScaling(**DELAYED)),
}
PAIRS = [("mxfp8", "current"), ("high precision", "mxfp8"), ("current", "high precision"), ("delayed", "mxfp8")]
PAIRS += [("high precision", "delayed")]


def factory_of(ways):
    """ways: the end of a matmul's name -> one of WAYS."""

    def factory(role):
        return next((WAYS[way][0](role) for end, way in ways.items() if role.name.endswith(end)), None)

    return factory


def within(recipe):
    return te.autocast(recipe is not None, recipe=recipe)


class Apart(torch.nn.Module):
    """A LayerNormMLP as two layers, each with the recipe that it is given."""

    def __init__(self, mlp, first, second):
        super().__init__()
        self.fc1, self.fc2 = quire.LayerNormLinear(64, 96), quire.Linear(96, 64)
        self.fc1.load_state_dict(
            {name.removeprefix("fc1_"): p for name, p in mlp.named_parameters() if "fc2" not in name}
        )
        self.fc2.load_state_dict({name.removeprefix("fc2_"): p for name, p in mlp.named_parameters() if "fc2" in name})
        self.recipes = first, second

    def forward(self, x):
        with within(self.recipes[0]):
            h = self.fc1(x)
        with within(self.recipes[1]):
            return self.fc2(quire.functional.activation(h, "gelu", h.dtype)[0])


def steps(call, parameters, recipe=None):
    """Results and gradients of steps with smaller and smaller values."""
    found = []
    for step in range(5):
        x = (torch.randn(32, 64, generator=torch.Generator().manual_seed(step)) * 2.0**-step).requires_grad_()
        y = call(x) if recipe is None else under(recipe, call, x)
        found += [y.detach(), *torch.autograd.grad(y.square().sum(), [x, *parameters])]
    return found


def under(recipe, call, x):
    with te.autocast(recipe=recipe() if callable(recipe) else recipe):
        return call(x)


def mlp_of(name="mlp"):
    torch.manual_seed(0)
    return quire.LayerNormMLP(64, 96, name=name)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytorch.takes_objects)])
@pytest.mark.parametrize("pair", PAIRS, ids=" and ".join)
def test_the_matmuls_of_a_layer_can_have_different_quantizers(pair, compiled, compiler):
    mlp = mlp_of()
    apart = Apart(mlp, *[WAYS[way][1] for way in pair])
    recipe = CustomRecipe(factory_of(dict(zip(("fc1", "fc2"), pair, strict=True))))
    found = steps(compiler(mlp) if compiled else mlp, list(mlp.parameters()), recipe)
    assert same(found, steps(apart, list(apart.parameters())))
    for way in {*pair} - {"high precision"}:
        other = mlp_of()
        assert not same(found, steps(other, list(other.parameters()), WAYS[way][1]))


@pytest.mark.parametrize(
    ("made", "compiled"),
    [("once", False), pytest.param("once", True, marks=pytorch.takes_objects), ("in each step", False)],
)
def test_some_layers_can_have_delayed_scaling(made, compiled, compiler):
    torch.manual_seed(0)
    first, second = quire.Linear(64, 96, name="first"), quire.Linear(96, 64, name="second")
    others = copy.deepcopy((first, second))
    factory = factory_of({"first": "delayed", "second": "current"})
    recipe = CustomRecipe(factory) if made == "once" else lambda: CustomRecipe(factory)
    model = torch.nn.Sequential(first, second)

    def apart(x):
        with within(WAYS["delayed"][1]):
            h = others[0](x)
        with within(CURRENT):
            return others[1](h)

    found = steps(compiler(model) if compiled else model, list(model.parameters()), recipe)
    state = quire.delayed_state(first)  # before the next step, which is of all layers
    assert same(found, steps(apart, [*others[0].parameters(), *others[1].parameters()]))
    wanted = quire.delayed_state(others[0])
    assert state["delayed"].keys() == wanted["delayed"].keys() and same(
        *[[t for t in one["delayed"].values() if isinstance(t, torch.Tensor)] for one in (state, wanted)]
    )
    assert float(wanted["delayed"]["scale_fwd"][0]) not in (0.0, 1.0)
    assert compiler.graphs == (1 if compiled else 0)


@pytest.mark.cpu_only
def test_training_goes_on_from_a_checkpoint_as_if_it_had_not_ended():
    torch.manual_seed(0)
    layer, recipe = quire.Linear(64, 96, name="first"), CustomRecipe(factory_of({"first": "delayed"}))
    other = copy.deepcopy(layer)
    steps(layer, list(layer.parameters()), recipe)
    state = quire.delayed_state(layer)
    expected = steps(layer, list(layer.parameters()), recipe)
    found = []

    def resume():  # in a thread, which knows no recipes yet, as a new process
        quire.set_delayed_state(other, state)
        found.extend(steps(other, list(other.parameters()), CustomRecipe(factory_of({"first": "delayed"}))))

    thread = threading.Thread(target=resume)
    thread.start()
    thread.join()
    assert same(found, expected)


def test_codes_are_kept_by_matmul():
    mlp, recipe = mlp_of(), CustomRecipe(factory_of({"fc1": "mxfp8", "fc2": "current"}))
    x = torch.randn(4, 64)
    with te.autocast(recipe=recipe), torch.no_grad():
        expected = mlp(x)
        quire.quantize_weights(mlp)
        assert mlp.fc1_kept_weight.spec == MXFP8.weight_spec and mlp.fc2_kept_weight.spec == CURRENT.weight_spec
        assert torch.equal(mlp(x), expected)
        first = mlp(x, is_first_microbatch=True)
        assert torch.equal(first, expected) and torch.equal(mlp(x, is_first_microbatch=False), expected)
