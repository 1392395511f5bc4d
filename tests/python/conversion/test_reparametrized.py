"""Layers whose weights PyTorch computes from other parameters (pruned, normalised, parametrized), or whose weight is no
plain parameter: converted by the values that they compute with, or left with the reason."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.utils import parametrizations, parametrize, prune
from torch.testing._internal.two_tensor import TwoTensor

import quire
from every_feature import LAYERS
from ranks import rank_of
from steps import call, products_checked

pytestmark = pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated", "ignore:.*stay in high precision")


class Symmetric(nn.Module):
    def forward(self, x):
        return x.triu() + x.triu(1).T


class Scaled(nn.Module):
    def forward(self, x):
        return 0.5 * x


def _remove_pruning(layer, *names):
    for name in names:
        prune.remove(layer, name)


def _remove_parametrizations(layer, *names):
    for name in names:
        parametrize.remove_parametrizations(layer, name)


def _twice(layer):
    prune.l1_unstructured(layer, "weight", 0.5)
    prune.random_unstructured(layer, "weight", 0.25)


def _both(layer):
    prune.ln_structured(layer, "weight", 0.25, n=2, dim=0)
    prune.random_unstructured(layer, "bias", 0.5)


def _two_parametrizations(layer):
    parametrize.register_parametrization(layer, "weight", Symmetric())
    parametrize.register_parametrization(layer, "weight", Scaled())
    parametrize.register_parametrization(layer, "bias", Scaled())


def _mixed(layer):
    nn.utils.spectral_norm(layer)
    prune.random_unstructured(layer, "bias", 0.5)


#: Name -> what makes a weight a computed one, and PyTorch's own way to make it a parameter of its value again.
COMPUTED = {
    "pruned": (lambda m: prune.l1_unstructured(m, "weight", 0.5), lambda m: _remove_pruning(m, "weight")),
    "pruned twice": (_twice, lambda m: _remove_pruning(m, "weight")),
    "weight and bias pruned": (_both, lambda m: _remove_pruning(m, "weight", "bias")),
    "weight_norm": (nn.utils.weight_norm, nn.utils.remove_weight_norm),
    "weight_norm of all": (lambda m: nn.utils.weight_norm(m, dim=None), nn.utils.remove_weight_norm),
    "spectral_norm": (nn.utils.spectral_norm, nn.utils.remove_spectral_norm),
    "spectral_norm, bias pruned": (
        _mixed,
        lambda m: (nn.utils.remove_spectral_norm(m), _remove_pruning(m, "bias")),
    ),
    "parametrized weight_norm": (parametrizations.weight_norm, lambda m: _remove_parametrizations(m, "weight")),
    "parametrized spectral_norm": (parametrizations.spectral_norm, lambda m: _remove_parametrizations(m, "weight")),
    "orthogonal": (parametrizations.orthogonal, lambda m: _remove_parametrizations(m, "weight")),
    "own parametrizations": (_two_parametrizations, lambda m: _remove_parametrizations(m, "weight", "bias")),
}
every_way_to_compute = pytest.mark.parametrize("how", COMPUTED)
X = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))


def model_of(kind, how=None):
    torch.manual_seed(1)
    model = nn.Sequential(kind(64, 64), nn.ReLU(), kind(64, 64))
    if how is not None:
        COMPUTED[how][0](model[2])
    return model


def plain(kind, how):
    """The same model with parameters, by PyTorch's own functions, in evaluation mode: training mode would change the
    values of spectral_norm."""
    twin = model_of(kind, how).eval()
    COMPUTED[how][1](twin[2])
    return twin


WAYS = {
    "convert": lambda model: quire.convert(model, "mxfp8", for_inference=True, tokens=None, min_features=1),
    "convert, in training mode": lambda model: WAYS["convert"](model.train()),
    "convert within no_grad": torch.no_grad()(lambda model: WAYS["convert"](model)),
    "convert within inference_mode": torch.inference_mode()(lambda model: WAYS["convert"](model)),
    "rtn": lambda model: quire.quantize_model(model, "nvfp4"),
    "4over6": lambda model: quire.quantize_model(model, "nvfp4", method="4over6"),
    "gptq": lambda model: quire.quantize_model(model, "nvfp4", [X], "gptq"),
    "static scales": lambda model: quire.quantize_model(model, "x=fp8_tensor:given,w=fp8_row,dy=mxfp8", [X]),
}


@pytest.mark.parametrize("way", WAYS)
@every_way_to_compute
def test_a_computed_weight_becomes_the_codes_of_its_value(how, way, equal_bits):
    model = model_of(nn.Linear, how)
    expected = WAYS[way](plain(nn.Linear, how))
    converted = WAYS[way](model)
    with torch.no_grad():
        assert equal_bits(converted.eval()(X), expected.eval()(X))
    layer = converted[2]
    assert type(layer) is quire.Linear and isinstance(layer.weight, quire.QuantizedTensor)
    assert set(dict(layer.named_parameters())) == {"weight", "bias"}
    assert not layer._forward_pre_hooks and not layer._state_dict_hooks and not layer._load_state_dict_pre_hooks
    assert set(layer.state_dict()) == set(expected[2].state_dict())
    assert quire.conversion_report(converted).layers[1].computed.startswith(("weight by", "bias by"))
    for copied in (copy.deepcopy(converted), pickle.loads(pickle.dumps(converted))):
        with torch.no_grad():
            assert equal_bits(copied(X), expected(X))


@every_way_to_compute
def test_a_layer_of_quire_becomes_the_codes_of_its_computed_weight(how, equal_bits):
    model = model_of(quire.Linear, how)
    expected = WAYS["convert"](plain(quire.Linear, how))
    with torch.no_grad():
        assert equal_bits(WAYS["convert"](model)(X), expected(X))
    assert "weight by" in quire.conversion_report(model).layers[1].computed
    assert "no longer computed: weight by" in str(quire.conversion_report(model))


def _with_computed_weights(name, add):
    torch.manual_seed(1)
    layer = LAYERS[name]().eval()
    for module in layer.modules():
        if hasattr(module, "products"):
            for weight in [own for own in module._parameters if "weight" in own and "norm" not in own]:
                add(module, weight)
    with torch.no_grad():  # so that no value is the one that was there when the hook was added
        for parameter in layer.parameters():
            parameter.mul_(1.5)
    return layer


OF_EVERY_LAYER = {
    "pruned": (lambda m, name: prune.l1_unstructured(m, name, 0.5), prune.remove),
    "weight_norm": (nn.utils.weight_norm, nn.utils.remove_weight_norm),
    "spectral_norm": (nn.utils.spectral_norm, nn.utils.remove_spectral_norm),
    "parametrized": (
        lambda m, name: parametrize.register_parametrization(m, name, Scaled()),
        parametrize.remove_parametrizations,
    ),
}


def compared_with_computed_weights(name, how, equal_bits):
    """Two layers that compute the same: one with computed weights, and one that has their values."""
    add, remove = OF_EVERY_LAYER[how]
    layer, twin = (_with_computed_weights(name, add) for _ in range(2))
    for module in twin.modules():
        own = [weight for weight in getattr(module, "weight_names", ()) if weight not in module._parameters]
        for weight in own:
            remove(module, weight)
    with torch.no_grad(), quire.autocast(recipe="mxfp8"):
        assert equal_bits(call(layer, X), call(twin, X))
    return layer, twin


@pytest.mark.parametrize("how", OF_EVERY_LAYER)
@pytest.mark.parametrize("name", LAYERS)
def test_every_layer_of_quire_computes_with_computed_weights_and_is_converted_by_them(name, how, equal_bits):
    layer, twin = compared_with_computed_weights(name, how, equal_bits)
    WAYS["convert"](nn.Sequential(layer, twin))
    with torch.no_grad():
        assert equal_bits(call(layer, X), call(twin, X))


#: Those whose sources PyTorch differentiates by their value: name -> of a layer, weight as a function of its sources.
TRAINED = {
    "pruned": lambda m: (m.weight_orig * m.weight_mask, [m.weight_orig]),
    "weight_norm": lambda m: (torch._weight_norm(m.weight_v, m.weight_g, 0), [m.weight_v, m.weight_g]),
    "spectral_norm": lambda m: (m.weight_orig / (m.weight_u @ m.weight_orig @ m.weight_v), [m.weight_orig]),
}


@pytest.mark.parametrize("how", TRAINED)
def test_for_training_a_weight_that_hooks_compute_is_still_computed_and_its_sources_get_gradients(how, equal_bits):
    model = model_of(nn.Linear, how).eval()
    reference = quire.convert(plain(nn.Linear, how), "mxfp8", min_features=1)
    quire.convert(model, "mxfp8", min_features=1)
    y, expected = model(X), reference(X)
    assert equal_bits(y.detach(), expected.detach())
    y.square().sum().backward()
    expected.square().sum().backward()
    weight, sources = TRAINED[how](model[2])
    grads = torch.autograd.grad(weight, sources, reference[2].weight.grad)
    for source, grad in zip(sources, grads, strict=True):
        torch.testing.assert_close(source.grad / grad.abs().max(), grad / grad.abs().max())


@pytest.mark.parametrize("how", [how for how in COMPUTED if how not in (*TRAINED, "pruned twice")])
def test_for_training_a_converted_model_with_computed_weights_runs(how, equal_bits):
    model = model_of(nn.Linear, how).eval()
    reference = plain(nn.Linear, how)
    quire.convert(model, "mxfp8", min_features=1)
    why = quire.conversion_report(model).layers[1].why_not
    if parametrize.is_parametrized(model[2]):
        assert why.startswith("it is parametrized: remove the parametrization, or register it after quire.convert")
        quire.convert(reference, "mxfp8", lambda layer, name: name == "0", min_features=1)
    else:
        assert why == ""
        quire.convert(reference, "mxfp8", min_features=1)
    assert equal_bits(model(X).detach(), reference(X).detach())


@pytest.mark.parametrize("how", ["pruned", "spectral_norm", "own parametrizations"])
def test_an_error_leaves_computed_weights_as_they_were(how, equal_bits):
    model = model_of(nn.Linear, how).eval()
    removed = []
    handle = model[2].register_forward_pre_hook(lambda layer, args: removed.append(1))
    before, kind = copy.deepcopy(model.state_dict()), type(model[2])
    y = model(X)
    with pytest.raises(ValueError, match="is not finite"):
        quire.quantize_model(model, "nvfp4", [torch.full_like(X, float("nan"))], "gptq")
    assert type(model[2]) is kind and model.state_dict().keys() == before.keys()
    assert all(equal_bits(value, before[name]) for name, value in model.state_dict().items())
    assert equal_bits(model(X).detach(), y.detach())
    handle.remove()
    count = len(removed)
    model(X)
    assert len(removed) == count  # the handle is that of the hooks that are called
    model(X).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("how", ["pruned", "own parametrizations"])
def test_a_parameter_that_another_module_has_too_keeps_its_values(how, equal_bits):
    embedding, head = nn.Embedding(64, 64), nn.Linear(64, 64)
    head.weight = embedding.weight
    COMPUTED[how][0](head)
    values = embedding.weight.detach().clone()
    model = nn.Sequential(embedding, head)
    with pytest.warns(UserWarning, match=r"1\.weight shared memory with 0\.weight, and has codes of its own now"):
        WAYS["convert"](model)
    assert equal_bits(embedding.weight.detach(), values)


def _buffer(layer):
    layer.register_buffer("weight", layer._parameters.pop("weight").detach())


def _attribute(layer):
    layer.weight = layer.__dict__.setdefault("source", layer._parameters.pop("weight").detach()).clone()


def _assign(layer, value):
    layer.weight = nn.Parameter(value, requires_grad=False)


def _nested(layer):
    nn.utils.weight_norm(layer)
    prune.l1_unstructured(layer, "weight_v", 0.5)


def _codes(layer):
    _assign(layer, quire.quantize(layer.weight.detach(), "mxfp4", columnwise=False))


#: Name -> what makes a weight that is not converted, the reason, and whether it is the reason for training too.
LEFT = {
    "buffer": (_buffer, "its weight is a buffer, and codes are a parameter", False),
    "plain tensor": (_attribute, "its weight is a plain tensor, in whose place other code may put another one", False),
    "sparse rows": (lambda m: _assign(m, m.weight.detach().to_sparse_csr()), "its weight is sparse (sparse_csr)", True),
    "sparse": (lambda m: _assign(m, m.weight.detach().to_sparse()), "its weight is sparse (sparse_coo)", True),
    "None": (lambda m: setattr(m, "weight", None), "its weight is None", True),
    "three dimensions": (
        lambda m: _assign(m, torch.zeros(2, 64, 64)),
        "its weight [2, 64, 64] is not [out_features, in_features]",
        True,
    ),
    "of a subclass": (
        lambda m: _assign(m, TwoTensor(m.weight.detach(), m.weight.detach())),
        "its weight is a TwoTensor, whose values another library stores",
        True,
    ),
    "nested": (_nested, "its weight_v, from which its weight is computed, is computed itself", False),
    "codes of another spec": (_codes, "its weight is quantized already, as mxfp4, not as mxfp8:nan", None),
}


@pytest.mark.filterwarnings("ignore:QuantizedTensor. a matmul of PyTorch", "ignore:Sparse")
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("kind", [nn.Linear, quire.Linear])
@pytest.mark.parametrize("case", LEFT)
@torch.no_grad()
def test_a_weight_that_is_no_plain_parameter_leaves_the_layer_as_it_is_with_the_reason(case, kind, training):
    change, reason, also_for_training = LEFT[case]
    model = model_of(kind)
    change(model[2])
    try:
        before, expected = model[:2](X), model(X)
    except (RuntimeError, TypeError):  # of these weights PyTorch multiplies with none
        expected = None
    first = quire.convert(copy.deepcopy(model[:2]), "mxfp8", min_features=1)(X)
    if training:
        quire.convert(model, "mxfp8", min_features=1)
    else:
        WAYS["convert"](model)
    report = quire.conversion_report(model).layers[1]
    if training and also_for_training is False:
        assert report.why_not == report.kept == ""
        # Its values are those of before, and of both products codes are multiplied.
        weight, bias = model[2].weight.detach(), model[2].bias.detach()
        assert torch.equal(torch.nn.functional.linear(before, weight, bias), expected)
        with products_checked(model) as checked:
            model(X)
        assert checked == {"0", "2"}
        return
    assert (report.why_not + report.kept).startswith(reason)
    if expected is not None:
        torch.testing.assert_close(model(X), model[2](first))


@pytest.mark.parametrize("call", ["convert for training", "convert, nothing chosen", "recommend"])
def test_reading_a_weight_in_training_mode_changes_no_state(call, equal_bits):
    model = model_of(nn.Linear, "parametrized spectral_norm").train()
    before = copy.deepcopy(model.state_dict())
    if call == "recommend":
        quire.recommend(model, min_features=1)
    elif call == "convert for training":
        quire.convert(model, "mxfp8", min_features=1)
    else:
        with pytest.raises(ValueError, match="nothing to convert"):
            quire.convert(model, "mxfp8", for_inference=True, tokens=None)
    after = model.state_dict()
    assert after.keys() == before.keys() and all(equal_bits(value, before[name]) for name, value in after.items())
    assert all(module.training for module in model.modules())


SHARDING = {
    "shard_weights": lambda model, mesh: quire.distributed.shard_weights(model, mesh, "mxfp8"),
    "gather_codes": lambda model, mesh: quire.distributed.gather_codes(model, "mxfp8"),
    "ColumnParallel": lambda model, mesh: parallelize_module(model, mesh, {"2": quire.distributed.ColumnParallel()}),
    "RowParallel": lambda model, mesh: parallelize_module(model, mesh, {"2": quire.distributed.RowParallel()}),
}


@pytest.mark.parametrize("what", SHARDING)
@pytest.mark.parametrize("how", ["pruned", "parametrized weight_norm"])
def test_computed_weights_are_not_sharded_and_the_error_says_what_to_remove(how, what, equal_bits):
    model = model_of(quire.Linear, how)
    before = dict(model.state_dict())
    with rank_of(0, 1):
        mesh = init_device_mesh("cpu", (1,))
        with pytest.raises(NotImplementedError, match=f"{what}.*weight is not a parameter.*remove what computes it"):
            SHARDING[what](model, mesh)
    after = model.state_dict()
    assert after.keys() == before.keys() and all(equal_bits(value, before[name]) for name, value in after.items())


SHARDED = {
    "fully_shard": lambda layer, mesh: fully_shard(torch.nn.Sequential(layer), mesh=mesh),
    "gather_codes, fully_shard": lambda layer, mesh: (
        quire.distributed.gather_codes(layer, "mxfp8"),
        fully_shard(torch.nn.Sequential(layer), mesh=mesh),
    ),
    "a style": lambda layer, mesh: parallelize_module(layer, mesh, quire.distributed.ColumnParallel()),
}


@pytest.mark.parametrize("kind", [quire.Linear, nn.Linear, quire.LayerNormLinear])
@pytest.mark.parametrize("how", SHARDED)
def test_sharded_weights_are_left_in_a_conversion_for_inference(how, kind):
    """An error of the quantizer would come when layers before it are converted already."""
    if kind is nn.Linear and how.startswith("gather_codes"):
        pytest.skip("takes layers of quire alone")
    with rank_of(0, 1):
        model = nn.Sequential(nn.Linear(64, 64), kind(64, 64))
        SHARDED[how](model[1], init_device_mesh("cpu", (1,)))
        before = type(model[1].weight), type(model[1])
        words = "(?s)Convert the whole model before its weights are sharded.*left: its weight is sharded over ranks"
        with pytest.raises(ValueError, match=words):
            quire.convert(model[1], "mxfp8", for_inference=True, tokens=None, min_features=1)
        quire.convert(model, "mxfp8", for_inference=True, tokens=None, min_features=1)
        assert isinstance(model[0].weight, quire.QuantizedTensor)
        assert (type(model[1].weight), type(model[1])) == before and getattr(model[1], "recipe", None) is None


class Lazy(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.lazy = nn.Linear(64, 64), nn.LazyLinear(32)

    def forward(self, x):
        return self.lazy(self.first(x))


@pytest.mark.parametrize("chosen", ["all", "first"])
@pytest.mark.parametrize("way", [*WAYS, "for training"])
def test_uninitialised_layers_are_left_and_get_their_weights_in_the_first_call(way, chosen):
    model, filter = Lazy(), None if chosen == "all" else lambda layer, name: name == "first"
    options = {"filter": filter}
    runs = {
        "for training": lambda: quire.convert(model, "mxfp8", min_features=1, **options),
        "rtn": lambda: quire.quantize_model(model, "nvfp4", **options),
        "4over6": lambda: quire.quantize_model(model, "nvfp4", method="4over6", **options),
        "gptq": lambda: quire.quantize_model(model, "nvfp4", [X], "gptq", **options),
        "static scales": lambda: quire.quantize_model(model, "x=fp8_tensor:given,w=fp8_row,dy=mxfp8", [X], **options),
    }
    default = lambda: quire.convert(model, "mxfp8", for_inference=True, tokens=None, min_features=1, **options)  # noqa: E731
    runs.get(way, default)()
    first, lazy = quire.conversion_report(model).layers
    why = "the filter says so" if filter else "it has no weight yet: call the model once before it is converted"
    assert first.converted and lazy.why_not == why and lazy.out_features == 32
    with torch.no_grad():
        assert model(X).shape == (32, 32)


@pytest.mark.parametrize("method", ["rng_state", "quantize_weights", "recommend", "explain"])
def test_other_functions_take_a_model_with_uninitialised_layers(method):
    model = quire.convert(Lazy(), "mxfp8", lambda layer, name: name == "first", min_features=1)
    runs = {"recommend": lambda: quire.recommend(model, min_features=1), "explain": lambda: quire.explain(model, X)}
    assert runs.get(method, lambda: getattr(quire, method)(model) or True)()
