"""Cases that transformers dequantizes: fp8 in blocks, with names of several models, and mxfp4."""

from pathlib import Path

import torch
from freeze import save


def _codes(n: int, k: int) -> torch.Tensor:
    return (torch.arange(n * k) * 3 + 1).to(torch.uint8).reshape(n, k).view(torch.float8_e4m3fn)


def _packed(n: int, k: int) -> torch.Tensor:
    return (torch.arange(n * k // 2) * 11 + 5).to(torch.uint8).reshape(n, k // 2)


def _exponents(*shape: int) -> torch.Tensor:
    """All bytes from 0 to 254, where there are so many scales: tools differ on 255."""
    return (torch.arange(torch.Size(shape).numel()) * 37 % 255).to(torch.uint8).reshape(shape)


def _values(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    return Fp8Dequantize(None)._dequantize_one(weight, scale, torch.float32)


def _case(folder: Path, tensors: dict[str, torch.Tensor], said: dict[str, object]) -> None:
    suffixes = ("_scale_inv", ".scale")
    values = {}
    for name, weight in tensors.items():
        scales = [tensors.get(name + suffixes[0]), tensors.get(name.removesuffix(".weight") + suffixes[1])]
        found = [scale for scale in scales if scale is not None]
        if found and name.endswith("weight"):
            values[name] = _values(weight, found[0])
    config = {"torch_dtype": "bfloat16", "quantization_config": {"quant_method": "fp8", **said}}
    save(folder, tensors, values, {"config.json": config})


def deepseek(folder: Path) -> None:
    """V3: float32 and bfloat16 scales, experts of their own, biases."""
    scale = torch.rand(2, 1) * 0.02 + 0.001
    tensors = {"model.layers.0.self_attn.q_a_proj.weight": _codes(256, 128)}
    tensors["model.layers.0.self_attn.q_a_proj.weight_scale_inv"] = scale
    tensors["model.layers.0.self_attn.q_a_proj.bias"] = torch.randn(256).bfloat16()
    for expert in range(2):
        stem = f"model.layers.0.mlp.experts.{expert}.gate_proj"
        tensors[f"{stem}.weight"] = _codes(128, 256)
        tensors[f"{stem}.weight_scale_inv"] = (torch.rand(1, 2) * 0.02).bfloat16()
    tensors["model.layers.0.mlp.gate.weight"] = torch.randn(2, 8).bfloat16()
    said = {"activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}
    _case(folder, tensors, said | {"modules_to_not_convert": ["model.layers.0.mlp.gate"]})


def deepseek_v4(folder: Path) -> None:
    """Names and dtypes of V4: scales in E8M0, experts in MXFP4 under a configuration of fp8."""
    e8m0 = torch.float8_e8m0fnu
    tensors = {"layers.0.attn.wq_a.weight": _codes(128, 256), "layers.0.attn.wq_a.scale": _exponents(1, 2).view(e8m0)}
    for matrix, (n, k) in (("w1", (32, 256)), ("w2", (32, 64))):
        stem = f"layers.0.ffn.experts.0.{matrix}"
        tensors[f"{stem}.weight"] = _packed(n, k).view(torch.int8)
        tensors[f"{stem}.scale"] = _exponents(n, k // 32).view(e8m0)
    said = {"activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"}
    _case(folder, tensors, said)


def mxfp8(folder: Path) -> None:
    """Blocks of 32 with a byte for the exponent."""
    tensors = {"layers.0.proj.weight": _codes(64, 128), "layers.0.proj.weight_scale_inv": _exponents(64, 4)}
    _case(folder, tensors, {"fmt": "e4m3", "scale_fmt": "ue8m0", "weight_block_size": [1, 32]})


def per_tensor(folder: Path) -> None:
    tensors = {
        "layers.0.proj.weight": _codes(16, 32),
        "layers.0.proj.weight_scale_inv": torch.tensor(0.0137),
        "layers.0.proj.activation_scale": torch.tensor(0.171),
    }
    _case(folder, tensors, {"activation_scheme": "static", "weight_block_size": None})


def gpt_oss(folder: Path) -> None:
    """Also with hidden size = intermediate size, where shapes do not show a transpose. Values are [E, K, N]."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    tensors, values = {}, {}
    for layer, (hidden, inner) in enumerate(((64, 32), (64, 64))):
        for name, (n, k) in {"gate_up_proj": (2 * inner, hidden), "down_proj": (hidden, inner)}.items():
            stem = f"model.layers.{layer}.mlp.experts.{name}"
            blocks = _packed(2 * n, k).reshape(2, n, k // 32, 16)
            scales = _exponents(2, n, k // 32)
            tensors |= {f"{stem}_blocks": blocks, f"{stem}_scales": scales}
            tensors[f"{stem}_bias"] = torch.randn(2, n).bfloat16()
            values[stem] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    said = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    save(folder, tensors, values, {"config.json": {"quantization_config": said}})


CASES = {
    "hf_deepseek": deepseek,
    "hf_deepseek_v4": deepseek_v4,
    "hf_mxfp8": mxfp8,
    "hf_fp8_per_tensor": per_tensor,
    "hf_gpt_oss": gpt_oss,
}
