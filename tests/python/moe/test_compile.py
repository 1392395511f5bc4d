"""Routing and permutation in one graph, for every number of tokens and every load."""

import pytest
import torch
from torch._dynamo import decorators

import quire
from python.moe.routed_graphs import EXPERTS, TOKENS, agree, both, inputs
from quire import moe


def routed(x, logits, **options):
    weights, ids = moe.route(logits, 2, renormalize=True, **options)
    rows, offsets, row_map = moe.permute(x, ids, EXPERTS)
    y = moe.unpermute(rows.sin(), row_map, weights)
    loss = moe.load_balancing_loss(moe.scores(logits), moe.tokens_per_expert(ids, EXPERTS), topk=2)
    return y.square().sum() + loss, ids, offsets


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_unbacked_tokens_take_one_graph_for_any_count_and_load(compiler, backend):
    compiled = compiler(routed, backend)
    for tokens in TOKENS:
        agree(*both(routed, compiled, tokens, decorators.mark_unbacked))
    assert compiler.graphs == 1


def test_dynamic_tokens_take_one_graph(compiler):
    compiled = compiler(routed)
    for tokens in [t for t in TOKENS if t > 1]:
        agree(*both(routed, compiled, tokens, torch._dynamo.mark_dynamic))
    assert compiler.graphs == 1


def test_a_capacity_may_follow_the_tokens(compiler):
    def limited(x, logits):
        return routed(x, logits, capacity=-(-x.shape[0] * 2 * 5 // (EXPERTS * 4)))

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
