"""All that a run needs to go on exactly, as torch.distributed.checkpoint saves and loads it."""

import contextlib
import hashlib
import warnings
from collections.abc import Iterator, Mapping, Sequence, Set

import torch
from torch import distributed

from quire.checks import check_names, check_type, check_type_or_none, describe, received
from quire.delayed.checkpoint import delayed_state, padded_state, set_delayed_state, unpadded_state
from quire.delayed.step import reduces, rule_text
from quire.distributed.groups import check_group, sendable
from quire.distributed.pieces import PiecesOfTensor, PlainPart
from quire.loading.devices import HOST, with_values
from quire.nn.layer_base import Float32Buffers
from quire.nn.product_module import ProductModule, Sharding
from quire.nn.random_state import check_rng_state, of_own_rank, seeds_of_rank_0, set_rng_state
from quire.recipe import DelayedScaling, Recipe, as_recipe
from quire.tensor import QuantizedTensor


class TrainingState:
    """The state of a training run, for torch.distributed.checkpoint: the weights of a model, the state of its
    optimizer, and of its quire layers the random states and the states of delayed scaling.

    `dcp.save({"train": state}, checkpoint_id=folder)` saves it, and dcp.load with the same arguments loads it. A
    checkpoint loads with another number of ranks and with another sharding of the model. The state has the
    tensors of the model themselves, so dcp.load writes to the model.

    The random state of data-parallel rank 0 is saved. Each rank that loads it derives its own
    (quire.distributed.data_parallel_rank). Amaxes that were collected since the last step are reduced over ranks before
    they are saved, as the next step would do.

    state_dict() communicates, so all ranks of the group must call it. torch.distributed.checkpoint does this. Its
    result can also be saved with torch.save and loaded with torch.load(weights_only=True). For a layer with parallel=
    this file has the rank's shard.

    Args:
        model: a model of any layers. Weights and optimizer states go through get_model_state_dict and
            get_optimizer_state_dict of PyTorch. For a layer with parallel=, each rank saves its shard at its place in
            the whole weight. A quantized weight is saved as its buffers, "0.weight.mxfp8:nan.rowwise_data" and so on.
            So its codes are kept.
        optimizer: an optimizer of the model's parameters, a list of them, or None.
        recipe: the recipe of the model's steps, if it is delayed scaling. Its amax_history_len is the length of the
            saved histories. With None or another recipe, states of delayed scaling are not saved.
        group: the ranks that have the same layers; None: all. With pipeline parallelism, the ranks of this stage.
        amax_reduction_group: the one that is passed to quire.autocast.

    Raises:
        TypeError: for an argument of another type.
        ValueError: in state_dict() and load_state_dict(), if an optimizer has a parameter that the model has not.
        RuntimeError: if ranks have different layers, if they have different states of delayed scaling
            (reduce_amax=False), and if layers ran under another delayed scaling than `recipe`. Warns if layers ran
            under delayed scaling and there is no `recipe`. Warns if the random states of ranks do not follow from one
            torch.manual_seed; a run that loads them then draws other random numbers.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
        recipe: Recipe | str | None = None,
        *,
        group: "distributed.ProcessGroup | None" = None,
        amax_reduction_group: "distributed.ProcessGroup | None" = None,
    ) -> None:
        check_type("TrainingState", torch.nn.Module, model=model)
        given = optimizer if isinstance(optimizer, Sequence) else [optimizer]
        for each in given:
            check_type_or_none("TrainingState", torch.optim.Optimizer, optimizer=each)
        self.model, self.optimizers = model, [each for each in given if each is not None]
        recipe = as_recipe("TrainingState", recipe)
        self.recipe = recipe if isinstance(recipe, DelayedScaling) else None
        groups = {"group": group, "amax_reduction_group": amax_reduction_group}
        # What new_group() returns in other ranks. Some builds of PyTorch have no groups.
        outside = distributed.GroupMember.NON_GROUP_MEMBER if distributed.is_available() else None
        check_group("TrainingState", **{name: one for name, one in groups.items() if one not in (None, outside)})
        self.group, self.amax_reduction_group = group, amax_reduction_group

    # ------------------------------------------------------------ saving

    def state_dict(self) -> dict[str, object]:
        """The entries "model", "optimizer" (if there is one), "rng" and "delayed" (if the recipe is)."""
        from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

        found, sharded = {}, sharded_parameters(self.model)
        self._names_in_optimizers()
        if self.optimizers:
            with _kept_codes(self.model):
                states = get_optimizer_state_dict(self.model, self.optimizers)
        weights = get_model_state_dict(self.model)
        if missing := sorted(sharded.keys() - weights.keys()):
            raise NotImplementedError(
                f"TrainingState: {missing[0]!r} is this rank's shard of a weight and is parametrized: the state dict "
                "has it under names that do not say how it is sharded. Remove the parametrization, or shard the layer "
                "by parallelize_module instead of parallel="
            )
        if self.optimizers:
            found["optimizer"] = save_optimizer(states, sharded, {name: weights[name].shape for name in sharded})
        found["model"] = save_model(weights, sharded)
        rng, delayed = self._rng(), self._delayed()
        self._check_layers(sorted({*rng, *delayed}))
        found["rng"] = self._agreed_rng(rng)
        if delayed:
            found["delayed"] = self._agreed_delayed(delayed)
        return found

    def _rng(self) -> dict[str, torch.Tensor]:
        return _renamed(seeds_of_rank_0(self.model), names_of_modules(self.model))

    def _delayed(self) -> dict[str, dict[str, torch.Tensor]]:
        if self.recipe is not None:
            found = padded_state(self.model, self.recipe.amax_history_len, self._rule())
            return _renamed(found, names_of_modules(self.model))
        if delayed_state(self.model):
            warnings.warn(
                "TrainingState: layers have run under delayed scaling, and without recipe= their scales and amax "
                "histories are not in the state; pass the recipe, or save quire.delayed_state(model) of each rank",
                stacklevel=3,
            )
        return {}

    def _rule(self) -> str:
        return "" if self.recipe is None else rule_text(self.recipe, self.amax_reduction_group)

    def _many(self) -> bool:
        return (
            distributed.is_available() and distributed.is_initialized() and distributed.get_world_size(self.group) > 1
        )

    def _check_layers(self, names: list[str]) -> None:
        digest = hashlib.blake2b(repr(names).encode(), digest_size=7).digest()
        number = torch.tensor([int.from_bytes(digest, "big")], dtype=torch.int64, device=self._device())
        if not self._most(number)[1]:
            raise RuntimeError(
                f"TrainingState: the ranks have different layers; this one has {names}. Pass group=, the ranks "
                "that have the same"
            )

    def _device(self) -> torch.device:
        return with_values(next((p.device for p in self.model.parameters()), HOST))

    def _most(self, values: torch.Tensor) -> tuple[torch.Tensor, bool]:
        """The largest of each value over the ranks, and whether all have the same."""
        if not self._many():
            return values, True
        opposite = values.neg if values.is_floating_point() else values.bitwise_not  # of which none overflows
        both = sendable(torch.cat([values, opposite()]), self.group)
        distributed.all_reduce(both, distributed.ReduceOp.MAX, self.group)
        most, least = both.to(values.device).chunk(2)
        return most, torch.equal(most, -least if values.is_floating_point() else ~least)

    def _agreed_rng(self, states: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if not states:
            return states
        most, same = self._most(torch.stack(list(states.values())))
        if not same:
            warnings.warn(
                "TrainingState: the random states of the ranks do not follow from one torch.manual_seed, so a run "
                "that loads this one draws other random numbers. For the same ones, call torch.manual_seed with one "
                "number in all ranks before the model is made, or save quire.rng_state(model) of each rank",
                stacklevel=2,
            )
        return dict(zip(states, most.unbind(), strict=True))

    def _agreed_delayed(self, states: dict[str, dict[str, torch.Tensor]]) -> dict[str, dict[str, torch.Tensor]]:
        collected = [value[kind][0] for value in states.values() for kind in ("amax_history_fwd", "amax_history_bwd")]
        if reduces(self.recipe, self.amax_reduction_group):
            flat = sendable(torch.cat(collected), self.amax_reduction_group)
            distributed.all_reduce(flat, distributed.ReduceOp.MAX, self.amax_reduction_group)
            for row, most in zip(collected, flat.split([len(row) for row in collected]), strict=True):
                row.copy_(most)
        tensors = [t for value in states.values() for t in value.values()]
        if not self._most(torch.cat([t.flatten().double() for t in tensors]))[1]:
            raise RuntimeError(
                "TrainingState: ranks have different states of delayed scaling, of which one would be saved: the "
                "recipe has reduce_amax=False, the amax_reduction_group is not all of `group`, or layers ran in some "
                "ranks only; save quire.delayed_state(model) of each rank instead, and pass recipe=None"
            )
        return states

    # ------------------------------------------------------------ loading

    def load_state_dict(self, state_dict: Mapping[str, object]) -> None:
        """Takes what state_dict() gave, in any process.

        Args:
            state_dict: the result of state_dict().

        Raises:
            TypeError: for what is no dict.
            ValueError: if weights, random states or (with a recipe that is delayed) states of delayed scaling are not
                those of this model and all of its layers, and if optimizer states are none or lack a parameter. Nothing
                has then changed.
            RuntimeError: if this thread has too many delayed recipes. Nothing has then changed. Also PyTorch's error
                for weights that a module with names or shapes of its own, such as GroupedLinear, cannot take.
        """
        from torch.distributed.checkpoint.state_dict import (
            get_model_state_dict,
            set_model_state_dict,
            set_optimizer_state_dict,
        )

        check_type("TrainingState", Mapping, state_dict=state_dict)
        own = get_model_state_dict(self.model)
        weights = load_model(_entry(state_dict, "model"), own)
        check_model(self.model, weights, own)
        optimizer = self._optimizer_of(state_dict, own.keys())
        names = {saved: name for name, saved in names_of_modules(self.model).items()}
        rng = _renamed(_entry(state_dict, "rng"), names)
        check_rng_state("TrainingState: 'rng'", _REMEDY, self.model, rng)
        if self.recipe is not None:  # without layers of quire there is no entry
            saved = _renamed(_entry({"delayed": {}, **state_dict}, "delayed"), names)
            delayed = unpadded_state("TrainingState: 'delayed'", _REMEDY, self.model, saved, self._rule())
        # First, because a step of a new optimizer, which PyTorch makes here, writes to the weights.
        if self.optimizers:
            set_optimizer_state_dict(self.model, self.optimizers, optim_state_dict=optimizer)
        set_model_state_dict(self.model, weights)
        set_rng_state(self.model, of_own_rank(self.model, rng))
        if self.recipe is not None:
            set_delayed_state(self.model, delayed)

    def _names_in_optimizers(self) -> list[tuple[torch.nn.Parameter, list[str]]]:
        """Each parameter of the optimizers, and its names in state dicts. Raises ValueError if it has none."""
        names, modules = {}, names_of_modules(self.model)
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            names.setdefault(parameter, []).extend(_renamed({name: None}, modules))
        found = [p for optimizer in self.optimizers for group in optimizer.param_groups for p in group["params"]]
        for parameter in found:
            if parameter not in names:
                raise ValueError(
                    f"TrainingState: an optimizer has a parameter {list(parameter.shape)} that the model has not; pass "
                    "optimizers of the model's parameters, and make them when the model is converted and sharded"
                )
        return [(parameter, names[parameter]) for parameter in found]

    def _optimizer_of(self, state_dict: Mapping[str, object], weights: Set[str]) -> dict[str, object]:
        """The state of the optimizers, for set_optimizer_state_dict(). weights: the names in the model's state dict; a
        parameter that has none of them is left to PyTorch, which knows more wrappers."""
        own = self._names_in_optimizers()
        if not own:
            return {}
        saved = load_optimizer(_entry(state_dict, "optimizer"))
        for parameter, names in own if saved["state"] else ():
            known = weights & set(names)
            if known and parameter.requires_grad and not known & saved["state"].keys():
                raise ValueError(
                    f"TrainingState: 'optimizer' has no state of the parameter {min(known)!r}; {_REMEDY}, after a step "
                    "in which this parameter had a gradient"
                )
        return saved


_REMEDY = "pass what state_dict() of a TrainingState with the same arguments gave"


def _entry(state_dict: Mapping[str, object], name: str) -> Mapping[str, object]:
    if name not in state_dict:
        raise ValueError(f"TrainingState: the state has no {name!r}; {_REMEDY}")
    value = state_dict[name]
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise ValueError(f"TrainingState: {name!r} must be a dict by names, got {describe(value)}; {_REMEDY}")
    return value


@contextlib.contextmanager
def _kept_codes(model: torch.nn.Module) -> Iterator[None]:
    """PyTorch makes the state of a new optimizer by a step with a learning rate of 0, after which weights without
    masters would be decoded and quantized again."""
    quantized = [p for p in model.parameters() if isinstance(p, QuantizedTensor) and p.master is None]
    kept = [{name: t.clone() for name, t in q.buffers().items()} for q in quantized]
    yield
    with torch.no_grad():
        for q, buffers in zip(quantized, kept, strict=True):
            for name, t in q.buffers().items():
                t.copy_(buffers[name])


def _renamed(states: Mapping[str, object], names: Mapping[str, str]) -> dict[str, object]:
    """Keys are names of modules, perhaps with a name within the module behind."""
    found = {}
    for key, value in states.items():
        outer, _, last = key.rpartition(".")
        if key in names:
            found[names[key]] = value
        else:
            found[".".join(filter(None, (names.get(outer, outer), last)))] = value
    return found


# ------------------------------------------------------------ entries that torch.distributed.checkpoint saves whole


#: What wraps modules, in names of parameters; PyTorch's get_model_state_dict leaves them out too.
WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")


def names_of_modules(model: torch.nn.Module) -> dict[str, str]:
    """Name of each module in named_modules() -> its name in state dicts, which have no wrappers."""
    found = {}
    for name, _ in model.named_modules():
        outer, _, last = name.rpartition(".")
        wrapped = bool(name) and (last in WRAPPERS or _is_data_parallel(model.get_submodule(outer)))
        found[name] = found[outer] if wrapped else ".".join(filter(None, (found.get(outer, ""), last)))
    return found


def _is_data_parallel(module: torch.nn.Module) -> bool:
    return isinstance(module, torch.nn.parallel.DistributedDataParallel)


def sharded_parameters(model: torch.nn.Module) -> dict[str, Sharding]:
    """Name in state dicts -> how it is sharded, of each of ProductModule.own_parts()."""
    names, found = names_of_modules(model), {}
    for name, module in model.named_modules():
        if hasattr(module, "own_parts"):
            found |= {".".join(filter(None, (names[name], own))): p for own, p in module.own_parts().items()}
    return found


def save_model(state: Mapping[str, object], sharded: Mapping[str, Sharding]) -> dict[str, object]:
    """Of a model's state dict. A quantized weight becomes an entry for each buffer, with its spec in the name:
    "0.weight.mxfp8:nan.rowwise_data". All share memory with the parameters."""
    found = {}
    for name, value in state.items():
        if isinstance(value, QuantizedTensor):
            found |= {key: value.named()[buffer] for buffer, key in _buffer_keys(name, value).items()}
        elif name in sharded:
            found[name] = sharded[name].pieces(_plain(value))
        else:
            found[name] = value
    return found


def load_model(saved: Mapping[str, object], own: Mapping[str, object]) -> dict[str, object]:
    """A model's state dict, of what save_model() gave. own: the present one, for what is quantized. Raises ValueError
    if an entry of a quantized weight is missing or does not fit."""
    found = dict(saved)
    for name, value in own.items():
        if isinstance(value, QuantizedTensor):
            keys = _buffer_keys(name, value)
            if missing := [key for key in keys.values() if key not in saved]:
                raise ValueError(
                    f"TrainingState: the state has no {missing[0]!r}; make the model with the recipe of its "
                    "quantized_model_init when it was saved, and with the same directions and masters"
                )
            for buffer, key in keys.items():
                present = value.named()[buffer]
                _check_tensor(key, saved[key], present, present.shape, present.dtype)
            found[name] = value.with_buffers({buffer: found.pop(key) for buffer, key in keys.items()})
    return {name: _part(value) for name, value in found.items()}


def _loads_as_named(module: torch.nn.Module) -> bool:
    """Whether a module takes from a state dict exactly the names and shapes that its own one has."""
    plain = (torch.nn.Module, ProductModule, Float32Buffers)
    known = [cls._load_from_state_dict for cls in plain]
    return type(module)._load_from_state_dict in known and not module._load_state_dict_pre_hooks


def check_model(model: torch.nn.Module, weights: Mapping[str, object], own: Mapping[str, object]) -> None:
    """Raises ValueError if a model's state dict does not fit into its present one. Names and shapes are compared where
    no module of the model converts them when it loads."""
    exact = all(map(_loads_as_named, model.modules()))
    if exact:
        named = {name: value for name, value in weights.items() if not name.endswith("_extra_state")}
        check_names("TrainingState: 'model'", _REMEDY, named, own, all_of_them=True, kind="tensors")
    for name, value in own.items():
        if name in weights and isinstance(value, torch.Tensor) and not torch.nn.parameter.is_lazy(value):
            _check_tensor(name, weights[name], value, shape=value.shape if exact else None)


def _check_tensor(
    name: str, given: object, own: torch.Tensor, shape: torch.Size | None, dtype: torch.dtype | None = None
) -> None:
    """shape, dtype: those that it must have; None: any, which is converted."""
    if (
        not isinstance(given, torch.Tensor)
        or (given.layout, dtype or given.dtype) != (own.layout, given.dtype)
        or shape not in (None, given.shape)
        or (given.is_meta and not own.is_meta)
    ):
        raise ValueError(
            f"TrainingState: {name!r} must have values and be {f'{dtype} ' if dtype else ''}{own.layout} of shape "
            f"{list(own.shape)}, got {received(given)}; {_REMEDY}"
        )


def save_optimizer(
    state: Mapping[str, object], sharded: Mapping[str, Sharding], shapes: Mapping[str, torch.Size]
) -> dict[str, object]:
    """Of an optimizer's state dict. shapes: of the sharded parameters: what has the same shape is sharded too."""
    each = {
        name: {
            key: sharded[name].pieces(value)
            if name in sharded and isinstance(value, torch.Tensor) and value.shape == shapes[name]
            else value
            for key, value in values.items()
        }
        for name, values in state.get("state", {}).items()
    }
    return {**state, "state": each}


