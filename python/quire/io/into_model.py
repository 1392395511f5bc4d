"""Checkpoints into models of torch.nn.Linear and of layers of quire (load), and as the new weights of a model
(refit)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from quire.checks import check_type, check_type_or_none, counted, describe
from quire.conversion.refit import plain_name, unwrapped
from quire.io.container import CheckpointError, some
from quire.io.dialect import contents, is_kept
from quire.io.fitting import Record, Ref, Target, fit, remember, unjoined
from quire.io.joining import alternating, join, joined_input, joined_spec, of_one, of_weight
from quire.io.layout import Layout, StoredWeight
from quire.io.reading import Checkpoint, check_missing, check_scale, checked_spec, opened
from quire.loading.float_mode import subnormals_kept
from quire.nn.linear import Linear
from quire.nn.own_context import own_context
from quire.nn.product_module import ProductModule
from quire.nn.random_state import reset_streams
from quire.nn.stacked_experts import StackedExperts, is_experts, weight_names
from quire.recipe import Recipe, as_recipe
from quire.tensor import DTYPES, QuantizedStack, QuantizedTensor
from quire.tensor.origin import Origin


@dataclass(frozen=True)
class LoadReport:
    """The result of load(). str() gives a summary.

    Attributes:
        path: as it was given.
        dialect: its name, or None if no layer is quantized.
        quantized: name of a quantized weight -> recipe of its layer.
        plain: names of the other parameters.
        missing: names that only the model has.
        unused: names that only the checkpoint has (scales of key-value caches are kept for saving).
        notes: choices that load() made.
        on_meta: names of parameters and buffers that stay on the meta device, without values, since the checkpoint does
            not have them.
        contents: what was read of the checkpoint, counted as inspect() and save() count it: a quantized layer counts
            once, with its scales and its bias.
    """

    path: str
    dialect: str | None
    quantized: Mapping[str, str]
    plain: tuple[str, ...]
    missing: tuple[str, ...]
    unused: tuple[str, ...]
    notes: tuple[str, ...]
    on_meta: tuple[str, ...] = ()
    contents: str = ""

    def __str__(self) -> str:
        recipes: dict[str, int] = {}
        for recipe in self.quantized.values():
            recipes[recipe] = recipes.get(recipe, 0) + 1
        lines = [f"{self.path}: {self.dialect or 'nothing quantized'}, {self.contents}"]
        lines += [f"  {counted(count, 'weight'):>13}: {recipe}" for recipe, count in recipes.items()]
        lines += [f"  missing: {some(self.missing)}"] if self.missing else []
        lines += [f"  unused: {some(self.unused)}"] if self.unused else []
        lines += [f"  on the meta device, without values: {some(self.on_meta)}; {_FROM_META}"] if self.on_meta else []
        return "\n".join([*lines, *(f"  {note}" for note in self.notes)])


_FROM_META = "make the model on the CPU, or give these their values, before you run it"


@dataclass(frozen=True)
class LoadOptions:
    """Arguments of load(). plain: whether to load parameters that are not quantized too; else somebody has."""

    activations: str = "checkpoint"
    experts: str = "auto"
    fuse: bool | Mapping[str, Sequence[str]] | None = None
    missing_input_scale: str = "raise"
    strict: bool = True
    rename: Callable[[str], str] | None = None
    plain: bool = True


@subnormals_kept()
def load(
    model: torch.nn.Module,
    path: str | Path,
    *,
    activations: str = "checkpoint",
    experts: str = "auto",
    fuse: bool | Mapping[str, Sequence[str]] | None = None,
    missing_input_scale: str = "raise",
    strict: bool = True,
    rename: Callable[[str], str] | None = None,
    scale: float | None = None,
) -> LoadReport:
    """Loads a checkpoint into a model, layer by layer: quantized weights with their codes and scales unchanged.

    Args:
        model: where the checkpoint has a quantized weight, a torch.nn.Linear of the model becomes a quire.Linear, and
            the experts of Hugging Face transformers become layers of quire. Layers of quire are used as they are. Each
            such layer gets a recipe of its own. Its quantized weights do not require gradients, except in the place of
            quantized weights that do. Parameters on the meta device are replaced. Other plain parameters keep their
            memory. Of a model that torch.compile or DistributedDataParallel wraps, the model within is loaded, under
            its own names. To train with DistributedDataParallel, load the model before you wrap it: the wrapper does
            not see the replaced parameters.
        path: as for read().
        activations: "checkpoint": inputs are quantized as the checkpoint says. "none": they are not quantized. A spec,
            such as "mxfp8": all inputs are quantized to it. Gradients are computed from decoded weights
            (`backward=dequantized`).
        experts: "auto": the experts of quire.MoE and GroupedLinear are found under the names that files have for them.
            "none": they are found only under the names of their parameters.
        fuse: layers of the model that join several layers of the file, {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}.
            True: this layer and "gate_up_proj". If the joined layers have different scales, each row gets its own
            scale.
        missing_input_scale: what happens if a static scale of inputs is missing. "raise": an error. "dynamic": the
            layer measures its inputs in each call. "max": an expert gets the largest scale of the other experts of its
            layer; a layer without any scale raises an error.
        strict: raise CheckpointError if the model or the checkpoint has a name that the other does not have.
        rename: a function from a name in the checkpoint to the name in the model, for example to remove a prefix
            "language_model.".
        scale: as for read(). With 1, parameters get the codes of tensors without a scale as their values, in the
            parameter's dtype.

    Returns:
        A LoadReport.

    Raises:
        CheckpointError: before the model is changed: for a checkpoint that read() refuses, names or shapes that do not
            fit, scales of tensors that are NaN, infinite or negative, layers that cannot be joined, and a parameter in
            the place of a quantized weight that is not in float32, float16 or bfloat16.
        ValueError: for another missing_input_scale, experts or scale, and for activations that are no spec or have
            `given`.
        TypeError: for arguments of a wrong type. The model is then unchanged.
    """
    check_type("quire.io.load", torch.nn.Module, model=model)
    check_type("quire.io.load", str | Path, path=path)
    check_scale("quire.io.load", scale)
    options = _checked(LoadOptions(activations, experts, fuse, missing_input_scale, strict, rename))
    checkpoint = Checkpoint(opened(path), missing_input_scale=missing_input_scale, scale=scale)
    return load_checkpoint(model, checkpoint, options)


def load_checkpoint(model: torch.nn.Module, checkpoint: Checkpoint, options: LoadOptions) -> LoadReport:
    """load() of what read() returned."""
    targets, notes = fit(model, checkpoint, options.fuse, options.experts, options.rename), []
    layers = _layers(targets, checkpoint)
    for layer in layers.values():
        _decide(layer, checkpoint, (options.activations, options.missing_input_scale), notes)
    missing, unused = _compare(targets, checkpoint, options)
    plain = [target for target in targets if target.source is not None and not is_quantized(target, checkpoint)]
    plain = plain if options.plain else []
    for target in plain:
        _check_plain(target, checkpoint)
    record = _record(targets, checkpoint, unused)
    # Tensors that were made in inference mode can be written to only there.
    made_in_it = any([target.value.is_inference() for target in plain])
    with torch.no_grad() if made_in_it else own_context():
        apply(plain, layers, checkpoint)
    remember(model, record)
    quantized = {t.name: layer.recipe.linear_spec() for layer in layers.values() for t in layer.targets}
    notes += [f"{t.name}: the parameter was tied, and is not any more" for t in targets if t.untied]
    notes += _of_values(plain, checkpoint)
    names = tuple(target.name for target in plain)
    path = str(checkpoint.container.path)
    on_meta, counts = _left_on_meta(model), _contents(quantized, plain, targets, checkpoint)
    return LoadReport(
        path, checkpoint.dialect, quantized, names, tuple(missing), tuple(unused), tuple(notes), on_meta, counts
    )


def _contents(
    quantized: Mapping[str, str], plain: Sequence[Target], targets: Sequence[Target], checkpoint: Checkpoint
) -> str:
    """What was read of the checkpoint. quantized: names of parameters. plain: the other parameters."""
    layers = {ref.entry for target in targets if target.name in quantized for ref in target.source.refs()}
    others = {name for target in plain for name in (*(ref.entry for ref in target.source.refs()), *target.same)}
    others |= {name for name in checkpoint.plain if is_kept(name)}
    return contents(len(layers), others & checkpoint.plain.keys())


# --- what is to be done, before anything is


def _checked(options: LoadOptions) -> LoadOptions:
    """The options, with the canonical text of `activations`. Raises TypeError or ValueError for wrong arguments of
    load()."""
    what, activations = "quire.io.load", options.activations
    check_type(what, str, activations=activations)
    check_type(what, bool, strict=options.strict)
    check_type_or_none(what, Callable, rename=options.rename)
    check_missing(what, options.missing_input_scale)
    _check_fuse(options.fuse)
    if options.experts not in ("auto", "none"):
        raise ValueError(f"{what}: experts must be 'auto' or 'none', got {options.experts!r}")
    if activations in ("checkpoint", "none"):
        return options
    spec = checked_spec(what, "activations", activations)
    if "given" in spec.options:
        raise ValueError(
            f"{what}: activations={spec.text!r} has a scale that somebody gives; pass 'checkpoint', under which layers "
            "use those that are stored"
        )
    return replace(options, activations=spec.text)


def _check_fuse(fuse: object) -> None:
    """Raises TypeError unless load() can join layers by it."""
    named = isinstance(fuse, Mapping) and all(
        isinstance(name, str) and isinstance(parts, list | tuple) and parts and all(isinstance(p, str) for p in parts)
        for name, parts in fuse.items()
    )
    if not (fuse is None or isinstance(fuse, bool) or named):
        raise TypeError(
            "quire.io.load: fuse must be a bool or a dict from the name of a layer of the model to the names of layers "
            f"of the file, such as {{'qk_proj': ['q_proj', 'k_proj']}}; got {describe(fuse)}"
        )


def is_quantized(target: Target, checkpoint: Checkpoint) -> bool:
    """Whether the checkpoint has a quantized weight for a parameter."""
    return target.source is not None and target.source.refs()[0].entry in checkpoint.groups


def _has_quantized(module: torch.nn.Module, attribute: str) -> bool:
    """Whether a parameter can be a quantized weight."""
    if is_experts(module) or isinstance(module, StackedExperts):
        return attribute in weight_names(module)
    if type(module) is torch.nn.Linear:
        return attribute == "weight"
    return isinstance(module, ProductModule) and attribute in module.weight_names


def _layers(targets: Sequence[Target], checkpoint: Checkpoint) -> dict[int, Layer]:
    """id of a module -> its quantized weights."""
    found: dict[int, Layer] = {}
    for target in targets:
        if not is_quantized(target, checkpoint):
            continue
        for path, module, attribute in target.owners:
            if not _has_quantized(module, attribute):
                raise CheckpointError(
                    f"the checkpoint has a quantized weight for {attribute} of {type(module).__name__}, and only "
                    "torch.nn.Linear, layers of quire and experts can have one",
                    "write what quire.io.read gives, with entry.dequantize() in place of this entry; or convert the "
                    "checkpoint in high precision with a filter= that does not select it",
                    file=checkpoint.container.path,
                    tensor=target.name,
                )
            found.setdefault(id(module), Layer(path)).targets.append(target)
        _check_dtype(target)
    return found


def _check_dtype(target: Target) -> None:
    """Raises CheckpointError unless codes can take the place of a parameter."""
    dtype = target.value.dtype
    if (dtype.is_floating_point or dtype.is_complex) and dtype not in DTYPES:
        raise CheckpointError(
            f"the parameter is {str(dtype).removeprefix('torch.')}, and the checkpoint has a quantized weight for it, "
            "which is decoded to float32, float16 or bfloat16",
            "call model.float() or model.bfloat16() first",
            tensor=target.name,
        )


def _decide(layer: Layer, checkpoint: Checkpoint, options: tuple[str, str], notes: list[str]) -> None:
    """Spec, recipe and static scales of a layer. Raises CheckpointError if its weights do not fit together."""
    activations, missing = options
    specs, layouts = [], []
    for target in layer.targets:
        _check_shape(target, checkpoint)
        for matrix in target.source.matrices:
            groups = [checkpoint.groups[ref.entry] for ref in matrix]
            scalars = [_scalars(ref, checkpoint) for ref in matrix]
            layouts += [group.layout for group in groups]
            rows = [group.shape[-2] for group in groups]
            above = {"nvfp4": "global", "fp8_tensor": "scale"}.get(layouts[0].spec.split(":")[0], "")
            of_tensor = [one.get(above) for one in scalars]
            specs.append(joined_spec(target.name, [g.layout.spec for g in groups], rows, of_tensor))
            inputs = [one.get("input_scale") for one in scalars]
            if len(groups[0].shape) == 3 and matrix[0].index is None:  # all matrices in one entry
                count = groups[0].shape[0]
                layer.scales += [None] * count if inputs[0] is None else inputs[0].expand(count).split(1)
            else:
                layer.scales.append(joined_input(target.name, inputs, layouts[0].input_divides, notes))
    kinds = sorted({layout.name for layout in layouts})
    if len({(one.spec, one.static, one.dynamic, one.input_divides) for one in layouts}) > 1:
        raise CheckpointError(
            f"its weights are of {', '.join(kinds)}, and one layer has one recipe",
            "use a layer for each",
            file=checkpoint.container.path,
            tensor=layer.path,
        )
    layer.layout = layouts[0]
    layer.spec = next((spec for spec in specs if spec != layer.layout.spec), layer.layout.spec)
    lacking = [number for number, scale in enumerate(layer.scales) if scale is None]
    if layer.layout.calibrated and lacking and missing == "max":
        layer.scales = _largest(layer, checkpoint)
        notes.append(
            f"{layer.path}: the largest scale of others is used for {counted(len(lacking), 'missing static scale')}"
        )
    static = layer.layout.calibrated and None not in layer.scales
    own = layer.layout.static if static else layer.layout.dynamic
    x = own if activations == "checkpoint" else activations
    layer.recipe = recipe_of(x, layer.spec)


def _largest(layer: Layer, checkpoint: Checkpoint) -> list[torch.Tensor]:
    there = [scale for scale in layer.scales if scale is not None]
    if not there:
        raise CheckpointError(
            'nothing of the layer has a static scale of its input, of which "max" could take the largest',
            'pass missing_input_scale="dynamic", or calibrate the layer',
            file=checkpoint.container.path,
            tensor=layer.path,
        )
    stacked = torch.stack(there)
    largest = stacked.amin(0) if layer.layout.input_divides else stacked.amax(0)
    return [largest if scale is None else scale for scale in layer.scales]


#: Role of a scale that is one value -> what it is called.
_KINDS = {"input_scale": "static scale", "global": "global scale", "scale": "scale"}


def _scalars(ref: Ref, checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """The scales of a matrix that are one value, [1]. Raises CheckpointError if one is no scale."""
    found = checkpoint.scalars(ref.entry)
    for role, value in found.items():
        is_input = role == "input_scale"
        wrong = ~torch.isfinite(value) | (value < 0) | ((value == 0) & is_input)
        if bool(wrong.any()):
            name = checkpoint.groups[ref.entry].names[role]
            raise CheckpointError(
                f"a {_KINDS.get(role, role)} must be finite and {'positive' if is_input else 'not negative'}, got "
                f"{value[wrong][0].item()}",
                "calibrate and export the model again",
                file=checkpoint.container.header[name].file,
                tensor=name,
            )
    if ref.index is None:
        return found
    return {role: value[ref.index : ref.index + 1] if len(value) > 1 else value for role, value in found.items()}


def _shape(target: Target, checkpoint: Checkpoint) -> tuple[int, ...]:
    """The shape of the value in the checkpoint."""
    each = []
    for matrix in target.source.matrices:
        shapes = []
        for ref in matrix:
            group = checkpoint.groups.get(ref.entry)
            whole = group.shape if group is not None else checkpoint.container.header[ref.entry].shape
            shapes.append(tuple(whole[1:] if ref.index is not None else whole))
        rows = sum(shape[0] for shape in shapes) if len(shapes) > 1 else None
        each.append(shapes[0] if rows is None else (rows, *shapes[0][1:]))
        if any(shape[1:] != shapes[0][1:] for shape in shapes) or each[-1] != each[0]:
            raise CheckpointError(f"parts have shapes {shapes}", "they cannot be joined", tensor=target.name)
    return (len(each), *each[0]) if target.source.stacked else each[0]


def _check_shape(target: Target, checkpoint: Checkpoint) -> None:
    found, module = _shape(target, checkpoint), target.owners[0][1]
    wanted = tuple(target.value.shape)
    if is_quantized(target, checkpoint) and is_experts(module) and module.is_transposed:
        wanted = (wanted[0], wanted[2], wanted[1])
    if found != wanted:
        raise CheckpointError(
            f"the model has {list(target.value.shape)}, and the checkpoint {list(found)} in "
            f"{some([ref.entry for ref in target.source.refs()])}",
            "make the model with the configuration of the checkpoint",
            file=checkpoint.container.path,
            tensor=target.name,
        )


def _check_plain(target: Target, checkpoint: Checkpoint) -> None:
    quantized = [ref.entry for ref in target.source.refs() if ref.entry in checkpoint.groups]
    if quantized:
        raise CheckpointError(
            f"the layer joins plain weights and quantized ones: {some(quantized)}",
            "do not join them (fuse=)",
            tensor=target.name,
        )
    _check_values(target, checkpoint)
    _check_shape(target, checkpoint)


def _check_values(target: Target, checkpoint: Checkpoint) -> None:
    """Raises CheckpointError for a parameter whose values the file does not have as numbers."""
    if not target.value.dtype.is_floating_point or not isinstance(target.value, torch.nn.Parameter):
        return
    for ref in target.source.refs():
        entry = checkpoint.container.header[ref.entry]
        others = not entry.dtype.is_floating_point and ref.entry not in checkpoint.unscaled
        if others or entry.dtype == torch.float4_e2m1fn_x2:
            raise CheckpointError(
                f"the parameter has {target.value.dtype}, and the checkpoint has {entry}, which are codes, counts or "
                "complex numbers",
                "quire does not read the dialect of this checkpoint; export the model in floating point",
                file=entry.file,
                tensor=ref.entry,
            )


def _of_values(plain: Sequence[Target], checkpoint: Checkpoint) -> list[str]:
    """Notes on the parameters that were stored as something else than their values."""
    loaded = {ref.entry for target in plain for ref in target.source.refs()}
    kinds: dict[str, list[str]] = {}
    for name in loaded:
        entry = checkpoint.container.header[name]
        if entry.stored:
            kinds.setdefault(f"of type {entry.stored}, decoded", []).append(name)
        elif name in checkpoint.unscaled:
            kinds.setdefault(f"of {entry.dtype} without a scale, whose codes are values (scale=1)", []).append(name)
    return [f"{counted(len(names), 'tensor')} {what}: {some(sorted(names))}" for what, names in sorted(kinds.items())]


def _compare(targets: Sequence[Target], checkpoint: Checkpoint, options: LoadOptions) -> tuple[list[str], list[str]]:
    missing = [target.name for target in targets if target.source is None]
    used = {ref.entry for target in targets if target.source is not None for ref in target.source.refs()}
    used |= {name for target in targets for name in target.same}
    biases = {name for name, layer in checkpoint.biases.items() if layer in used and name not in used}
    unused = [name for name in checkpoint if name not in used and not is_kept(name)]
    if not options.plain:
        missing, unused, biases = [], [name for name in unused if name in checkpoint.groups], set()
    left = [*missing, *unused, *sorted(biases)]
    if (options.strict or not options.plain) and left:
        what = (
            (missing, "the checkpoint lacks"),
            (unused, "the model lacks"),
            (sorted(biases), "the model lacks biases"),
        )
        rules = [f"{text} {some(names)} ({len(names)})" for names, text in what if names]
        rules += unjoined(targets, checkpoint, options.fuse, options.rename)
        raise CheckpointError(
            f"names of model and checkpoint differ: {'; '.join(rules)}",
            "make the model with the configuration of the checkpoint, or pass rename= for other names, "
            f"{'another fuse=' if options.fuse else 'fuse='} for joined layers, or strict=False",
            file=checkpoint.container.path,
            tensor=left[0],
        )
    return missing, [*unused, *sorted(biases)]


def _left_on_meta(model: torch.nn.Module) -> tuple[str, ...]:
    """Parameters and buffers without values. States of quire's layers, which no file has, get theirs here."""
    for module in model.modules():
        if isinstance(module, ProductModule):
            module.place_states()
    inner = unwrapped(model)
    return tuple(plain_name(name) for name, t in (*inner.named_parameters(), *inner.named_buffers()) if t.is_meta)


