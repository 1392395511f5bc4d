"""Checkpoints of other tools, made and decoded here by formulas of their own: no code of quire, and no reader but these
lines."""

import json
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

Tensors = dict[str, torch.Tensor]
E4M3, U8, F32, BF16 = torch.float8_e4m3fn, torch.uint8, torch.float32, torch.bfloat16
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)


def raw(folder: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Name -> dtype, shape and bytes of all .safetensors files of a folder, by the format's definition."""
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        content = file.read_bytes()
        (length,) = struct.unpack("<Q", content[:8])
        header = json.loads(content[8 : 8 + length])
        header.pop("__metadata__", None)
        for name, entry in header.items():
            begin, end = (8 + length + offset for offset in entry["data_offsets"])
            assert name not in found
            found[name] = (entry["dtype"], tuple(entry["shape"]), content[begin:end])
    return found


def configs(folder: Path) -> dict[str, object]:
    return {file.name: json.loads(file.read_text()) for file in folder.glob("*config.json")}


@dataclass
class Files:
    """A checkpoint. values: name of a weight -> float32 that its bytes mean."""

    tensors: Tensors
    configs: dict[str, dict] = field(default_factory=dict)
    values: dict[str, np.ndarray] = field(default_factory=dict)

    def write(self, folder: Path, shards: int = 1) -> Path:
        """shards: tensors are dealt out in turn, so that scales are in other files than their weights."""
        folder.mkdir(parents=True, exist_ok=True)
        names = sorted(self.tensors)
        if shards == 1:
            save_file({name: self.tensors[name] for name in names}, folder / "model.safetensors")
        else:
            weight_map = {name: f"model-{i % shards + 1:05}-of-{shards:05}.safetensors" for i, name in enumerate(names)}
            for file in set(weight_map.values()):
                save_file({name: self.tensors[name] for name in names if weight_map[name] == file}, folder / file)
            index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
            (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        for name, content in self.configs.items():
            (folder / name).write_text(json.dumps(content))
        return folder


def bytes_of(tensor: torch.Tensor) -> np.ndarray:
    return tensor.reshape(-1).view(torch.uint8).numpy().reshape(tensor.shape)


def e4m3(codes: np.ndarray) -> np.ndarray:
    sign = np.where(codes & 0x80, -1.0, 1.0)
    exponent, fraction = ((codes >> 3) & 15).astype(np.int32), (codes & 7).astype(np.float64)
    magnitude = np.where(exponent == 0, fraction * 2.0**-9, (1 + fraction / 8) * 2.0 ** (exponent - 7))
    return np.where((codes & 0x7F) == 0x7F, np.nan, sign * magnitude).astype(np.float32)


def e2m1(packed: np.ndarray) -> np.ndarray:
    """[..., K / 2] -> [..., K]: the even element is in the low nibble."""
    nibbles = np.stack((packed & 15, packed >> 4), -1).reshape(*packed.shape[:-1], -1)
    return np.where(nibbles & 8, -1, 1).astype(np.float32) * _E2M1[nibbles & 7]


def e8m0(codes: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return np.where(codes == 255, np.nan, np.exp2(codes.astype(np.float64) - 127)).astype(np.float32)


def spread(scale: np.ndarray, size: int, count: int) -> np.ndarray:
    """A scale for each element of the last dimension, of one for `size` of them."""
    return np.repeat(scale, size, -1)[..., :count]


def every_byte(*shape: int, seed: int = 0) -> torch.Tensor:
    """All 256 bytes, again and again, in an order of that seed."""
    count = int(np.prod(shape))
    generator = np.random.default_rng(seed)
    found = np.concatenate([generator.permutation(256) for _ in range(-(-count // 256))])[:count]
    return torch.from_numpy(found.astype(np.uint8)).reshape(shape)


def plain_scales(*shape: int, seed: int = 0) -> torch.Tensor:
    """Positive finite E4M3 scales."""
    generator = np.random.default_rng(seed)
    return torch.from_numpy(generator.integers(0x28, 0x7E, shape).astype(np.uint8)).view(E4M3)


# --- one layer of each kind: (tensors, values); stem: its name


def modelopt_nvfp4(stem: str, rows: int, columns: int, *, scale2: float = 0.0123, scales: torch.Tensor | None = None):
    data = every_byte(rows, columns // 2, seed=rows)
    scales = every_byte(rows, columns // 16, seed=columns).view(E4M3) if scales is None else scales
    second = torch.tensor(scale2, dtype=F32)
    tensors = {f"{stem}.weight": data, f"{stem}.weight_scale": scales, f"{stem}.weight_scale_2": second}
    tensors[f"{stem}.input_scale"] = torch.tensor(0.0371, dtype=F32)
    blocks = e4m3(bytes_of(scales)) * np.float32(scale2)
    return tensors, e2m1(data.numpy()) * spread(blocks, 16, columns)


def modelopt_fp8(stem: str, rows: int, columns: int, *, scale: torch.Tensor):
    data = every_byte(rows, columns, seed=rows).view(E4M3)
    tensors = {f"{stem}.weight": data, f"{stem}.weight_scale": scale}
    flat = scale.numpy().reshape(-1)
    each = flat.reshape(-1, 1) if flat.size > 1 else flat
    return tensors, e4m3(bytes_of(data)) * each


def tiled(data: torch.Tensor, scale: np.ndarray) -> np.ndarray:
    rows, columns = data.shape
    each = np.repeat(np.repeat(scale, 128, 0)[:rows], 128, 1)[:, :columns]
    return e4m3(bytes_of(data)) * each


def mx(stem: str, rows: int, columns: int, *, four_bits: bool, weight: str = "weight"):
    data = every_byte(rows, columns // 2 if four_bits else columns, seed=rows)
    scale = every_byte(rows, columns // 32, seed=columns)
    codes = e2m1(data.numpy()) if four_bits else e4m3(data.numpy())
    tensors = {f"{stem}.{weight}": data if four_bits else data.view(E4M3), f"{stem}.weight_scale": scale}
    with np.errstate(over="ignore"):
        return tensors, codes * spread(e8m0(scale.numpy()), 32, columns)


def modelopt_config(algorithm: str, **other: object) -> dict[str, dict]:
    said = {
        "quant_algo": algorithm,
        "kv_cache_quant_algo": "FP8",
        "exclude_modules": ["lm_head", "*.mlp.gate"],
        **other,
    }
    producer = {"name": "modelopt", "version": "0.0"}
    return {
        "hf_quant_config.json": {"producer": producer, "quantization": said},
        "config.json": {"architectures": ["X"], "torch_dtype": "bfloat16", "unknown": {"kept": [1, 2.5, None]}},
    }


def compressed_config(kind: str, weights: dict, inputs: dict | None, **other: object) -> dict[str, dict]:
    group = {"targets": ["Linear"], "weights": {"type": "float", **weights}, "input_activations": inputs}
    said = {"quant_method": "compressed-tensors", "format": kind, "config_groups": {"group_0": group}}
    said |= {"ignore": ["lm_head"], "kv_cache_scheme": None, "quantization_status": "compressed", **other}
    return {"config.json": {"dtype": "bfloat16", "quantization_config": said}}


def others(rows: int) -> Tensors:
    """What belongs to no quantized layer."""
    return {
        "model.embed_tokens.weight": torch.randn(10, rows).to(BF16),
        "model.layers.0.self_attn.k_proj.k_scale": torch.tensor(0.25),
        "model.layers.0.self_attn.v_proj.v_scale": torch.tensor([0.5], dtype=BF16),
        "model.norm.weight": torch.randn(rows, dtype=torch.float16),
        "model.counts": torch.arange(3),
    }


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
        return tensors, tiled(data, scale.numpy()[:, 0, :, 0])

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
    blocks = e4m3(bytes_of(scales)) * second.numpy()[:, None, None]
    return Files(tensors, modelopt_config("NVFP4"), {stem: e2m1(data.numpy()) * spread(blocks, 16, columns)})


def _compressed(kind: str, weights: dict, inputs: dict | None, layer: Callable) -> Callable[[], Files]:
    def make() -> Files:
        stem = "model.layers.0.self_attn.q_proj"
        tensors, values = layer(stem)
        tensors |= {f"{stem}.bias": torch.randn(len(values))} | others(64)
        return Files(tensors, compressed_config(kind, weights, inputs), {f"{stem}.weight": values})

    return make


def compressed_nvfp4(stem: str, rows: int = 48, columns: int = 256, divisor: float = 1234.5, static: bool = True):
    data, scales = every_byte(rows, columns // 2), every_byte(rows, columns // 16, seed=1).view(E4M3)
    tensors = {f"{stem}.weight_packed": data, f"{stem}.weight_scale": scales}
    tensors[f"{stem}.weight_global_scale"] = torch.tensor([divisor])
    if static:
        tensors[f"{stem}.input_global_scale"] = torch.tensor([77.0])
    blocks = e4m3(bytes_of(scales)) / np.float32(divisor)
    return tensors, e2m1(data.numpy()) * spread(blocks, 16, columns)


def _compressed_fp8(scale: torch.Tensor, shape: tuple[int, int], input_scale: torch.Tensor | None = None) -> Callable:
    def layer(stem: str):
        data = every_byte(*shape).view(E4M3)
        wide = scale.float().numpy()
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
}
