"""Data parallelism with fully_shard that gathers codes of weights.

gather_codes() prepares a model. MasterShard is the parameter that fully_shard shards then. Gathering knows what
fully_shard is about to do with it: which codes the pass needs, and the amaxes of the whole weight.
"""

import functools
import warnings
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import distributed
from torch.utils._pytree import tree_map

from quire.checks import check_type
from quire.distributed import check_ranks
from quire.distributed.code_payload import alike, pack, unpack, why_not
from quire.distributed.placements import check_own_parameter, is_dtensor, parameters_of_others, placed_like
from quire.functional import amax, quantize
from quire.loading.devices import runs_later
from quire.recipe import Recipe, as_recipe
from quire.tensor import DTYPES, QuantizedTensor, QuantSpec, TensorProto
from quire.tensor.buffers import other_direction

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# --- what fully_shard is about to do with a parameter

#: Of codes: (rowwise, columnwise).
Directions = tuple[bool, bool]
Amaxes = tuple[torch.Tensor | None, torch.Tensor | None]

ROWWISE, COLUMNWISE, BOTH = (True, False), (False, True), (True, True)


class Gathering:
    """Of a layer whose weights are gathered as codes: their state from gather to gather.

    directions: weight -> the codes that the last gather brought. amaxes: weight -> those that forward has reduced.
    scales: weight -> the scale of delayed scaling in forward.
    """

    def __init__(self) -> None:
        self.directions: dict[str, Directions] = {}
        self.amaxes: dict[str, Amaxes] = {}
        self.scales: dict[str, torch.Tensor] = {}
        self._reduced: set[str] = set()
        self._found: dict[str, Found | None] = {}

    def find(self, layer: torch.nn.Module, name: str) -> "Found | None":
        """fully_shard's objects for a parameter; None if they are not as in versions of PyTorch that quire knows."""
        if name not in self._found:
            self._found[name] = _find(layer, name)
        return self._found[name]

    def offer(self, name: str, amaxes: Amaxes) -> None:
        """Amaxes of a weight for its next gather in forward, which is gathered with another one."""
        self.amaxes[name] = amaxes
        self._reduced.add(name)

    def take(self, name: str, in_backward: bool) -> Amaxes | None:
        """Amaxes that need no collective: those offered, or in backward those of forward."""
        found = self.amaxes.get(name) if in_backward or name in self._reduced else None
        self._reduced.discard(name)
        return found

    def __deepcopy__(self, memo: dict[int, Any]) -> "Gathering":
        return Gathering()

    def __reduce__(self) -> tuple[Any, ...]:
        return Gathering, ()


class Found(NamedTuple):
    """PyTorch's objects for a parameter: that of its group of parameters, and its own."""

    group: Any
    parameter: Any

    @property
    def in_backward(self) -> bool:
        """Whether the gather is for a backward pass, and a forward pass was before."""
        return getattr(getattr(self.group, "_training_state", None), "name", None) == "PRE_BACKWARD"

    @property
    def alone(self) -> Directions | None:
        """The one direction that the pass needs, as if backward needed columnwise codes; None if it may need both."""
        state = getattr(getattr(self.group, "_training_state", None), "name", None)
        runs_backward = torch._C._current_graph_task_id() != -1
        if state == "FORWARD" and not runs_backward and getattr(self.group, "_reshard_after_forward", False):
            return ROWWISE
        if self.in_backward and getattr(self.group, "reshard_after_backward", False):
            return COLUMNWISE
        return None

    def expect(self, size: int) -> None:
        """That each rank gives so many bytes, where it may have given others before."""
        outputs = self.parameter.all_gather_outputs
        if outputs and outputs[0].numel() != size * self.group.mesh_info.shard_mesh_size:
            self.parameter.all_gather_outputs = []

    def siblings(self) -> Iterator[tuple[torch.nn.Module, str, torch.Tensor]]:
        """Layer, name and this rank's shard of each parameter that is gathered with this one."""
        for parameter in self.group.fsdp_params:
            info = parameter._module_info
            yield info.module, info.param_name, parameter._sharded_local_tensor


def _find(layer: torch.nn.Module, name: str) -> Found | None:
    """They are PyTorch's own, and nothing public says which pass a gather is for. fully_shard may have been called for
    any module around the layer, also for one that gather_codes() did not get. PyTorch lists these modules."""
    from torch.distributed import _composable_state  # takes long to import, and fully_shard has done that

    for reference in list(getattr(_composable_state, "_module_state_mapping", {}).values()):
        for group in _groups_of(reference()):
            for parameter in group.fsdp_params:
                if parameter._module_info.module is layer and parameter._module_info.param_name == name:
                    return Found(group, parameter)
    return None


