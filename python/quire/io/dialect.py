"""The protocol of a dialect: what quire.io must know about a tool that writes checkpoints. And rules for all dialects
about tensors that belong to no layer."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

import torch

from quire.checks import counted
from quire.io.container import CheckpointError, Entry, Header, some
from quire.io.layout import DIV, MUL, Group, Layout, StoredWeight, consumed, no_matrix, read_group, write_group
from quire.nn.input_scale import amax_of_one

#: Name of a file -> what its JSON holds.
Configs = Mapping[str, Mapping[str, Any]]


class Dialect(Protocol):
    """A way to store quantized layers. name: as in `to=` and `dialect=`. layouts: all that it reads and writes.
    read_only: whether quire does not write it.

    detect: whether a checkpoint is of this dialect.
    groups: its quantized layers, found by headers and configurations only; raises CheckpointError if a rule is broken.
    read: reads one layer by `tensor`, a function from a name to a tensor, which may be a meta tensor.
    bias: the bias of a layer as read() returns it, from `value`, the bias in the file.
    choose: the layout for a layer of another dialect, in which it had the layout `source`; adds differences between the
        two to notes; raises CheckpointError if there is no layout.
    write: the tensors of one layer by name.
    layout: the layout of that name, None if there is none.
    config: the configurations that describe `groups`, based on the configurations of the model. plain: names of modules
        that are not quantized.
    """

    name: str
    layouts: Sequence[Layout]
    read_only: bool

    def detect(self, header: Header, configs: Configs) -> bool: ...

    def groups(self, header: Header, configs: Configs) -> list[Group]: ...

    def read(self, group: Group, tensor: Callable[[str], torch.Tensor], dtype: torch.dtype) -> StoredWeight: ...

    def bias(self, group: Group, value: torch.Tensor) -> torch.Tensor: ...

    def choose(self, name: str, stored: StoredWeight, source: Layout | None, notes: list[str]) -> Layout: ...

    def write(self, name: str, stored: StoredWeight, layout: Layout) -> dict[str, torch.Tensor]: ...

    def layout(self, name: str) -> Layout | None: ...

    def config(self, groups: Sequence[Group], plain: Sequence[str], base: Configs) -> dict[str, Any]: ...


#: What parts of a layout's name mean in every dialect.
WORDS = {
    "tensor": "one scale for the weight",
    "row": "a scale for each row of the weight",
    "block": "a scale for each tile of 128 x 128 values of the weight",
    "e5m2": "codes in E5M2",
    "swizzled": "scales in the order that tensor cores read",
    "experts": "all experts in one tensor",
    "static": "the scale of the inputs is in the file",
    "dynamic": "the scale of the inputs is measured in each call",
}


def contents(layers: int, others: Collection[str], size: str = "") -> str:
    """What a checkpoint has, in the words of every report. A quantized layer counts once, with its scales and its bias.
    others: the names of all other tensors. size: of the quantized layers."""
    caches = sum(OF_CACHES.search(name) is not None for name in others)
    of_size = f" of {size}" if size else ""
    text = f"{counted(layers, 'quantized layer')}{of_size}, {counted(len(others) - caches, 'plain tensor')}"
    return f"{text}, {counted(caches, 'scale')} of caches" if caches else text


class LayoutDialect:
    """The part of a dialect that follows from its table of layouts."""

    name: str
    layouts: Sequence[Layout]
    read_only = False
    #: Whether its files keep entries that say for a whole file how layers are stored (OF_FILES).
    marks_files = False
    #: The layouts for layers from other dialects; None: all.
    offered: Sequence[Layout] | None = None
    #: Words that are parts of the names of layouts, and what they mean; a dialect adds its own.
    words: Mapping[str, str] = WORDS

    def meaning(self, layout: str) -> str:
        """What the parts of a layout's name mean, in words; "" if no part needs any."""
        return "; ".join(self.words[part] for part in layout.split(":") if part in self.words)

    def read(self, group: Group, tensor: Callable[[str], torch.Tensor], dtype: torch.dtype) -> StoredWeight:
        return read_group(group, tensor, self.name, dtype)

    def bias(self, group: Group, value: torch.Tensor) -> torch.Tensor:
        return value

    def write(self, name: str, stored: StoredWeight, layout: Layout) -> dict[str, torch.Tensor]:
        return write_group(name, stored, layout, self.name)

    def layout(self, name: str) -> Layout | None:
        return next((one for one in self.layouts if one.name == name), None)

    def choose(self, name: str, stored: StoredWeight, source: Layout | None, notes: list[str]) -> Layout:
        """The layout with the same codes whose inputs are most similar."""
        spec, static = stored.weight.spec_text, uses_scale(stored, source)

        def inputs(layout: Layout | None, *, exactly: bool = False) -> str:
            spec = "none" if layout is None else layout.static if static else layout.dynamic
            # A global scale that is measured in each call rounds values differently than an amax.
            return of_inputs(spec, scales=exactly and not static)

        def unlike(layout: Layout) -> tuple[bool, ...]:
            return of_codes(layout.spec) != of_codes(spec), inputs(layout) != inputs(source), layout.calibrated

        if self.read_only:
            raise CheckpointError(f"quire reads {self.name} and does not write it, w={spec}", _OTHER, tensor=name)
        stacked = stored.weight.dim() == 3
        offered = self.layouts if self.offered is None else self.offered
        alike = [one for one in offered if one.stacked == stacked and _fits(spec, one.spec)]
        # A layer with a static scale keeps one: readers that measure inputs in each call would be slower.
        fits = [one for one in alike if one.reads_scale] if static else [one for one in alike if not one.needs_scale]
        if not fits:
            what = f"{'a stack of ' * stacked}{spec}{' with static scales of inputs' * static}, x={inputs(source)}"
            remedy = (
                _other_inputs(alike, spec, inputs(source) if static else "")
                if alike
                else self._other_weights(spec, stacked)
            )
            raise CheckpointError(f"{self.name} has no layout for {what}", f"{remedy} {_OTHER}", tensor=name)
        best = min(fits, key=unlike)
        after, before = (inputs(one, exactly=True) for one in (best, source))
        if after != before:
            now = "not quantized" if after == "none" else f"quantized as {after}"
            was = "not" if before == "none" else f"as {before}"
            scale = ""
            if static and source is not None and has_other_amax(source.static, best.static):
                scale = (
                    f"; the static scale was measured for {before}, and the file has the one of the same amax for "
                    f"{after}"
                )
            layouts = f"{described(stored)} -> {self.name} {best.name}"
            notes.append(f"the recipe changes: inputs are {now}, before {was} ({layouts}){scale}")
        return best

    def _other_weights(self, spec: str, stacked: bool) -> str:
        """What to do about a weight for whose codes, one matrix or a stack of them, there is no layout."""
        offered = self.offered or self.layouts
        if any(_fits(spec, one.spec) for one in offered):
            if stacked:
                return f"it has w={spec} for single layers only: make each expert a layer of its own, or"
            return f"it has w={spec} for stacks of experts only: leave the layer in high precision (filter=), or"
        specs, single = (sorted({one.spec for one in of}) for of in (offered, [o for o in offered if not o.stacked]))
        again = f", quire.io.convert(src, dst, to={self.name!r}, requantize={single[0]!r})," if single else ""
        return f"it has w={', w='.join(specs)}: quantize the values again{again} or"


