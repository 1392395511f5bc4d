"""The inputs of a model's matmuls: batches, and observers that see the input of each matmul."""

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from quire.checks import describe
from quire.nn.own_context import in_eager_mode
from quire.nn.product_module import ProductModule
from quire.nn.stacked_experts import is_experts
from quire.tensor import QuantizedActivation, QuantizedTensor

#: A batch: the model's argument, its arguments, or its arguments by name.
Batch = torch.Tensor | Sequence[object] | Mapping[str, object]


class Matmul(NamedTuple):
    """A matmul of a layer. product: its name in the layer ("fc1" of a LayerNormMLP), "" for the only one."""

    layer: torch.nn.Module
    product: str

    def weight_names(self) -> tuple[str, ...]:
        """The names of its weights: one, or one for each group."""
        return tuple(self.layer.weights(self.product)) if isinstance(self.layer, ProductModule) else ("weight",)

    def weights(self) -> list[torch.Tensor]:
        """The matrix [out_features, in_features] of each group."""
        if not isinstance(self.layer, ProductModule):
            return [self.layer.weight]
        return self.layer.group_weights(self.product)

    def labels(self, name: str) -> list[str]:
        """The names of the inputs of the groups in reports, for a layer of that name: "mlp.fc1", "experts.fc1[3]"."""
        label = ".".join(filter(None, (name, self.product)))
        if not hasattr(self.layer, "own_groups"):
            return [label]
        return [f"{label}[{group}]" for group in self.layer.own_groups()]


#: An observer. Arguments: the matmul, its x, and the rows [rows, K] of x for each of its weights.
Seen = Callable[[Matmul, object, list[torch.Tensor]], None]


def arguments(batch: Batch) -> tuple[tuple[object, ...], dict[str, object]]:
    """The positional and the named arguments of the model's call."""
    if isinstance(batch, Mapping):
        return (), dict(batch)
    return ((batch,) if isinstance(batch, torch.Tensor) else tuple(batch)), {}


def listed(what: str, batches: Iterable[Batch] | None) -> list[Batch]:
    """The batches as a list. Raises TypeError for anything else, ValueError if there are none."""
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


def matmuls(layer: torch.nn.Module) -> list[Matmul]:
    """Those of a torch.nn.Linear or a layer of quire, in the order of its parameters."""
    return [Matmul(layer, product) for product in (layer.products if isinstance(layer, ProductModule) else ("",))]


def layers_of(model: torch.nn.Module) -> dict[torch.nn.Module, str]:
    """Every layer with matmuls that can be observed, with its first name in the model."""
    kinds = torch.nn.Linear | ProductModule
    return {module: uncompiled(name) for name, module in model.named_modules() if isinstance(module, kinds)}


def uncompiled(name: str) -> str:
    """The name of a module without the names of the wrappers that torch.compile puts around modules."""
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


def foreign_experts(model: torch.nn.Module) -> dict[torch.nn.Module, str]:
    """Experts of another library's modules, whose matmuls nobody can observe before quire.convert adopts them."""
    return {module: uncompiled(name) for name, module in model.named_modules() if is_experts(module)}


@contextlib.contextmanager
def watched(layers: Iterable[torch.nn.Module], seen: Seen) -> Iterator[None]:
    """Calls `seen` with every matmul of the layers, before it runs."""

    def hook(layer: torch.nn.Module, args: tuple[object, ...], named: dict[str, object]) -> None:
        x = args[0] if args else named.get("x", named.get("input"))
        seen(Matmul(layer, ""), x, _rows(layer, x, None))

    def observe(layer: ProductModule, product: str, x: torch.Tensor, offsets: torch.Tensor | None) -> None:
        seen(Matmul(layer, product), x, _rows(layer, x, offsets))

    with contextlib.ExitStack() as stack:
        stack.enter_context(in_eager_mode())  # a graph cannot show what it computes
        for layer in layers:
            if isinstance(layer, torch.nn.Linear):  # a quire.Linear does not always call the observer
                stack.callback(layer.register_forward_pre_hook(hook, with_kwargs=True).remove)
            else:
                layer.input_observer = functools.partial(observe, layer)
                stack.callback(delattr, layer, "input_observer")
        yield


def _rows(layer: torch.nn.Module, x: object, offsets: torch.Tensor | None) -> list[torch.Tensor]:
    """x [rows, K] for each weight of the matmul. offsets: the row at which each group ends, None for one group."""
    if isinstance(x, QuantizedTensor | QuantizedActivation):
        x = x.dequantize()
    if not isinstance(x, torch.Tensor):
        raise TypeError(
            f"quire: a {type(layer).__name__} was called with {describe(x)}, and its input must be a tensor while "
            "inputs are recorded"
        )
    x = x.detach().reshape(-1, x.shape[-1])
    if offsets is None:
        return [x]
    ends = offsets.tolist()
    return [x[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]


class SameInput:
    """Which matmuls get the same tensor, such as the matmuls of q, k and v, or of gate and up."""

    def __init__(self) -> None:
        self._last: list[tuple[weakref.ref[torch.Tensor], Matmul]] = []
        self._parent: dict[Matmul, Matmul] = {}

    def see(self, matmul: Matmul, x: object) -> None:
        """Call it with every matmul, in the order of calls, while x is alive."""
        self._parent.setdefault(matmul, matmul)
        # Tensors that nobody holds any more are not given to anybody.
        self._last = [(ref, other) for ref, other in self._last if ref() is not None]
        for ref, other in self._last:
            if ref() is x:
                self._parent[self.first(matmul)] = self.first(other)
                return
        if isinstance(x, torch.Tensor):
            self._last.append((weakref.ref(x), matmul))

    def first(self, matmul: Matmul) -> Matmul:
        """One matmul that stands for all that are given the same tensor."""
        while self._parent[matmul] != matmul:
            matmul = self._parent[matmul]
        return matmul

    def groups(self) -> list[list[Matmul]]:
        """The matmuls that ran, in the order of their first calls, those with the same input together."""
        found: dict[Matmul, list[Matmul]] = {}
        for matmul in self._parent:
            found.setdefault(self.first(matmul), []).append(matmul)
        return list(found.values())
