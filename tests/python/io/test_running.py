"""Every layout of every dialect runs as a layer: with inputs as the file says, and gradients of decoded weights."""

import numpy as np
import pytest
import torch

import quire
from python.io.checkpoint_files import BF16, E4M3, U8, Files
from python.io.checkpoint_kinds import KINDS
from quire import io
from quire.io.into_model import load_layer
from steps import assert_of_codes, assert_rounded


def finite(files: Files) -> Files:
    """The same without NaN, and with scales near 1."""
    for name, tensor in files.tensors.items():
        if tensor.dtype == E4M3:
            codes = tensor.view(U8)
            codes = torch.where((codes & 0x7F) == 0x7F, codes & 0x80, codes)
            codes = (codes % 24) + 0x28 if "_scale" in name else codes
            files.tensors[name] = codes.to(U8).view(E4M3)
        elif tensor.dtype == torch.float8_e5m2:
            codes = tensor.view(U8)
            files.tensors[name] = torch.where((codes & 0x7C) == 0x7C, codes & 0x80, codes).view(tensor.dtype)
        elif tensor.dtype == U8 and name.endswith("_scale"):
            files.tensors[name] = (tensor % 8) + 120
    return files


def layers(kind: str, folder) -> list[tuple[str, quire.Linear, io.StoredWeight]]:
    checkpoint = io.read(finite(KINDS[kind]()).write(folder))
    found = []
    for name, group in checkpoint.groups.items():
        stored = checkpoint[name]
        for index in range(stored.shape[0]) if len(stored.shape) == 3 else [None]:
            found.append((name, load_layer(stored, group.layout, index), stored))
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_runs_with_inputs_as_it_says(kind, tmp_path):
    for _, layer, _ in layers(kind, tmp_path):
        x = torch.randn(6, layer.in_features, generator=torch.Generator().manual_seed(0))
        if layer.recipe.static_input:  # which is chosen for small inputs
            scale = float(layer.input_scale)
            largest = {"fp8": 448 * scale, "nvf": 2688 * scale}[layer.recipe.input_spec[:3]]
            largest = 2688 / scale if "div" in layer.recipe.input_spec else largest
            x = x * (largest / float(x.abs().max()))
        layer = layer.float()
        with torch.no_grad():
            assert_of_codes(layer(x), layer, x)
        x.requires_grad_(True)
        layer(x).backward(torch.ones(6, layer.out_features))
        weight = layer.weight.dequantize(torch.float32).double()
        assert_rounded(x.grad, weight.sum(0).expand(6, -1), weight.abs().sum(0).expand(6, -1), layer.out_features)


def assert_product(y: torch.Tensor, layer: quire.Linear, x: torch.Tensor, weight: torch.Tensor) -> None:
    """y is the product of x and the weight, both decoded: the bound is that of assert_of_codes."""
    bias = torch.zeros(len(weight)) if layer.bias is None else layer.bias.detach()
    assert_rounded(y, x @ weight.T + bias, x.abs() @ weight.abs().T + bias.abs(), layer.in_features + 12)


def static(kind: str, folder) -> tuple[quire.Linear, float, torch.Tensor]:
    _, layer, stored = layers(kind, folder)[0]
    return layer.float(), float(stored.input_scale), layer.weight.dequantize(torch.float32).double()


@pytest.mark.parametrize("kind", ["modelopt FP8", "modelopt W4A8_NVFP4_FP8", "compressed-tensors tensor static"])
def test_a_static_scale_of_fp8_inputs_is_the_one_of_the_file(kind, tmp_path):
    layer, scale, weight = static(kind, tmp_path)
    # Codes are whole numbers of E4M3 times the scale: the product is exact but for its sum. What is beyond saturates.
    codes = torch.tensor([0.0, 1, -2, 3.5, 448, -448]).repeat(layer.in_features)[: layer.in_features]
    x = (codes * np.float32(scale)).repeat(2, 1)
    x[1, 4] = 1e6
    with torch.no_grad():
        assert_product(layer(x), layer, (codes.double() * scale).repeat(2, 1), weight)


@pytest.mark.parametrize(("kind", "divides"), [("modelopt NVFP4", False), ("compressed-tensors nvfp4", True)])
def test_a_static_scale_of_nvfp4_inputs_multiplies_or_divides_as_the_dialect_says(kind, divides, tmp_path):
    layer, scale, weight = static(kind, tmp_path)
    g = 1 / scale if divides else scale
    codes = torch.tensor([6.0, 1, -2, 3, 4, 0.5, -1.5, 0]).repeat(layer.in_features // 8)
    # The scale of a block is at most 448, and beyond it codes saturate. -4.5 is rounded to -4.
    of_three = torch.tensor([6.0, 3, -6, 6, 6, 1.5, -4, 0]).repeat(layer.in_features // 8)
    for factor, rounded in ((1, codes), (3, of_three), (1e6, 6 * codes.sign())):
        with torch.no_grad():
            y = layer((codes.double() * 448 * g * factor).float().repeat(2, 1))
        assert_product(y, layer, (rounded.double() * 448 * g).repeat(2, 1), weight)


@pytest.mark.parametrize("kind", ["modelopt NVFP4", "modelopt FP8", "modelopt W4A16_NVFP4", "compressed-tensors nvfp4"])
def test_layers_survive_moves_and_copies(kind, tmp_path):
    import copy

    _, layer, stored = layers(kind, tmp_path)[0]
    x = torch.randn(4, layer.in_features).to(BF16) / 50
    with torch.no_grad():
        y = layer(x)
        assert torch.equal(copy.deepcopy(layer)(x), y)
        assert torch.equal(layer.to(torch.float32).to(BF16)(x), y)
        if stored.input_scale is not None:
            assert layer.input_scale.dtype == torch.float32 and torch.equal(layer.input_scale, stored.input_scale)
        torch._dynamo.reset()
        assert torch.equal(torch.compile(layer, fullgraph=True, backend="aot_eager")(x), y)


@pytest.mark.parametrize(
    ("x", "bound"),
    # Half a step of E4M3; of NVFP4 half the step from 4 to 6 and that of the block's scale. And a result in bfloat16.
    [
        ("fp8_tensor:given", 1 / 16 + 1 / 128),
        ("nvfp4:global=mul:given", 1 / 6 + 1 / 16 + 1 / 128),
        ("nvfp4:global=div:given", 1 / 6 + 1 / 16 + 1 / 128),
    ],
)
def test_random_inputs_fit_their_static_scale(x, bound, tmp_path):
    """Of a matmul with the identity, whose results are its inputs."""
    found = []
    for power in (-12, 0, 12):
        model = torch.nn.Sequential(quire.Linear(64, 64, bias=False, device="cpu", dtype=BF16))
        model[0].weight.data.copy_(torch.eye(64))
        quire.convert(model, f"x={x},w=fp8_tensor,dy=mxfp8", for_inference=True, tokens=None, min_features=1)
        model[0].input_scale.fill_(2.0**power)
        io.save(model, tmp_path / str(power), dialect="quire")
        (ran,) = io.run(tmp_path / str(power)).layers
        found.append(ran.error)
    assert 0 < found[0] <= bound and found == found[:1] * 3
