"""Layers."""

from quire.nn.grouped_linear import GroupedLinear
from quire.nn.layernorm_linear import LayerNormLinear
from quire.nn.layernorm_mlp import LayerNormMLP
from quire.nn.linear import Linear
from quire.nn.moe import MoE
from quire.nn.norm import LayerNorm, RMSNorm

__all__ = ["GroupedLinear", "LayerNorm", "LayerNormLinear", "LayerNormMLP", "Linear", "MoE", "RMSNorm"]
