"""Every way to run a model that must give the bits of eager mode: one joins by a line of WAYS."""

import contextlib
import copy
import functools
import io
import pickle
import subprocess
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch import distributed
from torch._dynamo.decorators import mark_unbacked
from torch.utils.checkpoint import checkpoint

import quire
from defaults import DEFAULTS
from every_feature import Feature, Model, together
from every_recipe import some
from forks import in_child
from pytorch import NO_AOTINDUCTOR
from ranks import rank_of
from steps import same, step


@dataclass(frozen=True)
class Setting:
    """What ways are made of: the model's recipe; make(), a model like it with other values, where torch makes tensors;
    compiler, for one graph; an empty folder; serve(), the program of examples/serve_cpp; device, where models are."""

    recipe: object
    make: Callable
    compiler: Callable
    folder: Path
    serve: Callable
    device: torch.device

    def another(self):
        return self.make().to(self.device)

    def autocast(self):
        return quire.autocast(self.recipe is not None, recipe=self.recipe)


@dataclass(frozen=True)
class Way:
    """wrap(model, setting) -> what is called, as the model is, in its place: a function, or another module.

    rows: of x in each step. after: how many steps the model has trained before it is wrapped. backward(setting): what
    a backward pass runs within. trains: whether there is one; else y alone is compared, and each call starts from what
    the model was when it was wrapped. one_graph: whether kinds of calls are graphs of `compiler`. costly: whether each
    model costs so much that features share one (every_feature.Together). rounds: whether sums that are not quire's are
    computed otherwise than in eager mode. missing: devices that have no such way, and why.
    """

    wrap: Callable
    rows: Sequence[int] = (24, 24, 24)
    after: int = 1
    backward: Callable = lambda setting: contextlib.nullcontext()
    trains: bool = True
    one_graph: bool = False
    costly: bool = False
    rounds: bool = False
    missing: Mapping[str, str] = field(default_factory=dict)


# ---- Compiled.


def unbacked(model, setting):
    compiled = setting.compiler(model)

    def run(x, **options):
        mark_unbacked(x, 0)
        return compiled(x, **options)

    return run


def compiled_autograd(setting):
    return torch._dynamo.compiled_autograd._enable(setting.compiler)


def offloaded(function):
    """As activation offloading does: backward gets copies of what forward has saved."""

    def run(x, **options):
        with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda t: t):
            return function(x, **options)

    return run


# ---- Another module, or a module that was elsewhere.


def saved(model, setting):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def _states_of(model, into):
    """What a checkpoint needs beside state_dict."""
    quire.set_rng_state(into, quire.rng_state(model))
    quire.set_delayed_state(into, quire.delayed_state(model))
    return into


def state_dict(model, setting):
    file, other = io.BytesIO(), setting.another()
    torch.save(model.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file))
    return _states_of(model, other)


def assigned(model, setting):
    with torch.device("meta"):
        other = setting.make()
    other.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    return _states_of(model, other)


def emptied(model, setting):
    with torch.device("meta"):
        other = setting.make()
    other.to_empty(device=setting.device).load_state_dict(model.state_dict())
    return _states_of(model, other)


# ---- Another caller.


def functional_call(model, setting):
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    return lambda x, **options: torch.func.functional_call(model, tensors, (x,), options)


def checkpointed(reentrant):
    def wrap(model, setting):
        return lambda x, **options: quire.checkpoint(model, x, use_reentrant=reentrant, **options)

    return wrap


def checkpointed_by_pytorch(model, setting):
    return lambda x, **options: checkpoint(model, x, use_reentrant=False, **options)


def in_a_thread(model, setting):
    def work(x, options):
        with setting.autocast():
            return model(x, **options)

    thread = ThreadPoolExecutor(1)
    return lambda x, **options: thread.submit(work, x, options).result()


def within(context, prepare=lambda model: model):
    """In a context, a copy of what the model was."""

    def wrap(model, setting):
        def run(x, **options):
            other = copy.deepcopy(model)
            prepare(other)
            with context():
                return other(x, **options)

        return run

    return wrap


def in_two_threads(model, setting):
    def run(x, **options):
        shared = copy.deepcopy(model)

        def work():
            with torch.no_grad(), setting.autocast():
                return shared(x, **options)

        with ThreadPoolExecutor(2) as threads:
            one, other = (future.result() for future in [threads.submit(work) for _ in range(2)])
        assert torch.equal(one, other)
        return one

    return run


