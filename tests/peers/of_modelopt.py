"""Cases that ModelOpt quantizes and exports: tiny random models."""

import functools
import json
import tempfile
from pathlib import Path

import torch

#: Case -> (ModelOpt's configuration, kind of model).
_EXPORTS = {
    "modelopt_nvfp4": ("NVFP4_DEFAULT_CFG", "llama"),
    "modelopt_nvfp4_moe": ("NVFP4_DEFAULT_CFG", "moe"),
    "modelopt_fp8": ("FP8_DEFAULT_CFG", "llama"),
    "modelopt_fp8_per_channel": ("FP8_PER_CHANNEL_PER_TOKEN_CFG", "llama"),
    "modelopt_fp8_pb_wo": ("FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG", "wide"),
    "modelopt_mxfp8": ("MXFP8_DEFAULT_CFG", "llama"),
}
_SIZES = {
    "vocab_size": 32,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "tie_word_embeddings": False,
}


def model(kind: str) -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = dict(_SIZES)
    if kind == "wide":
        sizes |= {"hidden_size": 128, "intermediate_size": 256, "head_dim": 64}
    if kind == "moe":
        sizes |= {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 32, "decoder_sparse_step": 1}
        config = Qwen3MoeConfig(**sizes, architectures=["Qwen3MoeForCausalLM"], dtype=torch.bfloat16)
        return Qwen3MoeForCausalLM(config).to(torch.bfloat16)
    config = LlamaConfig(**sizes, architectures=["LlamaForCausalLM"], dtype=torch.bfloat16)
    return LlamaForCausalLM(config).to(torch.bfloat16)


def export(recipe: str, kind: str, folder: Path) -> None:
    import modelopt.torch.quantization as mtq
    from freeze import save
    from modelopt.torch.export import export_hf_checkpoint
    from safetensors import safe_open

    def calibrate(module: torch.nn.Module) -> None:
        with torch.no_grad():
            for start in range(4):  # so that each expert is used
                module((torch.arange(32)[None] * (start + 1) + start) % 32)

    quantized = mtq.quantize(model(kind), getattr(mtq, recipe), calibrate)
    with tempfile.TemporaryDirectory() as made:
        export_hf_checkpoint(quantized, export_dir=made)
        tensors = {}
        for file in Path(made).glob("*.safetensors"):
            with safe_open(file, "pt") as opened:
                tensors |= {name: opened.get_tensor(name) for name in opened.keys()}
        configs = {
            name: json.loads((Path(made) / name).read_text()) for name in ("config.json", "hf_quant_config.json")
        }
    stems = [name.removesuffix("_scale") for name in tensors if name.endswith(".weight_scale")]
    values = {stem: dequantized(stem, tensors) for stem in stems}
    save(folder, tensors, values, configs, signed_zeros=False)


def dequantized(name: str, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """By ModelOpt's classes. Its table of E2M1 values has 0 instead of -0."""
    from modelopt.torch.quantization.qtensor import FP8QTensor, NVFP4QTensor
    from modelopt.torch.quantization.qtensor.mxfp8_tensor import MXFP8QTensor

    data, scale = tensors[name], tensors[name + "_scale"]
    if data.dtype == torch.uint8:
        shape = torch.Size((*data.shape[:-1], data.shape[-1] * 2))
        double = tensors[name + "_scale_2"]
        own = NVFP4QTensor(shape, torch.float32, data)
        return own.dequantize(torch.float32, scale=scale, double_scale=double, block_sizes={-1: 16})
    if scale.dtype == torch.uint8:
        return MXFP8QTensor(data.shape, torch.float32, data).dequantize(torch.float32, scale=scale)
    own = FP8QTensor(data.shape, torch.float32, data)
    if scale.dim() == 4:
        flat = scale.reshape(scale.shape[0], scale.shape[2])
        return own.dequantize(torch.float32, scale=flat, block_sizes={0: 128, 1: 128})
    return own.dequantize(torch.float32, scale=scale[:, None] if scale.dim() == 1 else scale)


def odd(folder: Path) -> None:
    """Codes and scales of every byte, global scales that 2688 does not divide exactly, -0."""
    from freeze import save

    tensors, values = {}, {}
    for index, factor in enumerate((1.0, 1 / 3, 2.0**-20 * 1.1, 0.00037202384)):
        name = f"layers.{index}.proj.weight"
        data = (torch.arange(64 * 128) * 7 + index).to(torch.uint8).reshape(64, 128)
        scale = (torch.arange(64 * 16) + index).to(torch.uint8).reshape(64, 16)
        scale = torch.where((scale & 0x7F) == 0x7F, 0x7E, scale).to(torch.uint8).view(torch.float8_e4m3fn)
        tensors |= {name: data, name + "_scale": scale, name + "_scale_2": torch.tensor(factor)}
        values[name] = dequantized(name, tensors)
    quantization = {"quant_algo": "W4A16_NVFP4", "kv_cache_quant_algo": None, "group_size": 16, "exclude_modules": []}
    producer = {"name": "modelopt", "version": "0.47.0"}
    configs = {"config.json": {}, "hf_quant_config.json": {"producer": producer, "quantization": quantization}}
    save(folder, tensors, values, configs, signed_zeros=False)


CASES = {name: functools.partial(export, *how) for name, how in _EXPORTS.items()} | {"modelopt_odd_bytes": odd}
