"""TransformerEngine's names: a script of it runs with `transformer_engine` changed to `quire.te` in its imports.

    import quire.te.pytorch as te                                 # also `import quire.te as te`
    from quire.te.common.recipe import DelayedScaling, Format

pytorch.py has all names. layers.py has quire's layers with the arguments and methods that frameworks expect
(arguments.py, dividing.py, split.py, fp8_meta.py); ops has operations that a Sequential chains, graphs.py
make_graphed_callables. names.py, quantizers.py, tensors.py, grouped_tensor.py and moe_*.py are those that quire itself
has other words for; common has recipes whose fields can be set, and quantizer_roles.py the quantizers of its
CustomRecipe; tensor_names.py adds what scripts read of quantized tensors; absent.py says what to use instead of what is
not here; import_names.py has TransformerEngine's names of modules.

No other part of quire imports anything from here (tools/check_layers.py).
"""

import importlib

from quire.te import common as common
from quire.te import pytorch as pytorch
from quire.te.import_names import MODULES, find_names, import_as_transformer_engine
from quire.te.pytorch import *  # noqa: F403
from quire.te.tensor_names import add_names

add_names()
find_names()

__all__ = [*pytorch.__all__, "import_as_transformer_engine"]


def __getattr__(name: str) -> object:
    if name in MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    return pytorch.__getattr__(name)
