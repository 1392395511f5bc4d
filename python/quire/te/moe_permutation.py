"""TransformerEngine's names for moving tokens between experts (transformer_engine.pytorch.permutation)."""

import warnings
from collections.abc import Sequence

import torch

from quire.checks import check_type
from quire.moe import primitives
from quire.moe.permutation import permute_any
from quire.te.arguments import positional


def moe_permute(
    inp: torch.Tensor,
    routing_map: torch.Tensor,
    num_out_tokens: int,
    max_token_num: int = -1,
    map_type: str = "mask",
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rows of inp [T, K] sorted by expert [num_out_tokens, K], row_id_map for moe_unpermute).

    map_type "mask": routing_map [T, E], not 0 where a token goes to an expert. "index": routing_map [T, k], numbers of
        experts or -1; row_id_map is [k * T].
    num_out_tokens: rows of the result, of which those that no token fills are 0. With "mask" at least the routed ones.
        With "index" 0 stands for T * k, and what comes after num_out_tokens rows is dropped.
    max_token_num: of no effect; nothing is allocated ahead.

    inp may be a QuantizedTensor (quire.moe.permute). Raises as quire.moe.permute does, ValueError for another map_type.
    """
    check_type("moe_permute", torch.Tensor, routing_map=routing_map)
    if _is_mask(map_type, "moe_permute"):
        row_map = _rows_of_mask(routing_map)
        return permute_any(inp, row_map, num_out_tokens), row_map
    if routing_map.dtype not in (torch.int32, torch.int64):
        raise TypeError(
            f"moe_permute: with map_type 'index' routing_map must be int32 or int64, got {routing_map.dtype}; pass "
            "numbers of experts, or map_type='mask'"
        )
    row_map, _ = primitives.expert_rows(_narrowed(routing_map), 0)
    rows = num_out_tokens if num_out_tokens > 0 else row_map.numel()
    row_map = torch.where(row_map < rows, row_map, -1)
    return permute_any(inp, row_map, rows), row_map.t().reshape(-1)


def moe_permute_with_probs(
    inp: torch.Tensor, probs: torch.Tensor, routing_map: torch.Tensor, num_out_tokens: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(rows, probs of the rows [num_out_tokens], row_id_map): moe_permute() by a mask, probs [T, E] along with it.

    A row whose prob is 0 is 0: a routing_map may be padded by experts that a token does not want.
    """
    check_type("moe_permute_with_probs", torch.Tensor, probs=probs, routing_map=routing_map)
    row_map = _rows_of_mask(routing_map)
    return (*_permute_with_probs(inp, probs, row_map, num_out_tokens), row_map)


