"""Layers of one process and the same layers sharded over processes, for functions that tests/ranks.py runs."""

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import distributed
from torch.distributed.tensor import DTensor

import quire
from every_recipe import STATIC, TABLE
from quire.distributed import Parallel
from quire.recipe import DelayedScaling
from ranks import here

IN, OUT, STEPS = 256, 256, 3
#: Under the last one a step does not reduce amaxes, so layers alone can.
RECIPES = TABLE | STATIC | {"delayed_of_each_rank": DelayedScaling(amax_history_len=4, reduce_amax=False)}
#: Of the outputs.
PARTS = {"q": 128, "k": 96, "v": 32}


@dataclass(frozen=True)
class Case:
    """kind: of KINDS. tokens: sizes of x before its features, in one process. options: of the layer's constructor.
    call: options of its forward. way: how it is run, of WAYS."""

    recipe: str
    kind: str = "Linear"
    mode: str = "column"
    sequence: bool = False
    tokens: tuple[int, ...] = (64,)
    options: Mapping[str, object] = field(default_factory=dict)
    call: Mapping[str, object] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    way: str = "eager"

    def make(self, parallel):
        return self.make_with(parallel=parallel)

    def make_with(self, **division):
        torch.manual_seed(0)
        layer = self.layer(params_dtype=self.dtype, **division, **self.options)
        for name, state in layer.sr_states().items():  # whose seeds depend on the rank, as they should
            state.copy_(torch.tensor([7 + len(name), 0]))
        return here(with_scales(layer, RECIPES[self.recipe]))

    def layer(self, **options):
        return KINDS[self.kind](**options)

    def sums(self):
        """Results that are sums over processes, rounded once more than in one process."""
        if self.way.startswith("exact"):
            return set()
        found = {"y"} if self.mode == "row" or "MLP" in self.kind else set()
        found |= {"dx", "layer_norm_weight", "layer_norm_bias"} if self.mode == "column" else set()
        biases = {"bias", *(f"{name}_bias" for name in PARTS)}
        if self.sequence:
            found |= {"fc2_bias"} if self.mode == "column" else biases
        # Without a recipe the whole layer is torch's, which adds the rows of dy in another order.
        return found | (biases | {"fc1_bias", "fc2_bias"} if RECIPES[self.recipe] is None else set())

    def parts(self):
        """Sizes of the parts of the outputs that are sharded each by itself."""
        if "swiglu" in self.kind:
            return (OUT, OUT)
        return tuple(PARTS.values()) if "parts" in self.kind else (OUT,)


KINDS: dict[str, Callable[..., torch.nn.Module]] = {
    "Linear": lambda **options: quire.Linear(IN, OUT, **options),
    "Linear of parts": lambda parallel, **options: quire.Linear(
        IN, OUT, parallel=parallel and parallel.of_parts(*PARTS.values()), **options
    ),
    "LayerNormLinear": lambda **options: quire.LayerNormLinear(IN, OUT, normalization="RMSNorm", **options),
    "LayerNormMLP": lambda **options: quire.LayerNormMLP(IN, OUT, **options),
    "LayerNormMLP swiglu": lambda **options: quire.LayerNormMLP(IN, OUT, activation="swiglu", **options),
}


#: A static scale that values of some units exceed.
_LEAST = {"fp8_tensor": 0.005, "nvfp4:global=mul": 0.001, "nvfp4": 2.5}


def with_scales(model, recipe):
    """The model. Where x has a static scale under the recipe, its layers have some, beyond which there are values."""
    for layer in model.modules() if recipe is not None and recipe.static_input else ():
        if hasattr(layer, "products"):
            layer.recipe = recipe
            layer.add_input_scales()
            least = next(value for spec, value in _LEAST.items() if recipe.input_spec.startswith(spec))
            groups = torch.tensor(layer.own_groups() if hasattr(layer, "own_groups") else [0])
            for scale in layer.buffers(recurse=False):
                scale.copy_(least * (1 + groups / 4))
    return model


#: Of layers' constructors.
OPTIONS = [
    {"bias": False},
    {"save_original_input": True},
    {"fuse_wgrad_accumulation": True},
    {"delay_wgrad_compute": True},
    {"delay_wgrad_compute": True, "fuse_wgrad_accumulation": True},
]


def chunk(t, axis):
    return t.detach().chunk(distributed.get_world_size(), axis)[distributed.get_rank()].clone()


def part_of_outputs(case, t, axis=0):
    return torch.cat([chunk(part, axis) for part in t.split(case.parts(), axis)], axis)


def part_of(case, name, t):
    """What this process has of x, y, their gradients, and of a parameter or its gradient."""
    outside = {"x": "row", "dx": "row", "y": "column", "dy": "column"}
    if name in outside:
        if case.mode == outside[name] and "MLP" not in case.kind:
            return chunk(t, -1) if name in ("x", "dx") else part_of_outputs(case, t, -1)
        return chunk(t, 0) if case.sequence else t.detach().clone()
    if name.startswith("layer_norm") or name == "fc2_bias" or (name.endswith("bias") and case.mode == "row"):
        return t
    if case.mode == "column" and name in ("weight", "bias", "fc1_weight", "fc1_bias"):
        return part_of_outputs(case, t)
    return chunk(t, 1 if name == "fc2_weight" or case.mode == "row" else 0)


