"""Modules of quire on the CPU and on a device, side by side: the same parameters, inputs, and so the same bits."""

import contextlib
import copy
from concurrent.futures import ThreadPoolExecutor

import torch

import quire
from device import device as testdevice
from steps import step

TOKENS = 64
#: Module and size of its result.
MODULES = {
    "Linear": (lambda **options: quire.Linear(64, 32, **options), 32),
    "LayerNormLinear": (lambda **options: quire.LayerNormLinear(64, 32, **options), 32),
    "LayerNormMLP": (lambda **options: quire.LayerNormMLP(64, 96, **options), 64),
    "GroupedLinear": (lambda **options: quire.GroupedLinear(3, 64, 32, **options), 32),
    "MoE": (lambda **options: quire.MoE(64, 96, 4, 2, **options), 64),
}
#: Of GroupedLinear, one for each set of inputs; the last leaves rows that no group has.
SPLITS = [[16, 32, 16], [5, 0, 59], [0, 64, 0], [7, 20, 30]]


class Inputs:
    """x, dy and sizes of groups on a device; number n has other values."""

    def __init__(self, name, device="cpu"):
        self.grouped, self.out = name == "GroupedLinear", MODULES[name][1]
        self.device = torch.device(device)
        self.x, self.dy, self.splits = (t.to(self.device) for t in self.values(0))

    def values(self, number):
        generator = torch.Generator().manual_seed(number)
        x = torch.randn(TOKENS, 64, generator=generator) * 2.0**number
        dy = torch.randn(TOKENS, self.out, generator=generator)
        return x, dy, torch.tensor(SPLITS[number], dtype=torch.int64)

    def set(self, number):
        for ours, new in zip((self.x, self.dy, self.splits), self.values(number), strict=True):
            ours.copy_(new)

    def extra(self):
        return (self.splits,) if self.grouped else ()


def twins(name, device, prepare=lambda module: module, **options):
    """The module of that name, and a copy on the device."""
    torch.manual_seed(0)
    module = MODULES[name][0](**options)
    return prepare(module), prepare(copy.deepcopy(module).to(device))


def twin_step(module, inputs, recipe, **options):
    """y, dx, and the gradients of parameters."""
    y, dx, *_ = step(
        module,
        inputs.x,
        recipe,
        function=lambda x: module(x, *inputs.extra(), **options),
        dy=lambda y: inputs.dy,
        backward_dw=False,
    )
    return [y, dx, *(getattr(p, "main_grad", p.grad) for p in module.parameters())]


# A thread of its own: entering an autocast of delayed scaling ends the step of all modules that ran in the thread.
_REFERENCE = ThreadPoolExecutor(1)


def reference(*arguments, **options):
    """step() of the module on the CPU."""
    return _REFERENCE.submit(twin_step, *arguments, **options).result()


@contextlib.contextmanager
def stream_of(place):
    """A place: "default", "side" or "other", the second device. What is done within is ordered with what is not."""
    if place != "side":
        yield
        return
    before, side = torch.accelerator.current_stream(), torch.Stream(device=testdevice.NAME)
    side.wait_stream(before)
    with side:
        yield
    before.wait_stream(side)


def device_of(place):
    return torch.device(testdevice.NAME, int(place == "other"))


def assert_same(got, expected):
    """Bit for bit, and the device has found nothing on the way."""
    differing = [i for i, (a, b) in enumerate(zip(got, expected, strict=True)) if not _same(a, b)]
    found = testdevice.violations()
    assert not found, "\n".join(map(str, found))
    assert differing == []


def _same(a, b):
    if a is None or b is None:
        return a is b
    a, b = (t.detach().cpu().contiguous() for t in (a, b))
    if a.is_floating_point() and a.dtype == b.dtype:  # which NaN it is depends on the processor
        a, b = (t.masked_fill(t.isnan(), torch.nan) for t in (a, b))
    return a.dtype == b.dtype and torch.equal(*(t.reshape(-1).view(torch.uint8) for t in (a, b)))