def _other_inputs(alike: Sequence[Layout], spec: str, static: str) -> str:
    """What to do about a layer for whose codes there are layouts, which quantize inputs in another way. static: the
    format of inputs with a static scale, "" if the layer has none."""
    inputs = sorted({one.static if one.needs_scale else one.dynamic for one in alike})
    has = f"it has them with x={' or x='.join(inputs)}"
    if static:
        x = static if static in inputs else inputs[0]
        last = "" if x == "none" else ",dy=mxfp8"
        return f"{has}: take a recipe without the option given, such as 'x={x},w={spec}{last}', or"
    return f"{has}: calibrate the model (quire.calibrate), or"


_OTHER = 'choose another dialect ("quire" has every spec)'
#: Options that say how scales and codes were chosen. What these mean, and where codes of rows lie, is the same.
_OF_ROUNDING = {"nan", "pow2", "sr", "rht", "rht=unsigned", "16x16", "32x32", "interleaved"}
_CHOSEN = ("eps", "4over6")


def of_codes(spec: str) -> str:
    """The spec of a weight without options that do not change what its codes and scales mean: how they were chosen, and
    how global scales are stored."""
    words = [word for word in spec.split(":") if word not in _OF_ROUNDING and word.partition("=")[0] not in _CHOSEN]
    return ":".join(word for word in words if word not in (MUL, DIV, "256"))


