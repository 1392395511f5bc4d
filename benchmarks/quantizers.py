"""Quantizing and dequantizing one large matrix, against a copy of the same bytes and against ggml."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

import contenders
import ggml
import quire
from clock import best_seconds, cold

SHAPE = (2048, 2048)  # what a call allocates then comes from the heap, not from new pages
SPECS = ["fp8_tensor", "fp8_block", "mxfp8", "mxfp4", "nvfp4", "nvfp4:rht"]
HEADER = f"{'what':<34}{'us':>9}{'GB/s':>8}{'x copy':>8}{'x ggml':>8}"


@dataclass(frozen=True)
class Work:
    """call: does it once. size: bytes that it reads and writes. peer: the ggml call that does the same, "" for none."""

    call: Callable[[], object]
    size: int
    peer: str = ""


def stored(q: quire.QuantizedTensor) -> int:
    return sum(buffer.nbytes for buffer in q.buffer_list() if buffer is not None)


def works(dtype: torch.dtype) -> dict[str, Work]:
    """Of matrices in `dtype`. The copy allocates what it returns, as the others do."""
    source = torch.randn(SHAPE).to(dtype)
    xs = cold(source, source.nbytes)
    found = {"copy": Work(lambda: next(xs).clone(), 2 * source.nbytes)}
    scale = 448 / source.abs().amax().float().reshape(1)
    known = quire.quantize(source, "fp8_tensor", scale=scale)
    found["quantize fp8_tensor, known scale"] = Work(
        lambda: quire.quantize(next(xs), "fp8_tensor", scale=scale), source.nbytes + stored(known)
    )
    lack = "ggml" in contenders.peers_that_lack(*SHAPE)
    for spec in SPECS:
        q = quire.quantize(source, spec)
        kind = spec if spec in ggml.KINDS and dtype == torch.float32 and not lack else ""
        size = source.nbytes + stored(q)
        found[f"quantize {spec}"] = Work(
            lambda spec=spec: quire.quantize(next(xs), spec), size, f"quantize ggml {kind}" if kind else ""
        )
        if kind:
            call = ggml.quantizer(source, kind, torch.get_num_threads())
            found[f"quantize ggml {kind}"] = Work(call, source.nbytes + call().nbytes)
        if spec != "nvfp4:rht":  # rowwise its codes are nvfp4's
            qs = cold(q, stored(q))
            found[f"dequantize {spec}"] = Work(lambda qs=qs: next(qs).dequantize(), size)
    return found


def run(seconds: float) -> list[dict]:
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        print(f"\nquantizers, rowwise, {SHAPE[0]} x {SHAPE[1]} {name}\n{HEADER}")
        found = works(dtype)
        best = best_seconds({what: work.call for what, work in found.items()}, seconds)
        copy = found["copy"].size / best["copy"]
        for what, work in found.items():
            speed = work.size / best[what]
            ggml_ratio = best[work.peer] / best[what] if work.peer else None
            row = {"what": what, "dtype": name, "us": best[what] * 1e6, "gbytes": speed / 1e9}
            rows.append(row | {"x_copy": speed / copy, "x_ggml": ggml_ratio})
            last = f"{ggml_ratio:>8.1f}" if work.peer else ""
            print(f"{what:<34}{row['us']:>9.0f}{row['gbytes']:>8.1f}{speed / copy:>8.2f}{last}", flush=True)
    return rows
