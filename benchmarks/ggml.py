"""ggml's 4-bit products and quantizers, as a peer: `./dev bench ggml` fetches its source, builds it below build/.

The source distribution of llama-cpp-python carries ggml. It is built for this machine's instructions, and called
through its C interface by ctypes: graphs of one product, on threads of its own, that wait without spinning so that
they do not disturb whoever is timed next. Nothing of it is part of quire.
"""

import ctypes
import functools
import os
import subprocess
import sys
import tarfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

PACKAGE = "llama-cpp-python==0.3.36"
FOLDER = Path(__file__).resolve().parents[1] / "build" / "ggml"
#: Name -> number of the type in ggml.h.
KINDS = {"nvfp4": 40, "mxfp4": 39}
_FLOAT32 = 0
_GRAPH_BYTES = 2**20  # more than a context needs for a graph of one product, data apart

_P, _I, _L, _Z = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_size_t


class _InitParams(ctypes.Structure):
    _fields_ = [("mem_size", _Z), ("mem_buffer", _P), ("no_alloc", ctypes.c_bool)]


class _PoolParams(ctypes.Structure):
    _fields_ = [
        ("cpumask", ctypes.c_bool * 512),
        ("n_threads", _I),
        ("prio", _I),
        ("poll", ctypes.c_uint32),
        ("strict_cpu", ctypes.c_bool),
        ("paused", ctypes.c_bool),
    ]


_BASE = {
    "ggml_init": (_P, [_InitParams]),
    "ggml_free": (None, [_P]),
    "ggml_new_tensor_2d": (_P, [_P, _I, _L, _L]),
    "ggml_get_data": (_P, [_P]),
    "ggml_mul_mat": (_P, [_P, _P, _P]),
    "ggml_new_graph": (_P, [_P]),
    "ggml_build_forward_expand": (None, [_P, _P]),
    "ggml_row_size": (_Z, [_I, _L]),
    "ggml_quantize_chunk": (_Z, [_I, _P, _P, _L, _L, _L, _P]),
    "ggml_log_set": (None, [_P, _P]),
    "ggml_threadpool_params_init": (None, [ctypes.POINTER(_PoolParams), _I]),
    "ggml_backend_graph_compute": (_I, [_P, _P]),
    "ggml_backend_alloc_ctx_tensors": (_P, [_P, _P]),
    "ggml_backend_alloc_ctx_tensors_from_buft": (_P, [_P, _P]),
    "ggml_backend_buffer_free": (None, [_P]),
    "ggml_backend_tensor_set": (None, [_P, _P, _Z, _Z]),
    "ggml_backend_buft_name": (ctypes.c_char_p, [_P]),
    "ggml_backend_reg_dev_get": (_P, [_P, _Z]),
    "ggml_backend_reg_get_proc_address": (_P, [_P, ctypes.c_char_p]),
}
_CPU = {
    "ggml_backend_cpu_init": (_P, []),
    "ggml_backend_cpu_reg": (_P, []),
    "ggml_backend_cpu_set_n_threads": (None, [_P, _I]),
    "ggml_backend_cpu_set_threadpool": (None, [_P, _P]),
    "ggml_threadpool_new": (_P, [ctypes.POINTER(_PoolParams)]),
}


def library_folder() -> Path | None:
    """Where the built libraries lie, if they do."""
    folder = FOLDER / "build" / "src"
    return folder if (folder / "libggml-cpu.so").exists() else None


def build() -> None:
    """Takes a minute or two. Raises CalledProcessError where a step fails."""
    from cmake import CMAKE_BIN_DIR
    from ninja import BIN_DIR as NINJA_BIN_DIR

    FOLDER.mkdir(parents=True, exist_ok=True)
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    subprocess.run(
        [*pip, "--no-binary", ":all:", "--no-build-isolation", "--dest", FOLDER, PACKAGE], check=True, cwd=FOLDER
    )
    (archive,) = FOLDER.glob("llama_cpp_python-*.tar.gz")
    with tarfile.open(archive) as tar:
        tar.extraction_filter = getattr(tarfile, "data_filter", None)  # which Python before 3.11.4 does not have
        tar.extractall(FOLDER, [m for m in tar.getmembers() if "/ggml/" in m.name])
    archive.unlink()
    (source,) = FOLDER.glob("llama_cpp_python-*/vendor/llama.cpp/ggml")
    (source / "ggml.pc.in").touch()  # asked for, and not in the archive
    settings = {"CMAKE_BUILD_TYPE": "Release", "GGML_NATIVE": "ON", "GGML_OPENMP": "OFF", "GGML_BUILD_TESTS": "OFF"}
    options = [f"-D{name}={value}" for name, value in (settings | {"GGML_BUILD_EXAMPLES": "OFF"}).items()]
    cmake = ["cmake", "-G", "Ninja", "-S", source, "-B", FOLDER / "build", *options]
    path = os.pathsep.join([CMAKE_BIN_DIR, NINJA_BIN_DIR, os.environ.get("PATH", os.defpath)])
    for command in (cmake, ["cmake", "--build", FOLDER / "build", "--target", "ggml-cpu"]):
        subprocess.run(["nice", *command], check=True, env=os.environ | {"PATH": path}, stdout=subprocess.DEVNULL)


