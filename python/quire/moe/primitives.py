"""The operators of a mixture of experts as plain functions of tensors, numbers and texts (docs/moe.md)."""

import torch


def route(logits: torch.Tensor, expert_bias: torch.Tensor | None, routing: str) -> tuple[torch.Tensor, torch.Tensor]:
    """logits [*, E], expert_bias [E] -> topk_weights float32 [*, topk], differentiable, and topk_ids int32 [*, topk].

    routing: "FUNCTION:topk=N[:OPTION]...", such as "softmax:topk=2:renormalize"; the RuntimeError for a wrong text
    lists the options.
    """
    return torch.ops.quire.route(logits, expert_bias, routing)


def limit_capacity(topk_ids: torch.Tensor, num_experts: int, capacity: int) -> torch.Tensor:
    """topk_ids, with -1 where `capacity` earlier entries, in row-major order, have the same expert."""
    return torch.ops.quire.limit_capacity(topk_ids, num_experts, capacity)


def expert_rows(topk_ids: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """topk_ids int32 [T, k], -1 for no expert -> row_map int32 [T, k], offsets int32 [num_experts].

    row_map: the row of each entry when entries are sorted by expert, with a stable sort; -1 for no row. offsets: the
    end of each expert's rows; if num_experts is 0 (unknown), an empty tensor.
    """
    return torch.ops.quire.expert_rows(topk_ids, num_experts)


def chunk_rows(sizes: torch.Tensor, order: torch.Tensor | None, align: int, rows: int) -> torch.Tensor:
    """row_map int32 [rows, 1]: the new position of each row when chunks of `sizes` rows, int32 or int64 [G], are
    reordered. order: which chunk is first, second, ...; None keeps the order. Each chunk begins at a multiple of align.
    Rows after the last chunk stay behind it."""
    return torch.ops.quire.chunk_rows(sizes, order, align, rows)


def permute_rows(
    x: torch.Tensor, row_map: torch.Tensor, rows: int, weights: torch.Tensor | None = None
) -> torch.Tensor:
    """y [rows, K] with y[row_map[t, s]] = x[t] * weights[t, s], and 0 in all other rows; -1 in row_map writes no row.
    Differentiable.

    x [T, K]: float32, float16, bfloat16, or without weights uint8. row_map int32, weights float32 [T, S].
    """
    return torch.ops.quire.permute(x, row_map, weights, rows)


def unpermute_rows(y: torch.Tensor, row_map: torch.Tensor, weights: torch.Tensor | None = None) -> torch.Tensor:
    """x [T, K], where x[t] is the sum over s of y[row_map[t, s]] * weights[t, s], in this order and in float32, then
    rounded to y's dtype. Differentiable."""
    return torch.ops.quire.unpermute(y, row_map, weights)
