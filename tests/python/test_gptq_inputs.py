"""GPTQ makes up for quantized inputs too: of the matmul itself, and for what quantized layers before it change."""

import copy

import pytest
import torch
from torch import nn

import quire
from quire.quantization import gptq, sequential
from quire.quantization.gptq import Moments

pytestmark = pytest.mark.filterwarnings("ignore:quire.quantize_model")


def inputs(rows: int, features: int, seed: int) -> torch.Tensor:
    """Most of whose variance is in a few directions, with columns of different sizes."""
    draw = torch.Generator().manual_seed(0)
    directions = torch.randn(features // 8, features, generator=draw)
    sizes = torch.exp(torch.randn(features, generator=draw))
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, features // 8, generator=draw) @ directions
    return sizes * (x / features**0.5 + 0.05 * torch.randn(rows, features, generator=draw))


def distance(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.double() - exact.double()).norm() / exact.double().norm())


def test_the_corrected_weights_solve_the_damped_least_squares_problem():
    torch.manual_seed(0)
    z, w, damping = torch.randn(90, 24), torch.randn(5, 24), 0.02
    x = z + 0.3 * torch.randn(90, 24)
    moments = Moments.zeros(24, torch.device("cpu"))
    moments.add(x[:40], z[:40])
    moments.add(x[40:], z[40:])
    corrected = w.double() + w.double() @ moments.correction(torch.linalg.cholesky(moments.damped(damping)))
    root = (damping * x.double().square().sum(0).mean()).sqrt() * torch.eye(24, dtype=torch.float64)
    left = torch.cat([x.double(), root])
    right = torch.cat([z.double(), root]) @ w.double().t()
    torch.testing.assert_close(corrected, torch.linalg.lstsq(left, right).solution.t(), rtol=1e-4, atol=1e-5)


def test_columns_with_large_inputs_come_first_and_blocks_stay_together():
    diagonal = torch.tensor([1.0, 2.0, 9.0, 0.0, 5.0, 5.0, 7.0, 8.0])
    assert gptq._order(diagonal, 1).tolist() == [2, 7, 6, 4, 5, 1, 0, 3]
    assert gptq._order(diagonal, 3).tolist() == [2, 1, 0, 4, 5, 3, 7, 6]


@pytest.mark.parametrize("weight", ["mxfp8", "fp8_row", "fp8_block:128x128"])
def test_the_result_is_nearer_than_that_of_the_original_weights_with_quantized_inputs(weight):
    torch.manual_seed(1)
    layer, train, held_out = nn.Linear(160, 48, bias=False), inputs(2000, 160, 1), inputs(600, 160, 2)
    exact = layer(held_out)
    x = quire.quantize(held_out, "nvfp4").dequantize()
    made = quire.quantize_model(copy.deepcopy(layer), f"x=nvfp4,w={weight},dy=mxfp8", [train], "gptq")
    with torch.no_grad():
        assert distance(made(held_out), exact) < 0.95 * distance(x @ layer.weight.t(), exact)


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def test_later_layers_make_up_for_the_errors_of_earlier_ones(monkeypatch):
    torch.manual_seed(2)
    model, train, held_out = Stack().requires_grad_(False), inputs(2000, 64, 3), inputs(600, 64, 4)
    exact, errors = model(held_out), {}
    for name in ("made up for", "not"):
        if name == "not":
            monkeypatch.setattr(sequential, "_paired", lambda seen, flowing: {})
        made = quire.quantize_model(copy.deepcopy(model), "x=none,w=nvfp4", [train], "gptq")
        errors[name] = distance(made(held_out), exact)
    assert errors["made up for"] < 0.95 * errors["not"]


def test_the_order_of_columns_lessens_the_error(monkeypatch):
    torch.manual_seed(3)
    layer, train, held_out = nn.Linear(160, 64, bias=False), inputs(2000, 160, 4), inputs(600, 160, 5)
    exact, errors = layer(held_out), {}
    for name in ("ordered", "as they are"):
        if name != "ordered":
            monkeypatch.setattr(gptq, "_order", lambda diagonal, count: torch.arange(len(diagonal)))
        made = quire.quantize_model(copy.deepcopy(layer), "x=none,w=nvfp4", [train], "gptq")
        errors[name] = distance(made(held_out).detach(), exact.detach())
    assert errors["ordered"] < 0.97 * errors["as they are"]
