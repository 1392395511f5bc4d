"""The operator framework (src/quire_torch/op), tested with the operators of toy_ops.cpp."""

import gc
import warnings
import weakref

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch._dynamo import compiled_autograd, mark_dynamic
from torch._dynamo.decorators import mark_unbacked
from torch._dynamo.testing import CompileCounterWithBackend
from torch.library import opcheck
from torch.utils.checkpoint import checkpoint

from steps import same

OPCHECKS = ["test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]


@pytest.fixture(autouse=True)
def no_compiled_code():
    torch._dynamo.reset()


def rand(*sizes, seed=0, grad=False, dtype=None):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*sizes, generator=generator, dtype=dtype).requires_grad_(grad)


def counter():
    return torch.zeros(1, dtype=torch.int64)


def linear_arguments(tokens=3, grad=True):
    return rand(tokens, 4, grad=grad), rand(5, 4, seed=1, grad=grad), rand(5, seed=2, grad=grad)


def plain_linear(x, w, bias):
    return 2 * (x @ w.t()) + bias


def run(f, *inputs):
    """The result of f and its gradients, by fresh leaves."""
    leaves = [t.detach().clone().requires_grad_() for t in inputs]
    y = f(*leaves)
    y.square().sum().backward()
    return [y.detach(), *(t.grad for t in leaves)]


def kinds_arguments():
    x = torch.ones(3, 4)
    return ([x], x, None, [None, x], torch.zeros(2), 5, 2, [3, 1], 0.5, True, "ab", torch.float64, "times:2", "group")


# ---------------------------------------------------------------- declaration


def test_schemas_are_derived_from_the_structs(toy):
    assert str(toy.kinds.default._schema) == (
        "toy::kinds(Tensor[] list, Tensor x, Tensor? maybe, Tensor?[] maybes, Tensor(a!) count, int i, SymInt n, "
        'SymInt[] shape, float f, bool b, str s, ScalarType dtype, str scale="times:2", str group="", '
        "Tensor(b!)? other=None) -> (Tensor out, Tensor none)"
    )
    assert str(toy.advance_.default._schema) == "toy::advance_(Tensor(a!) counter) -> ()"
    assert str(toy.canonical.default._schema) == "toy::canonical(str scale) -> str"
    assert str(toy.linear.default._schema).endswith(" -> Tensor y")


def test_operators_are_tagged_for_compilation_without_copies(toy):
    for op in (toy.kinds, toy.advance_, toy.linear, toy.canonical):
        assert {torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides} <= set(op.default.tags)


@pytest.mark.parametrize("name", ["kinds", "kinds_called", "kinds_overload_called"])
def test_every_field_kind_arrives_and_written_tensors_change(toy, name):
    arguments = kinds_arguments()
    other = torch.zeros(1)
    out, none = getattr(toy, name)(*arguments, other=other)
    tensors = 3 * 12  # x, list and maybes hold the same ones
    numbers = 5 + 0.5 + True + len("ab") + len("group")
    assert torch.equal(out, torch.full((2, 3, 1), 2 * (tensors + numbers), dtype=torch.float64))
    assert none.shape == (0,) and none.dtype == torch.uint8
    assert torch.equal(arguments[4], torch.ones(2)) and other.item() == 2


def test_symbolic_sizes_cross_as_arguments(toy):
    def f(x):
        arguments = kinds_arguments()
        return toy.kinds([x], x, *arguments[2:6], x.shape[0] * 2, [x.shape[0], 3], *arguments[8:])[0]

    backend = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(f, fullgraph=True, dynamic=True, backend=backend)
    assert [compiled(torch.ones(m, 4)).shape for m in (3, 5, 9)] == [(2 * m, m, 3) for m in (3, 5, 9)]
    assert backend.frame_count == 1


def test_text_values_are_parsed_and_refused_in_the_words_of_their_parser(toy):
    assert toy.canonical("times:2.50") == "times:2.5"
    x, w, _ = linear_arguments()
    for f in (toy.linear, torch.compile(toy.linear, backend="aot_eager", fullgraph=True)):
        with pytest.raises(RuntimeError, match="scale: expected times:F, got 'plus:1'"):
            f(x, w, None, "plus:1")
    with pytest.raises(RuntimeError, match="scale: expected times:F"):
        toy.linear_fwd(x.to("meta"), w.to("meta"), None, "plus:1")


def test_a_function_of_plain_values_is_a_constant_of_the_graph(toy):
    canonical = torch.compiler.assume_constant_result(lambda text: toy.canonical(text))
    f = torch.compile(lambda x: x + len(canonical("times:2.50")), fullgraph=True, backend="eager")
    assert f(torch.zeros(1)) == len("times:2.5")