def fsdp_groups(model: object) -> list[Any]:
    """fully_shard's groups of parameters of a module and of those in it; [] if it shards none. They are PyTorch's own:
    nothing public says which of them hold whole parameters now."""
    modules = model.modules() if isinstance(model, torch.nn.Module) else ()
    states = [getattr(module, "_get_fsdp_state", lambda: None)() for module in modules]
    return [group for state in states for group in _groups_of(state)]


def _groups_of(state: object) -> list[Any]:
    """Those of a module, of which PyTorch 2.11 has one at most."""
    one = getattr(state, "_fsdp_param_group", None)
    return getattr(state, "_fsdp_param_groups", None) or ([] if one is None else [one])


def reduced_amaxes(
    values: list[torch.Tensor], specs: list[str], group: "distributed.ProcessGroup | None"
) -> list[Amaxes]:
    """quire.amax() of whole tensors, of which each rank of the group has some of the rows; in one collective."""
    own = [amax(value, spec, True, True) for value, spec in zip(values, specs, strict=True)]
    # Of fp8_row and row_scaled, a row's amax is its own.
    shared = [(i, d) for i, both in enumerate(own) for d in (0, 1) if d == 1 or both[d].numel() == 1]
    flat = torch.cat([own[i][d] for i, d in shared])
    if group is not None and distributed.get_world_size(group) > 1:

        def said() -> tuple[str, check_ranks.Fields]:
            fields = {"weights": len(values), "recipe w": " ".join(dict.fromkeys(specs)), "amaxes": len(flat)}
            return "quire.distributed.gather_codes", fields

        check_ranks.agree(group, "gathered amaxes", (len(flat),), said, group, device=flat.device)
        distributed.all_reduce(flat, distributed.ReduceOp.MAX, group=group)
    pieces = iter(flat.split([own[i][d].numel() for i, d in shared]))
    whole = [list(both) for both in own]
    for i, d in shared:
        whole[i][d] = next(pieces).clone()
    return [(both[0], both[1]) for both in whole]


# --- the parameter that fully_shard shards

aten = torch.ops.aten
#: Families whose scales depend on more than blocks.
_WITH_AMAXES = ("fp8_tensor", "fp8_row", "nvfp4")
#: Operators whose results are parameters too. All others compute on the values and return plain tensors.
_SAME_KIND = {
    aten._pin_memory.default,
    aten._to_copy.default,
    aten.alias.default,
    aten.as_strided.default,
    aten.clone.default,
    aten.detach.default,
    aten.empty_like.default,
    aten.slice.Tensor,
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.view.default,
}


class Options(NamedTuple):
    """How a weight is gathered. layer: its class, for messages. name: of the parameter. spec: a text. from_codes:
    backward decodes the rowwise codes of forward. recompute: forward runs again in backward. exact: values are
    quantized as they are, whatever dtype fully_shard gathers in. delayed: (matmul, slot) of the state whose forward
    scale is used, or None."""

    layer: str
    name: str
    spec: str
    from_codes: bool
    recompute: bool
    exact: bool
    delayed: tuple[str, int] | None


class Gathered(NamedTuple):
    """What fsdp_pre_all_gather() says to fsdp_post_all_gather(). shared: buffers that no rank sends, because all
    have them."""

    layer: torch.nn.Module
    name: str
    sent: Directions
    wanted: Directions
    parts: int
    shape: torch.Size
    shared: dict[str, torch.Tensor]


