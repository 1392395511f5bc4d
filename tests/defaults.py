"""What a caller can change for a whole process: torch.set_default_dtype and torch.set_default_device."""

import contextlib
import functools
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from unittest import mock

import torch
import torch._decomp.decompositions_for_jvp  # which a patched function would break
from torch._dynamo import trace_rules
from torch.utils._device import _device_constructors

import quire


@contextlib.contextmanager
def _dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


#: Name -> what makes the context. On the meta device there are no values.
DEFAULTS: dict[str, Callable[[], contextlib.AbstractContextManager]] = {
    **{str(dtype)[6:]: lambda dtype=dtype: _dtype(dtype) for dtype in (torch.bfloat16, torch.float16, torch.float64)},
    "meta": lambda: torch.device("meta"),
}


def in_turn(names: Iterable[str]) -> list[tuple[str, str]]:
    """Each name under the meta device and under one dtype, the next one each time."""
    dtypes = itertools.cycle(name for name in DEFAULTS if name != "meta")
    return [(name, default) for name in names for default in (next(dtypes), "meta")]


def randn(*shape: int) -> torch.Tensor:
    """The same numbers, in float32 on the CPU, whatever the defaults are."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3), dtype=torch.float32, device="cpu")


def under_and_without(default: str, call: Callable[[], list[torch.Tensor]]) -> list[list[torch.Tensor]]:
    """The tensors that call() returns under a default, all of which have values, and without it, from one seed."""
    results = []
    for context in (DEFAULTS[default](), contextlib.nullcontext()):
        with context:
            torch.manual_seed(0)
            results.append([tensor.detach() for tensor in call()])
    assert not any(tensor.is_meta for tensor in results[0])
    return results


_LIBRARY, _TORCH = str(Path(quire.__file__).parent), str(Path(torch.__file__).parent)
#: Functions whose result has the default dtype, and those where that depends on the numbers that they are given.
_OF_SIZES = ("empty", "zeros", "ones", "rand", "randn", "eye", "linspace", "logspace")
_OF_NUMBERS = ("tensor", "as_tensor", "asarray", "scalar_tensor", "full", "arange")


@contextlib.contextmanager
def seen_by_quire_only(name: str) -> Iterator[None]:
    """A default for what the library does. Tensors of tests are made as without it, and so are parameters, of which the
    library says that they follow the default (dtype=None)."""
    for remembers in (trace_rules.get_torch_obj_rule_map, _device_constructors):  # functions, as they are at first
        remembers()
    device = "meta" if name == "meta" else None
    seen = {function: _seen(getattr(torch, function), device) for function in (*_OF_SIZES, *_OF_NUMBERS)}
    with mock.patch.multiple(torch, **seen), contextlib.nullcontext() if device else DEFAULTS[name]():
        yield


def _seen(function: Callable, device: str | None) -> Callable:
    @functools.wraps(function)
    def make(*args, **kwargs):
        if torch.compiler.is_compiling():  # Dynamo cannot look at frames
            return function(*args, **kwargs)
        by_quire = _made_by_quire()
        follows = "dtype" in kwargs or not by_quire
        if follows and kwargs.get("dtype") is None and _has_default_dtype(function, args, kwargs):
            kwargs["dtype"] = torch.float32
        if device is not None and by_quire and "device" not in kwargs:
            kwargs["device"] = device
        return function(*args, **kwargs)

    return make


def _made_by_quire() -> bool:
    """Whether the innermost frame that is neither PyTorch's nor this file's is the library's."""
    frame = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.startswith(_TORCH):
        if frame.f_code is torch.get_default_device.__code__:  # which makes a tensor to see where it lies
            return False
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename.startswith(_LIBRARY)


def _has_default_dtype(function: Callable, args: tuple, kwargs: dict) -> bool:
    return function.__name__ in _OF_SIZES or any(map(_has_floats, [*args, *kwargs.values()]))


def _has_floats(values: object) -> bool:
    return any(map(_has_floats, values)) if isinstance(values, list | tuple) else isinstance(values, float)
