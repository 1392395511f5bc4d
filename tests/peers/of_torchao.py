"""Cases of torchao's safetensors."""

from pathlib import Path
from typing import Any

import torch
from freeze import save


def flattened(folder: Path, tensors: dict[str, Any]) -> None:
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict

    flat, metadata = flatten_tensor_state_dict(tensors)
    values = {
        name: value.dequantize(torch.float32)
        for name, value in tensors.items()
        if type(value) is not torch.Tensor and hasattr(value, "dequantize")
    }
    save(folder, flat, values, {"config.json": {}}, metadata)


def fp8(folder: Path) -> None:
    from torchao.quantization import Float8Tensor, PerBlock, PerRow, PerTensor

    x = torch.randn(48, 128)
    wide = torch.randn(128, 256)
    tensors = {
        "row.weight": Float8Tensor.from_hp(x, granularity=PerRow()),
        "tensor.weight": Float8Tensor.from_hp(x, granularity=PerTensor()),
        "block.weight": Float8Tensor.from_hp(wide, granularity=PerBlock([128, 128])),
        "row.bias": torch.randn(48),
    }
    flattened(folder, tensors)


def mx(folder: Path) -> None:
    from torchao.prototype.mx_formats.mx_tensor import MXTensor

    x = torch.randn(72, 224)  # 7 blocks, so that swizzled scales are padded in both directions
    tensors = {}
    for name, dtype in (("mxfp8", torch.float8_e4m3fn), ("mxfp4", torch.float4_e2m1fn_x2)):
        for swizzled in (False, True):
            key = f"{name}{'_swizzled' if swizzled else ''}.weight"
            tensors[key] = MXTensor.to_mx(x, dtype, 32, is_swizzled_scales=swizzled)
    tensors["e5m2.weight"] = MXTensor.to_mx(x[:16], torch.float8_e5m2, 32)
    flattened(folder, tensors)


def nvfp4(folder: Path) -> None:
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor

    x, stack = torch.randn(136, 80), torch.randn(2, 128, 64)
    scale = torch.tensor(0.00137)
    tensors = {
        "plain.weight": NVFP4Tensor.to_nvfp4(x),
        "scaled.weight": NVFP4Tensor.to_nvfp4(x, per_tensor_scale=scale, act_per_tensor_scale=torch.tensor(0.031)),
        "swizzled.weight": NVFP4Tensor.to_nvfp4(x, per_tensor_scale=scale, is_swizzled_scales=True),
        "experts.gate_up_proj": NVFP4Tensor.to_nvfp4(
            stack, per_tensor_scale=torch.tensor([0.0011, 0.0023]).reshape(2, 1, 1), is_swizzled_scales=True
        ),
        "norm.weight": torch.ones(4),
    }
    flattened(folder, tensors)


CASES = {"torchao_fp8": fp8, "torchao_mx": mx, "torchao_nvfp4": nvfp4}
