"""The state of delayed scaling that a layer owns (numerics.md 1.4)."""

import gc
import itertools
import os
import threading
import weakref
from typing import NamedTuple

import torch
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from quire.checks import check_type
from quire.delayed.rules import Rule, rule_of, text_of
from quire.loading.deferred import mark_static
from quire.loading.devices import has_values, runs_later

#: Rows of a history. `usage` says how many are in use, so that another amax_history_len changes a value and not a
#: shape, which would compile graphs again. Only a longer one makes the history grow.
_ROWS = 1024
#: Held while histories are made and while a step ends: tensors that another thread uses must not be replaced.
STEPPING = threading.Lock()
os.register_at_fork(before=STEPPING.acquire, after_in_parent=STEPPING.release, after_in_child=STEPPING.release)


class Collected(NamedTuple):
    """The attributes of a DelayedState that a call of its layer writes: copies."""

    rule: Rule | None
    usage: torch.Tensor
    fwd_amax: torch.Tensor
    bwd_amax: torch.Tensor


class DelayedState:
    """The state of delayed scaling of one matmul of a layer, y = x w^T, and of its gradients.

    The tensors are not buffers of the layer: DistributedDataParallel would overwrite them with those of the first rank,
    and the state dict must be that of torch.nn.Linear. Copies and pickles of a layer keep its state.

    Args:
        device: of the tensors. None: torch's default.
        groups: the number of groups of tokens that have scales of their own.
        reduced: whether amaxes are reduced over ranks. False if each rank has other groups (ep_group).

    Attributes:
        fwd_scale: float32 [3], the scales of x, w and y (*slots*). A value is multiplied by the scale before it is
            rounded. A step replaces the tensor and never writes to it. A matmul with `groups` groups has [3 * groups]:
            all groups of x, then of w, then of y.
        fwd_amax: float32 of the same shape, the amaxes. An amax is row 0 of the history (numerics.md 1.4).
        bwd_scale: float32 [2], the scales of dy and dx.
        bwd_amax: float32 [2], the amaxes of dy and dx.
        fwd_history: float32 [rows, 3]; None until a delayed recipe is used in the process.
        bwd_history: float32 [rows, 2]; None until a delayed recipe is used in the process.
        fwd_newest: the values of fwd_scale and bwd_scale in memory that is never replaced. Steps in Python write it. So
            a step that was captured once (CUDA graphs) continues from its last replay.
        bwd_newest: see fwd_newest.
        bwd_collected: a second tensor with the memory of bwd_amax, which steps use. Backward passes have saved
            bwd_amax, and PyTorch raises an error if a graph with a later step has written to a saved tensor.
        usage: int64 [3]: the number of the rule that the layer ran under last (0: none), and the rows in use of the two
            histories.
        rule: the same rule as Python knows it. Runs of compiled graphs do not change it, and reading `usage` would make
            the host wait for the device.

    Raises:
        TypeError: for groups or reduced of another type.
        ValueError: for groups less than 1.
    """

    reduced = True

    def __init__(self, device: torch.device | str | None = None, groups: int = 1, reduced: bool = True) -> None:
        check_type("DelayedState", int, groups=groups)
        check_type("DelayedState", bool, reduced=reduced)
        if groups < 1:
            raise ValueError(f"DelayedState: groups must be at least 1, got {groups}; 1 is for one scale of all tokens")
        self.groups, self.reduced = groups, reduced
        self.reset(device)
        _register(self)

    def reset(self, device: torch.device | str | None) -> None:
        """Makes it a new state on the device: scales are 1, amaxes are 0, there is no history."""
        forward, backward = 3 * self.groups, 2 * self.groups
        options = {"dtype": torch.float32, "device": device}
        self.fwd_newest, self.bwd_newest = torch.ones(forward, **options), torch.ones(backward, **options)
        self.fwd_scale, self.bwd_scale = self._lent = self.fwd_newest.clone(), self.bwd_newest.clone()
        self.fwd_amax, self.bwd_amax = torch.zeros(forward, **options), torch.zeros(backward, **options)
        self.usage = torch.zeros(3, dtype=torch.int64, device=device)
        self.rule: Rule | None = None
        self._share()
        self.fwd_history: torch.Tensor | None = None
        self.bwd_history: torch.Tensor | None = None

    def _share(self) -> None:
        self.bwd_collected = torch.from_dlpack(self.bwd_amax) if self.usable else self.bwd_amax
        for value in vars(self).values():
            if isinstance(value, torch.Tensor):
                mark_static(value)

    @property
    def usable(self) -> bool:
        """Whether the tensors have values: they are not on the meta device and not made while tracing or within a
        transform of torch.func."""
        if type(self.usage) is not torch.Tensor or self.usage.is_meta:
            return False
        return torch.compiler.is_compiling() or not is_functorch_wrapped_tensor(self.usage)

    def to(self, device: torch.device) -> None:
        """Moves the tensors to the device. From the meta device, which has no values, it becomes a new state."""
        if self.usage.is_meta and has_values(device):
            self.reset(device)
        self.settle()
        for name, value in vars(self).items():
            if isinstance(value, torch.Tensor):
                setattr(self, name, value.to(device))
        self._lent = self.fwd_scale, self.bwd_scale
        self._share()

    def lend(self) -> None:
        """Later forward passes use the newest scales."""
        if runs_later(self.usage.device):
            self._used_here()
        with temporarily_clear_interpreter_stack():  # a transform of torch.func would wrap them
            lent = mark_static(self.fwd_newest.clone()), mark_static(self.bwd_newest.clone())
        self.fwd_scale, self.bwd_scale = self._lent = lent

    def settle(self) -> None:
        """Copies the scales of forward passes to the newest scales, because a step in a graph replaces only the
        former."""
        for scale, lent, newest in zip(
            (self.fwd_scale, self.bwd_scale), self._lent, (self.fwd_newest, self.bwd_newest), strict=True
        ):
            if scale is not lent:
                newest.copy_(scale)
        self._lent = self.fwd_scale, self.bwd_scale

    def _used_here(self) -> None:
        """Memory that comes from another stream is not lent again before this one is done with it."""
        stream = torch.accelerator.current_stream(self.usage.device)
        for value in vars(self).values():
            if isinstance(value, torch.Tensor):
                value.record_stream(stream)

    def direction(self, backward: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(history, scale, amax) of the forward or the backward direction, to which a step writes."""
        # A graph may put its own writes in the place of a later clone, which backward would then find changed.
        if torch.compiler.is_compiling():
            scale = (self.bwd_scale if backward else self.fwd_scale).clone()
        else:
            scale = self.bwd_newest if backward else self.fwd_newest
        return (self.bwd_history, scale, self.bwd_collected) if backward else (self.fwd_history, scale, self.fwd_amax)

    def reserve(self, rows: int) -> None:
        """Makes both histories have at least this number of rows, and at least 1024. Any thread can call it."""
        rows = max(rows, _ROWS)
        if self._has(rows):
            return
        with STEPPING, temporarily_clear_interpreter_stack():
            if not self._has(rows):
                self.bwd_history = _grown(self.bwd_history, rows, self.bwd_amax)
                self.fwd_history = _grown(self.fwd_history, rows, self.fwd_amax)  # last: it says that both are there

    def keep(self, written: torch.Tensor, backward: bool) -> None:
        """Keeps the history that a step has written, also if another thread has made a longer one during the step."""
        with STEPPING:
            history = self.bwd_history if backward else self.fwd_history
            if history is not written:
                history[: written.shape[0]] = written

    def _has(self, rows: int) -> bool:
        return self.fwd_history is not None and self.fwd_history.shape[0] >= rows

    def collected(self) -> Collected:
        """What calls of the layer have written since the last step, for restore()."""
        return Collected(self.rule, self.usage.clone(), self.fwd_amax.clone(), self.bwd_amax.clone())

    def restore(self, collected: Collected) -> None:
        """Takes back what calls have written since collected(). Through .data: a backward pass that is still to come
        has saved bwd_amax."""
        self.rule = collected.rule
        self.usage.data.copy_(collected.usage)
        self.fwd_amax.data.copy_(collected.fwd_amax)
        self.bwd_amax.data.copy_(collected.bwd_amax)

    def rule_text(self) -> str:
        """The text of the rule that the layer ran under last; "" if there is none."""
        return text_of(int(self.usage[0])) if self.usable else ""

    def set_rule(self, text: str) -> None:
        """Sets the rule that the layer ran under last; "" for none."""
        self.rule = rule_of(text) if text else None
        self.usage[:1].fill_(0 if self.rule is None else self.rule.number)

    # The number of a rule means nothing to another thread or process: its text travels.
    def __getstate__(self) -> dict[str, object]:
        return vars(self) | {"rule": self.rule_text()}

    def __setstate__(self, state: dict[str, object]) -> None:
        rule = state.pop("rule")
        vars(self).update(state)
        self.rule = None
        if "fwd_newest" not in state:  # of a pickle from before there were these
            self.fwd_newest, self.bwd_newest = self.fwd_scale.clone(), self.bwd_scale.clone()
            self._lent = self.fwd_scale, self.bwd_scale
        self._share()
        if self.usable:
            self.set_rule(rule)
        _register(self)


def _grown(history: torch.Tensor | None, rows: int, like: torch.Tensor) -> torch.Tensor:
    grown = like.new_zeros(rows, like.shape[0])
    if history is not None:
        grown[: history.shape[0]] = history
    return mark_static(grown)


#: The states that are alive, in the order of construction, by a number that stays theirs when others go: a graph that
#: has them as inputs finds them by it.
_STATES: dict[int, "weakref.ref[DelayedState]"] = {}
_NUMBERS = itertools.count()


class _Shared:
    """The states of a process that reduces amaxes over ranks. made: whether there are new ones since."""

    states: tuple["DelayedState | None", ...] = ()
    made = True


def keep_as_other_ranks() -> None:
    """Makes states end at the same steps on every rank, before ranks reduce amaxes of all states in one collective.

    A layer in a reference cycle ends when the garbage collector happens to run, which differs between ranks. So states
    stay alive until a new one is made, and then garbage is collected.
    """
    if _Shared.made:
        _Shared.made, _Shared.states = False, ()
        gc.collect()
        _Shared.states = tuple(ref() for ref in list(_STATES.values()))


def _register(state: DelayedState) -> None:
    number = next(_NUMBERS)
    _STATES[number] = weakref.ref(state, lambda _: _STATES.pop(number, None))
    _Shared.made = True  # last, or another thread may collect before the state is there


def usable_states() -> list[DelayedState]:
    """Every state of the process that is alive and has values, in the order of construction."""
    found = []
    for ref in list(_STATES.values()):  # a copy: the garbage collector may remove one at any time
        state = ref()
        if state is not None and state.usable:
            found.append(state)
    return found
