"""Experts of mixtures of Hugging Face transformers, which hold all experts in one tensor."""

import copy
import pickle

import pytest

pytest.importorskip("transformers")
import torch  # noqa: E402

import quire  # noqa: E402
from python.integrations import tiny_language_models as tiny  # noqa: E402
from quire.integrations.transformers import register  # noqa: E402
from quire.nn.stacked_experts import StackedExperts  # noqa: E402

MIXTURES = ("gpt_oss", "mixtral", "qwen3_moe")
ALL = {"min_features": 1}


def experts_of(model) -> list[torch.nn.Module]:
    return [layer.mlp.experts for layer in model.model.layers]


def only_experts(module, name) -> bool:
    return name.endswith("experts")


@pytest.mark.parametrize("family", MIXTURES)
@torch.no_grad()
def test_without_a_recipe_results_are_those_of_transformers(family):
    model, ids = tiny.model_of(family), tiny.tokens()
    model.set_experts_implementation("eager")
    expected = model(ids).logits
    quire.convert(model, None, filter=only_experts, **ALL)
    assert all(type(experts) is StackedExperts for experts in experts_of(model))
    torch.testing.assert_close(model(ids).logits, expected)


@pytest.mark.parametrize("family", MIXTURES)
@torch.no_grad()
def test_the_result_is_that_of_a_layer_for_each_expert(family):
    """Bit for bit: rows of one expert are quantized apart from those of others."""
    model = tiny.model_of(family)
    quire.convert(model, "mxfp8", filter=only_experts, **ALL)
    experts = experts_of(model)[0]
    x = torch.randn(9, 64)
    ids, weights = torch.rand(9, 4).topk(2).indices, torch.rand(9, 2)
    assert torch.equal(experts(x, ids, weights), one_by_one(experts, x, ids, weights))


def one_by_one(
    experts: StackedExperts, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, layers: dict | None = None
) -> torch.Tensor:
    """By a quire.Linear for each expert and layer, and a loop over tokens. layers: if given, gets these layers."""
    y = torch.zeros(len(x), ids.shape[1], x.shape[1])
    layers = {} if layers is None else layers
    layers |= {(name, e): linear_of(experts, name, e) for name in ("gate_up_proj", "down_proj") for e in range(4)}
    for e in range(4):
        chosen = (ids == e).nonzero()
        if len(chosen):
            h = layers["gate_up_proj", e](x[chosen[:, 0]])
            h = experts.source._apply_gate(experts, h)
            y[chosen[:, 0], chosen[:, 1]] = layers["down_proj", e](h)
    y = y * weights[..., None]
    return y[:, 0] + y[:, 1]


@torch.no_grad()
def linear_of(experts: StackedExperts, name: str, e: int) -> quire.Linear:
    weight = getattr(experts, name)[e]
    weight = weight.T if experts.is_transposed else weight
    layer = quire.Linear(weight.shape[1], weight.shape[0], bias=experts.has_bias, recipe="mxfp8")
    layer.weight.copy_(weight)
    if experts.has_bias:
        layer.bias.copy_(getattr(experts, f"{name}_bias")[e])
    return layer


@pytest.mark.parametrize("family", MIXTURES)
def test_gradients_are_those_of_a_layer_for_each_expert(family):
    """Bit for bit, as the results are; the gradient of the routing weights is a sum of 64 products in float32."""
    model = tiny.model_of(family)
    quire.convert(model, "mxfp8", filter=only_experts, **ALL)
    experts, dy = experts_of(model)[0], torch.randn(9, 64)
    ids = torch.rand(9, 4).topk(2).indices
    given, layers, results = (torch.randn(9, 64), torch.rand(9, 2)), {}, []
    for function, options in ((experts, ()), (lambda *arguments: one_by_one(experts, *arguments), (layers,))):
        x, weights = (t.clone().requires_grad_() for t in given)
        function(x, ids, weights, *options).backward(dy)
        results.append(x.grad)
        for k, alone in enumerate(torch.eye(2)):
            products = (one_by_one(experts, given[0], ids, alone.expand(9, 2)).detach() * dy).double()
            error = (weights.grad[:, k] - products.sum(-1)).abs()
            assert (error <= 65 * 2.0**-24 * products.abs().sum(-1)).all()
    assert torch.equal(*results) and results[0].any()
    for (name, e), layer in layers.items():
        if layer.weight.grad is None:  # no token has chosen this expert
            assert not getattr(experts, name).grad[e].any()
            continue
        found = getattr(experts, name).grad[e]
        assert torch.equal(found.T if experts.is_transposed else found, layer.weight.grad), (name, e)
        if experts.has_bias:
            assert torch.equal(getattr(experts, f"{name}_bias").grad[e], layer.bias.grad), (name, e)


