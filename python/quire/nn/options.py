"""TransformerEngine's options that quire does not have, refused unless they ask for nothing."""

import functools
import io
import warnings
from collections.abc import Callable, Mapping
from typing import TypeVar

import torch

from quire.kinds import shown

Result = TypeVar("Result")

#: Of all layers with weights: parallelism over devices, and overlapping its communication, is PyTorch's own here.
PARALLEL = {
    "sequence_parallel": False,
    "tp_group": None,
    "tp_size": 1,
    "get_rng_state_tracker": None,
    "rng_tracker_name": None,
    "parallel_mode": None,
    "ub_overlap_ag": False,
    "ub_overlap_rs": False,
    "ub_overlap_rs_dgrad": False,
    "ub_bulk_dgrad": False,
    "ub_bulk_wgrad": False,
    "ub_name": None,
    "symmetric_ar_type": None,
}


INSTEAD_OF_SPLITTING = (
    "Use DistributedDataParallel or fully_shard, or torch.distributed.tensor.parallel outside of quire.autocast"
)
#: Further ones of that kind, of LayerNormLinear and LayerNormMLP.
_PARALLEL_TOO = {"return_layernorm_output_gathered", "set_parallel_mode"}
#: What frameworks pass to layers of a single process too, where it asks for nothing.
_NOTHING_ALONE = {
    "parallel_mode": (None, "column", "row"),
    "sequence_parallel": (False, True),
    "set_parallel_mode": (False, True),
}


def _size(tp_group: object) -> int:
    """Of a process group; 0 for what is none."""
    if tp_group is None:
        return 1
    return tp_group.size() if hasattr(tp_group, "size") else 0


def _asks_for_nothing(name: str, options: Mapping[str, object]) -> bool:
    if options.get("tp_size", 1) != 1 or _size(options.get("tp_group")) != 1:
        return False
    return name == "tp_group" or options[name] in _NOTHING_ALONE.get(name, ())


class NoExtraState:
    """A module whose state_dict has no extra state, and that loads one which has, as TransformerEngine writes it."""

    def _load_from_state_dict(self, state_dict: dict[str, object], prefix: str, *options: object) -> None:
        extra = state_dict.pop(prefix + "_extra_state", None)
        if _holds_something(extra):
            warnings.warn(
                f"quire.{type(self).__name__}: {prefix}_extra_state, TransformerEngine's state of delayed scaling, is "
                "pickled and not read; scales start anew. quire.set_delayed_state restores what quire.delayed_state "
                "saved",
                stacklevel=2,
            )
        super()._load_from_state_dict(state_dict, prefix, *options)


def _holds_something(extra: object) -> bool:
    """TransformerEngine's is None, an empty tensor, bytes or a file; the last of recipes with a state."""
    if isinstance(extra, torch.Tensor):
        return extra.numel() > 0
    return bool(extra.getbuffer().nbytes if isinstance(extra, io.BytesIO) else extra)


class Unparallel(NoExtraState):
    """What TransformerEngine's frameworks ask of a layer that is not split over devices."""

    #: Names of the layer's weights and of their biases.
    weight_names: tuple[str, ...] = ("weight",)
    bias_names: tuple[str, ...] = ("bias",)

    def set_tensor_parallel_group(self, tp_group: object) -> None:
        """Takes None and groups of one process, and raises NotImplementedError for others."""
        size = _size(tp_group)
        if size != 1:
            raise NotImplementedError(
                f"quire.{type(self).__name__}: tensor parallelism is not available in this version; got a group of "
                f"{size} processes. {INSTEAD_OF_SPLITTING}"
            )


def refuse(what: str, options: Mapping[str, object], known: Mapping[str, object]) -> None:
    """Raises TypeError for an option that is not known, NotImplementedError for one that is not at its known value."""
    for name, value in options.items():
        if name not in known:
            raise TypeError(f"{what} got an unexpected keyword argument {name!r}")
        if value != known[name] and not _asks_for_nothing(name, options):
            of_devices = name in PARALLEL or name in _PARALLEL_TOO
            remedy = f". {INSTEAD_OF_SPLITTING}" if of_devices else ""
            raise NotImplementedError(
                f"{what}: {name}={shown(value)} is not available in this version; leave it at {known[name]!r}{remedy}"
            )


def positional(*names: str) -> Callable[[Callable[..., Result]], Callable[..., Result]]:
    """For a function whose keywords of these names may follow its positional arguments by position, as they do in
    TransformerEngine: a list for drop-in use that nobody should have to read in a signature."""

    def decorate(function: Callable[..., Result]) -> Callable[..., Result]:
        own, first = function.__code__.co_argcount, function.__code__.co_varnames[0]
        implicit = int(first == "self")

        @functools.wraps(function)
        def wrapper(*args: object, **keywords: object) -> Result:
            if len(args) > own + len(names):
                raise TypeError(
                    f"{function.__qualname__}() takes at most {own + len(names) - implicit} positional arguments, "
                    f"got {len(args) - implicit}"
                )
            return function(*args[:own], **dict(zip(names, args[own:], strict=False)), **keywords)

        return wrapper

    return decorate
