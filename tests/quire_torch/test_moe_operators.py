"""The operators of routing and permutation: opcheck, and bad input that ends in words and changes nothing."""

import pytest
import torch

import quire  # noqa: F401  loads the operators
from pairwise import each_value, pairwise

ops = torch.ops.quire
UTILITIES = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
ROUTINGS = [
    "softmax:topk=2:renormalize",
    "softmax:topk=3:after_topk:scaling_factor=0.5",
    "sigmoid:topk=4:num_groups=4:group_topk=2",
    "sqrtsoftplus:topk=1",
]


def check(op, *args):
    assert set(torch.library.opcheck(op, args, test_utils=UTILITIES).values()) == {"SUCCESS"}


@pytest.mark.parametrize(("routing", "shape"), each_value(ROUTINGS, [(8,), (5, 8), (2, 3, 8), (0, 8), (1, 8)]), ids=str)
def test_route_passes_opcheck(routing, shape):
    logits = torch.randn(shape, requires_grad=True)
    check(ops.route, logits, None, routing)
    check(ops.route, logits.detach().bfloat16(), torch.zeros(8), routing)
    check(ops.route_fwd, logits.detach(), torch.zeros(8).half(), routing)
    weights, ids = ops.route(logits.detach(), None, routing)
    check(ops.route_bwd, weights, logits.detach(), ids, routing)
    check(ops.limit_capacity, ids, 8, 2)


IDS = torch.tensor([[0, 2], [1, -1], [2, 2], [-1, -1], [1, 0]], dtype=torch.int32)


@pytest.mark.parametrize(
    ("count", "weighted", "dtype"),
    pairwise((5, 1, 0), (False, True), (torch.float32, torch.bfloat16, torch.float16)),
)
def test_permutation_passes_opcheck(count, weighted, dtype):
    ids = IDS[:count]
    check(ops.expert_rows, ids, 3)
    check(ops.expert_rows, ids, 0)
    row_map, _ = ops.expert_rows(ids, 3)
    x, y = torch.randn(len(ids), 6, dtype=dtype), torch.randn(ids.numel(), 6, dtype=dtype)
    weights = torch.rand(ids.shape) if weighted else None
    check(ops.permute_fwd, x, row_map, weights, ids.numel())
    check(ops.unpermute_fwd, y, row_map, weights)
    check(ops.unpermute_dot, y, row_map, x)
    for t in (x, y, weights):
        if t is not None:
            t.requires_grad_()
    check(ops.permute, x, row_map, weights, ids.numel())
    check(ops.unpermute, y, row_map, weights)
    check(ops.permute, x.detach(), row_map, weights, ids.numel())
    check(ops.unpermute, y.detach(), row_map, weights)


def test_chunks_and_codes_pass_opcheck():
    check(ops.chunk_rows, torch.tensor([2, 0, 3]), torch.tensor([2, 0, 1], dtype=torch.int32), 4, 7)
    check(ops.chunk_rows, torch.tensor([2, 0, 3], dtype=torch.int32), None, 1, 5)
    row_map, _ = ops.expert_rows(IDS, 3)
    check(ops.permute, torch.arange(15, dtype=torch.uint8).reshape(5, 3), row_map, None, 10)


