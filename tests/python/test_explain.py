"""quire.explain: says what ran, in which format and direction, by which kernel, and changes nothing."""

import contextlib
import re
import threading

import pytest
import torch

import forks
import pytorch
import quire
from quire.nn.own_context import in_eager_mode
from quire.recipe import Float8CurrentScaling, NVFP4BlockScaling

pytestmark = pytest.mark.any_device

# numerics.md 6.1: product -> the operands' roles, directions and [outer, contraction] for M, N, K.
PRODUCTS = {
    "fprop": [("x", "rowwise", "MK"), ("w", "rowwise", "NK")],
    "dgrad": [("dy", "rowwise", "MN"), ("w", "columnwise", "KN")],
    "wgrad": [("dy", "columnwise", "NM"), ("x", "columnwise", "KM")],
}


def kernel_that_ran(step):
    """The name of the one row that runs. On the CPU every operation has a row that is faster than the reference."""
    (name,) = [kernel.name for kernel in step.kernels if kernel.verdict == "runs"]
    later = [kernel.verdict for kernel in step.kernels if kernel.verdict.startswith("not asked")]
    assert set(later) <= {f"not asked, {name} comes first"}
    assert name != "reference" or torch.get_default_device().type != "cpu"
    return name


def test_the_three_products_are_those_of_the_contract(make_layer, make_x, any_recipe):
    with quire.autocast(recipe=any_recipe):
        explanation = quire.explain(make_layer(96, 64), make_x(2, 16, 96))
    specs = dict(part.split("=", 1) for part in any_recipe.linear_spec().split(","))
    sizes = {"M": 32, "N": 64, "K": 96}
    found = {
        step.name: [(o.role, o.spec, o.direction, o.outer, o.contraction, o.made) for o in step.operands]
        for step in explanation.products
    }
    assert found == {
        name: [(role, specs[role], way, sizes[a], sizes[b], True) for role, way, (a, b) in operands]
        for name, operands in PRODUCTS.items()
    }
    assert explanation.recipe == any_recipe.linear_spec()
    assert [step.name for step in explanation.quantizations] == ["x", "w", "dy"]
    assert [step.name for step in explanation.steps][-1] == "dbias"
    for step in explanation.steps:
        assert step.kernel == kernel_that_ran(step)


def test_the_report_names_operands_and_kernels(make_layer, make_x):
    with quire.autocast(recipe=NVFP4BlockScaling()):
        report = str(quire.explain(make_layer(96, 64), make_x(16, 96)))
    assert (
        "dgrad   gemm nvfp4:rht:sr:nan rowwise [16, 64] x nvfp4:16x16:nan columnwise [96, 64] to bfloat16\n" in report
    )
    assert "  w   nvfp4:16x16:nan columnwise [96, 64]\n" in report
    quick = re.search(r"  kernel (\w+): runs\n", report)[1]
    assert f"  kernel {quick}: runs\n  kernel reference: not asked, {quick} comes first\n" in report
    assert re.search(r"  kernel (\w+): runs\n", report[report.index("dgrad   gemm") :])
    assert report.startswith("recipe: x=nvfp4:rht:nan,w=nvfp4:16x16:nan,dy=nvfp4:rht:sr:nan\ninstruction set: ")


def test_only_gradients_that_are_wanted_have_products(make_layer, make_x):
    layer, x = make_layer(), make_x(16, 96, requires_grad=False)

    def products():
        with quire.autocast():
            return [step.name for step in quire.explain(layer, x).products]

    assert products() == ["fprop", "dgrad", "wgrad"]
    layer.weight.requires_grad_(False)
    assert products() == ["fprop", "dgrad"]
    with torch.no_grad():
        assert products() == ["fprop"]


@pytest.mark.cpu_only
def test_nothing_changes(make_layer, make_x, equal_bits):
    """State of layers, gradients, random state, versions: a backward pass that was pending gives the same bits."""
    layer, x = make_layer(96, 64), make_x(16, 96)
    model = torch.nn.Sequential(layer, torch.nn.BatchNorm1d(64, dtype=torch.bfloat16), torch.nn.Dropout())
    recipe = NVFP4BlockScaling()

    def gradient(between):
        layer.sr_state[1] = 3
        torch.manual_seed(0)
        with quire.autocast(recipe=recipe):
            y = model(x)
            between()
        (gradient,) = torch.autograd.grad(y, layer.weight, torch.ones_like(y))
        return gradient

    expected = gradient(lambda: None)
    before = {name: t.clone() for name, t in model.named_buffers()}
    x.grad = layer.weight.grad = None

    def explain():
        before.update({name: t.clone() for name, t in model.named_buffers()})
        random = torch.get_rng_state()
        explanation = quire.explain(model, x)
        assert len(explanation.products) == 3
        assert torch.equal(random, torch.get_rng_state())
        assert x.grad is None and layer.weight.grad is None and layer.bias.grad is None
        for name, t in model.named_buffers():
            assert equal_bits(t, before[name]), name

    assert equal_bits(gradient(explain), expected)
    assert before["1.num_batches_tracked"] == 2, "the model does keep state that explain could have changed"


