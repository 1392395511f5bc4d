"""TransformerEngine's names of modules, which scripts import from: found when somebody imports them. And its names that
quire has nothing for: why, and what to use instead."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_USERBUFFERS = (
    "communication is PyTorch's own here",
    "torch.distributed.tensor.parallel, whose async tensor parallelism overlaps it",
)
_AUTOGRAD = ("saving is autograd's own here", "ctx.save_for_backward, which takes a QuantizedTensor as it is")
_OFFLOADING = ("offloading is PyTorch's own here", "torch.autograd.graph.save_on_cpu")
_HYBRID = (
    "a tensor has one spec for both directions",
    "quire.recipe.CustomRecipe, with a spec for each operand, or backward_override",
)
_IDENTITY = (
    "tensors in high precision are plain tensors",
    "quire.te.IdentityQuantizer, which returns them as they are",
)
_COLLECTIVES = (
    "layers communicate themselves",
    "tensor_parallel_mode of quire.te.ops.Linear, or torch.distributed.nn.functional",
)
_FUSION = (
    "operations are composed of layers and never fused",
    "any torch.nn.Module in quire.te.ops.Sequential",
)

#: Name -> (reason, alternative).
ABSENT: dict[str, tuple[str, str]] = {
    **dict.fromkeys(("initialize_ub", "destroy_ub", "UserBufferQuantizationMode"), _USERBUFFERS),
    **dict.fromkeys(("prepare_for_saving", "restore_from_saved", "restore_from_func_ctx"), _AUTOGRAD),
    **dict.fromkeys(("get_cpu_offload_context", "mark_not_offload", "ManualOffloadSynchronizer"), _OFFLOADING),
    **dict.fromkeys(("HybridQuantizer", "HybridQuantizedTensor", "HybridQuantizedTensorStorage"), _HYBRID),
    **dict.fromkeys(("IdentityTensor", "IdentityTensorStorage"), _IDENTITY),
    **dict.fromkeys(("CusolverMpCtx", "newton_schulz"), ("optimizers are PyTorch's own here", "torch.optim.Muon")),
    "FusedMLAQUpProjRopeQuant": (
        "there is no multi-latent attention",
        "quire.Linear, quire.te.apply_rotary_pos_emb and quire.te.DotProductAttention",
    ),
    "GroupedTensorStorage": ("a GroupedTensor has no other class for internal use", "quire.te.GroupedTensor"),
    **dict.fromkeys(("AllGather", "AllReduce", "ReduceScatter"), _COLLECTIVES),
    "fused": _FUSION,
    "get_cudnn_version": ("quire does not use cuDNN", "torch.backends.cudnn.version"),
    "get_device_compute_capability": (
        "is_fp8_available(), is_mxfp8_available() and so on run a computation, and look at no version",
        "torch.cuda.get_device_capability",
    ),
    "onnx_export": ("ONNX has no operators for these formats", "torch.export.export and AOTInductor"),
    "optimizers": ("optimizers are PyTorch's own here", "torch.optim.AdamW with fused=True"),
    "parallel_cross_entropy": (
        "losses are PyTorch's own here",
        "torch.nn.functional.cross_entropy within torch.distributed.tensor.parallel.loss_parallel",
    ),
}


def message(name: str, module: str = "quire.te") -> str:
    """The text of the AttributeError for a name that does not exist. Code that tests by hasattr(), or catches
    ImportError, works with it."""
    if name not in ABSENT:
        return f"module {module!r} has no attribute {name!r}"
    reason, alternative = ABSENT[name]
    return f"{module}.{name} is not available: {reason}. Use {alternative}"


# --- names of modules


_HERE, _ITS = "quire.te", "transformer_engine"
#: Module of TransformerEngine -> the module here that has its names, both without the package.
MODULES = {
    "pytorch.attention": "attention",
    "pytorch.attention.inference": "attention.key_value_cache",
    "pytorch.custom_recipes": "quantizer_factories",
    "pytorch.custom_recipes.quantizer_factories": "quantizer_factories",
    "pytorch.fp8": "quantization",
    "pytorch.ops": "ops",
    "pytorch.permutation": "moe_permutation",
    "pytorch.quantization": "quantization",
    "pytorch.router": "moe_router",
    "pytorch.transformer": "attention.transformer_layer",
    "recipe": "common.recipe",
    # All names of these modules that exist here are also names of the package.
    **dict.fromkeys(
        (
            "pytorch.distributed",
            "pytorch.float8_tensor",
            "pytorch.module",
            "pytorch.quantized_tensor",
            "pytorch.tensor",
            "pytorch.tensor.float8_blockwise_tensor",
            "pytorch.tensor.float8_tensor",
            "pytorch.tensor.mxfp8_tensor",
            "pytorch.tensor.nvfp4_tensor",
        ),
        "pytorch",
    ),
}


def module_of(name: str) -> str | None:
    """The module here for a name below quire.te or transformer_engine; None if the name needs no translation."""
    package = next((each for each in (_HERE, _ITS) if name == each or name.startswith(f"{each}.")), None)
    if package is None:
        return None
    within = name.removeprefix(package).removeprefix(".")
    known = max((one for one in MODULES if f"{within}.".startswith(f"{one}.")), key=len, default="")
    here = ".".join(part for part in (_HERE, MODULES.get(known, ""), within.removeprefix(known).strip(".")) if part)
    return None if here == name else here


class _Same(Loader):
    """Loads a module that exists under another name."""

    def __init__(self, name: str) -> None:
        self._name = name

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(self._name)
        self._own = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._own  # for which importlib has put that of the other name


class _Finder(MetaPathFinder):
    def __init__(self, package: str) -> None:
        self.package = package

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != self.package and not name.startswith(f"{self.package}."):
            return None
        parent, _, last = name.rpartition(".")
        if last in ABSENT:  # without a name, because importlib passes over a missing module that has the name asked for
            raise ModuleNotFoundError(message(last, parent))
        here = module_of(name)
        if here is None or importlib.util.find_spec(here) is None:
            return None
        return importlib.util.spec_from_loader(name, _Same(here))


def find_names(package: str = _HERE) -> None:
    """Has modules found by their names below a package. First, since a path would find some a second time."""
    if not any(isinstance(each, _Finder) and each.package == package for each in sys.meta_path):
        sys.meta_path.insert(0, _Finder(package))


def import_as_transformer_engine() -> None:
    """From now on `import transformer_engine.pytorch`, and imports of other modules of it, give the modules of
    quire.te, whether or not TransformerEngine is installed. Scripts and libraries that import it run unchanged.

    Raises RuntimeError if TransformerEngine itself has been imported.
    """
    there = sys.modules.get(_ITS, sys.modules[_HERE])
    if there is not sys.modules[_HERE]:
        raise RuntimeError(
            "import_as_transformer_engine: transformer_engine has been imported already; call this before, in the "
            "first lines of the program"
        )
    find_names(_ITS)
