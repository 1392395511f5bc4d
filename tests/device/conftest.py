"""Every test of this folder ends with nothing found, unless it has asked for what was."""

import pytest

from device import watch


@pytest.fixture(autouse=True)
def nothing_wrong():
    with watch.nothing_wrong():
        yield
