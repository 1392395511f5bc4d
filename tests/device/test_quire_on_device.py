"""quire on the device: the CPU's bits, on any stream and device, and the host neither reads nor waits."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import quire
from device import device as testdevice
from device.twins import MODULES, Inputs, assert_same, device_of, reference, stream_of, twin_step, twins
from every_recipe import ALL
from quire import recipe as recipes

RECIPES = {
    "high_precision": None,
    **ALL,
    "fp8_block_2d": recipes.Float8BlockScaling(x_block_scaling_dim=2, w_block_scaling_dim=1),
    "mxfp8_2d": recipes.MXFP8BlockScaling(enable_2d_quantization=True),
    "nvfp4_row_scaled": recipes.NVFP4BlockScaling(row_scaled_activation=True, disable_rht=True),
    "nvfp4_4over6": recipes.NVFP4BlockScaling(nvfp4_4over6="all", disable_rht=True),
    "dequantized": recipes.MXFP8BlockScaling(backward_override="dequantized"),
    "kept_high_precision": recipes.MXFP8BlockScaling(backward_override="high_precision"),
    "custom": recipes.CustomRecipe({"x": "fp8_row", "w": "mxfp4", "dy": "mxfp8:e5m2"}.get),
}
#: Launches by the names of the CPU's kernels, their lists, and products by PyTorch.
of_host_rows = pytest.mark.skipif(not testdevice.HOST_ROWS, reason="asks for launches that CUDA's rows have not")
every_module = pytest.mark.parametrize("name", MODULES)
in_each_class = pytest.mark.parametrize("recipe", ALL.values(), ids=ALL)
PLACES = ["default", "side", "other"]
everywhere = pytest.mark.parametrize("place", PLACES)
#: Every module in every recipe, and each of both in every place.
pairwise = pytest.mark.parametrize(
    ("name", "recipe", "place"),
    [
        pytest.param(name, recipe, place := PLACES[(i + j) % len(PLACES)], id=f"{name}-{text}-{place}")
        for i, name in enumerate(MODULES)
        for j, (text, recipe) in enumerate(RECIPES.items())
    ],
)
products = pytest.mark.parametrize("name", [name for name in MODULES if name != "MoE"])


def synchronize():
    for index in range(testdevice.COUNT):
        torch.accelerator.synchronize(torch.device(testdevice.NAME, index))


def check(name, place, recipe, *, steps=2, options=None, calls=({},), after=lambda module: None, **twins_options):
    """Steps on both, call by call; what the device gives must be the CPU's bits, without a wait."""
    cpu, there = twins(name, device_of(place), **twins_options, **(options or {}))
    ours, theirs = Inputs(name, device_of(place)), Inputs(name)
    for number in range(steps):
        ours.set(number)
        theirs.set(number)
        synchronize()
        testdevice.counts()
        with stream_of(place):
            got = [twin_step(there, ours, recipe, **call) for call in calls][-1] + [after(there)]
            assert testdevice.waits() == {}
            expected = [reference(cpu, theirs, recipe, **call) for call in calls][-1] + [after(cpu)]
            assert_same(got, expected)


# ---- Steps.


@pairwise
def test_a_step_gives_the_bits_of_the_cpu_and_waits_for_nothing(name, recipe, place):
    check(name, place, recipe)


@pytest.mark.parametrize("name", MODULES)
def test_a_delayed_step_with_functions_of_the_user_waits_for_nothing(name):
    recipe = recipes.DelayedScaling(
        amax_compute_algo=lambda history: history.mean(0),
        scaling_factor_compute_algo=lambda amax, scale, largest, recipe: largest / (amax + 1),
    )
    # In a thread of its own: a thread that has such a rule reads which layers ran after it has run graphs.
    with ThreadPoolExecutor(1) as thread:
        thread.submit(check, name, "default", recipe, steps=3).result()


@of_host_rows
@pytest.mark.parametrize("of_w", [True, False])
@everywhere
def test_amaxes_of_a_call_are_collected_by_one_launch(place, of_w):
    amax, x_amax, w_amax = [1.0, 4.0, 5.0, 6.0, 7.0, 8.0], [2.0, float("nan")], [9.0, 3.0]
    usage, rule = torch.tensor([0, 5, 6]), torch.tensor(7)
    given = (torch.tensor(amax), usage, rule, torch.tensor(x_amax), torch.tensor(w_amax))
    on_device = [t.to(device_of(place)) for t in given]
    synchronize()
    testdevice.counts()
    with stream_of(place), testdevice.Launches() as launches:
        torch.ops.quire.delayed_collect_(*on_device[:4], on_device[4] if of_w else None)
    assert testdevice.waits() == {} and launches.names == ["delayed_collect"]
    assert on_device[0].tolist() == [2.0, 4.0, *([9.0, 6.0] if of_w else [5.0, 6.0]), 7.0, 8.0]
    assert on_device[1].tolist() == [7, 5, 6]


