"""quire.MoE against a loop over tokens in float64, its parts one by one, and golden vectors."""

import copy
import itertools
import math

import pytest
import torch
from torch._dynamo.decorators import mark_unbacked
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

import quire
from every_recipe import IN_ANY_PRECISION, TABLE, params
from pairwise import pairwise
from python.moe.moe_reference import roundings_of_weights
from quire import moe
from quire import recipe as recipes
from steps import assert_rounded, step

pytestmark = pytest.mark.any_device


@pytest.fixture(params=params(IN_ANY_PRECISION))
def recipe_or_none(request):
    return request.param


def layer_of(dtype=torch.float32, **options):
    torch.manual_seed(2)
    options = {"renormalize": True} | options
    return quire.MoE(64, 96, 5, 2, params_dtype=dtype, **options)


def tokens(*shape, dtype=torch.float32):
    return torch.randn(*shape, 64, generator=torch.Generator().manual_seed(sum(shape) + 1)).to(dtype).requires_grad_()


def run(layer, x, recipe, function=None):
    for part in (layer.fc1, layer.fc2):
        part.sr_state[1] = 0
    results = step(layer, x.to(layer.router.weight.device), recipe, function=function)
    return [None if result is None else result.cpu() for result in results]


def routed(layer, x):
    """(weights, ids) of x [T, 64] in float64."""
    weights, ids = (x @ layer.router.weight.double().T).softmax(-1).topk(2)
    return weights / weights.sum(-1, keepdim=True), ids


def reference(layer, x, activation, weights, ids):
    """y of x [T, 64], every token by itself, in float64."""
    rows = []
    for row, w, chosen in zip(x, weights, ids, strict=True):
        total = 0
        for weight, e in zip(w, chosen.tolist(), strict=True):
            h = getattr(layer.fc1, f"weight{e}").double() @ row
            if layer.fc1.bias_names:
                h = h + getattr(layer.fc1, f"bias{e}").double()
            out = getattr(layer.fc2, f"weight{e}").double() @ activation(h)
            if layer.fc2.bias_names:
                out = out + getattr(layer.fc2, f"bias{e}").double()
            total = total + weight * out
        rows.append(total)
    return torch.stack(rows)


def swiglu(h):
    gate, up = h.chunk(2)
    return torch.nn.functional.silu(gate) * up


def magnitude_of_weights(layer, x, p, weights, ids):
    """The weights as a function of magnitudes of x and of the router: its gradient has the absolute value of each term
    of the gradient of the softmax p that is divided by the sum of two."""
    logits = x @ layer.router.weight.T
    moved = logits - logits.detach()  # 0, with a gradient
    chosen = moved.gather(1, ids)
    factor = 1 + chosen + (weights * chosen).sum(1, keepdim=True) + 2 * (p * moved).sum(1, keepdim=True)
    return weights * factor


def gradients_of(y, dy, x, layer):
    every = [x, *layer.parameters()]
    found = torch.autograd.grad(y, every, dy, allow_unused=True)
    return [y.detach(), *(torch.zeros_like(t) if g is None else g for t, g in zip(every, found, strict=True))]


