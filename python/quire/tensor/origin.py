"""Where a quantized tensor was read from: the information with which quire.io.save writes the same bytes again."""

from __future__ import annotations

import copy
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

_REMEDY = "the file is damaged or was not written by quire; save the tensor again"


@dataclass(frozen=True, eq=False)
class Origin:
    """Where a quantized weight was read from, as the attribute QuantizedTensor.origin keeps it. So quire.io.save can
    write it back in the same form. It does not contain the codes and scales of the weight.

    Args:
        dialect: the dialect, such as "modelopt".
        layout: which of its layouts, such as "NVFP4".
        names: role of a tensor, such as "data" or "scale" -> its name in the file.
        dtypes: role -> the dtype in the file.
        shapes: role -> the shape in the file.
        verbatim: role -> a tensor of the file that belongs to the layer and is not a part of the weight. It is kept for
            saving.
        parts: the origins of the layers from which the weight was joined, in the order of its rows or matrices; or
            empty.
    """

    dialect: str
    layout: str
    names: Mapping[str, str] = field(default_factory=dict)
    dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    verbatim: Mapping[str, torch.Tensor] = field(default_factory=dict)
    parts: tuple[Origin, ...] = ()

    def state(self) -> dict[str, Any]:
        """Plain values that torch.load(weights_only=True) can read."""
        shapes = {role: tuple(shape) for role, shape in self.shapes.items()}
        plain = {"names": dict(self.names), "dtypes": dict(self.dtypes), "shapes": shapes}
        parts = [part.state() for part in self.parts]
        named = {"dialect": self.dialect, "layout": self.layout}
        return {**named, **plain, "verbatim": dict(self.verbatim), "parts": parts}

    @classmethod
    def of_state(cls, state: object) -> Origin:
        """The inverse of state(). The state can come from anywhere: raises TypeError if state() does not give such
        values.

        Args:
            state: the result of state().
        """
        kinds = {"dialect": str, "layout": str, "names": dict, "dtypes": dict, "shapes": dict, "verbatim": dict}
        kinds |= {"parts": list}
        each = {"names": str, "dtypes": torch.dtype, "shapes": tuple, "verbatim": torch.Tensor}
        holds = isinstance(state, dict) and state.keys() == kinds.keys()
        holds = holds and all([isinstance(state[name], kind) for name, kind in kinds.items()])
        if not holds or not all(
            isinstance(role, str) and isinstance(value, kind)
            for name, kind in each.items()
            for role, value in state[name].items()
        ):
            raise TypeError(f"a saved Origin: it must be a dict of {', '.join(kinds)}, got {type(state)}; {_REMEDY}")
        return cls(**{**state, "parts": tuple(map(cls.of_state, state["parts"]))})


class Kept:
    """An origin that the aliases of a tensor share: a write through one alias deletes it for all of them."""

    def __init__(self, origin: Origin) -> None:
        self.origin: Origin | None = origin


class Seal:
    """An origin, and the version of each buffer at the time when it was true. So writes are noticed that reach only the
    buffers, such as those of a compiled graph."""

    def __init__(self, kept: Kept, buffers: Sequence[torch.Tensor]) -> None:
        self.kept, self.buffers = kept, tuple(buffers)
        self.versions = tuple(map(_version, self.buffers))

    def origin(self, buffers: Sequence[torch.Tensor]) -> Origin | None:
        same = len(buffers) == len(self.buffers) and all(map(operator.is_, buffers, self.buffers))
        return self.kept.origin if same and self.versions == tuple(map(_version, buffers)) else None

    def __deepcopy__(self, memo: dict[int, Any]) -> Seal | None:
        """torch.Tensor.__deepcopy__ copies all attributes; memo has the copies of the buffers."""
        origin = self.origin(self.buffers)
        return None if origin is None else Seal(Kept(origin), [copy.deepcopy(t, memo) for t in self.buffers])


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
