"""The converter for torchtitan: with torchtitan where it is installed, else with a stand-in for what is used of it."""

import dataclasses
import importlib
import importlib.util
import sys
from functools import partial
from types import SimpleNamespace

import pytest
import torch

import quire
from python.integrations import torchtitan_stand_in
from steps import assert_of_codes

ADAPTER = "quire.integrations.torchtitan"
INSTALLED = importlib.util.find_spec("torchtitan") is not None
INIT = {"weight": partial(torch.nn.init.normal_, std=0.02), "bias": torch.nn.init.zeros_}


@pytest.fixture(params=["stand-in", "torchtitan"])
def titan(request, monkeypatch):
    """The adapter's module, and torchtitan's Linear and Module."""
    if request.param == "stand-in":
        torchtitan_stand_in.install(monkeypatch)
    elif not INSTALLED:
        pytest.skip("torchtitan is not installed")
    monkeypatch.delitem(sys.modules, ADAPTER, raising=False)
    adapter = importlib.import_module(ADAPTER)
    yield SimpleNamespace(
        adapter=adapter,
        Linear=importlib.import_module("torchtitan.models.common.linear").Linear,
        Module=importlib.import_module("torchtitan.protocols.module").Module,
    )
    sys.modules.pop(ADAPTER)


def model_of(titan):
    """The configuration of a model with layers in a list, and a subclass of Linear among them."""

    class Own(titan.Linear):
        @dataclasses.dataclass(kw_only=True, slots=True)
        class Config(titan.Linear.Config):
            pass

    class Block(titan.Module):
        @dataclasses.dataclass(kw_only=True, slots=True)
        class Config(titan.Module.Config):
            up: titan.Linear.Config
            down: titan.Linear.Config

        def __init__(self, config):
            super().__init__()
            self.up, self.down = config.up.build(), config.down.build()

        def forward(self, x):
            return self.down(torch.relu(self.up(x)))

    class Model(titan.Module):
        @dataclasses.dataclass(kw_only=True, slots=True)
        class Config(titan.Module.Config):
            layers: list
            lm_head: titan.Linear.Config

        def __init__(self, config):
            super().__init__()
            self.layers = torch.nn.ModuleList(one.build() for one in config.layers)
            self.lm_head = config.lm_head.build()

        def forward(self, x):
            for layer in self.layers:
                x = layer(x)
            return self.lm_head(x)

    def linear(k, n, kind=titan.Linear, **options):
        return kind.Config(in_features=k, out_features=n, param_init=INIT, **options)

    blocks = [Block.Config(up=linear(64, 96, bias=True), down=linear(96, 64)) for _ in range(2)]
    blocks.append(Block.Config(up=linear(64, 96, Own), down=linear(96, 64)))
    return Model.Config(layers=blocks, lm_head=linear(64, 32))


def converted(titan, **options):
    options = {"recipe": "mxfp8", "min_features": 1} | options
    return titan.adapter.QuireLinearConverter.Config(**options).build().convert(model_of(titan))


def built(config):
    """As torchtitan's trainer makes a model."""
    with torch.device("meta"):
        model = config.build()
    model.parallelize(SimpleNamespace(tp=1))
    model.to_empty(device="cpu")
    torch.manual_seed(3)
    model.init_states()
    return model


def quires(model):
    return {name for name, module in model.named_modules() if isinstance(module, quire.Linear)}


def test_linear_layers_become_quires_but_the_output_layer_and_subclasses(titan):
    model = built(converted(titan))
    names = {f"layers.{i}.{part}" for i in range(3) for part in ("up", "down")}
    assert quires(model) == names - {"layers.2.up"}
    assert type(model.lm_head) is titan.Linear
    assert model.layers[0].up.bias is not None and model.layers[0].down.bias is None
    assert isinstance(model.layers[0].up, titan.Module)


def test_the_layers_compute_what_quire_linear_computes_and_train(titan):
    model, plain = built(converted(titan)), built(model_of(titan))
    x = torch.randn(8, 64)
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one, other)
    up = quire.Linear(64, 96, recipe="mxfp8")
    up.load_state_dict(model.layers[0].up.state_dict())
    assert torch.equal(model.layers[0].up(x), up(x))
    high = plain(x)
    for name in quires(model):
        layer = plain.get_submodule(name)
        its = quire.Linear(layer.in_features, layer.out_features, layer.bias is not None, recipe="mxfp8")
        its.load_state_dict(layer.state_dict())
        plain.set_submodule(name, its)
    y, expected = model(x), plain(x)
    assert torch.equal(y, expected) and not torch.equal(y, high)
    y.square().sum().backward()
    expected.square().sum().backward()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad) and other.grad.any()


def test_filters_choose_by_name_and_by_size(titan):
    model = built(converted(titan, filter_fqns=["layers.0", "down"]))
    assert quires(model) == {"layers.1.up", "lm_head"}
    names = {f"layers.{i}.{part}" for i in range(3) for part in ("up", "down")}
    assert quires(built(converted(titan, min_features=33, filter_fqns=[]))) == names - {"layers.2.up"}


def test_a_configuration_of_one_linear_is_replaced(titan):
    config = titan.Linear.Config(in_features=64, out_features=32, param_init=INIT)
    converter = titan.adapter.QuireLinearConverter.Config(recipe=None, min_features=1).build()
    made = converter.convert(config)
    assert type(made) is titan.adapter.QuireLinear.Config and made.param_init is INIT
    assert made.build().recipe is None


def test_what_does_not_fit_is_refused(titan):
    with pytest.raises(ValueError, match="QuireLinearConverter: a layer's own recipe cannot be DelayedScaling"):
        converted(titan, recipe="fp8_delayed")
    with pytest.raises(ValueError, match=r"no Linear of .*Model.Config is to be converted.*min_features=1000"):
        converted(titan, min_features=1000)
    with torch.device("meta"):
        model = converted(titan).build()
    with pytest.raises(NotImplementedError, match="tensor parallelism must be 1, got 2"):
        model.layers[0].up.parallelize(SimpleNamespace(tp=2))


@pytest.mark.skipif(not INSTALLED, reason="torchtitan is not installed")
def test_a_model_of_torchtitan_is_built_and_its_blocks_train(titan, request):
    """Without its attention, which is compiled."""
    if "stand-in" in request.node.name:
        pytest.skip("the stand-in has no models")
    from torchtitan.models.llama3 import model_registry

    said = titan.adapter.QuireLinearConverter.Config(recipe="mxfp8")
    losses = {}
    for name, converters in {"plain": None, "quire": [said]}.items():
        model = model_registry("debugmodel", converters=converters).model.build()
        model.verify_module_protocol()
        torch.manual_seed(0)
        model.init_states()
        assert len(quires(model)) == (30 if converters else 0)
        block = model.layers["0"].feed_forward
        checked = []
        for layer in block.modules():
            if isinstance(layer, quire.Linear):
                layer.register_forward_hook(
                    lambda layer, arguments, y, checked=checked: checked.append(assert_of_codes(y, layer, arguments[0]))
                )
        optimizer = torch.optim.SGD(block.parameters(), lr=1.0)
        x, target = torch.randn(2, 32, 256, generator=torch.Generator().manual_seed(1)).chunk(2)
        losses[name] = []
        for _ in range(4):
            loss = torch.nn.functional.mse_loss(block(x), target)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[name].append(loss.item())
        assert len(checked) == (4 * 3 if converters else 0)  # each product is that of its codes, in each step
        assert losses[name][-1] < losses[name][0]
    assert losses["quire"][0] != losses["plain"][0]
