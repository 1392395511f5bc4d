"""Delayed scaling: the state of a layer, and the step that turns amaxes into scales (numerics.md 1.4-1.7).

Forward and backward passes collect amaxes, by operators that take the state as tensors. When the outermost autocast of
a delayed recipe is next entered with grad enabled, step() gives the layers new scale tensors. README.md in this folder
has the reasons.
"""

from quire.delayed.checkpoint import delayed_state, set_delayed_state
from quire.delayed.forward import (
    RecordedScales,
    collect,
    collect_output,
    collect_weight,
    measure,
    quantize,
    scales,
)
from quire.delayed.rules import Rule
from quire.delayed.state import DelayedState
from quire.delayed.step import enter, leave

__all__ = [
    "DelayedState",
    "RecordedScales",
    "Rule",
    "collect",
    "collect_output",
    "collect_weight",
    "delayed_state",
    "enter",
    "leave",
    "measure",
    "quantize",
    "scales",
    "set_delayed_state",
]
