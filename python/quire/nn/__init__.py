"""Layers."""

from quire.nn.linear import Linear

__all__ = ["Linear"]
