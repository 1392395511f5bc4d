"""A checkpoint of every layout of every dialect that tests make, with the values that its bytes mean."""

import json
from collections.abc import Callable, Mapping

import numpy as np
import torch

from python.io.checkpoint_files import (
    BF16,
    E4M3,
    U8,
    Files,
    Tensors,
    bytes_of,
    compressed_config,
    compressed_nvfp4,
    e2m1,
    e4m3,
    e5m2,
    every_byte,
    in_tiles,
    modelopt_config,
    modelopt_fp8,
    modelopt_nvfp4,
    mx,
    others,
    spread,
    tiled,
)


def _modelopt(algorithm: str, layer: Callable, **config: object) -> Callable[[], Files]:
    def make() -> Files:
        tensors, values = others(64), {}
        for stem in ("model.layers.0.self_attn.q_proj", "model.language_model.layers.1.mlp.gate_proj"):
            own, value = layer(stem)
            tensors |= own | {f"{stem}.bias": torch.randn(len(value)).to(BF16)}
            values[f"{stem}.weight"] = value
        return Files(tensors, modelopt_config(algorithm, **config), values)

    return make


def _row_scale(stem: str):
    return modelopt_fp8(stem, 192, 64, scale=torch.rand(192) + 0.01)


def _fp8(stem: str):
    tensors, values = modelopt_fp8(stem, 48, 64, scale=torch.tensor(0.0173))
    return tensors | {f"{stem}.input_scale": torch.tensor(0.03)}, values


