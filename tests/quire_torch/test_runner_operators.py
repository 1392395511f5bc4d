"""quire::nvfp4_linear and nvfp4_moe: values, schemas, tracing, graphs, errors."""

import pytest
import torch
from torch._dynamo.decorators import mark_unbacked
from torch._subclasses.fake_tensor import FakeTensorMode

import quire
from quire import runners
from steps import assert_rounded

ops = torch.ops.quire
E, H, N = 6, 64, 48
INNER = 32
ROUTING = "softmax:topk=2:renormalize"
UTILITIES = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


def rand(*sizes, seed=0):
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


def choices(tokens, top_k=2, seed=0):
    """topk_weights and topk_ids, some of which are -1."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(-1, E, (tokens, top_k), generator=generator, dtype=torch.int32)
    return torch.rand(tokens, top_k, generator=generator), ids


@pytest.fixture(scope="module")
def linear():
    with runners.register(runners.LinearRunner(rand(N, H, seed=1), rand(N, seed=2)), name="test.linear") as handle:
        yield handle


@pytest.fixture(scope="module")
def moe():
    runner = runners.MoERunner(rand(E, 2 * INNER, H, seed=3), rand(E, H, INNER, seed=4))
    with runners.register(runner, name="test.moe") as handle:
        yield handle


def linear_bits(x, w, bias=None, spec="nvfp4"):
    """What quire::linear gives, which has its own tests."""
    return ops.linear(x, w, bias, f"x={spec},w={spec},dy={spec}", torch.bfloat16)


def moe_bits(x, weights, ids, w13, w2):
    """A mixture as a loop over experts, of operators that have their own tests."""
    y = torch.zeros(*ids.shape, w2.shape[1])
    for e in range(len(w13)):
        token, choice = torch.nonzero(ids == e, as_tuple=True)
        act = ops.activation(linear_bits(x[token], w13[e]), "swiglu", torch.bfloat16)[0]
        y[token, choice] = linear_bits(act, w2[e]).float() * weights[token, choice, None]
    total = torch.zeros(len(x), w2.shape[1])
    for choice in range(ids.shape[1]):  # one after the other, from 0
        total += y[:, choice]
    return total.bfloat16()


# ---------------------------------------------------------------- values


@pytest.mark.parametrize("shape", [(5, H), (H,), (2, 3, H), (1, H), (0, H)], ids=str)
def test_a_linear_runner_gives_the_bits_of_linear(linear, shape):
    x = rand(*shape, seed=7)
    expected = linear_bits(x, rand(N, H, seed=1), rand(N, seed=2))
    assert torch.equal(ops.nvfp4_linear(x, linear.handle, N), expected)
    assert torch.equal(ops.nvfp4_linear(x, "test.linear", N), expected)


def test_strided_inputs_are_taken_as_they_are(linear):
    wide = rand(6, 2 * H, seed=8)
    for x in (wide[:, :H], wide[::2, H:], wide.view(2 * H, 6).t()[:, :H]):
        assert not x.is_contiguous()
        assert torch.equal(ops.nvfp4_linear(x, linear.handle, N), ops.nvfp4_linear(x.contiguous(), linear.handle, N))


@pytest.mark.parametrize("tokens", [0, 1, 2, 33])
def test_a_moe_runner_gives_the_bits_of_a_loop_over_experts(moe, tokens):
    x, (weights, ids) = rand(tokens, H, seed=9), choices(tokens, seed=tokens)
    expected = moe_bits(x, weights, ids, rand(E, 2 * INNER, H, seed=3), rand(E, H, INNER, seed=4))
    assert torch.equal(ops.nvfp4_moe(x, weights, ids, moe.handle, H), expected)
    assert torch.equal(ops.nvfp4_moe(x, weights, ids, "test.moe", H), expected)


@pytest.mark.parametrize("layout", ["strided", "transposed"])
def test_choices_may_have_any_strides(moe, layout):
    x, (weights, ids) = rand(8, H), choices(8)
    expected = ops.nvfp4_moe(x, weights, ids, moe.handle, H)
    if layout == "strided":
        weights, ids = (torch.stack([t, t], dim=2)[..., 0] for t in (weights, ids))
    else:
        weights, ids = (t.t().contiguous().t() for t in (weights, ids))
    assert torch.equal(ops.nvfp4_moe(x, weights, ids, moe.handle, H), expected)


def assert_weighted(y, moe, x, weights, ids, *, roundings):
    """y is the sum of what the experts give, times weights in float64 [tokens, 2]. roundings: of the weights."""
    of_one = [ops.nvfp4_moe(x, one.expand(len(x), 2), ids, moe.handle, H) for one in torch.eye(2)]
    each = [y_of_one.double() * weights[:, k, None] for k, y_of_one in enumerate(of_one)]
    assert_rounded(y, each[0] + each[1], each[0].abs() + each[1].abs(), roundings + 2)


@pytest.mark.parametrize("tokens", [0, 1, 33])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_are_routed_inside(moe, tokens, dtype):
    x, logits = rand(tokens, H, seed=9), rand(tokens, E, seed=10).to(dtype)
    weights, ids = logits.double().softmax(-1).topk(2)
    y = ops.nvfp4_moe_routed(x, logits, None, ROUTING, moe.handle, H)
    # exp of logit - max has two roundings and another one for each unit of the difference, which is below 8. Both
    # weights and their sum have such numbers.
    assert logits.numel() == 0 or float((logits.amax(-1) - logits.amin(-1)).max()) < 8
    assert_weighted(y, moe, x, weights / weights.sum(-1, keepdim=True), ids.int(), roundings=2 * (8 + 2) + 3)
    for runner in (moe.handle, "test.moe"):
        routed = ops.nvfp4_moe(x, *ops.route(logits, None, ROUTING), runner, H)
        assert torch.equal(ops.nvfp4_moe_routed(x, logits, None, ROUTING, runner, H), routed)


def test_a_bias_acts_on_the_choice_of_experts(moe):
    x, logits, bias = rand(9, H), torch.randn(9, E), torch.tensor([9.0, 0, 0, 0, 0, 9.0])
    y = quire.nvfp4_moe_routed(x, logits, "sigmoid:topk=2:renormalize", moe, H, expert_bias=bias)
    chosen = logits[:, [0, 5]].double().sigmoid()
    ids = torch.tensor([[0, 5]], dtype=torch.int32).expand(9, 2)
    # A sigmoid has four roundings, and so has the sum of two.
    assert_weighted(y, moe, x, chosen / chosen.sum(-1, keepdim=True), ids, roundings=2 * 4 + 3)


# ---------------------------------------------------------------- schemas and tracing


def test_schemas_are_those_of_the_design():
    def schema(overload):
        return str(overload._schema)

    end = ", bool batch_invariant=False) -> Tensor y"
    assert schema(ops.nvfp4_linear.default) == "quire::nvfp4_linear(Tensor x, SymInt runner, SymInt out_features" + end
    assert schema(ops.nvfp4_linear.by_name) == (
        "quire::nvfp4_linear.by_name(Tensor x, str runner, SymInt out_features" + end
    )
    moe = "(Tensor hidden_states, Tensor topk_weights, Tensor topk_ids, {} runner, SymInt hidden_size" + end
    assert schema(ops.nvfp4_moe.default) == "quire::nvfp4_moe" + moe.format("SymInt")
    assert schema(ops.nvfp4_moe.by_name) == "quire::nvfp4_moe.by_name" + moe.format("str")
    routed = (
        "(Tensor hidden_states, Tensor router_logits, Tensor? expert_bias, str routing, {} runner, SymInt hidden_size"
        + end
    )
    assert schema(ops.nvfp4_moe_routed.default) == "quire::nvfp4_moe_routed" + routed.format("SymInt")
    assert schema(ops.nvfp4_moe_routed.by_name) == "quire::nvfp4_moe_routed.by_name" + routed.format("str")


def check(op, *args):
    assert torch.library.opcheck(op, args, test_utils=UTILITIES) == dict.fromkeys(UTILITIES, "SUCCESS")


@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_every_operator_passes_opcheck(linear, moe, tokens):
    x, (weights, ids) = rand(tokens, H), choices(tokens)
    check(ops.nvfp4_linear.default, x, linear.handle, N)
    check(ops.nvfp4_linear.by_name, x, "test.linear", N)
    check(ops.nvfp4_moe.default, x, weights, ids, moe.handle, H)
    check(ops.nvfp4_moe.by_name, x, weights, ids, "test.moe", H)
    check(ops.nvfp4_moe_routed.default, x, torch.randn(tokens, E), None, ROUTING, moe.handle, H)
    check(ops.nvfp4_moe_routed.by_name, x, rand(tokens, E), torch.zeros(E), ROUTING, "test.moe", H)


def test_tracing_does_not_ask_for_the_runner():
    with FakeTensorMode() as mode:
        x = mode.from_tensor(rand(5, H))
        weights, ids = map(mode.from_tensor, choices(5))
        for runner in (10**9, "no such runner"):
            assert ops.nvfp4_linear(x, runner, 7).shape == (5, 7)
            assert ops.nvfp4_moe(x, weights, ids, runner, 9).shape == (5, 9)
            assert ops.nvfp4_moe_routed(x, x, None, ROUTING, runner, 9).shape == (5, 9)
    meta = ops.nvfp4_linear(torch.empty(2, 3, H, dtype=torch.bfloat16, device="meta"), "no such runner", 7)
    assert meta.shape == (2, 3, 7) and meta.dtype == torch.bfloat16


def test_they_have_no_gradient_and_say_so(linear):
    x = rand(3, H).requires_grad_()
    y = quire.nvfp4_linear(x, linear, N)
    words = r"has no gradient; detach its inputs, or call it within torch.no_grad\(\)"
    with pytest.raises(RuntimeError, match=f"quire::nvfp4_linear is for inference and {words}"):
        y.sum().backward()
    compiled = torch.compile(lambda x: quire.nvfp4_linear(x, linear, N), backend="aot_eager", fullgraph=True)
    with pytest.raises(RuntimeError, match=words):
        compiled(x)
    with torch.no_grad():
        assert torch.equal(compiled(x), y)
    with pytest.raises(RuntimeError, match="quire::nvfp4_linear.by_name is for inference"):
        quire.nvfp4_linear(x, "test.linear", N).sum().backward()


# ---------------------------------------------------------------- graphs


class Model(torch.nn.Module):
    """Two runners and what lies around them."""

    def __init__(self, linear, moe):
        super().__init__()
        self.linear, self.moe = linear, moe

    def forward(self, x, weights, ids):
        y = quire.nvfp4_moe(torch.nn.functional.silu(x), weights, ids, self.moe, H)
        return quire.nvfp4_linear(x + y, self.linear, N)


def nodes(graph):
    return [str(node.target) for node in graph.graph.nodes if "nvfp4" in str(node.target)]


@pytest.mark.parametrize("how", ["handle", "number", "name"])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@torch.no_grad()
def test_compiled_is_eager_in_one_graph_of_opaque_nodes(linear, moe, how, backend):
    def made(handle):
        return {"handle": handle, "number": handle.handle, "name": handle.name}[how]

    torch._dynamo.reset()
    model, seen = Model(made(linear), made(moe)), []

    def keep(graph, inputs):
        seen.append(nodes(graph))
        return torch._dynamo.lookup_backend(backend)(graph, inputs)

    compiled = torch.compile(model, fullgraph=True, backend=keep)
    x, (weights, ids) = rand(9, H), choices(9)
    # silu differs between Inductor and eager in last bits; given the same input the operators do not.
    if backend == "aot_eager":
        assert torch.equal(compiled(x, weights, ids), model(x, weights, ids))
    else:
        assert compiled(x, weights, ids).shape == (9, N)
    overload = "by_name" if how == "name" else "default"
    assert seen == [["quire.nvfp4_moe", "quire.nvfp4_linear"]] or seen == [
        [f"quire.nvfp4_moe.{overload}", f"quire.nvfp4_linear.{overload}"]
    ]


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@torch.no_grad()
def test_one_graph_serves_all_token_counts(linear, moe, backend):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()

    def model(x, weights, ids):
        y = quire.nvfp4_moe(x, weights, ids, moe, H)
        return quire.nvfp4_linear(quire.nvfp4_moe_routed(y, y[:, :E], ROUTING, moe, H), linear, N)

    compiled = torch.compile(model, fullgraph=True, backend=backend)
    for tokens in (5, 0, 1, 2, 40):
        arguments = rand(tokens, H, seed=tokens), *choices(tokens, seed=tokens)
        for argument in arguments:
            mark_unbacked(argument, 0)
        assert torch.equal(compiled(*arguments), model(*arguments)), tokens
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert not torch._dynamo.utils.counters["graph_break"]


@torch.no_grad()
def test_a_graph_finds_token_counts_that_disagree_when_it_runs(moe):
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, w, i: quire.nvfp4_moe(x, w, i, moe, H), fullgraph=True, backend="aot_eager")
    arguments = rand(5, H), *choices(5)
    for argument in arguments:
        mark_unbacked(argument, 0)
    compiled(*arguments)
    arguments = rand(4, H), *choices(5)
    for argument in arguments:
        mark_unbacked(argument, 0)
    with pytest.raises(RuntimeError, match="topk_weights must have a row per token; got 5 rows for 4 tokens"):
        compiled(*arguments)


@torch.no_grad()
def test_one_graph_serves_many_layers_if_handles_are_its_inputs(linear):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(lambda x, runner: quire.nvfp4_linear(x, runner, N), fullgraph=True, backend="aot_eager")
    x = rand(3, H)
    made = [runners.register(runners.LinearRunner(rand(N, H, seed=seed))) for seed in range(12)]
    for seed, handle in enumerate(made):
        assert torch.equal(compiled(x, handle.handle), linear_bits(x, rand(N, H, seed=seed)))
    # One of the first number, one of all: PyTorch's own rule for integers that change.
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2


@torch.no_grad()
def test_reduce_overhead_is_clean(linear, moe, recwarn):
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda x, w, i: quire.nvfp4_linear(quire.nvfp4_moe(x, w, i, moe, H), linear, N),
        fullgraph=True,
        mode="reduce-overhead",
    )
    arguments = rand(5, H), *choices(5)
    for _ in range(3):
        y = compiled(*arguments)
    assert torch.equal(y, ops.nvfp4_linear(ops.nvfp4_moe(*arguments, moe.handle, H), linear.handle, N))
    assert [str(w.message) for w in recwarn if "quire" in str(w.message) or "cudagraph" in str(w.message)] == []


# ---------------------------------------------------------------- errors


def refused(words, op, *args):
    with pytest.raises(RuntimeError, match=words):
        op(*args)


@pytest.mark.parametrize("meta", [False, True])
def test_arguments_that_cannot_be_right_are_refused_traced_or_not(linear, moe, meta):
    def on(t):
        return t.to("meta") if meta else t

    x, (weights, ids) = on(rand(5, H)), map(on, choices(5))
    refused(
        "nvfp4_linear: x must be dense bfloat16 .* got Strided Float with 2",
        ops.nvfp4_linear,
        x.float(),
        linear.handle,
        N,
    )
    refused("at least 1 dimension", ops.nvfp4_linear, x[0, 0], linear.handle, N)
    refused("must have at least 1 feature, got 0", ops.nvfp4_linear, x, linear.handle, 0)
    moe = moe.handle
    refused("hidden_states must be dense bfloat16", ops.nvfp4_moe, x.half(), weights, ids, moe, H)
    refused(r"must be \[tokens, hidden_size\], got 3", ops.nvfp4_moe, x[None], weights, ids, moe, H)
    refused(
        "topk_weights must be dense Float .* got Strided BFloat16", ops.nvfp4_moe, x, weights.bfloat16(), ids, moe, H
    )
    refused("topk_ids must be dense Int .* got Strided Long", ops.nvfp4_moe, x, weights, ids.long(), moe, H)
    refused("topk_ids must be dense Int with 2 dimensions, .* with 1", ops.nvfp4_moe, x, weights, ids[:, 0], moe, H)
    refused("topk_ids must have a row per token; got 4 rows for 5 tokens", ops.nvfp4_moe, x, weights, ids[:4], moe, H)
    refused("as many choices per token; got 2 and 1", ops.nvfp4_moe, x, weights, ids[:, :1], moe, H)
    routed = ops.nvfp4_moe_routed
    refused("router_logits must have a row per token; got 4 rows", routed, x, x[:4], None, ROUTING, moe, H)
    refused("router_logits must be dense .* with 2 dimensions, .* with 1", routed, x, x[:, 0], None, ROUTING, moe, H)
    refused("route: logits must be float32", routed, x, x.int(), None, ROUTING, moe, H)
    refused("route: expert_bias must be", routed, x, x, x[0, :3], ROUTING, moe, H)
    refused("topk", routed, x, x, None, "softmax", moe, H)


def test_arguments_that_do_not_fit_the_runner_are_refused(linear, moe):
    x, (weights, ids) = rand(5, H), choices(5)
    refused(
        f"runner {linear.handle} 'test.linear' takes 64 features and gives 48; got x with 32",
        ops.nvfp4_linear,
        x[:, :32],
        linear.handle,
        N,
    )
    refused("and a result of 49; registered: .*; pass what fits", ops.nvfp4_linear, x, linear.handle, N + 1)
    refused("'test.moe' is of kind moe, and this operator needs linear", ops.nvfp4_linear, x, moe.handle, H)
    refused(
        "'test.linear' is of kind linear, and this operator needs moe", ops.nvfp4_moe, x, weights, ids, linear.handle, N
    )
    bad = ids.clone()
    bad[3, 1] = E
    refused(
        r"topk_ids must be in \[0, 6\), or -1 for no expert; got 6 for token 3, choice 1",
        ops.nvfp4_moe,
        x,
        weights,
        bad,
        moe.handle,
        H,
    )
    bad[3, 1] = -2
    refused("got -2 for token 3", ops.nvfp4_moe, x, weights, bad, moe.handle, H)
    many = torch.zeros(5, E + 1, dtype=torch.int32)
    refused(
        "has 6 experts, of which a token chooses 1 to 6; got 7", ops.nvfp4_moe, x, many.float(), many, moe.handle, H
    )
    refused(
        f"runner {moe.handle} has 6 experts; got router_logits of 64; pass a logit for each",
        ops.nvfp4_moe_routed, x, x, None, ROUTING, moe.handle, H,
    )  # fmt: skip
    refused("topk", ops.nvfp4_moe_routed, x, x[:, :E], None, "softmax:topk=7", moe.handle, H)
    refused("'test.linear' is of kind linear", ops.nvfp4_moe_routed, x, x, None, ROUTING, linear.handle, N)


def test_a_handle_that_is_registered_no_more_or_never_was_is_refused():
    x = rand(5, H)
    handle = runners.register(runners.LinearRunner(rand(N, H)), name="gone")
    ops.nvfp4_linear(x, "gone", N)
    handle.close()
    refused(
        f"nvfp4_linear: no runner has the handle {handle.handle} any more, it was unregistered",
        ops.nvfp4_linear,
        x,
        handle.handle,
        N,
    )
    refused("nvfp4_linear: no runner has the name 'gone'; ", ops.nvfp4_linear, x, "gone", N)
    refused(f"no runner has the handle {handle.handle + 1}; ", ops.nvfp4_linear, x[:0], handle.handle + 1, N)


def test_a_name_that_was_looked_up_means_the_runner_that_has_it_now():
    x = rand(5, H)
    for seed in (1, 2):
        with runners.register(runners.LinearRunner(rand(N, H, seed=seed)), name="again"):
            assert torch.equal(ops.nvfp4_linear(x, "again", N), linear_bits(x, rand(N, H, seed=seed)))


def test_tensors_on_two_devices_are_refused(moe):
    weights, ids = choices(5)
    refused("must be on one device", ops.nvfp4_moe, rand(5, H), weights.to("meta"), ids, moe.handle, H)
