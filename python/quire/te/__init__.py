"""TransformerEngine's names: a script of it runs with `transformer_engine` changed to `quire.te` in its imports.

    import quire.te.pytorch as te                                 # also `import quire.te as te`, `import quire as te`
    from quire.te.common.recipe import DelayedScaling, Format

pytorch.py has all names. ops has operations that a Sequential chains, graphs.py make_graphed_callables. names.py,
quantizers.py, tensors.py, grouped_tensor.py and moe_*.py are those that quire itself has other words for; common has
recipes whose fields can be set, and quantizer_roles.py the quantizers of its CustomRecipe; layers.py gives quire's
layers the arguments and methods that frameworks expect (arguments.py, split.py, fp8_meta.py); absent.py says what to
use instead of what is not here; moved.py keeps older pickles readable, and has TransformerEngine's names of modules.

No other part of quire imports anything from here (tools/check_layers.py), but for the line of quire/__init__.py that
makes `import quire as te` work.
"""

from quire.te import common as common
from quire.te import pytorch as pytorch
from quire.te.absent import message
from quire.te.layers import adopt_names
from quire.te.moved import register_moved
from quire.te.pytorch import *  # noqa: F403

adopt_names()
register_moved()

__all__ = pytorch.__all__


def __getattr__(name: str) -> object:
    raise AttributeError(message(name))
