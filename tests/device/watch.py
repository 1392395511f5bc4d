"""A test that uses the device ends with nothing found, unless it has asked for what was."""

import contextlib

import torch

from device import device as testdevice


@contextlib.contextmanager
def nothing_wrong():
    testdevice.counts()
    testdevice.violations()
    yield torch.device(testdevice.NAME)
    torch.ops.testdevice.set_delay(0)
    for index in range(testdevice.COUNT):
        torch.accelerator.synchronize(torch.device(testdevice.NAME, index))
    found = testdevice.violations()
    assert not found, "\n".join(map(str, found))