def _record(targets: Sequence[Target], checkpoint: Checkpoint, unused: Sequence[str]) -> Record:
    header = checkpoint.container.header
    record = Record(str(checkpoint.container.path), checkpoint.dialect, checkpoint.container.configs)
    for target in targets:
        if target.source is not None:
            rows = tuple(tuple(_rows(ref, checkpoint) for ref in matrix) for matrix in target.source.matrices)
            record.sources |= {name: (target.source, rows) for name in target.names()}
    record.layouts = {name: group.layout.name for name, group in checkpoint.groups.items()}
    stored = (*checkpoint.plain, *checkpoint.biases)
    record.dtypes = {name: header[name].dtype for name in stored if not header[name].stored}
    kept = [name for name in checkpoint.plain if is_kept(name)]
    calibrated = [group for group in checkpoint.groups.values() if "input_scale" in group.names]
    record.input_scales = {group.name: checkpoint.scalars(group.name)["input_scale"] for group in calibrated}
    record.other = {name: checkpoint.container.tensor(name) for name in kept}
    return record


def _rows(ref: Ref, checkpoint: Checkpoint) -> int:
    group = checkpoint.groups.get(ref.entry)
    shape = group.shape if group is not None else checkpoint.container.header[ref.entry].shape
    shape = shape[1:] if ref.index is not None else shape
    return shape[0] if shape else 1


