"""Stand-ins for TransformerEngine's modules and for CUDA, in a process that runs its tests (tools/peer_tests.py)."""

import functools
import importlib.abc
import importlib.machinery
import math
import sys
import types
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

#: Modules of TransformerEngine that are its implementation, not its interface. Their names need no counterpart.
INTERNAL_MODULES = (
    "transformer_engine_torch",
    "transformer_engine.pytorch.cpp_extensions",
    "transformer_engine.pytorch.triton",
    "transformer_engine.pytorch.utils",
    "transformer_engine.pytorch.jit",
    "transformer_engine.pytorch.constants",
    "transformer_engine.pytorch.module.",
    "transformer_engine.pytorch.tensor.storage",
    "transformer_engine.pytorch.custom_recipes.reference",
    "transformer_engine.pytorch.tensor.utils",
    "transformer_engine.pytorch.ops.",
    "transformer_engine.pytorch._",
)


#: Whose names are those of layers too.
OPERATIONS = "transformer_engine.pytorch.ops."


def normal(deviation: float) -> object:
    """An init_method."""
    return functools.partial(torch.nn.init.normal_, mean=0.0, std=deviation)


class NoKernel:
    """A fused operation of TransformerEngine's whose kernel is not there. Tests that ask skip what needs it."""

    @staticmethod
    def is_supported() -> bool:
        return False


#: Functions of TransformerEngine's that its tests prepare arguments and references with, in words of PyTorch.
STAND_INS = {
    "init_method_normal": normal,
    "scaled_init_method_normal": lambda deviation, layers: normal(deviation / math.sqrt(2 * layers)),
    "attention_mask_func": lambda scores, mask: scores.masked_fill(mask, -10000.0),
    "get_device_compute_capability": lambda: (10, 0),
    "is_non_tn_fp8_gemm_supported": lambda: True,
    "is_op_fuser_grouped_tensor_path_supported": lambda *args, **options: True,
    "UNSAFE_PICKLE_EXTRA_STATE_ENV": "NVTE_UNSAFE_PICKLE_EXTRA_STATE",
    "OUTPUT_BUFFER_KEY": "out",
    "GRAD_INPUT_BUFFER_KEY": "dgrad_out",
    # Whether a layer may take a path of TransformerEngine's, which is of no consequence here.
    "is_module_grouped_tensor_path_supported": lambda *args, **options: True,
    # Which kernels of cuDNN there are. Without them TransformerEngine computes the same by others.
    "_cudnn_frontend_version_supported": lambda: False,
    "_cudnn_frontend_supports_grouped_gemm_srelu": lambda: False,
    "_cudnn_frontend_supports_single_group_runtime_offsets": lambda *args: False,
    "GroupedMLP_CuTeGEMMGLU": NoKernel,
}
#: Names of TransformerEngine's states, in modules that have public names too.
INTERNAL_NAMES = (
    "is_fp8_activation_recompute_enabled",
    "in_fp8_activation_recompute_phase",
)


class InternalName(AttributeError):
    """A test uses a name of an internal module."""


class DocumentedName(AttributeError):
    """A test uses a name that quire.te states a reason for not having."""


class MissingName(AttributeError):
    """A test uses a public name that quire.te does not have and does not mention."""


def absence(module: str, name: str, documented: object) -> AttributeError:
    """The error for `name` of `module`; documented: a container of the names that have a stated reason."""
    internal = name in INTERNAL_NAMES or name.startswith("_") or name.endswith("RecipeState")
    if internal or (module + ".").startswith(INTERNAL_MODULES):
        return InternalName(f"{module}.{name} is internal to TransformerEngine")
    if name in documented or module.endswith(".quantizer_factory_zoo"):
        return DocumentedName(f"{module}.{name} is documented as not available")
    return MissingName(f"{module}.{name} is missing in quire.te")


