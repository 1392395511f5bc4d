"""The plugin for vLLM, with a stand-in for what it uses of vLLM."""

import importlib
import sys
import tomllib
from pathlib import Path

import pytest
import torch

import quire
from python.integrations import vllm_stand_in

ADAPTER = "quire.integrations.vllm"


@pytest.fixture
def adapter(monkeypatch):
    vllm_stand_in.install(monkeypatch)
    monkeypatch.delitem(sys.modules, ADAPTER, raising=False)
    yield importlib.import_module(ADAPTER)
    sys.modules.pop(ADAPTER)
    vllm_stand_in.CONFIGS.clear()
    vllm_stand_in.METHODS[:] = [name for name in vllm_stand_in.METHODS if name != "quire"]


class Model(torch.nn.Module):
    """As vLLM builds one: each layer asks the configuration for its method."""

    def __init__(self, config):
        super().__init__()
        said = {"quant_config": config}
        self.qkv_proj = vllm_stand_in.LinearBase(64, (64, 32, 32), bias=True, prefix="layers.0.qkv_proj", **said)
        self.o_proj = vllm_stand_in.LinearBase(128, (64,), bias=False, prefix="layers.0.o_proj", **said)

    def forward(self, x):
        return self.o_proj(self.qkv_proj(x)[0])[0]


def weights():
    torch.manual_seed(0)
    shapes = {"qkv_proj.weight": (128, 64), "qkv_proj.bias": (128,), "o_proj.weight": (64, 128)}
    return {name: torch.randn(shape).bfloat16() for name, shape in shapes.items()}


def expected(recipe, given, x, quantized=("qkv_proj", "o_proj")):
    """By torch.nn.Linear, which quire quantizes."""
    for name in ("qkv_proj", "o_proj"):
        n, k = given[f"{name}.weight"].shape
        layer = torch.nn.Linear(k, n, bias=False, dtype=torch.bfloat16)
        layer.load_state_dict({"weight": given[f"{name}.weight"]})
        x = (quire.quantize_model(layer, recipe) if name in quantized else layer)(x)
        x = x + given["qkv_proj.bias"] if name == "qkv_proj" else x
    return x


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4", "x=none,w=mxfp4"])
@torch.no_grad()
def test_layers_compute_under_the_recipe_of_the_configuration(adapter, recipe):
    adapter.register()
    config = vllm_stand_in.CONFIGS["quire"].from_config({"quant_method": "quire", "recipe": recipe})
    given, x = weights(), torch.randn(7, 64).bfloat16()
    model = vllm_stand_in.loaded(Model(config), given)
    assert torch.equal(model(x), expected(recipe, given, x))
    assert isinstance(model.o_proj.weight, quire.QuantizedTensor)
    values = sum(parameter.nbytes for parameter in model.parameters())
    # At most 8.25 bits instead of 16, which is 0.52; the bias stays as it is.
    assert values < 0.6 * sum(value.nbytes for value in given.values())


@torch.no_grad()
def test_what_is_ignored_stays_in_high_precision(adapter):
    config = adapter.QuireConfig.from_config({"quant_method": "quire", "ignore": ["o_proj"]})
    given, x = weights(), torch.randn(7, 64).bfloat16()
    model = vllm_stand_in.loaded(Model(config), given)
    assert torch.equal(model(x), expected("mxfp8", given, x, quantized=("qkv_proj",)))
    assert config.get_quant_method(torch.nn.Embedding(4, 4), "embed_tokens") is None


def test_a_second_registration_does_nothing(adapter):
    adapter.register()
    adapter.register()
    assert vllm_stand_in.METHODS.count("quire") == 1 and vllm_stand_in.CONFIGS == {"quire": adapter.QuireConfig}
    config = adapter.QuireConfig()
    assert (config.get_name(), config.recipe, config.get_config_filenames()) == ("quire", "mxfp8", [])


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"quant_method": "quire", "layers": {}}, "got layers too.*--to compressed-tensors"),
        ({"recipe": "fp8_delayed"}, "cannot be DelayedScaling"),
        ({"recipe": "x=fp8_tensor:given,w=fp8_tensor,dy=mxfp8"}, "measures the scales of x in each call"),
        ({"recipe": "fp9"}, "fp9"),
    ],
)
def test_what_does_not_fit_is_refused(adapter, config, text):
    with pytest.raises(ValueError, match=text):
        adapter.QuireConfig.from_config(config)


def test_vllm_finds_the_plugin_by_its_entry_point(adapter):
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]
    module, _, function = project["entry-points"]["vllm.general_plugins"]["quire"].partition(":")
    assert getattr(importlib.import_module(module), function) is adapter.register
