"""Calls that go past PyTorch's binding and dispatcher: the same bits, and only where nobody else has a say."""

import contextlib

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode

import quire
from every_recipe import every_recipe
from pytorch import Operators
from quire import functional

pytestmark = pytest.mark.skipif(functional.DIRECT is None, reason="built without Python's development headers")

RECIPE = quire.recipe.Float8CurrentScaling()


class Heard:
    """The module of direct calls; keeps what each gave."""

    def __init__(self, module):
        self.module, self.gave = module, []

    def __getattr__(self, name):
        def call(*args, **kwargs):
            self.gave.append(getattr(self.module, name)(*args, **kwargs))
            return self.gave[-1]

        return call


@pytest.fixture
def heard(monkeypatch):
    heard = Heard(functional.DIRECT)
    monkeypatch.setattr(functional, "DIRECT", heard)
    return heard


def make_linear(device, kept=True, recipe=RECIPE, *, quantized=False, **options):
    torch.manual_seed(5)
    with quire.quantized_model_init(quantized, recipe=recipe):
        layer = quire.Linear(48, 40, device=device, **options)
    if kept and not quantized:
        quire.quantize_weights(layer, recipe)
    return layer


def run(layer, x, recipe=RECIPE):
    with quire.autocast(recipe=recipe):
        return layer(x)


def outcome(call):
    """What a call gives, or the words in which it refuses."""
    try:
        return call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def same_without(monkeypatch, call):
    """The outcome, which has to be that of a build without direct calls."""
    direct = outcome(call)
    monkeypatch.setattr(functional, "DIRECT", None)
    plain = outcome(call)
    if isinstance(plain, torch.Tensor):
        assert direct.dtype == plain.dtype and direct.is_inference() == plain.is_inference()
        assert torch.equal(direct, plain)
    else:
        assert direct == plain
    return direct


