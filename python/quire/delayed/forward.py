"""What a layer calls in a forward pass under a delayed recipe (numerics.md 1.5)."""

from collections.abc import Sequence

import torch

from quire.checks import check_type
from quire.delayed.rules import THREAD, Rule
from quire.delayed.state import DelayedState
from quire.tensor import QuantizedTensor

_SPEC = "fp8_tensor"


class RecordedScales:
    """The scales that the layers of a forward pass used, in order, for its recomputation outside of a graph, which may
    come after other steps. (A compiled recomputation has them as inputs that its forward saved.)

    with recorded: the first time records, every other time replays, and then collects no amaxes: those of the forward
    pass have been, perhaps for an earlier step. Numbers of layers must agree.
    """

    def __init__(self) -> None:
        self._scales: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._next: int | None = None
        self._outer: list[RecordedScales | None] = []

    def __enter__(self) -> "RecordedScales":
        self._outer.append(THREAD.scales)
        THREAD.scales = self
        return self

    def __exit__(self, *exception: object) -> None:
        THREAD.scales = self._outer.pop()
        self._next = 0

    @property
    def replays(self) -> bool:
        """Whether what runs now has run before, here or in a recorded pass around this one."""
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
    """The forward and backward scale for a forward pass now."""
    check_type("delayed.scales", DelayedState, state=state)
    recorded = THREAD.scales
    return (state.fwd_scale, state.bwd_scale) if recorded is None else recorded.of(state)


def quantize(
    x: torch.Tensor, scale: torch.Tensor, slot: int, columnwise: bool, spec: str = _SPEC
) -> list[torch.Tensor]:
    """The six buffers of x under that slot of a state's forward scale (numerics.md 1.5); the third is the amax."""
    check_type("delayed.quantize", torch.Tensor, x=x, scale=scale)
    options = spec, True, columnwise, 0, 0, scale[slot : slot + 1]
    if torch.compiler.is_exporting():
        # run_decompositions() turns detach() into an alias, whose codes would want a gradient again.
        return torch.ops.quire.quantize_through(x, *options)[1:]
    return torch.ops.quire.quantize(x.detach(), *options)


def collect(state: DelayedState, rule: Rule | None, x_amax: torch.Tensor, w_amax: torch.Tensor | None) -> None:
    """Puts amaxes, float32 [1], into the state. w_amax: None if w was not quantized now; rule: as enter() returned. An
    exported program has the scales as constants and collects nothing, and on the meta device there are no amaxes."""
    check_type("delayed.collect", DelayedState, state=state)
    if _collects(rule) and not state.fwd_amax.is_meta:
        number = rule.on(state.usage.device)
        torch.ops.quire.delayed_collect_(state.fwd_amax, state.usage, number, x_amax, w_amax)
        if not torch.compiler.is_compiling():
            state.rule = rule
            THREAD.collections += 1


def collect_output(state: DelayedState, rule: Rule | None, y_amax: torch.Tensor) -> None:
    """collect() for the amax of a result that is quantized."""
    check_type("delayed.collect_output", DelayedState, state=state)
    if _collects(rule):
        torch.ops.quire.amax_max_(state.fwd_amax, y_amax, 2)


def collect_weight(state: DelayedState, w_amax: torch.Tensor) -> None:
    """collect() for a weight that is quantized apart from forward passes."""
    check_type("delayed.collect_weight", DelayedState, state=state)
    torch.ops.quire.amax_max_(state.fwd_amax, w_amax, 1)


def _collects(rule: Rule | None) -> bool:
    recomputes = THREAD.scales is not None and THREAD.scales.replays
    return rule is not None and not recomputes and not torch.compiler.is_exporting()


def measure(
    state: DelayedState, x: torch.Tensor, weights: Sequence[torch.Tensor], offsets: torch.Tensor | None
) -> list[torch.Tensor | None]:
    """The amaxes of x and of each group's weight for collect() where their codes are not used, which calibrates:
    float32 [E] each. offsets: the row at which each group ends, or None for one group. Those of weights that stay
    quantized are None."""
    check_type("delayed.measure", DelayedState, state=state)
    check_type("delayed.measure", torch.Tensor, x=x)
    groups, scale = len(weights), state.fwd_scale
    x_amax = torch.ops.quire.grouped_quantize(x.detach(), offsets, _SPEC, False, scale[:groups])[2]
    if isinstance(weights[0], QuantizedTensor):
        return [x_amax, None]
    return [x_amax, torch.cat([quantize(w, scale, groups + group, False)[2] for group, w in enumerate(weights)])]
