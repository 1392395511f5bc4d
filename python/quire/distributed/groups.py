"""Process groups by names that are the same on every rank, so that graphs of all ranks are the same text."""

import itertools

import torch
from torch import distributed

from quire.checks import check_type
from quire.functional import forget_agreed

#: First of the names for groups that nobody has named.
_TENSOR_PARALLEL = "quire:tp"


def name_group(group: "distributed.ProcessGroup", name: str) -> str:
    """Registers a process group under a name, and returns the name. quire's operators find the group by its name.

    The names that PyTorch gives to groups differ between ranks. Use one name for the role of a group, such as "tp", on
    every rank. Graphs, caches of compiled code and exported programs are then the same on every rank. An exported
    program runs on every rank that has a group with this name.

    A second call with the same group and name changes nothing. torch.distributed.destroy_process_group() removes all
    names.

    Args:
        group: a process group of torch.distributed.
        name: the name, the same on all ranks.

    Returns:
        The name.

    Raises:
        ValueError: if another group has the name, and for a name with a comma.
    """
    check_type("name_group", str, name=name)
    check_group("name_group", group=group)
    if not name or "," in name:
        raise ValueError(f"name_group: a name must have at least one character and no comma, got {name!r}")
    known = named_group(name)
    if known is not None and known != group:
        raise ValueError(
            f"name_group: another process group is named {name!r} already; choose another name, or call "
            "torch.distributed.destroy_process_group() first"
        )
    if known is None:
        distributed.distributed_c10d._register_process_group(name, group)
        forget_agreed(name)
    return name


def group_size(group: object) -> int:
    """Of a process group; 1 of None, 0 for what is none."""
    if group is None:
        return 1
    return group.size() if hasattr(group, "size") else 0


def named_group(name: str) -> "distributed.ProcessGroup | None":
    """The group of that name, or None."""
    try:
        return distributed.distributed_c10d._resolve_process_group(name)
    except (RuntimeError, ValueError):
        return None


def the_group(name: str) -> "distributed.ProcessGroup":
    """The group of that name. Raises RuntimeError if no group has the name now."""
    group = named_group(name)
    if group is None:
        raise RuntimeError(
            f"quire: no process group is named {name!r} in this process; call "
            f"quire.distributed.name_group(group, {name!r}) after torch.distributed.init_process_group"
        )
    return group


def name_of(group: "distributed.ProcessGroup", first: str = _TENSOR_PARALLEL) -> str:
    """The name that name_of() gave to a group, else the first of quire:tp, quire:tp1, ... that is free. Ranks that call
    it for their groups in the same order find the same names. first: of the names, in place of quire:tp."""
    for i in itertools.count():
        name = f"{first}{i or ''}"
        known = named_group(name)
        if known is None or known == group:
            return name_group(group, name)
    raise AssertionError("unreachable")


def backend_of(group: "distributed.ProcessGroup", device: torch.device) -> str:
    """What sends tensors of a device for the group, such as "gloo" or "nccl"; "" if nothing does."""
    return _backends(group).get(device.type, "")


def sendable(t: torch.Tensor, group: "distributed.ProcessGroup | None") -> torch.Tensor:
    """t, or its copy on a device of the group, if the group sends no tensors of t's device: NCCL sends none of the CPU,
    where models are often made. None: the default group."""
    backends = _backends(distributed.group.WORLD if group is None else group)
    return t if t.device.type in backends else t.to(next(iter(backends)))


def broadcast(t: torch.Tensor, source: int, group: "distributed.ProcessGroup") -> None:
    """Overwrites t, in every rank of the group, by that of one of them. Nothing is sent of a meta tensor."""
    if t.is_meta:
        return
    sent = sendable(t, group)
    distributed.broadcast(sent, distributed.get_global_rank(group, source), group=group)
    if sent is not t:
        t.copy_(sent)


def _backends(group: "distributed.ProcessGroup") -> dict[str, str]:
    """Type of device -> what sends its tensors."""
    return dict(pair.split(":") for pair in distributed.get_backend_config(group).split(","))


def check_group(what: str, **groups: object) -> None:
    """Raises TypeError for what is no process group. what: the operation; groups: by the names of its arguments."""
    for name, group in groups.items():
        if not distributed.is_available() or not isinstance(group, distributed.ProcessGroup):
            raise TypeError(
                f"{what}: {name} must be a process group, such as torch.distributed.new_group(...) or "
                f"mesh['tp'].get_group(), got {group!r}"
            )
