"""The Python of docs/lora.md: adapters written out everywhere, those of peft where it is installed."""

import re

import pytest
import torch

import quire

BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)


def blocks(page) -> list[str]:
    return BLOCK.findall(page("docs/lora.md").text)


def run(block: str, scope: dict[str, object]) -> dict[str, object]:
    exec(compile(block, "docs/lora.md", "exec"), scope)
    return scope


def test_adapters_train_as_written(page):
    model = run(blocks(page)[0], {})["model"]
    codes = [p for p in model.parameters() if isinstance(p, quire.QuantizedTensor)]
    assert len(codes) == 2 and not any(p.requires_grad for p in codes)


def test_adapters_of_ones_own_are_merged_as_written(page):
    scope = run(blocks(page)[0], {})
    adapted = [scope["model"][i] for i in (0, 2)]
    sums = [each.layer.weight.dequantize() + (each.up @ each.down).detach() for each in adapted]
    model = run(blocks(page)[2], scope)["model"]
    assert [type(layer) for layer in model] == [quire.Linear, torch.nn.GELU, quire.Linear]
    for layer, values in zip((model[0], model[2]), sums, strict=True):
        assert torch.equal(layer.weight.dequantize(), quire.quantize(values, layer.weight.spec_text).dequantize())


def test_the_figures_are_those_of_their_page(page):
    measured = {row[0]: row[1:] for row in page("docs/language-model.md").rows("Perplexity")}
    names = {"`mxfp8`": "`mxfp8`", "`nvfp4`": "`nvfp4`", "`x=none,w=nvfp4`": "only weights: `x=none,w=nvfp4`"}
    for recipe, _, _, said in page("docs/lora.md").rows("Choose the recipe"):
        cells = [cell.split(" ±")[0] for cell in measured[names[recipe]] if " ±" in cell]
        assert re.findall(r"([\d.]+) %", said) == cells


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_adapters_of_peft_train_and_merge_as_written(page, tmp_path, monkeypatch):
    pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    # As large as the smallest layers that are converted.
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 1, "num_key_value_heads": 1}
    config = transformers.LlamaConfig(vocab_size=32, num_hidden_layers=2, **sizes)
    transformers.LlamaForCausalLM(config).save_pretrained("folder-of-a-model")
    _, adapting, _, merging = blocks(page)
    scope = run(adapting, {"quire": quire, "torch": torch})
    model, ids = scope["adapted_model"], torch.arange(8)[None]
    model(ids, labels=ids).loss.backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
    model.save_pretrained("adapter")
    assert (tmp_path / "adapter/adapter_model.safetensors").is_file()
    merged = run(merging, scope)["merged"]
    layer = merged.model.layers[0].self_attn.q_proj
    assert isinstance(layer.weight, quire.QuantizedTensor) and merged(ids).logits.isfinite().all()
