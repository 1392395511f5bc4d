"""Checkpoints that quire writes, read by the tools whose dialects they are in: the same weights, bit for bit."""

import json

import pytest
import torch

import quire
from quire.io import Origin, StoredWeight

HIDDEN, INNER, EXPERTS = 128, 256, 2
SIZES = {
    "vocab_size": 64,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "tie_word_embeddings": False,
}


def stored(weight, spec, dialect, layout):
    if weight.dim() == 3:
        quantized = quire.QuantizedStack.of([quire.quantize(one, spec) for one in weight])
    else:
        quantized = quire.quantize(weight, spec)
    if spec.startswith("fp8"):
        # transformers rounds scales to the dtype of the model when it loads them.
        quantized.rowwise_scale.copy_(quantized.rowwise_scale.bfloat16())
    return StoredWeight(quantized, None, None, Origin(dialect, layout))


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(**SIZES, architectures=["LlamaForCausalLM"], dtype=torch.bfloat16)
    return LlamaForCausalLM(config).to(torch.bfloat16).eval()


def write_llama(folder, spec, dialect, layout):
    """The folder's model with quantized weights; returns it dequantized."""
    model, entries = llama(), {}
    for name, tensor in model.state_dict().items():
        if "proj.weight" in name:
            entries[name] = stored(tensor.float(), spec, dialect, layout)
        else:
            entries[name] = tensor
    config = json.loads(model.config.to_json_string())
    quire.io.write(folder, entries, dialect=dialect, config=config)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if isinstance(entries[name], StoredWeight):
                tensor.copy_(entries[name].dequantize(torch.float32))
    return model


def check_weights(found, wanted):
    with torch.no_grad():
        found(torch.arange(32)[None])  # compressed-tensors decompresses when a model is first used
    values = found.state_dict()
    for name, tensor in wanted.state_dict().items():
        assert torch.equal(values[name], tensor), name


@pytest.mark.parametrize(
    ("spec", "layout"),
    [
        ("nvfp4:global=div", "nvfp4-pack-quantized:tensor_group:none"),
        ("mxfp4", "mxfp4-pack-quantized:group:none"),
        ("mxfp8", "mxfp8-quantized:group:none"),
        ("fp8_tensor", "float-quantized:tensor:none"),
        ("fp8_row", "float-quantized:channel:none"),
        ("fp8_block:128x128", "float-quantized:block:none"),
    ],
)
def test_compressed_tensors_reads_what_quire_writes(spec, layout, tmp_path):
    from transformers import AutoModelForCausalLM

    wanted = write_llama(tmp_path, spec, "compressed-tensors", layout)
    check_weights(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16), wanted)


def test_transformers_reads_fp8_that_quire_writes(tmp_path):
    from transformers import AutoModelForCausalLM, FineGrainedFP8Config

    wanted = write_llama(tmp_path, "fp8_block:128x128", "deepseek", "fp8_block")
    found = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.bfloat16, quantization_config=FineGrainedFP8Config(dequantize=True)
    )
    check_weights(found, wanted)


@pytest.mark.parametrize("inner", [64, HIDDEN], ids=["rectangular", "square"])
def test_transformers_reads_gpt_oss_that_quire_writes(inner, tmp_path):
    """Whose gate and up alternate, and whose matrices transformers transposes."""
    from transformers import AutoModelForCausalLM, GptOssConfig, GptOssForCausalLM, Mxfp4Config

    torch.manual_seed(0)
    sizes = SIZES | {"intermediate_size": inner, "num_local_experts": EXPERTS, "num_experts_per_tok": 1}
    sizes |= {"architectures": ["GptOssForCausalLM"], "layer_types": ["full_attention"]}
    config = GptOssConfig(**sizes, dtype=torch.bfloat16)
    model = GptOssForCausalLM(config).to(torch.bfloat16).eval()
    entries, expected = {}, {}
    for name, tensor in model.state_dict().items():
        if name.endswith("_proj") and "experts" in name:
            gated = name.endswith("gate_up_proj")
            rows = tensor.normal_(std=0.2).float().transpose(1, 2)  # [E, N, K]
            if gated:
                rows = torch.cat([rows[:, 0::2], rows[:, 1::2]], 1)
            entries[name] = stored(rows, "mxfp4", "gpt_oss", "mxfp4:gate_up" if gated else "mxfp4")
            values = entries[name].dequantize(torch.bfloat16)
            if gated:
                gate, up = values.chunk(2, 1)
                values = torch.stack([gate, up], 2).flatten(1, 2)
            expected[name] = values.transpose(1, 2)
        else:
            entries[name] = expected[name] = tensor
    quire.io.write(tmp_path, entries, dialect="gpt_oss", config=json.loads(config.to_json_string()))
    found = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.bfloat16, quantization_config=Mxfp4Config(dequantize=True)
    )
    for name, tensor in expected.items():
        assert torch.equal(found.state_dict()[name], tensor), name


@pytest.mark.parametrize(
    "recipe",
    [
        "mxfp8",
        "mxfp4",
        "fp8_current",
        "x=fp8_row,w=fp8_row,dy=mxfp8",
        "x=none,w=nvfp4:global=mul",
        "x=nvfp4:global=mul:given,w=nvfp4:global=mul,dy=mxfp8",
    ],
)
def test_torchao_reads_what_quantize_model_makes(recipe, tmp_path):
    from safetensors import safe_open
    from torchao.prototype.safetensors.safetensors_support import unflatten_tensor_state_dict

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(128, 128), torch.nn.Linear(128, 64)).requires_grad_(False)
    quire.quantize_model(model, recipe, [torch.randn(16, 128)] if ":given" in recipe else None)
    quire.io.save(model, tmp_path, dialect="torchao")
    with safe_open(tmp_path / "model.safetensors", "pt") as opened:
        flat = {name: opened.get_tensor(name) for name in opened.keys()}
        tensors, left = unflatten_tensor_state_dict(flat, opened.metadata())
    assert not left and tensors.keys() == {"0.weight", "0.bias", "1.weight", "1.bias"}
    for number, layer in enumerate(model):
        found = tensors[f"{number}.weight"]
        assert torch.equal(found.dequantize(torch.float32), layer.weight.dequantize(torch.float32))
        assert torch.equal(tensors[f"{number}.bias"], layer.bias)
        assert (found.act_quant_kwargs is None) == recipe.startswith("x=none")


def test_torchao_reads_what_quire_writes_again(tmp_path):
    """Tensors and metadata make the tensor subclasses that torchao flattened."""
    from safetensors import safe_open
    from torchao.prototype.safetensors.safetensors_support import unflatten_tensor_state_dict

    from python.io.stored_golden import FOLDER

    checkpoint = quire.io.read(FOLDER / "torchao_nvfp4")
    quire.io.write(tmp_path, checkpoint, dialect="torchao")
    with safe_open(tmp_path / "model.safetensors", "pt") as opened:
        flat = {name: opened.get_tensor(name) for name in opened.keys()}
        tensors, left = unflatten_tensor_state_dict(flat, opened.metadata())
    assert not left
    for name in checkpoint.groups:
        assert torch.equal(tensors[name].dequantize(torch.float32), checkpoint[name].dequantize(torch.float32)), name