class MasterShard(torch.Tensor):
    """Values of a weight in high precision, or of some of its rows, which fully_shard gathers as codes.

    Optimizers and checkpoints see `values`, a plain tensor.
    """

    values: torch.Tensor
    options: Options

    @staticmethod
    def __new__(cls, values: torch.Tensor, options: Options) -> "MasterShard":
        self = torch.Tensor._make_wrapper_subclass(
            cls, values.size(), values.stride(), values.storage_offset(), dtype=values.dtype, device=values.device
        )
        self.values, self.options = values, Options(*options)  # a tuple from a file
        return self

    def __tensor_flatten__(self) -> tuple[list[str], Options]:
        return ["values"], self.options

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, torch.Tensor], metadata: Options, size: Any, stride: Any
    ) -> "MasterShard":
        return MasterShard(inner["values"], metadata)

    def __repr__(self, *, tensor_contents: str | None = None) -> str:
        return f"MasterShard({self.options.spec!r}, {self.values!r})"

    def __reduce_ex__(self, protocol: int) -> tuple[Any, ...]:
        return MasterShard, (self.values, tuple(self.options))

    @classmethod
    def __torch_dispatch__(cls, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        masters: dict[int, MasterShard] = {}

        def values_of(value: Any) -> Any:
            if not isinstance(value, MasterShard):
                return value
            masters[id(value.values)] = value
            return value.values

        result = operator(*tree_map(values_of, args), **tree_map(values_of, kwargs or {}))
        first = args[0] if args and isinstance(args[0], MasterShard) else None
        if operator is aten.new_zeros.default:
            return first._part(result) if first is not None else result

        def kind_of(value: Any) -> Any:
            if id(value) in masters:  # an operator that writes in place
                return masters[id(value)]
            wrapped = first is not None and operator in _SAME_KIND and isinstance(value, torch.Tensor)
            return MasterShard(value, first.options) if wrapped and value.dtype in DTYPES else value

        return tree_map(kind_of, result)

    def _part(self, zeros: torch.Tensor) -> torch.Tensor:
        """Memory for some of the rows, which fully_shard asks for: a plain tensor where codes of the parts are not
        those of the whole. All ranks ask for the same size."""
        if zeros.shape == self.shape and len(zeros) > 1:  # one row may be the part of one of many ranks
            return MasterShard(zeros, self.options)
        if zeros.dim() != 2 or self.dim() != 2 or zeros.shape[1] != self.shape[1]:
            return zeros
        rows, whole = zeros.shape[0], self.shape[0]
        reason = why_not(QuantSpec(self.options.spec), rows)
        if not reason and rows > 0 and whole % rows == 0 and whole > 1:
            return MasterShard(zeros, self.options)
        warnings.warn(
            f"gather_codes: {self._named()} {list(self.shape)} is sharded into parts of {rows} rows, and "
            f"{reason or 'codes need equal parts'}; its values are gathered instead, in their own dtype or that of the "
            "MixedPrecisionPolicy, and quantized afterwards",
            stacklevel=2,
        )
        return zeros

    # ------------------------------------------------------------ what fully_shard calls

    def fsdp_pre_all_gather(
        self, mesh: "DeviceMesh", outer_size: torch.Size, outer_stride: Any, module: torch.nn.Module, mp_policy: Any
    ) -> tuple[tuple[torch.Tensor], Gathered]:
        """This rank's bytes for the gather."""
        name = self.options.name
        self._check(mesh, outer_size)
        found = module.gathering.find(module, name)
        wanted = self._wanted(found)
        sent = ROWWISE if wanted == BOTH and _columnwise_follows(self.options.spec) else wanted
        part = self._quantized(sent, mesh, module, found, mp_policy)
        payload = pack(part)

        def said() -> tuple[str, check_ranks.Fields]:
            fields = {"weight": name, "recipe w": str(self.options.spec), "shape": str(list(outer_size))}
            fields |= {"sent": str(sent), "bytes": payload.numel()}
            return f"quire.distributed.gather_codes, {type(module).__name__}.{name}", fields

        check_ranks.agree(module, f"{name} {sent}", (payload.numel(),), said, mesh.get_group(), device=payload.device)
        if found is not None:
            found.expect(payload.numel())
        return (payload,), Gathered(module, name, sent, wanted, mesh.size(), outer_size, alike(part))

    def fsdp_post_all_gather(
        self,
        outputs: Sequence[torch.Tensor],
        metadata: Gathered,
        param_dtype: torch.dtype,
        *,
        out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]] | None:
        """The whole weight, quantized. Buffers of a direction that was not gathered are there, and have scales that
        decode to NaN."""
        first = out is None
        if first:
            proto = TensorProto(
                metadata.shape, param_dtype, self.options.spec, columnwise=True, device=outputs[0].device
            )
            out = proto.create_tensor()
        buffers = out.buffers()
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(tuple(buffers.values())):
            _fill(out, outputs[0], metadata)
        metadata.layer.gathering.directions[metadata.name] = metadata.wanted
        outputs[0].untyped_storage().resize_(0)  # the codes are in the buffers now
        return (out, tuple(buffers.values())) if first else None

    def to_quantize(self, mp_policy: Any) -> torch.Tensor:
        """What is quantized: the values as fully_shard would gather them."""
        dtype = mp_policy.param_dtype
        return self.values if dtype is None or self.options.exact else self.values.to(dtype)

    def _named(self) -> str:
        return f"{self.options.layer}.{self.options.name}"

    def _check(self, mesh: "DeviceMesh", outer_size: torch.Size) -> None:
        """Raises RuntimeError, on all ranks alike."""
        if self.shape[0] * mesh.size() != outer_size[0]:
            raise RuntimeError(
                f"gather_codes: {self._named()} {list(outer_size)} is not sharded into equal parts by "
                f"{mesh.size()} ranks; leave its layer out of gather_codes, or use another number of ranks"
            )

    def _wanted(self, found: Found | None) -> Directions:
        alone = None if found is None else found.alone
        if alone is None or (self.options.recompute and alone == COLUMNWISE):
            return ROWWISE if self.options.from_codes else BOTH
        return ROWWISE if self.options.from_codes else alone

    def _quantized(
        self, sent: Directions, mesh: "DeviceMesh", layer: torch.nn.Module, found: Found | None, mp_policy: Any
    ) -> QuantizedTensor:
        """This rank's rows, with the bytes that they have in the whole weight."""
        values, spec = self.to_quantize(mp_policy), self.options.spec
        amaxes = self._amaxes(mesh, layer, found, mp_policy) if self.has_amaxes() else None
        if self.options.delayed is None:
            return quantize(values, spec, *sent, amax=amaxes)
        scales, name = layer.gathering.scales, self.options.name
        if found is None or not found.in_backward or name not in scales:
            product, slot = self.options.delayed
            scales[name] = layer.of(product, "delayed").fwd_scale[slot : slot + 1].clone()
        part = quantize(values, spec, *sent, scale=scales[name])
        for direction, own in zip(("rowwise", "columnwise"), amaxes, strict=True):
            if (scale := part.named()[f"{direction}_scale"]) is not None:
                scale.copy_(torch.where(own.isinf(), torch.nan, scale))
                part.named()[f"{direction}_amax"].copy_(own)
        return part

    def _amaxes(self, mesh: "DeviceMesh", layer: torch.nn.Module, found: Found | None, mp_policy: Any) -> Amaxes:
        """Those of the whole weight. Forward reduces them, for all weights that are gathered together; a gather in
        backward takes those of forward."""
        name = self.options.name
        kept = layer.gathering.take(name, found is not None and found.in_backward)
        if kept is not None:
            return kept
        together = [(layer, name, self)] if found is None else list(found.siblings())
        own = [each for each in together if isinstance(each[2], MasterShard) and each[2].has_amaxes()]
        values = [master.to_quantize(mp_policy) for *_, master in own]
        whole = reduced_amaxes(values, [master.options.spec for *_, master in own], mesh.get_group())
        for (other, other_name, _), both in zip(own, whole, strict=True):
            other.gathering.offer(other_name, both)
        return layer.gathering.take(name, False)

    def has_amaxes(self) -> bool:
        """Whether codes follow from amaxes of the whole weight."""
        return QuantSpec(self.options.spec).family in _WITH_AMAXES


