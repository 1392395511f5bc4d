"""Every test of this folder ends with nothing found, unless it has asked for what was."""

import pytest
import torch

from device import device as testdevice


@pytest.fixture(autouse=True)
def nothing_wrong():
    testdevice.counts()
    testdevice.violations()
    yield
    torch.ops.testdevice.set_delay(0)
    for index in range(testdevice.COUNT):
        torch.accelerator.synchronize(torch.device(testdevice.NAME, index))
    found = testdevice.violations()
    assert not found, "\n".join(map(str, found))
