"""TransformerEngine's names for routing and permutation in one graph, for every number of tokens and every load."""

import pytest
import torch
from torch._dynamo import decorators

from python.moe.routed_graphs import EXPERTS, TOKENS, agree, both, inputs
from quire import te


def te_step(x, logits):
    """The names of TransformerEngine, as Megatron calls them."""
    probs, mask = te.fused_topk_with_score_function(
        logits=logits,
        topk=2,
        use_pre_softmax=False,
        num_groups=None,
        group_topk=None,
        scaling_factor=None,
        score_function="softmax",
        expert_bias=None,
    )
    rows, moved, row_id_map = te.moe_permute_with_probs(x, probs, mask, num_out_tokens=2 * x.shape[0])
    load = mask.sum(0)
    order = torch.arange(EXPERTS).flip(0)
    chunks = te.moe_sort_chunks_by_index(rows * moved[:, None], load, order)
    back = te.moe_sort_chunks_by_index(chunks, load.flip(0), order)
    y = te.moe_unpermute(back, row_id_map, merging_probs=probs, restore_shape=x.shape)
    padded, _, map_too, pad_offsets, _ = te.moe_permute_and_pad_with_probs(
        x, probs, mask, load, 16, num_out_tokens=2 * x.shape[0] + 15 * EXPERTS
    )
    z = te.moe_unpermute(padded, map_too, pad_offsets=pad_offsets)
    pad, splits = te.Fp8Padding(EXPERTS, 16)(rows, load)
    unpadded = te.Fp8Unpadding(EXPERTS, 16)(pad, load, num_out_tokens=rows.shape[0])
    ids = torch.empty(x.shape[0], 2, dtype=torch.int32)
    ids.copy_(mask.int().argsort(dim=1, descending=True, stable=True)[:, :2])
    by_index, index_map = te.moe_permute(x, ids, 0, map_type="index")
    w = te.moe_unpermute(by_index, index_map, probs.gather(1, ids.long()), map_type="index")
    _, scores = te.fused_compute_score_for_moe_aux_loss(logits, 2, "sigmoid")
    loss = te.fused_moe_aux_loss(scores, load, x.shape[0], EXPERTS, 2, 0.1)
    total = y.sum() + z.square().sum() + unpadded.cos().sum() + w.sin().sum() + loss
    return total, mask, splits, row_id_map, index_map


def test_transformer_engines_names_take_one_graph(compiler):
    compiled = compiler(te_step)
    for tokens in TOKENS:
        agree(*both(te_step, compiled, tokens, decorators.mark_unbacked))
    assert compiler.graphs == 1


def test_a_number_of_rows_that_depends_on_the_routing_is_refused_in_a_graph(compiler):
    x, logits = inputs(4)
    mask = torch.ones(4, EXPERTS, dtype=torch.bool)
    with pytest.raises(Exception, match="pass num_out_tokens=, such as T \\* topk"):
        compiler(te.moe_permute_and_pad_with_probs)(x, logits, mask, mask.sum(0), 16)


@pytest.mark.parametrize("compiled", [False, True])
def test_padded_rows_beyond_the_last_are_zero_and_too_few_are_refused(compiler, compiled):
    permute = compiler(te.moe_permute_and_pad_with_probs) if compiled else te.moe_permute_and_pad_with_probs
    x, _ = inputs(4)
    x, probs, mask = x.detach(), torch.ones(4, EXPERTS), torch.zeros(4, EXPERTS, dtype=torch.bool)
    mask[:, 1:3] = True
    exact = te.moe_permute_and_pad_with_probs(x, probs, mask, mask.sum(0), 16)
    more = permute(x, probs, mask, mask.sum(0), 16, num_out_tokens=40)
    assert exact[0].shape[0] == 32 and more[0].shape[0] == 40
    for got, expected in zip(more[:2], exact[:2], strict=True):
        assert torch.equal(got[:32], expected) and not got[32:].any()
    with pytest.raises(RuntimeError, match="row_map must hold rows from 0 to 18"):
        permute(x, probs, mask, mask.sum(0), 16, num_out_tokens=19)