def moe_permute_and_pad_with_probs(
    inp: torch.Tensor,
    probs: torch.Tensor,
    routing_map: torch.Tensor,
    tokens_per_expert: torch.Tensor,
    align_size: int,
    *,
    num_out_tokens: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """moe_permute_with_probs() with each expert's rows padded by zeros to a multiple of align_size.

    (rows, probs of the rows, row_id_map, pad_offsets, rows of each expert with padding, int64 [E]).
    num_out_tokens: rows of the result, of which those that nothing fills are 0; T * k + E * (align_size - 1) are always
        enough, fewer than needed raise. None: as many as there are, which has to be read from the device. So a graph
        refuses it: no bound is taken instead, since a routing_map does not say k, and T * E rows are many too many.
    """
    check_type("moe_permute_and_pad_with_probs", torch.Tensor, probs=probs, tokens_per_expert=tokens_per_expert)
    if align_size <= 0:
        raise ValueError(f"moe_permute_and_pad_with_probs: align_size must be positive, got {align_size}")
    tokens = tokens_per_expert.to(inp.device, torch.int64)
    padded = (tokens + align_size - 1) // align_size * align_size
    pad_offsets = (padded - tokens).cumsum(0) - (padded - tokens)
    if num_out_tokens is None:
        if torch.compiler.is_compiling():
            raise RuntimeError(
                "moe_permute_and_pad_with_probs: the number of rows depends on the routing, which a graph cannot wait "
                "for; pass num_out_tokens=, such as T * topk + num_experts * (align_size - 1)"
            )
        num_out_tokens = int(padded.sum())
    row_map = _rows_of_mask(routing_map)
    rows = _permute_with_probs(inp, probs, _padded(row_map, pad_offsets), num_out_tokens)
    return (*rows, row_map, pad_offsets, padded)


@positional("probs", "pad_offsets")
def moe_unpermute(
    inp: torch.Tensor,
    row_id_map: torch.Tensor,
    merging_probs: torch.Tensor | None = None,
    restore_shape: Sequence[int] | None = None,
    map_type: str = "mask",
    *,
    probs: torch.Tensor | None = None,
    pad_offsets: torch.Tensor | None = None,
) -> torch.Tensor:
    """[T, K] from permuted rows: for each token the sum of its rows times merging_probs, in float32 and in the order of
    experts ("mask") or of the token's choices ("index").

    merging_probs: [T, E] with "mask", [T, k] with "index", where without them each row stands for itself: [k * T, K].
    restore_shape: [T, K], which the row_id_map knows; one that differs raises. probs: merging_probs' older name.
    pad_offsets: what moe_permute_and_pad_with_probs() returned.
    """
    check_type("moe_unpermute", torch.Tensor, row_id_map=row_id_map)
    if probs is not None:
        if merging_probs is not None:
            raise ValueError("moe_unpermute: probs is the older name of merging_probs; pass merging_probs alone")
        warnings.warn("moe_unpermute: probs is deprecated; pass merging_probs", DeprecationWarning, stacklevel=2)
        merging_probs = probs
    if _is_mask(map_type, "moe_unpermute"):
        row_map = row_id_map if pad_offsets is None else _padded(row_id_map, pad_offsets)
    else:
        slots = 1 if merging_probs is None else merging_probs.shape[1]
        row_map = row_id_map.view(slots, -1).t()
    if restore_shape is not None:
        torch._check(  # in the words of constants, which Dynamo asks for
            restore_shape[0] == row_map.shape[0],
            lambda: "moe_unpermute: restore_shape is not that of the tokens that row_id_map is of; leave it out",
        )
    return primitives.unpermute_rows(inp, row_map, None if merging_probs is None else merging_probs.float())


def moe_sort_chunks_by_index(inp: torch.Tensor, split_sizes: torch.Tensor, sorted_index: torch.Tensor) -> torch.Tensor:
    """inp [T, K], chunks of split_sizes [G] rows, with chunk sorted_index[0] first, then sorted_index[1] and so on.
    Rows after the last chunk stay where they are. inp may be a QuantizedTensor."""
    return permute_any(inp, primitives.chunk_rows(split_sizes, sorted_index, 1, inp.shape[0]), inp.shape[0])


def moe_sort_chunks_by_index_with_probs(
    inp: torch.Tensor, probs: torch.Tensor, split_sizes: torch.Tensor, sorted_index: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """moe_sort_chunks_by_index() of inp and of probs [T]."""
    check_type("moe_sort_chunks_by_index_with_probs", torch.Tensor, probs=probs)
    rows = inp.shape[0]
    row_map = primitives.chunk_rows(split_sizes, sorted_index, 1, rows)
    return permute_any(inp, row_map, rows), primitives.permute_rows(probs[:, None], row_map, rows)[:, 0]


def _is_mask(map_type: str, what: str) -> bool:
    if map_type not in ("mask", "index"):
        raise ValueError(f"{what}: map_type must be 'mask' or 'index', got {map_type!r}")
    return map_type == "mask"


def _rows_of_mask(mask: torch.Tensor) -> torch.Tensor:
    """Row of each token and expert, or -1: a mask is a list of as many choices as there are experts."""
    experts = mask.shape[1]
    ids = torch.arange(experts, dtype=torch.int32, device=mask.device)
    return primitives.expert_rows(torch.where(mask != 0, ids, -1), experts)[0]


def _padded(row_map: torch.Tensor, pad_offsets: torch.Tensor) -> torch.Tensor:
    return torch.where(row_map >= 0, _narrowed(row_map + pad_offsets), -1)


def _narrowed(numbers: torch.Tensor) -> torch.Tensor:
    """As int32. A number that has more bits becomes one that is refused as well, instead of one that may be right."""
    return numbers.clamp(-2, torch.iinfo(torch.int32).max).to(torch.int32)


def _permute_with_probs(
    inp: torch.Tensor, probs: torch.Tensor, row_map: torch.Tensor, rows: int
) -> tuple[torch.Tensor, torch.Tensor]:
    wanted = torch.where(probs != 0, row_map, -1)
    # The probs of the rows are a column of ones, weighted: float32 holds the value of a narrower dtype.
    ones = torch.ones(probs.shape[0], 1, dtype=torch.float32, device=probs.device)
    moved = primitives.permute_rows(ones, row_map, rows, probs.float())[:, 0]
    return permute_any(inp, wanted, rows), moved.to(probs.dtype)
