"""The dialects that quire.io reads and writes, in the order in which they are tried.

To add one: write a file here with a class that has what quire.io.dialect.Dialect lists (LayoutDialect gives most of it
from a table of layouts), and add its row below.
"""

from __future__ import annotations

from quire.checks import near
from quire.io.container import CheckpointError, Container
from quire.io.dialect import Dialect
from quire.io.dialects.autofp8 import AutoFp8
from quire.io.dialects.comfyui import ComfyUi
from quire.io.dialects.compressed_tensors import CompressedTensors
from quire.io.dialects.deepseek import DeepSeek
from quire.io.dialects.fbgemm import Fbgemm
from quire.io.dialects.gguf import Gguf
from quire.io.dialects.gpt_oss import GptOss
from quire.io.dialects.modelopt import ModelOpt
from quire.io.dialects.native import Native
from quire.io.dialects.te_tensors import TeTensors
from quire.io.dialects.torchao import TorchAo

DIALECTS: tuple[Dialect, ...] = (
    Native(),
    TorchAo(),
    Gguf(),
    TeTensors(),
    ComfyUi(),
    ModelOpt(),
    CompressedTensors(),
    AutoFp8(),
    DeepSeek(),
    GptOss(),
    Fbgemm(),
)


def dialect_of(container: Container) -> Dialect | None:
    """The first dialect that detects the checkpoint as its own; None for a checkpoint without quantized layers."""
    return next((one for one in DIALECTS if one.detect(container.header, container.descriptions)), None)


def dialect_named(name: str) -> Dialect:
    """The dialect of that name. Raises CheckpointError for an unknown name; the error lists all names."""
    found = next((one for one in DIALECTS if one.name == name), None)
    if found is None:
        names = [one.name for one in DIALECTS]
        known, only_read = ", ".join(names), " and ".join(one.name for one in DIALECTS if one.read_only)
        raise CheckpointError(
            f"there is no dialect {name!r}; the dialects are {known}, of which quire reads {only_read} and does not "
            "write them",
            f"choose one of these{near(name, names)}",
        )
    return found
