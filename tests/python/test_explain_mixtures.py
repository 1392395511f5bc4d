"""quire.explain and quire.debug.statistics of runners, and of routing and permutation."""

import re

import pytest
import torch

import quire
from python.runners.runner_inputs import INNER, E, H, N, choices, nothing_stays_registered, rand  # noqa: F401  a fixture of every test
from quire import runners

GATED = (rand(E, 2 * INNER, H, seed=3), rand(E, H, INNER, seed=4))
SHARED = {"shared_w13": rand(2 * 40, H, seed=5), "shared_w2": rand(H, 40, seed=6)}


def test_a_linear_runner_is_a_call_and_its_steps():
    x = rand(5, H)
    with runners.register(runners.LinearRunner(rand(N, H), w="mxfp8"), name="head") as runner, torch.no_grad():
        explanation = quire.explain(quire.nvfp4_linear, x, runner, N)
    call, quantization, product = explanation.steps
    assert (call.operation, call.kernels) == ("runner", ())
    assert call.problem == f"nvfp4_linear bfloat16 [5, {H}] by runner {runner.handle} 'head': x=nvfp4,w=mxfp8"
    assert (quantization.operation, quantization.name) == ("quantize", "x")
    assert (product.operation, product.name, product.kernel) == ("gemm", "fprop", product.kernel)
    x_operand, w_operand = product.operands
    assert (x_operand.role, x_operand.spec, x_operand.outer, x_operand.made) == ("x", "nvfp4", 5, True)
    assert (w_operand.role, w_operand.spec, w_operand.outer, w_operand.made) == ("w", "mxfp8:interleaved", N, False)
    refusals = {kernel.name: kernel.verdict for kernel in product.kernels}
    assert re.fullmatch("takes 4-bit codes, but b is mxfp8:interleaved|.* has no products of int8", refusals["int8"])
    assert product.kernel in ("bf16", "generic") and list(refusals.values()).count("runs") == 1


def test_a_runner_is_explained_where_gradients_are_on():
    x, logits, (weights, ids) = rand(7, H), torch.randn(7, E), choices()
    with (
        runners.register(runners.LinearRunner(rand(N, H))) as linear,
        runners.register(runners.MoERunner(*GATED)) as moe,
    ):
        for call in (
            (quire.nvfp4_linear, x, linear, N),
            (quire.nvfp4_moe, x, weights, ids, moe, H),
            (quire.nvfp4_moe_routed, x, logits, "softmax:topk=1", moe, H),
        ):
            explanation = quire.explain(*call)
            with torch.no_grad():
                assert str(explanation) == str(quire.explain(*call))
            assert [step.operation for step in explanation.steps].count("runner") == 1


def test_what_has_gradients_beside_a_runner_is_explained_with_them():
    layer, x = quire.Linear(H, H, params_dtype=torch.bfloat16), rand(5, H)
    with runners.register(runners.LinearRunner(rand(H, H))) as runner, quire.autocast(recipe="mxfp8"):
        model = {
            "before": lambda x: quire.nvfp4_linear(layer(x), runner, H),
            "cut off": lambda x: layer(x) + quire.nvfp4_linear(x.detach(), runner, H),
            "beside": lambda x: (layer(x), quire.nvfp4_linear(x, runner, H)),
        }
        names = {where: sorted(p.name for p in quire.explain(call, x).products) for where, call in model.items()}
        # dx alone: the layer is no argument of these functions.
        assert names == {
            "before": ["fprop", "fprop"],
            "cut off": ["dgrad", "fprop", "fprop"],
            "beside": ["dgrad", "fprop", "fprop"],
        }


def test_a_runner_hides_no_error_of_another_operator():
    layer, x = quire.Linear(H, H, params_dtype=torch.bfloat16), rand(5, H)

    def call(x):
        y = quire.nvfp4_linear(x, runner, H)
        return y, torch.autograd.grad(layer(x).sum(), x, create_graph=True)

    with runners.register(runners.LinearRunner(rand(H, H))) as runner, quire.autocast(recipe="mxfp8"):
        with pytest.raises(RuntimeError, match="is once differentiable"):
            quire.explain(call, x)


@pytest.mark.parametrize("threads", [1, 2])
def test_the_experts_of_a_runner_are_explained_in_order(threads):
    x, before = rand(3, H), torch.get_num_threads()
    weights, ids = torch.ones(3, 2), torch.tensor([[2, 0], [2, -1], [2, 0]], dtype=torch.int32)
    torch.set_num_threads(threads)
    try:
        with runners.register(runners.MoERunner(*GATED, **SHARED, w13_input_scale=0.5)) as runner, torch.no_grad():
            explanation = quire.explain(quire.nvfp4_moe, x, weights, ids, runner, H)
            expected = quire.nvfp4_moe(x, weights, ids, runner, H)
            with quire.debug.operands():
                assert torch.equal(quire.nvfp4_moe(x, weights, ids, runner, H), expected)
    finally:
        torch.set_num_threads(before)
    call, *steps = explanation.steps
    assert "[3, 48], 2 experts a token, by runner" in call.problem and call.problem.endswith(", shared expert")
    # Each problem is one of all experts, which the host computes one after the other.
    experts = [f"expert {e} {w}" for w in ("w13", "w2") for e in (0, 2)]
    assert [step.name for step in explanation.products] == [*experts, "shared expert w13", "shared expert w2"]
    stages = ["quantize", "gemm", "activation", "gemm"]
    assert [step.operation for step in steps] == [stage for stage in stages for _ in range(2)] + stages
    assert [step.operands[0].outer for step in explanation.products] == [2, 3, 2, 3, 3, 3]
    assert all(product.operands[0].made for product in explanation.products)
    scaled = ["under a given amax" in step.problem for step in explanation.quantizations]
    assert scaled == [True, True, False]
    assert "\nexpert 2 w13 gemm nvfp4 rowwise [3, 48] x nvfp4:interleaved rowwise [32, 48]" in str(explanation)


