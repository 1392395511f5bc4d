"""torch.compile(fullgraph=True): the bits of eager mode in every mode of use, and a known number of graphs."""

import contextlib
import functools
import itertools

import pytest
import torch
from functorch.compile import make_boxed_func
from torch.utils import checkpoint as activation

import quire
from quire.recipe import DelayedScaling, NVFP4BlockScaling
from steps import assert_of_codes


def test_every_recipe_compiles_to_the_bits_of_eager_mode(make_layer, make_x, step, any_recipe, compiler):
    layer, x = make_layer(), make_x(40, 96)
    assert step(layer, x, any_recipe, compiler(layer)) == step(layer, x, any_recipe)
    assert compiler.graphs == 1


def test_autocast_may_be_inside_the_compiled_function(make_layer, make_x, step, recipe, compiler):
    layer, x = make_layer(), make_x(40, 96)

    def function(x):
        with quire.autocast(recipe=recipe):
            return layer(x)

    assert step(layer, x, None, compiler(function)) == step(layer, x, recipe)
    assert compiler.graphs == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_dtypes_compile_too(dtype, make_layer, make_x, step, recipe, compiler):
    layer, x = make_layer(dtype=dtype, bias=False), make_x(40, 96, dtype=dtype)
    assert step(layer, x, recipe, compiler(layer)) == step(layer, x, recipe)


@pytest.mark.parametrize("inside", [False, True], ids=["outside", "inside"])
def test_torch_autocast_compiles(inside, make_layer, make_x, step, recipe, compiler):
    layer, x = make_layer(dtype=torch.float32), make_x(40, 96, dtype=torch.float32)

    def function(x):
        with torch.autocast("cpu", dtype=torch.bfloat16) if inside else contextlib.nullcontext():
            return layer(x)

    with contextlib.nullcontext() if inside else torch.autocast("cpu", dtype=torch.bfloat16):
        eager = step(layer, x, recipe, function)
        assert step(layer, x, recipe, compiler(function)) == eager
    assert eager.y.dtype == torch.bfloat16 and eager.dw.dtype == torch.float32


@pytest.fixture
def stack():
    torch.manual_seed(4)
    layers = [quire.Linear(64, 128), torch.nn.GELU(), quire.Linear(128, 64), torch.nn.LayerNorm(64)]
    return torch.nn.Sequential(*layers, quire.Linear(64, 32, bias=False)).bfloat16()


def gradients(model, function, x, recipe):
    model.zero_grad()
    x = x.detach().requires_grad_()
    for module in model.modules():
        if isinstance(module, quire.Linear):
            module.sr_state[1] = 0
    with quire.autocast(recipe=recipe):
        y = function(x)
    y.float().square().sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in model.parameters())]


def test_inductor_gives_the_bits_of_eager_mode_where_only_our_operators_compute(make_layer, make_x, recipe, compiler):
    first, second, x = make_layer(), make_layer(64, 32), make_x(40, 96)
    model = torch.nn.Sequential(first, second)
    eager = gradients(model, model, x, recipe)
    compiled = gradients(model, compiler(model, backend="inductor"), x, recipe)
    assert all(torch.equal(a, b) for a, b in zip(eager, compiled, strict=True))
    assert compiler.graphs == 1


def test_inductor_compiles_a_model_with_other_operators_in_between(stack, make_x, compiler):
    x = make_x(40, 64)
    recipe = NVFP4BlockScaling()
    found = []

    def function(x):
        found[:] = itertools.accumulate(stack, lambda x, layer: layer(x), initial=x)
        return found[-1]

    gradients(stack, compiler(function, backend="inductor"), x, recipe)
    assert compiler.graphs == 1
    assert [state[1] for state in quire.rng_state(stack).values()] == [1, 1, 1]
    # Inductor's fused GELU and LayerNorm round elsewhere, which moves values across rounding boundaries: each layer is
    # right for the input that it had.
    for layer, given, y in zip(stack, found, found[1:], strict=False):
        if isinstance(layer, quire.Linear):
            assert_of_codes(y, layer, given, recipe)