@every_recipe
@pytest.mark.parametrize("codes", ["of now", "kept", "of a quantized weight"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_direct_call_gives_the_bits_of_the_operator(device, monkeypatch, heard, recipe, codes, dtype):
    of_weight = codes == "of a quantized weight"
    layer = make_linear(
        device, codes == "kept", recipe, quantized=of_weight, bias=dtype == torch.float32, params_dtype=dtype
    )
    for shape in ((48,), (1, 48), (3, 5, 48), (0, 48)):
        x = torch.randn(shape, dtype=dtype).to(device)
        with torch.no_grad():
            same_without(monkeypatch, lambda x=x: run(layer, x, recipe))
        monkeypatch.setattr(functional, "DIRECT", heard)
    if not recipe.delayed():
        assert len(heard.gave) == 4 and None not in heard.gave


@every_recipe
def test_a_quantized_weight_gives_the_same_bits_where_a_gradient_is_wanted(device, heard, recipe):
    layer, x = make_linear(device, recipe=recipe, quantized=True), torch.randn(3, 48).to(device)
    with quire.autocast(recipe=recipe):
        with torch.no_grad():
            y = layer(x)
        recorded = layer(x.requires_grad_())
    assert torch.equal(y, recorded) and (recipe.delayed() or (heard.gave[0] is y and recorded.requires_grad))


def test_a_frozen_layer_is_called_directly_with_grad_enabled_too(device, heard):
    layer = make_linear(device).requires_grad_(False)
    y = run(layer, torch.randn(2, 48).to(device))
    assert heard.gave[0] is y and not y.requires_grad


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_result_of_inference_mode_is_one(device, monkeypatch, heard, mode):
    layer, x = make_linear(device), torch.randn(2, 48).to(device)
    with mode():
        y = same_without(monkeypatch, lambda: run(layer, x))
    assert heard.gave[0] is not None and y.is_inference() == (mode is torch.inference_mode)


def test_under_torch_autocast_it_has_that_dtype(device, monkeypatch, heard):
    layer, x = make_linear(device), torch.randn(2, 48).to(device)
    with torch.no_grad(), torch.autocast(device.type, torch.bfloat16):
        assert same_without(monkeypatch, lambda: run(layer, x)).dtype == torch.bfloat16
    assert heard.gave[0] is not None


@pytest.mark.parametrize("quantized", [False, True], ids=["kept", "quantized weight"])
@pytest.mark.parametrize("wanted", ["x", "weight", "bias"])
def test_a_call_that_wants_a_gradient_is_recorded(device, heard, wanted, quantized):
    layer, x = make_linear(device, quantized=quantized).requires_grad_(False), torch.randn(2, 48).to(device)
    given = {"x": x, "weight": layer.weight, "bias": layer.bias}[wanted].requires_grad_()
    y = run(layer, x)
    assert len(heard.gave) == 1 and (heard.gave[0] is None if quantized else heard.gave[0] is y) and y.requires_grad
    y.sum().backward()
    assert given.grad is not None


def gradients(layer, x, recipe=RECIPE):
    """y of a call, and the gradients of x and of the parameters."""
    wanted = [x.requires_grad_(), *layer.parameters()]
    y = run(layer, x, recipe)
    return [y, *torch.autograd.grad(y.square().sum(), wanted)]


@every_recipe
@pytest.mark.parametrize("kept", [False, True], ids=["of now", "kept"])
def test_a_call_that_is_recorded_directly_has_the_gradients_of_the_operator(device, monkeypatch, heard, recipe, kept):
    layer, same = (make_linear(device, kept, recipe) for _ in range(2))
    x = torch.randn(3, 48).to(device)
    direct = gradients(layer, x, recipe)
    monkeypatch.setattr(functional, "DIRECT", None)
    through = gradients(same, x, recipe)
    assert type(direct[0].grad_fn).__name__ == type(through[0].grad_fn).__name__
    assert all(map(torch.equal, direct, through))
    assert recipe.delayed() or heard.gave[0] is direct[0]


def make_grouped(device, **options):
    torch.manual_seed(5)
    return quire.GroupedLinear(3, 48, 40, device=device, **options), torch.tensor([2, 0, 3]).to(device)


def of_groups(recipe, device, **options):
    """y without and with gradients, and the gradients of x and of the parameters."""
    layer, sizes = make_grouped(device, **options)
    x = torch.randn(6, 48).to(device).requires_grad_()
    with quire.autocast(recipe=recipe):
        with torch.no_grad():
            inferred = layer(x, sizes)
        y = layer(x, sizes)
    return [inferred, y, *torch.autograd.grad(y.square().sum(), [x, *layer.parameters()])]


@every_recipe
@pytest.mark.parametrize("stacked", [False, True], ids=["a list", "one weight"])
def test_a_direct_call_of_groups_gives_the_bits_of_the_operator(device, monkeypatch, heard, recipe, stacked):
    options = {"single_grouped_weight": stacked, "bias": not stacked}
    direct = of_groups(recipe, device, **options)
    monkeypatch.setattr(functional, "DIRECT", None)
    through = of_groups(recipe, device, **options)
    assert len(heard.gave) == 2 and heard.gave[0][0] is direct[0] and heard.gave[1][0] is direct[1]
    assert type(direct[1].grad_fn).__name__ == type(through[1].grad_fn).__name__
    assert all(map(torch.equal, direct, through))


def of_mixture(recipe, device):
    """y without and with gradients, and the gradients of x and of the parameters."""
    torch.manual_seed(5)
    layer = quire.MoE(48, 32, num_experts=4, top_k=2, device=device)
    x = torch.randn(6, 48).to(device).requires_grad_()
    with quire.autocast(recipe=recipe):
        with torch.no_grad():
            inferred = layer(x)
        y = layer(x)
    return [inferred, y, *torch.autograd.grad(y.square().sum(), [x, *layer.parameters()])]


@every_recipe
def test_direct_calls_of_a_mixture_give_the_bits_of_the_operators(device, monkeypatch, heard, recipe):
    direct = of_mixture(recipe, device)
    monkeypatch.setattr(functional, "DIRECT", None)
    through = of_mixture(recipe, device)
    # route, expert_rows, permute, grouped_linear, activation, grouped_linear, unpermute
    assert len(heard.gave) == 2 * 7 and all([results is not None for results in heard.gave])
    assert type(direct[1].grad_fn).__name__ == type(through[1].grad_fn).__name__
    assert all(map(torch.equal, direct, through))


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: functional.expert_rows(torch.zeros(3, 2, dtype=torch.int32), -1), "num_experts must be at least 1"),
        (lambda: functional.permute_rows(torch.zeros(3, 8), torch.zeros(3, 2, dtype=torch.int32), -1), "rows must not"),
        (
            lambda: functional.permute_rows(torch.zeros(3, 8), torch.zeros(3, 2, dtype=torch.int32), 2**70),
            "type 'int' for argument 'rows'",
        ),
        (lambda: functional.route(torch.zeros(3, 8), None, "softmax:topk=9"), "topk must be from 1 to"),
    ],
    ids=["a negative number", "a negative size", "a size beyond 64 bits", "too many experts"],
)
def test_what_a_mixture_refuses_is_refused_in_the_same_words(monkeypatch, heard, call, said):
    assert said in same_without(monkeypatch, call)
    assert heard.gave == [None]


