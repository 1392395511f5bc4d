"""transformer_engine.common: its recipes."""

from quire.te.common import recipe

__all__ = ["recipe"]
