"""A model of torch.nn.Linear layers to convert, and the product of codes that a layer is compared with."""

import torch

import quire


class Block(torch.nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.up = torch.nn.Linear(256, 512, **options)
        self.down = torch.nn.Linear(512, 256, bias=False, **options)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


def blocks(count=2, **options):
    torch.manual_seed(3)
    return torch.nn.Sequential(*(Block(**options) for _ in range(count)))


def of_codes(layer, x, recipe):
    """x w^T + bias of quantized operands, in float64."""
    x, w = (
        quire.quantize(t.detach(), spec).dequantize().double()
        for t, spec in ((x, recipe.input_spec), (layer.weight, recipe.weight_spec))
    )
    return x @ w.T + (0 if layer.bias is None else layer.bias.double())
