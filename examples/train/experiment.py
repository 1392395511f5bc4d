"""The comparison: the same model, seed and batches once in high precision and once in each recipe."""

import os
import warnings

import estimate
import report
import torch
from data import load_corpus
from run import make_recipe, train_one
from settings import Session, Settings


def fastest_dtype(device: str) -> str:
    """bf16 where the device multiplies bf16, fp32 where PyTorch would have to emulate it: on some CPUs."""
    if torch.device(device).type == "cuda":
        return "bf16"
    capabilities = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    return "bf16" if any(capabilities.get(name) for name in ("amx_bf16", "avx512_bf16", "bf16")) else "fp32"


def make_reproducible() -> None:
    """Use kernels whose sums do not depend on the timing of threads: a resumed run must equal its twin."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it cuBLAS is not deterministic
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # a debugging aid that costs time


def compare(names: list[str], settings: Settings, session: Session) -> None:
    """Train all of `names`, then print the table and write results.json and loss.png to `session.out`."""
    for name in names:
        make_recipe(name)  # a name that does not exist is better found now than after the runs before it
    make_reproducible()
    warnings.filterwarnings("ignore", module="torch._inductor")
    corpus = load_corpus()
    say = print if session.rank in (None, 0) else lambda text: None
    say(corpus)
    experts = f" with {settings.moe} experts" if settings.moe else ""
    layers = "1 layer" if settings.layers == 1 else f"{settings.layers} layers"
    shared = f"{settings.processes} processes ({settings.parallel}) of " if settings.processes > 1 else ""
    where = f"{torch.get_num_threads()} threads" if settings.device == "cpu" else settings.device
    say(
        f"{layers}{experts} of width {settings.width}, {settings.steps} steps of "
        f"{settings.batch} x {settings.seq} tokens, seed {settings.seed}, "
        f"baseline in {settings.dtype}, {shared}{where}"
    )
    if not session.resume and settings.processes == 1:
        print(estimate.describe(names, settings, corpus), flush=True)
    results = []
    for name in names:
        result = train_one(name, settings, corpus, session)
        if result is None:
            say(f"{name}: stopped after {session.stop_after} of {settings.steps} steps; --resume continues")
        else:
            results.append(result)
    if results and session.rank in (None, 0):
        report.write(results, settings, corpus, session.out)