def test_memory_of_the_caller_is_written_by_the_operator(device, heard):
    layer, sizes = make_grouped(device)
    x, memory = torch.randn(6, 48).to(device), torch.zeros(6, 40).to(device)
    with torch.no_grad(), quire.autocast(recipe=RECIPE):
        y = layer(x, sizes, out=memory)
        assert heard.gave == [None] and torch.equal(y[:5], layer(x, sizes)[:5])
    assert torch.equal(memory, y)


def test_hooks_on_saved_tensors_are_called_once_by_the_operator(device, heard):
    layer, x, packed = make_linear(device, kept=False), torch.randn(2, 48).to(device).requires_grad_(), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        run(layer, x).sum().backward()
    assert heard.gave == [None] and len(packed) == len({id(t) for t in packed}) > 0


def test_a_checkpoint_recomputes_a_layer_through_the_operator(device, heard):
    layer, x = make_linear(device, kept=False), torch.randn(2, 48).to(device).requires_grad_()
    expected = gradients(layer, x)
    with quire.autocast(recipe=RECIPE):
        y = torch.utils.checkpoint.checkpoint(lambda t: layer(layer(t)[:, :1].expand(2, 48)), x, use_reentrant=False)
        y.sum().backward()
    assert heard.gave[0] is expected[0] and heard.gave[1:] and all(gave is None for gave in heard.gave[1:])
    assert x.grad is not None


class Subclass(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return super().__torch_function__(func, types, args, kwargs or {})


def test_a_subclass_keeps_its_say(device, heard):
    layer, x = make_linear(device), torch.randn(2, 48).to(device)
    with torch.no_grad():
        y = run(layer, x.as_subclass(Subclass))
    assert type(y) is Subclass and all(gave is None for gave in heard.gave)


def test_a_subclass_compiles(device):
    layer, x = make_linear(device), torch.randn(2, 48).to(device)
    compiled = torch.compile(lambda x: run(layer, x), backend="eager", fullgraph=True)  # AOTAutograd refuses subclasses
    with torch.no_grad():
        assert torch.equal(compiled(x.as_subclass(Subclass)), run(layer, x))


class Functions(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", [Functions, Operators])
def test_modes_see_the_operator(device, heard, kind):
    layer, x = make_linear(device), torch.randn(2, 48).to(device)
    with torch.no_grad(), kind() as mode:
        run(layer, x)
    # What the mode itself calls, which no mode sees, may be direct.
    assert heard.gave[0] is None and any("quire.linear_prequantized" in name for name in mode.seen)


def test_a_profiler_sees_the_operator(device, heard):
    layer, x = make_linear(device), torch.randn(2, 48).to(device)
    with torch.no_grad(), torch.profiler.profile() as profile:
        run(layer, x)
    assert heard.gave == [None] and "quire::linear_prequantized" in {event.key for event in profile.key_averages()}


def traced(layer, x):
    return str(torch.jit.trace(lambda t: run(layer, t), x, check_trace=False).graph)


def made_by_fx(layer, x):
    return make_fx(lambda t: run(layer, t))(x).code


def exported(layer, x):
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def forward(self, t):
            return run(self.layer, t)

    return torch.export.export(Model(), (x,), strict=False).graph_module.code


@pytest.mark.parametrize("trace", [traced, made_by_fx, exported])
def test_tracers_record_the_operator(device, heard, trace):
    layer, x = make_linear(device, kept=False).requires_grad_(False), torch.randn(2, 48).to(device)
    with torch.no_grad():
        found = trace(layer, x)
    assert "quire.linear" in found.replace("::", ".") and None in heard.gave


def test_a_compiled_graph_holds_the_operator(device, heard):
    layer, x, graphs = make_linear(device), torch.randn(2, 48).to(device), []

    def backend(graph, _):
        graphs.append(graph.code)
        return graph

    with torch.no_grad(), quire.autocast(recipe=RECIPE):
        compiled = torch.compile(layer, fullgraph=True, backend=backend)
        y = compiled(x)
        assert heard.gave == [None] and "quire.linear_prequantized" in graphs[0]  # of the tracer's own tensors
        assert torch.equal(y, layer(x))


@pytest.mark.slow
@pytest.mark.parametrize("kept", [False, True], ids=["quantized_now", "kept"])
def test_compiled_code_calls_directly_where_no_gradient_is_wanted(monkeypatch, heard, kept):
    layer, x = make_linear("cpu", kept), torch.randn(2, 48)
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: run(layer, x), fullgraph=True)
    with torch.no_grad():
        compiled(x)  # what the tracers call gives None
        heard.gave.clear()
        y = same_without(monkeypatch, lambda: compiled(x))
    assert len(heard.gave) == 1 and torch.equal(heard.gave[0], y)
    monkeypatch.setattr(functional, "DIRECT", heard)
    heard.gave.clear()
    compiled(x).sum().backward()
    assert all(gave is None for gave in heard.gave) and layer.weight.grad is not None


def test_transforms_and_tangents_take_the_dispatcher(device, monkeypatch, heard):
    layer, x = make_linear(device, kept=False).requires_grad_(False), torch.randn(2, 48).to(device)
    v = torch.randn(2, 48).to(device)
    run(layer, x)
    assert heard.gave.pop() is not None

    def gradient():
        return torch.func.grad(lambda t: run(layer, t).square().sum())(x)

    def tangent():
        return torch.func.jvp(lambda t: run(layer, t), (x,), (v,))[0]

    for call in (gradient, tangent, lambda: torch.func.vmap(lambda t: run(layer, t))(x.expand(3, 2, 48))):
        monkeypatch.setattr(functional, "DIRECT", heard)
        same_without(monkeypatch, call)
    assert len(heard.gave) >= 3 and all(gave is None for gave in heard.gave)


def test_a_fake_mode_is_asked(device, heard):
    layer, x = make_linear(device, kept=False), torch.randn(2, 48).to(device)
    with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True):
        y = run(layer, x)
    assert heard.gave and all(gave is None for gave in heard.gave) and type(y) is not torch.Tensor


