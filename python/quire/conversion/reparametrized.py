"""Weights that are not plain parameters of their module: computed from others in every call, or of a kind that no layer
of quire takes."""

import contextlib
import copy
import functools
from collections.abc import Callable, Iterable, Iterator

import torch
from torch.nn.utils import parametrizations, parametrize
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from quire.conversion.report import Reason
from quire.distributed.fully_sharded import MasterShard
from quire.distributed.placements import is_dtensor
from quire.nn.own_context import own_context
from quire.nn.weight import computing_hooks
from quire.tensor import QuantizedTensor

NO_WEIGHT_YET = "it has no weight yet: call the model once before it is converted"
PARAMETRIZED = "it is parametrized: remove the parametrization, or register it after quire.convert"
IN_PARTS = "its weight consists of several parameters, and must be one: create the layer without parameters_split"
SHARDED = Reason(
    "its weight is sharded over ranks, and must stay a plain parameter",
    "Convert the whole model before its weights are sharded, or one that loads the full state dict",
)
_ASSIGN = "assign a torch.nn.Parameter of its value"


def _parametrized(layer: torch.nn.Module) -> list[str]:
    """Names of the tensors that parametrizations compute. The properties are of the module's own class."""
    names = list(layer.parametrizations) if parametrize.is_parametrized(layer) else []
    return names if all(name in vars(type(layer)) for name in names) else []


def computed(layer: torch.nn.Module) -> dict[str, str]:
    """Name -> what computes it, of each tensor of a layer that PyTorch computes from parameters in every call."""
    return {name: kind.title for name, kind, _ in computing_hooks(layer)} | dict.fromkeys(
        _parametrized(layer), "parametrize"
    )


def plain_class(layer: torch.nn.Module) -> type[torch.nn.Module]:
    """The class of a layer without parametrizations."""
    return type(layer).__bases__[0] if _parametrized(layer) else type(layer)


def has_no_weight_yet(layer: torch.nn.Module) -> bool:
    """Whether a parameter of the layer is uninitialised, as in a torch.nn.LazyLinear before its first call."""
    return any(torch.nn.parameter.is_lazy(parameter) for parameter in layer._parameters.values())


def why_not_converted(layer: torch.nn.Module, names: Iterable[str], training: bool) -> str:
    """Why a layer of quire cannot have these weights: they must be plain parameters or, for training, may be computed
    in every call. "" if it can."""
    if has_no_weight_yet(layer):
        return NO_WEIGHT_YET
    found = computed(layer)
    if not training:
        sources = {name + ending for name, kind, _ in computing_hooks(layer) for ending in kind.sources}
        if nested := sources & found.keys():
            return f"its {sorted(nested)[0]}, from which its weight is computed, is computed itself"
    return next(filter(None, (_why_not_one(layer, name, training) for name in names if name not in found)), "")


def _why_not_one(layer: torch.nn.Module, name: str, training: bool) -> str:
    if name not in layer._parameters:
        if training:
            return ""
        if name in layer._buffers:
            return f"its {name} is a buffer, and codes are a parameter: {_ASSIGN}"
        if name in vars(layer):
            return f"its {name} is a plain tensor, in whose place other code may put another one: {_ASSIGN}"
        return IN_PARTS
    weight = layer._parameters[name]
    if weight is None:
        return f"its {name} is None"
    if weight.layout != torch.strided:
        return f"its {name} is sparse ({str(weight.layout).removeprefix('torch.')}): {_ASSIGN}, .to_dense()"
    sharded = isinstance(weight, MasterShard) or is_dtensor(weight)
    if sharded and not training:
        return SHARDED
    if not sharded and not isinstance(weight, QuantizedTensor) and is_traceable_wrapper_subclass(weight):
        return f"its {name} is a {type(weight).__name__}, whose values another library stores"
    # A weight that PyTorch's first FSDP has flattened has one dimension outside of calls.
    if isinstance(layer, torch.nn.Linear) and weight.dim() != 2 and not (training and weight.dim() == 1):
        return f"its {name} {list(weight.shape)} is not [out_features, in_features]"
    return ""


@contextlib.contextmanager
def steady_weights(model: torch.nn.Module) -> Iterator[None]:
    """Within it, parametrizations compute as in evaluation mode. In training mode every read of a weight under
    spectral_norm would change it."""
    lists = [module for module in model.modules() if isinstance(module, parametrize.ParametrizationList)]
    training = [module for each in lists for module in each.modules() if module.training]
    try:
        for module in training:
            module.training = False
        yield
    finally:
        for module in training:
            module.training = True


@contextlib.contextmanager
def plain_weights(layers: Iterable[torch.nn.Module]) -> Iterator[dict[torch.nn.Module, str]]:
    """Replaces tensors that layers compute in every call by plain parameters with the values that they have in
    evaluation mode, and removes what computes them. Yields what computed the tensors of each layer that was changed. An
    error within the context undoes all changes of these layers.

    PyTorch's own functions that remove it write into the parameters, which other modules may have too.
    """
    changed = {layer: _said(computed(layer)) for layer in layers if computed(layer)}
    before = [(layer, type(layer), _contents(layer)) for layer in changed]
    try:
        with own_context():
            for layer in changed:
                _make_plain(layer)
        yield changed
    except BaseException:
        for layer, kind, contents in before:
            _restore(layer, kind, contents)
        raise


def _said(found: dict[str, str]) -> str:
    return ", ".join(f"{name} by {title}" for name, title in found.items())


def _make_plain(layer: torch.nn.Module) -> None:
    values = {name: kind.value(hook, layer).clone() for name, kind, hook in computing_hooks(layer)}
    with steady_weights(layer):
        values |= {name: getattr(layer, name).detach().clone() for name in _parametrized(layer)}
    for name, kind, hook in computing_hooks(layer):
        for ending in kind.sources:
            layer._parameters.pop(name + ending, None)
            layer._buffers.pop(name + ending, None)
        vars(layer).pop(name, None)
        for hooks in (layer._forward_pre_hooks, layer._state_dict_hooks, layer._load_state_dict_pre_hooks):
            _drop(hooks, functools.partial(_belongs_to, hook))
    if _parametrized(layer):
        layer.__class__ = plain_class(layer)
        del layer._modules["parametrizations"]
        _drop(layer._load_state_dict_pre_hooks, lambda one: _unwrapped(one).__module__ == parametrizations.__name__)
    for name, value in values.items():
        layer._parameters[name] = torch.nn.Parameter(value)


def _drop(hooks: dict[int, object], dropped: Callable[[object], bool]) -> None:
    for key in [key for key, one in hooks.items() if dropped(one)]:
        del hooks[key]


def _belongs_to(hook: object, one: object) -> bool:
    """Whether a hook of a module is that hook, or one of those that SpectralNorm adds for state dicts."""
    return one is hook or getattr(_unwrapped(one), "fn", None) is hook


def _unwrapped(hook: object) -> object:
    return getattr(hook, "hook", hook)


def _contents(layer: torch.nn.Module) -> dict[str, tuple[object, object]]:
    """Every attribute, and of dicts what they hold now."""
    own = vars(layer).items()
    return {name: (value, copy.copy(value) if isinstance(value, dict) else None) for name, value in own}


def _restore(layer: torch.nn.Module, kind: type, contents: dict[str, tuple[object, object]]) -> None:
    layer.__class__ = kind
    vars(layer).clear()
    for name, (value, held) in contents.items():
        if held is not None:  # handles of hooks refer to the dict itself
            value.clear()
            value.update(held)
        vars(layer)[name] = value