@functools.cache
def _columnwise_follows(spec_text: str) -> bool:
    """Whether columnwise codes are the rowwise ones in another order."""
    spec = QuantSpec(spec_text)
    q = quantize(torch.zeros(1, 1, dtype=torch.float32, device="cpu"), spec)
    return other_direction(spec, (1, 1), q.named(), "columnwise") is not None


def _fill(q: QuantizedTensor, payload: torch.Tensor, metadata: Gathered) -> None:
    """Writes gathered codes into the buffers of the whole weight."""
    buffers = q.buffers()
    for direction, sent in zip(("rowwise", "columnwise"), metadata.sent, strict=True):
        if not sent:
            buffers[f"{direction}_scale"].view(torch.uint8).fill_(255)  # in each format of scales a NaN
    got = {name: t for name, t in buffers.items() if metadata.sent[name.startswith("columnwise")]}
    unpack(payload, metadata.parts, q.spec_text, got)
    for name, tensor in metadata.shared.items():
        buffers[name].copy_(tensor)
        if runs_later(tensor.device):  # made on fully_shard's own stream, whose next gather would overwrite it
            tensor.record_stream(torch.accelerator.current_stream(tensor.device))
    if metadata.wanted == BOTH and metadata.sent != BOTH:
        named = dict.fromkeys(q.named()) | got
        for name, tensor in other_direction(q.spec, q.shape, named, "columnwise").items():
            if tensor is not None:
                buffers[name].copy_(tensor)


