"""The memory of a model, and which of its parameters share memory."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from quire.delayed import DelayedState
from quire.tensor import QuantizedTensor

#: The tensors of which a sparse tensor consists.
_COMPRESSED_ROWS, _COMPRESSED_COLUMNS = ("crow_indices", "col_indices"), ("ccol_indices", "row_indices")
_SPARSE = {
    torch.sparse_coo: ("_indices", "_values"),
    **dict.fromkeys((torch.sparse_csr, torch.sparse_bsr), (*_COMPRESSED_ROWS, "values")),
    **dict.fromkeys((torch.sparse_csc, torch.sparse_bsc), (*_COMPRESSED_COLUMNS, "values")),
}


class Untied(NamedTuple):
    """Parameters that shared memory before a conversion and no longer do. quantized: names of parameters that are codes
    now. others: names of parameters that keep their values, such as the weight of an embedding. nbytes: of the
    codes."""

    quantized: tuple[str, ...]
    others: tuple[str, ...]
    nbytes: int


def held_bytes(model: torch.nn.Module) -> int:
    """The bytes of all tensors of a model: parameters and buffers, their gradients, and what modules keep as attributes
    (states, codes of weights). Shared memory counts once. On the meta device: the bytes that the tensors would need."""
    parts = [_memory(part) for tensor in _tensors(model) for part in _stored(tensor)]
    return sum(dict(parts).values())


def _memory(tensor: torch.Tensor) -> tuple[tuple[torch.device | None, int], int]:
    """The place of a plain tensor's storage, and the bytes of that storage."""
    try:
        storage = tensor.untyped_storage()
        # Two storages can have one memory. On the meta device none has an address.
        return (storage.device, storage.data_ptr() or storage._cdata), storage.nbytes()
    except (NotImplementedError, RuntimeError):  # a layout without storage, such as that of mkldnn
        return (None, id(tensor)), tensor.numel() * tensor.element_size()


def _tensors(model: torch.nn.Module) -> Iterator[torch.Tensor]:
    seen: set[int] = set()
    for module in model.modules():
        yield from module.parameters(recurse=False)  # of scripted modules no attribute has them
        yield from module.buffers(recurse=False)
        for name, value in vars(module).items():
            if name != "_modules":
                yield from _within(value, seen)


def _within(value: object, seen: set[int]) -> Iterator[torch.Tensor]:
    """The tensors in an attribute: the value, what containers contain, and gradients and attributes of tensors."""
    if isinstance(value, torch.Tensor):
        inner = [vars(value)]
        inner += [value.grad] if value.is_leaf else []
        yield value
    elif isinstance(value, dict):
        inner = list(value.values())
    elif isinstance(value, list | tuple | set):
        inner = list(value)
    elif isinstance(value, DelayedState):
        inner = [vars(value)]
    else:
        return
    if id(value) not in seen:
        seen.add(id(value))
        for one in inner:
            yield from _within(one, seen)


def _stored(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The plain tensors that a tensor consists of."""
    if torch.nn.parameter.is_lazy(tensor):
        return
    if is_traceable_wrapper_subclass(tensor):
        inner = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
        for part in inner:
            if isinstance(part, torch.Tensor):  # a DTensor also has its mesh there
                yield from _stored(part)
    elif tensor.layout in _SPARSE:
        tensor = tensor.detach()
        for name in _SPARSE[tensor.layout]:
            yield getattr(tensor, name)()
    else:
        yield tensor


#: Name of a parameter -> where its values are: equal for parameters that share all of their memory.
Places = dict[str, tuple[object, ...]]


def places_of(model: torch.nn.Module) -> Places:
    """The places of all parameters, under all of their names."""
    named = model.named_parameters(remove_duplicate=False)
    return {name: _place(parameter) for name, parameter in named if not torch.nn.parameter.is_lazy(parameter)}


def _place(parameter: torch.Tensor) -> tuple[object, ...]:
    first = next(_stored(parameter))
    (device, address), _ = _memory(first)
    return device, address, first.storage_offset() if device else 0, first.numel()


def untied(model: torch.nn.Module, before: Places) -> tuple[Untied, ...]:
    """Groups of parameters that shared memory before. Some of each group are codes now, in separate memory."""
    tied: dict[tuple[object, ...], list[str]] = {}
    for name, place in before.items():
        tied.setdefault(place, []).append(name)
    now, places, found = dict(model.named_parameters(remove_duplicate=False)), places_of(model), []
    codes = [name for name, parameter in now.items() if isinstance(parameter, QuantizedTensor)]
    for names in tied.values():
        if len(names) < 2:
            continue
        names = [name if name in now else _made_of(name, codes) for name in names]
        names = [name for name in names if name]
        if len({places[name] for name in names}) > 1:
            quantized = {name: now[name] for name in names if name in codes}
            own = {places[name]: parameter.nbytes for name, parameter in quantized.items()}
            others = tuple(name for name in names if name not in codes)
            found.append(Untied(tuple(quantized), others, sum(own.values())))
    return tuple(found)


def _made_of(source: str, codes: list[str]) -> str:
    """The weight that was computed from a parameter which no longer exists: "a.weight" for "a.weight_orig" and
    "a.parametrizations.weight.original"; "" if none was."""
    for name in codes:
        owner, _, own = name.rpartition(".")
        ends = (f"{own}_", f"parametrizations.{own}.")
        if source.startswith(tuple(".".join(filter(None, (owner, end))) for end in ends)):
            return name
    return ""
