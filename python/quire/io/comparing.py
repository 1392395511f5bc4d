"""Two checkpoints, tensor by tensor: bytes, then values."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from quire.io.layout import StoredWeight
from quire.io.reading import Checkpoint, read
from quire.io.unclaimed import OF_FILES
from quire.loading.float_mode import subnormals_kept


@dataclass(frozen=True)
class Difference:
    """The result of diff(). str() gives a table; it is false if nothing differs.

    only_a, only_b: names that only one checkpoint has. different: name -> what differs, in words. equal_values: names
    of layers with different bytes and equal values, for example in two dialects. same: the number of entries with
    equal bytes. configs: what differs in the configurations.
    """

    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    different: dict[str, str]
    equal_values: tuple[str, ...]
    same: int
    configs: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        """Whether anything but the way of storing differs."""
        return bool(self.only_a or self.only_b or self.different)

    def __str__(self) -> str:
        lines = [f"{self.same} entries are the same, {len(self.equal_values)} have the same values in other bytes"]
        lines += [f"only in the first: {name}" for name in self.only_a]
        lines += [f"only in the second: {name}" for name in self.only_b]
        lines += [f"{name}: {what}" for name, what in self.different.items()]
        return "\n".join([*lines, *(f"{name} differs" for name in self.configs)])

    def state(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {key: list(value) if isinstance(value, tuple) else value for key, value in vars(self).items()}


@subnormals_kept()
def diff(a: str | Path, b: str | Path) -> Difference:
    """Compares two checkpoints, of the same dialect or of two dialects, one entry after another.

    a, b: paths, as for read(). If the bytes of a layer differ, its decoded values are compared in float32, and the
    result gives the largest difference in units in the last place. Raises the CheckpointError of read().
    """
    one, other = (read(path, missing_input_scale="dynamic") for path in (a, b))
    # A bias belongs to its layer in one checkpoint, and is by itself in one where the layer is plain.
    names = [name for name in one if name in other]
    different, equal, same = {}, [], 0
    for name in names:
        what = _compare(name, one, other)
        if what is None:
            same += 1
        elif what == "":
            equal.append(name)
        else:
            different[name] = what
    only_a = tuple(name for name in one if name not in other and not OF_FILES.search(name))
    only_b = tuple(name for name in other if name not in one and not OF_FILES.search(name))
    configs = one.container.configs.keys() | other.container.configs.keys()
    unlike = tuple(sorted(c for c in configs if one.container.configs.get(c) != other.container.configs.get(c)))
    return Difference(only_a, only_b, different, tuple(equal), same, unlike)


def _compare(name: str, one: Checkpoint, other: Checkpoint) -> str | None:
    """None: the same bytes; "": the same values; else what differs."""
    a, b = one[name], other[name]
    if a.shape != b.shape:
        return f"shapes {list(a.shape)} and {list(b.shape)}"
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        if a.dtype == b.dtype and torch.equal(as_bytes(a), as_bytes(b)):
            return None
        return _distance(f"{a.dtype} and {b.dtype}", a, b)
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return _distance("plain and quantized", _values(a), _values(b))
    beside = [(what, getattr(a, what), getattr(b, what)) for what in ("bias", "input_scale")]
    unlike = [what for what, x, y in beside if (x is None) != (y is None) or (x is not None and _unlike(what, x, y))]
    if a.origin.dialect != b.origin.dialect:  # scales of inputs can be stored as their inverses
        unlike = [what for what in unlike if what != "input_scale"]
    if not unlike and _same_bytes(a, b):
        return None
    found = _distance(f"{a.origin.layout} and {b.origin.layout}", _values(a), _values(b))
    return "; ".join(filter(None, [found, *(f"{what} differs" for what in unlike)]))


def _unlike(what: str, a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype != b.dtype or a.shape != b.shape or not torch.equal(as_bytes(a), as_bytes(b))


def _same_bytes(a: StoredWeight, b: StoredWeight) -> bool:
    of_a, of_b = a.weight.buffers(), b.weight.buffers()
    known = (a.origin.dialect, a.origin.layout, a.origin.dtypes) == (b.origin.dialect, b.origin.layout, b.origin.dtypes)
    return known and of_a.keys() == of_b.keys() and all(torch.equal(as_bytes(of_a[n]), as_bytes(of_b[n])) for n in of_a)


def _values(value: StoredWeight | torch.Tensor) -> torch.Tensor:
    return value.dequantize(torch.float32) if isinstance(value, StoredWeight) else value


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Its bytes, in one dimension."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _distance(what: str, a: torch.Tensor, b: torch.Tensor) -> str:
    """ "" if the values are the same, -0 and 0 too."""
    if not (a.dtype.is_floating_point and b.dtype.is_floating_point):
        return f"{what}, other values"
    x, y = a.float(), b.float()
    both_nan = x.isnan() & y.isnan()
    if bool(((x == y) | both_nan).all()):
        return ""
    ulp = int((ordered(x) - ordered(y)).abs()[~both_nan].max())
    count = int(((x != y) & ~both_nan).sum())
    return f"{what}: {count} of {x.numel()} values differ, at most {ulp} ulp of float32"


def ordered(values: torch.Tensor) -> torch.Tensor:
    """float32 as integers in the same order: neighbours differ by 1."""
    bits = values.contiguous().view(torch.int32).long()
    return torch.where(bits < 0, -(bits & 0x7FFFFFFF), bits)
