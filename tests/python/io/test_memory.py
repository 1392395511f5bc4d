"""Checkpoints larger than memory: no step holds more than a layer or two."""

from pathlib import Path

import pytest
import torch

import forks
from python.io.checkpoint_files import Files, modelopt_config, modelopt_nvfp4

LAYERS, ROWS, COLUMNS = 8, 4096, 2048
LAYER = ROWS * COLUMNS // 2 * 9 // 8

#: Memory of its own, which files that are mapped do not count for, while something runs.
PROGRAM = """
import ctypes, threading, time
from pathlib import Path
import torch
import quire
from quire import io

def own():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) * 1024

# malloc raises its threshold when large blocks are freed, and keeps such blocks from then on: not with a fixed one.
assert ctypes.CDLL(None).mallopt(-3, 65536)  # M_MMAP_THRESHOLD
source, target, what, layers, rows, columns = {arguments!r}
small = io.read(source)  # all that is imported late
small["norm.weight"], small.outline("m.0.weight")
import torch._dynamo, torch.distributed.tensor  # PyTorch imports these late
if what == "load":
    with torch.device("meta"):
        model = torch.nn.Module()
        model.m = torch.nn.ModuleList(torch.nn.Linear(columns, rows, bias=False) for _ in range(layers))
        model.norm = torch.nn.RMSNorm(64)
start, peak, running = own(), 0, True

def watch():
    global peak
    while running:
        peak = max(peak, own())
        time.sleep(0.0005)

thread = threading.Thread(target=watch, daemon=True)  # an error ends the program
thread.start()
if what == "read":
    for name in io.read(source):
        small[name]
elif what == "load":
    io.load(model, source, activations="nvfp4")
else:
    io.convert(source, target, to=what, exact=False)
running = False
thread.join()
print(peak - start)
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    tensors = {"norm.weight": torch.ones(64)}
    for layer in range(LAYERS):
        tensors |= modelopt_nvfp4(
            f"m.{layer}", ROWS, COLUMNS, scales=torch.ones(ROWS, COLUMNS // 16).to(torch.float8_e4m3fn)
        )[0]
    return Files(tensors, modelopt_config("NVFP4")).write(tmp_path_factory.mktemp("large"), 2)


def peak(source: Path, target: Path, what: str) -> int:
    return int(forks.run(PROGRAM.format(arguments=(str(source), str(target), what, LAYERS, ROWS, COLUMNS))))


@pytest.mark.slow
@pytest.mark.parametrize("what", ["read", "modelopt", "compressed-tensors", "quire"])
def test_a_pass_over_a_checkpoint_holds_a_layer(what, source, tmp_path):
    # A layer, and once more the largest of its tensors while that is copied out of the file; of LAYERS.
    assert peak(source, tmp_path, what) < 2.5 * LAYER


@pytest.mark.slow
def test_a_model_is_loaded_into_its_own_memory_and_no_more(source, tmp_path):
    # Twice its memory would be 2 * LAYERS.
    assert LAYERS * LAYER < peak(source, tmp_path, "load") + LAYER < (LAYERS + 4) * LAYER
