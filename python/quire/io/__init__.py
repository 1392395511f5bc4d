"""Checkpoints of other tools, read and written byte for byte (docs/checkpoints.md).

A *dialect* is the way in which a tool stores quantized layers. container.py reads safetensors files as named tensors.
layout.py describes one layer as a table of tensors, and moves them to the buffers of quire (StoredWeight) and back.
dialect.py says what a dialect must answer, and dialects/ has one file for each. reading.py is the mapping that read()
returns, writing.py makes files of such a mapping. into_model.py and from_model.py are for models.

To add a dialect: a file in dialects/ with a class that has what `Dialect` lists, and its row in dialects/__init__.py.
`LayoutDialect` gives read() and write() from a table of `Layout`s; detect(), groups() and config() remain to be
written. dialects/modelopt.py is the example. tests/python/io has a test that runs for every row.
"""

from quire.io.container import CheckpointError
from quire.io.converting import convert
from quire.io.from_model import save
from quire.io.inspection import Difference, Inspection, Run, Verification, diff, inspect, run, verify
from quire.io.into_model import LoadReport, load
from quire.io.layout import StoredWeight
from quire.io.reading import Checkpoint, read
from quire.io.te_state import te_state, te_states
from quire.io.writing import SaveReport, write
from quire.tensor.origin import Origin

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "Difference",
    "Inspection",
    "LoadReport",
    "Origin",
    "Run",
    "SaveReport",
    "StoredWeight",
    "Verification",
    "convert",
    "diff",
    "inspect",
    "load",
    "read",
    "te_state",
    "te_states",
    "run",
    "save",
    "verify",
    "write",
]
