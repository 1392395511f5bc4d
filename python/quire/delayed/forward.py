"""The functions that a layer calls in a forward pass under a delayed recipe (numerics.md 1.5)."""

from collections.abc import Sequence

import torch

from quire.checks import check_type
from quire.delayed.rules import THREAD, Rule, ends_a_step, scales_are_constants, trains
from quire.delayed.state import DelayedState
from quire.loading.deferred import is_exporting
from quire.tensor import QuantizedTensor

_SPEC = "fp8_tensor"


class PresentStep:
    """The step whose scales forward passes of this thread use now. ended() says later whether they use other scales."""

    def __init__(self) -> None:
        recorded = None if THREAD.scales is None else THREAD.scales.step
        self._steps = THREAD.steps if recorded is None else recorded._steps
        self._number = self._steps[0] if recorded is None else recorded._number
        self._outermost = ends_a_step(0)

    def ended(self) -> bool:
        return self._steps[0] != self._number

    def next_ended(self) -> bool:
        """The same of the step that the next context with a delayed recipe belongs to. To be called where a repetition
        enters this context: it began a step if gradients are enabled there."""
        return self._steps[0] != self._number + int(self._outermost and trains())


class RecordedScales:
    """The scales that a forward pass used. They are used again when the forward pass is recomputed (quire.checkpoint),
    perhaps after later steps.

    The object is a context manager. The first `with` records the scales of the layers in their order. Every later
    `with` gives the same scales to the layers, and collects no amaxes, because the first pass has collected them. Both
    passes must call the same layers in the same order. Compiled functions do not need it: their graphs save the scales.
    """

    def __init__(self) -> None:
        self._scales: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._next: int | None = None
        self._outer: list[RecordedScales | None] = []
        self.step = PresentStep()

    def __enter__(self) -> "RecordedScales":
        self._outer.append(THREAD.scales)
        THREAD.scales = self
        return self

    def __exit__(self, *exception: object) -> None:
        THREAD.scales = self._outer.pop()
        self._next = 0

    @property
    def replays(self) -> bool:
        """Whether the present pass is a repetition, of this record or of one around it."""
        outer = self._outer[-1]
        return self._next is not None or (outer is not None and outer.replays)

    def of(self, state: DelayedState) -> tuple[torch.Tensor, torch.Tensor]:
        if self._next is None:
            outer = self._outer[-1]
            self._scales.append((state.fwd_scale, state.bwd_scale) if outer is None else outer.of(state))
            return self._scales[-1]
        self._next += 1
        return self._scales[self._next - 1]


def scales(state: DelayedState) -> tuple[torch.Tensor, torch.Tensor]:
    """The scales that a forward pass of the layer uses now: float32 [3 * groups] for x, w and y, and [2 * groups] for
    dy and dx. A recomputation uses the scales of the first pass.

    Args:
        state: the state of a layer.
    """
    check_type("delayed.scales", DelayedState, state=state)
    recorded = THREAD.scales
    return (state.fwd_scale, state.bwd_scale) if recorded is None else recorded.of(state)


def quantize(
    x: torch.Tensor, scale: torch.Tensor, slot: int, columnwise: bool, spec: str = _SPEC
) -> list[torch.Tensor]:
    """x quantized with a scale of delayed scaling (numerics.md 1.5).

    Args:
        x: float32, float16 or bfloat16.
        scale: fwd_scale of a state.
        slot: which element of it: 0 for x, 1 for w, 2 for y (with groups: slot * groups + group).
        columnwise: whether to compute columnwise codes too.
        spec: the spec of the codes, of the family fp8_tensor.

    Returns:
        Its six buffers; the third is the amax.

    Raises:
        TypeError: if x or scale is not a tensor, or slot is not an int.
        ValueError: for a slot that scale does not have.
        RuntimeError: for another dtype.
    """
    check_type("delayed.quantize", torch.Tensor, x=x, scale=scale)
    check_type("delayed.quantize", int, slot=slot)
    if scale.dim() != 1:
        raise ValueError(f"delayed.quantize: scale must have one dimension, as fwd_scale; got {list(scale.shape)}")
    if not 0 <= slot < scale.shape[0]:
        raise ValueError(
            f"delayed.quantize: slot must be from 0 to {scale.shape[0] - 1}, one of the {scale.shape[0]} elements of "
            f"scale, got {slot}"
        )
    options = spec, True, columnwise, 0, 0, scale[slot : slot + 1]
    if is_exporting():
        # run_decompositions() turns detach() into an alias, whose codes would want a gradient again.
        return torch.ops.quire.quantize_through(x, *options)[1:]
    return torch.ops.quire.quantize(x.detach(), *options)


