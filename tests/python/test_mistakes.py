"""Sixty plausible mistakes. Each error says the operation, the rule, what was given, and a remedy that works. A new
mistake joins by a line of MISTAKES."""

import traceback

import pytest
import torch

import quire
from quire import recipe as recipes
from quire.recipe import DelayedScaling, MXFP8BlockScaling, NVFP4BlockScaling

pytestmark = pytest.mark.any_device


def x(rows=4, columns=64, dtype=torch.float32):
    return torch.ones(rows, columns, dtype=dtype)


def ids(dtype=torch.int32):
    return torch.zeros(4, 2, dtype=dtype)


def linear(**options):
    return quire.Linear(64, 32, **options)


def grouped(*splits, **options):
    return under(lambda: quire.GroupedLinear(3, 64, 32)(x(6), *splits, **options))


def under(call, recipe="mxfp8"):
    with quire.autocast(recipe=recipe):
        return call()


def called(*arguments, **options):
    return under(lambda: linear()(*arguments, **options))


def model():
    return torch.nn.Sequential(torch.nn.Linear(64, 64))


def decorated():
    @quire.autocast
    def function():
        pass


def stale(first, then):
    layer = linear()
    first(layer)
    with torch.no_grad():
        layer.weight.add_(1)
    then(layer)


def twice():
    y = x().requires_grad_()
    (gradient,) = torch.autograd.grad(called(y).sum(), y, create_graph=True)
    gradient.sum().backward()


def meta():
    with torch.device("meta"):
        layer = linear()
    under(lambda: layer(x()))


def trained(**options):
    under(lambda: linear(**options)(x())).sum().backward()


