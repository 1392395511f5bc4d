"""Delayed scaling in numpy, written from docs/numerics.md 1.4-1.7: what a layer's state must be after any events."""

import numpy as np
import torch

import quire
from quire.recipe import DelayedScaling

F32 = np.float32
RECIPE = DelayedScaling(amax_history_len=4)
LARGEST = {"e4m3": F32(448), "e5m2": F32(57344)}


class Direction:
    """Scale and history of one direction; row 0 of the history collects."""

    def __init__(self, slots, element, length):
        self.scale, self.history = np.ones(slots, F32), np.zeros((length, slots), F32)
        self.largest = LARGEST[element]

    def collect(self, slot, amax):
        self.history[0, slot] = max(self.history[0, slot], F32(float(amax)))

    def resize(self, length):
        """1.4: cut at the end, or padded there with zeros."""
        rows, slots = self.history.shape
        padding = np.zeros((max(0, length - rows), slots), F32)
        self.history = np.concatenate([self.history[:length], padding])

    def update(self, algorithm="max", margin=0, reduced=None):
        """1.6, by slots."""
        for slot in range(len(self.scale)):
            h = self.history[:, slot]
            last = h[0] if reduced is None or reduced[slot] == 0 else reduced[slot]
            if last == 0:
                continue
            older = [value for value in h[1:] if not np.isnan(value)]
            amax = F32(max([last, *older])) if algorithm == "max" else last
            h[:] = [0, *h[2:], last] if len(h) > 1 else [0]
            if np.isfinite(amax) and amax > 0:
                with np.errstate(over="ignore"):
                    new = F32(self.largest * F32(2.0**-margin)) / amax
                self.scale[slot] = new if np.isfinite(new) else np.finfo(F32).max


class Layer:
    """The state of y = x w^T: slots x, w, y forward and dy, dx backward."""

    def __init__(self, length=4, backward="e5m2", **rule):
        self.fwd, self.bwd = Direction(3, "e4m3", length), Direction(2, backward, length)
        self.rule = rule

    def step(self):
        self.fwd.update(**self.rule)
        self.bwd.update(**self.rule)

    def forward(self, x, w=None):
        self.fwd.collect(0, x.detach().abs().max())
        if w is not None:
            self.fwd.collect(1, w.detach().abs().max())

    def backward(self, dy):
        self.bwd.collect(0, dy.abs().max())

    def check(self, state):
        """That a DelayedState is bit for bit what this says."""
        for ours, scale, amax, history in (
            (self.fwd, state.fwd_scale, state.fwd_amax, state.fwd_history),
            (self.bwd, state.bwd_scale, state.bwd_amax, state.bwd_history),
        ):
            length = len(ours.history)
            np.testing.assert_array_equal(scale.cpu().numpy(), ours.scale)
            np.testing.assert_array_equal(amax.cpu().numpy(), ours.history[0])
            np.testing.assert_array_equal(history[1:length].cpu().numpy(), ours.history[1:])
            assert not history[0].any() and not history[length:].any()


def grid(element):
    """The non-negative values of an element format by code: 1.1."""
    mantissa, bias = (3, 7) if element == "e4m3" else (2, 15)
    codes = np.arange(0x7F if element == "e4m3" else 0x7C)
    exponent, fraction = codes >> mantissa, (codes & (2**mantissa - 1)) / 2.0**mantissa
    normal = 2.0 ** (exponent - bias) * (1 + fraction)
    return np.where(exponent == 0, 2.0 ** (1 - bias) * fraction, normal)


def cast(x, scale, element="e4m3"):
    """1.5: (codes, values) of x under a scale, to nearest with ties to even codes. x finite."""
    values = grid(element)
    scaled = (x.detach().cpu().float().numpy() * F32(scale)).astype(np.float64)
    magnitude = np.minimum(np.abs(scaled), values[-1])
    above = np.clip(np.searchsorted(values, magnitude), 1, len(values) - 1)
    low, high = magnitude - values[above - 1], values[above] - magnitude
    code = np.where((low < high) | ((low == high) & (above % 2 == 1)), above - 1, above)
    sign = np.signbit(scaled)
    return code | (sign << 7), np.where(sign, -1, 1) * values[code] * np.float64(F32(1) / F32(scale))


def used_scales(records, role):
    """The scales that operands of this role stored, in order: 1 / the scale of the state."""
    return [record.tensor.rowwise_scale.item() for record in records if record.role == role]


def stored(scale):
    """What a tensor that was cast with this scale stores."""
    return float(F32(1) / F32(float(scale)))


def varied(step, *shape, low=-6, high=6, seed=0):
    """A tensor whose magnitude changes a lot from step to step, so that another step's scale would show."""
    generator = torch.Generator().manual_seed(1000 * seed + step)
    power = torch.randint(low, high, (), generator=generator).item()
    return torch.randn(shape, generator=generator) * 10.0**power


def forward(layer, model, x, recipe=RECIPE, **options):
    """A forward pass in an autocast of its own; checks that the operands are cast with the model's scales."""
    with quire.debug.operands() as records, quire.autocast(recipe=recipe, **options):
        if torch.is_grad_enabled():
            model.step()
        y = layer(x)
    for slot, role in enumerate(("x", "w")):
        assert used_scales(records, role) == [stored(model.fwd.scale[slot])], role
    model.forward(x, layer.weight)
    return y


def backward(model, y, dy, **options):
    with quire.debug.operands() as records:
        y.backward(dy, **options)
    assert used_scales(records, "dy") == [stored(model.bwd.scale[0])]
    model.backward(dy)


def train_step(layer, model, step, recipe=RECIPE, tokens=8):
    layer.weight.data *= 3.0 if step % 2 else 0.1
    x, dy = varied(step, tokens, 16).requires_grad_(), varied(step, tokens, 32, seed=1)
    backward(model, forward(layer, model, x, recipe), dy)
    model.check(layer.delayed)