REFUSED = {
    "another K": lambda layer, x: run(layer, x[:, :40]),
    "an integer x": lambda layer, x: run(layer, x.int()),
    "a scalar": lambda layer, x: run(layer, x[0, 0]),
    "another dtype": lambda layer, x: run(layer, x.half()),
    "a sparse x": lambda layer, x: run(layer, x.to_sparse()),
    "a meta x": lambda layer, x: run(layer, x.to("meta")),
    "a list": lambda layer, x: run(layer, [1.0]),
}


@pytest.mark.parametrize("call", REFUSED.values(), ids=REFUSED)
def test_what_is_refused_is_refused_in_the_same_words(device, monkeypatch, heard, call):
    layer, x = make_linear(device), torch.randn(2, 48).to(device)
    with torch.no_grad():
        said = same_without(monkeypatch, lambda: call(layer, x))
    assert isinstance(said, str) and all(gave is None for gave in heard.gave)


def test_stale_codes_are_refused_in_the_same_words(monkeypatch, heard):
    layer, x = make_linear("cpu"), torch.randn(2, 48)
    layer.weight.data.mul_(2)
    with torch.no_grad():
        assert "stale" in same_without(monkeypatch, lambda: run(layer, x))
    assert heard.gave == []  # what a kernel finds in values is raised at once


W, T = torch.randn(4, 8), "x=mxfp8,w=mxfp8,dy=mxfp8"
ARGUMENTS = {
    "nothing": ((), {}),
    "too few": ((W, W, None, T), {}),
    "a gap": ((W, W, None), {"dtype": torch.float32}),
    "too many": ((W, W, None, T, torch.float32, None, None), {}),
    "an unknown name": ((W, W, None, T, torch.float32), {"scale": None}),
    "one twice": ((W, W, None, T, torch.float32), {"dtype": torch.float32}),
    "no text": ((W, W, None, 3, torch.float32), {}),
    "a text that has no bytes": ((W, W, None, "\ud800", torch.float32), {}),
    "no recipe": ((W, W, None, "x=", torch.float32), {}),
    "no dtype": ((W, W, None, T, float), {}),
    "no weight": ((W, None, None, T, torch.float32), {}),
    "a number": ((W, W, 1.0, T, torch.float32), {}),
    "what fits": ((W, W), {"bias": None, "recipe": T, "dtype": torch.float32}),
}


@pytest.mark.parametrize("given", ARGUMENTS.values(), ids=ARGUMENTS)
def test_arguments_that_do_not_fit_give_none(given):
    args, kwargs = given
    y = functional.DIRECT.linear(*args, **kwargs)
    assert y is None if given is not ARGUMENTS["what fits"] else y.shape == (4, 4)


def test_lists_of_buffers_that_do_not_fit_give_none():
    buffers = functional.operand_buffers(W, "mxfp8", False)
    call = functional.DIRECT.linear_prequantized
    for wrong in ("abcdef", [1] * 6, buffers[:2], {0: W}):
        with contextlib.nullcontext(call(W, W, None, T, torch.float32, (), wrong)) as y:
            assert y is None
    expected = torch.ops.quire.linear(W, W, None, T, torch.float32)
    assert torch.equal(call(W, W, None, T, torch.float32, (), buffers), expected)
    assert torch.equal(call(W, W, None, T, torch.float32, (), tuple(buffers)), expected)
