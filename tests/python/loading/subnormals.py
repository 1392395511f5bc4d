"""Subnormal numbers, and the bits of tensors that hold them."""

import torch

#: 2^-140 and 3 * 2^-140, by their bits; all numbers below 2^-126 are subnormal.
TINY, THREE = (torch.tensor([bits << 9], dtype=torch.int32).view(torch.float32) for bits in (1, 3))


def bits(t):
    return t.detach().contiguous().reshape(-1).view(torch.int32).tolist()


#: The bits of TINY; those of its multiples are as many times as large.
ONE = 1 << 9