@pytest.mark.parametrize("family", MIXTURES)
def test_the_report_counts_experts_as_converted(family):
    model = tiny.model_of(family)
    quire.convert(model, "mxfp8", for_inference=True, tokens=None, **ALL)
    report = quire.conversion_report(model)
    names = {name for layer in report.converted for name in layer.names}
    assert {"model.layers.0.mlp.experts", "model.layers.1.mlp.experts"} <= names
    assert not [p for p in report.parameters if ".experts." in p.names[0]]
    before, now = next(layer.weight_bytes for layer in report.converted if layer.names[0].endswith("experts"))
    assert before == sum(
        p.nbytes for n, p in experts_of(tiny.model_of(family))[0].named_parameters() if "bias" not in n
    )
    assert now < 0.3 * before  # 8.25 bits for 32: 0.26, and blocks that are not full


@pytest.mark.parametrize("family", MIXTURES)
@torch.no_grad()
def test_experts_for_inference_hold_codes_only(family):
    model, ids = tiny.model_of(family), tiny.tokens()
    expected = quire.convert(copy.deepcopy(model), "mxfp8", **ALL)(ids).logits
    quire.convert(model, "mxfp8", for_inference=True, tokens=None, **ALL)
    for experts in experts_of(model):
        assert isinstance(experts.gate_up_proj, quire.QuantizedStack)
        assert isinstance(experts.down_proj, quire.QuantizedStack)
    y = model(ids).logits
    assert torch.equal(y, expected)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(ids).logits, y)


@pytest.mark.parametrize("family", MIXTURES)
def test_experts_compile_whole_and_train(family):
    model, ids = tiny.model_of(family), tiny.tokens()
    quire.convert(model, "mxfp8", **ALL)
    expected = model(ids).logits
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    y = compiled(ids).logits
    assert torch.equal(y, expected)
    y.square().sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


@torch.no_grad()
def test_a_token_without_expert_gets_zero():
    model = tiny.model_of("mixtral")
    quire.convert(model, "mxfp8", filter=only_experts, **ALL)
    ids = torch.tensor([[0, 1], [4, 4], [3, 4]])  # 4 is no expert
    y = experts_of(model)[0](torch.randn(3, 64), ids, torch.ones(3, 2))
    assert y[0].any() and not y[1].any() and y[2].any()
    assert experts_of(model)[0](torch.randn(0, 64), ids[:0], torch.ones(0, 2)).shape == (0, 64)


@torch.no_grad()
def test_experts_implementation_quire_computes_by_quire():
    register()
    model, ids = tiny.model_of("mixtral"), tiny.tokens()
    expected = model(ids).logits
    model.set_experts_implementation("quire")
    with quire.autocast(recipe="mxfp8"):
        y = model(ids).logits
    assert all(type(experts) is StackedExperts for experts in experts_of(model))
    assert not torch.equal(y, expected)
    converted = quire.convert(tiny.model_of("mixtral"), "mxfp8", filter=only_experts, **ALL)
    assert torch.equal(y, converted(ids).logits)
    other = tiny.model_of("mixtral")
    other.set_experts_implementation("quire")
    with pytest.raises(Exception, match=r"call quire\.convert\(model\) before torch\.compile"):
        torch.compile(other, fullgraph=True, backend="eager")(ids)


def test_experts_sharded_over_processes_are_left_and_the_report_says_why():
    model = tiny.model_of("mixtral")
    experts_of(model)[0]._is_expert_parallel = True
    quire.convert(model, "mxfp8", **ALL)
    left = quire.conversion_report(model).left
    assert [(layer.names, layer.why_not) for layer in left] == [
        (("model.layers.0.mlp.experts",), "its experts are sharded over ranks")
    ]
    with pytest.raises(NotImplementedError, match="sharded over ranks"):
        StackedExperts.adopt(experts_of(model)[0], None)


def test_a_state_dict_of_transformers_loads_into_converted_experts():
    model, other = tiny.model_of("gpt_oss", seed=0), tiny.model_of("gpt_oss", seed=1)
    quire.convert(model, "mxfp8", **ALL)
    model.load_state_dict(other.state_dict())
    quire.convert(other, "mxfp8", **ALL)
    with torch.no_grad():
        assert torch.equal(model(tiny.tokens()).logits, other(tiny.tokens()).logits)
