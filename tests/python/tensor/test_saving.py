"""QuantizedTensor in files and state dicts, and in modules that move."""

import copy
import io
import pickle
import subprocess
import sys

import pytest
import torch

import quire
from quire import QuantizedTensor
from steps import same

pytestmark = pytest.mark.any_device

SPECS = ["fp8_tensor", "fp8_row", "fp8_block:128x128:pow2", "mxfp8", "mxfp8:swizzled", "mxfp4", "nvfp4:16x16"]
SPECS += ["nvfp4:interleaved"]
SPECS += ["nvfp4:row_scaled", "nvfp4:rht"]


def alike(a, b):
    """The same codes, and all that belongs to them."""
    return same(a, b) and (a.spec, a.dtype, a.requires_grad) == (b.spec, b.dtype, b.requires_grad)


@pytest.fixture(params=SPECS)
def spec(request):
    return request.param


def values(*shape, seed=3):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def module(spec, seed=3):
    """A plain nn.Linear whose weight is quantized."""
    layer = torch.nn.Linear(48, 32)
    layer.weight = torch.nn.Parameter(quire.quantize(values(32, 48, seed=seed), spec, columnwise=True))
    return layer


def through_file(value, **options):
    file = io.BytesIO()
    torch.save(value, file)
    return torch.load(io.BytesIO(file.getvalue()), **options)


def test_files_hold_codes_and_load_safely(spec):
    q = quire.quantize(values(32, 48).bfloat16(), spec, columnwise=spec != "mxfp8")
    for again in (through_file(q, weights_only=True), through_file({"q": q})["q"], pickle.loads(pickle.dumps(q))):
        assert type(again) is QuantizedTensor and alike(again, q)
        again.update_usage(columnwise_usage=False)
        assert torch.equal(again @ torch.ones(48, 2).bfloat16(), q @ torch.ones(48, 2).bfloat16())
    file = io.BytesIO()
    torch.save(q, file)
    assert file.tell() < q.nbytes + 4096
    assert through_file(q, map_location="meta").rowwise_data.is_meta
    assert through_file(q.to("meta")).proto == q.to("meta").proto


def test_a_parameter_stays_one(spec):
    parameter = torch.nn.Parameter(quire.quantize(values(32, 48), spec))
    for other in (through_file(parameter), pickle.loads(pickle.dumps(parameter)), copy.deepcopy(parameter)):
        assert isinstance(other, torch.nn.Parameter) and isinstance(other, QuantizedTensor) and alike(other, parameter)
    frozen = torch.nn.Parameter(quire.quantize(values(32, 48), spec), requires_grad=False)
    assert not through_file(frozen).requires_grad and isinstance(copy.deepcopy(frozen), torch.nn.Parameter)


def test_a_copy_keeps_gradient_master_and_attributes():
    parameter = torch.nn.Parameter(quire.quantize(values(32, 48), "mxfp8"))
    parameter.master, parameter.grad, parameter.partition_dim = values(32, 48), torch.ones(32, 48), 0
    other = copy.deepcopy(parameter)
    assert other.partition_dim == 0 and torch.equal(other.grad, parameter.grad) and other.grad is not parameter.grad
    assert torch.equal(other.master, parameter.master) and other.master is not parameter.master
    assert torch.equal(through_file(parameter).master, parameter.master)


@pytest.mark.cpu_only
def test_a_file_is_loaded_by_a_process_that_only_imports_quire(tmp_path):
    q = quire.quantize(values(32, 48), "nvfp4:16x16")
    torch.save({"w": q}, tmp_path / "file.pt")
    code = f"""import torch, quire
print(torch.load({str(tmp_path / "file.pt")!r}, weights_only=True)["w"].dequantize().sum().item())"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert float(done.stdout) == q.dequantize().sum().item()


@pytest.mark.parametrize("assign", [False, True])
def test_state_dicts_go_between_quantized_modules(spec, assign):
    source, target = module(spec), module(spec, seed=7)
    codes = target.weight.rowwise_data.data_ptr()
    target.load_state_dict(through_file(source.state_dict(), weights_only=True), assign=assign)
    assert isinstance(target.weight, torch.nn.Parameter) and alike(target.weight, source.weight)
    assert (target.weight.rowwise_data.data_ptr() == codes) is not assign


def test_a_plain_checkpoint_loads_into_a_quantized_module_and_back(spec):
    plain, layer = torch.nn.Linear(48, 32), module(spec)
    layer.load_state_dict(plain.state_dict())
    expected = quire.quantize(plain.weight.detach(), spec, columnwise=True)
    assert alike(layer.weight.detach(), expected) and layer.weight.requires_grad
    plain.load_state_dict(layer.state_dict())
    assert type(plain.weight) is torch.nn.Parameter and torch.equal(plain.weight, expected.dequantize())


def test_a_quantized_checkpoint_loads_into_another_spec():
    source, target = module("mxfp8"), module("nvfp4:16x16", seed=7)
    target.load_state_dict(source.state_dict())
    expected = quire.quantize(source.weight.detach().dequantize(), "nvfp4:16x16", columnwise=True)
    assert alike(target.weight.detach(), expected)


def test_a_module_moves_with_its_codes(spec):
    layer = module(spec)
    codes = layer.weight.detach().clone()
    layer.bfloat16()
    assert isinstance(layer.weight, QuantizedTensor) and layer.weight.dtype == layer.bias.dtype == torch.bfloat16
    assert isinstance(layer.weight, torch.nn.Parameter) and layer.weight.requires_grad
    assert alike(layer.float().weight.detach(), codes)
    layer.to("meta")
    assert layer.weight.is_meta and layer.weight.rowwise_data.is_meta
    layer.to_empty(device="cpu")
    assert isinstance(layer.weight, QuantizedTensor) and not layer.weight.is_meta
    layer.load_state_dict({"weight": codes, "bias": torch.zeros(32)})
    assert alike(layer.weight.detach(), codes)


def test_a_module_is_copied_and_shared():
    layer = module("mxfp8")
    other = copy.deepcopy(layer)
    with torch.no_grad():
        other.weight.zero_()
    assert layer.weight.dequantize().any() and not other.weight.dequantize().any()
    file = io.BytesIO()
    torch.save(layer, file)
    loaded = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
    assert alike(loaded.weight, layer.weight) and isinstance(loaded.weight, torch.nn.Parameter)
