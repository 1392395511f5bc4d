"""Data parallelism: which data a rank has (data_parallel_rank), and within a graph weights whose rows come together in
each pass of a layer (shard_weights).

y = x w^T + bias of such a weight (sharded_linear) is nodes of the graph. They gather codes where codes of the parts are
those of the whole, else values.
"""

import contextlib
import functools
import math
import threading
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import distributed

from quire.checks import check_type, describe
from quire.distributed import check_ranks
from quire.distributed.check_ranks import agree_in_graph
from quire.distributed.code_payload import axes_of, why_not
from quire.distributed.groups import broadcast, name_of
from quire.distributed.placements import check_own_parameter, is_dtensor, parameters_of_others
from quire.functional import Buffers, input_buffers, sent_by_gloo, start_gather
from quire.loading.deferred import assume_constant_result
from quire.recipe import Recipe, as_recipe
from quire.recipe.linear_spec import LinearSpec
from quire.tensor import QuantizedTensor, QuantSpec

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class _State(threading.local):
    def __init__(self) -> None:
        self.rank: int | None = None


_STATE = _State()


@contextlib.contextmanager
def data_parallel_rank(rank: int) -> Iterator[None]:
    """Layers that are made, converted or reset within this context get this data-parallel rank, for stochastic
    rounding. Layers with equal data-parallel rank, made after the same torch.manual_seed, draw the same random numbers.
    Layers with different data-parallel ranks draw different ones. A layer keeps its data-parallel rank when it is reset
    later. The context holds for this thread.

    Without this context, the data-parallel rank is the rank in torch.distributed's default group. For a layer that is
    sharded over a group, it is the rank that the first member of the group has in the default group.

    Args:
        rank: a number that says on which data the layers compute, such as mesh["dp"].get_local_rank(). All ranks of a
            tensor-parallel group compute on the same tokens, so they must pass the same number. If the tokens are
            sharded and the layer is not (sequence parallelism), pass torch.distributed.get_rank().

    Raises:
        TypeError: if rank is not an int.
        ValueError: if rank is negative.
    """
    check_type("data_parallel_rank", int, rank=rank)
    if rank < 0:
        raise ValueError(f"data_parallel_rank: rank must be 0 or more, got {rank}")
    outer, _STATE.rank = _STATE.rank, rank
    try:
        yield
    finally:
        _STATE.rank = outer


def declared_rank() -> int | None:
    """The rank of the innermost data_parallel_rank(), or None."""
    return _STATE.rank


