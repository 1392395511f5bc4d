"""Which layer of a model is computing, in its forward and in its backward pass."""

import contextlib
from collections.abc import Callable, Iterator

import torch
from torch.utils import _pytree as pytree


@contextlib.contextmanager
def told(model: object, tell: Callable[[str], object]) -> Iterator[None]:
    """Within it tell(path) is called whenever another module of the model begins to compute, also in backward. path:
    its name in the model; "" for the model itself. Of what is no module it tells nothing."""
    if not isinstance(model, torch.nn.Module):
        yield
        return
    layers = _Layers(tell)
    handles = [handle for path, module in model.named_modules() for handle in layers.watch(path, module)]
    try:
        yield
    finally:
        for handle in (*handles, *layers.of_nodes):
            handle.remove()


class _Layers:
    """The modules whose forward is running, and the nodes of autograd that they have made."""

    def __init__(self, tell: Callable[[str], object]) -> None:
        self._tell = tell
        self._running: list[str] = []
        #: Nodes of which is known who has made them. Held, so that no other one gets the address of one.
        self._known: set[object] = set()
        self.of_nodes: list[torch.utils.hooks.RemovableHandle] = []

    def watch(self, path: str, module: torch.nn.Module) -> Iterator[torch.utils.hooks.RemovableHandle]:
        """Hooks for one module. The last ones to be called before its forward, and the first ones after it."""

        def enter(module: torch.nn.Module, args: tuple, kwargs: dict) -> None:
            if not torch.compiler.is_compiling():
                self._running.append(path)
                self._tell(path)

        def leave(module: torch.nn.Module, args: tuple, kwargs: dict, result: object) -> None:
            if not torch.compiler.is_compiling() and self._running:
                self._know(path, (args, kwargs), result)
                self._running.pop()
                self._tell(self._running[-1] if self._running else "")

        yield module.register_forward_pre_hook(enter, with_kwargs=True)
        yield module.register_forward_hook(leave, prepend=True, with_kwargs=True)

    def _know(self, path: str, inputs: object, results: object) -> None:
        """The nodes between inputs and results, of which no inner module has made any, are this module's."""
        ends, ahead = _nodes_of(inputs), list(_nodes_of(results))
        while ahead:
            node = ahead.pop()
            if node is None or node in ends or node in self._known:
                continue
            self._known.add(node)
            self.of_nodes.append(node.register_prehook(lambda gradients: self._tell(path) and None))
            ahead += [following for following, _ in node.next_functions]


def _nodes_of(values: object) -> set[object]:
    return {value.grad_fn for value in pytree.tree_leaves(values) if isinstance(value, torch.Tensor)} - {None}
