"""Fixtures of the tests of checkpoints."""

from python.io.te_classes import te  # noqa: F401
