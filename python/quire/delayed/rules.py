"""Rules: the delayed recipes of a thread, by number and by text."""

import itertools
import threading
from dataclasses import dataclass

import torch

from quire.recipe import DelayedScaling

_MAX_RULES = 64


@dataclass(eq=False)
class Rule:
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
        self.rules: dict[str, Rule] = {}
        self.table = torch.zeros(_MAX_RULES, 6, dtype=torch.float64)  # columns: RuleColumn of ops/delayed.h
        self.scales = None  # or a RecordedScales (forward.py), which replays those of an earlier pass
        self.in_python = False  # whether there is a rule whose step delayed_update_ alone cannot do


THREAD = _Thread()
_NUMBERS = itertools.count(1)
_TEXTS: dict[int, str] = {}


def text_of(number: int) -> str:
    """What identifies the rule of that number, of whichever thread, in any process; "" if there is none."""
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
        rules[text] = Rule(text, torch.tensor(number))
        setattr(THREAD, f"rule{row}", rules[text])
        THREAD.table[row, 0] = -1  # matches no state
    return rules[text]