def passes(layer, xs, dys, recipe, run=None, **call):
    """name -> values, of each step."""
    found = []
    for x, dy in zip(xs, dys, strict=True):
        x = x.clone().requires_grad_()
        for name in layer.weight_names if layer.fuse_wgrad_accumulation else ():
            layer.get_parameter(name).main_grad = torch.zeros_like(layer.get_parameter(name))
        with quire.autocast(enabled=recipe is not None, recipe=recipe):
            y = (layer if run is None else run)(x, **call)
        layer.zero_grad()
        y.backward(dy)
        layer.backward_dw()
        grads = {name: gradient(parameter).clone() for name, parameter in layer.named_parameters()}
        found.append({"y": y.detach(), "dx": x.grad} | grads)
    return found


def gradient(parameter):
    grad = getattr(parameter, "main_grad", parameter.grad)
    return grad.to_local() if isinstance(grad, DTensor) else grad


def compiled(layer):
    torch.compiler.reset()
    return torch.compile(layer, fullgraph=True, backend="aot_eager")


def checkpointed(layer):
    return lambda x, **call: quire.checkpoint(layer, x, use_reentrant=False, **call)


def in_two_microbatches(layer):
    """The second of which uses the codes of the first."""

    def run(x):
        with torch.no_grad():
            layer(x, is_first_microbatch=True)
        return layer(x, is_first_microbatch=False)

    return run


def with_kept_codes(layer):
    def run(x):
        quire.quantize_weights(layer)
        return layer(x)

    return run


def exact(layer):
    def run(x, **call):
        with quire.distributed.exact():
            return layer(x, **call)

    return run


def exact_and_compiled(layer):
    return exact(compiled(layer))


#: How the sharded layer is run.
WAYS: dict[str, Callable[[torch.nn.Module], Callable[..., torch.Tensor] | None]] = {
    "eager": lambda layer: None,
    "in two microbatches": in_two_microbatches,
    "with kept codes": with_kept_codes,
    "compiled": compiled,
    "checkpointed": checkpointed,
    "exact": exact,
    "exact and compiled": exact_and_compiled,
}


def data(case):
    generator = torch.Generator().manual_seed(1)
    return [
        [here(torch.randn(*case.tokens, size, generator=generator).to(case.dtype)) for _ in range(STEPS)]
        for size in (IN, IN if "MLP" in case.kind else OUT)
    ]


def compare(case, found, expected):
    for step, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert one.keys() == other.keys()
        for name, value in one.items():
            wanted = part_of(case, name, other[name])
            where = f"{case}, step {step}: {name}"
            assert value.dtype == wanted.dtype and value.shape == wanted.shape, where
            if name in case.sums():
                u = torch.finfo(value.dtype).eps
                assert (value - wanted).float().norm() <= 4 * u * wanted.float().norm(), where
            else:
                assert torch.equal(value, wanted), f"{where}: {(value - wanted).abs().max()}"


def equals_one_process(rank, case):
    whole = case.make(None)
    part = case.make(Parallel(case.mode, distributed.group.WORLD, case.sequence))
    for name, parameter in part.named_parameters():
        assert torch.equal(parameter, part_of(case, name, whole.get_parameter(name))), name
    xs, dys = data(case)
    recipe = RECIPES[case.recipe]
    expected = passes(whole, xs, dys, recipe, **case.call)
    own = ([part_of(case, "x", x) for x in xs], [part_of(case, "dy", dy) for dy in dys])
    compare(case, passes(part, *own, recipe, WAYS[case.way](part), **case.call), expected)


def infinities_differ(rank, recipe, overlap):
    """The results of a Linear that are not NaN on this rank where those of one process are: (mode, operand, result) if
    the last element of that operand, which the last rank has, is Inf."""
    found = set()
    for mode, sequence, operand in itertools.product(("column", "row"), (False, True), ("x", "dy", "weight")):
        case = Case(recipe, mode=mode, sequence=sequence)
        parallel = Parallel(mode, distributed.group.WORLD, sequence, overlap=overlap if sequence else None)
        whole, part = (case.make(division) for division in (None, parallel))
        x, dy = (of_steps[0] for of_steps in data(case))
        with torch.no_grad():
            {"x": x, "dy": dy, "weight": whole.weight}[operand][-1, -1] = torch.inf
            part.weight.copy_(part_of(case, "weight", whole.weight))
        (expected,) = passes(whole, [x], [dy], RECIPES[recipe])
        (results,) = passes(part, [part_of(case, "x", x)], [part_of(case, "dy", dy)], RECIPES[recipe])
        assert any(not value.isfinite().all() for value in expected.values())
        for name, value in results.items():
            if name != "bias" and not torch.equal(value.isfinite(), part_of(case, name, expected[name]).isfinite()):
                found.add((mode, operand, name))
    return found


def calibrates_as_one_process(rank, mode, sequence):
    """Where each process has a part of x, the largest of it is in one of them."""
    case = Case("fp8_current", "Linear", mode, sequence)
    x = data(case)[0][0]
    parallel = Parallel(mode, distributed.group.WORLD, sequence)
    part, whole = (
        quire.calibrate(torch.nn.Sequential(case.make(division)), [own], "fp8_current").input_scales
        for division, own in ((parallel, part_of(case, "x", x)), (None, x))
    )
    assert part == whole and set(whole) == {"0"}, (part, whole)


def refuses_exact(rank, case):
    layer = case.make(Parallel(case.mode, distributed.group.WORLD))
    layer.weight.main_grad = torch.zeros_like(layer.weight)
    with quire.distributed.exact(), quire.autocast(recipe=RECIPES[case.recipe]):
        try:
            layer(torch.zeros(4, IN))
        except NotImplementedError as error:
            assert "fuse_wgrad_accumulation and delay_wgrad_compute are not available" in str(error)
        else:
            raise AssertionError(f"computed within exact() with {case.options}")
