"""Routing and permutation in one graph, for every number of tokens and every load."""

import pytest
import torch
from torch._dynamo import decorators

import quire
from quire import moe, te

TOKENS = [0, 1, 7, 64, 33, 2]
EXPERTS = 6


def inputs(tokens, mark=None):
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, 32, generator=generator)
    logits = torch.randn(tokens, EXPERTS, generator=generator)
    logits[:, tokens % EXPERTS] += 3 * (tokens % 3)  # loads differ, some experts are empty
    for t in (x, logits):
        t.requires_grad_()
        if mark is not None:
            mark(t, 0)
    return x, logits


def step(x, logits, **options):
    weights, ids = moe.route(logits, 2, renormalize=True, **options)
    rows, offsets, row_map = moe.permute(x, ids, EXPERTS)
    y = moe.unpermute(rows.sin(), row_map, weights)
    loss = moe.load_balancing_loss(moe.scores(logits), moe.tokens_per_expert(ids, EXPERTS), topk=2)
    return y.square().sum() + loss, ids, offsets


def both(function, compiled, tokens, mark):
    """Results and gradients, eager and compiled, of the same inputs."""
    done = []
    for run, marked in ((function, None), (compiled, mark)):
        given = inputs(tokens, marked)
        loss, *rest = run(*given)
        loss.backward()
        done.append((loss.detach(), *rest, *(t.grad for t in given)))
    return done


def agree(eager, compiled):
    """What quire computes is equal; Inductor's and eager's sums and sines may differ in last bits: by one rounding of
    each of at most `terms` terms."""
    terms = 2 * max(eager[-2].numel(), 64)
    for e, c in zip(eager, compiled, strict=True):
        assert e.shape == c.shape and e.dtype == c.dtype
        if e.is_floating_point() and e.numel():
            assert float((c - e).abs().max()) <= terms * 2.0**-24 * float(e.abs().max())
        assert e.is_floating_point() or torch.equal(e, c)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_unbacked_tokens_take_one_graph_for_any_count_and_load(compiler, backend):
    compiled = compiler(step, backend)
    for tokens in TOKENS:
        agree(*both(step, compiled, tokens, decorators.mark_unbacked))
    assert compiler.graphs == 1


def test_dynamic_tokens_take_one_graph(compiler):
    compiled = compiler(step)
    for tokens in [t for t in TOKENS if t > 1]:
        agree(*both(step, compiled, tokens, torch._dynamo.mark_dynamic))
    assert compiler.graphs == 1


def test_a_capacity_may_follow_the_tokens(compiler):
    def limited(x, logits):
        return step(x, logits, capacity=-(-x.shape[0] * 2 * 5 // (EXPERTS * 4)))

    compiled = compiler(limited)
    for tokens in TOKENS:
        eager, graph = both(limited, compiled, tokens, decorators.mark_unbacked)
        agree(eager, graph)
        assert tokens < 7 or (eager[1] < 0).any()
    assert compiler.graphs == 1


def test_graphs_hold_the_operators_and_give_their_bits(compiler):
    graphs = []

    def keep(graph, _):
        graphs.append(graph)
        return graph

    def route(x, logits):
        weights, ids = moe.route(logits, 3, score_function="sigmoid", num_groups=2, group_topk=1)
        rows, offsets, row_map = moe.permute(x, ids, EXPERTS, weights=weights)
        return weights, ids, rows, offsets, row_map, moe.unpermute(rows, row_map, weights)

    compiled = torch.compile(route, fullgraph=True, backend=keep)
    given = inputs(19)
    assert all(torch.equal(a, b) for a, b in zip(route(*given), compiled(*given), strict=True))
    assert not any(str(node.target) == "item" for node in graphs[0].graph.nodes)  # nothing waits for a value
    calls = [str(node.target) for node in graphs[0].graph.nodes if node.op == "call_function"]
    assert [name for name in calls if name.startswith("quire.")] == [
        *("quire.route", "quire.expert_rows", "quire.permute", "quire.unpermute")
    ]


def test_the_bias_is_updated_within_a_graph(compiler):
    def balance(bias, logits):
        _, ids = moe.route(logits, 2, score_function="sigmoid", expert_bias=bias)
        load = moe.tokens_per_expert(ids, EXPERTS)
        moe.update_expert_bias_(bias, load, 0.01)
        return load

    compiled = compiler(balance)
    eager_bias, bias = torch.zeros(EXPERTS), torch.zeros(EXPERTS)
    for tokens in (5, 70, 9):
        logits = inputs(tokens)[1].detach()
        graph = logits.clone()
        decorators.mark_unbacked(graph, 0)
        assert torch.equal(balance(eager_bias, logits), compiled(bias, graph))
        assert torch.equal(eager_bias, bias) and bias.any()
    assert compiler.graphs == 1


@pytest.mark.parametrize("spec", ["mxfp8", "nvfp4", "fp8_block", "fp8_row", "fp8_tensor"])
def test_codes_permute_within_a_graph(compiler, spec):
    def permute(x, ids):
        rows, offsets, row_map = moe.permute(quire.quantize(x, spec), ids, EXPERTS)
        return rows.buffer_list()[:2], rows.dequantize(), offsets, row_map

    compiled = compiler(permute)
    for tokens in TOKENS:
        x, logits = (t.detach() for t in inputs(tokens))
        _, ids = moe.route(logits, 2)
        graph_x, graph_ids = x.clone(), ids.clone()
        decorators.mark_unbacked(graph_x, 0)
        decorators.mark_unbacked(graph_ids, 0)
        (data, scale), *rest = permute(x, ids)
        (graph_data, graph_scale), *graph_rest = compiled(graph_x, graph_ids)
        pairs = zip((data, scale, *rest), (graph_data, graph_scale, *graph_rest), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)
    assert compiler.graphs == 1


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


def test_an_exported_program_routes_and_permutes():
    class Block(torch.nn.Module):
        def forward(self, x, logits):
            weights, ids = moe.route(logits, 2)
            rows, _, row_map = moe.permute(x, ids, EXPERTS)
            return moe.unpermute(rows, row_map, weights)

    x, logits = (t.detach() for t in inputs(12))
    tokens = torch.export.Dim("tokens")
    program = torch.export.export(Block(), (x, logits), dynamic_shapes=({0: tokens}, {0: tokens})).module()
    for count in (5, 40):
        given = [t.detach() for t in inputs(count)]
        assert torch.equal(program(*given), Block()(*given))
