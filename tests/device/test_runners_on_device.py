"""Runners whose weights lie on the device: the CPU's bits, captured and replayed; the host neither reads nor waits."""

import pytest
import torch

import quire
from device import device as testdevice
from device.twins import assert_same, device_of, stream_of
from python.runners.runner_inputs import INNER, E, H, N, choices, nothing_stays_registered, rand  # noqa: F401  a fixture of every test
from quire import runners

ROUTING = "softmax:topk=2:renormalize"
SHARED = {"shared_w13": rand(2 * 40, H, seed=5), "shared_w2": rand(H, 40, seed=6)}
BIASES = {"w13_bias": rand(E, 2 * INNER, seed=7), "w2_bias": rand(E, H, seed=8)}
FORMATS = {
    "nvfp4": {},
    "row_scaled": {"x": "nvfp4:row_scaled", "w": "nvfp4:16x16"},
    "mxfp8": {"x": "mxfp8", "w": "mxfp8"},
    "swizzled": {"x": "mxfp8:swizzled", "w": "mxfp8:swizzled"},
    "mxfp4": {"x": "mxfp8", "w": "mxfp4"},
    "fp8_row": {"x": "fp8_row", "w": "fp8_row"},
    "fp8_block": {"x": "fp8_block", "w": "fp8_block:128x128"},
    "weights_only": {"x": "none", "w": "mxfp4"},
}
SCALES = torch.tensor([2.0**-8, 2.0**-7, 2.0**-8, 2.0**-6])
STATIC = {"nvfp4": {}, "fp8_tensor": {"x": "fp8_tensor", "w": "fp8_tensor"}, "stored": {"x": "nvfp4:global=mul"}}
MIXTURES = {
    **FORMATS,
    "shared": {**SHARED, **BIASES},
    "shared_weights_only": {**SHARED, "x": "none", "w": "nvfp4"},
    "on_input": {"weight_on_input": True},
    **{f"static_{name}": {**spec, "w13_input_scale": SCALES, "w2_input_scale": 0.25} for name, spec in STATIC.items()},
}
PLACES = ["default", "side", "other"]
everywhere = pytest.mark.parametrize("place", PLACES)


def moved(values, device):
    """Tensors of arguments on a device; static scales are numbers of the host."""
    return {
        name: value.to(device) if isinstance(value, torch.Tensor) and "scale" not in name else value
        for name, value in values.items()
    }


def linear(device, **options):
    weight, bias = rand(N, H, seed=1).to(device), rand(N, seed=2).to(device)
    return runners.register(runners.LinearRunner(weight, bias, **moved(options, device)))


def mixture(device, **options):
    w13, w2 = rand(E, 2 * INNER, H, seed=3).to(device), rand(E, H, INNER, seed=4).to(device)
    return runners.register(runners.MoERunner(w13, w2, **moved(options, device)))


def tokens(number, count=7):
    """x, routing probabilities and experts of one set of inputs."""
    weights, ids = choices(count)
    return rand(count, H, seed=number), weights.roll(number, 0), ids.roll(number, 1).roll(number, 0)


def check(make, call, place, **options):
    """Calls of both, on inputs of several sizes; the device's bits are the CPU's, without a wait."""
    device = device_of(place)
    with make("cpu", **options) as ours, make(device, **options) as theirs:
        for number, count in enumerate((7, 1, 40)):
            given = tokens(number, count)
            there = [t.to(device) for t in given]
            torch.accelerator.synchronize(device)
            testdevice.counts()
            with stream_of(place):
                got = call(theirs, *there)
                assert testdevice.waits() == {}
                assert_same([got], [call(ours, *given)])


def by_linear(runner, x, *_):
    return quire.nvfp4_linear(x, runner, N)


def by_mixture(runner, *given):
    return quire.nvfp4_moe(*given, runner, H)


def by_routing(runner, x, *_):
    return quire.nvfp4_moe_routed(x, x[:, :E], ROUTING, runner, H)


@pytest.mark.parametrize("options", FORMATS.values(), ids=FORMATS)
@everywhere
def test_a_linear_runner_gives_the_bits_of_the_cpu_and_waits_for_nothing(options, place):
    check(linear, by_linear, place, **options)


@pytest.mark.parametrize("options", STATIC.values(), ids=STATIC)
def test_static_scales_lie_on_the_device(options):
    check(linear, by_linear, "side", input_scale=2.0**-8, **options)


@pytest.mark.parametrize(
    ("options", "place"),
    [pytest.param(options, PLACES[i % 3], id=name) for i, (name, options) in enumerate(MIXTURES.items())],
)
def test_a_mixture_gives_the_bits_of_the_cpu_and_waits_for_nothing(options, place):
    check(mixture, by_mixture, place, **options)


@everywhere
def test_experts_are_chosen_on_the_device(place):
    check(mixture, by_routing, place)


@pytest.mark.parametrize("x", ["nvfp4", "none"])
def test_codes_that_are_given_are_copied_on_the_device(x):
    def quantized(device, **options):
        stacks = (rand(E, 2 * INNER, H, seed=3).to(device), rand(E, H, INNER, seed=4).to(device))
        codes = [[quire.quantize(w, "nvfp4") for w in stack] for stack in stacks]
        runner = runners.register(runners.MoERunner(*codes, x=x))
        for weight in codes[0]:
            weight.rowwise_data.zero_()
        return runner

    check(quantized, by_mixture, "default")


def test_a_mixture_is_its_problems_each_of_them_one_launch():
    x, weights, ids = (t.to(testdevice.NAME) for t in tokens(0))
    with mixture(testdevice.NAME) as runner, testdevice.Launches() as launches:
        by_mixture(runner, x, weights, ids)
    made = ["expert_rows", "permute", "quantize", "gemm", "activation", "gemm", "unpermute"]
    assert [name for name in launches.names if not name.startswith("aten::")][-len(made) :] == made


