"""What a tool computes does not depend on what is active around its call, and that is afterwards as it was."""

import contextlib
import warnings

import pytest
import torch

import quire
import quire.info
import quire.io
from every_recipe import DELAYED
from quire.delayed.rules import THREAD
from quire.nn.own_context import own_context, running

N = 64
STATIC = "x=nvfp4:global=mul:given,w=nvfp4,dy=nvfp4"


class Net(torch.nn.Module):
    """Blocks that gptq takes one after another, a layer of quire in it, and dropout."""

    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(
            torch.nn.Sequential(kind(N, N), torch.nn.ReLU(), torch.nn.Dropout(0.5))
            for kind in (torch.nn.Linear, quire.Linear)
        )
        self.head = torch.nn.Linear(N, N, bias=False)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def net():
    torch.manual_seed(0)
    model = Net()
    model.blocks[1].eval()  # as a part that is not trained
    return model


def batches():
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(48, N, generator=generator) for _ in range(2)]


def by_bytes(value):
    """What can be compared by ==, of tensors every byte."""
    if isinstance(value, torch.nn.Module):
        return [by_bytes(value.state_dict()), [(name, type(m), m.training) for name, m in value.named_modules()]]
    if isinstance(value, quire.QuantizedTensor):
        return [value.spec_text, value.dtype, value.is_inference(), by_bytes(value.buffers())]
    if isinstance(value, torch.Tensor):
        return [value.dtype, tuple(value.shape), value.is_inference(), value.view(torch.uint8).tolist()]
    if isinstance(value, dict):
        return {name: by_bytes(one) for name, one in value.items()}
    return value


def recommended(goal):
    def tool(model, folder):
        found = quire.recommend(model, 4, goal, min_features=1)
        return sorted((one.name, one.weight_bytes if goal == "memory" else 0) for one in found.estimates)

    return tool


def converted(recipe, **options):
    def tool(model, folder):
        return quire.convert(model, recipe, min_features=1, **options)

    return tool


def timed(model, folder):
    """Which layers it converts depends on the machine."""
    with contextlib.suppress(ValueError):
        quire.convert(model, "mxfp8", min_features=1, for_inference=True, tokens=4)


def quantized(recipe, method="rtn", with_batches=False):
    def tool(model, folder):
        return quire.quantize_model(model, recipe, INPUTS if with_batches else None, method)

    return tool


def calibrated(model, folder):
    report = quire.calibrate(model, INPUTS, "nvfp4")
    return [(one.name, one.amax, one.input_scale, one.rows) for one in report.layers]


def applied(model, folder):
    model = quire.convert(model, STATIC, min_features=1)
    return REPORT.apply(model)


def loaded(model, folder):
    quire.io.load(model, folder)
    return model


def ran(model, folder):
    return [vars(one) for one in quire.io.run(folder).layers]


TOOLS = {
    "recommend": recommended("inference"),
    "recommend for training": recommended("training"),
    "recommend for memory": recommended("memory"),
    "convert": converted("nvfp4"),
    "convert for inference": converted("nvfp4", for_inference=True, tokens=None),
    "convert with a static scale": converted(STATIC, for_inference=True, tokens=None),
    "convert, timed": timed,
    "quantize_model": quantized("mxfp8"),
    "quantize_model 4over6": quantized("nvfp4", "4over6"),
    "quantize_model gptq": quantized("nvfp4", "gptq", True),
    "quantize_model gptq mxfp8": quantized("mxfp8", "gptq", True),
    "quantize_model static": quantized(STATIC, with_batches=True),
    "calibrate": calibrated,
    "apply": applied,
    "io.load": loaded,
    "io.run": ran,
    "io.verify": lambda model, folder: quire.io.verify(folder).state(),
    "io.diff": lambda model, folder: quire.io.diff(folder, folder).state(),
    "info": lambda model, folder: [quire.info.why_not(quire.recipe.from_name(n), "cpu") for n in quire.recipe.names()],
}


@contextlib.contextmanager
def default_dtype(dtype):
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextlib.contextmanager
def default_device(device):
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextlib.contextmanager
def deterministic():
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextlib.contextmanager
def drawn_from():
    with torch.random.fork_rng():
        torch.manual_seed(77)
        yield


