"""Checkpoints of TransformerEngine, whose layers write extra state."""

import io
import warnings

import torch


def drop_extra_state(module: torch.nn.Module, state_dict: dict[str, object], prefix: str, *older: str) -> None:
    """Takes TransformerEngine's `_extra_state` of a module out of a state dict that is being loaded, and warns if it
    holds something: quire's modules have none. older: names that earlier versions of it gave the entry."""
    extra = {name: state_dict.pop(prefix + name, None) for name in ("_extra_state", *older)}
    for name in [name for name, value in extra.items() if _holds_something(value)]:
        warnings.warn(
            f"quire.{type(module).__name__}: {prefix}{name}, TransformerEngine's state of delayed scaling, is pickled "
            "and not read; scales start anew. To restore it, call "
            "quire.set_delayed_state(model, quire.io.te_states(model, state_dict))",
            stacklevel=2,
        )


def _holds_something(extra: object) -> bool:
    """TransformerEngine's is None, an empty tensor, bytes or a file; the last of recipes with a state."""
    if isinstance(extra, torch.Tensor):
        return extra.numel() > 0
    return bool(extra.getbuffer().nbytes if isinstance(extra, io.BytesIO) else extra)