def forked(model, setting):
    def run(x, **options):
        def work():
            with torch.no_grad():
                return pickle.dumps(model(x, **options).numpy())

        return torch.from_numpy(pickle.loads(in_child(work)))

    return run


# ---- Exported.


def exported(model, setting, **options):
    class Bound(torch.nn.Module):
        """With the recipe, as a program is exported."""

        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, x):
            with setting.autocast():
                return self.model(x, **options)

    shapes = {"x": {0: torch.export.Dim.DYNAMIC}}
    with torch.no_grad():
        return torch.export.export(Bound(), (torch.randn(24, 64, device=setting.device),), dynamic_shapes=shapes)


def program(then):
    """Exported, and then what turns the program into a function. A program serves one kind of call."""

    def wrap(model, setting):
        found = {}

        def run(x, **options):
            key = str(options)
            if key not in found:
                frozen = copy.deepcopy(model).requires_grad_(False)
                found[key] = then(exported(frozen, setting, **options), setting)
            return found[key](x)

        return run

    return wrap


def in_each_form(exported_program, setting):
    """As it is, saved and loaded, and decomposed, which must say the same."""
    file = io.BytesIO()
    torch.export.save(exported_program, file)
    file.seek(0)
    forms = [exported_program, torch.export.load(file), exported_program.run_decompositions()]
    modules = [form.module() for form in forms]

    def run(x):
        y, *others = (module(x) for module in modules)
        assert all(torch.equal(y, other) for other in others)
        return y

    return run


def packaged(exported_program, setting):
    """By AOTInductor, called from Python and from a program in C++, which must say the same. That one has no groups of
    processes."""
    path = str(setting.folder / "model.pt2")
    run = torch._inductor.aoti_load_package(
        torch._inductor.aoti_compile_and_package(exported_program, package_path=path)
    )

    def served(x):
        y = run(x)
        torch.save([x, y], setting.folder / "model.cases.pt")
        command = [setting.serve(), setting.folder, "model"]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert done.returncode == 0 and done.stdout.endswith(", equal to Python\n"), done.stdout
        return y

    return run if distributed.is_initialized() else served


def inference(wrap, **options):
    return Way(wrap, rows=(24, 1, 40), trains=False, **options)


NO_PACKAGE = {"quiretest": "what Inductor writes for this device is called from Python alone"} | NO_AOTINDUCTOR
NO_CHILDREN = {"quiretest": "the device's threads are the parent's"}
WAYS = {
    "fullgraph": Way(lambda model, setting: setting.compiler(model), after=0, one_graph=True),
    "unbacked": Way(unbacked, rows=(24, 1, 40), after=0, one_graph=True),
    "inductor": Way(
        lambda model, setting: setting.compiler(model, backend="inductor"),
        after=0,
        one_graph=True,
        rounds=True,
    ),
    "activation offloading": Way(lambda model, _: offloaded(model)),
    "fullgraph, activation offloading": Way(
        lambda model, setting: offloaded(setting.compiler(model)), after=0, one_graph=True
    ),
    "compiled autograd": Way(lambda model, _: model, after=0, backward=compiled_autograd),
    "deepcopy": Way(lambda model, _: copy.deepcopy(model)),
    "pickle": Way(lambda model, _: pickle.loads(pickle.dumps(model))),
    "torch.save": Way(saved),
    "state_dict": Way(state_dict),
    "meta, assign": Way(assigned),
    "meta, to_empty": Way(emptied),
    "float64 and back": Way(lambda model, _: model.double().float()),
    "to the CPU and back": Way(lambda model, setting: model.to("cpu").to(setting.device)),
    "functional_call": Way(functional_call),
    "quire.checkpoint": Way(checkpointed(False)),
    "quire.checkpoint, reentrant": Way(checkpointed(True)),
    "torch.utils.checkpoint": Way(checkpointed_by_pytorch, backward=Setting.autocast),
    "a thread": Way(in_a_thread),
    "no_grad": inference(within(torch.no_grad)),
    "inference_mode": inference(within(torch.inference_mode)),
    "two threads": inference(in_two_threads),
    "fork": inference(forked, missing=NO_CHILDREN),
    "export": inference(program(in_each_form)),
    "AOTInductor": inference(program(packaged), costly=True, rounds=True, missing=NO_PACKAGE),
}


# ---- What is compared.

#: Of inputs as they are made, whatever the defaults are.
PLAIN = {"dtype": torch.float32, "device": "cpu"}