def test_train_eval_and_train_again_switch_between_two_graphs(make_layer, make_x, step, recipe, compiler, equal_bits):
    layer, x = make_layer(), make_x(40, 96)
    compiled = compiler(layer)
    eager = step(layer, x, recipe)
    for _ in range(3):
        layer.train()
        assert step(layer, x, recipe, compiled) == eager
        layer.eval()
        with torch.no_grad(), quire.autocast(recipe=recipe):
            assert equal_bits(compiled(x), eager.y)
    assert compiler.graphs <= 3  # training and evaluation flag, grad mode


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_inference_compiles(mode, make_layer, make_x, recipe, compiler, equal_bits):
    layer, x = make_layer(), make_x(40, 96)
    with quire.autocast(recipe=recipe):
        expected = layer(x)
        with mode():
            assert equal_bits(compiler(layer)(x), expected)
    assert compiler.graphs == 1


class Nodes:
    """A backend that keeps the names of the operators in forward and backward graphs, and their inputs."""

    def __init__(self):
        self.forward, self.backward = [], []

    def keep(self, names):
        def compile(graph, inputs):
            names.append([str(node.target) for node in graph.graph.nodes if node.op == "call_function"])
            names[-1] += [node.op for node in graph.graph.nodes if node.op == "placeholder"]
            return make_boxed_func(graph)

        return compile

    def __call__(self, graph, inputs):
        from torch._dynamo.backends.common import aot_autograd

        backend = aot_autograd(fw_compiler=self.keep(self.forward), bw_compiler=self.keep(self.backward))
        return backend(graph, inputs)


def test_graphs_hold_the_operators_and_no_input_they_do_not_need(make_layer, make_x, step, recipe, compiler):
    layer, x = make_layer(), make_x(40, 96)
    nodes = Nodes()
    compiled = compiler(layer, backend=nodes)
    step(layer, x, recipe, compiled)
    state = recipe.stochastic
    assert nodes.forward[0].count("quire.linear_fwd.default") == 1
    assert nodes.backward[0].count("quire.linear_bwd.default") == 1
    assert nodes.forward[0].count("placeholder") == 3 + state
    mutations = [name for name in nodes.backward[0] if "auto_functionalized" in name]
    assert len(mutations) == state  # sr_advance_
    with torch.no_grad(), quire.autocast(recipe=recipe):
        compiled(x)
    assert nodes.forward[1].count("quire.linear.default") == 1 and nodes.forward[1].count("placeholder") == 3


@pytest.fixture
def block(make_layer):
    """A layer, and a function of it that is worth recomputing."""
    layer = make_layer()
    return layer, lambda x: torch.nn.functional.gelu(layer(x))


def test_checkpointing_compiles(block, make_x, step, recipe, compiler):
    (layer, compute), x = block, make_x(40, 96)

    def function(x):
        return activation.checkpoint(compute, x, use_reentrant=False)

    nodes = Nodes()
    expected = step(layer, x, recipe, compute)
    assert step(layer, x, recipe, function, enclose=True) == expected
    assert step(layer, x, recipe, compiler(function, backend=nodes)) == expected
    assert nodes.backward[0].count("quire.linear_fwd.default") == 1  # computed again


def keep_products(context, operator, *args, **kwargs):
    save = operator == torch.ops.quire.linear_fwd.default
    return activation.CheckpointPolicy.MUST_SAVE if save else activation.CheckpointPolicy.PREFER_RECOMPUTE


def test_selective_checkpointing_knows_the_inner_operator(block, make_x, step, recipe, compiler):
    (layer, compute), x = block, make_x(40, 96)
    policy = functools.partial(activation.create_selective_checkpoint_contexts, keep_products)

    def function(x):
        return activation.checkpoint(compute, x, use_reentrant=False, context_fn=policy)

    nodes = Nodes()
    expected = step(layer, x, recipe, compute)
    assert step(layer, x, recipe, function, enclose=True) == expected
    assert step(layer, x, recipe, compiler(function, backend=nodes)) == expected
    assert nodes.backward[0].count("quire.linear_fwd.default") == 0


def test_functional_call_compiles(make_layer, make_x, recipe, compiler, equal_bits):
    layer, x = make_layer(), make_x(40, 96, requires_grad=False)
    other = {name: p.detach() * 2 for name, p in layer.named_parameters()}

    def function(parameters, x):
        return torch.func.functional_call(layer, parameters, (x,))

    with quire.autocast(recipe=recipe):
        assert equal_bits(compiler(function)(other, x), function(other, x))


@pytest.mark.parametrize(
    "need", [(True, False, False), (False, True, False), (False, False, True), (False, True, True)]
)
def test_frozen_parameters_compile(need, make_layer, make_x, step, recipe, compiler):
    layer, x = make_layer(), make_x(40, 96)
    for tensor, needed in zip((x, layer.weight, layer.bias), need, strict=True):
        tensor.requires_grad_(needed)
    assert step(layer, x, recipe, compiler(layer)) == step(layer, x, recipe)