def test_operands_that_come_quantized_are_marked(make_layer, make_x):
    layer, x = make_layer(96, 64), make_x(16, 96)
    w = quire.quantize(layer.weight.detach(), "mxfp8", columnwise=True)
    buffers = [getattr(w, name) for name in quire.tensor.BUFFER_NAMES]
    explanation = quire.explain(
        lambda x: quire.functional.linear_prequantized(
            x, layer.weight, None, "x=mxfp8,w=mxfp8,dy=mxfp8", torch.bfloat16, w_buffers=buffers
        ),
        x,
    )
    assert [step.name for step in explanation.quantizations] == ["x", "dy"]
    assert [(step.name, [o.made for o in step.operands]) for step in explanation.products] == [
        ("fprop", [True, False]),
        ("dgrad", [True, False]),
    ]
    assert "  w   mxfp8 rowwise [64, 96], given quantized\n" in str(explanation)


def test_other_ways_backward_show_as_products_of_plain_matrices(make_layer, make_x):
    spec = "x=mxfp8,w=mxfp8,dy=mxfp8,backward="
    for way in ("dequantized", "high_precision", "requantized"):
        explanation = quire.explain(
            quire.functional.linear, make_x(16, 96), make_layer().weight, None, spec + way, torch.bfloat16
        )
        assert [step.operation for step in explanation.products] == ["gemm"] + 2 * (
            ["gemm"] if way == "requantized" else ["matmul"]
        )


@pytest.mark.parametrize("recipe", ["mxfp8", "x=none,w=mxfp8"])
@pytest.mark.parametrize("gradients", ["input", None])
def test_a_layer_for_inference_has_a_backward_pass_if_it_gives_one(recipe, gradients):
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), quire.Linear(64, 64, recipe="mxfp8"))
    quire.convert(model[0], recipe, for_inference=True, tokens=None, min_features=1, gradients=gradients)
    products = quire.explain(model, torch.randn(4, 64)).products
    forward_only = gradients is None and recipe == "mxfp8"
    assert [step.layer for step in products].count("0") == (1 if forward_only else 2)
    expected = ["fprop"] if forward_only else ["fprop", "dgrad", "wgrad"]
    assert [step.name for step in products if step.layer == "1"] == expected


@pytest.mark.parametrize("make", [lambda: torch.nn.Linear(64, 64), lambda: quire.LayerNormMLP(64, 64)])
def test_the_recipe_in_force_says_whether_a_layer_for_inference_has_a_backward_pass(make):
    """As it says whether a backward pass raises."""
    model = quire.convert(torch.nn.Sequential(make()), "mxfp8", for_inference=True, tokens=None, min_features=1)
    decodes = quire.recipe.MXFP8BlockScaling(backward_override="dequantized")
    for recipe, gives in ((None, True), (decodes, True), ("mxfp8", False)):
        x = torch.randn(4, 64)
        with quire.autocast(enabled=recipe is not None, recipe=recipe):
            products = [step.operation for step in quire.explain(model, x).products]
            with torch.no_grad():
                forward = [step.operation for step in quire.explain(model, x).products]
            refused = pytest.raises(RuntimeError, match="run the model under torch.no_grad")
            with contextlib.nullcontext() if gives else refused:
                model(x.requires_grad_()).sum().backward()
        assert (len(products) > len(forward)) == gives


def test_delayed_scaling_keeps_its_state(make_layer, make_x, equal_bits):
    layer, x = make_layer(96, 64), make_x(16, 96)
    recipe = quire.recipe.DelayedScaling(amax_history_len=4)
    with quire.autocast(recipe=recipe):
        layer(x).sum().backward()
    with quire.autocast(recipe=recipe):
        before = {name: t.clone() for name, t in vars(layer.delayed).items() if isinstance(t, torch.Tensor)}
        explanation = quire.explain(layer, 4 * x.detach())
        after = vars(layer.delayed)
        assert before and all(equal_bits(after[name], t) for name, t in before.items())
    assert [step.name for step in explanation.quantizations] == ["x", "w", "dy"]
    assert [step.name for step in explanation.products] == ["fprop", "dgrad", "wgrad"]
    assert all(operand.made for step in explanation.products for operand in step.operands)


