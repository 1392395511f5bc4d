"""The floating-point mode of the calling thread. Operators compute in a mode of their own (numerics.md 0.7). PyTorch
and Python compute in the caller's mode; a few places use them to compute on scales and amaxes."""

import contextlib
import sys
from collections.abc import Iterator

import torch

_SMALLEST_NORMAL = sys.float_info.min


@contextlib.contextmanager
def subnormals_kept() -> Iterator[None]:
    """PyTorch and Python compute with subnormal numbers, also where the caller has called
    torch.set_flush_denormal(True), which holds again afterwards. A decorator too.

    Without this a scale or an amax below 1.2e-38 becomes 0, even where it is only read: .item() converts it.
    """
    if _SMALLEST_NORMAL * 0.5 != 0:
        yield
        return
    torch.set_flush_denormal(False)
    try:
        yield
    finally:
        torch.set_flush_denormal(True)
