"""softmax(q k^T) v for queries, keys and values in any of TransformerEngine's layouts, which become rows of equal
length [b, h, s, d] and their result one of the layout."""

import contextlib
import math
from dataclasses import dataclass

import torch
from torch.nn.functional import pad, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from quire.checks import describe
from quire.distributed.groups import group_size
from quire.nn.layer_base import activation_dtype, uses_torch_autocast
from quire.nn.te_extra_state import drop_extra_state
from quire.te.arguments import Given, takes
from quire.te.attention.key_value_cache import InferenceParams
from quire.te.attention.masks import (
    Packing,
    Present,
    alibi,
    alibi_slopes,
    distance,
    from_bottom_right,
    kept,
    longest_of,
    mask_type_of,
    present,
    present_of_masks,
    window_of,
)

_WHAT = "quire.te.DotProductAttention"

# --- queries, keys and values in any layout, as rows [b, h, s, d] and back

Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def separate(given: tuple[torch.Tensor | None, ...], call: Given) -> Three:
    """Queries, keys and values of three tensors, or of qkv_layer, or of one and kv_layer. Raises ValueError for others
    and for shapes that do not fit."""
    packed = call.qkv_layer if call.qkv_layer is not None else call.kv_layer
    wanted = 0 if call.qkv_layer is not None else 1 if call.kv_layer is not None else 3
    both = call.qkv_layer is not None and call.kv_layer is not None
    there = [tensor is not None for tensor in given]
    if both or there != [True] * wanted + [False] * (3 - wanted):
        raise ValueError(
            f"{_WHAT}: pass query_layer, key_layer and value_layer, or query_layer and kv_layer, or qkv_layer; got "
            f"{there} of the three, qkv_layer {call.qkv_layer is not None} and kv_layer {call.kv_layer is not None}"
        )
    if packed is None:
        return given
    parts, dim = 3 - wanted, call.qkv_interleave_dim
    if dim not in (-3, -2) or packed.dim() < 4 or packed.shape[dim] != parts:
        raise ValueError(
            f"{_WHAT}: {'kv_layer' if wanted else 'qkv_layer'} must have size {parts} at qkv_interleave_dim, which is "
            f"-3 or -2; got {list(packed.shape)} and qkv_interleave_dim={dim}"
        )
    if wanted and call.inference_params is None and packed.dim() != given[0].dim() + 1:
        raise ValueError(
            f"{_WHAT}: kv_layer must have one more dimension than query_layer, got {list(packed.shape)} and "
            f"{list(given[0].shape)}"
        )
    return *given[:wanted], *packed.unbind(dim)


