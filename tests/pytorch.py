"""What tests need of PyTorch itself. Imported, it makes Dynamo compile sooner: it no longer times the guards of each
graph, which flushes the caches of the processor first and takes a quarter of the time of a small graph. Only a log
says these times. And Python looks for garbage less often: what imports and compilers make is mostly kept, and looking
through it takes a tenth of their time."""

import gc
from pathlib import Path

gc.set_threshold(20000, 20, 20)

import pytest  # noqa: E402  after garbage is looked for less often
import torch  # noqa: E402
from torch._dynamo import guards  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

import torch_pin  # noqa: E402

guards.profile_guard_manager = lambda *_: 0.0


def forget() -> None:
    """What has been compiled, and layers that only compiled code refers to."""
    torch.compiler.reset()
    gc.collect()


def freeze() -> None:
    """No later collection looks at what there is now, most of which imports have made. Layers of compiled code go
    first: frozen, they would never be collected, and steps of delayed scaling take all layers that there are."""
    forget()
    gc.freeze()


def is_before(version: str) -> bool:
    return torch_pin.minor(torch.__version__) < torch_pin.minor(version)


def fails_before(version: str, why: str, since: str = "0.0") -> pytest.MarkDecorator:
    """Skips a test with minor versions of PyTorch before that one, such as "2.13", beginning with `since`."""
    return pytest.mark.skipif(is_before(version) and not is_before(since), reason=f"before PyTorch {version}: {why}")


def fails_since(version: str, why: str) -> pytest.MarkDecorator:
    """The same with that version and later ones, for what PyTorch itself does worse than before."""
    return pytest.mark.skipif(not is_before(version), reason=f"since PyTorch {version}: {why}")


def missing_before(version: str, why: str, *devices: str) -> dict[str, str]:
    """The same for `missing` of a way or a feature (every_way.py, every_feature.py)."""
    return dict.fromkeys(devices, f"before PyTorch {version}: {why}") if is_before(version) else {}


_OTHER_DTYPES = "AOTInductor's runtime gives operators other dtypes than the exported ones"
#: The file has numbers of torch.export's enumeration, which this runtime takes for c10's: float32 becomes float64.
aotinductor = fails_before("2.12", _OTHER_DTYPES)
NO_AOTINDUCTOR = missing_before("2.12", _OTHER_DTYPES, "cpu", "cuda")


_AS_IT_WAS = "the fake group leaves memory for what others send as it was"
#: Of one process that stands for several.
fake_group = fails_before("2.13", _AS_IT_WAS)
UNWRITTEN = {"cuda": _AS_IT_WAS} | missing_before("2.13", _AS_IT_WAS, "cpu", "quiretest")

#: Of functions whose result is a constant for Dynamo (torch.compiler.assume_constant_result).
takes_objects = fails_before("2.12", "Dynamo passes them no object of a class that it does not know")


#: Of a result of a graph whose rows are all at one place in memory, such as the carrier of a quantized activation.
takes_gradients_of_expanded_results = fails_before(
    "2.13", "a graph copies the gradient of an expanded result to a tensor with its strides", since="2.12"
)


def need_cmake_package() -> None:
    """Skips a test where find_package(Torch) of a build with CUDA finds no CUDA toolkit (docs/serve-cpp.md)."""
    from torch.utils.cpp_extension import CUDA_HOME

    if torch.version.cuda and not (CUDA_HOME and Path(CUDA_HOME, "include/cuda_runtime.h").exists()):
        pytest.skip(f"find_package(Torch) of {torch.__version__} needs a CUDA toolkit")


class Operators(TorchDispatchMode):
    """Hears of every operator that PyTorch dispatches. seen: their names, in order."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))