@pytest.mark.parametrize("spec", ["mxfp8", "nvfp4", "fp8_tensor", "fp8_block", "fp8_row", "mxfp4", "mxfp8:e5m2"])
@everywhere
def test_codes_are_those_of_the_cpu(spec, place):
    x = torch.randn(48, 64)
    there = x.to(device_of(place))
    testdevice.counts()
    with stream_of(place):
        codes = torch.ops.quire.quantize(there, spec, True, True)
        assert testdevice.waits() == {}
        assert_same(codes, torch.ops.quire.quantize(x, spec, True, True))


@of_host_rows
@pytest.mark.parametrize("recipe", [None, ALL["mxfp8"], ALL["nvfp4"]], ids=["high_precision", "mxfp8", "nvfp4"])
def test_a_stacked_weight_is_one_matrix_and_no_list_of_the_host(recipe):
    lists = {}
    for stacked in (False, True):
        options = {"single_grouped_weight": stacked, "single_grouped_bias": stacked}
        cpu, there = twins("GroupedLinear", testdevice.NAME, **options)
        testdevice.lists()
        got = twin_step(there, Inputs("GroupedLinear", testdevice.NAME), recipe)
        lists[stacked] = testdevice.lists()
        assert_same(got, reference(cpu, Inputs("GroupedLinear"), recipe))
    assert lists[True] == 0 < lists[False]


def test_backward_runs_on_the_stream_of_forward_and_its_caller_waits():
    cpu, there = twins("Linear", testdevice.NAME)
    ours, side = Inputs("Linear", testdevice.NAME), torch.Stream(device=testdevice.NAME)
    x = ours.x.requires_grad_()
    synchronize()
    torch.ops.testdevice.set_delay_of(0, side.stream_id, 5_000)
    with side, quire.autocast(recipe=ALL["mxfp8"]):
        y = there(x)
    with testdevice.Launches() as launches:
        y.backward(ours.dy)
    torch.ops.testdevice.set_delay_of(0, side.stream_id, 0)
    assert set(launches.streams) == {f"0/{side.stream_id}"}
    assert_same([x.grad], reference(cpu, Inputs("Linear"), ALL["mxfp8"])[1:2])
    torch.accelerator.current_stream().wait_stream(side)


@of_host_rows
@pytest.mark.parametrize("bias", [False, True])
@everywhere
def test_plain_products_are_pytorchs_on_the_device_and_stream_of_the_call(place, bias):
    cpu, there = twins("Linear", device_of(place), bias=bias)
    ours, recipe = Inputs("Linear", device_of(place)), RECIPES["kept_high_precision"]
    synchronize()
    testdevice.counts()
    with stream_of(place):
        stream = torch.accelerator.current_stream(device_of(place)).stream_id
        with testdevice.Launches() as launches:
            got = twin_step(there, ours, recipe)
        assert testdevice.waits() == {}
    ran = dict(zip(launches.names, launches.streams, strict=True))
    assert ran["aten::mm.out"] == f"{device_of(place).index}/{stream}" and "matmul" not in ran
    assert_same(got, reference(cpu, Inputs("Linear"), recipe))


# ---- Options.


def with_main_grad(module):
    for parameter in module.parameters():
        if parameter.dim() == 2:
            parameter.main_grad = torch.ones(parameter.shape, device=parameter.device)
    return module


@products
@in_each_class
def test_gradients_are_added_to_main_grad(name, recipe):
    check(name, "side", recipe, options={"fuse_wgrad_accumulation": True}, prepare=with_main_grad)


@products
@in_each_class
def test_kept_codes_of_a_weight_serve_the_next_microbatch(name, recipe):
    check(name, "side", recipe, calls=[{"is_first_microbatch": True}, {"is_first_microbatch": False}])


@products
@in_each_class
def test_delayed_weight_gradients_wait_on_the_device(name, recipe):
    def later(module):
        module.backward_dw()
        return torch.cat([p.grad.reshape(-1) for p in module.parameters()])

    check(name, "other", recipe, options={"delay_wgrad_compute": True}, after=later)


@products
@in_each_class
def test_quantized_parameters_are_read_where_they_lie(name, recipe):
    with quire.quantized_model_init(recipe=recipe):
        check(name, "other", recipe)


