"""Every layer with products, small, with 64 inputs, and every feature of one that gives the same bits in each way of
every_way.py: a new one joins by a line."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import distributed

import quire
from every_recipe import STATIC
from pytorch import UNWRITTEN
from quire.distributed import Parallel
from steps import call


def _converted(**options):
    return quire.convert(torch.nn.Sequential(torch.nn.Linear(64, 32, **options)), min_features=1)


#: Name -> what makes it, given options such as device.
LAYERS = {
    "Linear": lambda **o: quire.Linear(64, 32, **o),
    "Linear, delayed wgrad": lambda **o: quire.Linear(64, 32, delay_wgrad_compute=True, **o),
    "LayerNormLinear": lambda **o: quire.LayerNormLinear(64, 32, **o),
    "LayerNormMLP": lambda **o: quire.LayerNormMLP(64, 96, **o),
    "LayerNormMLP, checkpointed": lambda **o: quire.LayerNormMLP(64, 96, checkpoint=True, **o),
    "GroupedLinear": lambda **o: quire.GroupedLinear(3, 64, 32, **o),
    "GroupedLinear, one weight": lambda **o: quire.GroupedLinear(2, 64, 32, single_grouped_weight=True, **o),
    "MoE": lambda **o: quire.MoE(64, 96, 4, 2, expert_bias=True, shared_ffn_hidden_size=32, **o),
    "converted": _converted,
}


def _as_it_is(layer):
    return layer


@dataclass(frozen=True)
class Feature:
    """make(recipe) -> a layer of 64 inputs. calls: options of each step's call, which may need graphs of their own.
    ready: what is done to the layer, in place, before it trains, and to a copy of it anew. sharded: whether it is a
    shard of distributed.group.WORLD, which the caller makes. fewest: rows of x that a graph of any number takes.
    missing: devices that do not have it, and why."""

    make: Callable
    calls: Sequence[dict] = ({}, {}, {})
    ready: Callable = _as_it_is
    sharded: bool = False
    fewest: int = 1
    missing: Mapping[str, str] = field(default_factory=dict)

    @property
    def graphs(self) -> int:
        return len({str(options) for options in self.calls})


def _with_main_grads(model):
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.main_grad = torch.full(parameter.shape, 0.5, dtype=torch.float32, device=parameter.device)


def _quantized(make):
    def made(recipe):
        with quire.quantized_model_init(recipe is not None, recipe=recipe):
            return make()

    return made


def _fused(name, calls=({}, {}, {}), **options):
    return Feature(lambda _: LAYERS[name](fuse_wgrad_accumulation=True, **options), calls, _with_main_grads)


def _in_a_ring(_):
    """A column and a row layer."""
    return LAYERS["LayerNormMLP"](parallel=Parallel("column", distributed.group.WORLD, sequence=True, overlap="ring"))


class _Calibrated(torch.nn.Module):
    """A layer whose x has a static scale, in a model with a recipe of its own."""

    def __init__(self):
        super().__init__()
        self.layer = quire.Linear(64, 32, recipe=STATIC["static_nvfp4"])
        self.layer.input_scale.fill_(0.25)

    def forward(self, x):
        with quire.autocast(recipe=STATIC["static_nvfp4"]):
            return self.layer(x)


MICROBATCHES = ({"is_first_microbatch": True}, {"is_first_microbatch": False}, {"is_first_microbatch": False})
QUANTIZED_ENDS = ({"fp8_grad": True, "fp8_output": True},) * 3
FEATURES = {name: Feature(lambda recipe, make=make: make()) for name, make in LAYERS.items()} | {
    "Linear, main_grad": _fused("Linear"),
    "GroupedLinear, main_grad": _fused("GroupedLinear, one weight"),
    "LayerNormLinear, x kept": Feature(lambda _: LAYERS["LayerNormLinear"](save_original_input=True)),
    "LayerNormMLP, all at once": _fused("LayerNormMLP, checkpointed", QUANTIZED_ENDS, delay_wgrad_compute=True),
    "Linear, quantized ends": Feature(lambda _: LAYERS["Linear"](), QUANTIZED_ENDS),
    "LayerNormMLP, microbatches": Feature(lambda _: LAYERS["LayerNormMLP, checkpointed"](), MICROBATCHES),
    "GroupedLinear, microbatches": Feature(lambda _: LAYERS["GroupedLinear"](), MICROBATCHES),
    "Linear, quantized parameters": Feature(_quantized(LAYERS["Linear"])),
    "LayerNormMLP, quantized parameters": Feature(_quantized(LAYERS["LayerNormMLP"])),
    "GroupedLinear, a quantized stack": Feature(_quantized(LAYERS["GroupedLinear, one weight"])),
    "Linear, a static scale": Feature(lambda _: _Calibrated()),
    # A graph has two rows or more of each piece.
    "LayerNormMLP, a ring": Feature(_in_a_ring, sharded=True, fewest=4, missing=UNWRITTEN),
    "MoE, sharded experts": Feature(lambda _: LAYERS["MoE"](tp_group=distributed.group.WORLD), sharded=True),
}


class Model(torch.nn.Module):
    """A feature as a model with one input and one result."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x, **options):
        y = call(self.layer, x, **options)
        return y.dequantize() if isinstance(y, quire.QuantizedActivation | quire.QuantizedTensor) else y


class Together(torch.nn.Module):
    """Many features as one layer, for ways whose price is one for each model. Results are side by side."""

    def __init__(self, features, recipe):
        super().__init__()
        self.features = features
        self.models = torch.nn.ModuleList(Model(feature.make(recipe)) for feature in features)

    def forward(self, x):
        results = [model(x, **feature.calls[0]) for model, feature in zip(self.models, self.features, strict=True)]
        return torch.cat([y.reshape(x.shape[0], -1) for y in results], -1)  # a ring gathers rows of other processes

    def ready(self):
        for model, feature in zip(self.models, self.features, strict=True):
            feature.ready(model)


def together(features):
    """One feature of many."""
    return Feature(
        lambda recipe: Together(features, recipe),
        ready=lambda model: model.layer.ready(),
        sharded=any(feature.sharded for feature in features),
        fewest=max(feature.fewest for feature in features),
        missing={device: why for feature in features for device, why in feature.missing.items()},
    )
