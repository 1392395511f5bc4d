"""Checkpoints of other tools, made and decoded here by formulas of their own: no code of quire, and no reader but these
lines."""

import json
import struct
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
    texts: dict[str, str] = field(default_factory=dict)  #: of the header

    def write(self, folder: Path, shards: int = 1) -> Path:
        """shards: tensors are dealt out in turn, so that scales are in other files than their weights."""
        folder.mkdir(parents=True, exist_ok=True)
        names = sorted(self.tensors)
        if shards == 1:
            save_file({name: self.tensors[name] for name in names}, folder / "model.safetensors", self.texts or None)
        else:
            weight_map = {name: f"model-{i % shards + 1:05}-of-{shards:05}.safetensors" for i, name in enumerate(names)}
            for file in set(weight_map.values()):
                own = {name: self.tensors[name] for name in names if weight_map[name] == file}
                save_file(own, folder / file, self.texts or None)
            index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
            (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        for name, content in self.configs.items():
            (folder / name).write_text(json.dumps(content))
        return folder


def bytes_of(tensor: torch.Tensor) -> np.ndarray:
    return tensor.reshape(-1).view(torch.uint8).cpu().numpy().reshape(tensor.shape)


def e4m3(codes: np.ndarray) -> np.ndarray:
    sign = np.where(codes & 0x80, -1.0, 1.0)
    exponent, fraction = ((codes >> 3) & 15).astype(np.int32), (codes & 7).astype(np.float64)
    magnitude = np.where(exponent == 0, fraction * 2.0**-9, (1 + fraction / 8) * 2.0 ** (exponent - 7))
    return np.where((codes & 0x7F) == 0x7F, np.nan, sign * magnitude).astype(np.float32)


def e5m2(codes: np.ndarray) -> np.ndarray:
    """The upper byte of float16."""
    return (codes.astype(np.uint16) << 8).view(np.float16).astype(np.float32)


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


def in_tiles(scales: np.ndarray) -> np.ndarray:
    """Bytes [rows, blocks] in tiles of 128 x 4: of a tile the 32 first, second, third and fourth rows in turn."""
    rows, count = scales.shape
    lines, columns = -(-rows // 128) * 128, -(-count // 4) * 4
    found = np.zeros(lines * columns, np.uint8)
    for r in range(rows):
        for c in range(count):
            tile = (r // 128) * (columns // 4) + c // 4
            found[512 * tile + 16 * (r % 32) + 4 * (r % 128 // 32) + c % 4] = scales[r, c]
    return found.reshape(lines, columns)


# --- one layer of each kind: (tensors, values); stem: its name


def modelopt_nvfp4(stem: str, rows: int, columns: int, *, scale2: float = 0.0123, scales: torch.Tensor | None = None):
    data = every_byte(rows, columns // 2, seed=rows)
    scales = every_byte(rows, columns // 16, seed=columns).view(E4M3) if scales is None else scales
    second = torch.tensor(scale2, dtype=F32)
    tensors = {f"{stem}.weight": data, f"{stem}.weight_scale": scales, f"{stem}.weight_scale_2": second}
    tensors[f"{stem}.input_scale"] = torch.tensor(0.0371, dtype=F32)
    blocks = e4m3(bytes_of(scales)) * np.float32(scale2)
    return tensors, e2m1(data.cpu().numpy()) * spread(blocks, 16, columns)


def modelopt_fp8(stem: str, rows: int, columns: int, *, scale: torch.Tensor):
    data = every_byte(rows, columns, seed=rows).view(E4M3)
    tensors = {f"{stem}.weight": data, f"{stem}.weight_scale": scale}
    flat = scale.cpu().numpy().reshape(-1)
    each = flat.reshape(-1, 1) if flat.size > 1 else flat
    return tensors, e4m3(bytes_of(data)) * each


def tiled(data: torch.Tensor, scale: np.ndarray) -> np.ndarray:
    rows, columns = data.shape
    each = np.repeat(np.repeat(scale, 128, 0)[:rows], 128, 1)[:, :columns]
    return e4m3(bytes_of(data)) * each


def mx(stem: str, rows: int, columns: int, *, four_bits: bool, weight: str = "weight"):
    data = every_byte(rows, columns // 2 if four_bits else columns, seed=rows)
    scale = every_byte(rows, columns // 32, seed=columns)
    codes = e2m1(data.cpu().numpy()) if four_bits else e4m3(data.cpu().numpy())
    tensors = {f"{stem}.{weight}": data if four_bits else data.view(E4M3), f"{stem}.weight_scale": scale}
    with np.errstate(over="ignore"):
        return tensors, codes * spread(e8m0(scale.cpu().numpy()), 32, columns)


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


def compressed_nvfp4(stem: str, rows: int = 48, columns: int = 256, divisor: float = 1234.5, static: bool = True):
    data, scales = every_byte(rows, columns // 2), every_byte(rows, columns // 16, seed=1).view(E4M3)
    tensors = {f"{stem}.weight_packed": data, f"{stem}.weight_scale": scales}
    tensors[f"{stem}.weight_global_scale"] = torch.tensor([divisor])
    if static:
        tensors[f"{stem}.input_global_scale"] = torch.tensor([77.0])
    blocks = e4m3(bytes_of(scales)) / np.float32(divisor)
    return tensors, e2m1(data.cpu().numpy()) * spread(blocks, 16, columns)
