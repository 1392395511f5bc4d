"""accelerate's offloading of models with quantized weights: forward gives the bits of the model that stayed."""

import copy
import os
from pathlib import Path

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


def mapped(there, folder):
    """The state dict of a file, whose memory is the file's."""
    torch.save(there.state_dict(), folder / "weights.pt")
    return torch.load(folder / "weights.pt", mmap=True)


def from_a_mapped_file(there, folder):
    return accelerate.cpu_offload(there, execution_device="cpu", state_dict=mapped(there, folder))


def all_on_disk(there, folder):
    device_map, weights = dict.fromkeys("0123", "disk"), mapped(there, folder)
    return accelerate.dispatch_model(there, device_map, main_device="cpu", state_dict=weights, offload_index={})


def one_layer_on_disk(there, folder):
    device_map, weights = dict.fromkeys("0123", "cpu") | {"1": "disk"}, mapped(there, folder)
    return accelerate.dispatch_model(there, device_map, main_device="cpu", state_dict=weights, offload_index={})


WAYS = (cpu_offload, cpu_offload_with_hook, dispatch, checkpoint, checkpoint_to_meta, checkpoint_and_dispatch)
#: Ways in which weights lie in a file between calls, and which layers do.
FILES = {from_a_mapped_file: "0123", all_on_disk: "0123", one_layer_on_disk: "1"}


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


def of_seed(seed):
    """Layers in high precision, as large as quire.convert converts."""
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Linear(256, 256))


def quantized(layers):
    return quire.convert(layers, "mxfp8", for_inference=True, tokens=None)


def test_values_of_a_checkpoint_for_quantized_weights_are_refused_with_the_ways_to_load_them(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    theirs, x = of_seed(1), torch.randn(3, 256)
    safetensors.save_file(theirs.state_dict(), tmp_path / "model.safetensors")
    ours = quantized(of_seed(0))
    with pytest.raises(TypeError, match=r"If a checkpoint has high-precision values .* load it before quire\.convert"):
        accelerate.load_checkpoint_and_dispatch(ours, tmp_path, device_map={"": "cpu"})
    before = accelerate.load_checkpoint_and_dispatch(of_seed(0), tmp_path, device_map={"": "cpu"})
    accelerate.hooks.remove_hook_from_submodules(before)
    ours = quantized(of_seed(0))
    quire.refit(ours, str(tmp_path))
    with torch.no_grad():
        expected = quantized(theirs)(x)
        assert torch.equal(quantized(before)(x), expected) and torch.equal(ours(x), expected)


@pytest.mark.parametrize("device_map", [None, {"": "cpu"}], ids=str)
def test_a_folder_of_quire_is_not_read_by_accelerate_which_only_logs(device_map, tmp_path, monkeypatch):
    logged = []
    monkeypatch.setattr(accelerate.utils.modeling.logger, "warning", logged.append)
    theirs, ours, x = quantized(of_seed(1)), quantized(of_seed(0)), torch.randn(3, 256)
    quire.io.save(theirs, tmp_path / "a", dialect="quire")
    accelerate.load_checkpoint_and_dispatch(ours, tmp_path / "a", device_map=device_map)
    assert any("0.weight.mxfp8:nan.rowwise_data" in line for line in logged)
    old = quantized(of_seed(0))
    assert all(torch.equal(stored(a.weight), stored(b.weight)) for a, b in zip(ours, old, strict=True))
    loaded = of_seed(0)
    quire.io.load(loaded, tmp_path / "a")
    moved = accelerate.dispatch_model(loaded, {"0": "cpu", "1": "cpu"}, force_hooks=True)
    with torch.no_grad():
        assert torch.equal(moved(x), theirs(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4", "fp8_current", "fp8_block"])
@pytest.mark.parametrize("way", FILES, ids=lambda way: way.__name__)
def test_weights_in_a_file_have_the_codes_of_the_model_that_stayed(way, recipe, dtype, tmp_path):
    there, x = model(recipe, dtype), torch.randn(8, N, dtype=dtype)
    before = copy.deepcopy(there.state_dict())
    with torch.no_grad():
        expected = there(x)
        moved = way(there, tmp_path)
        for _ in range(2):
            assert torch.equal(moved(x), expected)
    assert [name for name, layer in moved.named_children() if layer.weight.is_meta] == list(FILES[way])
    assert [path.name for path in tmp_path.iterdir()] == ["weights.pt"]
    accelerate.hooks.remove_hook_from_submodules(moved)  # it puts them back
    for name, value in moved.state_dict().items():
        assert torch.equal(stored(value), stored(before[name])), name
        assert not isinstance(value, QuantizedTensor) or value.proto == before[name].proto


def stored(t):
    """All bytes of a tensor."""
    parts = t.named().values() if isinstance(t, QuantizedTensor) else [t]
    return torch.cat([part.contiguous().view(-1).view(torch.uint8) for part in parts if part is not None])


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="the system does not list what is mapped")
def test_the_memory_of_such_weights_is_the_file_s(tmp_path):
    weights = mapped(model("mxfp8", torch.bfloat16), tmp_path)
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    of_file = [line[0].split("-") for line in lines if line[-1] == str(tmp_path / "weights.pt")]
    for name, value in weights.items():
        for part in value.buffers().values() if isinstance(value, QuantizedTensor) else [value]:
            assert any(int(first, 16) <= part.data_ptr() < int(end, 16) for first, end in of_file), name


def on_disk(there, folder):
    return accelerate.disk_offload(there, folder, execution_device="cpu")


def partly_on_disk(there, folder):
    device_map = {"0": "cpu", "1": "disk", "2": "cpu", "3": "cpu"}
    return accelerate.dispatch_model(there, device_map, main_device="cpu", offload_dir=folder)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("way", [on_disk, partly_on_disk], ids=lambda way: way.__name__)
def test_weights_on_disk_which_would_lose_their_codes_are_refused(way, dtype, tmp_path):
    there, x = model("mxfp8", dtype), torch.randn(8, N, dtype=dtype)
    with torch.no_grad():
        expected = there(x)
        with pytest.raises(TypeError, match=r"(?s)QuantizedTensor.*dequantize.*CPU, or from .*mmap=True"):
            way(there, tmp_path)
        assert not [name for name in os.listdir(tmp_path) if "weight" in name]
        assert torch.equal(there(x), expected)  # the model still has its weights


def test_an_automatic_device_map_counts_a_shared_weight_once():
    there = model("mxfp8", torch.bfloat16)
    sizes = accelerate.utils.compute_module_sizes(there)
    assert sizes[""] == 2 * (3 * N * N + 4 * N)  # in the nominal dtype
    one_layer = 2 * (N * N + N)
    found = accelerate.infer_auto_device_map(there, max_memory={"cpu": 10**9}, dtype=torch.bfloat16)
    assert set(found.values()) == {"cpu"} and sizes["1"] == one_layer
