"""Delayed scaling: the state of a layer, and the step that turns amaxes into scales (numerics.md 1.4-1.7).

Forward and backward passes collect amaxes, by operators that take the state as tensors; nothing else happens to it
while a step is computed, so that a recomputed forward pass sees the scales of the first one. When the outermost
autocast of a delayed recipe is next entered with grad enabled, step() gives the layers new scale tensors: new ones,
because whoever holds an old one, such as a backward pass that is still to come, must keep its values.

No Python object changes while a layer runs: a compiled graph could not do that (within a checkpoint, Dynamo refuses).
Which recipe a state ran under last is therefore a number in a tensor of the state, which only kernels read.
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
