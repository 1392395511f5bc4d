"""Layers."""

from quire.nn.linear import Linear
from quire.nn.norm import LayerNorm, RMSNorm

__all__ = ["LayerNorm", "Linear", "RMSNorm"]
