"""What the linear layers of a model are given: batches, and hooks that see each layer's input."""

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch

from quire.checks import describe
from quire.nn.grouped_linear import GroupedLinear

#: A batch: the model's argument, its arguments, or its arguments by name.
Batch = torch.Tensor | Sequence[object] | Mapping[str, object]
#: What a hook is given: the layer, and the rows [rows, K] of each of its weights.
Seen = Callable[[torch.nn.Module, list[torch.Tensor]], None]


def arguments(batch: Batch) -> tuple[tuple[object, ...], dict[str, object]]:
    """The positional and the named arguments of the model's call."""
    if isinstance(batch, Mapping):
        return (), dict(batch)
    return ((batch,) if isinstance(batch, torch.Tensor) else tuple(batch)), {}


def listed(what: str, batches: Iterable[Batch] | None) -> list[Batch]:
    """The batches as a list. Raises TypeError for what are none, ValueError if there are none."""
    if isinstance(batches, torch.Tensor | str | Mapping) or not isinstance(batches, Iterable):
        raise TypeError(
            f"{what}: batches must be a list of inputs of the model (tensors, tuples or dicts), got "
            f"{describe(batches)}; for one batch pass [batch]"
        )
    found = list(batches)
    for batch in found:
        if not isinstance(batch, torch.Tensor | list | tuple | Mapping):
            raise TypeError(f"{what}: a batch must be a tensor, a tuple of arguments or a dict, got {describe(batch)}")
    if not found:
        raise ValueError(f"{what}: batches is empty; pass at least one input of the model")
    return found


def called_by_hooks(layer: torch.nn.Module) -> bool:
    """Whether hooks of the layer see the operand of its matmul."""
    return isinstance(layer, torch.nn.Linear | GroupedLinear)


def rows_of_groups(layer: torch.nn.Module, args: tuple[object, ...], named: Mapping[str, object]) -> list[torch.Tensor]:
    """x [rows, K] of a call, for each weight of the layer."""
    x = args[0] if args else named.get("x", named.get("input"))
    if not isinstance(x, torch.Tensor):
        raise TypeError(
            f"quire: a {type(layer).__name__} was called with {describe(x)}, and its input must be a plain tensor "
            "while inputs are recorded"
        )
    x = x.detach().reshape(-1, x.shape[-1])
    if not isinstance(layer, GroupedLinear):
        return [x]
    splits = args[1] if len(args) > 1 else named["m_splits"]
    splits = splits.tolist() if isinstance(splits, torch.Tensor) else list(splits)
    return list(x[: sum(splits)].split(splits))


@contextlib.contextmanager
def watched(layers: Iterable[torch.nn.Module], seen: Seen) -> Iterator[None]:
    """Calls `seen` with every call of the layers, before they compute."""

    def hook(layer: torch.nn.Module, args: tuple[object, ...], named: dict[str, object]) -> None:
        seen(layer, rows_of_groups(layer, args, named))

    handles = [layer.register_forward_pre_hook(hook, with_kwargs=True) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class SameInput:
    """Which layers are fed the same tensor, such as q, k and v, or gate and up."""

    def __init__(self) -> None:
        self._last: list[tuple[weakref.ref[torch.Tensor], torch.nn.Module]] = []
        self._parent: dict[torch.nn.Module, torch.nn.Module] = {}

    @contextlib.contextmanager
    def watched(self, layers: Iterable[torch.nn.Module]) -> Iterator[None]:
        def hook(layer: torch.nn.Module, args: tuple[object, ...], named: dict[str, object]) -> None:
            self._meet(layer, args[0] if args else named.get("x", named.get("input")))

        handles = [layer.register_forward_pre_hook(hook, with_kwargs=True) for layer in layers]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            self._last.clear()

    def _meet(self, layer: torch.nn.Module, x: object) -> None:
        self._parent.setdefault(layer, layer)
        # Tensors that nobody holds any more are not fed to anybody.
        self._last = [(ref, other) for ref, other in self._last if ref() is not None]
        for ref, other in self._last:
            if ref() is x:
                self._parent[self.first(layer)] = self.first(other)
                return
        if isinstance(x, torch.Tensor):
            self._last.append((weakref.ref(x), layer))

    def first(self, layer: torch.nn.Module) -> torch.nn.Module:
        """One layer that stands for all that are fed the same tensor."""
        while self._parent[layer] is not layer:
            layer = self._parent[layer]
        return layer

    def groups(self) -> list[list[torch.nn.Module]]:
        """The layers that were called, in the order of their first calls, those with the same input together."""
        found: dict[torch.nn.Module, list[torch.nn.Module]] = {}
        for layer in self._parent:
            found.setdefault(self.first(layer), []).append(layer)
        return list(found.values())


def measured(spec: str) -> str:
    """The spec with the scale that each call measures, of one whose scale the layer has (the option `given`)."""
    return ":".join(word for word in spec.split(":") if word != "given")
