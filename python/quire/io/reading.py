"""A checkpoint as a mapping, read one layer at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from quire.checks import check_type, check_type_or_none
from quire.io.container import Container, Entry
from quire.io.dialect import Dialect, check_consumed, check_unscaled, contents, unscaled
from quire.io.dialects import dialect_of
from quire.io.dialects.gguf import GgufFile
from quire.io.layout import StoredWeight, check_inputs, check_zero_points, consumed
from quire.io.te_file import TeFile
from quire.loading.float_mode import subnormals_kept
from quire.tensor import QuantSpec
from quire.tensor.buffers import DTYPES

#: What to do about missing static scales of inputs.
MISSING = ("raise", "dynamic", "max")


class Checkpoint(Mapping[str, StoredWeight | torch.Tensor]):
    """The result of quire.io.read(): a mapping from names to StoredWeights (quantized weights, under the names of the
    parameters of a model, such as "proj.weight") and plain tensors. Each access reads one entry from the file; nothing
    is kept in memory.

    Args:
        container: the files, the header and the configurations.
        missing_input_scale: as for `quire.io.read`.
        scale: as for `quire.io.read`.

    Attributes:
        dialect: its name; None if no layer is quantized.
        groups: name of a quantized weight -> the names, dtypes and shapes of its tensors.
        biases: name of a bias -> name of its layer.
        dtype: the dtype to which weights are decoded by default.

    Raises:
        KeyError: for an unknown name.
    """

    def __init__(self, container: Container, *, missing_input_scale: str = "raise", scale: float | None = None) -> None:
        self.container = container
        self._dialect: Dialect | None = dialect_of(container)
        self.dialect = None if self._dialect is None else self._dialect.name
        header = container.header
        found = [] if self._dialect is None else self._dialect.groups(header, container.descriptions)
        check_consumed(found, header)
        without = unscaled(found, header)
        if scale is None:
            check_unscaled(without, header)
        #: Names of tensors with codes that are values, because scale=1 says so.
        self.unscaled = frozenset(without)
        if missing_input_scale == "raise":
            check_inputs(found, header)
        check_zero_points(found, header, container.tensor)
        self.groups = {group.name: group for group in found}
        used = consumed(found)
        self.plain = {name: entry for name, entry in header.items() if name not in used}
        #: Name of the tensor -> name of the layer that it is the bias of.
        self.biases = {group.names["bias"]: group.name for group in found if "bias" in group.names}
        self.dtype = _nominal(container)

    @subnormals_kept()
    def __getitem__(self, name: str) -> StoredWeight | torch.Tensor:
        if name in self.groups:
            return self._dialect.read(self.groups[name], self.container.tensor, self.dtype)
        return self.container.tensor(self.plain[name].name)

    def bias(self, name: str) -> torch.Tensor:
        """The bias of a quantized layer, by its own name, as StoredWeight has it.

        Args:
            name: the name of the bias.

        Raises:
            KeyError: for a name that is not in `biases`.
        """
        return self._dialect.bias(self.groups[self.biases[name]], self.container.tensor(name))

    def outline(self, name: str) -> StoredWeight | torch.Tensor:
        """The entry of that name on the meta device: dtypes and shapes, without reading the file.

        Args:
            name: the name of an entry.

        Raises:
            KeyError: for an unknown name.
        """
        if name in self.groups:
            return self._dialect.read(self.groups[name], self._meta, self.dtype)
        return self._meta(name)

    def _meta(self, name: str) -> torch.Tensor:
        entry: Entry = self.container.header[name]
        return torch.empty(entry.shape, dtype=entry.dtype, device="meta")

    def scalars(self, name: str) -> dict[str, torch.Tensor]:
        """The scales of a quantized layer that have one value, or one for each matrix: role -> float32 [1] or [E].

        Args:
            name: the name of a quantized weight.

        Raises:
            KeyError: for a name that is not in `groups`.
        """
        group = self.groups[name]
        most = group.shape[0] if len(group.shape) == 3 else 1
        few = {role: full for role, full in group.names.items() if role in ("global", "scale", "input_scale")}
        header = self.container.header
        small = {role: full for role, full in few.items() if torch.Size(header[full].shape).numel() in (1, most)}
        of_tensor = {role: full for role, full in small.items() if header[full].dtype.itemsize > 1}
        return {role: self.container.tensor(full).float().reshape(-1) for role, full in of_tensor.items()}

    @property
    def metadata(self) -> dict[str, str]:
        """Texts of the headers."""
        return self.container.metadata

    def __contains__(self, name: object) -> bool:
        return name in self.groups or name in self.plain  # Mapping's would read the tensor

    def __iter__(self) -> Iterator[str]:
        yield from self.groups
        yield from self.plain

    def __len__(self) -> int:
        return len(self.groups) + len(self.plain)

    def __repr__(self) -> str:
        found = f"{self.dialect or 'no dialect'}, {contents(len(self.groups), self.plain)}"
        return f"Checkpoint({str(self.container.path)!r}, {found})"


def check_missing(what: str, missing_input_scale: object) -> None:
    """Raises TypeError or ValueError for what is not one of MISSING."""
    check_type(what, str, missing_input_scale=missing_input_scale)
    if missing_input_scale not in MISSING:
        raise ValueError(f"{what}: missing_input_scale must be one of {MISSING}, got {missing_input_scale!r}")


def read(path: str | Path, *, missing_input_scale: str = "raise", scale: float | None = None) -> Checkpoint:
    """Opens a checkpoint and returns a mapping, which reads one entry at a time.

    Args:
        path: a folder with one .safetensors file, or with several and their index; or one such file, a GGUF file
            (.gguf; of a model that llama.cpp has split, any of its files, or the folder) or a file of torch.save (.pt,
            .pth).
        missing_input_scale: what to do if a layer lacks the static scale of its input. "raise": raise an error.
            "dynamic" or "max": its input_scale is None.
        scale: None: a tensor of codes (FP8, FP4, E8M0, or a weight of bytes) without a scale is an error. 1: its codes
            are its values, as in a file whose tensors were only cast to FP8. It is a plain tensor of the mapping, in
            the dtype of the file.

    Returns:
        A Checkpoint.

    Raises:
        CheckpointError: if a tensor is missing, has another dtype or shape than its dialect says, or belongs to no
            layer, and if files are damaged. These checks read only headers, zero points and the tensors that describe
            layers.
        ValueError: for another missing_input_scale or scale.
        TypeError: for arguments of a wrong type.
    """
    check_type("quire.io.read", str | Path, path=path)
    check_missing("quire.io.read", missing_input_scale)
    check_scale("quire.io.read", scale)
    return Checkpoint(opened(path), missing_input_scale=missing_input_scale, scale=scale)


def check_scale(what: str, scale: float | None) -> None:
    """Raises TypeError or ValueError for an argument scale that is neither None nor 1."""
    check_type_or_none(what, int | float, scale=scale)
    if scale is not None and (isinstance(scale, bool) or scale != 1):
        raise ValueError(
            f"{what}: scale must be None or 1 (the codes of tensors without a scale are their values), got {scale!r}; "
            "read with scale=1 and multiply the tensors"
        )


def checked_spec(what: str, argument: str, value: object) -> QuantSpec:
    """The spec of an argument. Raises TypeError or ValueError for anything else."""
    check_type(what, str | QuantSpec, **{argument: value})
    try:
        return QuantSpec(value)
    except ValueError as error:
        raise ValueError(f"{what}: {argument}: {error}") from None


def opened(path: str | Path) -> Container:
    """The tensors of a checkpoint. The name of the file says whether it is a GGUF file, a file of torch.save or
    safetensors."""
    file = Path(path)
    kinds = {".gguf": GgufFile, ".pt": TeFile, ".pth": TeFile}
    if file.is_dir() and any(file.glob("*.gguf")) and not any(file.glob("*.safetensors")):
        return GgufFile(file)
    return kinds[file.suffix](file) if file.is_file() and file.suffix in kinds else Container(path)


def _nominal(container: Container) -> torch.dtype:
    """The dtype that the model's configuration names, else the dtype of most plain elements."""
    config = container.configs.get("config.json", {})
    said = getattr(torch, str(config.get("dtype", config.get("torch_dtype"))).removeprefix("torch."), None)
    if said in DTYPES:
        return said
    counts = dict.fromkeys(DTYPES, 0)
    for entry in container.header.values():
        if entry.dtype in counts and len(entry.shape) > 1:
            counts[entry.dtype] += torch.Size(entry.shape).numel()
    return max(counts, key=counts.get) if any(counts.values()) else torch.bfloat16
