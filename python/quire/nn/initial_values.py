"""Initial values of weights and biases, of layers that are sharded over ranks too."""

import math
from collections.abc import Callable

import torch

from quire.checks import check_type_or_none
from quire.distributed import check_ranks
from quire.distributed.parallel import Parallel
from quire.distributed.placements import is_dtensor, part_for


def initialise(
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    init_method: Callable[[torch.Tensor], object] | None,
    parallel: Parallel | None = None,
) -> None:
    """Initialises as torch.nn.Linear; with an init_method, weight by that method and bias with 0. parallel: draws the
    whole weight and keeps a part, so that ranks together have what one process has after the same seed."""
    check_type_or_none("quire", Callable, init_method=init_method)
    if is_dtensor(weight):
        _initialise_parts(weight, bias, init_method)
        return
    if parallel is not None and not parallel.group and not weight.is_meta:
        _initialise_alone(weight, bias, init_method, parallel)
        return
    if parallel is not None and not weight.is_meta:
        out, inner = weight.shape
        column = parallel.mode == "column"
        whole = weight.new_empty((out * parallel.size, inner) if column else (out, inner * parallel.size))
        whole_bias = None if bias is None else bias.new_empty(whole.shape[0])
        initialise(whole, whole_bias, init_method)
        with torch.no_grad():
            weight.copy_(parallel.part_of(whole))
            if bias is not None:
                bias.copy_(parallel.part_of(whole_bias, bias=True))
        check_ranks.note_drawn(weight, whole)
        return
    if init_method is not None:
        with torch.no_grad():
            init_method(weight)
        if bias is not None:
            torch.nn.init.zeros_(bias)
        return
    torch.nn.init.kaiming_uniform_(weight, a=math.sqrt(5))
    if bias is not None:
        bound = 1 / math.sqrt(weight.shape[1]) if weight.shape[1] > 0 else 0
        torch.nn.init.uniform_(bias, -bound, bound)


def _initialise_parts(
    weight: torch.Tensor, bias: torch.Tensor | None, init_method: Callable[[torch.Tensor], object] | None
) -> None:
    """initialise() of DTensors: draws whole tensors, and keeps this rank's shards."""
    if weight.is_meta:
        return
    own = [t for t in (weight, bias) if t is not None]
    whole = [torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in own]
    initialise(whole[0], whole[1] if len(whole) > 1 else None, init_method)
    with torch.no_grad():
        for t, values in zip(own, whole, strict=True):
            t.copy_(part_for(t, values) if is_dtensor(t) else values)


def _initialise_alone(
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    init_method: Callable[[torch.Tensor], object] | None,
    parallel: Parallel,
) -> None:
    """initialise() of a part whose number is not known: it alone is drawn, and biases are 0, because a "row" layer's is
    the same in all ranks."""
    bound = 1 / math.sqrt(max(weight.shape[1] * (parallel.size if parallel.mode == "row" else 1), 1))
    with torch.no_grad():
        (init_method or (lambda t: t.uniform_(-bound, bound)))(weight)
    if bias is not None:
        torch.nn.init.zeros_(bias)