def inputs(index, rows, device):
    generator = torch.Generator().manual_seed(index)
    return (torch.randn(rows, 64, generator=generator, **PLAIN) * 4.0**index).to(device), generator


def train_in(model, setting, steps, *, function=None, backward=contextlib.nullcontext):
    """Of each step, (index, rows, options), y, the gradient of x, and of every parameter; at last what went into
    main_grad."""
    results = []
    for index, rows, options in steps:
        x, generator = inputs(index, rows, setting.device)

        def dy(y, generator=generator):
            return torch.randn(y.shape, generator=generator, **PLAIN).to(setting.device)

        results += step(model, x, setting.recipe, function=function, dy=dy, backward=backward, **options)
    return results + [p.main_grad for p in model.parameters() if hasattr(p, "main_grad")]


def infer(function, setting, steps):
    """Of each step y."""
    results = []
    for index, rows, options in steps:
        with setting.autocast():
            results.append(function(inputs(index, rows, setting.device)[0], **options).detach())
    return results


# ---- Features in every way.

#: What a way may see of a recipe: none, specs, a random state, delayed state. Tests of eager mode have all recipes.
RECIPES = some("high_precision", "mxfp8", "nvfp4", "delayed")
#: What compiled autograd does not trace yet: a mixture's backward pass, and that of a checkpointed layer.
NOT_TRACED_BACKWARD = ("MoE", "checkpointed", "LayerNormMLP, all at once", "LayerNormMLP, microbatches")
#: Ways that drop the codes of a first microbatch, which under delayed scaling differ from those made again.
WITHOUT_KEPT_CODES = ("state_dict", "meta, assign", "meta, to_empty", "float64 and back", "to the CPU and back")


def quantized(feature):
    return "quantized parameters" in feature or "stack" in feature


def allowed(feature, way, recipe):
    if way == "compiled autograd" and any(part in feature for part in NOT_TRACED_BACKWARD):
        return False
    if way == "unbacked" and "ring" in feature:
        return False  # the number of rows decides whether codes or values are exchanged
    if way == "inductor" and ("MoE" in feature or recipe == "high_precision"):
        return False  # Inductor's own sums of products differ in last bits; for MoE see nn/test_moe.py
    if way == "float64 and back" and quantized(feature):
        return False  # refused
    if recipe == "high_precision":
        return not quantized(feature)  # nothing says how to quantize them
    if recipe == "delayed":
        if way == "torch.utils.checkpoint":
            return False  # what it computes again is another step; see delayed/test_checkpoint.py
        return "x kept" not in feature and ("microbatches" not in feature or way not in WITHOUT_KEPT_CODES)
    return True


@dataclass(frozen=True)
class Table:
    """features: by name. together: those that share a model in costly ways, by a name for all of them: whether they are
    sharded. allowed(feature, way, recipe): whether these names are a case."""

    features: Mapping[str, Feature]
    together: Mapping[str, bool]
    allowed: Callable[[str, str, str], bool] = allowed

    def cases(self) -> list:
        """Every feature in every way, and each of both under every recipe. Of costly ways one model has all features,
        and takes the recipes with most state. Devices other than the CPU have some of the cases: every feature and
        every way under every recipe."""
        found = []
        for i, feature in enumerate(self.features):
            for j, way in enumerate(way for way in WAYS if not WAYS[way].costly):
                names = [list(RECIPES)[(i + j + k) % len(RECIPES)] for k in range(len(RECIPES))]
                found += [(feature, way, name) for name in names if self.allowed(feature, way, name)][:1]
        own = zip(self.together, ("nvfp4", "delayed"), strict=False)
        costly = [(which, way, name) for which, name in own for way in WAYS if WAYS[way].costly]
        some = self.of_devices(found)
        cases = [case if case in some else pytest.param(*case, marks=pytest.mark.off_devices) for case in found]
        return cases + [pytest.param(*case, marks=pytest.mark.slow) for case in costly]

    def of_devices(self, cases: list[tuple[str, str, str]]) -> set[tuple[str, str, str]]:
        """Those with a feature or a way that no other of them has under that recipe. What a device lacks shows nothing
        of what it is combined with."""
        shown = {
            (feature, way, recipe): ({(way, recipe)} if not self.features[feature].missing else set())
            | ({(feature, recipe)} if not WAYS[way].missing else set())
            for feature, way, recipe in cases
        }
        some, seen = set(), set()
        for most in (2, 1):  # the first time those that show two things
            for case, pairs in shown.items():
                if len(pairs - seen) >= most:
                    some.add(case)
                    seen |= pairs
        return some

    def feature(self, name: str, way: str, recipe: str) -> Feature:
        if name in self.features:
            return self.features[name]
        own = [
            one
            for one in self.features
            if self.features[one].sharded == self.together[name] and self.allowed(one, way, recipe)
        ]
        return together([self.features[one] for one in own])


