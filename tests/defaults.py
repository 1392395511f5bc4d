"""What a caller can change for a whole process: torch.set_default_dtype and torch.set_default_device."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch.overrides import TorchFunctionMode
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
_LIBRARY, _TORCH = Path(quire.__file__).parent, Path(torch.__file__).parent


def _made_by_quire() -> bool:
    """Whether the innermost frame that is not PyTorch's, nor this file's, is of the library."""
    frame = sys._getframe(2)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if not path.is_relative_to(_TORCH):
            return path.is_relative_to(_LIBRARY)
        frame = frame.f_back
    return False


class _FromTheTest(TorchFunctionMode):
    """Tensors of a test, and parameters, are float32 on the CPU where nothing is said. What quire makes, and says
    nothing, goes to `device`, and has the default dtype."""

    def __init__(self, device: str | None) -> None:
        super().__init__()
        self.device = device

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if function in _device_constructors():
            by_quire = _made_by_quire()
            if kwargs.get("dtype") is None and ("dtype" in kwargs or not by_quire):
                if _of_default_dtype(function, args, kwargs):
                    kwargs["dtype"] = torch.float32
            if self.device is not None and by_quire and "device" not in kwargs:
                kwargs["device"] = self.device
        return function(*args, **kwargs)


def _of_default_dtype(function, args, kwargs) -> bool:
    if function in (torch.tensor, torch.as_tensor, torch.asarray):
        given = args[0] if args else kwargs.get("data", kwargs.get("obj"))
        return not hasattr(given, "dtype") and _has_floats(given)
    if function in (torch.arange, torch.range, torch.full, torch.scalar_tensor):
        return _has_floats(args) or _has_floats(list(kwargs.values()))
    return function in (torch.empty, torch.zeros, torch.ones, torch.rand, torch.randn, torch.eye, torch.linspace)


def _has_floats(values) -> bool:
    if isinstance(values, list | tuple):
        return any(map(_has_floats, values))
    return isinstance(values, float) or (isinstance(values, torch.Tensor) and values.dtype == torch.float32)


@contextlib.contextmanager
def seen_by_quire_only(name: str) -> Iterator[None]:
    """The context of that name for what the library does, while tests make the tensors that they always make."""
    if name == "meta":
        with _FromTheTest("meta"):
            yield
    else:
        with DEFAULTS[name](), _FromTheTest(None):
            yield
