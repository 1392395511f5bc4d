"""What waits for a module of PyTorch that `import quire` does not load, because loading takes long: code that runs when
somebody else imports the module, and decorators of Dynamo. And marks that Dynamo reads, without an import of it."""

import importlib
import importlib.util
import sys
import threading
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, TypeVar

import torch

#: Name of a module -> actions that have not run yet.
_WAITING: dict[str, list[Callable[[Any], object]]] = {}


def when_imported(name: str, action: Callable[[Any], object]) -> None:
    """Calls action(module) once: now if the module has been imported, else as soon as its code has run, before the
    statement that imports it returns. The module is not an attribute of its package by then."""
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)
    _WAITING.setdefault(name, []).append(action)
    if sys.modules.get(name) is not None:
        _run(importlib.import_module(name))  # which waits for another thread that imports it at this moment


def _run(module: ModuleType) -> None:
    waiting = _WAITING.get(module.__name__, [])
    while waiting:
        waiting[0](module)
        waiting.pop(0)  # not before it has run: a failed import is tried again
    _WAITING.pop(module.__name__, None)


class _Finder:
    """An entry of sys.meta_path. It finds the same modules as the other entries."""

    def __init__(self) -> None:
        self._asked = threading.local()  # another thread may look for the same module

    @property
    def asked(self) -> set[str]:
        return self._asked.__dict__.setdefault("names", set())

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        if name not in _WAITING or name in self.asked:
            return None
        self.asked.add(name)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self.asked.remove(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader:
    """Loads a module by the module's own loader, and leaves that loader in the module."""

    def __init__(self, own: Any) -> None:
        self.own = own

    def __getattr__(self, name: str) -> Any:
        return getattr(self.own, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.own.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__.loader = module.__loader__ = self.own
        self.own.exec_module(module)
        _run(module)


_FINDER = _Finder()


Function = TypeVar("Function", bound=Callable[..., object])


def allow_in_graph(function: Function) -> Function:
    """Dynamo makes calls of the function nodes of its graph."""
    when_imported("torch._dynamo", lambda dynamo: dynamo.allow_in_graph(function))
    return function


def assume_constant_result(function: Function) -> Function:
    """Dynamo calls the function while it traces, and takes the result for a constant."""
    when_imported("torch._dynamo", lambda dynamo: dynamo.assume_constant_result(function))
    return function


def mark_static(t: torch.Tensor) -> torch.Tensor:
    """As torch._dynamo.mark_static: the sizes of the tensor are constants of graphs with dynamic=True too. Returns t.

    For tensors that quire owns. If their sizes were symbols, Dynamo would give one symbol to a state and to a batch of
    the same size, and compile again for the next batch. What a graph makes has no mark, such as the scales after a step
    within it, until eager code makes them anew.
    """
    t._dynamo_static_indices = set(range(t.dim()))
    t._has_dynamo_dim_marking = True
    return t


@assume_constant_result  # Dynamo of PyTorch 2.11 takes torch.compiler's for True in every compiled function
def is_exporting() -> bool:
    """Whether torch.export traces what calls this."""
    return torch.compiler.is_exporting()