@pytest.mark.parametrize("name", ["MoE"])
@pytest.mark.parametrize("capacity", [None, 12])
@pytest.mark.parametrize("weight_on_input", [False, True])
def test_experts_take_their_tokens_without_the_host(name, capacity, weight_on_input):
    routing = {} if capacity is None else {"capacity": capacity}
    options = {"weight_on_input": weight_on_input, "shared_ffn_hidden_size": 32, "expert_bias": True}
    check(name, "side", ALL["nvfp4"], options=options | routing)


def test_stale_codes_of_a_weight_are_reported_when_the_host_waits():
    layer, x = quire.Linear(64, 32, device=testdevice.NAME), torch.ones(16, 64, device=testdevice.NAME)
    with quire.autocast(recipe=ALL["mxfp8"]):
        layer(x, is_first_microbatch=True)
        with torch.no_grad():
            layer.weight.add_(1)
        layer(x, is_first_microbatch=False)
    with pytest.raises(RuntimeError, match="the weight has changed since it was quantized"):
        synchronize()


# ---- Capture.


@every_module
@in_each_class
def test_a_captured_step_is_replayed_on_new_inputs_and_group_sizes(name, recipe):
    cpu, there = twins(name, testdevice.NAME)
    ours, theirs = Inputs(name, testdevice.NAME), Inputs(name)
    twin_step(there, ours, recipe)  # allocates what a first step allocates
    reference(cpu, theirs, recipe)
    with testdevice.Graph() as graph:
        got = twin_step(there, ours, recipe)
    for number in (1, 2, 3):
        ours.set(number)
        theirs.set(number)
        graph.replay()
        assert_same(got, reference(cpu, theirs, recipe))


def test_a_replayed_step_that_saw_nothing_keeps_the_scale_of_the_last_replay():
    cpu, there = twins("Linear", testdevice.NAME)
    ours, theirs = Inputs("Linear", testdevice.NAME), Inputs("Linear")
    twin_step(there, ours, ALL["delayed"])
    reference(cpu, theirs, ALL["delayed"])
    with testdevice.Graph() as graph:
        got = twin_step(there, ours, ALL["delayed"])
    for factor in (8, torch.inf, 1, 0, 1, 1):  # amaxes that are not finite, or 0, leave scales as they are
        for inputs in (ours, theirs):
            inputs.set(1)
            inputs.x.mul_(factor)
        graph.replay()
        assert_same(got, reference(cpu, theirs, ALL["delayed"]))


@products
def test_kept_codes_serve_a_captured_step(name):
    recipe = ALL["nvfp4"]
    cpu, there = twins(name, testdevice.NAME)
    ours, theirs = Inputs(name, testdevice.NAME), Inputs(name)
    twin_step(there, ours, recipe, is_first_microbatch=True)
    reference(cpu, theirs, recipe, is_first_microbatch=True)
    with testdevice.Graph() as graph:
        got = twin_step(there, ours, recipe, is_first_microbatch=False)
    for number in (1, 2, 3):
        ours.set(number)
        theirs.set(number)
        graph.replay()
        assert_same(got, reference(cpu, theirs, recipe, is_first_microbatch=False))


# ---- Compiled.


@every_module
@in_each_class
def test_a_compiled_step_gives_the_bits_of_the_cpu_and_waits_for_nothing(name, recipe):
    torch._dynamo.reset()
    cpu, there = twins(name, testdevice.NAME)
    ours, theirs = Inputs(name, testdevice.NAME), Inputs(name)
    run = torch.compile(lambda x, *extra: there(x, *extra), fullgraph=True, backend="aot_eager")
    for number in range(2):
        ours.set(number)
        theirs.set(number)
        x = ours.x.detach().requires_grad_()
        there.zero_grad()
        synchronize()
        testdevice.counts()
        with quire.autocast(recipe=recipe):
            y = run(x, *ours.extra())
        y.backward(ours.dy)
        if number > 0:  # tracing may do what it likes
            assert testdevice.waits() == {}
        got = [y.detach(), x.grad, *(p.grad for p in there.parameters())]
        assert_same(got, reference(cpu, theirs, recipe))


@in_each_class
def test_compiled_autograd_gives_the_bits_of_the_cpu(recipe):
    torch._dynamo.reset()
    cpu, there = twins("Linear", testdevice.NAME)
    ours = Inputs("Linear", testdevice.NAME)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        got = twin_step(there, ours, recipe)
    assert_same(got, reference(cpu, Inputs("Linear"), recipe))
