"""What a layer knows of delayed scaling, under TransformerEngine's names and in its order."""

from dataclasses import dataclass

import torch

from quire.delayed import delayed_state

#: Of FP8GlobalStateManager.get_meta_tensor_key: whether forward -> key. Key -> the name in delayed_state, slots.
KEYS = {True: "scaling_fwd", False: "scaling_bwd"}
_KINDS = {"scaling_fwd": ("fwd", 3), "scaling_bwd": ("bwd", 2)}


@dataclass(frozen=True, eq=False)
class ScalingMeta:
    """scale: float32 [n]. amax_history: float32 [L, n], whose row 0 has the amaxes of the running step. n counts, for
    each matmul of the layer and for each group of rows, x, w and y, or dy and dx."""

    scale: torch.Tensor
    amax_history: torch.Tensor


def fp8_meta(self: torch.nn.Module) -> dict[str, ScalingMeta]:
    """Copies of the scales and amaxes of delayed scaling: "scaling_fwd" and "scaling_bwd". Empty if the layer has not
    run under delayed scaling.

    They are those of the running step, which ends when the next autocast begins. They can be read and not written;
    quire.set_delayed_state() changes the state.
    """
    states = list(delayed_state(self).values())
    if not states:
        return {}
    with torch.inference_mode():  # so that writing to the copies, which would change nothing, raises
        return {key: ScalingMeta(_of(states, "scale", key), _of(states, "amax_history", key)) for key in _KINDS}


def _of(states: list[dict[str, torch.Tensor]], kind: str, key: str) -> torch.Tensor:
    direction, slots = _KINDS[key]
    found = [state[f"{kind}_{direction}"].unflatten(-1, (slots, -1)).transpose(-1, -2).flatten(-2) for state in states]
    if kind == "scale":
        return torch.cat(found)
    rows = max(len(history) for history in found)
    return torch.cat([torch.nn.functional.pad(history, (0, 0, 0, rows - len(history))) for history in found], -1)