def test_a_retained_compiled_graph_may_be_walked_twice(make_layer, make_x, recipe, compiler):
    layer, x = make_layer(), make_x(40, 96)
    # aot_eager writes back the random state by copy_, which autograd takes for a change of a saved tensor.
    function = compiler(layer, backend="inductor" if recipe.stochastic else "aot_eager")
    sums = []
    for run in (layer, function):
        x.grad, layer.sr_state[1] = None, 0
        with torch._functorch.config.patch(donated_buffer=False), quire.autocast(recipe=recipe):
            loss = run(x).float().square().sum()
            loss.backward(retain_graph=True)
            first = x.grad.clone()
            loss.backward()
        assert layer.sr_state[1] == 2 * recipe.stochastic
        assert torch.equal(x.grad, 2 * first) != recipe.stochastic
        sums.append(x.grad)
    assert torch.equal(*sums)  # random bits of the second walk are other ones, and those of eager mode


@torch._functorch.config.patch(donated_buffer=False)
@pytest.mark.parametrize("recipe", [NVFP4BlockScaling(), DelayedScaling()], ids=["nvfp4", "delayed"])
def test_backends_that_write_state_back_do_not_count_that_as_a_change_of_saved_tensors(
    recipe, make_layer, make_x, compiler, equal_bits
):
    def run(function, layer):
        with quire.autocast(recipe=recipe):
            losses = [function(make_x(40, 96) * scale).float().square().sum() for scale in (1, 2)]
        for loss in (*losses, losses[0]):
            loss.backward(retain_graph=True)
        return layer.weight.grad, layer.sr_state.clone(), layer.delayed.bwd_amax.clone()

    eager, layer = make_layer(), make_layer()
    layer.sr_state.copy_(eager.sr_state)
    expected = run(eager, eager)
    assert all(map(equal_bits, run(compiler(layer), layer), expected))


def test_backwards_may_follow_several_forwards_of_one_layer(make_layer, make_x, compiler, equal_bits):
    layer, x, recipe = make_layer(), make_x(40, 96), NVFP4BlockScaling()

    def run(function):
        layer.sr_state[1] = 0
        with quire.autocast(recipe=recipe):
            losses = [function(x * scale).float().square().sum() for scale in (1, 2)]
        return [torch.autograd.grad(loss, (x, layer.weight)) for loss in losses]

    eager, compiled = run(layer), run(compiler(layer, backend="inductor"))
    assert layer.sr_state[1] == 2
    for a, b in zip(eager, compiled, strict=True):
        assert all(equal_bits(p, q) for p, q in zip(a, b, strict=True))


def test_a_compiled_second_derivative_is_refused(make_layer, make_x, recipe, compiler):
    layer, x = make_layer(), make_x(40, 96)
    with torch._functorch.config.patch(donated_buffer=False), quire.autocast(recipe=recipe):
        y = compiler(layer)(x)
        with pytest.raises(RuntimeError, match="double backward|create_graph=True"):
            (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
            dx.sum().backward()


def test_compiled_autograd_gives_the_same_bits(make_layer, make_x, step, recipe, compiler):
    layer, x = make_layer(), make_x(40, 96)
    expected = step(layer, x, recipe)
    with torch._dynamo.compiled_autograd._enable(lambda graph: compiler(graph)):
        assert step(layer, x, recipe) == expected


@pytest.mark.parametrize("recipe", [NVFP4BlockScaling(), DelayedScaling()], ids=["nvfp4", "delayed"])
def test_a_compiled_layer_may_have_a_backward_pass_of_compiled_autograd(recipe, make_layer, make_x, step, compiler):
    layer, x = make_layer(), make_x(40, 96)
    expected, counter = step(layer, x, recipe), layer.sr_state[1].clone()
    amax = layer.delayed.bwd_amax.clone()
    layer.sr_state[1] = 0
    layer.delayed.reset(None)
    context = torch._dynamo.compiled_autograd._enable(lambda graph: compiler(graph))
    with torch._dynamo.config.patch(compiled_autograd=True), context:
        assert step(layer, x, recipe, compiler(layer)) == expected
    assert layer.sr_state[1] == counter and torch.equal(layer.delayed.bwd_amax, amax)
