"""Delayed scaling: the state of a layer, and the step that turns amaxes into scales (numerics.md 1.4-1.7).

Forward and backward passes collect amaxes, by operators that take the state as tensors; nothing else happens to it
while a step is computed, so that a recomputed forward pass sees the scales of the first one. When the outermost
autocast of a delayed recipe is next entered with grad enabled, step() gives the layers new scale tensors: new ones,
because whoever holds an old one, such as a backward pass that is still to come, must keep its values.

No Python object changes while a layer runs: a compiled graph could not do that (within a checkpoint, Dynamo refuses).
Which recipe a state ran under last is therefore a number in a tensor of the state.
"""

import itertools
import threading
import weakref
from dataclasses import dataclass

import torch

from quire.recipe import DelayedScaling, Format

#: Rows of a history, of which `usage` says how many are in use: another amax_history_len is then another value and not
#: another shape, for which graphs would be compiled again. Only longer ones make it grow.
_ROWS = 1024
_LARGEST = {Format.E4M3: (448.0, 448.0), Format.HYBRID: (448.0, 57344.0)}  # forward, backward: numerics.md 1.1
_DIRECTIONS = (("fwd", False), ("bwd", True))
_MAX_RULES = 64
_SPEC = "fp8_tensor"


class DelayedState:
    """What delayed scaling remembers of one product of a layer, y = x w^T, and of its gradients.

    fwd_scale, fwd_amax: float32 [3], slots x, w, y. bwd_scale, bwd_amax: float32 [2], slots dy, dx. A scale multiplies
        before the cast; it is replaced, never written. An amax is row 0 of the contract's history.
    fwd_history, bwd_history: float32 [rows, 3], [rows, 2]; None until a delayed recipe is used in the process.
    usage: int64 [3], the number of the rule that it ran under last (0: never), rows in use of the two histories.

    Not registered as buffers: DistributedDataParallel would overwrite those with the first rank's, and a state_dict has
    to be torch.nn.Linear's. Copies and pickles of a layer keep its state.
    """

    def __init__(self, device: torch.device | str | None = None) -> None:
        self._reset(device)
        _register(self)

    def _reset(self, device: torch.device | str | None) -> None:
        self.fwd_scale, self.bwd_scale = torch.ones(3, device=device), torch.ones(2, device=device)
        self.fwd_amax, self.bwd_amax = torch.zeros(3, device=device), torch.zeros(2, device=device)
        self.usage = torch.zeros(3, dtype=torch.int64, device=device)
        self.fwd_history: torch.Tensor | None = None
        self.bwd_history: torch.Tensor | None = None

    @property
    def usable(self) -> bool:
        """Whether the tensors have values: they are not on the meta device and not made while tracing."""
        return type(self.usage) is torch.Tensor and not self.usage.is_meta

    def to(self, device: torch.device) -> None:
        """Moves the tensors. On the meta device values are lost: what leaves it is a new state."""
        if self.usage.is_meta and device.type != "meta":
            self._reset(device)
        for name, value in vars(self).items():
            if value is not None:
                setattr(self, name, value.to(device))

    def reserve(self, rows: int) -> None:
        """Makes histories of at least so many rows."""
        if self.fwd_history is None or self.fwd_history.shape[0] < rows:
            self.fwd_history = _grown(self.fwd_history, rows, self.fwd_amax)
            self.bwd_history = _grown(self.bwd_history, rows, self.bwd_amax)

    # The number of a rule means nothing to another thread or process: its text travels.
    def __getstate__(self) -> dict[str, object]:
        return vars(self) | {"rule": rule_text(self) if self.usable else ""}

    def __setstate__(self, state: dict[str, object]) -> None:
        rule = state.pop("rule")
        vars(self).update(state)
        if self.usable:
            set_rule(self, rule)
        _register(self)


def _grown(history: torch.Tensor | None, rows: int, like: torch.Tensor) -> torch.Tensor:
    grown = like.new_zeros(rows, like.shape[0])
    if history is not None:
        grown[: history.shape[0]] = history
    return grown


#: The states that are alive, in the order of their construction.
_STATES: list["weakref.ref[DelayedState]"] = []