def of_inputs(spec: str, *, scales: bool = False) -> str:
    """The spec of an input without options that only act in backward, and unless `scales` without those that say how a
    global scale is stored."""
    others = ("given", "nan", "rht", "rht=unsigned", "interleaved", *(() if scales else (MUL, DIV)))
    return ":".join(word for word in spec.split(":") if word not in others)


def uses_scale(stored: StoredWeight, source: Layout | None) -> bool:
    """Whether the layer quantizes its inputs by a static scale. Files can have one that their layout does not use."""
    return stored.input_scale is not None and (source is None or source.reads_scale)


def has_other_amax(before: str, after: str) -> bool:
    """Whether a static scale of 1 stands for another amax under the second spec than under the first."""
    return amax_of_one(before) != amax_of_one(after)


def described(stored: StoredWeight) -> str:
    """The dialect and layout from which a layer was read, for messages."""
    origin = stored.origin
    return f"{origin.dialect} {origin.layout}" if origin.dialect != "quire" else f"w={stored.weight.spec_text}"


def meaning(spec: str) -> str:
    """A spec without options that only say how scales are stored."""
    return ":".join(word for word in spec.split(":") if word not in (MUL, DIV, "given"))


def _fits(spec: str, wanted: str) -> bool:
    return of_codes(spec) == of_codes(wanted) or (of_codes(spec), of_codes(wanted)) == ("fp8_tensor", "fp8_row")


# --- tensors that belong to no quantized layer, and that must not be taken for values or silently left out


#: Names of tensors that only quantized layers have.
OF_LAYERS = re.compile(
    r"(weight|input|activation|pre_quant|proj)_(global_)?scale(_2|_inv)?$|_scales$|_blocks$|_scale_inv$|_packed$|"
    r"(^|\.)scale_(weight|input)$|\.comfy_quant$|_zero_point$|_qdata$|svdquant_lora_[ab]$|_g_idx$|\.(qweight|qzeros|scales|g_idx|quant_state.*)$"
)
#: Scales of key-value caches. They belong to no layer and are copied unchanged.
OF_CACHES = re.compile(r"(^|[._])(k|v|q|kv|kv_cache|p|prob)_(scale|bias|zero_point)$|[kv]_proj\.output_scale$")
#: Tensors and texts of headers that say for a whole file how layers are stored. They belong to no layer.
OF_FILES = re.compile(r"(^|\.)scaled_fp8$|^_quantization_metadata$")
#: Dtypes of codes, whose values depend on a scale.
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
    """Whether a tensor contains codes: its dtype says so, or it is a weight of bytes, such as packed FP4."""
    of_bytes = entry.dtype in _BYTES and len(entry.shape) > 1 and entry.name.rpartition(".")[2] == "weight"
    return (entry.dtype in CODES or of_bytes) and not OF_FILES.search(entry.name)


def is_kept(name: str) -> bool:
    """Whether files of the model need a tensor although no parameter is made of it."""
    return bool(OF_CACHES.search(name) or OF_FILES.search(name))


def check_consumed(groups: Sequence[Group], header: Header) -> None:
    """Raises CheckpointError if a tensor that only quantized layers have belongs to no layer, or if a scale lies beside
    a quantized weight and is not read with it."""
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
    """The name of the layer that has the weight; "" for the model itself."""
    return "" if name == "weight" else name.removesuffix(".weight")


def _owner(name: str, weights: Collection[str], layers: Mapping[str, str]) -> str | None:
    """The quantized weight beside which a scale lies: X.weight for X.my_scale and X.weight.scale, the stack X for
    X_scale. None for a tensor that is no scale, and for a scale of another module. layers: name of a layer -> its
    weight.
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
