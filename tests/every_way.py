"""Every way to compile a layer, and every feature that gives the same bits in each: a new one joins by a line."""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch._dynamo.decorators import mark_unbacked

import quire
from every_layer import LAYERS, call


@dataclass(frozen=True)
class Feature:
    """make(recipe) -> a layer of 64 inputs. calls: options of each step's call, which may need graphs of their own."""

    make: Callable
    calls: Sequence[dict] = ({}, {}, {})

    @property
    def graphs(self) -> int:
        return len({str(options) for options in self.calls})


def _with_main_grads(layer):
    for parameter in layer.parameters():
        if parameter.dim() > 1:
            parameter.main_grad = torch.full(parameter.shape, 0.5)
    return layer


def _quantized(make):
    def made(recipe):
        with quire.quantized_model_init(recipe is not None, recipe=recipe):
            return make()

    return made


FUSED = {"fuse_wgrad_accumulation": True}
MICROBATCHES = ({"is_first_microbatch": True}, {"is_first_microbatch": False}, {"is_first_microbatch": False})
QUANTIZED_ENDS = ({"fp8_grad": True, "fp8_output": True},) * 3
FEATURES = {name: Feature(lambda recipe, make=make: make()) for name, make in LAYERS.items()} | {
    "Linear, main_grad": Feature(lambda _: _with_main_grads(LAYERS["Linear"](**FUSED))),
    "GroupedLinear, main_grad": Feature(lambda _: _with_main_grads(LAYERS["GroupedLinear, one weight"](**FUSED))),
    "LayerNormLinear, x kept": Feature(lambda _: LAYERS["LayerNormLinear"](save_original_input=True)),
    "LayerNormMLP, all at once": Feature(
        lambda _: _with_main_grads(LAYERS["LayerNormMLP, checkpointed"](delay_wgrad_compute=True, **FUSED)),
        QUANTIZED_ENDS,
    ),
    "Linear, quantized ends": Feature(lambda _: LAYERS["Linear"](), QUANTIZED_ENDS),
    "LayerNormMLP, microbatches": Feature(lambda _: LAYERS["LayerNormMLP, checkpointed"](), MICROBATCHES),
    "GroupedLinear, microbatches": Feature(lambda _: LAYERS["GroupedLinear"](), MICROBATCHES),
    "Linear, quantized parameters": Feature(_quantized(LAYERS["Linear"])),
    "LayerNormMLP, quantized parameters": Feature(_quantized(LAYERS["LayerNormMLP"])),
    "GroupedLinear, a quantized stack": Feature(_quantized(LAYERS["GroupedLinear, one weight"])),
}


class Model(torch.nn.Module):
    """A feature as a model with one input and one result."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x, **options):
        y = call(self.layer, x, **options)
        return y.dequantize() if isinstance(y, quire.QuantizedActivation) else y


@dataclass(frozen=True)
class Way:
    """wrap(model, compiler) -> what is called in its place. backward(compiler): what a backward pass runs within.
    rows: of x in each step."""

    wrap: Callable
    rows: Sequence[int] = (24, 24, 24)
    backward: Callable = lambda compiler: contextlib.nullcontext()


def unbacked(model, compiler):
    compiled = compiler(model)

    def run(x, **options):
        mark_unbacked(x, 0)
        return compiled(x, **options)

    return run


WAYS = {
    "fullgraph": Way(lambda model, compiler: compiler(model)),
    "unbacked": Way(unbacked, rows=(24, 1, 40)),
    "inductor": Way(lambda model, compiler: compiler(model, backend="inductor")),
    "compiled autograd": Way(
        lambda model, _: model, backward=lambda compiler: torch._dynamo.compiled_autograd._enable(compiler)
    ),
}


def train(model, recipe, way, calls, *, function=None, backward=contextlib.nullcontext):
    """Of each step y, the gradient of x, and of every parameter; at last what went into main_grad."""
    results = []
    for index, (rows, options) in enumerate(zip(way.rows, calls, strict=True)):
        generator = torch.Generator().manual_seed(index)
        x = (torch.randn(rows, 64, generator=generator) * 4.0**index).requires_grad_()
        model.zero_grad()
        with quire.autocast(recipe is not None, recipe=recipe):
            y = (model if function is None else function)(x, **options)
        with backward():
            y.backward(torch.randn(y.shape, generator=generator))
        for module in model.modules():
            if getattr(module, "delay_wgrad_compute", False):
                module.backward_dw()
        results += [y.detach(), x.grad, *(parameter.grad for parameter in model.parameters())]
    return results + [p.main_grad for p in model.parameters() if hasattr(p, "main_grad")]


def twins(feature, recipe):
    models = []
    for _ in range(2):  # not copies, which have no main_grad
        torch.manual_seed(0)
        models.append(Model(feature.make(recipe)))
    return models