def shard_weights(model: torch.nn.Module, mesh: "DeviceMesh", recipe: Recipe | str | None = None) -> None:
    """Data parallelism in one graph: shards the rows of the weights over ranks, each of which has its own batch. The
    layers gather their weights by nodes of the graph, so torch.compile(fullgraph=True) captures the whole model.
    (fully_shard gathers them in hooks, which cannot be part of a graph.)

    Weights of Linear, LayerNormLinear and LayerNormMLP become DTensors Shard(0) with the values of the first rank.
    Forward gathers rowwise codes, and backward columnwise codes. Backward reduces and scatters the mean of the
    gradients. Between the passes a rank keeps only its rows. Values are gathered instead of codes without a recipe.
    With a warning, they are gathered too if shards do not end on blocks of the recipe (gather_codes).

    All other parameters stay whole on every rank. They get the values of the first rank. A hook computes the mean of
    their gradients; copies of the model do not have this hook. With a warning, this also holds for weights whose number
    of rows is not a multiple of the number of ranks, and for weights that are shared with a module that is not quire's.

    Args:
        model: the model. It changes in place.
        mesh: a mesh of one dimension.
        recipe: the recipe under which the layers will run. None: high precision. Another recipe gives right results
            too.

    Raises:
        TypeError: for a model or a mesh of another type.
        ValueError: for a mesh of several dimensions.
        NotImplementedError: for delayed scaling, for weights that are quantized or DTensors already, and for main_grad
            and delay_wgrad_compute. The model is then unchanged.
    """
    import torch.distributed.tensor  # which takes longer to import than all of quire

    check_type("shard_weights", torch.nn.Module, model=model)
    recipe = as_recipe("shard_weights", recipe)
    if not isinstance(mesh, distributed.device_mesh.DeviceMesh):
        raise TypeError(
            "shard_weights: mesh must be a DeviceMesh of one dimension, such as torch.distributed.device_mesh."
            f"init_device_mesh('cuda', (8,)), got {describe(mesh)}"
        )
    if mesh.ndim != 1:
        raise ValueError(f"shard_weights: mesh must have one dimension, such as mesh['dp'], got {mesh}")
    if recipe is not None and recipe.delayed():
        refuse_delayed("shard_weights")
    layers = [module for module in model.modules() if hasattr(module, "products")]
    for layer in layers:
        _check(layer)
    fields = {f"parameter {name}": f"{p.dtype} {list(p.shape)}" for name, p in model.named_parameters()}
    group, device = mesh.get_group(), torch.device(mesh.device_type)
    check_ranks.agree(model, "shard_weights", (object(),), lambda: ("shard_weights", fields), group, device=device)
    shards, others = Shards(group), parameters_of_others(model)
    made: dict[torch.nn.Parameter, torch.nn.Parameter] = {}  # layers may share one
    for layer in layers:
        for name in _rows_of_products(layer):
            weight = layer._parameters[name]
            what = f"shard_weights: quire.{type(layer).__name__}.{name}"
            if weight in others:
                warnings.warn(f"{what} is a parameter of another module too; each rank keeps all", stacklevel=2)
            elif weight in made or _fits(what, weight, shards.size, recipe):
                if weight not in made:
                    placed = distributed.tensor.distribute_tensor(weight.detach(), mesh, [distributed.tensor.Shard(0)])
                    made[weight] = torch.nn.Parameter(placed, weight.requires_grad)
                layer._parameters[name] = made[weight]
                layer.shards = {**(layer.shards or {}), name: shards}
    for parameter in model.parameters():
        if not is_dtensor(parameter):
            _keep_alike(parameter, group)


def refuse_delayed(what: str) -> None:
    """Raises NotImplementedError."""
    raise NotImplementedError(
        f"{what}: weights that shard_weights has sharded do not go with DelayedScaling; use Float8CurrentScaling, or "
        "fully_shard with quire.distributed.gather_codes"
    )


def _rows_of_products(layer: torch.nn.Module) -> list[str]:
    """The weights of a layer whose matmuls have one each, as a parameter."""
    names = [name for product in layer.products for name in layer.weights(product)]
    one_each = names == [f"{product}_weight" if product else "weight" for product in layer.products]
    weights = [layer._parameters.get(name) for name in names]
    return names if one_each and all(weight is not None and weight.dim() == 2 for weight in weights) else []


def _check(layer: torch.nn.Module) -> None:
    for name in layer.weight_names:
        what = f"shard_weights: quire.{type(layer).__name__}.{name}"
        check_own_parameter(what, layer, name)
        weight = layer._parameters[name]
        if is_dtensor(weight) or isinstance(weight, QuantizedTensor) or type(weight) is not torch.nn.Parameter:
            raise NotImplementedError(
                f"{what} must be a plain parameter, got a {type(weight).__name__}; call shard_weights once, on a model "
                "that is made outside of quire.quantized_model_init and that nothing else has sharded"
            )
        if layer.external_wgrad or any(layer.of(product, "parallel") is not None for product in layer.products):
            raise NotImplementedError(
                f"{what}: fuse_wgrad_accumulation, delay_wgrad_compute and parallel= do not go with sharded rows; make "
                "the layer without them"
            )