@pytest.mark.cpu_only
@pytest.mark.parametrize("bias", [False, True])
def test_in_high_precision_it_is_a_loop_over_tokens(bias, device):
    """Of integers, so that ReLU has the same sign everywhere, and with a router that chooses the same experts."""
    layer, generator = layer_of(bias=bias, activation="relu"), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            most, unit = (31, 2**-7) if name == "router.weight" else (3, 1)
            parameter.copy_(torch.randint(-most, most + 1, parameter.shape, generator=generator) * unit)
    x = torch.randint(-3, 4, (23, 64), generator=generator).float()
    double, ours, signs = copy.deepcopy(layer).double(), run(layer.to(device), x, None), []

    def relu(h):
        signs.append(h.detach() > 0)
        return torch.relu(h)

    leaf, dy = x.double().requires_grad_(), torch.randn(23, 64, generator=torch.Generator().manual_seed(5)).double()
    weights, ids = routed(double, leaf)
    exact = gradients_of(reference(double, leaf, relu, weights, ids), dy, leaf, double)
    logits = (leaf @ double.router.weight.T).detach()
    with torch.no_grad():
        for parameter in double.parameters():
            parameter.abs_()
    kept, leaf = iter(signs), leaf.detach().abs().requires_grad_()
    of_weights = magnitude_of_weights(double, leaf, logits.softmax(-1), weights.detach(), ids)
    y = reference(double, leaf, lambda h: h * next(kept), of_weights, ids)
    magnitudes = gradients_of(y, dy.abs(), leaf, double)
    # As roundings_of_gradient counts those of weights, and sums: of a product's 64 or 96, over tokens, over experts.
    roundings = 5 * roundings_of_weights(logits) + 24 + 64 + 96 + 23 + 2
    names = ["y", "dx", *(name for name, _ in layer.named_parameters())]
    for name, *compared in zip(names, ours, exact, magnitudes, strict=True):
        try:
            assert_rounded(*compared, roundings)
        except AssertionError as error:
            raise AssertionError(name) from error


def test_it_is_its_parts(recipe_or_none, equal_bits, device):
    """Router, permutation, two grouped layers with an activation between, and the weighted sum."""
    layer, x = layer_of(torch.bfloat16).to(device), tokens(33, dtype=torch.bfloat16)
    twin = copy.deepcopy(layer)

    def parts(x):
        logits = torch.nn.functional.linear(x.float(), twin.router.weight.float())
        weights, ids = moe.route(logits, 2, renormalize=True)
        rows, offsets, row_map = moe.permute(x, ids, 5)
        splits = offsets.diff(prepend=offsets.new_zeros(1))
        h = twin.fc1(rows, splits)
        a, _ = quire.functional.activation(h, "swiglu", h.dtype)
        return moe.unpermute(twin.fc2(a, splits), row_map, weights)

    for _ in range(2):  # delayed scaling has scales from the second step on
        ours = run(layer, x, recipe_or_none)
    for _ in range(2):
        theirs = run(twin, x, recipe_or_none, parts)
    assert all(equal_bits(a, b) for a, b in zip(ours, theirs, strict=True))
    assert recipe_or_none is None or not torch.equal(ours[0], run(layer, x, None)[0])


def off_by_sums(layer, x, recipe):
    """How far the router's parts of dx and of its weight's gradient are apart, if their sums have another order, and if
    that of dx is rounded to bfloat16 before it is added, or not. Beside it, both results are rounded to bfloat16."""
    layer = copy.deepcopy(layer)
    with quire.autocast(enabled=recipe is not None, recipe=recipe):
        y, routing = layer(x, return_routing=True)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(5)).to(y)  # as step() has it
    (dlogits,) = torch.autograd.grad(y, routing.logits, dy)
    dlogits, x, weight = (t.detach().cpu().double() for t in (dlogits, x, layer.router.weight))
    unit = 2 * 2.0**-24
    of_dx = 5 * unit * dlogits.abs() @ weight.abs() + 2.0**-8 * (dlogits @ weight).abs()
    return of_dx, len(x) * unit * dlogits.abs().T @ x.abs()


