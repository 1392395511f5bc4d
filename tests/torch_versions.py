"""Tests that a version of PyTorch fails, for a reason that is not in quire."""

import pytest
import torch


def fails_with(version: str, why: str) -> pytest.MarkDecorator:
    """Skips a test with that minor version of PyTorch, such as "2.11"."""
    return pytest.mark.skipif(torch.__version__.startswith(f"{version}."), reason=f"PyTorch {version}: {why}")


#: The file has numbers of torch.export's enumeration, which this runtime takes for c10's: float32 becomes float64.
aotinductor = fails_with("2.11", "AOTInductor's runtime gives operators other dtypes than the exported ones")
