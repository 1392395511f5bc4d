"""Where a quantized tensor was read from: what a file of another tool needs to get the same bytes back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

_REMEDY = "the file is damaged or was not written by quire; save the tensor again"


@dataclass(frozen=True, eq=False)
class Origin:
    """The place of a layer in a checkpoint. It holds nothing that the layer's buffers hold, so it cannot contradict
    them.

    dialect, layout: who wrote it, and under which of the dialect's algorithms, such as "modelopt" and "NVFP4".
    names: role of a tensor -> its name in the file. The roles are those of quire.io.layout.
    dtypes, shapes: role -> as in the file. Scales of one element can be 0-d or [1], and 16 or 32 bits.
    verbatim: role -> tensor of the file that belongs to the layer, and that quire does not use.
    """

    dialect: str
    layout: str
    names: Mapping[str, str] = field(default_factory=dict)
    dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    verbatim: Mapping[str, torch.Tensor] = field(default_factory=dict)

    def state(self) -> dict[str, Any]:
        """Plain values, which torch.load(weights_only=True) reads."""
        shapes = {role: tuple(shape) for role, shape in self.shapes.items()}
        plain = {"names": dict(self.names), "dtypes": dict(self.dtypes), "shapes": shapes}
        return {"dialect": self.dialect, "layout": self.layout, **plain, "verbatim": dict(self.verbatim)}

    @classmethod
    def of_state(cls, state: object) -> Origin:
        """The inverse of state(), from wherever it came. Raises TypeError for what state() does not give."""
        kinds = {"dialect": str, "layout": str, "names": dict, "dtypes": dict, "shapes": dict, "verbatim": dict}
        each = {"names": str, "dtypes": torch.dtype, "shapes": tuple, "verbatim": torch.Tensor}
        holds = isinstance(state, dict) and state.keys() == kinds.keys()
        holds = holds and all([isinstance(state[name], kind) for name, kind in kinds.items()])
        if not holds or not all(
            isinstance(role, str) and isinstance(value, kind)
            for name, kind in each.items()
            for role, value in state[name].items()
        ):
            raise TypeError(f"a saved Origin: it must be a dict of {', '.join(kinds)}, got {type(state)}; {_REMEDY}")
        return cls(**state)