def _block_scale(rows: int, columns: int) -> Callable:
    def layer(stem: str):
        data = every_byte(rows, columns, seed=rows).view(E4M3)
        scale = torch.rand(-(-rows // 128), 1, -(-columns // 128), 1) + 0.01
        whole = scale.numel() == 1
        tensors = {f"{stem}.weight": data, f"{stem}.weight_scale": scale.reshape(()) if whole else scale}
        return tensors, tiled(data, scale.cpu().numpy()[:, 0, :, 0])

    return layer


def _a16(stem: str):
    tensors, values = modelopt_nvfp4(stem, 48, 256)
    return {name: tensor for name, tensor in tensors.items() if not name.endswith("input_scale")}, values


def _a16_with_input(stem: str):
    return modelopt_nvfp4(stem, 48, 256)


def mixed() -> Files:
    nvfp4, of_nvfp4 = modelopt_nvfp4("model.a", 32, 64)
    fp8, of_fp8 = _fp8("model.b")
    layers = {"model.a": {"quant_algo": "NVFP4", "group_size": 16}, "model.b": {"quant_algo": "FP8"}}
    config = modelopt_config("MIXED_PRECISION", quantized_layers=layers)
    return Files(nvfp4 | fp8 | others(64), config, {"model.a.weight": of_nvfp4, "model.b.weight": of_fp8})


def experts_in_one() -> Files:
    """[E, K, N] of [E, N, K], one tensor for all experts."""
    count, rows, columns = 3, 32, 64
    stem = "model.layers.0.mlp.experts.gate_up_proj"
    data, scales = every_byte(count, rows, columns // 2), every_byte(count, rows, columns // 16, seed=1).view(E4M3)
    second = torch.rand(count) + 0.01
    tensors = {
        stem: data.transpose(1, 2).contiguous(),
        f"{stem}_weight_scale": scales.view(U8).transpose(1, 2).contiguous().view(E4M3),
        f"{stem}_weight_scale_2": second,
        f"{stem}_input_scale": torch.tensor(0.02),
        f"{stem}_bias": torch.randn(count, rows).to(BF16),
    }
    blocks = e4m3(bytes_of(scales)) * second.cpu().numpy()[:, None, None]
    return Files(tensors, modelopt_config("NVFP4"), {stem: e2m1(data.cpu().numpy()) * spread(blocks, 16, columns)})


def _compressed(kind: str, weights: dict, inputs: dict | None, layer: Callable) -> Callable[[], Files]:
    def make() -> Files:
        stem = "model.layers.0.self_attn.q_proj"
        tensors, values = layer(stem)
        tensors |= {f"{stem}.bias": torch.randn(len(values))} | others(64)
        return Files(tensors, compressed_config(kind, weights, inputs), {f"{stem}.weight": values})

    return make


def _compressed_fp8(scale: torch.Tensor, shape: tuple[int, int], input_scale: torch.Tensor | None = None) -> Callable:
    def layer(stem: str):
        data = every_byte(*shape).view(E4M3)
        wide = scale.float().cpu().numpy()
        tiles = scale.dim() == 2 and scale.shape[1] > 1
        values = tiled(data, wide) if tiles else e4m3(bytes_of(data)) * wide.reshape(-1, 1)
        tensors = {f"{stem}.weight": data, f"{stem}.weight_scale": scale}
        return tensors | ({} if input_scale is None else {f"{stem}.input_scale": input_scale}), values

    return layer


_EIGHT, _TOKEN = {"num_bits": 8}, {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
_STATIC = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
_GROUP = {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 128, "dynamic": True}
_LOCAL = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "dynamic": "local"}
_FOUR = {"num_bits": 4, "strategy": "tensor_group", "group_size": 16}
_MX = {"strategy": "group", "group_size": 32}
_BLOCK = {**_EIGHT, "strategy": "block", "block_structure": [128, 128]}


def _bf16(*shape: int) -> torch.Tensor:
    return (torch.rand(shape) + 0.01).to(BF16)


def _with_zero_points(make: Callable[[], Files], *zeros: tuple[str, torch.Tensor]) -> Callable[[], Files]:
    def made() -> Files:
        files = make()
        for name in files.values:
            files.tensors |= {f"{name.removesuffix('.weight')}.{end}": tensor.clone() for end, tensor in zeros}
        return files

    return made


def _autofp8(scheme: str, scale: torch.Tensor) -> Callable[[], Files]:
    def make() -> Files:
        tensors, values = others(64), {}
        for stem in ("model.layers.0.self_attn.q_proj", "model.layers.1.mlp.experts.0.w1"):
            own, values[f"{stem}.weight"] = modelopt_fp8(stem, 48, 64, scale=scale.clone())
            inputs = {f"{stem}.input_scale": torch.tensor(0.03)} if scheme == "static" else {}
            tensors |= own | inputs | {f"{stem}.bias": torch.randn(48).to(BF16)}
        said = {"quant_method": "fp8", "activation_scheme": scheme, "ignored_layers": ["lm_head"]}
        config = {"dtype": "bfloat16", "quantization_config": {**said, "kv_cache_scheme": "static"}}
        return Files(tensors, {"config.json": config}, values)

    return make


def _comfy_nvfp4(stem: str) -> tuple[Tensors, np.ndarray]:
    own, values = modelopt_nvfp4(stem, 144, 320)
    codes = own[f"{stem}.weight"]
    own[f"{stem}.weight"] = codes << 4 | codes >> 4
    scale = torch.from_numpy(in_tiles(bytes_of(own[f"{stem}.weight_scale"])))
    return own | {f"{stem}.weight_scale": scale.view(E4M3)}, values


def _comfy_mxfp8(stem: str) -> tuple[Tensors, np.ndarray]:
    own, values = mx(stem, 160, 192, four_bits=False)
    return own | {f"{stem}.weight_scale": torch.from_numpy(in_tiles(own[f"{stem}.weight_scale"].cpu().numpy()))}, values


def _comfy_e5m2(stem: str) -> tuple[Tensors, np.ndarray]:
    codes, scale = every_byte(48, 64), torch.tensor(0.25)
    own = {f"{stem}.weight": codes.view(torch.float8_e5m2), f"{stem}.weight_scale": scale}
    with np.errstate(invalid="ignore"):
        return own, e5m2(codes.cpu().numpy()) * np.float32(0.25)


def _comfy(layer: Callable, *, where: str, **said: object) -> Callable[[], Files]:
    """where: what says how layers are stored: "tensors", the "header", or the "scaled_fp8" of older files."""

    def make() -> Files:
        tensors, values, texts = others(64), {}, {}
        layers = {}
        for short in ("blocks.0.attn.qkv", "blocks.1.mlp"):
            stem = f"model.diffusion_model.{short}"
            own, values[f"{stem}.weight"] = layer(stem)
            layers[short] = said
            if where == "tensors":
                own[f"{stem}.comfy_quant"] = torch.tensor(list(json.dumps(said).encode()), dtype=U8)
            if where == "scaled_fp8":
                names = {"weight_scale": "scale_weight", "input_scale": "scale_input"}
                own = {f"{stem}.{names.get(n[len(stem) + 1 :], n[len(stem) + 1 :])}": t for n, t in own.items()}
            tensors |= own | {f"{stem}.bias": torch.randn(len(values[f"{stem}.weight"])).to(BF16)}
        if where == "header":
            texts["_quantization_metadata"] = json.dumps({"format_version": "1.0", "layers": layers})
        if where == "scaled_fp8":
            count = 2 if said.get("full_precision_matrix_mult") else 0
            tensors["model.diffusion_model.scaled_fp8"] = torch.zeros(count).to(E4M3)
        return Files(tensors, {}, values, texts)

    return make


_FULL = {"full_precision_matrix_mult": True}
_INT8 = torch.zeros(1, dtype=torch.int8)


#: Name -> a checkpoint of that kind.
KINDS: Mapping[str, Callable[[], Files]] = {
    "modelopt NVFP4": _modelopt("NVFP4", lambda stem: modelopt_nvfp4(stem, 48, 256), group_size=16),
    "modelopt W4A16_NVFP4": _modelopt("W4A16_NVFP4", _a16),
    "modelopt W4A16_NVFP4 unused input": _modelopt("W4A16_NVFP4", _a16_with_input),
    "modelopt W4A8_NVFP4_FP8": _modelopt("W4A8_NVFP4_FP8", _a16_with_input),
    "modelopt FP8": _modelopt("FP8", _fp8),
    "modelopt FP8 rows": _modelopt(
        "FP8", lambda stem: (lambda t, v: (t | {f"{stem}.input_scale": torch.tensor(0.1)}, v))(*_row_scale(stem))
    ),
    "modelopt FP8_PER_CHANNEL_PER_TOKEN": _modelopt("FP8_PER_CHANNEL_PER_TOKEN", _row_scale),
    "modelopt fp8_pb_wo": _modelopt("fp8_pb_wo", _block_scale(576, 192)),
    "modelopt fp8_pb_wo one tile": _modelopt("fp8_pb_wo", _block_scale(96, 64)),
    "modelopt MXFP8": _modelopt("MXFP8", lambda stem: mx(stem, 192, 256, four_bits=False)),
    "modelopt MIXED_PRECISION": mixed,
    "modelopt experts in one tensor": experts_in_one,
    "compressed-tensors nvfp4": _compressed("nvfp4-pack-quantized", _FOUR, _LOCAL, compressed_nvfp4),
    "compressed-tensors nvfp4a16": _compressed(
        "nvfp4-pack-quantized", _FOUR, None, lambda stem: compressed_nvfp4(stem, static=False)
    ),
    "compressed-tensors mxfp4": _compressed(
        "mxfp4-pack-quantized",
        {**_MX, "num_bits": 4},
        None,
        lambda stem: mx(stem, 96, 512, four_bits=True, weight="weight_packed"),
    ),
    "compressed-tensors mxfp8": _compressed(
        "mxfp8-quantized",
        {**_MX, **_EIGHT},
        {**_MX, **_EIGHT, "dynamic": True},
        lambda s: mx(s, 96, 512, four_bits=False),
    ),
    "compressed-tensors tensor static": _compressed(
        "float-quantized",
        {**_EIGHT, "strategy": "tensor"},
        _STATIC,
        _compressed_fp8(_bf16(1), (64, 64), _bf16(1)),
    ),
    "compressed-tensors channel token": _compressed(
        "float-quantized", {**_EIGHT, "strategy": "channel"}, _TOKEN, _compressed_fp8(_bf16(192, 1), (192, 64))
    ),
    "compressed-tensors block": _compressed(
        "float-quantized", _BLOCK, _GROUP, _compressed_fp8(torch.rand(5, 2) + 0.01, (576, 192))
    ),
    "compressed-tensors naive": _compressed(
        "naive-quantized", {**_EIGHT, "strategy": "tensor"}, None, _compressed_fp8(torch.tensor([0.3]), (64, 64))
    ),
    "compressed-tensors zero points": _with_zero_points(
        _compressed(
            "float-quantized",
            {**_EIGHT, "strategy": "channel", "symmetric": False},
            _STATIC,
            _compressed_fp8(_bf16(192, 1), (192, 64), _bf16(1)),
        ),
        ("weight_zero_point", torch.tensor([0, 128] * 96, dtype=U8).reshape(192, 1).view(E4M3)),  # 0 and -0
        ("input_zero_point", _INT8),
    ),
    "autofp8 static": _autofp8("static", torch.tensor(0.0173)),
    "autofp8 dynamic": _autofp8("dynamic", torch.tensor([0.0173])),
    "autofp8 rows": _autofp8("dynamic", torch.rand(48, 1) + 0.01),
    "autofp8 rows static": _autofp8("static", torch.rand(48) + 0.01),
    "autofp8 zero points": _with_zero_points(
        _autofp8("static", torch.tensor(0.5)), ("weight_zero_point", _INT8), ("input_zero_point", _INT8)
    ),
    "comfyui float8_e4m3fn": _comfy(_fp8, where="tensors", format="float8_e4m3fn"),
    "comfyui float8_e4m3fn unused input": _comfy(_fp8, where="header", format="float8_e4m3fn", **_FULL),
    "comfyui float8_e5m2": _comfy(_comfy_e5m2, where="tensors", format="float8_e5m2"),
    "comfyui nvfp4": _comfy(_comfy_nvfp4, where="tensors", format="nvfp4"),
    "comfyui nvfp4 unused input": _comfy(_comfy_nvfp4, where="header", format="nvfp4", **_FULL),
    "comfyui mxfp8": _comfy(_comfy_mxfp8, where="header", format="mxfp8"),
    "comfyui scaled_fp8": _comfy(_fp8, where="scaled_fp8"),
    "comfyui scaled_fp8 unused input": _comfy(_fp8, where="scaled_fp8", **_FULL),
}
