"""The machine: its name, and what it can do at most, measured in the same run as what is compared with it."""

import json
import os
import platform
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

import capped
import quire
from clock import best_seconds

ROOT = Path(__file__).resolve().parents[1]
#: Kind of arithmetic -> the name of its loop in the core's benchmark.
_LOOPS = {"float32": "fma_f32", "bfloat16": "dot_bf16", "int8": "dot_int8", "read": "read", "copy": "memcpy"}


@dataclass(frozen=True)
class Peaks:
    """The most of each kind: operations a second of float32, bfloat16 and int8 arithmetic, bytes a second that are
    read, and that a copy reads and writes. 0 where that was not measured, or the machine has no instructions for it."""

    float32: float
    bfloat16: float
    int8: float
    read: float
    copy: float

    def best(self, other: "Peaks") -> "Peaks":
        return Peaks(**{name: max(value, getattr(other, name)) for name, value in vars(self).items()})

    def flops(self, arithmetic: str) -> float:
        """Of a product in that arithmetic, which may also use the wider ones."""
        order = ("float32", "bfloat16", "int8")
        return max(getattr(self, kind) for kind in order[: order.index(arithmetic) + 1])

    def least_seconds(self, flops: float, size: float, arithmetic: str) -> float:
        """The roof: a machine this quick needs so long for so many operations and bytes."""
        return max(flops / self.flops(arithmetic), size / self.read)

    def __str__(self) -> str:
        names = {"float32": "FMA", "bfloat16": "bfloat16", "int8": "int8"}
        rates = [f"{what} {getattr(self, kind) / 1e9:.0f} GOP/s" for kind, what in names.items() if getattr(self, kind)]
        return f"{', '.join(rates)}, reads {self.read / 1e9:.1f} GB/s, copies {self.copy / 1e9:.1f} GB/s"


def by_torch(seconds: float) -> Peaks:
    """What PyTorch reaches on large operands."""
    size, mib = 2048, 2**20
    a, b = torch.randn(size, size), torch.randn(size, size)
    source, target = torch.ones(64 * mib), torch.ones(64 * mib)
    # Where PyTorch only emulates bfloat16, a large product takes half a minute.
    low_size = size if torch.ops.mkldnn._is_mkldnn_bf16_supported() else 256
    low = [matrix[:low_size, :low_size].bfloat16() for matrix in (a, b)]
    best = best_seconds(
        {
            "float32": lambda: a @ b,
            "bfloat16": lambda: low[0] @ low[1],
            "read": lambda: source.sum(),
            "copy": lambda: target.copy_(source),
        },
        seconds,
    )
    work = {"float32": 2 * size**3, "bfloat16": 2 * low_size**3, "read": source.nbytes, "copy": 2 * source.nbytes}
    return Peaks(int8=0.0, **{name: work[name] / best[name] for name in work})


def core_benchmark() -> Path | None:
    """What `./dev bench core` has built, if it has."""
    built = sorted(ROOT.glob("build/*/benchmarks/bench_core"), key=lambda path: path.stat().st_mtime)
    return built[-1] if built else None


def by_loops(program: Path) -> Peaks:
    """What loops of single instructions reach, in the core's benchmark."""
    wanted = "|".join(name if name not in ("read", "memcpy") else f"{name}/256MiB" for name in _LOOPS.values())
    with tempfile.NamedTemporaryFile(suffix=".json") as out:
        arguments = [f"--benchmark_filter=^machine/({wanted})", f"--threads={torch.get_num_threads()}"]
        arguments += [f"--benchmark_out={out.name}", "--benchmark_out_format=json"]
        subprocess.run([program, *arguments], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        found = json.loads(Path(out.name).read_text())["benchmarks"]
    rates = {one["name"].split("/")[1]: one.get("GOP/s", one.get("GB/s")) * 1e9 for one in found}
    return Peaks(**{kind: rates.get(name, 0.0) for kind, name in _LOOPS.items()})


def measure(seconds: float) -> Peaks:
    """The better of both."""
    program = None if capped.isa_of() else core_benchmark()  # its loops use all that the machine has
    found = by_torch(seconds)
    return found if program is None else found.best(by_loops(program))


def describe() -> str:
    with open("/proc/cpuinfo") as file:
        models = {line.split(":")[1].strip() for line in file if line.startswith("model name")}
    cpu = ", ".join(models) or platform.processor()
    cores, isa = len(os.sched_getaffinity(0)), quire.explain(lambda: None).isa
    return (
        f"{cpu}, {cores} cores, {torch.backends.cpu.get_cpu_capability()}; torch {torch.__version__}, "
        f"{torch.get_num_threads()} threads; quire {quire.__version__}, {isa}"
    )
