"""generate() of Hugging Face transformers with a static cache, whose decoding steps run in one graph."""

import pytest

pytest.importorskip("transformers")
import torch  # noqa: E402

import quire  # noqa: E402
from python.integrations import tiny_language_models as tiny  # noqa: E402


def converted(family: str) -> torch.nn.Module:
    model = tiny.model_of(family)
    return quire.convert(model, "mxfp8", min_features=1, for_inference=True, tokens=None)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "mixtral"])
@torch.no_grad()
def test_a_static_cache_and_a_full_graph_give_the_tokens_of_eager_calls(family):
    model, ids = converted(family), tiny.tokens(1, 6)
    options = {"max_new_tokens": 8, "do_sample": False, "cache_implementation": "static", "eos_token_id": None}
    expected = model.generate(ids, **options, disable_compile=True)
    assert expected.shape == (1, 14)
    graphs = []

    def backend(graph, inputs):
        graphs.append(str(graph.graph))
        return graph.forward

    model.forward = torch.compile(model.forward, fullgraph=True, backend=backend)
    found = model.generate(ids, **options, disable_compile=True)
    assert torch.equal(found, expected)
    # One for the prompt, one or two for the steps; within them are quire's operators.
    assert 1 <= len(graphs) <= 4
    operator = "quire.grouped_linear" if family == "mixtral" else "quire.linear"
    assert all(operator in graph for graph in graphs)


@pytest.mark.slow
@torch.no_grad()
def test_inductor_compiles_the_steps_of_generate():
    model, ids = converted("llama"), tiny.tokens(1, 6)
    options = {"max_new_tokens": 6, "do_sample": False, "cache_implementation": "static", "eos_token_id": None}
    expected = model.generate(ids, **options, disable_compile=True)
    model.forward = torch.compile(model.forward, fullgraph=True)
    assert torch.equal(model.generate(ids, **options, disable_compile=True), expected)
