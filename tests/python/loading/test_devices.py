"""What quire asks about devices, and that it asks it in one place."""

import re
from pathlib import Path

import pytest
import torch

import quire
from quire.loading import devices

ROOT = Path(__file__).parents[3]
PACKAGE, OPERATORS = ROOT / "python/quire", ROOT / "src/quire_torch"
#: A comparison with the name of a kind of device, or an argument that has one by default.
ASKS = re.compile(
    r"""(==|!=|\bin) *[(\["]+"?(cpu|cuda|meta)\b|device_type: str = "|\[?"cpu"\]? *(==|!=|if)|"cuda" if|else "cpu\""""
)
#: The same in C++.
NAMES = re.compile(r"\bis_(cpu|cuda|privateuseone)\(\)|\bk(CPU|CUDA|PrivateUse1)\b|DeviceType::(CPU|CUDA|PrivateUse1)")


def test_no_other_module_compares_kinds_of_devices():
    asking = {
        f"{path.relative_to(PACKAGE)}: {line.strip()}"
        for path in PACKAGE.rglob("*.py")
        for line in path.read_text().splitlines()
        if ASKS.search(line)
    }
    assert asking == set()


def test_no_other_file_of_the_operators_names_a_kind_of_device():
    naming = {
        f"{path.relative_to(OPERATORS)}: {line.strip()}"
        for path in OPERATORS.rglob("*.*")
        for line in path.read_text().splitlines()
        if NAMES.search(line) and path.name != "device.h"
    }
    assert naming == set()


@pytest.mark.parametrize(
    ("device", "later", "values"), [("cpu", False, "cpu"), ("meta", False, "cpu"), ("cuda:1", True, "cuda:1")]
)
def test_devices_are_told_apart_by_when_they_compute_and_whether_they_have_values(device, later, values):
    device = torch.device(device)
    assert devices.runs_later(device) == later
    assert devices.with_values(device) == torch.device(values)


def test_values_are_known_on_the_host_in_eager_mode_alone():
    @torch.compile(fullgraph=True, backend="eager")
    def compiled(x):
        return x + (1 if devices.is_known(x) else 2)

    assert devices.is_known(torch.ones(1)) and not devices.is_known(torch.ones(1, device="meta"))
    assert compiled(torch.zeros(1)).item() == 2


def test_there_is_a_host_and_synchronizing_it_does_nothing():
    assert devices.devices()[0] == "cpu" and devices.count("cpu") == 1
    assert quire.synchronize("cpu") is None
    with pytest.raises(RuntimeError, match="no kernels for meta"):
        quire.synchronize("meta")