@pytest.mark.parametrize(
    ("backend", "recipe"),
    [("aot_eager", "mxfp8"), *(("inductor", name) for name in ("high_precision", "nvfp4", "delayed"))],
)
def test_one_graph_for_all_counts_of_tokens_and_loads(compiler, recipe, backend, equal_bits):
    recipe_or_none = TABLE[recipe]
    layer = layer_of(torch.bfloat16)
    states = copy.deepcopy(layer)
    compiled = compiler(layer, backend)

    def call(x):
        mark_unbacked(x, 0)
        return compiled(x)

    runs = []
    off = []
    for function, of in ((call, layer), (None, states)):
        runs.append([])
        for count in (40, 0, 1, 7, 130):
            x = tokens(count, dtype=torch.bfloat16)
            if count == 130:
                x = x[:1].detach().repeat(130, 1)  # all tokens to two experts
            if function is None:
                off.append(off_by_sums(of, x, recipe_or_none))
            runs[-1] += run(of, x, recipe_or_none, function)
    pairs = list(zip(*runs, strict=True))
    router = next(i for i, (name, _) in enumerate(layer.named_parameters()) if name == "router.weight") + 2
    length = len(pairs) // 5
    for i, (ours, eager) in enumerate(pairs):
        if i % length in (1, router):  # the router's own product is PyTorch's, and Inductor may compile sums otherwise
            assert ours.dtype == eager.dtype == torch.bfloat16
            difference = (ours.double() - eager.double()).abs()
            assert (difference <= off[i // length][i % length == router] + 2 * 2.0**-8 * eager.double().abs()).all()
        else:
            assert equal_bits(ours, eager)
    assert compiler.graphs == 1


def test_memory_for_backward_is_what_the_format_promises():
    """Of x of the experts, codes; of weights, codes; h in high precision, for the activation's gradient."""
    layer, x = layer_of(torch.bfloat16), tokens(512, dtype=torch.bfloat16)
    sizes = {}
    for name in ("high_precision", "mxfp8", "nvfp4"):
        saved = {}

        def pack(t, saved=saved):
            saved[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t

        recipe = TABLE[name]
        with (
            torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t),
            quire.autocast(enabled=recipe is not None, recipe=recipe),
        ):
            y = layer(x)
        parameters = {parameter.untyped_storage().data_ptr() for parameter in layer.parameters()}
        sizes[name] = sum(size for address, size in saved.items() if address not in parameters)
        del y
    rows = 1024
    activations = rows * (64 + 96)  # x of fc1 and of fc2, elements
    weights = 5 * (192 * 64 + 64 * 96)
    fixed = sizes["high_precision"] - 2 * activations
    # 8 bits and a scale for 32; 4 bits and a scale for 16. Groups round up to whole blocks.
    for name, bits, slack in (("mxfp8", 8.25, 5 * 32 * 160), ("nvfp4", 4.5, 5 * 16 * 160)):
        promised = fixed + bits / 8 * (activations + weights)
        assert promised * 0.98 < sizes[name] < promised + slack


def test_weights_on_the_input_are_those_of_the_output_where_the_activation_is_linear_in_them():
    out, into = layer_of(), layer_of(weight_on_input=True, activation="relu")
    relu = layer_of(activation="relu")
    x = tokens(20)
    with torch.no_grad():
        for layer in (out, into, relu):
            layer.router.weight.zero_()  # weights are 1/2, by which a product is exact
    assert not torch.equal(out(x), into(x))
    assert torch.equal(relu(x), into(x))  # relu commutes with positive factors


def test_shared_experts_and_other_activations(recipe_or_none, equal_bits):
    with_shared = layer_of(torch.bfloat16, shared_ffn_hidden_size=32, activation="clamped_swiglu", bias=True)
    x = tokens(4, 3, dtype=torch.bfloat16)
    with quire.autocast(enabled=recipe_or_none is not None, recipe=recipe_or_none), torch.no_grad():
        y = with_shared(x)
        h = with_shared.shared_fc1(x)
        shared = with_shared.shared_fc2(quire.functional.activation(h, "clamped_swiglu", h.dtype)[0])
        with_shared.shared_fc1 = None
        assert equal_bits(y, with_shared(x) + shared)
    assert y.shape == x.shape


def test_the_bias_of_experts_moves_the_choice_only():
    layer, x = layer_of(expert_bias=True, score_function="sigmoid"), tokens(64)
    before = load = layer(x, return_routing=True)[1].tokens_per_expert
    for _ in range(200):
        moe.update_expert_bias_(layer.expert_bias, load, 0.002)
        routing = layer(x, return_routing=True)[1]
        load = routing.tokens_per_expert
    assert load.max() - load.min() < before.max() - before.min()
    chosen = routing.logits.detach().cpu().double().sigmoid().gather(1, routing.topk_ids.cpu().long())
    exact = chosen / chosen.sum(1, keepdim=True)
    assert_rounded(routing.topk_weights, exact, exact, 18)  # roundings_of_weights, of sigmoids


@pytest.mark.parametrize("compiled", [False, True])
def test_routing_that_is_changed_afterwards_counts(compiled, compiler):
    layer, x = layer_of(renormalize=False), tokens(9)
    forward = compiler(layer) if compiled else layer
    forward(x)
    layer.top_k, layer.routing["score_function"], layer.routing["renormalize"] = 3, "sigmoid", True
    expected = quire.MoE(64, 96, 5, 3, score_function="sigmoid", renormalize=True)
    expected.load_state_dict(layer.state_dict())
    assert torch.equal(forward(x), expected(x))
    layer.top_k = 99
    with pytest.raises(ValueError, match="top_k must be from 1 to num_experts = 5, got 99"):
        layer(x)
    layer.top_k, layer.routing["capacity"] = 2, 0
    with pytest.raises(ValueError, match="capacity, .* must be at least 1"):
        layer(x)


def test_the_balancing_loss_reaches_the_router():
    layer, x = layer_of(), tokens(64)
    _, routing = layer(x, return_routing=True)
    loss = moe.load_balancing_loss(moe.scores(routing.logits), routing.tokens_per_expert, topk=2, coeff=0.1)
    loss.backward()
    assert layer.router.weight.grad.any()
    assert all(parameter.grad is None for parameter in layer.fc1.parameters())


def test_capacity_drops_tokens(recipe_or_none):
    layer, x = layer_of(capacity=3), tokens(40)
    with quire.autocast(enabled=recipe_or_none is not None, recipe=recipe_or_none):
        y, routing = layer(x, return_routing=True)
    assert int(moe.tokens_per_expert(routing.topk_ids, 5).max()) == 3
    dropped = (routing.topk_ids == -1).all(1)
    assert dropped.any() and not y[dropped].any() and y[~dropped].any(1).all()


@pytest.mark.parametrize(
    ("capacity", "options", "compiled"),
    pairwise([None, 1, 2, 3, 100], [{}, {"weight_on_input": True}, {"expert_bias": True}], [False, True]),
)
def test_loads_are_those_that_the_router_chose_whatever_is_dropped(capacity, options, compiled, compiler):
    """With the loads after dropping, the loss would be least where most is dropped."""
    layer = quire.MoE(8, 16, 4, 1, capacity=capacity, score_function="sigmoid", params_dtype=torch.float32, **options)
    with torch.no_grad():
        layer.router.weight.copy_(torch.eye(4, 8))
    x = 2 * torch.eye(8)[[0, 0, 1, 0, 2, 0, 3, 0]]
    run = compiler(layer, "aot_eager") if compiled else layer
    routing = run(x, return_routing=True)[1]
    assert routing.tokens_per_expert.tolist() == [5, 1, 1, 1] and routing.tokens_per_expert.dtype == torch.int32
    kept = 8 if capacity is None else min(capacity, 5) + 3 * min(capacity, 1)
    assert int((routing.topk_ids >= 0).sum()) == int((routing.topk_weights > 0).sum()) == kept
    loss = moe.load_balancing_loss(moe.scores(routing.logits), routing.tokens_per_expert, topk=1)
    high, low = math.exp(2) / (3 + math.exp(2)), 1 / (3 + math.exp(2))
    probs = [5 * high + 3 * low] + 3 * [high + 7 * low]
    exact = 4 / 64 * sum(load * p for load, p in zip([5, 1, 1, 1], probs, strict=True))
    assert abs(float(loss.detach()) - exact) <= 16 * 2.0**-24 * exact and exact > 1.4
    loss.backward()
    assert layer.router.weight.grad[0].any()
    if layer.expert_bias is not None:
        moe.update_expert_bias_(layer.expert_bias, routing.tokens_per_expert, 0.5)
        assert layer.expert_bias.tolist() == [-0.5, 0.5, 0.5, 0.5]


def test_quantized_experts_and_kept_codes(equal_bits):
    recipe = recipes.NVFP4BlockScaling()
    plain = layer_of(torch.bfloat16)
    with quire.quantized_model_init(recipe=recipe):
        quantized = layer_of(torch.bfloat16)
    x = tokens(31, dtype=torch.bfloat16)
    with torch.no_grad(), quire.autocast(recipe=recipe):
        y = plain(x)
        assert equal_bits(quantized(x), y)
        quire.quantize_weights(plain, recipe)
        assert equal_bits(plain(x), y)
    assert type(quantized.router.weight) is torch.nn.Parameter


@pytest.mark.cpu_only
def test_golden_mixture(golden, tensor_of):
    """Golden group moe: the NVFP4, FP8 and MXFP8 forward passes of a routed layer, whose experts' tokens are known."""
    seen = 0
    for case in golden.cases("moe"):
        recipe = TABLE[case.spec["recipe"]]
        x, w13, w2 = (tensor_of(case, name) for name in ("x", "w13", "w2"))
        layer = quire.MoE(64, 32, 5, 2, params_dtype=torch.bfloat16, renormalize=True)
        with torch.no_grad(), quire.autocast(recipe=recipe):
            layer.router.weight.copy_(tensor_of(case, "w_router"))
            for e in range(5):
                getattr(layer.fc1, f"weight{e}").copy_(w13[e])
                getattr(layer.fc2, f"weight{e}").copy_(w2[e])
            y, routing = layer(x, return_routing=True)
        assert torch.equal(routing.topk_ids, torch.from_numpy(case["expert_index"].copy()))
        router = layer.router.weight.double()
        assert_rounded(routing.logits, x.double() @ router.T, x.double().abs() @ router.abs().T, 64)
        chosen = routing.logits.double().gather(1, routing.topk_ids.long())
        exact = chosen.softmax(1)
        assert_rounded(routing.topk_weights, exact, exact, roundings_of_weights(chosen))
        # The logits that gave the golden weights are off by as much again: both are moved by twice the largest error.
        off = 2 * 64 * 2.0**-24 * (x.double().abs() @ router.abs().T).max().item()
        wanted = torch.from_numpy(case["expert_weight"].copy()).double()
        torch.testing.assert_close(exact, wanted, rtol=off, atol=0)
        exact = torch.from_numpy(case["y"].copy())
        # Both round h to bfloat16, of sums in another order. Where one rounds to the neighbour, a code may be a step
        # away. This is rare, so that the largest part is what y and the experts' results are rounded by: 2^-8 each.
        assert float((y.double() - exact).norm() / exact.norm()) < 0.02
        seen += 1
    assert seen >= 3


def test_wrong_arguments_are_refused():
    with pytest.raises(ValueError, match="top_k must be from 1 to num_experts = 4, got 5"):
        quire.MoE(8, 8, 4, 5)
    for capacity in (0, -1):
        with pytest.raises(ValueError, match=f"capacity, .* must be at least 1, or None for no limit, got {capacity}"):
            quire.MoE(8, 8, 4, 2, capacity=capacity)
    with pytest.raises(TypeError, match="unexpected keyword argument 'colour'; options of routing are score_function"):
        quire.MoE(8, 8, 4, 2, colour=1)
    with pytest.raises(RuntimeError, match="quire.MoE: score_function must be one of .*, got 'no_such'"):
        quire.MoE(8, 8, 4, 2, score_function="no_such")
    with pytest.raises(TypeError, match="quire.MoE: scaling_factor must be a number, got 'no_such'"):
        quire.MoE(8, 8, 4, 2, scaling_factor="no_such")
    with pytest.raises(NotImplementedError, match="quire.MoE: activation='no_such' is not available"):
        quire.MoE(8, 8, 4, activation="no_such")
    with pytest.raises(ValueError, match="^quire.MoE: a layer's own recipe cannot be DelayedScaling"):
        quire.MoE(8, 8, 4, recipe="fp8_delayed")
    with pytest.raises(TypeError, match="^quire.MoE: init_method must be a function, got 3"):
        quire.MoE(8, 8, 4, init_method=3)
    layer = layer_of()
    with pytest.raises(RuntimeError, match=r"x must be \[..., hidden_size\] = \[..., 64\], got \[4, 32\]"):
        layer(torch.randn(4, 32))  # which could be read as two tokens
    with quire.autocast(recipe=recipes.MXFP8BlockScaling()), pytest.raises(TypeError, match="must have the dtype of x"):
        layer(tokens(4, dtype=torch.bfloat16))


@pytest.mark.parametrize("way, bias", [("tp_group", True), *itertools.product(("both groups", "style"), (False, True))])
def test_stacked_weights_do_not_go_with_a_tp_group_and_biases_or_an_ep_group(way, bias):
    over_ranks = way != "tp_group"
    torch.distributed.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "tp"))
        stacked = {"bias": bias, "single_grouped_weight": True}
        groups = {"ep_group": mesh.get_group("ep")} if over_ranks else {}
        got = " and ".join(["bias=True"] * bias + ["an ep_group"] * over_ranks)
        with pytest.raises(
            NotImplementedError,
            match=rf"^quire.MoE: with a tp_group, single_grouped_weight .*; got {got}; leave single",
        ):
            if way == "style":
                parallelize_module(quire.MoE(64, 64, 4, **stacked), mesh, quire.distributed.ExpertParallel())
            else:
                quire.MoE(64, 64, 4, tp_group=mesh.get_group("tp"), **groups, **stacked)
    finally:
        torch.distributed.destroy_process_group()


