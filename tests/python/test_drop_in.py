"""TransformerEngine's names for quire's own things."""

import inspect

import pytest
import torch

import quire
from quire import recipe as recipes


def test_fp8_autocast_is_autocast_with_its_older_keywords(compiler):
    names = list(inspect.signature(quire.fp8_autocast).parameters)
    assert names == ["enabled", "calibrating", "fp8_recipe", "fp8_group", "_graph"]
    layer, x = quire.Linear(32, 32), torch.randn(4, 32)
    with quire.autocast(recipe=recipes.NVFP4BlockScaling()):
        expected = layer(x)
    with quire.fp8_autocast(True, fp8_recipe=recipes.NVFP4BlockScaling()):
        assert torch.equal(layer(x), expected)
    with quire.fp8_autocast(enabled=False):
        assert torch.equal(layer(x), torch.nn.functional.linear(x, layer.weight, layer.bias))

    def inside(x):
        with quire.fp8_autocast(enabled=True, fp8_recipe=recipes.NVFP4BlockScaling()):
            return layer(x)

    assert torch.equal(compiler(inside)(x), expected)
    with pytest.raises(NotImplementedError, match="_graph=True"):
        quire.fp8_autocast(_graph=True)


@pytest.mark.parametrize("name", ["fp8", "fp8_block_scaling", "mxfp8", "nvfp4"])
def test_availability_is_that_of_the_device(name):
    available = getattr(quire, f"is_{name}_available")
    assert available() is True and available(return_reason=True) == (True, "")
    if not torch.cuda.is_available():
        answer, reason = available(return_reason=True, device="cuda")
        assert answer is False and "CUDA" in reason and available(device="cuda") is False


def test_fp8_model_init_and_get_default_recipe():
    with quire.fp8_model_init(enabled=True, recipe=recipes.MXFP8BlockScaling()):
        assert isinstance(quire.Linear(32, 32).weight, quire.QuantizedTensor)
    assert quire.get_default_recipe() == recipes.default()


def test_dtype_has_transformer_engines_numbers():
    assert quire.DType.kFloat8E4M3 == 7 and quire.DType.kFloat8E5M2 == 8 and quire.DType.kFloat4E2M1 == 10
    assert quire.DType.kBFloat16 == 6 and len(quire.DType) == 11


def test_a_tensor_parallel_group_of_more_than_one_process_is_refused_in_words():
    class Two:
        def size(self):
            return 2

    layer = quire.Linear(4, 4)
    layer.set_tensor_parallel_group(None)
    assert layer.weight_names == ("weight",)
    mlp = quire.LayerNormMLP(4, 8)
    assert mlp.weight_names == ("fc1_weight", "fc2_weight") and mlp.bias_names == ("fc1_bias", "fc2_bias")
    with pytest.raises(NotImplementedError, match="got a group of 2 processes. Use PyTorch's own parallel styles"):
        layer.set_tensor_parallel_group(Two())
