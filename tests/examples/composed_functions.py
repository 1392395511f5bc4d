"""Importing this composes PyTorch's norm and attention of simple operators. On the CPU they are kernels of their own,
whose sums have another order than those of the operators that PyTorch composes them of on a device."""

import torch


def layer_norm(x, shape, weight, bias, eps=1e-5):
    centred = x - x.mean(-1, keepdim=True)
    return centred * (centred.square().mean(-1, keepdim=True) + eps).rsqrt() * weight + bias


def attention(q, k, v, is_causal):
    assert is_causal
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    return scores.masked_fill(later, float("-inf")).softmax(-1) @ v


torch.nn.functional.layer_norm = layer_norm
torch.nn.functional.scaled_dot_product_attention = attention
