"""Modules by the names that pickles of before have for them: they name a class by its module."""

import sys
from types import ModuleType

from quire.conversion import report
from quire.te import moe_padding, moe_router, names, quantizers, split, tensors

_MOVED: dict[str, ModuleType] = {
    "quire.convert": report,
    "quire.drop_in": names,
    "quire.moe.te_padding": moe_padding,
    "quire.moe.te_router": moe_router,
    "quire.nn.split": split,
    "quire.quantizer": quantizers,
    "quire.tensor.names": tensors,
}


def register_moved() -> None:
    """Has the modules found under their older names too."""
    for name, module in _MOVED.items():
        parent, _, last = name.rpartition(".")
        sys.modules[name] = module
        if last != "convert":  # which is a function now
            setattr(sys.modules[parent], last, module)