@pytest.mark.parametrize("threads", [1, 2])
def test_groups_that_threads_would_share_are_explained_in_order(threads):
    splits, before = [64, 0, 72, 80, 88, 96, 104, 112], torch.get_num_threads()
    layer = quire.GroupedLinear(len(splits), 256, 128)
    torch.set_num_threads(threads)
    try:
        with torch.no_grad(), quire.autocast(recipe="mxfp8"):
            explanation = quire.explain(layer, torch.randn(sum(splits), 256), torch.tensor(splits))
    finally:
        torch.set_num_threads(before)
    outer = [step.operands[0].outer for step in explanation.products]
    assert outer == [rows for rows in splits if rows > 0]
    assert [step.operation for step in explanation.steps] == ["quantize"] * 14 + ["gemm"] * 7


def test_who_chooses_inside_and_functions_are_calls_too():
    x, logits = rand(3, H), torch.randn(3, E)
    with (
        runners.register(runners.MoERunner(*GATED)) as runner,
        runners.register(runners.PythonRunner(lambda x: -x, H, H)) as function,
        torch.no_grad(),
    ):
        routed = quire.explain(quire.nvfp4_moe_routed, x, logits, "softmax:topk=1", runner, H)
        python = quire.explain(quire.nvfp4_linear, x, function, H)
    assert routed.steps[0].problem == "route softmax:topk=1 of float32 [3, 4]"
    assert "1 experts a token" in routed.steps[1].problem and len(routed.products) >= 2
    (step,) = python.steps
    assert "Python test_who_chooses_inside" in step.problem and step.problem.endswith("<lambda>")


def test_what_runners_quantize_is_counted():
    x = rand(5, H)
    x[0, 0] = 100
    with runners.register(runners.LinearRunner(rand(N, H), input_scale=1 / 2688)) as runner:
        with quire.debug.statistics() as counts:
            quire.nvfp4_linear(x, runner, N)
        outside = quire.nvfp4_linear(x, runner, N)
    (count,) = [row for row in counts if row.role == "x"]
    beyond = (x.abs() > 7 / 6).sum().item()
    assert count.elements == 5 * H and count.saturated >= beyond > 1
    assert outside.isfinite().all()


def test_the_experts_of_a_mixture_share_the_line_of_a_step():
    torch.manual_seed(0)
    mixture, x = quire.MoE(64, 64, 8, 2), torch.randn(64, 64)
    with quire.autocast(recipe="mxfp8"):
        found = quire.explain(mixture, x)
    first = [step for step in found.products if step.name == "fprop"][:8]
    tokens = [step.operands[0].outer for step in first]
    assert sum(tokens) == 128 and len(set(tokens)) > 1
    if len({step.kernel for step in first}) == 1:
        said = f"fprop   gemm mxfp8:nan rowwise [{min(tokens)} to {max(tokens)}, 64] x mxfp8:nan rowwise [128, 64]"
        assert f"\n  {said} to float32: kernel {first[0].kernel} x 8\n" in str(found)
        assert len(str(found).splitlines()) < 45
    router = [line for line in str(found).splitlines() if "aten.mm" in line]
    assert len(router) == 3 and not any(" to " in line for line in router)  # three different matmuls


@pytest.mark.parametrize("gradients", [False, True])
def test_routing_and_permutation_are_steps(gradients):
    torch.manual_seed(1)
    layer, x = quire.MoE(H, INNER, E, top_k=2, capacity=3), torch.randn(5, H)
    with torch.set_grad_enabled(gradients), quire.autocast(recipe=quire.recipe.NVFP4BlockScaling()):
        explanation = quire.explain(layer, x)
    steps = [(step.name, *step.problem.split(" ", 1)) for step in explanation.steps if step.operation == "moe"]
    forward = [step[1] for step in steps if not step[0]]
    assert forward[:5] == ["route", "limit_capacity", "expert_rows", "permute", "unpermute"]
    assert steps[0][2] == f"softmax:topk=2:scaling_factor=1.0 of float32 [5, {E}]"
    assert steps[3][2].startswith(f"of float32 [5, {H}], int32 [5, 2]")
    backward = [(name, operator) for name, operator, _ in steps[5:]]
    wanted = [("", "permute"), ("grad", "unpermute"), ("", "unpermute"), ("grad", "route")]
    assert backward == (wanted if gradients else [])
    # Products stand where they ran: after the rows were permuted.
    operations = [step.operation for step in explanation.steps]
    assert operations.index("gemm") > [step.problem[:7] for step in explanation.steps].index("permute")
