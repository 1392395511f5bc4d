"""Which layer of a model is computing, in its forward and in its backward pass."""

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterator

import torch
from torch.utils import _pytree as pytree


def paths_of(model: torch.nn.Module) -> dict[torch.nn.Module, str]:
    """The path in the model of each of its modules, without the wrappers of torch.compile."""
    return {
        module: ".".join([name for name in path.split(".") if name != "_orig_mod"])
        for path, module in model.named_modules()
    }


@contextlib.contextmanager
def told(model: object, tell: Callable[[str], object]) -> Iterator[None]:
    """Within it tell(path) is called whenever another module of the model begins to compute, also in backward, by the
    thread that computes. path: its name in the model; "" for the model itself, and for what no module of it computes.
    Of what is no module it tells nothing."""
    if not isinstance(model, torch.nn.Module):
        yield
        return
    layers = _Layers(model, tell)
    # Not hooks of the modules: with one, torch.nn.TransformerEncoderLayer would not take its fast path.
    handles = (
        torch.nn.modules.module.register_module_forward_pre_hook(layers.enter),
        torch.nn.modules.module.register_module_forward_hook(layers.leave, always_call=True),
    )
    try:
        with warnings.catch_warnings():
            # Of a module that torch.compile has wrapped: these hooks need not run in its graph.
            warnings.filterwarnings("ignore", r"Using `torch\.compile\(module\)` when there are global hooks")
            yield
    finally:
        for handle in (*handles, *layers.of_nodes):
            handle.remove()


class _Thread(threading.local):
    def __init__(self) -> None:
        self.told = ""
        #: Of each module whose forward is running: its path, and what was told before it began. In backward a
        #: recomputed forward begins within a node of another module.
        self.running: list[tuple[str, str]] = []


#: Hooks of nodes up to which none is forgotten.
_FEW_HOOKS = 1000


class _Layers:
    """The modules whose forward is running, and the nodes of autograd that they have made."""

    def __init__(self, model: torch.nn.Module, tell: Callable[[str], object]) -> None:
        self._tell_caller = tell
        self._paths = paths_of(model)
        self._thread = _Thread()
        #: Lies in the metadata of nodes of which is known who has made them.
        self._known = object()
        self.of_nodes: list[torch.utils.hooks.RemovableHandle] = []
        self._most = _FEW_HOOKS

    def enter(self, module: torch.nn.Module, args: tuple) -> None:
        """Before the forward of a module, of any model and in any thread."""
        if module in self._paths and not torch.compiler.is_compiling():
            path = self._paths[module]
            self._thread.running.append((path, self._thread.told))
            self._tell(path)

    def leave(self, module: torch.nn.Module, args: tuple, result: object) -> None:
        """After it, also after an error. It does not see what was passed by keyword: PyTorch does not remove all of a
        hook that does."""
        if module in self._paths and self._thread.running and not torch.compiler.is_compiling():
            path, before = self._thread.running.pop()
            self._know(path, args, result)
            self._tell(before)
            self._forget_hooks()

    def _forget_hooks(self) -> None:
        """Those of nodes that are gone, from time to time."""
        if len(self.of_nodes) > self._most:
            self.of_nodes[:] = [handle for handle in self.of_nodes if handle.hooks_dict_ref() is not None]
            self._most = max(_FEW_HOOKS, 2 * len(self.of_nodes))

    def _tell(self, path: str) -> None:
        self._thread.told = path
        self._tell_caller(path)

    def _know(self, path: str, inputs: object, results: object) -> None:
        """The nodes between inputs and results, of which no inner module has made any, are this module's."""
        ends, ahead = _nodes_of(inputs), list(_nodes_of(results))
        while ahead:
            node = ahead.pop()
            if node is None or node in ends or self._known in node.metadata:
                continue
            node.metadata[self._known] = True
            self.of_nodes.append(node.register_prehook(lambda gradients: self._tell(path) and None))
            self.of_nodes.append(node.register_hook(lambda *gradients: self._tell("") and None))
            ahead += [following for following, _ in node.next_functions]


def _nodes_of(values: object) -> set[object]:
    return {value.grad_fn for value in pytree.tree_leaves(values) if isinstance(value, torch.Tensor)} - {None}
