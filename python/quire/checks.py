"""Arguments of a wrong kind or out of range, refused in words."""

import contextlib
import difflib
import functools
import inspect
import math
import numbers
import re
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import torch

_WORDS: dict[object, str] = {
    bool: "a bool",
    int: "an int",
    float: "a float",
    float | int: "a number",
    torch.Tensor: "a tensor",
    torch.dtype: "a torch.dtype",
    torch.nn.Module: "a torch.nn.Module",
    torch.optim.Optimizer: "a torch.optim.Optimizer",
    Mapping: "a dict",
    str | Path: "a path",
    Callable: "a function",
}


def check_type(what: str, kind: type | types.UnionType, **values: object) -> None:
    """Raises TypeError unless each value is of the kind; what: the operation, named in the error. A bool is no int;
    integers of numpy are, and its numbers are numbers."""
    for name, value in values.items():
        fits = isinstance(value, kind) or _takes(kind, value)
        if not fits or (kind is int and isinstance(value, bool)):
            raise TypeError(f"{what}: {name} must be {_word(kind)}, got {describe(value)}")


def _takes(kind: type | types.UnionType, value: object) -> bool:
    """Whether Python itself converts a value to such a number."""
    if isinstance(value, torch.Tensor):
        return False
    return (kind is int and hasattr(value, "__index__")) or (kind == float | int and hasattr(value, "__float__"))


def _word(kind: type | types.UnionType) -> str:
    if kind not in _WORDS and isinstance(kind, types.UnionType):
        return " or ".join([_word(one) for one in kind.__args__ if one is not torch.SymInt])
    return _WORDS.get(kind) or f"a {kind.__name__}"


def check_type_or_none(what: str, kind: type | types.UnionType, **values: object) -> None:
    """check_type() of those that are not None."""
    check_type(what, kind, **{name: value for name, value in values.items() if value is not None})


def check_options(what: str, known: Iterable[str], given: Iterable[str]) -> None:
    """Raises TypeError for a keyword that is not known, with the known ones and those that are near."""
    known = list(known)
    for name in given:
        if name not in known:
            raise TypeError(
                f"{what}: there is no option {name!r}; the options are {', '.join(known)}{near(name, known)}"
            )


def with_known_options(construct: Callable[..., None]) -> Callable[..., None]:
    """A constructor for whose unknown keywords check_options() has the error, in place of Python's."""
    known = [name for name in inspect.signature(construct).parameters if name != "self"]

    @functools.wraps(construct)
    def __init__(self: object, *args: object, **keywords: object) -> None:
        check_options(f"quire.{type(self).__name__}", known, keywords)
        construct(self, *args, **keywords)

    return __init__


@contextlib.contextmanager
def errors_name(what: str) -> Iterator[None]:
    """Decorates the constructor of a layer that makes other layers: an error of their constructors names `what`, which
    is what the caller makes."""
    try:
        yield
    except (RuntimeError, TypeError, ValueError) as error:
        first, *others = error.args or ("",)
        if isinstance(first, str):
            error.args = (re.sub(r"^(quire[.\w]*|route):", f"{what}:", first), *others)
        raise


def near(name: str, known: Iterable[str]) -> str:
    """How an error ends that refuses a name: with those that it may have been meant to be, if there are any."""
    known = [] if name.startswith("_") or not name else list(known)
    likely = difflib.get_close_matches(name, known, n=1)
    likely = likely or difflib.get_close_matches(name.lower(), known, n=1) or [one for one in known if name in one]
    return f"; did you mean {' or '.join(map(repr, likely))}?" if likely else ""


def check_names(
    what: str,
    remedy: str,
    state: Mapping[str, object],
    own: Mapping[str, object],
    *,
    all_of_them: bool = False,
    kind: str = "layers",
) -> None:
    """Raises ValueError if a state names layers that the model has not, or does not name all of them. own: the layers
    of the model, by name. kind: what the names are of."""
    missing = own.keys() - state.keys() if all_of_them else set()
    for names, words in (
        (missing, f"the model has {kind} that the state has not"),
        (state.keys() - own.keys(), f"the state has {kind} that the model has not"),
    ):
        if names:
            raise ValueError(f"{what}: {words}: {', '.join(map(repr, sorted(names, key=repr)))}; {remedy}")


def check_dense(what: str, **tensors: torch.Tensor) -> None:
    """Raises TypeError unless each tensor has its values in plain memory, before anybody asks for its shape."""
    for name, tensor in tensors.items():
        if tensor.is_nested or tensor.is_quantized or tensor.layout != torch.strided:
            kind = "nested" if tensor.is_nested else "quantized by PyTorch" if tensor.is_quantized else tensor.layout
            raise TypeError(
                f"{what}: {name} must be a dense tensor, got one that is {kind}; use .to_dense(), .dequantize() or, of "
                "a nested one, .to_padded_tensor(0)"
            )


def check_sizes(what: str, **sizes: object) -> None:
    """Raises TypeError unless each is an int, or what Python takes as one, and ValueError below 0."""
    for name, size in sizes.items():
        if isinstance(size, bool) or not hasattr(size, "__index__"):
            raise TypeError(f"{what}: {name} must be an int, got {describe(size)}")
        if size < 0:
            raise ValueError(f"{what}: {name} must be at least 0, got {size}")


def check_eps(what: str, eps: object) -> None:
    """Raises TypeError unless it is a number, and ValueError unless it is finite and at least 0: variance + eps has a
    root."""
    if isinstance(eps, bool) or not isinstance(eps, numbers.Real):
        raise TypeError(f"{what}: eps must be a number, got {describe(eps)}")
    if not 0 <= eps < math.inf:
        raise ValueError(f"{what}: eps must be finite and at least 0, got {eps}")


def is_plain(value: object, dtype: torch.dtype, may_be_meta: bool) -> bool:
    """Whether a value is a dense tensor of that dtype, with values unless it may be without."""
    if not isinstance(value, torch.Tensor) or value.is_nested or value.layout != torch.strided:
        return False
    return value.dtype == dtype and (may_be_meta or not value.is_meta)


def received(value: object) -> str:
    """A value as an error shows it that expects a tensor of a state."""
    if not isinstance(value, torch.Tensor):
        return describe(value)
    shape = "nested" if value.is_nested else f"{list(value.shape)}"
    layout = "" if value.layout == torch.strided else f" {value.layout}"
    return f"{value.dtype} {shape}{layout}{' on meta' if value.is_meta else ''}"


def signed64(value: int, name: str) -> int:
    """The signed integer of the same 64 bits; operators take no others. Raises ValueError out of range, TypeError for
    what is no int."""
    check_type("quire", int, **{name: value})
    if not -(2**63) <= value < 2**64:
        raise ValueError(f"{name} must fit into 64 bits, -2**63 <= {name} < 2**64; got {value}")
    return value - 2**64 if value >= 2**63 else value


def counted(n: int, what: str) -> str:
    """A number of things, in the plural unless it is 1: "1 entry", "2 entries", "0 layers"."""
    several = f"{what[:-1]}ies" if what.endswith("y") else f"{what}s"
    return f"{n} {what if n == 1 else several}"


def describe(value: object) -> str:
    """A value as an error shows it: of a large one its type."""
    text = type(value).__name__ if isinstance(value, torch.Tensor) else repr(value)
    return text if len(text) < 80 else f"a {type(value).__name__}"
