"""Activation functions by name, as modules take them."""

from collections.abc import Mapping

from quire.functional import activations

_ACTIVATIONS = activations()


def activation_text(what: str, name: str, parameters: Mapping[str, float] | None) -> str:
    """The text of an activation and its parameters for the operators. what: the module, for errors."""
    if name not in _ACTIVATIONS:
        raise NotImplementedError(f"{what}: activation={name!r} is not available; use one of {', '.join(_ACTIVATIONS)}")
    _, known = _ACTIVATIONS[name]
    if wrong := [key for key in parameters or {} if key not in known]:
        raise ValueError(f"{what}: activation_params has {wrong[0]!r}, but {name} takes {', '.join(known) or 'none'}")
    return ":".join([name, *(f"{key}={float(value)!r}" for key, value in (parameters or {}).items())])


def activation_inputs(name: str) -> int:
    """Input columns per output column: 2 for a gated activation, whose first half is the gate; else 1."""
    inputs, _ = _ACTIVATIONS[name]
    return inputs
