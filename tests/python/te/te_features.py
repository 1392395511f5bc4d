"""Layers and features that only quire.te has, as rows for the tables of every_feature.py."""

import torch

from every_feature import Feature
from quire import te

#: Name -> what makes it, given options such as device.
LAYERS = {"Linear, split": lambda **o: te.Linear(64, 32, parameters_split=("q", "k"), **o)}


class _OfTokens(torch.nn.Module):
    """A layer of TransformerEngine's attention, of one sequence that is its only one. [tokens, 64] -> the same."""

    def __init__(self):
        super().__init__()
        options = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "self_attn_mask_type": "causal"}
        self.layer = te.TransformerLayer(64, 96, 4, num_gqa_groups=2, activation="swiglu", **options)

    def forward(self, x):
        return self.layer(x.unsqueeze(1)).squeeze(1)


class _Half(te.ops.BasicOperation):
    """An operation that a script defines."""

    def op_forward(self, ctx, input_, **unused):
        return 0.5 * input_

    def op_backward(self, ctx, grad_output):
        return 0.5 * grad_output, ()


def _operations(_):
    kept = te.ops.MakeExtraOutput().set_extra_output_channel(0, "x", output_to_caller=False)
    added = te.ops.AddExtraInput().set_extra_input_channel(0, "x")
    first = (te.ops.RMSNorm(64), kept, te.ops.Quantize(), te.ops.Linear(64, 64), te.ops.GELU(), added)
    return te.ops.Sequential(*first, _Half(), te.ops.Linear(64, 32))


FEATURES = {
    **{name: Feature(lambda recipe, make=make: make()) for name, make in LAYERS.items()},
    "TransformerLayer": Feature(lambda _: _OfTokens()),
    "te.ops": Feature(_operations),
}
