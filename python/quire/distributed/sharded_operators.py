"""The operators of layers that are sharded over ranks, as plain functions of tensors and texts."""

from collections.abc import Sequence

import torch

from quire.functional import Buffers
from quire.loading.devices import runs_later
from quire.loading.for_dynamo import assume_constant_result


def parallel_linear(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    recipe: str,
    parallel: str,
    *,
    dtype: torch.dtype,
    **state: Buffers | torch.Tensor | bool | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """linear() of a weight that is sharded over ranks: (y, x_amax, w_amax), as grouped_linear() returns them. First
    derivatives only.

    parallel: quire.distributed.Parallel(...).text, which says what each rank has of x, w, bias and y.
    state: as for grouped_linear(), of one group, without x_buffers, out and dgrad_out. part: Parallel(...).place(),
    for gradients that round stochastically. input_scale: float32 [1], the scale of x under a spec with the option
    `given`, the same on every process.

    Raises RuntimeError if an argument does not fit, or a collective fails.
    """
    lists = [state.pop(name, ()) for name in ("w_buffers", "main_grad")]
    return torch.ops.quire.parallel_linear(x, w, bias, recipe, dtype, parallel, *lists, **state)


def parallel_grouped_linear(
    x: torch.Tensor,
    w: Sequence[torch.Tensor],
    bias: Sequence[torch.Tensor],
    offsets: torch.Tensor,
    recipe: str,
    *,
    parallel: str,
    part: torch.Tensor,
    dtype: torch.dtype,
    **state: Buffers | torch.Tensor | bool | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """grouped_linear() of weights that are sharded over ranks, which all have the same tokens. First derivatives
    only.

    w, bias: this rank's shard of each, as parallel_linear() has it of one. part: Parallel(...).place(). parallel:
    Parallel(...).text, without sequence. state: as for grouped_linear(), without x_buffers, out and dgrad_out.
    input_scale: as for parallel_linear(), one for each group: float32 [E].

    Raises RuntimeError if an argument does not fit, or a collective fails.
    """
    lists = [state.pop(name, ()) for name in ("w_buffers", "main_grad")]
    call = torch.ops.quire.parallel_grouped_linear
    return call(x, w, bias, offsets, part, recipe, dtype, parallel, *lists, **state)


def start_gather(t: torch.Tensor, size: int, group: str) -> torch.Tensor:
    """Begins to gather [size * d0, ...] of each rank's [d0, ...]; wait() of sharded_product gives them. With gloo on
    another device than the CPU by an all-to-all: gloo's gather reads memory of the device by the host there."""
    t = t.contiguous()
    if not runs_later(t.device) or not _sent_by_gloo(group, t.device.type):
        return torch.ops._c10d_functional.all_gather_into_tensor(t, size, group)
    splits = [t.shape[0]] * size
    return torch.ops._c10d_functional.all_to_all_single(torch.cat([t] * size), splits, splits, group)


@assume_constant_result
def _sent_by_gloo(group: str, device: str) -> bool:
    return torch.ops.quire.sent_by_gloo(group, device)


def name_next_caller(layer: str) -> None:
    """Says which layer the next parallel_linear() of this thread belongs to. Errors of its collectives, forward and
    backward, name it."""
    torch.ops.quire.next_caller(layer)


def forget_agreed(group: str) -> None:
    """Forgets what the ranks of the group of that name have said to one another in compiled code: the name is now
    another group's."""
    torch.ops.quire.forget_agreed(group)


def sum_gradient(t: torch.Tensor, parallel: str) -> torch.Tensor:
    """The values of t, a parameter that every rank has and uses for its own tokens. Its gradient is the sum over the
    group of `parallel`, which is as for parallel_linear()."""
    return torch.ops.quire.sum_gradient(t, parallel)
