"""Classes and functions under the names of TransformerEngine, for pickles as it writes them."""

import enum
import pickle
import sys
import types
from typing import NamedTuple

import pytest
import torch


class FormatHelper(NamedTuple):
    max_fwd: float
    max_bwd: float


class Format(enum.Enum):
    E4M3 = FormatHelper(448, 448)
    HYBRID = FormatHelper(448, 57344)


class DelayedScaling:
    def __init__(self, **fields):
        vars(self).update(
            margin=0, fp8_format=Format.HYBRID, amax_history_len=16, amax_compute_algo="max", reduce_amax=True,
            scaling_factor_compute_algo=None, fp8_dpa=False, fp8_mha=False, _cached_repr=None,
        )  # fmt: skip
        vars(self).update(fields)


class MXFP8BlockScaling:
    pass


class DType(enum.IntEnum):
    kFloat8E4M3 = 7
    kFloat8E5M2 = 8
    kFloat4E2M1 = 10


class MXFP8Quantizer:
    def __init__(self, **fields):
        vars(self).update(fields)


class NVFP4Quantizer(MXFP8Quantizer):
    pass


class Float8BlockQuantizer(MXFP8Quantizer):
    pass


RECIPES = "transformer_engine.common.recipe"
TENSORS = "transformer_engine.pytorch.tensor"
NAMES = {
    (RECIPES, "_FormatHelper"): FormatHelper,
    (RECIPES, "Format"): Format,
    (RECIPES, "DelayedScaling"): DelayedScaling,
    (RECIPES, "MXFP8BlockScaling"): MXFP8BlockScaling,
    ("transformer_engine.pytorch.constants", "DType"): DType,
    (f"{TENSORS}.mxfp8_tensor", "MXFP8Quantizer"): MXFP8Quantizer,
    (f"{TENSORS}.nvfp4_tensor", "NVFP4Quantizer"): NVFP4Quantizer,
    (f"{TENSORS}.float8_blockwise_tensor", "Float8BlockQuantizer"): Float8BlockQuantizer,
}
KINDS = ("float8", "mxfp8", "nvfp4", "float8_blockwise")
for (module, name), kind in NAMES.items():
    kind.__module__, kind.__qualname__ = module, name


def rebuild(*args):
    raise AssertionError("a reader called what a pickle names")


@pytest.fixture
def te(monkeypatch):
    """The classes above under TransformerEngine's names while something is pickled."""
    modules = {name for name, _ in NAMES} | {f"{TENSORS}.{kind}_tensor" for kind in KINDS}
    for name in sorted(modules):
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            path = ".".join(parts[:end])
            if path not in sys.modules:
                monkeypatch.setitem(sys.modules, path, types.ModuleType(path))
    for (module, name), kind in NAMES.items():
        monkeypatch.setattr(sys.modules[module], name, kind, raising=False)
    functions = {}
    for kind in KINDS:
        name, module = f"_make_{kind}_tensor_in_reduce_ex", f"{TENSORS}.{kind}_tensor"
        functions[kind] = types.FunctionType(rebuild.__code__, globals(), name)
        functions[kind].__module__, functions[kind].__qualname__ = module, name
        monkeypatch.setattr(sys.modules[module], name, functions[kind], raising=False)
    return functions


class Tensor:
    """Pickled as a tensor of TransformerEngine."""

    def __init__(self, function, *args):
        self.of = function, args

    def __reduce__(self):
        return self.of


def state(gemms=1, length=16, recipe=None):
    made = {}
    for way, slots in (("fwd", 3), ("bwd", 2)):
        made[f"scale_{way}"] = torch.rand(slots * gemms) + 0.5
        made[f"amax_history_{way}"] = torch.rand(length, slots * gemms)
    return {"recipe": recipe or DelayedScaling(), **made, "extra_fp8_variables": {"num_gemms": gemms}}


def payload(value, protocol=pickle.DEFAULT_PROTOCOL):
    return torch.frombuffer(bytearray(pickle.dumps(value, protocol)), dtype=torch.uint8)