def _fits(what: str, weight: torch.Tensor, size: int, recipe: Recipe | None) -> bool:
    """Whether the rows are sharded. Warns if they are not, or if codes of the parts are not those of the whole."""
    rows = weight.shape[0]
    if rows % size:
        warnings.warn(f"{what}: its {rows} rows are no multiple of {size} ranks; each keeps all", stacklevel=3)
        return False
    reason = "" if recipe is None else why_not(QuantSpec(recipe.weight_spec), rows // size)
    if reason:
        warnings.warn(
            f"{what}: a part has {rows // size} rows, and {reason}; its values are gathered instead of codes",
            stacklevel=3,
        )
    return True


def _keep_alike(parameter: torch.nn.Parameter, group: "distributed.ProcessGroup") -> None:
    """The values of the first rank, and the mean of gradients."""
    broadcast(parameter.detach(), 0, group)
    if parameter.requires_grad:
        parameter.register_post_accumulate_grad_hook(functools.partial(_take_mean, group))


def _take_mean(group: "distributed.ProcessGroup", parameter: torch.Tensor) -> None:
    distributed.all_reduce(parameter.grad, group=group)
    parameter.grad /= group.size()


# --- the product of a weight whose rows are sharded

#: Data, scale and amax of one direction, as operators return them.
Codes = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

_X, _W, _BIAS = 1, 2, 4  # bits of what linear_bwd computes


@dataclass(frozen=True)
class Shards:
    """Over which ranks the rows of a weight are sharded. group: a process group, or its name."""

    group: "distributed.ProcessGroup | str"
    size: int = field(default=0)

    def __post_init__(self) -> None:
        if not isinstance(self.group, str):
            object.__setattr__(self, "size", self.group.size())
            object.__setattr__(self, "group", name_of(self.group))


class Plan(NamedTuple):
    """How a product is computed. group, size: as of Shards. text: of its recipe, or "". x, w, dy: specs. dx: the spec
    to which dx is rounded, or "". backward: the last part of the text. codes: whether codes of w are gathered. reduced:
    whether they follow from amaxes of the whole weight."""

    group: str
    size: int
    dtype: torch.dtype
    text: str
    x: str
    w: str
    dy: str
    dx: str
    backward: str
    codes: bool
    reduced: bool

    @property
    def from_codes(self) -> bool:
        """Whether backward multiplies codes."""
        return bool(self.w) and self.backward in ("", "requantized")

    @property
    def decodes_x(self) -> bool:
        """Whether backward multiplies decoded values of x."""
        return self.backward == "dequantized" and self.x != "none"

    @property
    def backward_form(self) -> str:
        """Of w: the direction of the codes that backward needs, or "values"."""
        return "columnwise" if self.from_codes else "rowwise" if self.backward == "dequantized" else "values"


def plan_of(specs: LinearSpec | None, rows: int, dtype: torch.dtype, shards: Shards) -> Plan:
    """rows: of the weight that each rank has. dtype: of the result."""
    if specs is None:
        return Plan(shards.group, shards.size, dtype, *[""] * 6, codes=False, reduced=False)
    return Plan(
        shards.group,
        shards.size,
        dtype,
        specs.text,
        specs.x,
        specs.w,
        specs.dy,
        specs.dx,
        specs.backward,
        codes=_ends_on_blocks(specs.w, rows),
        reduced=QuantSpec(specs.w).family in ("fp8_tensor", "fp8_row", "nvfp4"),
    )


@assume_constant_result
def _ends_on_blocks(spec: str, rows: int) -> bool:
    return not why_not(QuantSpec(spec), rows)


def sharded_linear(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    plan: Plan,
    *,
    sr_state: torch.Tensor | None = None,
    input_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """y [*, N] in the plan's dtype. x [*, K], w [N / size, K] of this rank, bias [N]. The gradient of w is this
    rank's rows of the mean over the ranks, each of which has its own x. sr_state: as for linear(). input_scale: of x,
    float32 [1], under a spec with the option `given`. What backward gathers it gathers when dy is there, so that only w
    is kept between the passes. First derivatives only. Raises RuntimeError if x and w do not agree."""
    if x.dim() == 0 or x.shape[-1] != w.shape[-1]:
        raise RuntimeError(f"linear: x {list(x.shape)} must end with the in_features of w, {w.shape[-1]}")
    return _Product.apply(x, w, bias, sr_state, input_scale, tuple(plan))


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor, *others: Any) -> torch.Tensor:
        bias, sr_state, input_scale, fields = others
        plan = Plan(*fields)
        own = _agreed(w, plan) if torch.compiler.is_compiling() else w
        amaxes = _amaxes(own, plan)
        weights, buffers = _Gather(own, amaxes, plan, "rowwise" if plan.w else "values").operands()
        keeps_codes = plan.decodes_x or (plan.from_codes and plan.backward != "requantized")
        out, biases, save = w.shape[0] * plan.size, [] if bias is None else [bias], ctx.needs_input_grad[1]
        given: Buffers = ()
        if input_scale is not None:
            given = input_buffers(x, plan.x, input_scale, None, save and plan.from_codes)
        y, *kept = torch.ops.quire.linear_fwd(
            x, weights, biases, None, out, plan.text, plan.dtype, int(keeps_codes and save), given, buffers
        )
        if given and save:
            kept = given[3:] if plan.from_codes else given
        of_x = kept[:3] if keeps_codes else [x, x.new_empty(0), x.new_empty(0)]
        ctx.save_for_backward(w, *amaxes, *of_x)
        ctx.fields, ctx.sizes, ctx.sr_state = fields, x.shape, sr_state
        return y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        w, rowwise_amax, columnwise_amax, *of_x = ctx.saved_tensors
        plan, (needs_x, needs_w, needs_bias, *_) = Plan(*ctx.fields), ctx.needs_input_grad
        # A graph would else gather in forward, and save the whole weight.
        own = torch.ops.quire.tie(w, dy) if torch.compiler.is_compiling() else w
        weight = _Gather(own, (rowwise_amax, columnwise_amax), plan, plan.backward_form) if needs_x else None
        gradients = _Gradients(plan, dy, ctx.sizes, ctx.sr_state, (needs_x, needs_w))
        dw = gradients.of_w(of_x) if needs_w else None
        operands = None if weight is None else weight.operands()
        # After the gather, because gloo is to have one at a time; beside dx.
        if dw is not None:
            dw = torch.ops._c10d_functional.reduce_scatter_tensor(dw.to(w.dtype), "sum", plan.size, plan.group)
        dx = None if operands is None else gradients.of_x(*operands)
        dbias = gradients.of_bias() if needs_bias else None
        return dx, None if dw is None else wait(dw) / plan.size, dbias, None, None, None


class _Gradients:
    """What backward computes on this rank. sizes: of x. needs: of x, of w."""

    def __init__(
        self, plan: Plan, dy: torch.Tensor, sizes: torch.Size, sr_state: torch.Tensor | None, needs: tuple[bool, bool]
    ) -> None:
        self.plan, self.dy, self.sizes = plan, dy, sizes
        self.codes: list[torch.Tensor] = []
        if plan.from_codes and any(needs):
            self.codes = torch.ops.quire.quantize(dy, plan.dy, *needs, 0, 0, None, None, None, sr_state)
            if sr_state is not None:
                torch.ops.quire.sr_advance_(sr_state)

    def of_w(self, of_x: list[torch.Tensor]) -> torch.Tensor:
        plan, out, inner = self.plan, self.dy.shape[-1], self.sizes[-1]
        if plan.from_codes:
            if plan.backward == "requantized":
                of_x = torch.ops.quire.quantize(of_x[0], plan.x, False, True)[3:]
            tokens = math.prod(self.sizes[:-1])
            return torch.ops.quire.linear_wgrad(*self.codes[3:], *of_x, tokens, out, inner, plan.text, plan.dtype)
        x = of_x[0]
        if plan.decodes_x:
            x = torch.ops.quire.grouped_dequantize(*of_x, None, plan.x, self.sizes, plan.dtype)
        return self._unquantized(x, [], [], _W)[1]

    def of_x(self, weights: list[torch.Tensor], buffers: list[torch.Tensor | None]) -> torch.Tensor:
        plan, out = self.plan, self.dy.shape[-1]
        if not plan.from_codes:
            return self._unquantized(self.dy, weights, buffers, _X)[0]
        dx = torch.ops.quire.linear_dgrad(*self.codes[:3], buffers, self.sizes, out, plan.text, plan.dtype)
        if not plan.dx:
            return dx
        q = torch.ops.quire.quantize(dx, plan.dx, True, False)
        return torch.ops.quire.dequantize(*q[:3], plan.dx, False, self.sizes, plan.dtype)

    def of_bias(self) -> torch.Tensor:
        return self._unquantized(self.dy, [], [], _BIAS)[2]

    def _unquantized(
        self, x: torch.Tensor, weights: list[torch.Tensor], buffers: list[torch.Tensor | None], needs: int
    ) -> list[torch.Tensor]:
        plan, inner = self.plan, self.sizes[-1]
        return torch.ops.quire.linear_unquantized_bwd(
            self.dy, None, x, weights, buffers, inner, plan.text, plan.dtype, needs
        )


# --- a weight's rows come together


def wait(t: torch.Tensor) -> torch.Tensor:
    """The result of a collective."""
    return torch.ops._c10d_functional.wait_tensor(t)


def _agreed(w: torch.Tensor, plan: Plan) -> torch.Tensor:
    """The values of w, to be sent when the ranks have parts of the same size."""
    if not sent_by_gloo(plan.group, w.device.type):
        return w
    own, fields = w.clone(), {"shard of the weight": f"{w.dtype} [{w.shape[0]}, {w.shape[1]}]"}
    agree_in_graph(own, plan.group, "a layer of shard_weights", fields, plan.text)
    return own


def _amaxes(w: torch.Tensor, plan: Plan) -> tuple[torch.Tensor, torch.Tensor]:
    """Rowwise and columnwise amaxes of the whole weight; empty where there are none, or the parts' are not needed."""
    if not (plan.codes and plan.reduced):
        return w.new_empty(0), w.new_empty(0)
    rowwise, columnwise = torch.ops.quire.amax(w, plan.w, True, True)
    spec = QuantSpec(plan.w)
    lines = spec.family == "fp8_row" or "row_scaled" in spec.options
    shared = columnwise if lines else torch.cat([rowwise, columnwise])
    shared = wait(torch.ops._c10d_functional.all_reduce(shared, "max", plan.group))
    if lines:
        return rowwise, shared
    rowwise, columnwise = shared.chunk(2)
    return rowwise.contiguous(), columnwise.contiguous()


class _Gather:
    """A gather of a weight that is under way, of which w are this rank's rows. form: "rowwise" or "columnwise"
    codes, or "values"."""

    def __init__(self, w: torch.Tensor, amaxes: tuple[torch.Tensor, torch.Tensor], plan: Plan, form: str) -> None:
        self.plan, self.form = plan, form
        self.own: Codes | None = None
        if plan.codes and form != "values":
            self.own, sent = _quantized(w, plan.w, form, amaxes if plan.reduced else None), []
            for t, axis in zip(self.own, axes_of(plan.w, form), strict=True):
                if axis >= 0:
                    sent.append(t.flatten().view(torch.uint8))
            # One collective of one dtype: gloo is to have one gather at a time.
            w = torch.cat(sent)
        self.started = start_gather(w, plan.size, plan.group)

    def operands(self) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
        """The whole weight as operators take it: values, or six buffers."""
        gathered = wait(self.started)
        if self.form == "values":
            return [gathered], []
        codes = _quantized(gathered, self.plan.w, self.form, None) if self.own is None else self._joined(gathered)
        absent = [None, None, None]
        return [], [*absent, *codes] if self.form == "columnwise" else [*codes, *absent]

    def _joined(self, gathered: torch.Tensor) -> Codes:
        gathered, begin, whole = gathered.view(self.plan.size, -1), 0, []
        for t, axis in zip(self.own, axes_of(self.plan.w, self.form), strict=True):
            if axis < 0:
                whole.append(t)
                continue
            count, sizes = t.numel() * t.element_size(), list(t.shape)
            sizes[axis] *= self.plan.size
            parts = gathered[:, begin : begin + count].contiguous().view(t.dtype).view(self.plan.size, *t.shape)
            whole.append(parts.movedim(0, axis).reshape(sizes).contiguous())
            begin += count
        return tuple(whole)


def _quantized(w: torch.Tensor, spec: str, form: str, amaxes: tuple[torch.Tensor, torch.Tensor] | None) -> Codes:
    columnwise = form == "columnwise"
    rowwise_amax, columnwise_amax = (None, None) if amaxes is None else amaxes
    given = (None, columnwise_amax) if columnwise else (rowwise_amax, None)
    q = torch.ops.quire.quantize(w, spec, not columnwise, columnwise, 0, 0, None, *given)
    return tuple(q[3:] if columnwise else q[:3])