@dataclass
class Layer:
    """How the quantized weights of one module are made. scales: the static scale of the input of each matrix, [1]."""

    path: str
    targets: list[Target] = field(default_factory=list)
    layout: Layout | None = None
    spec: str = ""
    recipe: Recipe | None = None
    scales: list[torch.Tensor | None] = field(default_factory=list)


# --- values, put into the modules of a model


def load_layer(stored: StoredWeight, layout: Layout, index: int | None = None) -> Linear:
    """A single layer as load() would make it. index: which matrix of a stack."""
    one = of_one(stored, index)
    rows, columns = one.weight.shape
    layer = Linear(columns, rows, one.bias is not None, one.weight.dtype, "meta")
    static = layout.calibrated and one.input_scale is not None
    layer.weight = torch.nn.Parameter(one.weight, requires_grad=False)
    if one.bias is not None:
        layer.bias = torch.nn.Parameter(one.bias.to(one.weight.dtype), requires_grad=False)
    layer.recipe = recipe_of(layout.static if static else layout.dynamic, one.weight.spec_text)
    layer.place_states()
    weight = Target(layer.weight, [("", layer, "weight")])
    _give_scales(layer, Layer("", [weight], scales=[one.input_scale]))
    return layer


def _give_scales(module: torch.nn.Module, layer: Layer) -> None:
    """Fills the buffers that a recipe with static scales of inputs reads."""
    module.add_input_scales()
    if not module.recipe.static_input:
        return
    rest, found = list(layer.scales), {}
    for target in layer.targets:
        attribute = next(attribute for _, owner, attribute in target.owners if owner is module)
        count = module.groups if target.value.dim() == 3 else 1
        found.setdefault(module.scale_name(attribute), []).extend(rest[:count])
        rest = rest[count:]
    for name, scales in found.items():
        getattr(module, name).copy_(torch.cat(scales))