# What somebody does, and words of the error in their order, with " ... " between them.
MISTAKES = {
    # Recipes.
    "a class for a recipe": (
        lambda: quire.autocast(recipe=MXFP8BlockScaling),
        "TypeError: autocast: recipe must be a recipe ... construct it: MXFP8BlockScaling()",
    ),
    "a class for a recipe of a layer": (lambda: linear(recipe=NVFP4BlockScaling), "Linear: ... NVFP4BlockScaling()"),
    "a class to convert to": (lambda: quire.convert(model(), MXFP8BlockScaling), "convert: ... MXFP8BlockScaling()"),
    "half a name": (lambda: quire.autocast(recipe="mxfp"), "autocast: there is no recipe 'mxfp'; ... mean 'mxfp8'"),
    "another tool's name": (
        lambda: quire.convert(model(), "int8"),
        "convert: there is no recipe 'int8'; ... are nvfp4",
    ),
    "a name in capitals": (lambda: quire.autocast(recipe="NVFP4"), "there is no recipe 'NVFP4'; ... mean 'nvfp4'"),
    "a dtype for a recipe": (
        lambda: quire.autocast(recipe=torch.float8_e4m3fn),
        "autocast: recipe must be ... got torch.float8_e4m3fn; pass an instance",
    ),
    "a recipe as first argument": (
        lambda: quire.autocast("mxfp8"),
        "autocast: enabled must be a bool, got 'mxfp8'; a recipe is passed as recipe=",
    ),
    "a decorator without parentheses": (decorated, "autocast: ... @quire.autocast()"),
    "a misspelt option of autocast": (lambda: quire.autocast(recipy=1), "autocast: ... 'recipy'; ... mean 'recipe'"),
    "a number for a process group": (
        lambda: quire.autocast(amax_reduction_group=1),
        "amax_reduction_group must be a process group or None, got 1; torch.distributed.new_group makes one",
    ),
    "a text without a role": (
        lambda: quire.autocast(recipe="x=mxfp8,w=mxfp8"),
        "each of x, w and dy, ... got 'x=mxfp8",
    ),
    "a text of an unknown format": (
        lambda: quire.autocast(recipe="x=mxfp9,w=mxfp8,dy=mxfp8"),
        "autocast: CustomRecipe: x: spec: unknown family in '>>mxfp9<<'; use one of fp8_tensor",
    ),
    "a text with another format's option": (
        lambda: quire.autocast(recipe="x=mxfp8:16x16,w=mxfp8,dy=mxfp8"),
        "unknown option in 'mxfp8:>>16x16<<'; mxfp8 takes: e5m2 ... 32x32",
    ),
    "a text that rounds activations at random": (
        lambda: quire.autocast(recipe="x=nvfp4:sr,w=nvfp4,dy=nvfp4"),
        "rounds x stochastically, but only dy may be; remove 'sr' from x",
    ),
    "a custom recipe that transforms weights": (
        lambda: recipes.CustomRecipe(lambda role: "nvfp4:rht"),
        "ValueError: CustomRecipe: recipe: ... w ... remove 'rht'",
    ),
    "an option that a recipe lacks": (
        lambda: NVFP4BlockScaling(rht=False),
        "NVFP4BlockScaling: there is no option 'rht'; the options are disable_rht, ... mean 'disable_rht'",
    ),
    "a text for a format": (
        lambda: MXFP8BlockScaling(fp8_format="E5M2"),
        "MXFP8BlockScaling: fp8_format must be one of Format.E4M3, Format.HYBRID; got 'E5M2'",
    ),
    "a margin without delayed scaling": (lambda: MXFP8BlockScaling(margin=1), "margin ... got 1. Leave it 0"),
    "a history of nothing": (lambda: DelayedScaling(amax_history_len=0), "amax_history_len must be ... got 0"),
    "a class of recipe by its name": (lambda: recipes.MXFP4, "'quire.recipe' has no ... mean 'MXFP4BlockScaling'"),
    "delayed scaling for one layer": (
        lambda: linear(recipe="fp8_delayed"),
        "Linear: ... cannot be DelayedScaling, ... Leave recipe None and run the model within quire.autocast",
    ),
    # Conversion.
    "a tensor to convert": (
        lambda: quire.convert(x(), "mxfp8"),
        "convert: model must be a torch.nn.Module, got Tensor",
    ),
    "a text for a filter": (
        lambda: quire.convert(model(), "mxfp8", filter="head"),
        "convert: filter must be a function ... got 'head'; to choose by name: lambda module, name: ",
    ),
    "a model with nothing to convert": (lambda: quire.convert(model(), "mxfp8"), "in_features < 256"),
    "a report of another model": (lambda: quire.conversion_report(model()), "not converted; pass what quire.convert"),
    # Layers.
    "an option that a layer lacks": (
        lambda: linear(biass=False),
        "Linear: there is no option 'biass'; ... mean 'bias'",
    ),
    "two dtypes": (
        lambda: linear(dtype=torch.float16, params_dtype=torch.float32),
        "dtype and params_dtype are the same option, got torch.float16 and torch.float32; pass one",
    ),
    "a device that is not there": (
        lambda: linear(device="xpu"),
        "Linear: device 'xpu' is not available: ... pass device='cpu'",
    ),
    "a norm that there is not": (
        lambda: quire.LayerNormLinear(64, 32, normalization="BatchNorm"),
        "LayerNormLinear: normalization must be 'LayerNorm' or 'RMSNorm', got 'BatchNorm'",
    ),
    "an activation that there is not": (
        lambda: quire.LayerNormMLP(64, 32, activation="swishglu"),
        "LayerNormMLP: activation='swishglu' is not available; use one of gelu",
    ),
    "no groups": (lambda: quire.GroupedLinear(0, 64, 32), "GroupedLinear: num_gemms must be at least 1, got 0"),
    "more experts for a token than there are": (
        lambda: quire.MoE(64, 64, 4, 5),
        "top_k must be from 1 to ... 4, got 5",
    ),
    "an option that routing lacks": (
        lambda: quire.MoE(64, 64, 4, score="a"),
        "'score'; options of routing are score_f",
    ),
    "the dtype of a mixture": (
        lambda: quire.MoE(64, 64, 4, dtype=torch.bfloat16),
        "argument 'dtype'; ... capacity; the dtype of parameters is params_dtype",
    ),
    # Calls.
    "other features than a layer's": (
        lambda: called(x(4, 63)),
        "linear: x and w must agree on K; got x [..., 63] and w [32, 64]; the last dimension of x must be in_feat",
    ),
    "another dtype than a layer's": (
        lambda: called(x(dtype=torch.bfloat16)),
        "Linear: outside torch.autocast weight must have the dtype of x; got x torch.b ... Convert one with .to()",
    ),
    "integers": (
        lambda: called(x(dtype=torch.int32)),
        "Linear: x must be float32, ... got torch.int32; convert it with",
    ),
    "float64": (lambda: called(x(dtype=torch.float64)), "Linear: x must be float32, ... got torch.float64; convert it"),
    "an array": (lambda: called(x().numpy()), "the input of a layer must be a tensor, got ... torch.as_tensor"),
    "nothing": (lambda: called(None), "the input of a layer must be a tensor, got None"),
    "a sparse tensor": (lambda: called(x().to_sparse()), "x must be a dense tensor, got ... Sparse; use .to_dense()"),
    "a scalar": (lambda: called(torch.tensor(1.0)), "x must have at least 1 dimension, got a scalar; use .reshape(1)"),
    "a layer on meta": (meta, "w and x must be on one device; got meta and cpu; ... call to_empty(device=...)"),
    "an input on meta": (lambda: called(x().to("meta")), "w and x must be on one device; got cpu and meta"),
    "a word for a bool": (
        lambda: called(x(), fp8_output="yes"),
        "Linear.forward: fp8_output must be a bool, got 'yes'",
    ),
    "a number for a bool": (lambda: called(x(), 1), "Linear.forward: is_first_microbatch must be a bool, got 1"),
    "a result rounded at random": (
        lambda: called(x(), output_spec="nvfp4:sr"),
        "Linear.forward: output_spec='nvfp4:sr' rounds stochastically, ... remove 'sr'",
    ),
    "old codes of a first microbatch": (
        lambda: stale(
            lambda layer: under(lambda: layer(x(), is_first_microbatch=True)),
            lambda layer: under(lambda: layer(x(), is_first_microbatch=False)),
        ),
        "the weight has changed since it was quantized, ... quantize it again ... is_first_microbatch=True",
    ),
    "old codes of quantize_weights": (
        lambda: stale(lambda layer: quire.quantize_weights(layer, "mxfp8"), lambda layer: under(lambda: layer(x()))),
        "the weight has changed since it was quantized, ... quantize it again (quire.quantize_weights",
    ),
    # Gradients.
    "a second derivative": (twice, "once differentiable, ... create_graph=True ... quire.autocast(enabled=False)"),
    "no main_grad": (
        lambda: trained(fuse_wgrad_accumulation=True),
        "Linear: ... needs weight.main_grad, ... shape [32, 64] ... got None. Assign one",
    ),
    "backward_dw before backward": (
        lambda: linear(delay_wgrad_compute=True).backward_dw(),
        "Linear.backward_dw: no backward pass has kept operands for it; call it once after each backward",
    ),
    # Mixtures of experts.
    "groups of too many rows": (lambda: grouped([4, 4, 4]), "the 6 rows of x; got [4, 4, 4], which add up to 12"),
    "too few groups": (lambda: grouped([3, 3]), "m_splits must have one size for each of the 3 groups ... got 2"),
    "a group of negative size": (lambda: grouped([-1, 4, 3]), "m_splits must not be negative ... got [-1, 4, 3]"),
    "sizes that are no integers": (lambda: grouped([1.0, 2.0, 3.0]), "one int for each group, ... got torch.float32"),
    "no sizes": (lambda: grouped(None), "m_splits must be one int for each group, as a list ... got None"),
    "a tensor of too many rows": (
        lambda: grouped(torch.tensor([4, 4, 4])),
        "offsets must ... from 0 to 6, ... group 1 ends at 8, ... sizes, which must not be negative and add up to 6",
    ),
    "probabilities for ids": (
        lambda: quire.moe.permute(x(), ids(torch.float32), 4),
        "permute ... topk_ids must be dense int32, got Float ... convert it with .to(torch.int32",
    ),
    "ids of other tokens": (
        lambda: quire.moe.permute(x(5), ids(), 4),
        "permute: topk_ids must have a row for each of the 5 tokens of x; got [4, 2]",
    ),
    "an expert that there is not": (
        lambda: quire.moe.permute(x(), ids() + 7, 4),
        "permute ... topk_ids must be numbers of experts, from 0 to 3, or -1 for none; got 7",
    ),
    "loads of other experts than scores": (
        lambda: quire.moe.load_balancing_loss(x(4, 3), torch.ones(5), topk=2),
        "load_balancing_loss: tokens_per_expert must be [E] for probs [T, E]; got [5] and [4, 3]; use ... num_experts",
    ),
    "loads of other experts than biases": (
        lambda: quire.moe.update_expert_bias_(torch.zeros(3), torch.ones(4, dtype=torch.int32), 0.1),
        "update_expert_bias_: tokens_per_expert must be [E] for expert_bias [E]; got [4] and [3]; use ... num_experts",
    ),
    "more experts to choose than scores": (
        lambda: quire.moe.route(x(4, 3), 5),
        "route: topk must be from 1 to ... 3, g",
    ),
    "no experts to choose": (lambda: quire.moe.route(x(4, 3), 0), "route: topk must be from 1 to ... 3, got 0"),
    "a text for a number of experts": (lambda: quire.moe.route(x(4, 3), "2"), "route: topk must be an int, got '2'"),
    "a text for a factor": (
        lambda: quire.moe.route(x(4, 3), 2, scaling_factor="3"),
        "route: scaling_factor must be a number, got '3'",
    ),
    "an option in a score function": (
        lambda: quire.moe.route(x(4, 3), 2, score_function="softmax:renormalize"),
        "route: score_function must be one of ('softmax', ... got 'softmax:renormalize'",
    ),
    "loads that are fractions": (
        lambda: quire.moe.update_expert_bias_(torch.zeros(3), torch.rand(3), 0.1),
        "update_expert_bias_: tokens_per_expert must hold integers, ... got torch.float32 ... convert them with .long",
    ),
    "biases that are integers": (
        lambda: quire.moe.update_expert_bias_(torch.zeros(3).int(), torch.ones(3).int(), 0.1),
        "update_expert_bias_: ... expert_bias floating-point numbers; got torch.int32 and torch.int32",
    ),
    # Tensors, states, names.
    "integers to quantize": (
        lambda: quire.quantize(ids(), "mxfp8"),
        "quantize: x must be float32, ... got Int; convert",
    ),
    "a recipe for a spec": (
        lambda: quire.quantize(x(), MXFP8BlockScaling()),
        "expected a text such as ... got a MXFP8BlockScaling ... such as recipe.input_spec",
    ),
    "values to decode": (lambda: quire.dequantize(x()), "dequantize: expected what quire.quantize returns, got Tensor"),
    "weights that are not quantized to prepack": (
        lambda: quire.prepack_weights(linear()),
        "prepack_weights: Linear has no quantized weights; make the model within quire.quantized_model_init",
    ),
    "a runner that nobody registered": (
        lambda: quire.nvfp4_linear(x(dtype=torch.bfloat16), "up", 32),
        "nvfp4_linear: no runner has the name 'up'; ... register one",
    ),
    "random states of another model": (
        lambda: quire.set_rng_state(linear(), {"other": torch.zeros(2, dtype=torch.int64)}),
        "set_rng_state: the model has layers that the state has not: ''; pass what quire.rng_state gave",
    ),
    "PyTorch's random state": (lambda: quire.set_rng_state(linear(), torch.get_rng_state()), "must be a dict, got Ten"),
    "delayed states of another model": (
        lambda: quire.set_delayed_state(linear(), {"other": {}}),
        "set_delayed_state: ... that the model has not: 'other'; pass what quire.delayed_state gave",
    ),
    "a misspelt name": (lambda: quire.convrt, "'quire' has no attribute 'convrt'; did you mean 'convert'"),
}


