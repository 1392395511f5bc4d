"""Activation functions by name, as modules take them."""

from collections.abc import Mapping

_GATED = ("geglu", "glu", "qgeglu", "reglu", "sreglu", "swiglu", "clamped_swiglu")
_ACTIVATIONS = ("gelu", "qgelu", "relu", "srelu", "silu", *_GATED)


def activation_text(what: str, name: str, parameters: Mapping[str, float] | None) -> str:
    """The text of an activation and its parameters for the operators. what: the module, for errors."""
    if name not in _ACTIVATIONS:
        raise NotImplementedError(f"{what}: activation={name!r} is not available; use one of {', '.join(_ACTIVATIONS)}")
    known = ("limit", "alpha", "glu_linear_offset") if name == "clamped_swiglu" else ()
    if wrong := [key for key in parameters or {} if key not in known]:
        raise ValueError(f"{what}: activation_params has {wrong[0]!r}, but {name} takes {', '.join(known) or 'none'}")
    return ":".join([name, *(f"{key}={float(value)!r}" for key, value in (parameters or {}).items())])


def activation_inputs(name: str) -> int:
    """Input columns per output column: 2 for a gated activation, whose first half is the gate; else 1."""
    return 2 if name in _GATED else 1
