"""Where tests that take `device` compute: one of these, named by --device. A new one joins by a line."""

import contextlib
import os
import sys

import torch


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
_allocations = 0


def absence_of(name: str) -> str:
    """Why no test computes on the device here; "" where tests do."""
    if name != "cuda" or torch.cuda.is_available():
        return ""
    return "there is no GPU" if torch.version.cuda else f"PyTorch {torch.__version__} was built without CUDA"


def launched(place: torch.device) -> bool:
    """Whether a kernel was launched since the test began, or its launches were last counted."""
    global _allocations
    if place.type == "cuda":  # whoever launches something has allocated its result
        before, _allocations = _allocations, torch.cuda.memory_stats()["allocation.all.allocated"]
        return _allocations > before
    from device.device import counts

    return place.type == "cpu" or counts().get("launch", 0) > 0


def prepare(name: str) -> None:
    """Makes the device known to PyTorch, which must be before the first backward pass of the process."""
    if name == "quiretest":
        import device.device  # noqa: F401


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
