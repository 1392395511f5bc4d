"""torch.compile with Inductor on the device: quire's operators between kernels that Inductor wrote, launched on the
stream of the call. The bits are those of the CPU in eager mode: what Inductor fuses here rounds nothing."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._inductor.utils import run_and_get_code

import quire
from device import device as testdevice
from device.twins import MODULES, Inputs, assert_same, device_of, reference, stream_of, twins
from every_recipe import ALL

pytestmark = pytest.mark.slow  # Inductor compiles C++
RECIPES = list(ALL)
#: A Linear in every recipe, and every module in some.
CASES = [("Linear", name) for name in RECIPES]
CASES += [(module, RECIPES[(2 * i + j) % len(RECIPES)]) for i, module in enumerate(MODULES) if i for j in range(2)]


class Between(torch.nn.Module):
    """A module between operators of PyTorch that are exact: Inductor makes kernels of them, which write where quire's
    operators have read, and read what these have written."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x, *extra, **options):
        y = self.module(torch.relu(x) * 2, *extra, **options)
        return torch.where(y > 0, y, y * 0.5)


def between(module):
    return Between(module).to(next(module.parameters()).device)


@pytest.fixture(autouse=True)
def own_graphs():
    torch._dynamo.reset()


def compiled_step(run, module, inputs, recipe):
    """What twin_step gives, by the compiled function `run`."""
    x = inputs.x.detach().requires_grad_()
    module.zero_grad()
    with quire.autocast(recipe=recipe):
        y = run(x, *inputs.extra())
    y.backward(inputs.dy)
    return [y.detach(), x.grad, *(p.grad for p in module.parameters())]


def synchronize():
    for index in range(testdevice.COUNT):
        torch.accelerator.synchronize(torch.device(testdevice.NAME, index))


def check(name, recipe, place):
    cpu, there = twins(name, device_of(place), prepare=between)
    ours, theirs = Inputs(name, device_of(place)), Inputs(name)
    run = torch.compile(there, fullgraph=True)
    for number in range(2):
        ours.set(number)
        theirs.set(number)
        synchronize()
        testdevice.counts()
        with stream_of(place), testdevice.Launches() as launches:
            stream = torch.accelerator.current_stream(device_of(place)).stream_id
            got = compiled_step(run, there, ours, ALL[recipe])
        if number > 0:  # tracing may do what it likes
            assert testdevice.waits() == {}
            assert set(launches.streams) == {f"{device_of(place).index}/{stream}"}
        assert len([name for name in launches.names if name.startswith("cpp_fused")]) >= 3
        assert_same(got, reference(cpu, theirs, ALL[recipe]))


@pytest.mark.parametrize(("name", "recipe"), CASES)
def test_a_step_gives_the_bits_of_the_cpu_and_waits_for_nothing(name, recipe):
    check(name, recipe, "default")


@pytest.mark.parametrize(("name", "recipe"), [("Linear", "nvfp4"), ("LayerNormMLP", "mxfp8")])
@pytest.mark.parametrize("place", ["side", "other"])
def test_a_step_runs_on_the_device_and_the_stream_of_its_call(name, recipe, place):
    check(name, recipe, place)


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4"])
def test_one_graph_serves_every_number_of_rows(recipe):
    cpu, there = twins("Linear", testdevice.NAME, prepare=between)
    compiler = CompileCounterWithBackend("inductor")
    run = torch.compile(there, fullgraph=True, backend=compiler)
    for rows in (48, 2, 33, 64, 5):
        ours, theirs = Inputs("Linear", testdevice.NAME), Inputs("Linear")
        for inputs in (ours, theirs):
            inputs.x, inputs.dy = inputs.x[:rows], inputs.dy[:rows]
        assert_same(compiled_step(marked_dynamic(run), there, ours, ALL[recipe]), reference(cpu, theirs, ALL[recipe]))
    assert compiler.frame_count == 1


def marked_dynamic(run):
    def call(x):
        torch._dynamo.mark_dynamic(x, 0)
        return run(x)

    return call


def test_a_captured_step_is_replayed_on_new_inputs():
    cpu, there = twins("GroupedLinear", testdevice.NAME, prepare=between)
    ours, theirs = Inputs("GroupedLinear", testdevice.NAME), Inputs("GroupedLinear")
    run, recipe = torch.compile(there, fullgraph=True), ALL["nvfp4"]
    compiled_step(run, there, ours, recipe)
    reference(cpu, theirs, recipe)
    with testdevice.Graph() as graph:
        got = compiled_step(run, there, ours, recipe)
    for number in (1, 2, 3):
        ours.set(number)
        theirs.set(number)
        graph.replay()
        assert_same(got, reference(cpu, theirs, recipe))


def test_inference_writes_where_an_operator_of_quire_has_written():
    """Inductor may use an operator's result as memory of its own kernel, which eager mode does not."""
    cpu, there = twins("Linear", testdevice.NAME, prepare=between)
    code = []
    with torch.no_grad(), quire.autocast(recipe=ALL["mxfp8"]):
        x = Inputs("Linear", testdevice.NAME).x
        y, code[:] = run_and_get_code(torch.compile(there, fullgraph=True), x)
        expected = cpu(Inputs("Linear").x)
    assert_same([y], [expected])
    assert "in_out_ptr" in code[0] and "torch.ops.quire.linear.default(" in code[0]