def said(error):
    """What a traceback ends with, notes included, in one line."""
    return " ".join("".join(traceback.format_exception_only(error)).split())


@pytest.mark.filterwarnings("ignore:quire.convert")
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_refused_with_a_remedy(name):
    mistake, words = MISTAKES[name]
    with pytest.raises((TypeError, ValueError, RuntimeError, AttributeError)) as refused:
        mistake()
    text, place = said(refused.value), 0
    for part in words.split(" ... "):
        assert part in text[place:], f"{part!r} is not in {text[place:]!r}"
        place = text.index(part, place) + len(part)


@pytest.mark.cpu_only
def test_there_are_sixty():
    assert len(MISTAKES) >= 60


LAYERS = {
    "Linear": lambda: quire.Linear(64, 64),
    "LayerNormLinear": lambda: quire.LayerNormLinear(64, 64),
    "LayerNormMLP": lambda: quire.LayerNormMLP(64, 64),
    "LayerNorm": lambda: quire.LayerNorm(64),
    "RMSNorm": lambda: quire.RMSNorm(64),
    "MoE": lambda: quire.MoE(64, 64, 4),
}


@pytest.mark.parametrize("recipe", [None, "mxfp8"])
@pytest.mark.parametrize("kind", LAYERS)
def test_an_error_of_a_layer_says_which_of_the_model_it_is(kind, recipe):
    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = torch.nn.ModuleList([torch.nn.Sequential(LAYERS[kind]()) for _ in range(2)])

        def forward(self, x):
            return self.blocks[1](x)

    with pytest.raises(Exception) as refused, quire.autocast(recipe is not None, recipe=recipe):
        Net()(x(4, 63))
    (note,) = refused.value.__notes__
    assert note.startswith(f"In the layer 'blocks.1.0' of Net: quire.{kind}(")


def test_an_error_of_a_layer_on_its_own_says_which_layer():
    with pytest.raises(RuntimeError) as refused:
        quire.GroupedLinear(3, 64, 32)(x(), [1, 1])
    assert refused.value.__notes__ == [
        "In the layer quire.GroupedLinear(num_gemms=3, in_features=64, out_features=32, bias=True)."
    ]


def test_a_layer_within_a_layer_is_named_once():
    with pytest.raises(TypeError) as refused:
        under(lambda: quire.MoE(64, 64, 4)(x(dtype=torch.bfloat16)))
    assert len(refused.value.__notes__) == 1


@pytest.mark.filterwarnings("ignore:`torch.jit.trace")
def test_an_error_within_a_trace_of_torch_jit_names_torch_export():
    with pytest.raises(RuntimeError) as refused, torch.no_grad(), quire.autocast(recipe="mxfp8"):
        torch.jit.trace(quire.LayerNormLinear(64, 64), (x(),))
    assert "torch.export.export" in refused.value.__notes__[-1]