def check(feature: Feature, way: Way, setting: Setting, compare: Callable) -> None:
    """Calls compare(found, expected) with what a model of the feature gives this way, and another in eager mode."""
    eager, model = _models(setting)
    sizes = [max(rows, feature.fewest) for rows in way.rows]
    steps = [(index, rows, feature.calls[index if way.trains else 0]) for index, rows in enumerate(sizes)]
    for each in (eager, model):
        feature.ready(each)
        train_in(each, setting, steps[: way.after])
    function = way.wrap(model, setting)
    if not way.trains:
        reference = within(torch.enable_grad, feature.ready)(eager, setting)
        return compare(infer(function, setting, steps), infer(reference, setting, steps))
    trained = function if isinstance(function, torch.nn.Module) else model
    for each in (eager, trained):
        feature.ready(each)
    expected = train_in(eager, setting, steps[way.after :])
    found = train_in(
        trained, setting, steps[way.after :], function=function, backward=functools.partial(way.backward, setting)
    )
    return compare(found, expected)


def _models(setting: Setting) -> list[torch.nn.Module]:
    found = []
    for _ in range(2):
        torch.manual_seed(0)
        found.append(setting.another())
    torch.manual_seed(1)
    return found


def gives_the_bits_of_eager_mode(feature, name, recipe, surroundings):
    """Whether a feature does in the way of that name, in one graph for each kind of calls where there are graphs.
    surroundings: compiler, folder, serve and device of the Setting."""
    way, device = WAYS[name], surroundings["device"]
    if why := way.missing.get(device.type) or feature.missing.get(device.type):
        pytest.skip(why)
    # cuBLAS has a workspace for each thread, and its choice of a sum's order follows from it.
    rounds = way.rounds or (device.type, name) == ("cuda", "two threads")

    def compare(found, expected):
        if rounds and recipe == "high_precision":
            close = [(a - b).norm() <= 1e-3 * b.norm() for a, b in zip(found, expected, strict=True)]
            assert all(close)
        else:
            assert same(found, expected)

    # The group of a sharded feature is the fake one, which gives what this process sends for what others send.
    with rank_of(0, 2, device.type) if feature.sharded else contextlib.nullcontext():
        setting = Setting(RECIPES[recipe], lambda: Model(feature.make(RECIPES[recipe])), **surroundings)
        check(feature, way, setting, compare)
    if way.one_graph:
        assert surroundings["compiler"].graphs == feature.graphs


# ---- Features under a default of the process.

STEPS = 3


def allowed_under(feature, recipe, default):
    if default == "float64" and (quantized(feature) or feature == "converted"):
        return False  # codes are made of narrower values, and convert() leaves such a layer as it is
    if recipe == "high_precision":
        return not quantized(feature)
    return recipe != "delayed" or "x kept" not in feature


def setting(recipe):
    return Setting(recipe, None, None, None, None, torch.device("cpu"))


def trained_under(made: Feature, recipe, default: str) -> tuple[list, list]:
    """What a model gives that was made and trained under a default (defaults.py), and one that was not."""
    if why := made.missing.get("cpu"):
        pytest.skip(why)
    sizes = [max(24, made.fewest)] * STEPS
    steps = [(i, rows, made.calls[i]) for i, rows in enumerate(sizes)]
    with rank_of(0, 2) if made.sharded else contextlib.nullcontext():
        torch.manual_seed(0)
        reference = Model(made.make(recipe))
        states = reference.state_dict(), quire.rng_state(reference)
        with DEFAULTS[default]():
            model = Model(made.make(recipe))
            if default == "meta":
                assert all(parameter.is_meta for parameter in model.parameters())
                model.to_empty(device="cpu")
            else:
                model.float()
            model.load_state_dict({name: value.clone() for name, value in states[0].items()})
            quire.set_rng_state(model, states[1])
            made.ready(model)
            found = train_in(model, setting(recipe), steps)
        made.ready(reference)
        return found, train_in(reference, setting(recipe), steps)
