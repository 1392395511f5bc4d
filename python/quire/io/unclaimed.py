"""Tensors that belong to no quantized layer, and that must not be taken for values or left out without a word."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence

import torch

from quire.io.container import CheckpointError, Entry, Header, some
from quire.io.layout import Group, consumed, no_matrix

#: What only a quantized layer has.
OF_LAYERS = re.compile(
    r"(weight|input|activation|pre_quant|proj)_(global_)?scale(_2|_inv)?$|_scales$|_blocks$|_scale_inv$|_packed$|"
    r"(^|\.)scale_(weight|input)$|\.comfy_quant$|_zero_point$|_qdata$|svdquant_lora_[ab]$|_g_idx$|\.(qweight|qzeros|scales|g_idx|quant_state.*)$"
)
#: Scales of caches of keys and values, which are not of a layer and are copied as they are.
OF_CACHES = re.compile(r"(^|[._])(k|v|q|kv|kv_cache|p|prob)_(scale|bias|zero_point)$|[kv]_proj\.output_scale$")
#: Tensors and texts of headers that say how the layers of a whole file are stored, and are of no layer.
OF_FILES = re.compile(r"(^|\.)scaled_fp8$|^_quantization_metadata$")
#: Dtypes of codes: a scale says which values they are.
CODES = (
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
    torch.float4_e2m1fn_x2,
)
_BYTES = (torch.uint8, torch.int8)


def is_code(entry: Entry) -> bool:
    """Whether a tensor has codes: by its dtype, or as a weight of bytes, such as packed FP4."""
    of_bytes = entry.dtype in _BYTES and len(entry.shape) > 1 and entry.name.rpartition(".")[2] == "weight"
    return (entry.dtype in CODES or of_bytes) and not OF_FILES.search(entry.name)


def is_kept(name: str) -> bool:
    """Whether no parameter is made of a tensor, and a file of the model needs it."""
    return bool(OF_CACHES.search(name) or OF_FILES.search(name))


def check_consumed(groups: Sequence[Group], header: Header) -> None:
    """Raises CheckpointError if a tensor that only a quantized layer has belongs to none, or if a scale lies beside a
    quantized weight that does not read it."""
    used = consumed(groups)
    rest = [name for name in header if name not in used and not is_kept(name)]
    left = [name for name in rest if OF_LAYERS.search(name)]
    weights = {group.name: group.stem for group in groups}
    weights |= {n: _stem(n) for n, entry in header.items() if n not in used and (is_code(entry) or entry.stored)}
    layers = {stem: name for name, stem in weights.items()}
    for name in rest:
        owner = _owner(name, weights, layers)
        if owner in header and owner not in used and len(header[owner].shape) != 2:
            raise no_matrix(header[owner])
    if left:
        raise CheckpointError(
            f"the tensor belongs to no quantized layer ({len(left)} such tensors: {some(left)})",
            "its weight is missing, or the layer is stored in a way that quire does not read",
            file=header[left[0]].file,
            tensor=left[0],
        )
    for name in rest:
        if owner := _owner(name, weights, layers):
            raise CheckpointError(
                f"the tensor lies beside the quantized weight {owner} as a scale that its layer does not have there",
                "quire leaves out no scale: the layer is stored in a way that quire does not read; export it as one of "
                "the dialects of docs/checkpoints.md",
                file=header[name].file,
                tensor=name,
            )


def _stem(name: str) -> str:
    """The name of the layer of a weight: "" of a weight of the model itself."""
    return "" if name == "weight" else name.removesuffix(".weight")


def _owner(name: str, weights: Collection[str], layers: Mapping[str, str]) -> str | None:
    """The quantized weight that a scale lies beside: X.weight of X.my_scale and of X.weight.scale, the stack X of
    X_scale. None for a tensor that is no scale, and for one of another module. layers: name of a layer -> its weight.
    """
    outer, _, last = name.rpartition(".")
    if "scale" not in last.lower():
        return None
    if outer in layers:
        return layers[outer]
    ends = (at for at, letter in enumerate(last) if letter == "_" and "scale" in last[at:].lower())
    prefix = f"{outer}." if outer else ""
    stacks = [outer, *(f"{prefix}{last[:at]}" for at in ends)]
    return next((stack for stack in stacks if stack in weights), None)


def unscaled(groups: Sequence[Group], header: Header) -> list[str]:
    """Names of tensors with codes that belong to no quantized layer."""
    used = consumed(groups)
    return [name for name, entry in header.items() if name not in used and is_code(entry)]


def check_unscaled(names: Sequence[str], header: Header) -> None:
    """Raises CheckpointError for the tensors that unscaled() has found."""
    if names:
        entry = header[names[0]]
        raise CheckpointError(
            f"the tensor is {entry}, and the checkpoint has no scale for it ({len(names)} such tensors: {some(names)})",
            "quire takes no scale to be 1: download all files and config.json, or export the checkpoint again with its "
            "scales; if the codes are the values, pass scale=1 to quire.io.load, read or convert",
            file=entry.file,
            tensor=entry.name,
        )
