"""What every rank of a group is about to do, compared before it begins. QUIRE_CHECK_RANKS=1 turns it on."""

import contextlib
import itertools
import json
import os
import time
import weakref
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from datetime import timedelta

import torch
from torch import distributed

from quire.distributed.groups import backend_of, named_group, the_group
from quire.functional import agree_on, sent_by_gloo
from quire.loading.deferred import assume_constant_result
from quire.recipe.linear_spec import LinearSpec, specs_of_text

NAME = "QUIRE_CHECK_RANKS"
#: What a call is, name -> value.
Fields = dict[str, str | int]
_DRAWN = "weight drawn as"
#: How many differences an error lists.
_LISTED = 4
#: Values of a whole weight that say what it was drawn as.
_VALUES = 64
#: Kind of comparison and name of a group -> the numbers of the comparisons to come.
_numbers: dict[tuple[str, str], Iterator[int]] = defaultdict(itertools.count)
#: Owner -> part of it -> the sizes of which all ranks have said the same last.
_agreed: "weakref.WeakKeyDictionary[object, dict[str, tuple[object, ...]]]" = weakref.WeakKeyDictionary()
#: Group -> why its ranks no longer count the same comparisons.
_apart: "weakref.WeakKeyDictionary[object, str]" = weakref.WeakKeyDictionary()
_own_draws: ContextVar[bool] = ContextVar("quire_own_draws", default=False)


def enabled() -> bool:
    """Whether the environment has QUIRE_CHECK_RANKS=1. Raises ValueError for another value than 0, 1 and ''."""
    value = os.environ.get(NAME, "")
    if value not in ("", "0", "1"):
        raise ValueError(f"{NAME} must be 0 or 1, got {value!r}")
    return value == "1"


def run_eagerly() -> None:
    """Compiled functions run eagerly from now on, because a compiled one compares nothing."""
    torch.compiler.set_stance("force_eager")


def check_ranks(caller: str, fields: Fields, group: "distributed.ProcessGroup") -> None:
    """Returns when every rank of the group has come here with the same fields. It uses the group's store, and not a
    collective: so it can name the ranks that do not come.

    caller: who asks, for errors. fields: what is to be computed, name -> value. Raises RuntimeError, on every rank, if
    one has another value; and on those that came, if one does not come within the timeout of the group.
    """
    _compare(f"{caller} ({NAME}=1)", fields, group, "check")


def agree(
    owner: object,
    part: str,
    sizes: tuple[object, ...],
    said: Callable[[], tuple[str, Fields]],
    group: "distributed.ProcessGroup",
    *,
    device: torch.device,
) -> None:
    """check_ranks() of what the sizes of collectives follow from, without the variable, where `sizes` are others than
    in the last call of this part of the owner. A rank that gets more bytes than it expects would not get an error from
    gloo: its process would end.

    said: gives the caller and the fields of check_ranks(). Where nothing has changed it is not called, and the group's
    store is not asked. device: of what is sent. Ranks whose group does not send its tensors by gloo compare nothing.

    Each rank decides alone whether it compares. So it may leave a comparison out only for sizes that it knows the
    others have too if they leave it out: these are the last ones, and no earlier ones. If ranks remembered several, one
    could come with the first and one with the second, each known to both, and neither would ask.
    """
    known = _agreed.setdefault(owner, {})
    if known.get(part) == sizes:
        return
    if _would_end(group, device):
        _compare(*said(), group, "agree")
    known[part] = sizes


def _would_end(group: "distributed.ProcessGroup", device: torch.device) -> bool:
    """Whether a process of the group would end that gets more than it expects, in tensors of a device."""
    return group.size() > 1 and backend_of(group, device) == "gloo"


def _sent_by_gloo(name: str, device: str) -> bool:
    """The kernel of quire::sent_by_gloo."""
    group = named_group(name)
    return group is not None and backend_of(group, torch.device(device)) == "gloo"


def _compare_compiled(name: str, tokens: int, weight: list[int], recipe: str, parallel: str) -> None:
    """The kernel of quire::compare_ranks, which agree_ calls where gloo sends: agree() of a layer in compiled code,
    whose class and path nobody knows there."""
    group = the_group(name)
    if group.size() == 1:
        return
    fields: Fields = {"sharded as": parallel, "tokens": tokens, "weight": str(list(weight))}
    mode = parallel.partition(",")[0]
    caller = f"a sharded layer of a compiled function, {mode}, rank {group.rank()} of {group.size()}"
    _compare(caller, fields | fields_of_text(recipe), group, "compiled")


def agree_in_graph(t: torch.Tensor, group: str, caller: str, fields: Fields, recipe: str) -> None:
    """agree() in a compiled function or an exported program, where the ranks of the group of that name have not yet
    agreed on these fields and this recipe. They are constants of the graph. t: a tensor of this call that nobody else
    has. To the graph this writes t, so that what is computed of t is sent afterwards. A graph whose tensors gloo does
    not send has nothing of this."""
    if sent_by_gloo(group, t.device.type):
        agree_on(t, _text(caller, tuple(fields.items()), recipe), group)


@assume_constant_result
def _text(caller: str, fields: tuple[tuple[str, str | int], ...], recipe: str) -> str:
    return json.dumps([caller, dict(fields) | fields_of_text(recipe)])


def _compare_fields(name: str, text: str) -> None:
    """The kernel of quire::compare_fields, which agree_on_ calls where gloo sends."""
    group, (caller, fields) = the_group(name), json.loads(text)
    if group.size() > 1:
        said = f"{caller} of a compiled function, rank {group.rank()} of {group.size()}"
        _compare(said, fields, group, "compiled")


