"""Layers on the device as a chip that a number describes, with a stand-in of cuBLASLt.

python -m device.cublaslt_steps 90 exits with an error if products are not those of the CPU, if anything waits, or if
another kernel multiplies."""

import copy
import sys

import torch

import quire
from device import device as testdevice
from device.watch import nothing_wrong
from quire import recipe as recipes

#: Recipes whose three products of a step (y, dx, dw) cuBLASLt computes.
ON_CHIP = {
    90: {
        "fp8_current": recipes.Float8CurrentScaling(),
        "fp8_delayed": recipes.DelayedScaling(amax_history_len=2),
        "fp8_row": recipes.CustomRecipe({"x": "fp8_row", "w": "fp8_row", "dy": "fp8_row:e5m2"}.get),
        "fp8_block": recipes.Float8BlockScaling(),
    },
    100: {"mxfp8": recipes.MXFP8BlockScaling(), "nvfp4": recipes.NVFP4BlockScaling()},
}
TOKENS, INPUTS, OUTPUTS = 128, 256, 128


def step_of_linear(module, x, dy, recipe):
    """y, dx, and the gradients of the weight (in main_grad) and of the bias."""
    x = x.detach().requires_grad_()
    module.bias.grad = None
    with quire.autocast(recipe=recipe):
        y = module(x)
    y.backward(dy)
    return [y.detach(), x.grad, module.weight.main_grad, module.bias.grad]


def assert_near(got, expected, what):
    for name, ours, theirs in zip(("y", "dx", "dw", "db"), got, expected, strict=False):
        ours, theirs = ours.cpu().float(), theirs.float()
        # Sums in another order, and rounded to bfloat16 next to a border; a float32 weight gradient is not.
        bound = 1e-5 if name == "dw" else 2.0**-7
        error = (ours - theirs).abs().max() / theirs.abs().max()
        assert error <= bound, f"{what}: {name} is {error:.2e} of the largest off"


def values(number):
    generator = torch.Generator().manual_seed(number)
    return [torch.randn(TOKENS, size, generator=generator).bfloat16() * 2.0**number for size in (INPUTS, OUTPUTS)]


def check(name, recipe):
    torch.manual_seed(0)
    cpu = quire.Linear(INPUTS, OUTPUTS, dtype=torch.bfloat16, fuse_wgrad_accumulation=True)
    there = copy.deepcopy(cpu).to(testdevice.NAME)
    for module in (cpu, there):
        module.weight.main_grad = torch.zeros_like(module.weight, dtype=torch.float32)
    inputs = [t.to(testdevice.NAME) for t in values(0)]
    testdevice.counts()
    with testdevice.Launches() as launches:
        got = step_of_linear(there, *inputs, recipe)
    assert testdevice.waits() == {}, f"{name} waits"
    assert launches.names.count("cublaslt") == 3, f"{name}: {launches.names}"
    assert_near(got, step_of_linear(cpu, *values(0), recipe), name)
    if isinstance(recipe, recipes.DelayedScaling):
        return  # its state moves on at the end of an autocast, which is no launch
    with testdevice.Graph() as graph:
        got = step_of_linear(there, *inputs, recipe)
    for number in (1, 2, 3):
        for ours, new in zip(inputs, values(number), strict=True):
            ours.copy_(new)
        for module in (cpu, there):
            module.weight.main_grad.zero_()
        graph.replay()
        # Replays round stochastically in their own way, which y does not depend on.
        compared = 1 if name == "nvfp4" else 4
        assert_near(got[:compared], step_of_linear(cpu, *values(number), recipe)[:compared], f"{name}, replay {number}")


def main():
    for name, recipe in ON_CHIP[int(sys.argv[1])].items():
        with nothing_wrong():
            check(name, recipe)
        print(name)


if __name__ == "__main__":
    main()