def test_without_a_recipe_pytorch_computes(make_layer, make_x):
    explanation = quire.explain(make_layer(96, 64), make_x(16, 96))
    assert explanation.recipe is None and explanation.quantizations == ()
    assert [(step.operation, step.kernel) for step in explanation.products] == [("torch", None)] * 3
    assert "recipe: that of each layer, else high precision (no quire.autocast is active)\n" in str(
        explanation
    ) and "aten.addmm" in str(explanation)


def test_functions_are_explained_too(make_layer, make_x):
    x, layer = make_x(16, 96), make_layer(96, 64)
    (step,) = quire.explain(quire.quantize, x.detach(), "mxfp8:e5m2", columnwise=True).steps
    assert (step.operation, step.name, step.kernel) == ("quantize", "", kernel_that_ran(step))
    assert [(o.role, o.spec, o.direction) for o in step.operands] == [
        ("", "mxfp8:e5m2", "rowwise"),
        ("", "mxfp8:e5m2", "columnwise"),
    ]
    q = quire.quantize(x.detach(), "mxfp8")
    (step,) = quire.explain(q.dequantize).steps
    assert step.problem == "dequantize mxfp8 rowwise of [16, 96] to bfloat16"
    linear = quire.explain(quire.functional.linear, x, layer.weight, None, "x=mxfp8,w=mxfp8,dy=mxfp8", torch.float32)
    assert [(step.name, "to float32" in step.problem) for step in linear.products] == [
        ("fprop", True),
        ("dgrad", True),
        ("wgrad", True),
    ]


def test_a_compiled_module_is_explained_like_an_eager_one(make_layer, make_x, compiler):
    layer, x = make_layer(), make_x(16, 96)
    with quire.autocast(recipe=Float8CurrentScaling()):
        assert str(quire.explain(compiler(layer), x)) == str(quire.explain(layer, x))


class Block(torch.nn.Module):
    """Of operators that Inductor fuses, between layers."""

    def __init__(self):
        super().__init__()
        self.up, self.down = quire.Linear(64, 256, recipe="nvfp4"), quire.Linear(256, 64, recipe="nvfp4")
        self.norm = torch.nn.RMSNorm(64)

    def forward(self, x):
        # 1.25 is a bfloat16: emulate_precision_casts of PyTorch 2.15 rounds the constants of products.
        return x + self.down(torch.nn.functional.silu(self.up(self.norm(x))) * 1.25)


def blocks(dtype=torch.bfloat16):
    torch.manual_seed(0)
    return torch.nn.Sequential(Block(), Block()).to(dtype)


def a_function(**options):
    model = blocks()
    return torch.compile(lambda x: model(x), **options)


def in_place(model, **options):
    model.compile(**options)
    return model


def one_in_place(model):
    model[1].compile()
    return model


ROUNDS = {"options": {"emulate_precision_casts": True}}
#: A compiled model, the dtype of x, and whether its results can differ from eager ones.
COMPILED = {
    "eager": (blocks, torch.bfloat16, False),
    "inductor": (lambda: torch.compile(blocks()), torch.bfloat16, True),
    "in place": (lambda: in_place(blocks()), torch.bfloat16, True),
    "a block in place": (lambda: one_in_place(blocks()), torch.bfloat16, True),
    "whole": (lambda: torch.compile(blocks(), fullgraph=True), torch.bfloat16, True),
    "a whole function": (lambda: a_function(fullgraph=True, dynamic=True), torch.bfloat16, True),
    "a function": (a_function, torch.bfloat16, True),
    "float16": (lambda: torch.compile(blocks(torch.float16)), torch.float16, True),
    "float32": (lambda: torch.compile(blocks(torch.float32)), torch.float32, False),
    "as eager rounds": (lambda: torch.compile(blocks(), **ROUNDS), torch.bfloat16, False),
    "in place as eager rounds": (lambda: in_place(blocks(), **ROUNDS), torch.bfloat16, False),
    "whole as eager rounds": (lambda: torch.compile(blocks(), fullgraph=True, **ROUNDS), torch.bfloat16, False),
    "another backend": (lambda: torch.compile(blocks(), backend="aot_eager"), torch.bfloat16, False),
}