def recipe_of(x: str, w: str) -> Recipe:
    """The recipe of a layer. Gradients are computed from decoded weights, because files have codes for one direction
    only."""
    dy = "none" if x == "none" else "mxfp8"  # which is not used
    return as_recipe("quire.io.load", f"x={x},w={w},dy={dy},backward=dequantized")


def apply(plain: Sequence[Target], layers: Mapping[int, Layer], checkpoint: Checkpoint) -> None:
    from tqdm import tqdm

    work = [(target, None) for target in plain]
    work += list({id(target): (target, layer) for layer in layers.values() for target in layer.targets}.values())
    # A bar appears after a second, where someone watches.
    for target, layer in tqdm(work, desc="quire.io.load", unit="tensor", delay=1, disable=None):
        value = plain_value(target, checkpoint) if layer is None else _weight(target, layer, checkpoint)
        _assign(target, value)
    modules = {id(module): module for layer in layers.values() for t in layer.targets for _, module, _ in t.owners}
    new = []
    for number, module in modules.items():
        if type(module) is torch.nn.Linear:
            new.append(Linear.adopt(module, layers[number].recipe))
        elif is_experts(module):
            StackedExperts.adopt(module, layers[number].recipe).reset_states()
        module.recipe = layers[number].recipe
        _give_scales(module, layers[number])
        module._forget_weights()
        module.place_states()
    reset_streams([layer.sr_state for layer in new], [layer.take_stream() for layer in new])


