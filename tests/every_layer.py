"""Every layer with products, small, with 64 inputs, for tests of what each must do: a new one joins by a line."""

import torch

import quire
from quire import te


def _converted(**options):
    return quire.convert(torch.nn.Sequential(torch.nn.Linear(64, 32, **options)), min_features=1)


#: Name -> what makes it, given options such as device.
LAYERS = {
    "Linear": lambda **o: quire.Linear(64, 32, **o),
    "Linear, split": lambda **o: te.Linear(64, 32, parameters_split=("q", "k"), **o),
    "Linear, delayed wgrad": lambda **o: quire.Linear(64, 32, delay_wgrad_compute=True, **o),
    "LayerNormLinear": lambda **o: quire.LayerNormLinear(64, 32, **o),
    "LayerNormMLP": lambda **o: quire.LayerNormMLP(64, 96, **o),
    "LayerNormMLP, checkpointed": lambda **o: quire.LayerNormMLP(64, 96, checkpoint=True, **o),
    "GroupedLinear": lambda **o: quire.GroupedLinear(3, 64, 32, **o),
    "GroupedLinear, one weight": lambda **o: quire.GroupedLinear(2, 64, 32, single_grouped_weight=True, **o),
    "MoE": lambda **o: quire.MoE(64, 96, 4, 2, expert_bias=True, shared_ffn_hidden_size=32, **o),
    "converted": _converted,
}


def call(layer, x, **options):
    """y of x [*, 64]; of groups the first has one row and the last the rest."""
    if not isinstance(layer, quire.GroupedLinear):
        return layer(x, **options)
    rows = x.shape[0]
    return layer(x, [1, *[0] * (layer.num_gemms - 2), rows - 1], **options)


def train(layer, recipe, steps=3, function=call):
    """Of each step y, the gradient of x, and of every parameter."""
    results = []
    for index in range(steps):
        generator = torch.Generator().manual_seed(index)
        x = (torch.randn(24, 64, generator=generator) * 4.0**index).requires_grad_()
        layer.zero_grad()
        with quire.autocast(recipe is not None, recipe=recipe):
            y = function(layer, x)
        y.backward(torch.randn(y.shape, generator=generator))
        for module in layer.modules():
            if getattr(module, "delay_wgrad_compute", False):
                module.backward_dw()
        results += [y.detach(), x.grad, *(parameter.grad for parameter in layer.parameters())]
    return results
