"""TransformerEngine's names for moving tokens between experts (transformer_engine.pytorch.permutation), and its modules
that pad each expert's rows."""

import warnings
from collections.abc import Sequence

import torch

from quire import functional
from quire.checks import check_type, check_type_or_none
from quire.moe.permutation import permute_any
from quire.te.arguments import positional
from quire.te.quantization import FP8GlobalStateManager, get_align_size_for_quantization


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
    num_out_tokens: the number of rows of the result. Rows that no token fills are 0. With "mask" at least the routed
    ones.
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
    row_map, _ = functional.expert_rows(_narrowed(routing_map), 0)
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
    num_out_tokens: the number of rows of the result. Rows that nothing fills are 0; T * k + E * (align_size - 1) are
    always
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
    return functional.unpermute_rows(inp, row_map, None if merging_probs is None else merging_probs.float())


def moe_sort_chunks_by_index(inp: torch.Tensor, split_sizes: torch.Tensor, sorted_index: torch.Tensor) -> torch.Tensor:
    """inp [T, K], chunks of split_sizes [G] rows, with chunk sorted_index[0] first, then sorted_index[1] and so on.
    Rows after the last chunk stay where they are. inp may be a QuantizedTensor."""
    return permute_any(inp, functional.chunk_rows(split_sizes, sorted_index, 1, inp.shape[0]), inp.shape[0])


def moe_sort_chunks_by_index_with_probs(
    inp: torch.Tensor, probs: torch.Tensor, split_sizes: torch.Tensor, sorted_index: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """moe_sort_chunks_by_index() of inp and of probs [T]."""
    check_type("moe_sort_chunks_by_index_with_probs", torch.Tensor, probs=probs)
    rows = inp.shape[0]
    row_map = functional.chunk_rows(split_sizes, sorted_index, 1, rows)
    return permute_any(inp, row_map, rows), functional.permute_rows(probs[:, None], row_map, rows)[:, 0]


def _is_mask(map_type: str, what: str) -> bool:
    if map_type not in ("mask", "index"):
        raise ValueError(f"{what}: map_type must be 'mask' or 'index', got {map_type!r}")
    return map_type == "mask"


def _rows_of_mask(mask: torch.Tensor) -> torch.Tensor:
    """Row of each token and expert, or -1: a mask is a list of as many choices as there are experts."""
    experts = mask.shape[1]
    ids = torch.arange(experts, dtype=torch.int32, device=mask.device)
    return functional.expert_rows(torch.where(mask != 0, ids, -1), experts)[0]


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
    moved = functional.permute_rows(ones, row_map, rows, probs.float())[:, 0]
    return permute_any(inp, wanted, rows), moved.to(probs.dtype)


# --- padding. quire's products need none: these are for scripts that expect it


Splits = Sequence[int] | torch.Tensor


class _Padding(torch.nn.Module):
    def __init__(self, num_gemms: int, align_size: int | None = None) -> None:
        super().__init__()
        what = f"quire.{type(self).__name__}"
        check_type(what, int, num_gemms=num_gemms)
        check_type_or_none(what, int, align_size=align_size)
        if align_size is not None and align_size < 1:
            raise ValueError(f"{what}: align_size must be at least 1, or None for that of the recipe, got {align_size}")
        self.num_gemms = num_gemms
        self.given_align_size = align_size

    @property
    def align_size(self) -> int:
        """What the module was given, or what TransformerEngine's kernels need of the active recipe."""
        if self.given_align_size is not None:
            return self.given_align_size
        return get_align_size_for_quantization(FP8GlobalStateManager.get_fp8_recipe())

    def check(self, m_splits: Splits) -> None:
        if len(m_splits) != self.num_gemms:
            raise ValueError(
                f"quire.{type(self).__name__}: m_splits must have num_gemms = {self.num_gemms} sizes, "
                f"got {len(m_splits)}"
            )

    def padded(self, m_splits: Splits) -> Splits:
        align = self.align_size
        if isinstance(m_splits, torch.Tensor):
            return (m_splits + align - 1) // align * align
        return [-(-size // align) * align for size in m_splits]

    def row_map(self, m_splits: Splits, rows: int, device: torch.device) -> torch.Tensor:
        sizes = (
            m_splits if isinstance(m_splits, torch.Tensor) else torch.tensor(m_splits, dtype=torch.int64, device=device)
        )
        return functional.chunk_rows(sizes, None, self.align_size, rows)

    def extra_repr(self) -> str:
        return f"num_gemms={self.num_gemms}, align_size={self.given_align_size}"


class Fp8Padding(_Padding):
    """Rows of each expert, padded by zeros to a multiple of align_size (by default 32 under MXFP8, 128 under NVFP4 and
    custom recipes, 16 under others)."""

    def forward(self, inp: torch.Tensor, m_splits: Splits) -> tuple[torch.Tensor, Splits]:
        """(padded rows, m_splits with padding) of inp [*, K], whose first m_splits[0] rows are the first expert's.

        m_splits a list: as many rows as the padded splits have. A tensor, which stays on its device: as many as there
        can be, rows + num_gemms * (align_size - 1), those that nothing fills are 0.
        """
        self.check(m_splits)
        inp = inp.reshape(-1, inp.shape[-1]) if inp.dim() != 2 else inp
        padded, rows = self.padded(m_splits), inp.shape[0]
        if isinstance(m_splits, torch.Tensor):
            bound = rows + self.num_gemms * (self.align_size - 1)
        elif list(m_splits) == padded:
            return inp, m_splits
        else:
            bound = sum(padded)
        return permute_any(inp, self.row_map(m_splits, rows, inp.device), bound), padded


class Fp8Unpadding(_Padding):
    """Fp8Padding undone."""

    def forward(self, inp: torch.Tensor, m_splits: Splits, *, num_out_tokens: int | None = None) -> torch.Tensor:
        """The rows that Fp8Padding of the same m_splits (without padding) took, of padded rows [*, K].

        num_out_tokens: how many there were. Needed where m_splits is a tensor, whose sum a graph cannot wait for.
        """
        self.check(m_splits)
        inp = inp.reshape(-1, inp.shape[-1]) if inp.dim() != 2 else inp
        if isinstance(m_splits, torch.Tensor):
            if num_out_tokens is None:
                raise TypeError(
                    "quire.te.Fp8Unpadding: the number of rows is not known where m_splits is a tensor; pass "
                    "num_out_tokens=, the number of rows that were padded"
                )
        elif list(m_splits) == self.padded(m_splits):
            return inp
        else:
            num_out_tokens = sum(m_splits)
        return functional.unpermute_rows(inp, self.row_map(m_splits, num_out_tokens, inp.device))