def load_optimizer(saved: Mapping[str, object]) -> dict[str, object]:
    """An optimizer's state dict, of what save_optimizer() gave. Raises ValueError for what is none."""
    state, groups = saved.get("state", {}), saved.get("param_groups")
    if (
        not isinstance(state, Mapping)
        or not all(isinstance(values, Mapping) for values in state.values())
        or not isinstance(groups, Sequence)
        or not all(isinstance(group, Mapping) and isinstance(group.get("params"), Sequence) for group in groups)
    ):
        raise ValueError(
            "TrainingState: 'optimizer' must be a dict of 'state', with a dict for each parameter, and 'param_groups', "
            f"a list of dicts with 'params'; got {describe(saved)}; {_REMEDY}"
        )
    each = {name: {key: _part(value) for key, value in values.items()} for name, values in state.items()}
    return {**saved, "state": each}


def _buffer_keys(name: str, q: QuantizedTensor) -> dict[str, str]:
    return {buffer: f"{name}.{q.spec_text}.{buffer}" for buffer, t in q.named().items() if t is not None}


def _plain(value: torch.Tensor) -> torch.Tensor:
    return value.plain() if isinstance(value, PlainPart) else value


def _part(value: object) -> object:
    return value.given if isinstance(value, PiecesOfTensor) else value