# --- a model is prepared, and its layers ask for what was gathered


def gather_codes(model: torch.nn.Module, recipe: Recipe | str, *, recompute: bool = False) -> None:
    """After this call, fully_shard gathers codes of the weights of quire's layers instead of the weights. Call it
    before fully_shard.

    Parameters keep their dtype, and optimizers update their values. Each rank quantizes its own rows. Codes and scales
    are then gathered: rowwise ones for forward, columnwise ones for backward. If the weight is not resharded after
    forward, both are gathered at once. Results have the same bits as if weights were gathered and then quantized.
    Amaxes of whole weights are reduced before, in one collective for all weights that are gathered together. Gradients
    are reduced and scattered in high precision.

    Some weights are gathered as values, with a warning: weights whose shards are not equal or do not end on blocks (of
    32 rows for MXFP8 and MXFP4, 16 for NVFP4, 128 for fp8_block), weights of three dimensions, weights of layers with
    parameters_split, and weights that are shared with a module that is not quire's, such as an embedding.

    A quantized weight (quantized_model_init) must have a master and the dtype float32. Its master becomes the
    parameter.

    Args:
        model: the model. It changes in place.
        recipe: the recipe under which the layers will run.
        recompute: True if backward runs the forward pass again (activation checkpointing). Backward then gathers codes
            of both directions. Without it a layer that runs again raises an error; in a function that was compiled with
            the checkpoint in it, gradients are NaN.

    Raises:
        ValueError: if the recipe's backward pass needs weights in high precision, if the model has no layers of quire,
            and without recompute for a LayerNormMLP(checkpoint=True), unless the recipe has
            backward_override="dequantized".
        NotImplementedError: for a weight that is a DTensor already, that is quantized without a master, or whose
            gradient goes to main_grad or backward_dw(). The model is then unchanged.
    """
    check_type("gather_codes", torch.nn.Module, model=model)
    check_type("gather_codes", bool, recompute=recompute)
    recipe = as_recipe("gather_codes", recipe)
    check_type("gather_codes", Recipe, recipe=recipe)
    _check_recipe(recipe)
    layers = [module for module in model.modules() if hasattr(module, "products")]
    if not layers:
        raise ValueError(
            f"gather_codes: {type(model).__name__} has no layers of quire, whose weights could be gathered as codes; "
            "convert it with quire.convert first"
        )
    others = parameters_of_others(model)
    found = [(layer, *each) for layer in layers for each in _weights(layer, recipe, recompute, others)]
    gathering: dict[torch.nn.Module, Gathering] = {}
    made: dict[int, torch.nn.Parameter] = {}  # layers may share one
    for layer, name, weight, master in found:
        setattr(layer, name, made.setdefault(id(weight), torch.nn.Parameter(master, weight.requires_grad)))
        gathering.setdefault(layer, Gathering())
    for layer, own in gathering.items():
        layer.gathering = own
        layer.register_state_dict_post_hook(_plain_state)


def _weights(
    layer: torch.nn.Module, recipe: Recipe, recompute: bool, others: set[torch.nn.Parameter]
) -> Iterator[tuple[str, torch.nn.Parameter, MasterShard]]:
    """Name, parameter and new parameter of the weights of a layer that can be gathered as codes."""
    kind = type(layer).__name__
    if getattr(layer, "checkpoint", False) and not recompute and recipe.backward_override != "dequantized":
        raise ValueError(
            f"gather_codes: a quire.{kind} with checkpoint=True runs its forward pass again in backward, for which "
            "backward has to gather codes of both directions; pass recompute=True, or make the layer without checkpoint"
        )
    for name in layer.weight_names:
        what = f"gather_codes: quire.{kind}.{name}"
        check_own_parameter(what, layer, name)
        weight = layer._parameters[name]
        _check_weight(what, layer, weight)
        if weight.dim() != 2 or name not in _named(layer) or weight in others:
            why = "has three dimensions" if weight.dim() != 2 else "is a part of a weight"
            why = "is a parameter of another module too" if weight in others else why
            warnings.warn(f"{what} {why}; its values are gathered instead, and quantized afterwards", stacklevel=3)
            continue
        exact = isinstance(weight, QuantizedTensor)
        values = weight.master if exact else weight.detach()
        from_codes = recipe.backward_override == "dequantized"
        slot = _slot(layer, name) if recipe.delayed() else None
        options = Options(f"quire.{kind}", name, recipe.weight_spec, from_codes, recompute, exact, slot)
        yield name, weight, MasterShard(values, options)


