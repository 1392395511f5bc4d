"""Functions of quire.te that make tensors of numbers and of their own, under each default: the same bits as without."""

import functools

import pytest
import torch

from defaults import in_turn, randn, under_and_without
from every_way import PLAIN
from quire import te
from steps import same


def permuted():
    mask = (randn(32, 8) > 0).to(torch.int32)
    rows = te.moe_permute_with_probs(randn(32, 16), randn(32, 8).sigmoid(), mask, int(mask.sum()))
    padded, sizes = te.Fp8Padding(3, 16)(randn(10, 4), [1, 0, 9])
    return [*rows, padded, torch.tensor(sizes, dtype=torch.int64, device="cpu")]


def turned():
    embedding = te.RotaryPositionEmbedding(32, seq_len_interpolation_factor=3, pretrained_max_position_embeddings=4)
    angles = embedding.to_empty(device="cpu")(14)
    return [angles, te.apply_rotary_pos_emb(randn(12, 2, 3, 32), angles)]


def attended(**options):
    layer = te.DotProductAttention(4, 16, attention_dropout=0.0, **options)
    return [layer.to_empty(device="cpu")(*(randn(5, 2, 4, 16) for _ in range(3)), core_attention_bias_type="alibi")]


def cached():
    cache = te.InferenceParams(2, 8, num_heads_kv=4, head_dim_k=16, dtype=torch.float32)
    cache.allocate_memory(1, "cpu")
    cache.pre_step({0: 3, 1: 2})
    keys, values, *lengths = cache.step(1, randn(2, 3, 4, 16), randn(2, 3, 4, 16), "bshd")
    return [keys, values, *lengths, cache.pre_step_seqlens]


def dropped():
    path = te.attention.transformer_layer.DropPath(0.3, 0)
    return [path(torch.ones(64, 4, **PLAIN))]


CALLS = {
    **{function.__name__: function for function in (permuted, turned, cached, dropped)},
    "attended": attended,
    "attended, a learnable sink": functools.partial(attended, softmax_type="off-by-one"),
}


@pytest.mark.parametrize(("name", "default"), in_turn(CALLS))
def test_a_call_under_a_default_has_the_bits_of_one_without(name, default):
    assert same(*under_and_without(default, CALLS[name]))