class Absent:
    """A name that can be imported, and used while files are collected, so that the rest of a file runs. A test that
    uses it, or what came of it, fails with the error."""

    collecting = True

    def __init__(self, error: AttributeError):
        self._error = error

    def _use(self, meanwhile: object) -> object:
        if not Absent.collecting:
            raise self._error
        return meanwhile

    def __call__(self, *args: object, **kwargs: object) -> object:
        return self._use(self)

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):  # what inspect, copy and pytest ask every object for
            raise AttributeError(name)
        return self._use(self)

    def __getitem__(self, index: object) -> object:
        return self._use(self)

    def __bool__(self) -> bool:
        return self._use(False)

    def __iter__(self) -> object:
        return self._use(iter(()))

    def _compare(self, other: object) -> bool:
        return self._use(False)

    __lt__ = __le__ = __gt__ = __ge__ = __instancecheck__ = _compare

    def __mro_entries__(self, bases: object) -> tuple[type, ...]:
        error = self._error

        class OfAbsent:
            def __new__(cls, *args: object, **kwargs: object) -> object:
                raise error

        return (OfAbsent,)


class PeerModule(types.ModuleType):
    """A module of TransformerEngine. Its names come from the modules of quire.te, wherever they are there."""

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        import quire.te.attention.masks
        import quire.te.moe_router
        import quire.te.quantization
        import quire.te.quantizer_factories
        from quire.te.names import ABSENT

        if name in STAND_INS:
            return STAND_INS[name]
        te = quire.te
        public = (te.pytorch, te.common.recipe, te.common, te.quantization, te.moe_router, te.attention.masks)
        operations = f"{self.__name__}.".startswith(OPERATIONS)
        for module in (te.ops,) if operations else (*public, te.quantizer_factories):
            if name in vars(module):
                return vars(module)[name]
        return Absent(absence(self.__name__, name, ABSENT))


class PeerFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Gives every module whose name starts with transformer_engine."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> object:
        if name.partition(".")[0] in ("transformer_engine", "transformer_engine_torch"):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return PeerModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def on_cpu(value: object) -> object:
    """value, where it is a CUDA device or its text, as the CPU."""
    if isinstance(value, str) and value.partition(":")[0] == "cuda":
        return "cpu"
    if isinstance(value, torch.device) and value.type == "cuda":
        return torch.device("cpu")
    return value


class CudaIsCpu(TorchFunctionMode):
    """Functions of PyTorch that are asked for CUDA run on the CPU."""

    def __torch_function__(self, func, types, args=(), kwargs=None):  # noqa: ANN001, ANN204 - PyTorch's signature
        if func is torch.Tensor.cuda:
            return args[0]
        kwargs = {key: on_cpu(value) for key, value in (kwargs or {}).items()}
        return func(*map(on_cpu, args), **kwargs)


def asked_by_a_test() -> bool:
    """What torch.cuda.is_available() says to TransformerEngine's tests, which skip without it, and not to PyTorch."""
    return "/tests/pytorch/" in sys._getframe(1).f_code.co_filename


#: Of torch.cuda: name -> what is there instead.
OF_CUDA = {
    "is_available": asked_by_a_test,
    "synchronize": lambda *args: None,
    "current_device": lambda: "cpu",
    "get_device_capability": lambda *args: (10, 0),
    "get_rng_state": lambda *args: torch.get_rng_state(),
    "set_rng_state": lambda state, *args: torch.set_rng_state(state),
    "manual_seed": torch.manual_seed,
    "is_bf16_supported": lambda *args: True,
}


def unskip(module: types.ModuleType) -> None:
    """A function that skips tests which quantize on devices other than CUDA is not told the device."""
    skip = getattr(module, "maybe_skip_quantization", None)
    if callable(skip):
        module.maybe_skip_quantization = lambda *args, device=None, **options: skip(*args, **options)


def install() -> None:
    """Puts all of this in place for the rest of the process."""
    sys.meta_path.insert(0, PeerFinder())
    CudaIsCpu().__enter__()
    for name, function in OF_CUDA.items():
        mock.patch.object(torch.cuda, name, function).start()
    construct = torch.autocast.__init__
    mock.patch.object(
        torch.autocast,
        "__init__",
        lambda self, device_type, *args, **options: construct(self, on_cpu(device_type), *args, **options),
    ).start()
