"""Arguments that TransformerEngine's functions accept and quire's do not, or only by name."""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from quire.checks import check_options, describe
from quire.distributed.groups import group_size

Result = TypeVar("Result")

#: Arguments that shard a layer over ranks -> the values with which they do nothing.
SHARDING = {
    "sequence_parallel": False,
    "tp_group": None,
    "tp_size": 1,
    "get_rng_state_tracker": None,
    "rng_tracker_name": None,
    "parallel_mode": None,
}
#: Arguments that overlap the communication of a layer whose tokens are sharded, in pieces.
IN_PIECES = {"ub_overlap_ag": False, "ub_overlap_rs": False, "ub_overlap_rs_dgrad": False}
#: These and two that overlap collectives of backward with a whole matmul, and the name of their buffers.
USER_BUFFERS = IN_PIECES | {"ub_bulk_dgrad": False, "ub_bulk_wgrad": False, "ub_name": None}
OVERLAPPING = USER_BUFFERS | {"symmetric_ar_type": None}
PARALLEL = SHARDING | OVERLAPPING

_INSTEAD_OF_SPLITTING = "Use DistributedDataParallel, fully_shard or torch.distributed.tensor.parallel"

#: Further arguments for sharding, which LayerNormLinear and LayerNormMLP have.
_PARALLEL_TOO = {"return_layernorm_output_gathered", "set_parallel_mode"}
#: Arguments that frameworks also pass to layers of a single process -> values with which they do nothing there.
_NOTHING_ALONE = {
    "parallel_mode": (None, "column", "row"),
    "sequence_parallel": (False, True),
    "set_parallel_mode": (False, True),
}


def _asks_for_nothing(name: str, options: Mapping[str, object]) -> bool:
    if options.get("tp_size", 1) != 1 or group_size(options.get("tp_group")) != 1:
        return False
    return name == "tp_group" or options[name] in _NOTHING_ALONE.get(name, ())


def refuse(what: str, options: Mapping[str, object], known: Mapping[str, object], instead: str = "") -> None:
    """Raises NotImplementedError for an option that is not at its known value. instead: what the error says of it."""
    for name, value in options.items():
        if value != known[name] and not _asks_for_nothing(name, options):
            of_devices = name in PARALLEL or name in _PARALLEL_TOO
            said = instead or (_INSTEAD_OF_SPLITTING if of_devices else "")
            remedy = f". {said}" if said else ""
            raise NotImplementedError(
                f"{what}: {name}={describe(value)} is not available in this version; leave it at {known[name]!r}"
                f"{remedy}"
            )


def positional(*names: str) -> Callable[[Callable[..., Result]], Callable[..., Result]]:
    """For a function whose keywords of these names may follow its positional arguments by position, as they do in
    TransformerEngine: they are for drop-in use, and not shown in the signature."""

    def decorate(function: Callable[..., Result]) -> Callable[..., Result]:
        parameters = inspect.signature(function).parameters
        own = sum(p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD for p in parameters.values())
        implicit = int("self" in parameters)

        @functools.wraps(function)
        def wrapper(*args: object, **keywords: object) -> Result:
            if len(args) > own + len(names):
                raise TypeError(
                    f"{function.__qualname__}() takes at most {own + len(names) - implicit} positional arguments, "
                    f"got {len(args) - implicit}"
                )
            return function(*args[:own], **dict(zip(names, args[own:], strict=False)), **keywords)

        return wrapper

    return decorate


def part_name(name: str | None, part: str) -> str | None:
    """The name of a layer within a named one."""
    return None if name is None else f"{name}.{part}"


class Given:
    """Options as attributes."""

    # Not types.SimpleNamespace, which Dynamo does not trace.
    def __init__(self, **options: object) -> None:
        for name, value in options.items():
            setattr(self, name, value)


def takes(table: Mapping[str, object]) -> Callable[[Callable[..., Result]], Callable[..., Result]]:
    """For a function whose last parameter is a dict `options`. In place of it, the function takes what the table names,
    name -> default, by name, or after its other arguments by position in the table's order. Raises TypeError for other
    names and for too many arguments."""

    def decorate(function: Callable[..., Result]) -> Callable[..., Result]:
        signature = inspect.signature(function)
        own = [name for name in signature.parameters if name != "options"]
        known = [name for name in (*own, *table) if name != "self"]
        what = f"quire.{function.__qualname__.removesuffix('.__init__')}"

        @functools.wraps(function)
        def wrapper(*args: object, **keywords: object) -> Result:
            if len(args) > len(own) + len(table):
                raise TypeError(f"{what}: there are {len(known)} arguments, got {len(args)} by position")
            options = {**table, **dict(zip(table, args[len(own) :], strict=False))}
            check_options(what, known, keywords)
            by_name = {name: value for name, value in keywords.items() if name not in table}
            options.update({name: value for name, value in keywords.items() if name in table})
            return function(*args[: len(own)], **by_name, options=options)

        kept = [signature.parameters[name].replace(kind=inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in own]
        more = [
            inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=value)
            for name, value in table.items()
        ]
        wrapper.__signature__ = signature.replace(parameters=[*kept, *more])
        return wrapper

    return decorate


def signature_with(function: Callable[..., object], keywords: Mapping[str, object]) -> inspect.Signature:
    """A function's signature with further keywords: name -> default."""
    signature = inspect.signature(function)
    more = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=value) for name, value in keywords.items()]
    parameters = sorted([*signature.parameters.values(), *more], key=lambda parameter: parameter.kind)
    return signature.replace(parameters=parameters)


def also_takes(
    function: Callable[..., Result],
    what: str,
    refused: Mapping[str, object],
    *,
    ignored: Mapping[str, object] | None = None,
    order: Sequence[str] = (),
) -> Callable[..., Result]:
    """A function that takes further keywords. what: its name in errors. refused: name -> the value with which the
    keyword does nothing; other values raise NotImplementedError. ignored: name -> default, of no effect. order: as for
    positional()."""
    further = {**refused, **(ignored or {})}
    signature = signature_with(function, further)
    takes_any = any([p.kind is inspect.Parameter.VAR_KEYWORD for p in signature.parameters.values()])
    options = [name for name in signature.parameters if name != "self"]

    @functools.wraps(function)
    def wrapper(*args: object, **keywords: object) -> Result:
        given = {name: keywords.pop(name) for name in [*keywords] if name in further}
        refuse(what, {name: value for name, value in given.items() if name in refused}, refused)
        if not takes_any:
            check_options(what, options, keywords)
        return function(*args, **keywords)

    wrapper.__signature__ = signature
    return positional(*order)(wrapper) if order else wrapper