_library = torch.library.Library("quire", "IMPL")
_library.impl("sent_by_gloo", _sent_by_gloo, "CompositeExplicitAutograd")
_library.impl("compare_ranks", _compare_compiled, "CompositeExplicitAutograd")
_library.impl("compare_fields", _compare_fields, "CompositeExplicitAutograd")


def _compare(caller: str, fields: Fields, group: "distributed.ProcessGroup", kind: str) -> None:
    store = distributed.distributed_c10d._get_process_group_store(group)
    if group in _apart:
        raise RuntimeError(f"{caller}: the ranks of this group no longer make the same calls: {_apart[group]}")
    own, number = distributed.get_rank(group), next(_numbers[kind, group.group_name])
    keys = [f"quire:{kind}/{number}/{rank}" for rank in range(group.size())]
    store.set(keys[own], json.dumps(fields))
    timeout = group._get_backend(group._device_types[0]).options._timeout
    end = time.monotonic() + timeout.total_seconds()
    missing = [rank for rank, key in enumerate(keys) if not _has(store, key, end)]
    if missing:
        listed = ", ".join(f"{name} {value}" for name, value in fields.items())
        store.delete_key(keys[own])  # a rank that comes later does not take it for what is said then
        _apart[group] = f"{_ranks(missing)} did not come to {caller}. End these processes, and begin again"
        raise RuntimeError(
            f"{caller}: {_ranks(missing)} did not come to this call within {timeout.total_seconds():g} seconds. It "
            "ended, it hangs, it leaves out a call that the others make, or it still has the sizes of its last call. "
            f"The call here: {listed}"
        )
    said = [json.loads(store.get(key)) for key in keys]
    if number:  # every rank that is here has read what was said before
        store.delete_key(f"quire:{kind}/{number - 1}/{own}")
    if different := _differences(said):
        remedy = "They must make the same calls in the same order, with the same shapes, dtypes and recipes"
        if "tokens" in different:
            remedy += "; pad tokens, or leave some out, so that all ranks have the same number"
        if "amaxes" in different:
            remedy += "; ranks with other layers, as in a pipeline, pass amax_reduction_group= to quire.autocast"
        if _DRAWN in different:
            remedy += "; for the same weights call torch.manual_seed with one seed in all before the model is made"
        raise RuntimeError(f"{caller}: the ranks of the group differ in {different}. {remedy}")


def _differences(said: list[Fields]) -> str:
    """The fields that differ, each with its values; "" if there are none. If the layers are others, so is the rest."""
    names = list(dict.fromkeys(name for fields in said for name in fields))
    texts = []
    for name in names:
        ranks_of: dict[str, list[int]] = defaultdict(list)
        for rank, fields in enumerate(said):
            ranks_of[str(fields.get(name, "none"))].append(rank)
        if len(ranks_of) > 1:
            texts.append(f"{name}: " + ", ".join(f"{value} on {_ranks(ranks)}" for value, ranks in ranks_of.items()))
            if name == "layer":
                break
    more = f"; and in {len(texts) - _LISTED} other things" if len(texts) > _LISTED else ""
    return "; ".join(texts[:_LISTED]) + more


def fields_of_recipe(specs: LinearSpec | None, high_precision: str) -> Fields:
    """The specs of a matmul as fields. None: the matmul is in high precision, and that is its text."""
    if specs is None:
        return {"recipe": high_precision or "none"}
    each = {"x": specs.x, "w": specs.w, "dy": specs.dy, "dx": specs.dx, "backward": specs.backward}
    each["kernels"] = specs.kernels
    return {f"recipe {name}": value for name, value in each.items() if value}


def fields_of_text(recipe: str) -> Fields:
    """fields_of_recipe() of the text that an operator gets."""
    return fields_of_recipe(specs_of_text(recipe), recipe)


@contextlib.contextmanager
def own_draws() -> Iterator[None]:
    """Within it, in this thread, ranks may draw different weights."""
    token = _own_draws.set(True)
    try:
        yield
    finally:
        _own_draws.reset(token)


def note_drawn(weight: torch.Tensor, whole: torch.Tensor) -> None:
    """With QUIRE_CHECK_RANKS=1, remembers what a weight was drawn as, until somebody writes to it.

    whole: the values that every rank has drawn, of which this one keeps the weight; or a part that has a note.
    """
    if not enabled() or _own_draws.get() or weight.is_meta:
        return
    text = drawn(whole).get(_DRAWN)
    if not text:
        values = whole.detach().flatten()[:_VALUES].float().tolist()
        listed = ", ".join(f"{value:.3g}" for value in values[:3])
        text = f"{listed}, ... ({zlib.crc32(repr(values).encode()):08x})"
    weight.quire_drawn = (text, weight._version)


def drawn(weight: torch.Tensor) -> Fields:
    """The note of note_drawn() as a field; none if there is no note, or the weight was written to."""
    text, version = getattr(weight, "quire_drawn", ("", None))
    return {_DRAWN: text} if text and version == weight._version else {}


def _has(store: "distributed.Store", key: str, end: float) -> bool:
    """Whether the store has the key before time.monotonic() is `end`."""
    left = end - time.monotonic()
    if left > 0:
        with contextlib.suppress(RuntimeError):  # it timed out
            store.wait([key], timedelta(seconds=left))
    return store.check([key])


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))} of the group"