def _register(state: DelayedState) -> None:
    _STATES.append(weakref.ref(state, _STATES.remove))


def _usable_states() -> list[DelayedState]:
    found = []
    for ref in list(_STATES):  # a copy: the garbage collector may remove one at any time
        state = ref()
        if state is not None and state.usable:
            found.append(state)
    return found


# ---------------------------------------------------------------- rules


@dataclass(eq=False)
class _Rule:
    """A recipe in a thread. number: int64 scalar, for `usage`; recipe: None while known from a checkpoint only."""

    text: str
    number: torch.Tensor
    recipe: DelayedScaling | None = None
    group: object = None


class _Thread(threading.local):
    """Rules of this thread: by text in `rules`, by their row of the table in attributes rule0, rule1, ... (Dynamo reads
    a whole dict at once and would miss one that is added while it traces)."""

    def __init__(self) -> None:
        self.depth = 0
        self.rules: dict[str, _Rule] = {}
        self.table = torch.zeros(_MAX_RULES, 6, dtype=torch.float64)  # columns: RuleColumn of ops/delayed.h
        self.scales: RecordedScales | None = None


_THREAD = _Thread()
_NUMBERS = itertools.count(1)
_TEXTS: dict[int, str] = {}


def rule_text(state: DelayedState) -> str:
    """What identifies the rule that the state ran under last, in any process; "" if there is none."""
    return _TEXTS.get(int(state.usage[0]), "")


def set_rule(state: DelayedState, text: str) -> None:
    """Makes the state that of a rule in this thread."""
    state.usage[0] = _rule(text).number if text else 0


def _rule(text: str) -> _Rule:
    rules = _THREAD.rules
    if text not in rules:
        row, number = len(rules), next(_NUMBERS)
        if row == _MAX_RULES:
            raise RuntimeError(
                f"DelayedScaling: more than {_MAX_RULES} different ones in a thread; let layers share recipes, and do "
                "not put numbers that change with the step into one"
            )
        _TEXTS[number] = text
        rules[text] = _Rule(text, torch.tensor(number))
        setattr(_THREAD, f"rule{row}", rules[text])
        _THREAD.table[row, 0] = -1  # matches no state
    return rules[text]


def _activate(text: str, recipe: DelayedScaling, group: object) -> int:
    """Prepares everything that a step under the recipe needs; returns its row in the table."""
    rule = _rule(text)
    row = list(_THREAD.rules).index(text)
    if rule.recipe is None or recipe.unfused:
        rule.recipe = recipe
        if not recipe.unfused:
            number, newest = int(rule.number), recipe.amax_compute_algo == "most_recent"
            columns = [number, recipe.amax_history_len, newest, recipe.margin, *_LARGEST[recipe.fp8_format]]
            _THREAD.table[row] = torch.tensor(columns, dtype=torch.float64)
    rule.group = group
    rows = max(_ROWS, *(r.recipe.amax_history_len for r in _THREAD.rules.values() if r.recipe))
    for state in _usable_states():
        state.reserve(rows)
    return row


# A constant of the graph, computed once while tracing, on the real objects.
@torch.compiler.assume_constant_result
def _activate_while_tracing(text: str, margin: int, element: str, length: int, algorithm: str) -> int:
    return _activate(text, DelayedScaling(margin, Format[element], length, algorithm), None)


def _check_traceable(recipe: DelayedScaling, group: object) -> None:
    why = ""
    if recipe.unfused:
        why = "amax_compute_algo or scaling_factor_compute_algo is a function"
    elif _reduces(recipe, group):
        why = "reduce_amax=True communicates between ranks"
    if why:
        raise NotImplementedError(
            f"DelayedScaling: entering autocast inside a compiled function updates the scales there, but {why}. Enter "
            "autocast around the compiled function"
        )