@pytest.mark.parametrize("options", [{}, SHARED, {"x": "mxfp8", "w": "mxfp8"}], ids=["nvfp4", "shared", "mxfp8"])
@pytest.mark.parametrize("call", [by_mixture, by_routing])
def test_a_captured_mixture_is_replayed_on_other_tokens_and_experts(call, options):
    given = [t.to(testdevice.NAME) for t in tokens(0)]
    with mixture("cpu", **options) as ours, mixture(testdevice.NAME, **options) as theirs:
        call(theirs, *given)
        with testdevice.Graph() as graph:
            got = call(theirs, *given)
        for number in (1, 2, 3):
            new = tokens(number)
            for t, value in zip(given, new, strict=True):
                t.copy_(value)
            graph.replay()
            assert_same([got], [call(ours, *new)])


@pytest.mark.parametrize("options", [{}, {"input_scale": 2.0**-8}], ids=["measured", "static"])
def test_a_captured_linear_runner_is_replayed_on_other_tokens(options):
    x = tokens(0)[0].to(testdevice.NAME)
    with linear("cpu", **options) as ours, linear(testdevice.NAME, **options) as theirs:
        with testdevice.Graph() as graph:
            got = by_linear(theirs, x)
        for number in (1, 2):
            new = tokens(number)[0]
            x.copy_(new)
            graph.replay()
            assert_same([got], [by_linear(ours, new)])


@torch.no_grad()
def test_a_compiled_call_finds_the_runner_by_its_name_on_the_device():
    torch._dynamo.reset()
    run = torch.compile(lambda *given: by_mixture("there", *given), fullgraph=True, backend="aot_eager")
    w13, w2 = rand(E, 2 * INNER, H, seed=3), rand(E, H, INNER, seed=4)
    with runners.register(runners.MoERunner(w13.to(testdevice.NAME), w2.to(testdevice.NAME)), name="there"):
        with mixture("cpu") as ours:
            got = run(*(t.to(testdevice.NAME) for t in tokens(1)))
            assert_same([got], [by_mixture(ours, *tokens(1))])


def test_an_expert_that_is_none_is_reported_once_and_the_runner_works_on():
    x, weights, ids = tokens(0)
    wrong = ids.clone()
    wrong[3, 1] = E
    with mixture("cpu") as ours, mixture(testdevice.NAME) as theirs:
        there = [t.to(testdevice.NAME) for t in (x, weights, wrong)]
        by_mixture(theirs, *there)
        with pytest.raises(RuntimeError, match=f"expert_rows.*got {E} .*"):
            torch.accelerator.synchronize()
        there[2].copy_(ids)
        assert_same([by_mixture(theirs, *there)], [by_mixture(ours, x, weights, ids)])


def test_a_runner_is_of_the_device_where_its_weights_lie():
    first, second = device_of("default"), device_of("other")
    with linear(second) as runner:
        assert [r.device for r in runners.registered() if r.handle == runner.handle] == [str(second)]
        for place in ("cpu", first):
            with pytest.raises(RuntimeError, match=f"computes on {second} and x lies on {place};.*move x"):
                by_linear(runner, tokens(0)[0].to(place))
    with pytest.raises(RuntimeError, match=f"must be on one device; got cpu and {first}"):
        runners.register(runners.LinearRunner(rand(N, H).to(first), rand(N)))
    with pytest.raises(RuntimeError, match=f"w13 and w2 must be on one device; got {first} and cpu"):
        runners.register(runners.MoERunner(rand(E, 2 * INNER, H).to(first), rand(E, H, INNER)))
    with pytest.raises(RuntimeError, match=f"shared expert must be on the experts' device, {first}; got cpu"):
        w13, w2 = rand(E, 2 * INNER, H).to(first), rand(E, H, INNER).to(first)
        runners.register(runners.MoERunner(w13, w2, **SHARED))


def test_a_runner_that_is_closed_while_another_stream_computes_ends_its_call():
    x, side = tokens(0)[0].to(testdevice.NAME), torch.Stream(device=testdevice.NAME)
    torch.accelerator.synchronize()
    torch.ops.testdevice.set_delay_of(0, side.stream_id, 20_000)
    with linear("cpu") as ours:
        runner = linear(testdevice.NAME)
        with side:
            got = by_linear(runner, x)
        runner.close()
        torch.ops.testdevice.set_delay_of(0, side.stream_id, 0)
        # Memory of the weight's size, which is lent again if it was given back.
        others = [torch.full((size,), 255, dtype=torch.uint8, device=testdevice.NAME) for size in (1024, 2048, 4096)]
        side.synchronize()
        assert_same([got], [by_linear(ours, tokens(0)[0])])
    assert len(others) == 3


def test_a_python_function_gets_tensors_of_its_device():
    x = tokens(0)[0]
    made = runners.PythonRunner(lambda x: x[:, :N] * 2, H, N, device=device_of("other"))
    with runners.register(made) as runner:
        got = by_linear(runner, x.to(device_of("other")))
        assert_same([got], [x[:, :N] * 2])


def test_steps_of_a_runner_on_the_device_are_told():
    x, weights, ids = (t.to(testdevice.NAME) for t in tokens(0))
    with mixture(testdevice.NAME, **SHARED) as runner:
        told = quire.explain(quire.nvfp4_moe, x, weights, ids, runner, H)
    products = [step.name for step in told.products]
    assert products == ["expert w13", "expert w2", "shared expert w13", "shared expert w2"]
