"""Plants a bug in this process, and in the processes that it starts, without a change of any source of quire: a fault
replaces what a name of quire stands for, or an operator's kernel, or a kernel of the core."""

import ctypes
import functools
import importlib
import importlib.abc
import importlib.util
import inspect
import os
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

#: The bug that sitecustomize.py plants, by its name.
VARIABLE = "QUIRE_PLANTED_BUG"
PYTHON_TESTS = Path(__file__).parents[1] / "python"


class Fault(Protocol):
    def check(self) -> None:
        """Raises LookupError unless there is what the fault changes. Changes nothing."""

    def plant(self) -> None:
        """Changes it for the rest of the process. quire has been imported."""


@dataclass(frozen=True)
class Kernel:
    """A fault of tests/planted/kernels.cpp, in all kernels of the CPU that compute the problem."""

    name: str

    def check(self) -> None:
        names = _library().planted_names().decode().split()
        if self.name not in names:
            raise LookupError(f"tests/planted/kernels.cpp has no fault {self.name!r}, but {', '.join(names)}")

    def plant(self) -> None:
        self.check()
        _library().plant(self.name.encode())


@dataclass(frozen=True)
class Name:
    """What a name stands for. `place`: a module and a name in it, "quire.recipe:Recipe.specs_for". A function of a
    module is replaced in all modules of quire that have it. `call`: the replacement, which gets the original function
    and then the arguments."""

    place: str
    call: Callable[..., Any]

    def check(self) -> None:
        self._found()

    def plant(self) -> None:
        owner, name, original = self._found()
        faulty = _function(self.call, original)
        setattr(owner, name, faulty)
        if not isinstance(owner, ModuleType):
            return
        for module in [m for n, m in sys.modules.items() if n.partition(".")[0] == "quire"]:
            for each in [key for key, value in vars(module).items() if value is original]:
                setattr(module, each, faulty)

    def _found(self) -> tuple[Any, str, Any]:
        module, _, path = self.place.partition(":")
        owner = importlib.import_module(module)
        *outer, name = path.split(".")
        for each in outer:
            owner = getattr(owner, each, None)
        missing = object()
        found = missing if owner is None else inspect.getattr_static(owner, name, missing)
        if found is missing:
            raise LookupError(f"there is no {self.place}")
        return owner, name, found


def _function(call: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def faulty(*args: Any, **options: Any) -> Any:
        return call(original, *args, **options)

    return faulty


@dataclass(frozen=True)
class Operator:
    """The kernel of an operator for a dispatch key. `call`: the replacement, which gets a function that runs the
    original kernel and then the arguments."""

    name: str
    key: str
    call: Callable[..., Any]

    def check(self) -> None:
        import torch

        exists = torch._C._dispatch_has_kernel(self.name)
        if not exists or not torch._C._dispatch_has_computed_kernel_for_dispatch_key(self.name, self.key):
            raise LookupError(f"there is no operator {self.name} with a kernel for {self.key}")

    def plant(self) -> None:
        import torch

        self.check()
        kernel = torch.library.get_kernel(self.name, self.key)
        namespace, _, name = self.name.partition("::")
        library = torch.library.Library(namespace, "IMPL")

        def faulty(keys: Any, *args: Any) -> Any:
            return self.call(functools.partial(kernel.call_boxed, keys), *args)

        library.impl(name, faulty, self.key, with_keyset=True)
        _kept.append(library)


#: Kernels go with their libraries.
_kept: list[Any] = []


@dataclass(frozen=True)
class Bug:
    """contract: what says otherwise, a section of a page of docs or a docstring. tests: those of which one fails, as a
    file below tests/python and options of pytest."""

    name: str
    contract: str
    fault: Fault
    tests: str

    def file(self) -> Path:
        return (PYTHON_TESTS / shlex.split(self.tests)[0]).resolve()

    def arguments(self) -> list[str]:
        """For pytest."""
        return [str(self.file()), *shlex.split(self.tests)[1:]]


@functools.cache
def _library() -> ctypes.CDLL:
    import quire

    build = Path(quire.__file__).with_name("lib").resolve().parent
    path = build / "tests/planted/libplanted.so"
    if not path.exists():
        raise LookupError(f"the faults of kernels are not built: no {path}; run ./dev test, which builds them")
    library = ctypes.CDLL(str(path))
    library.planted_names.restype = ctypes.c_char_p
    library.plant.argtypes, library.plant.restype = [ctypes.c_char_p], ctypes.c_bool
    return library


class _Finder(importlib.abc.MetaPathFinder):
    """Plants a bug when quire has been imported."""

    def __init__(self, name: str) -> None:
        self._name = name

    def find_spec(self, name: str, path: object = None, target: object = None) -> Any:
        if name != "quire":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        run = spec.loader.exec_module

        def run_and_plant(module: ModuleType) -> None:
            run(module)
            from planted.bugs import BUGS

            found = [bug for bug in BUGS if bug.name == self._name]
            if not found:
                raise LookupError(f"{VARIABLE}: tests/planted/bugs.py has no bug {self._name!r}")
            found[0].fault.plant()

        spec.loader.exec_module = run_and_plant
        return spec


def plant_at_import() -> None:
    """Plants the bug that the variable names, if it names one, as soon as quire has been imported."""
    if name := os.environ.get(VARIABLE):
        sys.meta_path.insert(0, _Finder(name))
