"""y = x w^T + bias of a weight whose rows ranks have parts of, which come together in each pass as nodes of the
graph: codes where codes of the parts are those of the whole, else values."""

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import distributed

from quire.distributed.check_ranks import agree_in_graph
from quire.distributed.code_payload import axes_of, why_not
from quire.distributed.groups import name_of
from quire.functional import Buffers, input_buffers, sent_by_gloo, start_gather
from quire.loading.for_dynamo import assume_constant_result
from quire.recipe.linear_spec import LinearSpec
from quire.tensor import QuantSpec

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


# ---------------------------------------------------------------- a weight's rows come together


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
