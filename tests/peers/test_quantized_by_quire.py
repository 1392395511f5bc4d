"""Models that quantize_model has quantized, saved by quire.io: the tools of each dialect read the same weights."""

import copy
import json

import of_modelopt
import pytest
import torch
from safetensors.torch import load_file
from test_written_by_quire import EXPERTS, SIZES, llama

import quire

#: Dialect -> recipes that it stores.
RECIPES = {
    "compressed-tensors": (
        "mxfp8",
        "mxfp4",
        "fp8_current",
        "x=fp8_row,w=fp8_row,dy=mxfp8",
        "x=fp8_block,w=fp8_block:128x128,dy=mxfp8",
        "x=fp8_tensor:given,w=fp8_tensor,dy=mxfp8",
        "x=nvfp4:global=div:given,w=nvfp4:global=div,dy=mxfp8",
        "x=none,w=nvfp4:global=div",
    ),
    "modelopt": (
        "mxfp8",
        "x=fp8_row,w=fp8_row,dy=mxfp8",
        "x=none,w=fp8_block:128x128",
        "x=fp8_tensor:given,w=fp8_tensor,dy=mxfp8",
        "x=nvfp4:global=mul:given,w=nvfp4:global=mul,dy=mxfp8",
        "x=none,w=nvfp4:global=mul",
    ),
}
TOKENS = torch.arange(32)[None]


def quantized(model, recipe, folder, dialect, keep=("lm_head",)):
    """The model quantized and saved with its configuration; returns the values of its weights, by name."""
    model.requires_grad_(False)
    quire.quantize_model(
        model,
        recipe,
        [TOKENS] if ":given" in recipe else None,
        filter=lambda module, name: not name.endswith(keep),
    )
    config = json.loads(model.config.to_json_string())
    report = quire.io.save(model, folder, dialect=dialect)
    said = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | said))
    layers = {name: value for name, value in model.state_dict().items() if isinstance(value, quire.QuantizedTensor)}
    assert len(layers) == report.layers == 7
    return {name: value.dequantize(torch.float32) for name, value in layers.items()}


def state_of(folder, dtype, **options):
    """Every tensor of the model as transformers loads it, dequantized."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **options)
    with torch.no_grad():
        model(TOKENS)  # compressed-tensors decompresses when a model is first used
    return model.state_dict()


@pytest.mark.parametrize("recipe", RECIPES["compressed-tensors"])
def test_compressed_tensors_reads_them(recipe, tmp_path):
    # It decompresses 4 bits and MXFP8 to bfloat16, and rounds scales of FP8 to the dtype of the model.
    dtype = torch.float32 if "w=fp8" in recipe or recipe == "fp8_current" else torch.bfloat16
    model = llama().to(dtype)
    plain = copy.deepcopy(model).state_dict()
    values, found = quantized(model, recipe, tmp_path, "compressed-tensors"), state_of(tmp_path, dtype)
    for name, tensor in plain.items():
        assert torch.equal(found[name], values.get(name, tensor).to(dtype)), name


def test_transformers_reads_fp8_in_blocks(tmp_path):
    from transformers import FineGrainedFP8Config

    values = quantized(llama().float(), "x=fp8_block,w=fp8_block:128x128,dy=mxfp8", tmp_path, "deepseek")
    found = state_of(tmp_path, torch.float32, quantization_config=FineGrainedFP8Config(dequantize=True))
    for name, tensor in values.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("recipe", RECIPES["modelopt"])
def test_modelopt_decodes_them_and_converts_their_configuration(recipe, tmp_path):
    from modelopt.torch.export.convert_hf_config import convert_hf_quant_config_format

    values = quantized(llama().float(), recipe, tmp_path, "modelopt")
    tensors = load_file(tmp_path / "model.safetensors")
    for name, tensor in values.items():
        assert torch.equal(of_modelopt.dequantized(name, tensors), tensor), name
    theirs = convert_hf_quant_config_format(json.loads((tmp_path / "hf_quant_config.json").read_text()))
    ours = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert {key: theirs[key] for key in ("quant_method", "quant_algo", "ignore")} == {
        key: ours[key] for key in ("quant_method", "quant_algo", "ignore")
    }


def test_transformers_reads_experts_of_gpt_oss(tmp_path):
    from transformers import AutoModelForCausalLM, GptOssConfig, GptOssForCausalLM, Mxfp4Config

    torch.manual_seed(0)
    sizes = SIZES | {"intermediate_size": 64, "num_local_experts": EXPERTS, "num_experts_per_tok": 1}
    sizes |= {"architectures": ["GptOssForCausalLM"], "layer_types": ["full_attention"]}
    model = GptOssForCausalLM(GptOssConfig(**sizes, dtype=torch.bfloat16)).to(torch.bfloat16).eval()
    experts = model.model.layers[0].mlp.experts
    weights = ("gate_up_proj", "down_proj")
    for name in weights:
        torch.nn.init.normal_(getattr(experts, name), std=0.2)
    plain = {name: getattr(experts, name).detach().clone() for name in weights}
    config = json.loads(model.config.to_json_string())
    only = {"filter": lambda module, name: name.endswith("experts"), "min_features": 1}
    quire.convert(model, **only)
    quire.quantize_model(model, "x=none,w=mxfp4", **only)
    quire.io.save(model, tmp_path, dialect="gpt_oss")
    said = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | said))
    found = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.bfloat16, quantization_config=Mxfp4Config(dequantize=True)
    ).state_dict()
    for name in weights:
        values = getattr(experts, name).dequantize(torch.bfloat16).transpose(1, 2)  # transformers has [E, K, N]
        read = found[f"model.layers.0.mlp.experts.{name}"]
        assert torch.equal(read, values), name
        # Half a step of E2M1 is at most a quarter of the value, or of the scale, which is below amax / 3.
        blocks = plain[name].float().transpose(1, 2).unflatten(-1, (-1, 32))
        error = (read.float().transpose(1, 2).unflatten(-1, (-1, 32)) - blocks).abs()
        assert bool((error <= torch.maximum(blocks.abs() / 4, blocks.abs().amax(-1, keepdim=True) / 12)).all())
