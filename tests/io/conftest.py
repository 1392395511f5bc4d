"""Fixtures of the tests of checkpoints."""

from te_classes import te  # noqa: F401
