"""Where tests that take `device` compute: one of these, named by --device. A new one joins by a line."""

import contextlib
import functools
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._device import _device_constructors


@contextlib.contextmanager
def _cpu():
    yield torch.device("cpu")


@contextlib.contextmanager
def _quiretest():
    from device.watch import nothing_wrong

    with nothing_wrong() as device:
        yield device


@contextlib.contextmanager
def _cuda():
    import quire

    yield torch.device("cuda", 0)
    quire.synchronize("cuda")  # raises what a kernel has found and nobody has heard


#: What a test runs within, which gives its device.
DEVICES = {"cpu": _cpu, "quiretest": _quiretest, "cuda": _cuda}


def absence_of(name: str) -> str:
    """Why no test computes on the device here; "" where tests do."""
    if name != "cuda" or torch.cuda.is_available():
        return ""
    return "there is no GPU" if torch.version.cuda else f"PyTorch {torch.__version__} was built without CUDA"


def launched(place: torch.device) -> bool:
    """Whether a kernel was launched since the test began, or its launches were last counted. Only the test device
    counts: what launches there does so on a GPU too."""
    if place.type in ("cpu", "cuda"):
        return True
    from device.device import counts

    return counts().get("launch", 0) > 0


def prepare(name: str) -> None:
    """Makes the device known to PyTorch, which must be before the first backward pass of the process."""
    if name == "quiretest":
        import device.device  # noqa: F401
    if name == "cuda" and torch.cuda.is_available():
        _draw_on_the_cpu()
        torch.equal = _compare_on_the_cpu(torch.equal)


def _draw_on_the_cpu() -> None:
    """Makes PyTorch's functions take a generator of the CPU for tensors of a GPU, as the test device does: the inputs
    of a test are the same on every device."""
    _device_constructors()  # keeps those of the functions as they are, which take the default device
    for name in ("rand", "randn", "randint", "randperm", "normal", "bernoulli", "multinomial"):
        setattr(torch, name, _new_by_generator(getattr(torch, name)))
    for name in ("normal_", "uniform_", "random_", "bernoulli_", "exponential_"):
        setattr(torch.Tensor, name, _in_place_by_generator(getattr(torch.Tensor, name)))


def _new_by_generator(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def draw(*args: Any, **options: Any) -> Any:
        generator = options.get("generator")
        place = torch.device(options.get("device") or torch.get_default_device())
        if generator is None or generator.device.type == place.type:
            return function(*args, **options)
        needs_gradient = options.pop("requires_grad", False)
        args = tuple(a.cpu() if isinstance(a, torch.Tensor) else a for a in args)
        with torch.device("cpu"):
            drawn = function(*args, **{**options, "device": None} if "device" in options else options)
        return drawn.to(place).requires_grad_(needs_gradient)

    return draw


def _in_place_by_generator(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def draw(self: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        generator = options.get("generator")
        if generator is None or generator.device.type == self.device.type:
            return method(self, *args, **options)
        with torch.no_grad():
            return self.copy_(method(torch.empty_like(self, device="cpu"), *args, **options))

    return draw


def _compare_on_the_cpu(equal: Callable[..., bool]) -> Callable[..., bool]:
    """torch.equal that compares tensors of different devices, as the test device does."""

    @functools.wraps(equal)
    def compare(a: torch.Tensor, b: torch.Tensor) -> bool:
        return equal(a, b) if a.device == b.device else equal(a.cpu(), b.cpu())

    return compare


def leave_broken(device: str, failure: str) -> None:
    """Ends a process of pytest-xdist, which starts another one, if a kernel has broken its GPU's context: every later
    call there would fail too."""
    if device != "cuda" or "PYTEST_XDIST_WORKER" not in os.environ:
        return
    try:
        torch.cuda.synchronize()
    except Exception as error:
        text = f"{failure}\nThis process ends, because its GPU's context is broken: {error}"
        print(text, file=sys.__stderr__, flush=True)
        os._exit(1)