class Rows:
    """What one call of attention knows about its batch.

    layout: of queries: "sbhd", "bshd" or "thd". mask_type: one of masks.MASK_TYPES. tokens: which tokens exist, for a
    padding type of mask. packing: where queries of "thd" are among all of them, `total`.
    """

    def __init__(self, layout: str, mask_type: str, cross: bool) -> None:
        self.layout, self.mask_type, self.cross = layout, mask_type, cross
        self.tokens: Present | None = None
        self.packing: Packing | None = None
        self.total = 0

    @property
    def padded(self) -> bool:
        return "padding" in self.mask_type

    def of(self, qkv: Three, call: Given) -> Three:
        """The three as [b, h, s, d]. Raises ValueError if the type of mask needs to know which tokens exist, and no
        argument says so."""
        if self.layout == "thd":
            return self._unpacked(qkv, call)
        q, k, v = (self._batch_first(tensor) for tensor in qkv)
        if self.padded and call.attention_mask is not None:
            self.tokens = present_of_masks(_WHAT, call.attention_mask, self.cross)
            sizes = [*self.tokens.q.shape, *self.tokens.kv.shape]
            if sizes != [*q.shape[:2], *k.shape[:2]]:
                raise ValueError(
                    f"{_WHAT}: attention_mask is for {sizes[:2]} queries and {sizes[2:]} keys of batch and length; got "
                    f"{list(q.shape[:2])} and {list(k.shape[:2])}"
                )
        elif self.padded:
            self.tokens = self._by_lengths(q, k, call)
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)

    def with_cache(self, qkv: Three, cache: InferenceParams, layer: torch.nn.Module) -> Three:
        """of() with the keys and values of earlier calls, to which the new ones are added. Masks count from the last
        key. Raises ValueError without a padding type of mask."""
        if not self.padded:
            raise ValueError(
                f"{_WHAT}: inference_params needs a padding type of mask, such as 'padding_causal', because sequences "
                f"in the cache have different lengths; got {self.mask_type!r}"
            )
        if self.mask_type == "padding_causal":
            self.mask_type = "padding_causal_bottom_right"
        q, k, v = qkv
        cache.claim(layer.layer_number, layer, k.device)
        k, v, cu_seqlens_q, cu_seqlens_kv = cache.step(layer.layer_number, k, v, self.layout)
        if self.layout == "thd":
            self.packing, self.total = cache.packing(cu_seqlens_q, q.shape[0]), q.shape[0]
            q, here = self.packing.pad(q), self.packing.present()
        else:
            q = self._batch_first(q)
            here = present(cu_seqlens_q, *q.shape[:2], q.device)
        self.tokens = Present(here, present(cu_seqlens_kv, *k.shape[:2], k.device))
        return q.transpose(1, 2), k.to(q.dtype).transpose(1, 2), v.to(q.dtype).transpose(1, 2)

    def back(self, y: torch.Tensor) -> torch.Tensor:
        """[b, h, s, d] -> [s, b, h * d], or in the order of the layout."""
        y = y.transpose(1, 2).flatten(2)
        if self.packing is not None:
            return self.packing.unpad(y, self.total)
        return y.transpose(0, 1).contiguous() if self.layout == "sbhd" else y.contiguous()

    def _batch_first(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.transpose(0, 1) if self.layout == "sbhd" else tensor

    def _unpacked(self, qkv: Three, call: Given) -> Three:
        q_lengths, kv_lengths = call.cu_seqlens_q, call.cu_seqlens_kv
        if not self.padded or q_lengths is None or kv_lengths is None or q_lengths.shape != kv_lengths.shape:
            got = [None if one is None else list(one.shape) for one in (q_lengths, kv_lengths)]
            raise ValueError(
                f"{_WHAT}: qkv_format='thd' needs a padding type of mask, and cu_seqlens_q and cu_seqlens_kv of one "
                f"shape [b + 1]; got {self.mask_type!r}, {got[0]} and {got[1]}"
            )
        q, k, v = qkv
        starts_q, starts_kv = call.cu_seqlens_q_padded, call.cu_seqlens_kv_padded
        self.packing, self.total = _packing(q, q_lengths, starts_q, call.max_seqlen_q), q.shape[0]
        keys = _packing(k, kv_lengths, starts_kv, call.max_seqlen_kv)
        self.tokens = Present(self.packing.present(), keys.present())
        return self.packing.pad(q).transpose(1, 2), keys.pad(k).transpose(1, 2), keys.pad(v).transpose(1, 2)

    def _by_lengths(self, q: torch.Tensor, k: torch.Tensor, call: Given) -> Present:
        q_lengths, kv_lengths = call.cu_seqlens_q, call.cu_seqlens_kv
        if not self.cross and kv_lengths is None:
            kv_lengths = q_lengths
        if q_lengths is None or kv_lengths is None or min(len(q_lengths), len(kv_lengths)) <= q.shape[0]:
            got = [None if one is None else list(one.shape) for one in (q_lengths, kv_lengths)]
            raise ValueError(
                f"{_WHAT}: a mask of type {self.mask_type!r} needs attention_mask, or cu_seqlens_q and cu_seqlens_kv "
                f"[b + 1] for b = {q.shape[0]} sequences; got {got[0]} and {got[1]}"
            )
        return Present(
            present(q_lengths, *q.shape[:2], q.device),
            present(kv_lengths, *k.shape[:2], k.device),
        )


def _packing(tokens: torch.Tensor, lengths: torch.Tensor, starts: torch.Tensor | None, longest: int | None) -> Packing:
    return Packing(lengths, starts, longest_of(longest, lengths, tokens.shape[0]))


# --- softmax(q k^T) v by torch.nn.functional.scaled_dot_product_attention, with all that goes into its mask


@dataclass(frozen=True)
class Scores:
    """What attention does to q k^T before and after the softmax.

    scale: a factor. keep: bool, broadcastable to [b, h, sq, skv], False for keys without weight; None: all keys have
    weights. bias: of the same shape, is added after scaling. causal: instead of keep. sink: [h], the logarithm of a
    further weight in the sum of each row. dropout: the probability that a weight is dropped.

    Rows without any key give 0.
    """

    scale: float
    keep: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    causal: bool = False
    sink: torch.Tensor | None = None
    dropout: float = 0.0

    def mask(self, dtype: torch.dtype) -> torch.Tensor | None:
        """The mask for PyTorch: bool, or a tensor that is added to scores, in float32 or float64."""
        if self.bias is None:
            return self.keep
        bias = self.bias.to(torch.promote_types(dtype, torch.float32))
        return bias if self.keep is None else bias.masked_fill(~self.keep, -torch.inf)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scores: Scores) -> torch.Tensor:
    """q [b, h, sq, d], k [b, g, skv, d], v [b, g, skv, dv], where g divides h -> [b, h, sq, dv]. Softmax and sums are
    in float32 at least."""
    mask = scores.mask(q.dtype)
    if scores.sink is not None:
        mask = _with_sink(mask, scores.sink, q, k.shape[2])
        k, v = pad(k, (0, 0, 0, 1)), pad(v, (0, 0, 0, 1))  # a key of zeros, whose score is the sink's
    # PyTorch's autocast would round the mask, to which positions belong.
    exact = torch.autocast(q.device.type, enabled=False) if uses_torch_autocast(q) else contextlib.nullcontext()
    with exact:
        return scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            dropout_p=scores.dropout,
            is_causal=scores.causal,
            scale=scores.scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )


def _with_sink(mask: torch.Tensor | None, sink: torch.Tensor, q: torch.Tensor, keys: int) -> torch.Tensor:
    dtype = torch.promote_types(q.dtype, torch.float32)
    shape = (q.shape[0], q.shape[1], q.shape[2])
    if mask is None:
        mask = q.new_zeros(1, 1, 1, 1, dtype=dtype)
    elif mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, -torch.inf)
    return torch.cat([mask.expand(*shape, keys), sink.to(dtype).view(1, -1, 1, 1).expand(*shape, 1)], dim=-1)


@torch.no_grad()
def max_logits(q: torch.Tensor, k: torch.Tensor, scores: Scores) -> torch.Tensor:
    """The largest score of each head: [h], in float32 at least."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    values = q.to(dtype) @ k.to(dtype).mT * scores.scale
    mask = scores.mask(q.dtype)
    if scores.causal:
        mask = torch.ones_like(values, dtype=torch.bool).tril()
    if mask is not None:
        values = values.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else values + mask
    return values.amax(dim=(0, 2, 3))


# --- the module


FORMATS = ("sbhd", "bshd", "thd")
BIAS_TYPES = ("no_bias", "pre_scale_bias", "post_scale_bias", "alibi")
SOFTMAX_TYPES = ("vanilla", "off-by-one", "learnable")

_OPTIONS = {
    "num_gqa_groups": None,
    "attention_dropout": 0.0,
    "qkv_format": "sbhd",
    "attn_mask_type": "causal",
    "window_size": None,
    "bottom_right_diagonal": None,
    "sequence_parallel": False,
    "tp_size": 1,
    "get_rng_state_tracker": None,
    "tp_group": None,
    "layer_number": None,
    "attention_type": "self",
    "cp_group": None,
    "cp_global_ranks": None,
    "cp_stream": None,
    "cp_comm_type": "p2p",
    "softmax_scale": None,
    "softmax_type": "vanilla",
    "return_max_logit": False,
    "name": None,
}
_CALL = {
    "attention_mask": None,
    "qkv_format": None,
    "cu_seqlens_q": None,
    "cu_seqlens_kv": None,
    "cu_seqlens_q_padded": None,
    "cu_seqlens_kv_padded": None,
    "max_seqlen_q": None,
    "max_seqlen_kv": None,
    "attn_mask_type": None,
    "window_size": None,
    "bottom_right_diagonal": None,
    "checkpoint_core_attention": False,
    "core_attention_bias_type": "no_bias",
    "core_attention_bias": None,
    "alibi_slopes": None,
    "fast_zero_fill": True,
    "inference_params": None,
    "pad_between_seqs": None,
    "fp8_output": False,
    "bf16_backward": False,
    "num_splits": 1,
    "score_mod": None,
    "score_mod_bprop": None,
    "score_mod_tensors": None,
    "score_mod_bprop_tensors": None,
    "qkv_layer": None,
    "kv_layer": None,
    "qkv_interleave_dim": -3,
}


def refuse_context_parallel(what: str, cp_group: object) -> None:
    """Raises NotImplementedError for a group, or a list of groups, of several ranks."""
    groups = cp_group if isinstance(cp_group, list | tuple) else [cp_group]
    if any(group_size(group) != 1 for group in groups):
        raise NotImplementedError(
            f"{what}: cp_group={describe(cp_group)} is not available: a sequence is not sharded over ranks within "
            "attention; use tensor parallelism (tp_group), which shards heads, or "
            "torch.distributed.tensor.experimental.context_parallel around scaled_dot_product_attention"
        )


class DotProductAttention(torch.nn.Module):
    """softmax(scale * q k^T + mask) v, in high precision under every recipe: only layers of weights quantize.

    It is torch.nn.functional.scaled_dot_product_attention, with masks and biases as its attn_mask. Softmax and sums are
    in float32. A query without any key gives 0.

    num_attention_heads, num_gqa_groups: heads of queries, and of keys and values (None: as many); of all ranks.
    kv_channels: features of a head, or a pair (of keys, of values).
    attention_dropout: probability that a weight is dropped in training. Drawn within get_rng_state_tracker().fork() if
        that is given and sequence_parallel is not.
    qkv_format: "sbhd", "bshd" or "thd": the order of dimensions, s or t tokens, b batch, h heads, d features.
    attn_mask_type: "no_mask", "causal", "causal_bottom_right", "padding", "padding_causal",
        "padding_causal_bottom_right" or "arbitrary". A causal mask begins at the first query and key; "bottom_right"
        ends it at the last ones, of each sequence.
    window_size: (left, right), how many keys before and after its own place a query attends to; -1: all.
    bottom_right_diagonal: where a window and ALiBi count from, for types of masks that do not say so; None: the end.
    attention_type: "self", or "cross", where padding masks are pairs. layer_number: for InferenceParams; None: 1.
    softmax_scale: None: 1 / sqrt(features of keys). softmax_type: "off-by-one" adds 1 to the sum of each row,
        "learnable" exp(softmax_offset), a parameter [heads]. return_max_logit: forward returns (y, largest score of
        each head [h]) too.
    tp_group, tp_size: over whose ranks heads are sharded. cp_group: only of one process.

    The state_dict holds nothing, or softmax_offset; `_extra_state` of TransformerEngine is accepted.
    """

    @takes(_OPTIONS)
    def __init__(
        self, num_attention_heads: int, kv_channels: int | tuple[int, int], options: dict[str, object]
    ) -> None:
        super().__init__()
        given = Given(**options)
        refuse_context_parallel(_WHAT, given.cp_group)
        _check_one_of("qkv_format", given.qkv_format, FORMATS)
        _check_one_of("attention_type", given.attention_type, ("self", "cross"))
        _check_one_of("softmax_type", given.softmax_type, SOFTMAX_TYPES)
        self.attn_mask_type = mask_type_of(_WHAT, given.attn_mask_type)
        self.window_size = window_of(_WHAT, self.attn_mask_type, given.window_size)
        self.tp_group = given.tp_group
        self.tp_size = given.tp_size if given.tp_group is None else group_size(given.tp_group)
        groups = num_attention_heads if given.num_gqa_groups is None else given.num_gqa_groups
        if num_attention_heads % groups or groups % self.tp_size:
            raise ValueError(
                f"{_WHAT}: num_gqa_groups must divide num_attention_heads, and be a multiple of the number of "
                f"ranks; got {groups} groups, {num_attention_heads} heads and {self.tp_size} ranks"
            )
        self.num_attention_heads, self.num_gqa_groups = num_attention_heads, groups
        self.num_gqa_groups_per_partition = groups // self.tp_size
        pair = (kv_channels, kv_channels) if isinstance(kv_channels, int) else tuple(kv_channels)
        self.hidden_size_per_attention_head_k, self.hidden_size_per_attention_head_v = pair
        self.softmax_scale = 1 / math.sqrt(pair[0]) if given.softmax_scale is None else given.softmax_scale
        self.softmax_type, self.return_max_logit = given.softmax_type, given.return_max_logit
        self.qkv_format, self.attention_type = given.qkv_format, given.attention_type
        self.bottom_right_diagonal, self.attention_dropout = given.bottom_right_diagonal, given.attention_dropout
        self.layer_number = 1 if given.layer_number is None else given.layer_number
        self.get_rng_state_tracker, self.name = given.get_rng_state_tracker, given.name
        self.sequence_parallel = given.sequence_parallel
        offset = None
        if self.softmax_type == "learnable":
            offset = torch.nn.Parameter(torch.zeros(num_attention_heads // self.tp_size, dtype=None, device=None))
        self.register_parameter("softmax_offset", offset)

    def set_tensor_parallel_group(self, tp_group: object) -> None:
        """The group over whose ranks heads are sharded. Raises ValueError for one of another size than tp_size."""
        if tp_group is not None and group_size(tp_group) != self.tp_size:
            raise ValueError(
                f"{_WHAT}: it was made for {self.tp_size} ranks, got a group of {group_size(tp_group)}; pass "
                "tp_size to the constructor"
            )
        self.tp_group = tp_group

    def set_context_parallel_group(self, cp_group: object, *_: object, **__: object) -> None:
        """Accepts None and groups of one process. Raises NotImplementedError for others."""
        refuse_context_parallel(_WHAT, cp_group)

    @takes(_CALL)
    def forward(
        self,
        query_layer: torch.Tensor | None = None,
        key_layer: torch.Tensor | None = None,
        value_layer: torch.Tensor | None = None,
        *,
        options: dict[str, object],
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """q [s, b, h, d], k [s, b, g, d] and v [s, b, g, dv] -> [s, b, h * dv], in qkv_format.

        attention_mask: bool, True for what a query does not attend to: [b, 1, 1, s] for a padding type of mask (or a
            pair of them, for q and k), broadcastable to [b, h, sq, skv] for "arbitrary".
        cu_seqlens_q, cu_seqlens_kv: [b + 1], cumulative numbers of tokens of sequences, instead of attention_mask of a
            padding type, and needed for "thd". cu_seqlens_q_padded, cu_seqlens_kv_padded: where sequences of "thd"
            begin, if there is space between them; tokens in it give 0. max_seqlen_q, max_seqlen_kv: the length of the
            longest sequence, for "thd". Compiled functions should pass them: without, they reckon with the number of
            all tokens.
        core_attention_bias_type: "pre_scale_bias" or "post_scale_bias": core_attention_bias, broadcastable to
            [b, h, sq, skv], is added to q k^T before or after scaling. "alibi": -slope * distance, with alibi_slopes
            [h] or [b, h], of this rank's heads (None: the slopes of ALiBi).
        checkpoint_core_attention: backward computes everything again instead of keeping it.
        inference_params: k and v are added to this cache first (InferenceParams).
        qkv_layer, kv_layer: [*, 3, h, d] or [*, 2, g, d] instead of three or two tensors; qkv_interleave_dim: the
            dimension of the 3 or 2, -3 or -2.
        attn_mask_type, window_size, bottom_right_diagonal, qkv_format: instead of the constructor's.
        fast_zero_fill, pad_between_seqs, num_splits, bf16_backward change nothing.

        Raises ValueError or TypeError for what does not fit, NotImplementedError for fp8_output and score_mod.
        """
        call = Given(**options)
        _refuse(call)
        q, k, v = separate((query_layer, key_layer, value_layer), call)
        layout = self.qkv_format if call.qkv_format is None else call.qkv_format
        q, k, v = self._checked((q, k, v), layout)
        mask_type = self.attn_mask_type if call.attn_mask_type is None else mask_type_of(_WHAT, call.attn_mask_type)
        rows = Rows(layout, mask_type, self.attention_type == "cross")
        if call.inference_params is None:
            q, k, v = rows.of((q, k, v), call)
        else:
            q, k, v = rows.with_cache((q, k, v), call.inference_params, self)
        scores = self._scores(q, k, rows, call)
        with self._random_stream(scores.dropout, call.checkpoint_core_attention):
            if call.checkpoint_core_attention:
                y = checkpoint(attend, q, k, v, scores, use_reentrant=False)
            else:
                y = attend(q, k, v, scores)
        y = rows.back(y)
        return (y, max_logits(q, k, scores)) if self.return_max_logit else y

    def _checked(self, qkv: tuple[torch.Tensor, ...], layout: str) -> tuple[torch.Tensor, ...]:
        """In the dtype of PyTorch's autocast, if that is enabled."""
        _check_one_of("qkv_format", layout, FORMATS)
        q, k, v = qkv = tuple(tensor.to(activation_dtype(tensor)) for tensor in qkv)
        if not q.dtype == k.dtype == v.dtype:
            raise TypeError(f"{_WHAT}: q, k and v must have one dtype, got {q.dtype}, {k.dtype} and {v.dtype}")
        dim, dim_v, groups = (
            self.hidden_size_per_attention_head_k,
            self.hidden_size_per_attention_head_v,
            self.num_gqa_groups_per_partition,
        )
        heads = (self.num_attention_heads // self.tp_size, dim), (groups, dim), (groups, dim_v)
        if any(t.dim() != len(layout) or t.shape[-2:] != ends for t, ends in zip(qkv, heads, strict=True)):
            raise ValueError(
                f"{_WHAT}: q, k and v must have the dimensions {layout}, with the heads and features {heads[0]}, "
                f"{heads[1]} and {heads[2]}; got {list(q.shape)}, {list(k.shape)} and {list(v.shape)}"
            )
        if k.shape[:-1] != v.shape[:-1]:
            raise ValueError(f"{_WHAT}: k and v must have the same tokens, got {list(k.shape)} and {list(v.shape)}")
        return qkv

    def _scores(self, q: torch.Tensor, k: torch.Tensor, rows: Rows, call: Given) -> Scores:
        """What is done to the scores of q and k [b, h, s, d]."""
        window = self.window_size if call.window_size is None else call.window_size
        window = window_of(_WHAT, rows.mask_type, window)
        given = self.bottom_right_diagonal if call.bottom_right_diagonal is None else call.bottom_right_diagonal
        bottom_right = from_bottom_right(rows.mask_type, given)
        sq, skv = q.shape[2], k.shape[2]
        places = distance(sq, skv, bottom_right, rows.tokens, q.device)
        bias = self._bias(places, call)
        masked = _arbitrary(rows.mask_type, call.attention_mask)
        plain = rows.tokens is None and masked is None
        whole = plain and window == (-1, -1)
        causal = plain and window == (-1, 0) and (not bottom_right or sq == skv)
        causal = causal and bias is None and self.softmax_type == "vanilla"
        keep = None if whole or causal else kept(places, window, rows.tokens, masked)
        sink = self.softmax_offset
        if self.softmax_type == "off-by-one":
            sink = q.new_zeros(q.shape[1], dtype=torch.float32)
        dropout = self.attention_dropout if self.training else 0.0
        return Scores(self.softmax_scale, keep, bias, causal, sink, dropout)

    def _bias(self, places: torch.Tensor, call: Given) -> torch.Tensor | None:
        kind, given = call.core_attention_bias_type, call.core_attention_bias
        _check_one_of("core_attention_bias_type", kind, BIAS_TYPES)
        if (given is not None) != (kind in ("pre_scale_bias", "post_scale_bias")):
            raise ValueError(
                f"{_WHAT}: core_attention_bias belongs to core_attention_bias_type 'pre_scale_bias' and "
                f"'post_scale_bias'; got {kind!r} and {describe(given)}"
            )
        if kind == "alibi":
            slopes = self._own_slopes(places.device) if call.alibi_slopes is None else call.alibi_slopes
            return alibi(slopes, places)
        return given * self.softmax_scale if kind == "pre_scale_bias" else given

    def _own_slopes(self, device: torch.device) -> torch.Tensor:
        """The slopes of ALiBi for the heads of this rank."""
        slopes = alibi_slopes(self.num_attention_heads, device)
        index = torch.distributed.get_rank(self.tp_group) if self.tp_size > 1 else 0
        return slopes.chunk(self.tp_size)[index]

    def _random_stream(self, dropout: float, recomputed: bool) -> contextlib.AbstractContextManager[object]:
        """The random stream of dropout."""
        if self.get_rng_state_tracker is None or self.sequence_parallel or dropout == 0:
            return contextlib.nullcontext()
        if recomputed:
            raise NotImplementedError(
                f"{_WHAT}: checkpoint_core_attention with dropout and get_rng_state_tracker is not available, because "
                "the tracker's states would have moved on when backward computes again; leave one of them out"
            )
        return self.get_rng_state_tracker().fork()

    def _load_from_state_dict(self, state_dict: dict[str, object], prefix: str, *options: object) -> None:
        drop_extra_state(self, state_dict, prefix, "fused_attention._extra_state")
        super()._load_from_state_dict(state_dict, prefix, *options)


def _check_one_of(name: str, value: object, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(f"{_WHAT}: {name} must be one of {', '.join(map(repr, known))}, got {describe(value)}")


def _refuse(call: Given) -> None:
    if call.fp8_output:
        raise NotImplementedError(
            f"{_WHAT}: fp8_output=True is not available: attention is in high precision; leave it False, and layers "
            "that follow quantize its result"
        )
    if call.score_mod is not None or call.score_mod_bprop is not None:
        raise NotImplementedError(
            f"{_WHAT}: score_mod is not available: it is a function of cuDNN's graphs; use "
            "torch.nn.attention.flex_attention.flex_attention, which takes one in Python, or core_attention_bias"
        )


def _arbitrary(mask_type: str, mask: torch.Tensor | None) -> torch.Tensor | None:
    if mask_type != "arbitrary":
        return None
    if not isinstance(mask, torch.Tensor) or mask.dtype != torch.bool:
        raise ValueError(
            f"{_WHAT}: a mask of type 'arbitrary' needs attention_mask, bool, broadcastable to [b, h, seqlen_q, "
            f"seqlen_kv]; got {describe(mask)}"
        )
    return mask