def plain_value(target: Target, checkpoint: Checkpoint) -> torch.Tensor:
    """The value of a parameter that is not quantized in the checkpoint."""
    each = []
    for matrix in target.source.matrices:
        parts = [_tensor(ref.entry, target, checkpoint) for ref in matrix]
        parts = [part if ref.index is None else part[ref.index] for ref, part in zip(matrix, parts, strict=True)]
        each.append(parts[0] if len(parts) == 1 else torch.cat(parts))
    return torch.stack(each) if target.source.stacked else each[0]


def _tensor(name: str, target: Target, checkpoint: Checkpoint) -> torch.Tensor:
    if name not in checkpoint.biases:
        value = checkpoint.container.tensor(name)
        # torch.cat, which joins the parts of a parameter, takes no tensors of codes.
        return value.to(target.value.dtype) if name in checkpoint.unscaled else value
    moved = target.alternates and checkpoint.groups[checkpoint.biases[name]].layout.alternating
    bias = checkpoint.bias(name)
    return alternating(bias) if moved else bias


def _weight(target: Target, layer: Layer, checkpoint: Checkpoint) -> QuantizedTensor:
    matrices, origins = [], []
    for matrix in target.source.matrices:
        parts = [of_one(checkpoint[ref.entry], ref.index) for ref in matrix]
        origins += [part.origin for part in parts]
        whole = join([part.weight for part in parts], layer.spec)
        moved = target.alternates and checkpoint.groups[matrix[0].entry].layout.alternating
        matrices.append(of_weight(alternating, whole) if moved else whole)
    found = QuantizedStack.of(matrices) if target.source.stacked else matrices[0]
    dtype = target.value.dtype if target.value.dtype.is_floating_point else None
    found = found.to(device=None if target.value.is_meta else target.value.device, dtype=dtype)
    first = origins[0]
    found.remember(first if len(origins) == 1 else Origin(first.dialect, first.layout, parts=tuple(origins)))
    return found


