"""GPTQ rounds columns with large inputs first, which has less error."""

import copy

import pytest
import torch
from torch import nn

import quire
from quire.quantization import gptq

pytestmark = pytest.mark.any_device


def inputs(rows: int, features: int, seed: int) -> torch.Tensor:
    """Most of whose variance is in a few directions, with columns of different sizes."""
    draw = torch.Generator().manual_seed(0)
    directions = torch.randn(features // 8, features, generator=draw)
    sizes = torch.exp(torch.randn(features, generator=draw))
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, features // 8, generator=draw) @ directions
    return sizes * (x / features**0.5 + 0.05 * torch.randn(rows, features, generator=draw))


def test_columns_with_large_inputs_come_first_and_blocks_stay_together():
    diagonal = torch.tensor([1.0, 2.0, 9.0, 0.0, 5.0, 5.0, 7.0, 8.0])
    assert gptq._order(diagonal, 1).tolist() == [2, 7, 6, 4, 5, 1, 0, 3]
    assert gptq._order(diagonal, 3).tolist() == [2, 1, 0, 4, 5, 3, 7, 6]


@pytest.mark.parametrize("weight", ["nvfp4", "mxfp4", "mxfp8", "fp8_tensor", "fp8_block:128x128"])
@pytest.mark.parametrize("features", [160, 77])
def test_the_order_of_columns_lessens_the_error(weight, features, monkeypatch):
    torch.manual_seed(3)
    layer = nn.Linear(features, 64, bias=False, device="cpu").to(torch.get_default_device()).requires_grad_(False)
    train, held_out = inputs(2000, features, 4), inputs(600, features, 5)
    exact, errors = layer(held_out).double(), {}
    for name in ("ordered", "as they are"):
        if name != "ordered":
            monkeypatch.setattr(gptq, "_order", lambda diagonal, count: torch.arange(len(diagonal)))
        made = quire.quantize_model(copy.deepcopy(layer), f"x=none,w={weight}", [train], "gptq")
        errors[name] = (held_out.double() @ made.weight.dequantize().double().t() - exact).norm()
    assert errors["ordered"] < errors["as they are"]