def _slot(layer: torch.nn.Module, name: str) -> tuple[str, int]:
    """The matmul of a weight, and the slot of its forward scales that the weight has."""
    for product in layer.products:
        names = list(layer.weights(product))
        if name in names:
            return product, layer.groups + names.index(name)
    raise AssertionError("unreachable")


def _named(layer: torch.nn.Module) -> set[str]:
    """The names of the weights that matmuls read as they are."""
    return {name for product in layer.products for name in layer.weights(product)}


def _check_recipe(recipe: Recipe) -> None:
    if recipe.delayed() and len(recipe.delayed_operands) < 3:
        raise NotImplementedError(
            f"gather_codes: delayed scaling of {' and '.join(recipe.delayed_operands)} alone is not available; give "
            "all operands of a matmul delayed scaling, or none"
        )
    if recipe.backward_override == "high_precision":
        raise ValueError(
            f"gather_codes: the backward pass of {type(recipe).__name__}(backward_override='high_precision') needs "
            "weights and not codes; leave gather_codes out, or use backward_override='dequantized' or None"
        )


def _check_weight(what: str, layer: torch.nn.Module, weight: torch.Tensor) -> None:
    if is_dtensor(weight) or isinstance(weight, MasterShard):
        how = f"is a DTensor with {weight.placements}" if is_dtensor(weight) else "is prepared already"
        raise NotImplementedError(
            f"{what} {how}; call gather_codes once, before fully_shard, and leave out layers that parallelize_module "
            "has sharded, whose weights are gathered as they are"
        )
    if isinstance(weight, QuantizedTensor) and (weight.master is None or weight.dtype != torch.float32):
        raise NotImplementedError(
            f"{what} is quantized, with the dtype {weight.dtype} and {'no' if weight.master is None else 'a'} master; "
            "make the model in float32 within quire.quantized_model_init(keep_master=True), and let "
            "MixedPrecisionPolicy(param_dtype=...) choose another dtype"
        )
    if layer.external_wgrad:
        raise NotImplementedError(
            f"{what}: fuse_wgrad_accumulation and delay_wgrad_compute keep gradients of weights from fully_shard, "
            "which reduces and scatters them; leave these options out"
        )


def _plain_state(module: torch.nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """Makes the entries of a state_dict plain tensors, or DTensors of plain tensors, of the same memory."""
    for name in module.weight_names:
        value = state.get(prefix + name)
        if isinstance(value, torch.nn.Parameter):
            continue  # keep_vars
        part = value._local_tensor if is_dtensor(value) else value
        if isinstance(part, MasterShard):
            state[prefix + name] = placed_like(value, part.values)


def check_gathered(layer: torch.nn.Module, product: str, recipe: Recipe) -> None:
    """Raises RuntimeError if the codes that a forward pass needs have not been gathered."""
    what, gathering = f"quire.{type(layer).__name__}", layer.gathering
    for name, weight in layer.weights(product).items():
        if isinstance(weight, QuantizedTensor) and weight.spec_text != recipe.weight_spec:
            raise RuntimeError(
                f"{what}: codes of {name} are gathered as {weight.spec_text}, and the active recipe, "
                f"{type(recipe).__name__}, quantizes weights as {recipe.weight_spec}; pass one recipe to gather_codes "
                "and to autocast"
            )
        if gathering.directions.get(name) == COLUMNWISE:
            raise RuntimeError(
                f"{what}: the gather of this backward pass has only brought the columnwise codes of {name}, and the "
                "layer's forward pass runs again (activation checkpointing); prepare the model with "
                "quire.distributed.gather_codes(model, recipe, recompute=True)"
            )


def gathered_amaxes(layer: torch.nn.Module, product: str) -> torch.Tensor | None:
    """float32, one for each weight of a matmul: amaxes of weights whose codes were gathered; None for other weights."""
    if layer.gathering is None:
        return None
    each = [layer.gathering.amaxes.get(name) for name in layer.weights(product)]
    return None if None in each else torch.cat([rowwise for rowwise, _ in each])
