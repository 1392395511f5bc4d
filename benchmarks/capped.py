"""`--isa`: a benchmark in a process of its own, where quire and PyTorch both take an instruction set for the best one.

So a table for another kind of CPU can be made on any machine that has its instructions. What cannot be capped is the
machine: its caches, its memory, and how many vectors it computes at a time.
"""

import argparse
import os
import sys
from collections.abc import Mapping

import torch

import quire

#: QUIRE_ISA -> what tells PyTorch's own kernels, oneDNN and MKL the same. PyTorch's own kernels know no more than these
#: two; MKL heeds it on Intel's CPUs only.
CAPS = {
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"},
    "avx2_vnni": {
        "ATEN_CPU_CAPABILITY": "avx2",
        "ONEDNN_MAX_CPU_ISA": "AVX2_VNNI",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2_E1",
    },
    "avx512": {
        "ATEN_CPU_CAPABILITY": "avx512",
        "ONEDNN_MAX_CPU_ISA": "AVX512_CORE",
        "MKL_ENABLE_INSTRUCTIONS": "AVX512",
    },
    "avx512_vnni": {
        "ATEN_CPU_CAPABILITY": "avx512",
        "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_VNNI",
        "MKL_ENABLE_INSTRUCTIONS": "AVX512_E1",
    },
    "avx512_bf16": {
        "ATEN_CPU_CAPABILITY": "avx512",
        "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16",
        "MKL_ENABLE_INSTRUCTIONS": "AVX512_E3",
    },
}
_MARK = "QUIRE_BENCH_CAPPED"


def environment(isa: str) -> dict[str, str]:
    """What a process is started with, so that both sides take `isa` for the best."""
    return {"QUIRE_ISA": isa, **CAPS[isa], _MARK: isa}


def isa_of(process: Mapping[str, str] = os.environ) -> str | None:
    """What a process is capped to, or None."""
    return process.get(_MARK)


def heading() -> str:
    """What tables say of this process."""
    return f" (capped: quire and PyTorch with no more than {isa_of()})" if isa_of() else ""


def add_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--isa", choices=CAPS, help="as on a CPU that has no more than this: caps quire and PyTorch")


def apply(options: argparse.Namespace) -> None:
    """Starts this program anew with the environment of --isa, which libraries read when they are loaded."""
    if not options.isa:
        return
    if isa_of() != options.isa:
        sys.stdout.flush()
        os.execve(sys.executable, sys.orig_argv, os.environ | environment(options.isa))
    if refused := uncapped(options.isa):
        sys.exit(f"--isa {options.isa}: {'; '.join(refused)}; this table would not be of what it says")


def uncapped(isa: str) -> list[str]:
    """What of this process does not heed its cap, as far as it can be asked: oneDNN says whether it has AVX-512."""
    vectors = CAPS[isa]["ATEN_CPU_CAPABILITY"]
    found = {
        "quire": (quire.explain(lambda: None).isa, isa),
        "PyTorch": (torch.backends.cpu.get_cpu_capability().lower(), vectors),
        "oneDNN": ("avx512" if torch.ops.mkldnn._is_mkldnn_bf16_supported() else "avx2", vectors),
    }
    return [f"{what} has {has}, not {cap}" for what, (has, cap) in found.items() if has != cap]