@pytest.mark.parametrize(("make", "dtype", "differs"), COMPILED.values(), ids=COMPILED)
def test_a_note_tells_that_compiled_results_can_differ_from_eager_ones(make, dtype, differs):
    x, model = torch.randn(8, 64, dtype=dtype), make()
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        found = quire.explain(model, x)
        assert len(found.notes) == ("note: Inductor compiles this" in str(found)) == differs
        if differs:
            assert "emulate_precision_casts = True" in found.notes[0]
            with torch._inductor.config.patch(emulate_precision_casts=True):
                assert quire.explain(model, x).notes == ()


@pytest.mark.parametrize("how", ["function", "module", "block", "wrapped block"])
def test_what_is_compiled_is_explained_and_stays_compiled(how):
    ran = []

    def backend(graph, inputs):
        return lambda *arguments: ran.append(how) or graph(*arguments)

    options = {"backend": backend, "fullgraph": how != "wrapped block"}
    model, x = torch.nn.Sequential(quire.Linear(64, 64), quire.Linear(64, 32)), torch.randn(8, 64)
    function = model if how != "function" else lambda x: model(x)
    expected = [str(step) for step in quire.explain(function, x).steps]
    if how == "function":
        function = torch.compile(function, **options)
    elif how == "wrapped block":
        model[0] = torch.compile(model[0], **options)
    else:
        (model if how == "module" else model[0]).compile(**options)
    for _ in range(2):
        assert [str(step) for step in quire.explain(function, x).steps] == expected
        assert not ran
        function(x).sum().backward()
        assert ran
        ran.clear()


def test_behind_a_graph_break_it_says_where_it_can_be_called():
    layer, x = quire.Linear(64, 32), torch.randn(8, 64)

    @torch.compile(backend="eager")
    def function(x):
        torch._dynamo.graph_break()
        return quire.explain(layer, x)

    with pytest.raises(RuntimeError, match="a function that torch.compiler.disable decorates"):
        function(x)
    apart = torch.compiler.disable(lambda x: quire.explain(layer, x))
    assert torch.compile(lambda x: apart(x + 1), backend="eager")(x).steps


@pytest.mark.parametrize("first", [0, 1])
def test_compiled_functions_are_compiled_again_when_the_last_of_several_threads_is_done(first):
    ran = []

    @torch.compile(backend=lambda graph, inputs: lambda *arguments: ran.append(1) or graph(*arguments))
    def function(x):
        return x + 1

    threads = [in_eager_mode(), in_eager_mode()]
    for thread in threads:
        thread.__enter__()
    threads[first].__exit__(None, None, None)
    function(torch.zeros(2))
    assert not ran
    threads[1 - first].__exit__(None, None, None)
    function(torch.zeros(2))
    assert ran == [1]


def test_torch_autocast_gives_a_compiled_float32_model_the_note():
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert quire.explain(torch.compile(blocks(torch.float32)), torch.randn(8, 64)).notes


