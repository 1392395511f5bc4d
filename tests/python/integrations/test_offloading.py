"""accelerate's offloading of models with quantized weights: forward gives the bits of the model that stayed."""

import copy
import os

import pytest
import torch

accelerate = pytest.importorskip("accelerate")

import quire  # noqa: E402
from quire import QuantizedTensor  # noqa: E402

N = 128


def model(recipe, dtype, seed=0):
    """Linear layers, of which two share a weight, quantized for inference."""
    torch.manual_seed(seed)
    layers = torch.nn.Sequential(*(torch.nn.Linear(N, N) for _ in range(4))).to(dtype).eval()
    layers[2].weight = layers[0].weight
    quire.convert(layers, recipe, for_inference=True, tokens=None, min_features=1)
    assert all(isinstance(layer.weight, QuantizedTensor) for layer in layers)
    return layers


def cpu_offload(there, folder):
    return accelerate.cpu_offload(there, execution_device="cpu")


def cpu_offload_with_hook(there, folder):
    moved, hook = accelerate.cpu_offload_with_hook(there, execution_device="cpu")
    hook.offload()
    return moved


def dispatch(there, folder):
    return accelerate.dispatch_model(there, dict.fromkeys("0123", "cpu"), force_hooks=True)


def checkpoint(there, folder):
    return _loaded(there, folder, there)


def checkpoint_to_meta(there, folder):
    return _loaded(there, folder, copy.deepcopy(there).to("meta"), device_map={"": "cpu"})


def checkpoint_and_dispatch(there, folder):
    _save(there, folder)
    target = copy.deepcopy(there).to("meta")
    return accelerate.load_checkpoint_and_dispatch(target, folder, device_map={"": "cpu"}, force_hooks=True)


def _save(there, folder):
    torch.save(there.state_dict(), folder / "pytorch_model.bin")


def _loaded(there, folder, target, **options):
    _save(there, folder)
    accelerate.load_checkpoint_in_model(target, folder, **options)
    return target


WAYS = (cpu_offload, cpu_offload_with_hook, dispatch, checkpoint, checkpoint_to_meta, checkpoint_and_dispatch)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4", "fp8_current"])
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_forward_of_an_offloaded_model_has_the_bits_of_one_that_stayed(way, recipe, dtype, tmp_path):
    there, x = model(recipe, dtype), torch.randn(8, N, dtype=dtype)
    with torch.no_grad():
        expected = there(x)
        before = [layer.weight.rowwise_data.clone() for layer in there]
        moved = way(model(recipe, dtype), tmp_path)
        for _ in range(2):  # the second call loads weights again
            assert torch.equal(moved(x), expected)
    if way is not cpu_offload:
        assert all(torch.equal(layer.weight.rowwise_data, data) for layer, data in zip(moved, before, strict=True))
    assert all(isinstance(layer.weight, torch.nn.Parameter) for layer in moved)


def on_disk(there, folder):
    return accelerate.disk_offload(there, folder, execution_device="cpu")


def partly_on_disk(there, folder):
    device_map = {"0": "cpu", "1": "disk", "2": "cpu", "3": "cpu"}
    return accelerate.dispatch_model(there, device_map, main_device="cpu", offload_dir=folder)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("way", [on_disk, partly_on_disk], ids=lambda way: way.__name__)
def test_weights_on_disk_which_would_lose_their_codes_are_refused(way, dtype, tmp_path):
    with pytest.raises(TypeError, match=r"(?s)QuantizedTensor.*codes.*(dequantize|CPU)"), torch.no_grad():
        way(model("mxfp8", dtype), tmp_path)(torch.randn(8, N, dtype=dtype))
    assert dtype is torch.bfloat16 or not [name for name in os.listdir(tmp_path) if "weight" in name]


def test_an_automatic_device_map_counts_a_shared_weight_once():
    there = model("mxfp8", torch.bfloat16)
    sizes = accelerate.utils.compute_module_sizes(there)
    assert sizes[""] == 2 * (3 * N * N + 4 * N)  # in the nominal dtype
    one_layer = 2 * (N * N + N)
    found = accelerate.infer_auto_device_map(there, max_memory={"cpu": 10**9}, dtype=torch.bfloat16)
    assert set(found.values()) == {"cpu"} and sizes["1"] == one_layer
