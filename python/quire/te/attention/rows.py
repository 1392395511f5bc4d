"""Queries, keys and values in any of TransformerEngine's layouts, as rows of equal length [b, h, s, d] and back."""

import torch

from quire.te.arguments import Given
from quire.te.attention.key_value_cache import InferenceParams
from quire.te.attention.masks import Present, present, present_of_masks
from quire.te.attention.packing import Packing, longest_of

_WHAT = "quire.te.DotProductAttention"
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