STATES = {
    "quire.autocast": lambda: quire.autocast(recipe="mxfp8"),
    "quire.autocast with scales of steps": lambda: quire.autocast(recipe=DELAYED),
    "quire.autocast disabled": lambda: quire.autocast(enabled=False),
    "quire.autocast calibrating": lambda: quire.autocast(enabled=False, calibrating=True, recipe=DELAYED),
    "torch.autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "bfloat16": lambda: default_dtype(torch.bfloat16),
    "float16": lambda: default_dtype(torch.float16),
    "float64": lambda: default_dtype(torch.float64),
    "meta": lambda: default_device("meta"),
    "a device of a block": lambda: torch.device("meta"),
    "deterministic": deterministic,
    "random numbers": drawn_from,
}
#: Each state, with others that tools must not confuse it with.
TOGETHER = [
    ("quire.autocast", "no_grad", "bfloat16", "deterministic"),
    ("quire.autocast with scales of steps", "inference_mode", "meta"),
    ("quire.autocast disabled", "float16", "random numbers"),
    ("quire.autocast calibrating", "float64", "deterministic"),
    ("torch.autocast", "inference_mode", "a device of a block"),
]
together = pytest.mark.parametrize("states", TOGETHER, ids=" and ".join)


@contextlib.contextmanager
def within(states):
    with contextlib.ExitStack() as stack:
        for state in states:
            stack.enter_context(STATES[state]())
        yield


def test_every_state_is_there():
    assert {state for states in TOGETHER for state in states} == STATES.keys()


def surroundings(model):
    return [
        quire.active_recipe(),
        THREAD.steps[0],
        THREAD.depth,
        [torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), torch.is_autocast_cache_enabled()],
        [torch.is_grad_enabled(), torch.is_inference_mode_enabled()],
        [torch.get_default_dtype(), torch.get_default_device()],
        [torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()],
        torch.get_rng_state().tolist(),
        [module.training for module in model.modules()],
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("checkpoint") / "quantized"
    quire.io.save(quire.quantize_model(net(), "mxfp8"), path, dialect="quire")
    return path


INPUTS = batches()
REPORT = quire.calibrate(net(), INPUTS, "nvfp4")


def result(tool, model, folder):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return tool(model, folder)


@pytest.fixture(scope="module")
def plainly(folder):
    """The result of each tool with nothing around it."""
    return {name: by_bytes(result(tool, net(), folder)) for name, tool in TOOLS.items()}


@pytest.fixture(autouse=True)
def shortly(monkeypatch):
    monkeypatch.setattr("quire.conversion.timing.SECONDS", 0.0)


@pytest.mark.parametrize("name", TOOLS)
@together
def test_a_tool_gives_the_same_bytes_wherever_it_is_called_and_leaves_its_caller_alone(name, states, folder, plainly):
    model = net()
    with within(states):
        before = surroundings(model)
        found = result(TOOLS[name], model, folder)
        assert surroundings(model) == before
    assert by_bytes(found) == plainly[name]


RUNNING_A_MODEL = ["calibrate", "quantize_model gptq", "quantize_model static"]


@pytest.mark.parametrize("name", RUNNING_A_MODEL)
@together
def test_a_tool_that_fails_leaves_its_caller_alone(name, states, monkeypatch):
    model = net()
    monkeypatch.setitem(globals(), "INPUTS", [*INPUTS, torch.full((2, N), torch.nan)])
    with within(states):
        before = surroundings(model)
        with pytest.raises(ValueError, match="is not finite"):
            TOOLS[name](model, None)
        assert surroundings(model) == before


@pytest.mark.parametrize("name", RUNNING_A_MODEL)
def test_the_callers_model_runs_with_its_defaults_and_outside_of_its_autocasts(name):
    seen = []

    def note(*_):
        no_modes = not (
            torch.is_grad_enabled() or torch.is_inference_mode_enabled() or torch.is_autocast_enabled("cpu")
        )
        defaults = torch.get_default_dtype(), torch.get_default_device(), torch.are_deterministic_algorithms_enabled()
        seen.append((quire.active_recipe(), no_modes, *defaults, model.training, torch.get_rng_state().tolist()))

    model = net()
    model.register_forward_pre_hook(note)
    with (
        quire.autocast(recipe="nvfp4"),
        torch.autocast("cpu", torch.bfloat16),
        torch.inference_mode(),
        default_dtype(torch.bfloat16),
        torch.device("meta"),
        deterministic(),
    ):
        TOOLS[name](model, None)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        drawn = torch.get_rng_state().tolist()
    assert seen and all(one == (None, True, torch.bfloat16, torch.device("meta"), True, False, drawn) for one in seen)


def test_what_belongs_to_the_process_is_not_changed_for_a_while():
    """Other threads would see it, and two tools that overlap would put back each other's settings."""
    generator = torch.cuda._lazy_seed_tracker.get_calls()
    with default_dtype(torch.bfloat16), running():
        assert torch.get_default_dtype() == torch.bfloat16
        assert torch.cuda._lazy_seed_tracker.get_calls() == generator, "PyTorch seeds a device with it when it is used"
    with default_dtype(torch.float64), own_context():
        assert torch.get_default_dtype() == torch.float64