def enter(recipe: DelayedScaling, group: object) -> torch.Tensor | None:
    """Called on entering an autocast of a delayed recipe, with leave() on leaving it: ends the last step if this is the
    outermost one and grad is enabled. Returns the number that forward passes pass to collect(); None while exporting,
    when scales are constants."""
    if torch.compiler.is_exporting():
        _THREAD.depth += 1
        return None
    text = recipe.rule() + ("" if group is None else f",{group.group_name}")
    if torch.compiler.is_compiling():
        _check_traceable(recipe, group)
        row = _activate_while_tracing(
            text, recipe.margin, recipe.fp8_format.name, recipe.amax_history_len, recipe.amax_compute_algo
        )
        outermost = _THREAD.depth == 0
    else:
        row = _activate(text, recipe, group)
        # An autocast that a backward pass enters belongs to a forward pass that is recomputed.
        outermost = _THREAD.depth == 0 and not torch.ops.quire.in_backward()
    rule = getattr(_THREAD, f"rule{row}")
    if rule.text != text:  # the row is a constant of a graph, and guarded by this
        raise AssertionError("DelayedScaling: the rules of this thread are mixed up; please report it")
    if outermost and torch.is_grad_enabled():
        step()
    _THREAD.depth += 1  # last: what raises above has entered nothing
    return rule.number


def leave() -> None:
    """The counterpart of enter()."""
    _THREAD.depth -= 1


# ---------------------------------------------------------------- the step


def step() -> None:
    """New scales and histories of all states that ran under rules of this thread (numerics.md 1.6).

    In a graph, which cannot ask who ran, of all states in the process, by the operator's own look at `usage`.
    """
    states, reduced = _usable_states(), {}
    if not torch.compiler.is_compiling():
        by_rule = _states_by_rule(states)
        states = []
        for rule, own in by_rule.items():
            if _reduces(rule.recipe, rule.group):
                _reduce(own, rule.group, reduced)
            if rule.recipe.unfused:
                for state in own:
                    _unfused_update(state, rule.recipe, reduced)
            else:
                states += own
    if not states:
        return
    for prefix, backward in _DIRECTIONS:
        history, scale, amax = (
            [getattr(s, f"{prefix}_{kind}") for s in states] for kind in ("history", "scale", "amax")
        )
        fresh = [tensor.clone() for tensor in scale]
        others = [reduced.get(id(tensor), tensor) for tensor in amax] if reduced else []
        usage = [state.usage for state in states]
        torch.ops.quire.delayed_update_(history, fresh, amax, usage, others, _THREAD.table, backward)
        for state, tensor in zip(states, fresh, strict=True):
            setattr(state, f"{prefix}_scale", tensor)


def _states_by_rule(states: list[DelayedState]) -> dict[_Rule, list[DelayedState]]:
    rules = {int(rule.number): rule for rule in _THREAD.rules.values() if rule.recipe is not None}
    found: dict[_Rule, list[DelayedState]] = {}
    for state in states:
        rule = rules.get(int(state.usage[0]))
        if rule is not None:
            found.setdefault(rule, []).append(state)
    return found


def _reduces(recipe: DelayedScaling, group: object) -> bool:
    distributed = torch.distributed
    if not (recipe.reduce_amax and distributed.is_available() and distributed.is_initialized()):
        return False
    return distributed.get_world_size(group) > 1


def _reduce(states: list[DelayedState], group: object, reduced: dict[int, torch.Tensor]) -> None:
    """Adds to `reduced`, by id of the amax tensor, the maximum over the group: one collective for all states."""
    amaxes = [amax for state in states for amax in (state.fwd_amax, state.bwd_amax)]
    flat = torch.cat(amaxes)
    torch.distributed.all_reduce(flat, torch.distributed.ReduceOp.MAX, group)
    for amax, most in zip(amaxes, flat.split([len(amax) for amax in amaxes]), strict=True):
        reduced[id(amax)] = most.clone()