# ---------------------------------------------------------------- tracing


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("utility", OPCHECKS)
def test_opcheck_of_outer_operators(toy, utility, grad):
    x, w, bias = linear_arguments(grad=grad)
    opcheck(toy.linear.default, (x, w, bias, "times:2", counter()), test_utils=utility)
    opcheck(toy.linear.default, (x.detach().t().contiguous().t().requires_grad_(grad), w), test_utils=utility)
    opcheck(toy.linear.default, (rand(0, 4, grad=grad), w, bias), test_utils=utility)
    opcheck(toy.exp.default, (x, [torch.ones(4)]), test_utils=utility)


@pytest.mark.parametrize("utility", OPCHECKS)
def test_opcheck_of_inner_operators_and_mutations(toy, utility):
    x, w, bias = linear_arguments(grad=False)
    opcheck(toy.kinds.default, kinds_arguments(), test_utils=utility)
    opcheck(toy.advance_.default, (counter(),), test_utils=utility)
    opcheck(toy.linear_fwd.default, (x, w, bias, "times:2", 1), test_utils=utility)
    opcheck(toy.linear_bwd.default, (rand(3, 5), rand(4, 16), w, 4, "times:2", 7), test_utils=utility)


@pytest.mark.parametrize("tokens", [0, 1, 16, 33])
@pytest.mark.parametrize("save", [0, 1])
def test_traced_results_are_like_the_real_ones(toy, tokens, save):
    arguments = linear_arguments(tokens, grad=False)
    real = toy.linear_fwd(*arguments, "times:2", save)
    meta = toy.linear_fwd(*(t.to("meta") for t in arguments), "times:2", save)
    for r, m in zip(real, meta, strict=True):
        assert (r.shape, r.dtype, r.stride()) == (m.shape, m.dtype, m.stride()) and m.is_meta


