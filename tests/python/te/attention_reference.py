"""Attention in float64, one query after another, by what TransformerEngine's documentation says of masks."""

import math

import torch

#: Batch, lengths of queries and keys, heads of queries and of keys, features of keys and of values.
B, SQ, SKV, H, G, D, DV = 2, 5, 7, 4, 2, 8, 6


def attention(q, k, v, allowed, *, scale=None, bias=None, sink=None):
    """q [b, s, h, d], k and v [b, s, g, *] -> [b, s, h, dv]. allowed(b, i, j), bias(b, h, i, j, score) -> score,
    sink(h): the logarithm of a further weight."""
    q, k, v = (t.double() for t in (q, k, v))
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    share = q.shape[2] // k.shape[2]
    batches = []
    for b in range(q.shape[0]):
        queries = []
        for i in range(q.shape[1]):
            keys = [j for j in range(k.shape[1]) if allowed(b, i, j)]
            heads = []
            for h in range(q.shape[2]):
                if not keys:
                    heads.append(v.new_zeros(v.shape[-1]))
                    continue
                dots = [q[b, i, h] @ k[b, j, h // share] for j in keys]
                scores = [
                    dot * scale if bias is None else bias(b, h, i, j, dot) for j, dot in zip(keys, dots, strict=True)
                ]
                weights = torch.stack(scores + ([] if sink is None else [sink(h)])).exp()
                weights = weights / weights.sum()
                heads.append(sum(weights[n] * v[b, j, h // share] for n, j in enumerate(keys)))
            queries.append(torch.stack(heads))
        batches.append(torch.stack(queries))
    return torch.stack(batches)


def inputs(dtype=torch.float64, seed=0, lengths=(SQ, SKV), v_features=DV):
    """q, k and v as [b, s, h, d], which need gradients."""
    generator = torch.Generator().manual_seed(seed)
    shapes = (B, lengths[0], H, D), (B, lengths[1], G, D), (B, lengths[1], G, v_features)
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]