@pytest.mark.slow
@pytest.mark.parametrize(
    "emulated",
    [False, pytest.param(True, marks=pytorch.fails_before("2.13", "Inductor rounds on other devices than CPUs alone"))],
)
def test_the_note_is_true(emulated):
    model, x = blocks(), torch.randn(64, 64, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        compiled = torch.compile(model, fullgraph=True, options={"emulate_precision_casts": emulated})
        same = torch.equal(compiled(x), model(x))
        assert same == emulated == (not quire.explain(compiled, x).notes)


def test_an_exception_ends_the_explanation_and_restores(make_layer, make_x):
    layer, x = make_layer(), make_x(16, 96)

    def fails(x):
        layer.sr_state.add_(1)
        layer(x)
        raise KeyError

    with quire.autocast():
        with pytest.raises(KeyError):
            quire.explain(fails, x)
        assert layer.sr_state[1] == 0
        assert len(quire.explain(layer, x).products) == 3
        with pytest.raises(RuntimeError, match="this thread is inside quire.explain already; call it once at a time"):
            quire.explain(lambda: quire.explain(layer, x))
        with pytest.raises(TypeError, match="explain: verbose must be a bool, got 'a'"):
            quire.explain(layer, x, verbose="a")
        assert len(quire.explain(layer, x).products) == 3


def test_other_threads_are_not_explained(make_layer, make_x):
    layer, x = make_layer(), make_x(16, 96)

    def work():
        with quire.autocast(recipe=Float8CurrentScaling()):
            make_layer()(make_x(16, 96)).sum().backward()

    def forward(x):
        y = layer(x)
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        return y

    with quire.autocast():
        explanation = quire.explain(forward, x)
    assert [step.problem.split()[1] for step in explanation.products] == ["mxfp8:nan"] * 2, "fprop and dgrad, no Float8"


FORCED = """
import torch, quire
with quire.autocast():
    for step in quire.explain(quire.Linear(32, 32), torch.randn(4, 32)).steps:
        print(step.operation, step.kernel, [kernel.verdict for kernel in step.kernels])
"""


def test_a_profiler_that_begins_within_goes_on_afterwards(make_layer, make_x):
    layer, profile = make_layer(32, 32), torch.profiler.profile()

    def function():
        profile.start()
        return layer(make_x(4, 32))

    explained = quire.explain(function)
    torch.ones(3).cosh()
    profile.stop()
    assert "aten::cosh" in {event.key for event in profile.key_averages()}
    assert [step.name for step in quire.explain(function).steps] == [step.name for step in explained.steps]
    profile.stop()


@pytest.mark.cpu_only
def test_a_forced_kernel_is_said_to_be_forced():
    lines = set(forks.run(FORCED, QUIRE_KERNEL="gemm:reference").splitlines())
    others = ["QUIRE_KERNEL names another"] * 5  # amx_nvfp4, int8, amx, bf16, generic
    assert f"gemm reference {[*others, 'runs']}" in lines
    assert "quantize generic ['runs', 'not asked, generic comes first']" in lines


ONE_TOKEN = """
import torch
import quire
with quire.autocast(recipe="nvfp4"), torch.no_grad():
    step = quire.explain(quire.Linear(64, 64), torch.ones(1, 64)).products[0]
print(*[kernel.verdict for kernel in step.kernels[:4]], sep="\\n")
"""


@pytest.mark.cpu_only
def test_what_the_machine_lacks_is_said_before_what_the_call_has_too_little_of():
    said = forks.run(ONE_TOKEN, QUIRE_ISA="scalar")
    lanes = ("bfloat16 tiles", "int8", "bfloat16 tiles", "bfloat16")
    assert said.splitlines() == [f"instruction set scalar has no products of {kind}" for kind in lanes]


BIAS_GRADIENT = """
import torch
import quire
none, dy = torch.empty(0), torch.ones(3, 8)
db = torch.ops.quire.linear_bwd(dy, None, *[none] * 3, [], 4, "x=nvfp4,w=nvfp4,dy=nvfp4", torch.float32, 4)[2]
assert db.tolist() == [3] * 8
"""


@pytest.mark.cpu_only
def test_a_forced_kernel_of_products_does_not_refuse_gradients_of_biases():
    forks.run(BIAS_GRADIENT, QUIRE_KERNEL="gemm:int8")


def test_a_compiled_function_cannot_explain(compiler):
    layer = quire.Linear(64, 64)

    @torch.compile(backend="eager", fullgraph=True)
    def function(x):
        quire.explain(layer, x)
        return layer(x)

    with pytest.raises(Exception, match="explain: not available within a compiled function"):
        function(torch.ones(2, 64))


def test_a_norm_that_quantizes_made_the_operand_of_the_product():
    from quire.functional import linear_prequantized, norm

    def call(x, w, gain):
        carrier, buffers = norm(x, gain, None, "RMSNorm", x.dtype, spec="mxfp8", rowwise=True, columnwise=True)
        return linear_prequantized(carrier, w, None, "x=mxfp8,w=mxfp8,dy=mxfp8", x.dtype, x_buffers=buffers)

    arguments = torch.randn(8, 96), torch.randn(64, 96), torch.randn(96)
    explanation = quire.explain(call, *arguments)
    norms = [step for step in explanation.steps if step.operation == "norm"]
    assert [step.name for step in norms] == ["", "grad"] and all(step.kernel == kernel_that_ran(step) for step in norms)
    assert norms[0].problem == "RMSNorm float32 [8, 96] to float32 and mxfp8 rowwise columnwise"
    assert [(o.role, o.direction, o.made) for o in norms[0].operands] == [
        ("x", "rowwise", True),
        ("x", "columnwise", True),
    ]
    assert all(operand.made for step in explanation.products for operand in step.operands)
    with quire.debug.statistics() as counts:
        call(*arguments)
    assert "x     fprop    rowwise     mxfp8  1        768" in str(counts)
