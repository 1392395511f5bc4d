"""TransformerEngine's names: a script of it runs with `transformer_engine` changed to `quire.te` in its imports.

    import quire.te.pytorch as te                                 # also `import quire.te as te`
    from quire.te.common.recipe import DelayedScaling, Format

pytorch.py has all names. layers.py has quire's layers with the arguments and methods that frameworks expect;
arguments.py serves all functions that take further arguments. ops has operations that a Sequential chains, attention
the layers of attention, and graphs.py make_graphed_callables. quantization.py, distributed.py, quantizers.py,
tensors.py, grouped_tensor.py and moe_*.py have names for which quire itself has other words. common has recipes whose
fields can be set, and quantizer_roles.py the quantizers of its CustomRecipe. names.py has TransformerEngine's names of
modules, and says what to use instead of names that are not here.

No other part of quire imports anything from here (tools/check_layers.py).
"""

import importlib

from quire.te import common as common
from quire.te import pytorch as pytorch
from quire.te.names import MODULES, find_names, import_as_transformer_engine
from quire.te.pytorch import *  # noqa: F403
from quire.te.tensors import add_names

#: The version of TransformerEngine whose names and arguments are here. Libraries ask for it.
__version__ = "2.20.0.dev0"

add_names()
find_names()

__all__ = [*pytorch.__all__, "import_as_transformer_engine"]


def __getattr__(name: str) -> object:
    if name in MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    return pytorch.__getattr__(name)
