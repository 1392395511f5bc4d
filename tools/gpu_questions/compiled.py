"""Whether layers that Inductor compiles, with CUDA graphs and without, compute on a GPU what eager mode computes.

Expected: "equal" everywhere (gradients of a mixture's input to 2e-3), no graph break and no skipped CUDA graph: layers
are one graph, and their operators read nothing back to the host. Each line is three steps with new inputs (groups: with
new sizes), forward and backward.
"""

import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import torch
from torch._dynamo.utils import counters

import quire

RECIPES = ("fp8_current", "fp8_delayed", "fp8_block", "mxfp8", "nvfp4")
MODES = {"default": {}, "dynamic": {"dynamic": True}, "CUDA graphs": {"mode": "reduce-overhead"}}


def mlp(recipe: str) -> tuple[torch.nn.Module, Callable]:
    layer = quire.LayerNormMLP(256, 512, device="cuda", params_dtype=torch.bfloat16)
    return layer, lambda step: (torch.randn(64 + 16 * step, 256, device="cuda", dtype=torch.bfloat16),)


def grouped(recipe: str) -> tuple[torch.nn.Module, Callable]:
    layer = quire.GroupedLinear(3, 256, 128, device="cuda", dtype=torch.bfloat16)

    def inputs(step: int) -> tuple[torch.Tensor, ...]:
        sizes = torch.tensor([[32, 0, 64], [16, 48, 32], [0, 96, 0]][step], device="cuda")
        return torch.randn(96, 256, device="cuda", dtype=torch.bfloat16), sizes

    return layer, inputs


def mixture(recipe: str) -> tuple[torch.nn.Module, Callable]:
    layer = quire.MoE(256, 128, 4, device="cuda", params_dtype=torch.bfloat16)
    return layer, lambda step: (torch.randn(96, 256, device="cuda", dtype=torch.bfloat16),)


def step_of(layer: torch.nn.Module, recipe: str) -> Callable:
    def step(x: torch.Tensor, *more: torch.Tensor) -> torch.Tensor:
        with quire.autocast(recipe=recipe):
            return layer(x, *more)

    return step


def results(layer: torch.nn.Module, step: Callable, inputs: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    torch.compiler.cudagraph_mark_step_begin()
    x = inputs[0].clone().requires_grad_()
    y = step(x, *inputs[1:])
    y = y[0] if isinstance(y, tuple) else y
    gradients = torch.autograd.grad(y, [x, *layer.parameters()], torch.ones_like(y), allow_unused=True)
    return [t.clone() for t in (y, *gradients) if t is not None]


def compare(make: Callable, recipe: str, mode: str) -> str:
    torch.manual_seed(0)
    layer, inputs = make(recipe)
    torch.manual_seed(0)
    other, _ = make(recipe)
    other.load_state_dict(layer.state_dict())
    compiled = torch.compile(step_of(other, recipe), fullgraph=True, **MODES[mode])
    different = []
    # The gradient of a mixture's input is a sum of two, and Inductor rounds it once.
    allowed = 2e-3 if make is mixture else 0.0
    for index in range(3):
        given = inputs(index if mode == "dynamic" or make is grouped else 0)
        wanted, found = results(layer, step_of(layer, recipe), given), results(other, compiled, given)
        for number, (a, b) in enumerate(zip(wanted, found, strict=True)):
            if not torch.equal(a, b):
                off = ((a.float() - b.float()).norm() / a.float().norm().clamp(min=1e-30)).item()
                if off > allowed:
                    different.append(f"step {index} result {number} differs by {off:.1e}")
    quire.synchronize("cuda")
    skips = counters["inductor"]["cudagraph_skips"]
    graphs = counters["stats"]["unique_graphs"]
    return f"{'; '.join(different) or 'equal'}; {graphs} graphs, {skips} CUDA graphs skipped"


def line(case: tuple[Callable, str, str]) -> str:
    make, recipe, mode = case
    try:
        torch._dynamo.reset()
        counters.clear()
        found = compare(make, recipe, mode)
    except Exception as error:  # every case is tried
        found = f"{type(error).__name__}: {str(error)[:300]}"
    return f"{make.__name__} {recipe} {mode}: {found}"


def main() -> int:
    cases = [(mlp, recipe, mode) for recipe in RECIPES for mode in MODES]
    cases += [
        (make, recipe, "CUDA graphs") for make in (grouped, mixture) for recipe in ("fp8_current", "mxfp8", "nvfp4")
    ]
    bad = 0
    with ProcessPoolExecutor(7, mp_context=get_context("spawn")) as pool:
        for text in pool.map(line, cases):
            print(text, flush=True)
            bad += "equal; 1 graphs, 0 " not in text
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