def collect(state: DelayedState, rule: Rule | None, x_amax: torch.Tensor, w_amax: torch.Tensor | None) -> None:
    """Adds the amaxes of a forward pass to the state: the largest of the collected one and this one remains.

    Args:
        state: the state of the layer.
        rule: the result of enter(). With None it does nothing, as in a recomputation, in an exported program (whose
            scales are constants) and on the meta device.
        x_amax: float32 [groups].
        w_amax: float32 [groups]. None if w was not quantized now.
    """
    check_type("delayed.collect", DelayedState, state=state)
    if _collects(rule) and not state.fwd_amax.is_meta:
        number = rule.on(state.usage.device)
        torch.ops.quire.delayed_collect_(state.fwd_amax, state.usage, number, x_amax, w_amax)
        if not torch.compiler.is_compiling():
            state.rule = rule
            THREAD.collections += 1


def collect_output(state: DelayedState, rule: Rule | None, y_amax: torch.Tensor) -> None:
    """collect() for the amax of a quantized result: y_amax, float32 [1].

    Args:
        state: the state of the layer.
        rule: as for `collect`.
        y_amax: float32 [1].
    """
    check_type("delayed.collect_output", DelayedState, state=state)
    if _collects(rule):
        torch.ops.quire.amax_max_(state.fwd_amax, y_amax, 2)


def collect_weight(state: DelayedState, w_amax: torch.Tensor) -> None:
    """collect() for a weight that was quantized outside of a forward pass: w_amax, float32 [1].

    Args:
        state: the state of the layer.
        w_amax: float32 [1].
    """
    check_type("delayed.collect_weight", DelayedState, state=state)
    torch.ops.quire.amax_max_(state.fwd_amax, w_amax, 1)


def keep_largest(amax: torch.Tensor, value: torch.Tensor) -> None:
    """amax[0] = max(amax[0], value[0]) for float32 vectors. By an operator, which keeps subnormal amaxes in every
    floating-point mode of the caller, unlike torch.maximum (numerics.md 0.7)."""
    torch.ops.quire.amax_max_(amax, value, 0)


def _collects(rule: Rule | None) -> bool:
    recomputes = THREAD.scales is not None and THREAD.scales.replays
    return rule is not None and not recomputes and not scales_are_constants()


def measure(
    state: DelayedState, x: torch.Tensor, weights: Sequence[torch.Tensor], offsets: torch.Tensor | None
) -> list[torch.Tensor | None]:
    """The amaxes of x and of the weights for collect(), where no codes are needed (calibration): two float32 [groups].

    Args:
        state: the state of the layer.
        x: `[*, K]`.
        weights: one for each group. The amaxes of those that are QuantizedTensors are None.
        offsets: int32 [groups], the row at which each group ends; None: one group.
    """
    check_type("delayed.measure", DelayedState, state=state)
    check_type("delayed.measure", torch.Tensor, x=x)
    groups, scale = len(weights), state.fwd_scale
    x_amax = torch.ops.quire.grouped_quantize(x.detach(), offsets, _SPEC, False, scale[:groups])[2]
    if isinstance(weights[0], QuantizedTensor):
        return [x_amax, None]
    return [x_amax, torch.cat([quantize(w, scale, groups + group, False)[2] for group, w in enumerate(weights)])]
