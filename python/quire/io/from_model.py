"""Models as checkpoints: what was loaded and not changed since gets the same names and bytes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from quire.checks import check_dense, check_type, check_type_or_none
from quire.conversion.refit import named_layers
from quire.io.container import CheckpointError
from quire.io.dialect import Dialect
from quire.io.dialects import dialect_named
from quire.io.dialects.native import Native, bias_of, layout_of
from quire.io.fitting import Record, Ref, Source, Target, named_in_files, parameters, record_of
from quire.io.joining import apart, narrowed, of_weight, split
from quire.io.layout import StoredWeight
from quire.io.reading import Checkpoint, opened
from quire.io.writing import SaveReport, write_planned, written_as
from quire.loading.float_mode import subnormals_kept
from quire.nn.input_scale import same_unit
from quire.nn.product_module import ProductModule
from quire.tensor import QuantizedStack, QuantizedTensor, QuantSpec
from quire.tensor.order import is_interleaved, reordered
from quire.tensor.origin import Origin


@subnormals_kept()
def save(
    model: torch.nn.Module,
    path: str | Path,
    *,
    dialect: str | None = None,
    like: str | Path | None = None,
    exact: bool = True,
    max_shard_size: str | int = "5GB",
    overwrite: bool = False,
) -> SaveReport:
    """Writes a model as a checkpoint. A weight that load() has read and that has not changed is written with the same
    names, dtypes, shapes and bytes. Other weights are written with their codes, under the names of their parameters.

    Args:
        model: a model with layers of quire or torch.nn. Of a model that torch.compile or DistributedDataParallel wraps,
            the model within is saved, under its own names.
        path: a folder, also for a single file: its name is model.safetensors.
        dialect: its name. None: the dialect of the checkpoint from which the model was loaded, or of `like`.
        like: a checkpoint of the same model. Entries that the model does not have are copied from it, and its
            configuration is used. None: the configuration of the checkpoint from which the model was loaded.
        exact: as for write().
        max_shard_size: as for write().
        overwrite: as for write().

    Returns:
        A SaveReport.

    Raises:
        CheckpointError: with nothing written: if a quantized weight has no place in the dialect, if the folder has a
            checkpoint and overwrite is False, for a parameter on the meta device, and for a `like` that read() refuses.
        ValueError: for another max_shard_size, and for a path that is the name of a file of weights.
        TypeError: for arguments of a wrong type, and a parameter that is not dense.
    """
    check_type("quire.io.save", torch.nn.Module, model=model)
    check_type("quire.io.save", str | Path, path=path)
    check_type_or_none("quire.io.save", str | Path, like=like)
    check_type_or_none("quire.io.save", str, dialect=dialect)
    options = written_as("quire.io.save", path, exact, max_shard_size, overwrite)
    source = None if like is None else Checkpoint(opened(like), missing_input_scale="dynamic")
    record = record_of(model) or Record("", None, {})
    of_source = None if source is None else source.dialect
    chosen = dialect or of_source or record.dialect
    entries = Entries(model, record, source, None if chosen is None else dialect_named(chosen))
    if chosen is None and entries.layers:
        raise CheckpointError("the model has quantized weights", 'pass dialect=, such as "quire" or "modelopt"')
    base = dict(source.container.configs if source is not None else record.configs)
    before = record.layouts if source is None else {name: group.layout.name for name, group in source.groups.items()}
    same = chosen is not None and chosen == (of_source if source is not None else record.dialect)
    return write_planned(
        Path(path),
        entries,
        None if chosen is None else dialect_named(chosen),
        base=base,
        unchanged=before if same else None,
        **options,
    )


@dataclass(frozen=True)
class Piece:
    """A part of a parameter that is an entry of the file, or a matrix of one: rows of matrix `matrix`. rows: of all
    parts of all matrices. apart: rows of gate and up are in turn in the parameter, and the dialect takes the gate's
    first. spec: what the file that was read has, for a part that somebody has written to; None to keep its own."""

    target: Target
    source: Source
    rows: tuple[tuple[int, ...], ...]
    matrix: int
    part: int
    apart: bool
    spec: str | None

    def weight(self) -> tuple[QuantizedTensor, Origin | None]:
        """This part of a quantized parameter, and its origin."""
        value, origin = self.target.value.detach(), self.target.value.origin
        value = reordered(value, False) if is_interleaved(value.spec_text) else value
        whole = value.part(self.matrix) if self.source.stacked else value
        whole = of_weight(apart, whole) if self.apart else whole
        each = () if origin is None else origin.parts or (origin,)
        each = each if len(each) == len(self.source.refs()) else (None,) * len(self.source.refs())
        before = sum(map(len, self.source.matrices[: self.matrix]))
        count = len(self.source.matrices[self.matrix])
        specs = [whole.spec_text if one is None else _spec(one) for one in each[before : before + count]]
        part, own = split(whole, self.rows[self.matrix], specs)[self.part], each[before + self.part]
        return (narrowed(part, self.spec) if own is None and self.spec is not None else part), own

    def tensor(self) -> torch.Tensor:
        """This part of a plain parameter."""
        value = self.target.value.detach()
        whole, rows = value[self.matrix] if self.source.stacked else value, self.rows[self.matrix]
        whole = apart(whole, whole.dim() - 1) if self.apart else whole  # a bias
        return whole if len(rows) == 1 else whole.narrow(0, sum(rows[: self.part]), rows[self.part])


def _spec(origin: Origin) -> str:
    layout = dialect_named(origin.dialect).layout(origin.layout)
    return QuantSpec(layout.spec).text


class Entries(Mapping[str, StoredWeight | torch.Tensor]):
    """The entries of the file, made when they are asked for. dialect: in which they are to be written. tied: modules
    whose weight, which is not quantized, is the one of another module, under whose name the file has it."""

    def __init__(
        self, model: torch.nn.Module, record: Record, source: Checkpoint | None, dialect: Dialect | None = None
    ) -> None:
        self.record, self.source = record, source
        self.pieces: dict[str, dict[int | None, Piece]] = {}
        self.tied: list[str] = []
        modules = dict(named_layers(model))
        self._dialect = None if dialect is None else dialect.name
        self._foreign = foreign = dialect is not None and dialect.name != Native.name
        ordered = dialect is not None and any(layout.alternating for layout in dialect.layouts)
        for target in parameters(model):
            check_dense(f"quire.io.save: {target.name}", value=target.value)
            if target.value.is_meta or torch.nn.parameter.is_lazy(target.value):
                raise CheckpointError(
                    "the model has no values for it, as on the meta device and in a lazy layer that has not run",
                    "load the values first",
                    tensor=target.name,
                )
            known = next((name for name in target.names() if name in record.sources), target.name)
            if not isinstance(target.value, QuantizedTensor) and target.value.dim() == 2:
                self.tied += [name.removesuffix(".weight") for name in target.names() if name != known]
            if known in record.sources:
                found, rows = record.sources[known]
            else:
                found = named_in_files(target, modules, _stacks(dialect)) if foreign else None
                found = found or Source(((Ref(known),),))
                rows = _equal_rows(target.value, found)
            for number, matrix in enumerate(found.matrices):
                for part, ref in enumerate(matrix):
                    of_file = record.origin(ref.entry)
                    spec = _spec(of_file) if foreign and of_file is not None else None
                    piece = Piece(target, found, rows, number, part, ordered and target.alternates, spec)
                    self.pieces.setdefault(ref.entry, {})[ref.index] = piece
        first = {name: next(iter(each.values())).target.value for name, each in self.pieces.items()}
        self.layers = [name for name, value in first.items() if isinstance(value, QuantizedTensor)]
        named = _bias_of if foreign else bias_of
        self.biases = {name: bias for name in self.layers if (bias := named(name)) in self.pieces}
        own = [name for name in self.pieces if name not in self.biases.values()]
        others = record.other if source is None else source
        self.names = [*own, *(name for name in others if name not in self.pieces)]

    def __contains__(self, name: object) -> bool:
        return name in self.names  # Mapping's would read the tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, name: str) -> StoredWeight | torch.Tensor:
        if name not in self.pieces:
            return self.record.other[name] if self.source is None else self.source[name]
        return self._stored(name) if name in self.layers else self._tensor(name)

    def _stored(self, name: str) -> StoredWeight:
        pieces = [self.pieces[name][index] for index in sorted(self.pieces[name], key=lambda i: i or 0)]
        each = [piece.weight() for piece in pieces]
        scales = [_input_scale(piece, self.record) for piece in pieces]
        stacked = None not in self.pieces[name]
        weight = QuantizedStack.of([one for one, _ in each]) if stacked else each[0][0]
        of_layer = None if None in scales else torch.cat(scales)
        bias = self._tensor(self.biases[name]) if name in self.biases else None
        origin = each[0][1] or self.record.origin(name)
        is_other = origin is not None and each[0][1] is None and self._foreign and _spec(origin) != weight.spec_text
        if origin is None or is_other or self._has_other_inputs(pieces[0], origin):
            origin = _of_recipe(pieces[0], weight.spec_text)
        layout = dialect_named(origin.dialect).layout(origin.layout)
        # A scale of the file belongs to the format in which the file has the inputs.
        of_file = self.record.input_scales.get(name) if layout is None or layout.calibrated else None
        scale = of_file if of_layer is None else of_layer
        _check_scale(name, scale)
        return StoredWeight(weight, scale, bias, origin)

    def _has_other_inputs(self, piece: Piece, origin: Origin) -> bool:
        """Whether the layer's recipe, and not the file that was read, says how inputs are quantized: its static scale
        is one of another format; or it has none, and another dialect than that of the file is written."""
        layout = dialect_named(origin.dialect).layout(origin.layout)
        own = getattr(piece.target.owners[0][1], "scale_spec", None)
        if own is not None:
            return not (layout.reads_scale and same_unit(layout.static, own))
        return layout.reads_scale and self._dialect not in (None, origin.dialect)

    def _tensor(self, name: str) -> torch.Tensor:
        found = self.pieces[name]
        each = [found[index].tensor() for index in sorted(found, key=lambda i: i or 0)]
        value = each[0] if None in found else torch.stack(each)
        kind = self.record.dtypes.get(name, value.dtype)
        narrow = value.to(kind)
        return narrow if torch.equal(narrow.to(value.dtype), value) else value


def _of_recipe(piece: Piece, spec: str) -> Origin:
    """The origin of a weight that was in no checkpoint: it says how the layer quantizes inputs."""
    recipe = getattr(piece.target.owners[0][1], "recipe", None)
    return Origin(Native.name, layout_of(spec, "none" if recipe is None else recipe.input_spec).name)


def _bias_of(name: str) -> str:
    stem = name.removesuffix(".weight")
    return f"{stem}.bias" if stem != name else f"{stem}_bias"


def _input_scale(piece: Piece, record: Record) -> torch.Tensor | None:
    """The static scale of the layer's input: [1], for a stack [E]. None if there is none, or if load() made it from the
    scales of several layers of the file, which are written instead."""
    _, module, attribute = piece.target.owners[0]
    scales = module._buffers.get(module.scale_name(attribute)) if isinstance(module, ProductModule) else None
    if scales is None:
        return None
    if isinstance(piece.target.value, QuantizedStack) and not piece.source.stacked:
        return scales.clone()  # one scale for each matrix; the matrices are one entry
    number = attribute.removeprefix("weight")
    group = int(number) - module.own_groups().start if number.isdecimal() else piece.matrix
    own = scales[group : group + 1].clone()
    return None if _is_joined(own, piece, record) else own


def _is_joined(scale: torch.Tensor, piece: Piece, record: Record) -> bool:
    """Whether load() made the scale from the scales of several layers of the file, and nobody has changed it since."""
    of_file = [record.input_scales.get(ref.entry) for ref in piece.source.matrices[piece.matrix]]
    if len(of_file) == 1:
        return False
    if None in of_file:
        return piece.target.name in record.sources
    known = torch.cat(of_file).to(scale.device)
    return bool((scale == known.amin()) | (scale == known.amax()))


def _check_scale(name: str, scale: torch.Tensor | None) -> None:
    """Raises CheckpointError for a static scale that nobody has given."""
    if scale is not None and not bool((scale.isfinite() & (scale > 0)).all()):
        raise CheckpointError(
            f"the static scale of the layer's input must be finite and positive, got {scale.tolist()}",
            "give it one: quire.calibrate(model, batches, recipe).apply(model)",
            tensor=name,
        )


def _stacks(dialect: Dialect) -> bool:
    """Whether a dialect has all experts in one tensor, and no layers of single ones."""
    return bool(dialect.layouts) and all(layout.stacked for layout in dialect.layouts)


def _equal_rows(value: torch.Tensor, source: Source) -> tuple[tuple[int, ...], ...]:
    """The rows of the parts of each matrix, of a parameter that nobody has joined of parts of other sizes."""
    rows = value.shape[1] if source.stacked else value.shape[0] if value.dim() else 1
    return tuple((rows // len(matrix),) * len(matrix) for matrix in source.matrices)
