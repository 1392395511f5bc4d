"""Rules: the delayed recipes of a thread, by number and by text.

Kernels compare numbers on every device that has states. Each device has a table, and for each rule a tensor with its
number. Kernels fill these when a rule or a device is new, and nobody waits for them.
"""

import itertools
import threading
from collections.abc import Iterable

import torch

from quire.loading.deferred import is_exporting, mark_static
from quire.loading.devices import makes_fake_tensors
from quire.recipe import DelayedScaling

_MAX_RULES = 64
#: RuleColumn of quire/spec/state_problem.h. A row whose number is -1 matches no state.
_COLUMNS = 6


class Rule:
    """A delayed recipe as the states of one thread know it.

    Args:
        text: identifies the recipe and its process group.
        number: the same as an integer, which `usage` of a state holds.

    Attributes:
        recipe: the recipe; None if only the text from a checkpoint is known.
        group: the process group, or None.
        failed: whether a function of the user has raised in its last step.
        by_layer: whether layers have it under a recipe that differs by layer.
    """

    def __init__(self, text: str, number: int) -> None:
        self.text, self.number = text, number
        self.recipe: DelayedScaling | None = None
        self.group: object = None
        self.failed = self.by_layer = False

    def on(self, device: torch.device) -> torch.Tensor:
        """The number as a tensor on the device, for kernels: int64 []."""
        # Tracing cannot make one: there is one wherever a state was on entering the autocast.
        if not torch.compiler.is_compiling():
            self.place(device)
        return getattr(self, _attribute("number", device))

    def place(self, device: torch.device) -> None:
        """Makes the tensor of on(device), if there is none yet."""
        if not hasattr(self, name := _attribute("number", device)):
            with torch.inference_mode(False):
                setattr(self, name, torch.full((), self.number, dtype=torch.int64, device=device))

    def columns(self) -> list[float]:
        """The parameters of the recipe as numbers: its row in the tables that kernels read."""
        recipe = self.recipe
        if recipe is None or recipe.unfused:
            return [-1]
        newest = recipe.amax_compute_algo == "most_recent"
        return [self.number, recipe.amax_history_len, newest, recipe.margin, *recipe.fp8_format.value]


class _Thread(threading.local):
    """Rules of this thread: by text in `rules`, by their row of the table in attributes rule0, rule1, ... (Dynamo reads
    a whole dict at once and would miss one that is added while it traces). Tables are attributes for the same reason.
    """

    def __init__(self) -> None:
        self.depth = 0
        self.rules: dict[str, Rule] = {}
        self.devices: list[torch.device] = []  # that have a table
        self.collections = 0  # calls of delayed_collect_ by this thread, without the calls in graphs
        self.steps = [0]  # how many steps have ended; a list, because other threads may read it (forward.py)
        self.scales = None  # or a RecordedScales (forward.py), which replays the scales of an earlier pass
        self.checkpoint_trains = False  # whether gradients were enabled around a reentrant checkpoint
        self.recomputes = None  # or what a context calls that begins while PyTorch's checkpoint recomputes a pass
        self.in_python = False  # whether there is a rule whose step delayed_update_ alone cannot do


THREAD = _Thread()
_NUMBERS = itertools.count(1)
_TEXTS: dict[int, str] = {}


def trains() -> bool:
    """Whether a forward pass is one of training. A reentrant checkpoint runs it without gradients."""
    return torch.is_grad_enabled() or THREAD.checkpoint_trains


def in_backward() -> bool:
    """Whether a backward pass runs: a forward pass in it is recomputed. A graph computes forward passes alone."""
    return not torch.compiler.is_compiling() and torch.ops.quire.in_backward()


def ends_a_step(depth: int) -> bool:
    """Whether a context that begins ends the step before it, where so many contexts are around it that do not count."""
    return THREAD.depth == depth and not in_backward() and trains()


def scales_are_constants() -> bool:
    """Whether no step ends and no amax is collected here: torch.export traces what calls this, or a FakeTensorMode of
    the caller is active, which has no values for the states of real layers."""
    return is_exporting() or (not torch.compiler.is_compiling() and makes_fake_tensors())


def text_of(number: int) -> str:
    """The text of the rule with that number. It identifies the rule in all threads and processes; "" if there is
    none."""
    return _TEXTS.get(number, "")


def rule_of(text: str) -> Rule:
    """The rule of that text in this thread. Raises RuntimeError if there are too many."""
    rules = THREAD.rules
    if text not in rules:
        row, number = len(rules), next(_NUMBERS)
        if row == _MAX_RULES:
            raise RuntimeError(
                f"DelayedScaling: more than {_MAX_RULES} different ones in a thread; let layers share recipes, and do "
                "not put numbers that change with the step into one"
            )
        _TEXTS[number] = text
        rules[text] = Rule(text, number)
        setattr(THREAD, f"rule{row}", rules[text])
        write(rules[text])
    return rules[text]


def table_on(device: torch.device) -> torch.Tensor:
    """The table of this thread's rules on the device, for kernels."""
    return getattr(THREAD, _attribute("table", device))


def place_tables(devices: Iterable[torch.device]) -> None:
    """Makes tables of this thread for devices that have none, and the numbers of its rules."""
    for device in devices:
        if not hasattr(THREAD, name := _attribute("table", device)):
            with torch.inference_mode(False):
                table = torch.zeros(_MAX_RULES, _COLUMNS, dtype=torch.float64, device=device)
            setattr(THREAD, name, mark_static(table))
            THREAD.devices.append(device)
            for rule in THREAD.rules.values():
                _write(rule, device)
        for rule in THREAD.rules.values():
            rule.place(device)


def write(rule: Rule) -> None:
    """Puts a rule of this thread into its tables, as it is now."""
    for device in THREAD.devices:
        _write(rule, device)


def _write(rule: Rule, device: torch.device) -> None:
    cells = table_on(device)[list(THREAD.rules).index(rule.text)].unbind()
    for cell, value in zip(cells, rule.columns(), strict=False):
        cell.fill_(value)


def _attribute(what: str, device: torch.device) -> str:
    return f"{what}_{device.type}_{device.index}"