class _Library:
    """The functions above as attributes, without their prefix; and a CPU backend."""

    def __init__(self, folder: Path):
        for file, functions in (("libggml-base.so", _BASE), ("libggml-cpu.so", _CPU)):
            library = ctypes.CDLL(str(folder / file), mode=ctypes.RTLD_GLOBAL)
            for name, (result, arguments) in functions.items():
                function = getattr(library, name)
                function.restype, function.argtypes = result, arguments
                setattr(self, name.removeprefix("ggml_"), function)
        self._silence = ctypes.CFUNCTYPE(None, _I, ctypes.c_char_p, _P)(lambda *_: None)
        self.log_set(ctypes.cast(self._silence, _P), None)
        self.backend = self.backend_cpu_init()
        self._pools: dict[int, int] = {}

    def use_threads(self, count: int) -> None:
        if count not in self._pools:
            params = _PoolParams()
            self.threadpool_params_init(params, count)
            params.poll = 0
            self._pools[count] = self.threadpool_new(params)
        self.backend_cpu_set_n_threads(self.backend, count)
        self.backend_cpu_set_threadpool(self.backend, self._pools[count])

    def context(self, size: int, no_alloc: bool = False) -> int:
        return self.init(_InitParams(size + _GRAPH_BYTES, None, no_alloc))

    def interleaving(self) -> int | None:
        """The kind of buffer in which weights are laid out for products of many rows."""
        address = self.backend_reg_get_proc_address(self.backend_cpu_reg(), b"ggml_backend_dev_get_extra_bufts")
        kinds = ctypes.CFUNCTYPE(ctypes.POINTER(_P), _P)(address)(self.backend_reg_dev_get(self.backend_cpu_reg(), 0))
        for i in range(16):
            if not kinds[i]:
                return None
            if self.backend_buft_name(kinds[i]) == b"CPU_REPACK":
                return kinds[i]
        return None


@functools.cache
def library() -> _Library:
    return _Library(library_folder())


def _quantize(x: torch.Tensor, kind: int, target: torch.Tensor, rows: range) -> None:
    library().quantize_chunk(
        kind, x.data_ptr(), target.data_ptr(), rows.start * x.shape[1], len(rows), x.shape[1], None
    )


def quantizer(x: torch.Tensor, kind: str, threads: int) -> Callable[[], torch.Tensor]:
    """Quantizes x [M, K] float32, K a multiple of 64; rows are dealt out to threads."""
    number, rows = KINDS[kind], len(x)
    target = torch.empty(rows * library().row_size(number, x.shape[1]), dtype=torch.uint8)
    parts = [range(rows * i // threads, rows * (i + 1) // threads) for i in range(threads)]
    pool = ThreadPoolExecutor(threads)  # ctypes lets go of the interpreter's lock

    def call() -> torch.Tensor:
        list(pool.map(lambda part: _quantize(x, number, target, part), parts))
        return target

    return call


class Product:
    """y [M, N] = x w^T, one graph, with one copy of the weights, a tensor of ggml's."""

    def __init__(self, weights: "Weights", weight: int, x: torch.Tensor):
        lib, (m, k), out_features = library(), x.shape, weights.shape[0]
        self._weights = weights  # owns the tensor's memory
        self._context = lib.context(4 * m * (k + out_features))
        tensor = lib.new_tensor_2d(self._context, _FLOAT32, k, m)
        ctypes.memmove(lib.get_data(tensor), x.contiguous().data_ptr(), 4 * m * k)
        self._y, self._shape = lib.mul_mat(self._context, weight, tensor), (m, out_features)
        self._graph = lib.new_graph(self._context)
        lib.build_forward_expand(self._graph, self._y)

    def __call__(self) -> "Product":
        if status := library().backend_graph_compute(library().backend, self._graph):
            raise RuntimeError(f"ggml_backend_graph_compute returned {status}")
        return self

    def result(self) -> torch.Tensor:
        m, n = self._shape
        data = (ctypes.c_float * (m * n)).from_address(library().get_data(self._y))
        return torch.frombuffer(data, dtype=torch.float32).reshape(m, n).clone()

    def __del__(self) -> None:
        library().free(self._context)


class Weights:
    """A weight [N, K] in ggml's format, as often as is asked for. mxfp4 is interleaved where ggml would do so."""

    def __init__(self, weight: torch.Tensor, kind: str, threads: int):
        self.shape, self._kind = weight.shape, KINDS[kind]
        library().use_threads(threads)
        self._codes = quantizer(weight.float().contiguous(), kind, 1)()
        self.nbytes = self._codes.nbytes
        self._interleaving = library().interleaving() if kind == "mxfp4" else None
        self._contexts: list[tuple[int, int]] = []
        self._tensors: list[int] = []

    def _add(self) -> None:
        lib, (n, k) = library(), self.shape
        context = lib.context(0, no_alloc=True)
        tensor = lib.new_tensor_2d(context, self._kind, k, n)
        if self._interleaving:
            buffer = lib.backend_alloc_ctx_tensors_from_buft(context, self._interleaving)
        else:
            buffer = lib.backend_alloc_ctx_tensors(context, lib.backend)
        lib.backend_tensor_set(tensor, self._codes.data_ptr(), 0, self.nbytes)
        self._contexts.append((context, buffer))
        self._tensors.append(tensor)

    def products(self, x: torch.Tensor, copies: int) -> list[Product]:
        """With x [M, K] float32 and a copy of the weight each."""
        while len(self._tensors) < copies:
            self._add()
        return [Product(self, weight, x) for weight in self._tensors[:copies]]

    def __del__(self) -> None:
        for context, buffer in self._contexts:
            library().backend_buffer_free(buffer)
            library().free(context)


def main() -> None:
    if not library_folder():
        build()
    torch.manual_seed(0)
    x, w = torch.randn(4, 512), torch.randn(256, 512)
    for kind in KINDS:
        (product,) = Weights(w, kind, torch.get_num_threads()).products(x, 1)
        error = (product().result() - x @ w.T).norm() / (x @ w.T).norm()
        print(f"ggml {kind}: a product differs from float32's by {error:.3f} of its norm")
    print(f"built in {library_folder()}; ./dev bench compares with it")


if __name__ == "__main__":
    main()
