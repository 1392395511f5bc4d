"""The machine: its name, and what it can do at most, measured in the same run as what is compared with it."""

import os
import platform
from dataclasses import dataclass

import torch

import quire
from clock import best_seconds


@dataclass(frozen=True)
class Peaks:
    """What PyTorch reaches on large operands: FLOP/s of matrix products, bytes/s read, and read or written by a copy.

    Vendors' products come close to the limit of their instructions; integer ones, which 4-bit formats can use, lie
    above these two.
    """

    float32: float
    bfloat16: float
    read: float
    copy: float

    @property
    def flops(self) -> float:
        return max(self.float32, self.bfloat16)

    def best(self, other: "Peaks") -> "Peaks":
        return Peaks(**{name: max(value, getattr(other, name)) for name, value in vars(self).items()})

    def least_seconds(self, flops: float, size: float) -> float:
        """The roof: a machine this quick needs so long for so many operations and bytes."""
        return max(flops / self.flops, size / self.read)


def measure(seconds: float) -> Peaks:
    size, mib = 2048, 2**20
    a, b = torch.randn(size, size), torch.randn(size, size)
    source, target = torch.ones(64 * mib), torch.ones(64 * mib)
    low = a.bfloat16(), b.bfloat16()
    best = best_seconds(
        {
            "float32": lambda: a @ b,
            "bfloat16": lambda: low[0] @ low[1],
            "read": lambda: source.sum(),
            "copy": lambda: target.copy_(source),
        },
        seconds,
    )
    work = {"float32": 2 * size**3, "bfloat16": 2 * size**3, "read": source.nbytes, "copy": 2 * source.nbytes}
    return Peaks(**{name: work[name] / best[name] for name in work})


def describe() -> str:
    with open("/proc/cpuinfo") as file:
        models = {line.split(":")[1].strip() for line in file if line.startswith("model name")}
    cpu = ", ".join(models) or platform.processor()
    cores, isa = len(os.sched_getaffinity(0)), quire.explain(lambda: None).isa
    return (
        f"{cpu}, {cores} cores, {torch.backends.cpu.get_cpu_capability()}; torch {torch.__version__}, "
        f"{torch.get_num_threads()} threads; quire {quire.__version__}, {isa}"
    )
