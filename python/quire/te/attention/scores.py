"""softmax(q k^T) v by torch.nn.functional.scaled_dot_product_attention, with all that goes into its mask."""

import contextlib
from dataclasses import dataclass

import torch
from torch.nn.functional import pad, scaled_dot_product_attention

from quire.nn.dtype import uses_torch_autocast


@dataclass(frozen=True)
class Scores:
    """What attention does to q k^T before and after the softmax.

    scale: a factor. keep: bool, broadcastable to [b, h, sq, skv], False for what has no weight; None: nothing is left
    out. bias: of the same shape, is added after scaling. causal: instead of keep. sink: [h], the logarithm of a further
    weight in the sum of each row. dropout: the probability that a weight is dropped.

    Rows without any key give 0.
    """

    scale: float
    keep: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    causal: bool = False
    sink: torch.Tensor | None = None
    dropout: float = 0.0

    def mask(self, dtype: torch.dtype) -> torch.Tensor | None:
        """As PyTorch takes it: bool, or what is added to scores, in float32 or float64."""
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