def _assign(target: Target, value: torch.Tensor) -> None:
    old = target.value
    if not isinstance(value, QuantizedTensor):
        value = value.to(old.dtype)
        if not old.is_meta and not isinstance(old, QuantizedTensor):
            old.copy_(value)
            return
    # Codes in the place of values do not train, as those of quire.convert; codes in the place of codes train as before.
    trains = old.requires_grad and (isinstance(old, QuantizedTensor) or not isinstance(value, QuantizedTensor))
    new = torch.nn.Parameter(value, requires_grad=trains) if isinstance(old, torch.nn.Parameter) else value
    for _, module, attribute in target.owners:
        setattr(module, attribute, new)


def fitted(model: torch.nn.Module, path: str | Path) -> Mapping[str, torch.Tensor]:
    """The weights of a checkpoint by their names in the model, each read when it is asked for. What belongs to no
    parameter has its name in the checkpoint. Raises CheckpointError as load() does."""
    return _Fitted(model, Checkpoint(opened(path)))


class _Fitted(Mapping[str, torch.Tensor]):
    def __init__(self, model: torch.nn.Module, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        targets = [target for target in fit(model, checkpoint, None, "auto") if target.source is not None]
        used = {ref.entry for target in targets for ref in target.source.refs()}
        used |= {entry for target in targets for entry in target.same}
        self._targets: dict[str, Target | None] = {target.name: target for target in targets}
        self._targets |= dict.fromkeys(name for name in checkpoint if name not in used)

    def __getitem__(self, name: str) -> torch.Tensor:
        target = self._targets[name]
        if target is None:
            value = self._checkpoint[name]
            return value.weight if isinstance(value, StoredWeight) else value
        return self._codes(target) if is_quantized(target, self._checkpoint) else plain_value(target, self._checkpoint)

    def _codes(self, target: Target) -> QuantizedTensor:
        joined = [matrix for matrix in target.source.matrices if len(matrix) > 1]
        if joined:
            raise CheckpointError(
                "the parameter is joined from several quantized weights, which have scales of their own",
                "load the checkpoint into a new model (quire.io.load)",
                tensor=target.name,
            )
        each = [of_one(self._checkpoint[ref.entry], ref.index).weight for (ref,) in target.source.matrices]
        return QuantizedStack.of(each) if target.source.stacked else each[0]

    def __iter__(self) -> Iterator[str]:
        return iter(self._targets)

    def __len__(self) -> int:
        return len(self._targets)
