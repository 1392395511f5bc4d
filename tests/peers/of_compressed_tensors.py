"""Cases of compressed-tensors: layers that it compresses, and bytes that it decompresses."""

import functools
from pathlib import Path
from typing import Any

import torch

#: Case -> (preset, format, dtype of scales).
_CASES = {
    "ct_nvfp4": ("NVFP4", "nvfp4-pack-quantized", torch.float8_e4m3fn),
    "ct_nvfp4a16": ("NVFP4A16", "nvfp4-pack-quantized", torch.float8_e4m3fn),
    "ct_mxfp4": ("MXFP4", "mxfp4-pack-quantized", torch.uint8),
    "ct_mxfp8": ("MXFP8", "mxfp8-quantized", torch.uint8),
    "ct_fp8_tensor": ("FP8", "float-quantized", torch.float32),
    "ct_fp8_channel": ("FP8_DYNAMIC", "float-quantized", torch.float32),
    "ct_fp8_block": ("FP8_BLOCK", "float-quantized", torch.float32),
}


def compress(preset: str, kind: str, scales: torch.dtype, folder: Path) -> None:
    """Random weights that it compresses under given scales, and a layer of every byte."""
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig
    from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme
    from freeze import save

    scheme = preset_name_to_scheme(preset, ["Linear"])
    compressor = BaseCompressor.get_value_from_registry(kind)
    block = preset == "FP8_BLOCK"
    shapes = {"random": (200, 160), "bytes": (192, 256)} if block else {"random": (24, 64), "bytes": (32, 256)}
    tensors, values = {}, {}
    for name, shape in shapes.items():
        local = {} if name == "bytes" else _random(preset, shape)
        if local:
            local = compressor.compress(local, scheme)
        else:
            local = _bytes(preset, shape)
        values[f"layers.{name}.weight"] = compressor.decompress(local, scheme)["weight"]
        if preset == "NVFP4":
            local["input_global_scale"] = torch.tensor([431.7])
        if preset == "FP8":
            local["input_scale"] = torch.tensor([0.0173], dtype=torch.bfloat16)
        tensors |= {f"layers.{name}.{key}": value for key, value in local.items()}
    config = QuantizationConfig(
        config_groups={"group_0": scheme}, format=kind, quantization_status="compressed", ignore=["lm_head"]
    )
    said = {"quant_method": "compressed-tensors", **config.model_dump(mode="json")}
    save(folder, tensors, values, {"config.json": {"quantization_config": said}})


def _scale_shape(preset: str, shape: tuple[int, int]) -> tuple[int, ...]:
    n, k = shape
    if preset.startswith(("NVFP4", "MX")):
        return n, k // (16 if preset.startswith("NVFP4") else 32)
    return {"FP8": (1,), "FP8_DYNAMIC": (n, 1), "FP8_BLOCK": (-(-n // 128), -(-k // 128))}[preset]


def _random(preset: str, shape: tuple[int, int]) -> dict[str, torch.Tensor]:
    weight, size = torch.randn(shape), _scale_shape(preset, shape)
    if preset.startswith("MX"):
        return {"weight": weight, "weight_scale": torch.exp2(torch.randint(-8, 2, size).float())}
    if preset.startswith("NVFP4"):
        scale = (torch.rand(size) * 400 + 10).to(torch.float8_e4m3fn).float()
        return {"weight": weight, "weight_scale": scale, "weight_global_scale": torch.tensor([523.25])}
    scale = torch.rand(size) * 0.01 + 0.003
    dtype = torch.float32 if preset == "FP8" else torch.bfloat16
    return {"weight": weight.to(dtype), "weight_scale": scale.to(dtype)}


def _bytes(preset: str, shape: tuple[int, int]) -> dict[str, torch.Tensor]:
    (n, k), size = shape, _scale_shape(preset, shape)
    four_bit = "FP4" in preset
    data = (torch.arange(n * k // (1 + four_bit)) * 5 + 3).to(torch.uint8).reshape(n, -1)
    local: dict[str, Any] = {"weight_packed": data} if four_bit else {"weight": data.view(torch.float8_e4m3fn)}
    count = torch.Size(size).numel()
    if preset.startswith("MX"):
        # The tool rounds scales to bfloat16 and values too: bytes that keep values finite and normal there.
        local["weight_scale"] = (torch.arange(count) % 200 + 20).to(torch.uint8).reshape(size)
    elif preset.startswith("NVFP4"):
        scale = torch.arange(count).to(torch.uint8).reshape(size)
        scale = torch.where((scale & 0x7F) == 0x7F, 0x7E, scale).to(torch.uint8)
        local["weight_scale"] = scale.view(torch.float8_e4m3fn)
        local["weight_global_scale"] = torch.tensor([0.3703])
    else:
        local["weight_scale"] = (torch.arange(count).float() * 0.37 + 0.0101).reshape(size)
    return local


CASES = {name: functools.partial(compress, *how) for name, how in _CASES.items()}