def test_tensors_that_are_on_the_meta_device_in_part_are_refused_even_in_a_list(toy):
    """The dispatcher would take them to the kernel that allocates and computes nothing."""
    lists = [torch.ones(1, device="meta")]
    with pytest.raises(RuntimeError, match="kinds: tensors must be on one device; got meta and cpu; give the"):
        toy.kinds(lists, *kinds_arguments()[1:])


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_equals_eager_and_the_plain_formula(toy, backend):
    def f(x, w, bias):
        return torch.relu(toy.linear(x, w, bias, "times:2"))

    arguments = linear_arguments()
    eager = run(f, *arguments)
    assert same(eager, run(torch.compile(f, fullgraph=True, backend=backend), *arguments))
    for a, b in zip(eager, run(lambda *t: torch.relu(plain_linear(*t)), *arguments), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("mark,sizes", [(mark_dynamic, [7, 33, 16]), (mark_unbacked, [7, 0, 1, 33, 100])])
def test_one_graph_for_all_batches(toy, mark, sizes):
    def f(x, w, bias):
        return toy.linear(x, w, bias, "times:2")

    backend = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(f, fullgraph=True, backend=backend)
    for size in sizes:
        arguments = linear_arguments(size)
        mark(arguments[0], 0)
        y = compiled(*arguments)
        y.square().sum().backward()
        assert same([y, *(t.grad for t in arguments)], run(f, *linear_arguments(size)))
    assert backend.frame_count == 1


def test_a_padded_result_of_unknown_size_needs_one_graph(toy):
    def f(x, w):
        packed = toy.linear_fwd(x, w, None, "times:2", 1)[1]  # [K, 16 * ceil(M / 16)]
        return packed.t().contiguous().view(-1) + 1

    backend = CompileCounterWithBackend("inductor")
    compiled = torch.compile(f, fullgraph=True, backend=backend)
    for m in (7, 0, 1, 33, 100):
        x, w, _ = linear_arguments(m, grad=False)
        mark_unbacked(x, 0)
        y = compiled(x, w)
        assert y.numel() == 4 * 16 * -(-m // 16) and torch.equal(y, f(x, w))
    assert backend.frame_count == 1


@pytest.mark.parametrize("strict", [False, True])
def test_export_keeps_the_outer_operator(toy, strict):
    class Module(torch.nn.Module):
        def forward(self, x, w):
            return toy.linear(x, w)

    x, w, _ = linear_arguments(grad=False)
    dynamic = {"x": {0: torch.export.Dim.DYNAMIC}, "w": None}
    program = torch.export.export(Module(), (x, w), dynamic_shapes=dynamic, strict=strict)
    for p in (program, program.run_decompositions()):
        assert [n.target for n in p.graph.nodes if n.op == "call_function"] == [toy.linear.default]
        assert p.module()(rand(7, 4), w).shape == (7, 5)


# ---------------------------------------------------------------- gradients


def test_gradients_pass_gradcheck_and_skip_what_is_not_needed(toy):
    arguments = [t.detach().double().requires_grad_() for t in linear_arguments()]
    assert torch.autograd.gradcheck(lambda *t: toy.linear(*t, "times:2"), arguments)
    x, w, bias = linear_arguments()
    toy.linear(x, w.detach(), bias).sum().backward()
    assert x.grad is not None and w.grad is None and bias.grad is not None
    assert torch.autograd.grad(toy.linear(x, w, bias).sum(), [w])[0].shape == w.shape
    assert toy.linear(x, w).grad_fn.name() == "toy::linear_backward"


@pytest.mark.parametrize("backend", [None, "aot_eager"])
@pytest.mark.parametrize("used", [(0,), (2,), (0, 2)])
def test_results_without_gradient_arrive_undefined(toy, used, backend):
    def f(x):
        results = toy.exp(x, [torch.full((4,), 3.0)])
        return sum(results[i] for i in used)

    def plain(x):
        return sum(3 * (x.exp(), None, 2 * x)[i] for i in used)

    compiled = torch.compile(f, fullgraph=True, backend=backend) if backend else f
    # 3 e^x and its derivative alike: the weights multiply the gradient too.
    for a, b in zip(run(compiled, rand(3, 4)), run(plain, rand(3, 4)), strict=True):
        torch.testing.assert_close(a, b)
    assert not toy.exp(rand(3, 4, grad=True), [])[1].requires_grad


def test_a_saved_result_does_not_keep_its_graph_alive(toy):
    x = rand(3, 4, grad=True)
    alive = weakref.ref(x)
    y = toy.exp(x, [])
    del x, y
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("backend", [None, "inductor"])
@torch._functorch.config.patch(donated_buffer=False)  # else a compiled graph cannot be kept, whatever its operators
def test_retain_graph_allows_a_second_backward_and_only_then(toy, backend):
    f = torch.compile(toy.linear, fullgraph=True, backend=backend) if backend else toy.linear
    x, w, bias = linear_arguments()
    loss = f(x, w, bias, "times:2", counter()).sum()  # saves nothing itself
    loss.backward(retain_graph=True)
    first = x.grad.clone()
    loss.backward()
    assert torch.equal(x.grad, 2 * first)
    with pytest.raises(RuntimeError, match="Trying to backward through the graph a second time"):
        loss.backward()


def test_second_derivatives_are_refused_in_words(toy):
    x, w, bias = linear_arguments()
    (dx,) = torch.autograd.grad(toy.linear(x, w, bias).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="toy::linear_backward has no gradient: toy::linear is once differentiable"):
        torch.autograd.grad(dx.sum(), w, allow_unused=True)


def test_inner_operators_work_under_grad_mode_but_refuse_their_derivative(toy):
    x, w, _ = linear_arguments()
    y, _ = toy.linear_fwd(x, w, None, "times:2")
    assert torch.equal(y, toy.linear(x, w, None, "times:2"))
    with pytest.raises(RuntimeError, match="toy::linear_fwd is an inner operator without a gradient; call toy::linear"):
        torch.autograd.grad(y.sum(), w, allow_unused=True)
    in_list = toy.exp_fwd(torch.ones(4), [w[0]])[0]
    with pytest.raises(RuntimeError, match="toy::exp_fwd is an inner operator"):
        torch.autograd.grad(in_list.sum(), w, allow_unused=True)


def test_tensors_in_lists_of_outer_operators_are_refused_a_gradient(toy):
    with pytest.raises(RuntimeError, match="toy::exp: tensors of the list weights have no gradient; pass them det"):
        toy.exp(torch.ones(4), [torch.ones(4, requires_grad=True)])


@pytest.mark.parametrize("grad_mode", [False, True])
@pytest.mark.parametrize("name", ["linear", "linear_fwd", "exp_fwd"])
def test_forward_mode_raises_instead_of_a_zero_tangent(toy, name, grad_mode):
    w = rand(5, 4)
    calls = {
        "linear": lambda x: toy.linear(x, w),
        "linear_fwd": lambda x: toy.linear_fwd(x, w, None, "times:1"),
        "exp_fwd": lambda x: toy.exp_fwd(torch.ones(3, 4), [x]),
    }
    with forward_ad.dual_level(), torch.set_grad_enabled(grad_mode):
        dual = forward_ad.make_dual(rand(3, 4), rand(3, 4))
        with pytest.raises(RuntimeError, match=f"toy::{name} has no forward-mode derivative; use reverse mode"):
            calls[name](dual)
    with pytest.raises(RuntimeError, match=f"toy::{name} has no forward-mode derivative"):
        torch.func.jvp(calls[name], (rand(3, 4),), (rand(3, 4),))


def test_functional_transforms_see_the_gradient(toy):
    x, w, bias = linear_arguments(grad=False)

    def ours(x):
        return toy.linear(x, w, bias, "times:2")

    def plain(x):
        return plain_linear(x, w, bias)

    def grad(linear):
        return torch.func.grad(lambda x: linear(x).square().sum())

    torch.testing.assert_close(grad(ours)(x), grad(plain)(x))
    batch = rand(2, 3, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "there is a performance drop": vmap calls the operator once per sample
        torch.testing.assert_close(torch.vmap(ours)(batch), plain(batch))
        torch.testing.assert_close(torch.vmap(grad(ours))(batch)[1], grad(plain)(batch[1]))


def test_compiled_autograd_specialises_on_scalars_and_not_on_batches(toy):
    def backward(tokens, scale, frozen, state):
        x, w, bias = linear_arguments(tokens)
        loss = toy.linear(x.detach() if frozen else x, w, bias, scale, state).square().sum()
        loss.backward()
        return [t.grad for t in ((w, bias) if frozen else (x, w, bias))]

    compiler = CompileCounterWithBackend("aot_eager")
    cases = [*((m, "times:2", False) for m in (3, 5, 9)), (9, "times:3", False), (9, "times:3", True)]
    for case in cases:
        with compiled_autograd._enable(torch.compile(backend=compiler, fullgraph=True)):
            compiled = backward(*case, state := counter())
        assert state.item() == 1
        assert same(compiled, backward(*case, counter()))
    assert compiler.frame_count == 4  # the first batch, any batch, the other scale, the frozen x


@pytest.mark.parametrize("backend", [None, "inductor"])
def test_errors_of_kernels_keep_their_text(toy, backend):
    f = torch.compile(toy.linear, backend=backend, fullgraph=True) if backend else toy.linear
    x, w, bias = linear_arguments()
    with pytest.raises(RuntimeError, match="linear: x and w must agree on K"):
        f(x, rand(5, 3))
    y = f(x, w, bias, "times:0")
    with pytest.raises(RuntimeError, match="linear_bwd: scale 0 cannot be undone"):
        y.sum().backward()


# ---------------------------------------------------------------- state


@pytest.mark.parametrize("backend", [None, "aot_eager", "inductor"])
def test_backward_changes_state_once_per_backward(toy, backend):
    state = counter()

    def f(x, w, bias):
        return toy.linear(x, w, bias, "times:2", state)

    expected = run(lambda *t: toy.linear(*t, "times:2"), *linear_arguments())
    compiled = torch.compile(f, fullgraph=True, backend=backend) if backend else f
    for _ in range(2):
        assert same(expected, run(compiled, *linear_arguments()))
    assert state.item() == 2


@pytest.mark.parametrize("backend", [None, "inductor"])
def test_two_forwards_may_precede_two_backwards(toy, backend):
    # Not with backend "aot_eager": it writes state by copy_, which bumps the version that AOTAutograd checks.
    state = counter()
    f = torch.compile(toy.linear, fullgraph=True, backend=backend) if backend else toy.linear
    x, w, bias = linear_arguments()
    first, second = f(x, w, bias, "times:2", state), f(x, w, bias, "times:2", state)
    first.sum().backward()
    assert state._version == 0
    if backend is None:
        state.add_(0)  # even a change that bumps the version is allowed
    second.sum().backward()
    assert state.item() == 2
    assert torch.equal(x.grad, 2 * torch.autograd.grad(toy.linear(x, w, bias, "times:2").sum(), x)[0])


@pytest.mark.parametrize("backend", [None, "aot_eager", "inductor"])
def test_checkpointing_recomputes_without_changing_state_twice(toy, backend):
    state = counter()

    def layer(x, w, bias):
        return toy.linear(x, w, bias, "times:2", state)

    def f(*arguments):
        return checkpoint(layer, *arguments, use_reentrant=False)

    expected = run(layer, *linear_arguments())
    state.zero_()
    compiled = torch.compile(f, fullgraph=True, backend=backend) if backend else f
    assert same(expected, run(compiled, *linear_arguments()))
    assert state.item() == 1