X, MAP = torch.randn(5, 6), ops.expert_rows(IDS, 3)[0]
LOGITS, BIAS = torch.randn(5, 8), torch.zeros(8)
SIZES = torch.tensor([2, 1])
# What is called with what, and the words that must be in its error.
CASES = {
    "topk above the experts": (
        ops.route,
        (LOGITS, None, "softmax:topk=9"),
        ["route: topk must be from 1 to", "8", "9"],
    ),
    "topk of 0": (ops.route, (LOGITS, None, "softmax:topk=0"), ["routing: topk in", "at least 1"]),
    "no topk": (ops.route, (LOGITS, None, "softmax"), ["routing: topk", "write topk=N"]),
    "an unknown function": (
        ops.route,
        (LOGITS, None, "relu:topk=2"),
        ["'relu:topk=2'", "softmax, sigmoid, sqrtsoftplus"],
    ),
    "an unknown option": (
        ops.route,
        (LOGITS, None, "softmax:topk=2:sorted"),
        ["'sorted'", "is no option", "after_topk"],
    ),
    "a number that is none": (ops.route, (LOGITS, None, "softmax:topk=two"), ["'topk=two'", "is no option"]),
    "a flag with a number": (ops.route, (LOGITS, None, "softmax:topk=2:renormalize=1"), ["'renormalize=1'"]),
    "an infinite factor": (ops.route, (LOGITS, None, "softmax:topk=2:scaling_factor=inf"), ["scaling_factor=inf"]),
    "a factor of NaN": (ops.route, (LOGITS, None, "softmax:topk=2:scaling_factor=nan"), ["scaling_factor=nan"]),
    "sigmoid after topk": (ops.route, (LOGITS, None, "sigmoid:topk=2:after_topk"), ["after_topk", "is for softmax"]),
    "renormalized twice": (
        ops.route,
        (LOGITS, None, "softmax:topk=2:after_topk:renormalize"),
        ["sum 1", "leave one of them out"],
    ),
    "half of the groups' options": (ops.route, (LOGITS, None, "softmax:topk=2:num_groups=4"), ["belong together"]),
    "groups that do not fit": (
        ops.route,
        (LOGITS, None, "softmax:topk=2:num_groups=3:group_topk=1"),
        ["num_groups must divide the number of experts, 8, got 3"],
    ),
    "more groups than there are": (
        ops.route,
        (LOGITS, None, "softmax:topk=2:num_groups=2:group_topk=4"),
        ["group_topk", "must not exceed num_groups"],
    ),
    "groups without a score": (
        ops.route,
        (LOGITS, None, "softmax:topk=1:num_groups=4:group_topk=2"),
        ["topk / group_topk = 0", "pass group_best=N"],
    ),
    "a best of more than the group": (
        ops.route,
        (LOGITS, None, "softmax:topk=2:num_groups=4:group_topk=2:group_best=3"),
        ["group_best must not exceed the experts of a group, 2, got 3"],
    ),
    "topk above the groups' experts": (
        ops.route,
        (LOGITS, None, "softmax:topk=5:num_groups=4:group_topk=2"),
        ["topk must not exceed the experts of group_topk groups, 2 * 2, got 5"],
    ),
    "integer logits": (ops.route, (LOGITS.int(), None, "softmax:topk=2"), ["route: logits must be float32", "got Int"]),
    "float64 logits": (ops.route, (LOGITS.double(), None, "softmax:topk=2"), ["route: logits", "Double", ".to()"]),
    "a scalar": (ops.route, (torch.tensor(1.0), None, "softmax:topk=1"), ["route: logits", "at least 1 dimension"]),
    "a bias of another size": (ops.route, (LOGITS, BIAS[:7], "softmax:topk=2"), ["expert_bias must be", "[8]", "[7]"]),
    "a bias on another device": (
        ops.route,
        (LOGITS, BIAS.to("meta"), "softmax:topk=2"),
        ["one device", "meta", "cpu", "Module.to_empty"],
    ),
    "ids of a gradient that were not routed": (
        ops.route_bwd,
        (torch.ones(5, 2), LOGITS, torch.full((5, 2), 8, dtype=torch.int32), "softmax:topk=2"),
        ["route_bwd: topk_ids", "from 0 to 7", "got 8 at place 0"],
    ),
    "gradients of another size": (
        ops.route_bwd,
        (torch.ones(5, 3), LOGITS, torch.zeros(5, 2, dtype=torch.int32), "softmax:topk=2"),
        ["route_bwd: dweights and topk_ids must be", "[5, 2]", "[5, 3]"],
    ),
    "a negative capacity": (
        ops.limit_capacity,
        (IDS, 3, -1),
        ["limit_capacity: capacity must not be negative, got -1", "pass a size of at least 0"],
    ),
    "ids beyond the experts": (
        ops.expert_rows,
        (IDS, 2),
        ["topk_ids", "from 0 to 1, or -1 for none; got 2 at place 1"],
    ),
    "ids below -1": (ops.expert_rows, (IDS - 1, 3), ["topk_ids", "got -2 at place 3"]),
    "ids without a number of experts": (ops.expert_rows, (IDS + 70000, 0), ["from 0 to 65535", "got 70000"]),
    "int64 ids": (ops.expert_rows, (IDS.long(), 3), ["topk_ids must be dense int32", "Long", ".to(torch.int32)"]),
    "ids of one dimension": (
        ops.expert_rows,
        (IDS[:, 0], 3),
        ["must be [tokens, topk], got [5]", ".reshape(-1, topk)"],
    ),
    "a negative number of experts": (ops.expert_rows, (IDS, -3), ["num_experts must be at least 1", "got -3"]),
    "too few rows": (
        ops.permute,
        (X, MAP, None, 6),
        ["row_map must hold rows from 0 to 5", "got 6", "token 2, slot 1", "there are 6 rows", "larger num_rows"],
    ),
    "negative rows": (ops.permute, (X, MAP, None, -6), ["permute: rows must not be negative, got -6"]),
    "a row of two tokens": (
        ops.permute,
        (X, MAP * 0, None, 6),
        ["must not name a row twice; got row 0 at places 0 and 1"],
    ),
    "a map of another length": (ops.permute, (X, MAP[:4], None, 6), ["the same tokens; got 5 and 4"]),
    "a map of int64": (ops.permute, (X, MAP.long(), None, 10), ["row_map must be dense int32", "Long"]),
    "a map of one dimension": (ops.permute, (X, MAP[:, 0], None, 10), ["row_map must be [tokens, slots]"]),
    "rows of three dimensions": (
        ops.permute,
        (X[None], MAP, None, 10),
        ["permute: x must be a matrix, got 3", ".reshape()"],
    ),
    "integer rows": (ops.permute, (X.int(), MAP, None, 10), ["permute: x must be float32", "got Int"]),
    "weighted codes": (
        ops.permute,
        (X.to(torch.uint8), MAP, torch.ones(5, 2), 10),
        ["x of uint8 has no weights", "dequantize x"],
    ),
    "weights of another dtype": (
        ops.permute,
        (X, MAP, torch.ones(5, 2).bfloat16(), 10),
        ["weights must be float32", "BFloat16", ".float()"],
    ),
    "weights of another size": (
        ops.unpermute,
        (X, MAP, torch.ones(5, 3)),
        ["unpermute: weights must", "[5, 2]", "[5, 3]"],
    ),
    "codes to be summed": (ops.unpermute, (X.to(torch.uint8), MAP, None), ["unpermute: y must be float32", "Byte"]),
    "rows that are missing": (
        ops.unpermute,
        (X, MAP, None),
        ["unpermute: row_map must hold rows from 0 to 4", "got 5 at token 2, slot 0"],
    ),
    "a map on another device": (
        ops.permute,
        (X, MAP.to("meta"), None, 10),
        ["one device", "meta", "cpu", "Module.to_empty"],
    ),
    "columns that differ": (ops.unpermute_dot, (torch.ones(10, 7), MAP, X), ["same columns; got 6 and 7"]),
    "chunks of more rows": (
        ops.chunk_rows,
        (SIZES, None, 1, 2),
        ["at most the number of rows, 2; got 1 after", "2 rows"],
    ),
    "a negative chunk": (ops.chunk_rows, (SIZES - 2, None, 1, 2), ["sizes must not be negative", "got -1"]),
    "an order that names one twice": (
        ops.chunk_rows,
        (SIZES, SIZES * 0, 1, 3),
        ["each of the numbers from 0 to 1 once"],
    ),
    "an order of another length": (ops.chunk_rows, (SIZES, SIZES[:1], 1, 3), ["one number per chunk, 2, got 1"]),
    "sizes that are no numbers": (ops.chunk_rows, (X, None, 1, 3), ["sizes must be a vector of int32 or int64"]),
    "an alignment of 0": (ops.chunk_rows, (SIZES, None, 0, 3), ["align must be positive", "got 0"]),
}


@pytest.mark.parametrize("name", CASES)
def test_bad_input_ends_in_words(name):
    op, arguments, words = CASES[name]
    with pytest.raises(RuntimeError) as refusal:
        op(*arguments)
    for word in words:
        assert word in str(refusal.value)


@pytest.mark.parametrize("name", ["route_fwd", "permute_fwd", "unpermute_fwd"])
def test_inner_operators_say_what_to_call_for_a_gradient(name):
    arguments = {
        "route_fwd": (LOGITS, None, "softmax:topk=2"),
        "permute_fwd": (X, MAP, None, 10),
        "unpermute_fwd": (torch.ones(10, 6), MAP, None),
    }[name]
    result = getattr(ops, name)(arguments[0].clone().requires_grad_(), *arguments[1:])
    result = result[0] if isinstance(result, tuple) else result
    with pytest.raises(RuntimeError, match="call quire::"):
        result.sum().backward()


def test_a_second_derivative_is_refused_in_words():
    logits = LOGITS.clone().requires_grad_()
    weights, _ = ops.route(logits, None, "softmax:topk=2")
    (first,) = torch.autograd.grad(weights.square().sum(), logits, create_graph=True)
    with pytest.raises(RuntimeError, match="route is once differentiable"):
        first.sum().backward()
