"""The test device in Python. Importing this makes it a device of PyTorch, for good: before the first backward pass of
the process, which starts a thread for each device that there is."""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

import quire


def _library() -> Path:
    """Beside the libraries of quire that are in use, in the build folder."""
    build = Path(quire.__file__).with_name("lib").resolve().parent
    library = Path(os.environ.get("QUIRE_TEST_DEVICE", build / "tests/device/libtestdevice.so"))
    if not library.exists():
        raise ImportError(f"the test device is not built: no {library}; run ./dev test, which builds it")
    return library


torch.ops.load_library(_library())
_ops = torch.ops.testdevice
NAME: str = _ops.device_name()
#: Whether its kernels are those of the CPU, and not quire's CUDA kernels on an emulator.
HOST_ROWS = os.environ.get("QUIRE_TEST_DEVICE_ROWS", "host") == "host"
COUNT = 2


@contextlib.contextmanager
def _current(device: int | torch.device) -> Iterator[None]:
    """What torch.cuda.device is: unpickling enters it."""
    before = _ops.current_device()
    _set_current(device)
    try:
        yield
    finally:
        _ops.set_device(before)


def _set_current(device: int | str | torch.device) -> None:
    _ops.set_device(device if isinstance(device, int) else torch.device(device).index)


def _index(device: int | str | torch.device | None) -> int:
    """None, and a device without an index: the current one."""
    index = device if isinstance(device, int) else torch.device(device or NAME).index
    return _ops.current_device() if index is None else index


def _attribute(name: str) -> object:
    """Inductor looks for "Scheduling" when it first needs to know how to write code for the device: its own modules,
    which take a second to import, are there by then. What it would take from here it registers without a version, so
    inductor.py registers all itself."""
    if name == "Scheduling":
        import device.inductor  # noqa: F401
    raise AttributeError(f"module 'torch.{NAME}' has no attribute {name!r}")


def _module() -> types.ModuleType:
    """torch.quiretest, with the functions that PyTorch asks of a device."""
    module = types.ModuleType(f"torch.{NAME}")
    functions = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_lazy_init": lambda: None,
        "_is_in_bad_fork": lambda: False,
        "device_count": lambda: COUNT,
        "current_device": _ops.current_device,
        "set_device": _set_current,
        "device": _current,
        "synchronize": lambda device=None: torch.accelerator.synchronize(device or NAME),
        "current_stream": lambda device=None: torch.accelerator.current_stream(device or NAME),
        "manual_seed_all": _ops.manual_seed,
        "get_rng_state": lambda device=None: _ops.get_rng_state(_index(device)),
        "set_rng_state": lambda state, device=None: _ops.set_rng_state(_index(device), state),
        "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16],
        "stream": lambda stream: contextlib.nullcontext() if stream is None else stream,
        "Stream": torch.Stream,
        "Event": torch.Event,
        "__getattr__": _attribute,
    }
    vars(module).update(functions)
    return module


torch.utils.rename_privateuse1_backend(NAME)
torch._register_device_module(NAME, _module())
torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)


def _dlpack_device(tensor: torch.Tensor) -> tuple[object, int]:
    """PyTorch's own raises "Unknown device type quiretest for Dlpack"."""
    if tensor.device.type != NAME:
        return _torch_dlpack_device(tensor)
    return torch.utils.dlpack.DLDeviceType.kDLExtDev, tensor.device.index


_torch_dlpack_device = torch.Tensor.__dlpack_device__
torch.Tensor.__dlpack_device__ = _dlpack_device


@atexit.register
def _finish() -> None:
    """No kernel and no thread of a backward pass runs while the process takes down what it uses."""
    _ops.finish_backward_passes()
    for index in range(COUNT):
        torch.accelerator.synchronize(torch.device(NAME, index))


def counts() -> dict[str, int]:
    """What the device did since the last call, by kind: launch, synchronize, item, "copy host to device", ..."""
    return {what: int(number) for what, number in (line.split("\t") for line in _ops.counts().splitlines())}


def waits() -> dict[str, int]:
    """All of counts() but launches: whatever the host waited for, and copies to and from it. Nothing, of good code.
    The first use of a CUDA row waits for the row's self-check, which is not counted here."""
    return {what: number for what, number in counts().items() if what not in ("launch", "self-check")}


@dataclass
class Violation:
    """kind: "host access", "host memory", "race", "beyond memory", "list kept" or "device address in a kernel"."""

    kind: str
    detail: str
    frames: list[str]

    def __str__(self) -> str:
        """With quire's frames, or all if it has none."""
        ours = [frame for frame in self.frames if "(libquire" in frame]
        return "\n    ".join([f"{self.kind}: {self.detail}", *(ours or self.frames)])


def violations() -> list[Violation]:
    """Mistakes since the last call, with the frames of the thread that made them, innermost first, without Python's."""
    found: list[Violation] = []
    for line in _ops.violations().splitlines():
        if line.startswith("  "):
            if "(libpython" not in line:
                found[-1].frames.append(line.strip())
        else:
            found.append(Violation(*line.split(": ", 1), frames=[]))
    return found


def lists() -> int:
    """Arrays of the host that launches were given since the last call."""
    return _ops.lists()


class Launches:
    """with Launches() as launches: ...; launches.names are kernels and launches.streams where they ran, in order."""

    def __enter__(self) -> Launches:
        _ops.launches(True)
        return self

    def __exit__(self, *_: object) -> None:
        pairs = [line.rsplit(" @", 1) for line in _ops.launches(False).splitlines()]
        pairs = [pair for pair in pairs if pair[0] != "poison"]
        self.names, self.streams = ([pair[i] for pair in pairs] for i in range(2))


class Graph:
    """with Graph() as graph: captures what is launched, on a stream of its own. graph.replay() runs it on the current
    stream."""

    def __enter__(self) -> Graph:
        gc.collect()  # as torch.cuda.graph does: what nobody refers to any more is not to be captured
        self.stream = torch.Stream(device=NAME)
        self.stream.wait_stream(torch.accelerator.current_stream())
        self.stream.__enter__()
        self.number = _ops.begin_capture()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            _ops.end_capture()
        except RuntimeError:
            if kind is None:
                raise
        finally:
            self.stream.__exit__(None, None, None)

    def __del__(self) -> None:
        if hasattr(self, "number"):
            _ops.drop_graph(self.number)

    def replay(self) -> None:
        _ops.replay(self.number)