def _unfused_update(state: DelayedState, recipe: DelayedScaling, reduced: dict[int, torch.Tensor]) -> None:
    """The update with functions of the user: the last paragraph of numerics.md 1.6."""
    length, updates = recipe.amax_history_len, []
    for prefix, backward in _DIRECTIONS:
        history, scale, amax = (getattr(state, f"{prefix}_{kind}") for kind in ("history", "scale", "amax"))
        window = history[:length].clone()
        window[0] = reduced.get(id(amax), amax)
        if callable(recipe.amax_compute_algo):
            chosen = _checked(recipe.amax_compute_algo(window.clone()), amax, "amax_compute_algo")
        else:
            chosen = window.amax(0) if recipe.amax_compute_algo == "max" else window[0]
        updates.append((window, _unfused_scale(recipe, chosen, scale, _LARGEST[recipe.fp8_format][backward])))
    for (prefix, _), (window, scale) in zip(_DIRECTIONS, updates, strict=True):  # nothing has raised
        setattr(state, f"{prefix}_scale", scale)
        getattr(state, f"{prefix}_amax").zero_()
        history = getattr(state, f"{prefix}_history").zero_()
        history[: length - 1] = window[1:]
        history[length - 1] = window[0]
        history[0] = 0
    state.usage[1:] = length


def _unfused_scale(recipe: DelayedScaling, amax: torch.Tensor, scale: torch.Tensor, largest: float) -> torch.Tensor:
    if recipe.scaling_factor_compute_algo is not None:
        new = recipe.scaling_factor_compute_algo(amax, scale.clone(), largest, recipe)
        return _checked(new, amax, "scaling_factor_compute_algo").clone()
    new = (largest / amax) / 2.0**recipe.margin
    new = torch.where((amax > 0) & amax.isfinite(), new, scale)
    return torch.where(new.isinf(), torch.finfo(torch.float32).max, new)


def _checked(value: object, like: torch.Tensor, name: str) -> torch.Tensor:
    if not isinstance(value, torch.Tensor) or value.shape != like.shape or value.dtype != like.dtype:
        what = f"{value.dtype} {list(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
        raise TypeError(
            f"DelayedScaling: {name} must return a {like.dtype} tensor of shape {list(like.shape)}, got {what}"
        )
    return value.detach()


# ---------------------------------------------------------------- a forward pass


class RecordedScales:
    """The scales that the layers of a forward pass used, in order, for its recomputation outside of a graph, which may
    come after other steps. (A compiled recomputation has them as inputs that its forward saved.)

    with recorded: the first time records, every other time replays. Numbers of layers must agree.
    """

    def __init__(self) -> None:
        self._scales: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._next: int | None = None
        self._outer: list[RecordedScales | None] = []

    def __enter__(self) -> "RecordedScales":
        self._outer.append(_THREAD.scales)
        _THREAD.scales = self
        return self

    def __exit__(self, *exception: object) -> None:
        _THREAD.scales = self._outer.pop()
        self._next = 0

    def of(self, state: DelayedState) -> tuple[torch.Tensor, torch.Tensor]:
        if self._next is None:
            self._scales.append((state.fwd_scale, state.bwd_scale))
            return self._scales[-1]
        self._next += 1
        return self._scales[self._next - 1]


def scales(state: DelayedState) -> tuple[torch.Tensor, torch.Tensor]:
    """The forward and backward scale for a forward pass now."""
    recorded = _THREAD.scales
    return (state.fwd_scale, state.bwd_scale) if recorded is None else recorded.of(state)


def quantize(x: torch.Tensor, scale: torch.Tensor, slot: int, columnwise: bool) -> list[torch.Tensor]:
    """The six buffers of x under that slot of a state's forward scale (numerics.md 1.5); the third is the amax."""
    return torch.ops.quire.quantize(x.detach(), _SPEC, True, columnwise, 0, 0, scale[slot : slot + 1])


def collect(state: DelayedState, rule: torch.Tensor | None, x_amax: torch.Tensor, w_amax: torch.Tensor | None) -> None:
    """Puts amaxes, float32 [1], into the state. w_amax: None if w was not quantized now; rule: as enter() returned."""
    if rule is not None:
        torch.ops.quire.delayed_collect_(state.fwd_amax, state.usage, rule, x_amax, w_amax)


def calibrate(state: DelayedState, rule: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> None:
    """Collects the amaxes of x and w without using their codes."""
    collect(state, rule, *(quantize(t, state.fwd_scale, slot, False)[2] for slot, t in enumerate((x, w))))
