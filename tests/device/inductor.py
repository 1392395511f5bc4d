"""torch.compile's default backend on the test device: Inductor's C++ kernels, launched on the stream. To import this
registers it; device.py does so when Inductor first asks for the device."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch._dynamo.device_interface import DeviceInterface, register_interface_for_device
from torch._inductor.codecache import CppCodeCache, CppPythonBindingsCodeCache
from torch._inductor.codegen.common import (
    DeviceOpOverrides,
    register_backend_for_device,
    register_device_op_overrides,
)
from torch._inductor.codegen.cpp import CppScheduling
from torch._inductor.codegen.wrapper import PythonWrapperCodegen
from torch._inductor.custom_graph_pass import CustomGraphModulePass
from torch._inductor.virtualized import V

from device import device as testdevice

_MODULE = getattr(torch, testdevice.NAME)
#: The first line of its kernels. The CPU may have the same kernel in the same graph.
_MARK = f"// {testdevice.NAME}\n"


class Interface(DeviceInterface):
    """What Dynamo and Inductor ask of the device while they compile."""

    device = _MODULE.device
    Event = torch.Event
    Stream = torch.Stream
    is_available = staticmethod(lambda: True)
    device_count = staticmethod(_MODULE.device_count)
    current_device = staticmethod(_MODULE.current_device)
    set_device = staticmethod(_MODULE.set_device)
    current_stream = staticmethod(_MODULE.current_stream)
    stream = staticmethod(_MODULE.stream)
    synchronize = staticmethod(_MODULE.synchronize)
    get_compute_capability = staticmethod(lambda device=None: "")
    is_bf16_supported = staticmethod(lambda including_emulation=False: True)


class Overrides(DeviceOpOverrides):
    """Lines of generated Python. Launches find their stream by their tensors."""

    def set_device(self, device_idx: int) -> str:
        return f"torch.{testdevice.NAME}.set_device({device_idx})"

    def synchronize(self) -> str:
        return f"torch.{testdevice.NAME}.synchronize()"

    def device_guard(self, device_idx: int) -> str:
        return f"torch.{testdevice.NAME}.device({device_idx})"


class Scheduling(CppScheduling):
    """Fuses and writes kernels as for the CPU."""

    def codegen_node(self, node: Any) -> None:
        with V.graph.set_current_device(torch.device("cpu")):  # for other devices Inductor expects Triton
            super().codegen_node(node)

    def define_kernel(self, src_code: str, nodes: Any, kernel_args: Any = None) -> str:
        return super().define_kernel(_MARK + src_code, nodes, kernel_args)


class Wrapper(PythonWrapperCodegen):
    """The Python that allocates buffers and calls kernels: those of the device are launched."""

    @staticmethod
    def create(is_subgraph: bool, *rest: Any) -> PythonWrapperCodegen:
        return PythonWrapperCodegen.create(is_subgraph, *rest) if is_subgraph else Wrapper()

    def write_header(self) -> None:
        super().write_header()
        self.imports.splice(f"from {__name__} import launched")

    def define_kernel(self, kernel_name: str, kernel_body: str, *rest: Any, **options: Any) -> None:
        if _MARK in kernel_body:
            kernel_body = kernel_body.replace("async_compile.cpp_pybinding(", f"launched({kernel_name!r}, ")
        super().define_kernel(kernel_name, kernel_body, *rest, **options)

    def make_allocation(self, name: str, device: torch.device, *rest: Any, **options: Any) -> str:
        """PyTorch's own relies on a guard for the device's index, which it enters for its own devices alone."""
        line = super().make_allocation(name, device, *rest, **options)
        return line.replace(f"device='{device.type}'", f"device='{device}'")

    def _generate_kernel_call_helper(self, kernel_name: str, call_args: Any, **_: Any) -> None:
        self.writeline(self.wrap_kernel_call(kernel_name, call_args))


class _Libraries(CppCodeCache):
    """Libraries of kernels, compiled as for the CPU."""

    cpp_compile_command_flags = CppPythonBindingsCodeCache.cpp_compile_command_flags
    _get_uncompiled_header = CppPythonBindingsCodeCache._get_uncompiled_header  # compiled once for all kernels


def launched(name: str, types: Sequence[str], source: str) -> Callable[..., None]:
    """A kernel of Inductor, as a function that launches it on the current stream of its tensors."""
    pointers = [i for i, kind in enumerate(types) if kind.endswith("*")]
    numbers = [i for i, kind in enumerate(types) if not kind.endswith("*")]
    written = [i for i, at in enumerate(pointers) if not types[at].startswith("const ")]
    given = [
        f"static_cast<{kind}>(tensors[{pointers.index(i)}])" if i in pointers else f"numbers[{numbers.index(i)}]"
        for i, kind in enumerate(types)
    ]
    entry = f"""
extern "C" void run_on_device(void* const* tensors, const int64_t* numbers) {{ kernel({", ".join(given)}); }}
"""
    library = _Libraries.load(source + entry)
    address = ctypes.cast(library.run_on_device, ctypes.c_void_p).value

    def launch(*arguments: Any) -> None:
        tensors = [arguments[i] for i in pointers]
        torch.ops.testdevice.launch_compiled(name, address, tensors, written, [arguments[i] for i in numbers])

    return launch


class _Version(CustomGraphModulePass):
    """Changes no graph. PyTorch keeps what it has compiled in files, and asks this for what the files depend on."""

    def __call__(self, gm: torch.fx.GraphModule) -> None:
        pass

    def uuid(self) -> str:
        return hashlib.sha256(Path(__file__).read_bytes()).hexdigest()


register_interface_for_device(testdevice.NAME, Interface)
register_device_op_overrides(testdevice.NAME, Overrides())
register_backend_for_device(testdevice.NAME, Scheduling, Wrapper, device_custom_pass=_Version())