def test_a_recipe_is_not_assigned_to_the_mixture_but_to_its_layers(equal_bits):
    layer, x = quire.MoE(64, 64, 4, 2), torch.randn(6, 64)
    with pytest.raises(
        AttributeError, match="MoE has no recipe of its own, got 'nvfp4'; call quire.convert.* fc1 and fc2"
    ):
        layer.recipe = "nvfp4"
    assert not hasattr(layer, "recipe") and "recipe" not in vars(layer)
    with quire.autocast(recipe="mxfp8"):
        expected = layer(x)
    layer.fc1.recipe = layer.fc2.recipe = "mxfp8"
    assert equal_bits(layer(x), expected)


def test_it_prints_copies_and_saves(equal_bits):
    layer, x = layer_of(), tokens(9)
    assert "top_k=2, activation=swiglu, renormalize=True" in repr(layer)
    other = layer_of(single_grouped_weight=True)
    other.load_state_dict(layer.state_dict(), strict=True)
    assert equal_bits(other(x), layer(x)) and equal_bits(copy.deepcopy(layer)(x), layer(x))
    meta = quire.MoE(64, 96, 5, 2, device="meta")
    assert meta(torch.empty(3, 64, device="meta")).shape == (3, 64)


def test_hooks_run_on_the_modules_that_a_mixture_calls_and_not_on_its_experts(device):
    layer = layer_of(shared_ffn_hidden_size=32).to(device)
    ran = []
    for name, module in layer.named_modules():
        module.register_forward_hook(lambda *_, name=name: ran.append(name))
    layer(tokens(4).to(device))
    assert ran == ["router", "shared_fc1", "shared_fc2", ""]
