"""Everything around the products of a mixture of experts: each operator beside a device copy of as many bytes.

8192 tokens of 4096 numbers in bfloat16, 8 experts, 2 of them for each token. Bytes are those that an operator must read
and write once. Several calls are queued behind a kernel that sleeps, so that the host's time is not part of a figure.

Expected on an H100, as parts of the copy's speed. Rows move and are summed by 16 bytes a lane, four of them in flight:
permute 0.8, with weights 0.75, unpermute 0.75, its dot products 0.7. Dequantization reads 8 codes a lane, four of these
in flight, and takes about 10 instructions for a number, where 30 would be as slow as memory: 0.85 for lines along
memory; 0.7 for columns of mxfp8, which are read by 32 bytes of a row and written by 64 bytes of a line. Norms 0.7 and
activations 0.85 forward; activations 0.8 backward; norms 0.45 backward, because the sums over rows read both matrices
once more. A fingerprint hashes 8 bytes in about 30 instructions, with one load in flight: 0.6.

The rest has few bytes and is measured in microseconds. A kernel takes 2 at least, and a fill 1.5. route and its
gradient take 5 (a warp a token), limit_capacity 10 and expert_rows 12, because 16384 places are more than one block
ranks (a fill and three or four kernels); 4096 places 6, by one block. The update of delayed scaling takes 9 for a
history of 1024 rows: a copy of the list, a fill, and two kernels, of which end_steps takes 3 instead of 86.
"""

import torch
from speed import line, normal, seconds

import quire

TOKENS, WIDTH, EXPERTS, SLOTS = 8192, 4096, 8, 2
ROUTING = "softmax:topk=2:renormalize"
#: Rows and columns of a weight to dequantize.
WEIGHT = (8192, 16384)


def bytes_of(*tensors) -> int:
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)


def report(what: str, call, read: int, copied: float | None) -> None:
    """`read`: bytes beside the results'; `copied`: bytes a second of a copy."""

    def figure() -> str:
        with torch.no_grad():
            results = call()
            took = seconds(call)
        results = results if isinstance(results, (tuple, list)) else (results,)
        part = f", {(read + bytes_of(*results)) / took / copied:.3f} of a copy of as many bytes" if copied else ""
        return f"{took * 1e6:.1f} us{part}"

    line(what, figure)


def rows(copied: float) -> None:
    """Routing, and rows between the order of tokens and the order of experts."""
    ops = torch.ops.quire
    x, logits = normal(TOKENS, WIDTH), normal(TOKENS, EXPERTS, dtype=torch.float32)
    weights, ids = ops.route_fwd(logits, None, ROUTING)
    row_map, _ = ops.expert_rows(ids, EXPERTS)
    places = TOKENS * SLOTS
    y = ops.permute_fwd(x, row_map, None, places)
    once = bytes_of(x)
    report("route", lambda: ops.route_fwd(logits, None, ROUTING), 0, None)
    report("route, gradient", lambda: ops.route_bwd(weights, logits, ids, ROUTING), 0, None)
    report("limit_capacity", lambda: ops.limit_capacity(ids, EXPERTS, places // EXPERTS), 0, None)
    report("expert_rows", lambda: ops.expert_rows(ids, EXPERTS), 0, None)
    few = ids[: 4096 // SLOTS].contiguous()
    report("expert_rows of 4096 places", lambda: ops.expert_rows(few, EXPERTS), 0, None)
    report("permute", lambda: ops.permute_fwd(x, row_map, None, places), once, copied)
    report("permute with weights", lambda: ops.permute_fwd(x, row_map, weights, places), once, copied)
    report("unpermute", lambda: ops.unpermute_fwd(y, row_map, None), bytes_of(y), copied)
    report("unpermute with weights", lambda: ops.unpermute_fwd(y, row_map, weights), bytes_of(y), copied)
    report("unpermute, gradient of weights", lambda: ops.unpermute_dot(y, row_map, x), once + bytes_of(y), copied)


def state(copied: float) -> None:
    """What layers keep: fingerprints of weights, and the scales of delayed scaling."""
    w = normal(*WEIGHT)
    report("fingerprint", lambda: torch.ops.quire.fingerprint(w), bytes_of(w), copied)
    for slots in (3, 64):
        history = torch.rand(1024, slots, device="cuda")
        scale, amax, reduced = torch.ones(slots, device="cuda"), *torch.rand(2, slots, device="cuda")
        usage = torch.tensor([1, 1024, 1024], device="cuda")
        # Number, length, most recent, margin, largest forward and backward; a row of zeros ends the table.
        rules = torch.tensor([[1.0, 1024, 0, 0, 448, 57344], [0.0] * 6], device="cuda", dtype=torch.float64)

        def update(of=(history, scale, amax, usage), reduced=reduced, rules=rules) -> tuple:
            torch.ops.quire.delayed_update_(*([t] for t in of), [reduced], rules, False)
            return ()

        report(f"delayed_update_ of {slots} slots and 1024 rows", update, 0, None)


def decoded(copied: float) -> None:
    """Both directions of each family."""
    w = normal(*WEIGHT)
    for spec in (
        "fp8_tensor",
        "fp8_row",
        "fp8_block",
        "fp8_block:128x128",
        "mxfp8",
        "mxfp8:swizzled",
        "mxfp4",
        "nvfp4",
    ):
        buffers = torch.ops.quire.quantize(w, spec, True, True)
        for columnwise in (False, True):
            of = buffers[3:] if columnwise else buffers[:3]
            for dtype in (torch.bfloat16, torch.float16, torch.float32):
                report(
                    f"dequantize {spec}{' columnwise' if columnwise else ''} to {str(dtype)[6:]}",
                    lambda of=of, s=spec, c=columnwise, d=dtype: torch.ops.quire.dequantize(*of, s, c, WEIGHT, d),
                    bytes_of(*of),
                    copied,
                )


def pointwise(copied: float) -> None:
    """Norms and activations without quantization, and their gradients."""
    ops, dtype = torch.ops.quire, torch.bfloat16
    x, dy, gamma = normal(TOKENS, WIDTH), normal(TOKENS, WIDTH), torch.ones(WIDTH, device="cuda", dtype=dtype)
    for name, beta in (("RMSNorm", None), ("LayerNorm", torch.zeros_like(gamma))):
        forward = ops.norm_fwd(x, gamma, beta, name, 1e-5, False, dtype)
        mean, rstd = forward[-2:]
        report(name, lambda n=name, b=beta: ops.norm_fwd(x, gamma, b, n, 1e-5, False, dtype), bytes_of(x), copied)
        needs = 3 if beta is None else 7
        report(
            f"{name}, gradient",
            lambda n=name, m=mean, r=rstd, k=needs: ops.norm_bwd(dy, x, gamma, m, r, n, False, k),
            bytes_of(x, dy),
            copied,
        )
    for name, inputs in (("gelu", 1), ("silu", 1), ("swiglu", 2)):
        of = normal(TOKENS, inputs * WIDTH)
        report(name, lambda n=name, x=of: ops.activation_fwd(x, n, dtype), bytes_of(of), copied)
        report(f"{name}, gradient", lambda n=name, x=of: ops.activation_bwd(dy, x, n), bytes_of(of, dy), copied)


def main() -> None:
    x = normal(8192, 8192)
    y = torch.empty_like(x)
    copied = 2 * bytes_of(x) / seconds(lambda: y.copy_(x))
    print(f"quire {quire.__version__}, copy of 128 MiB: {copied / 1e12:.2f} TB/s", flush=True)
    rows(copied)
    state(copied)
    pointwise(copied)
    decoded(copied)


if __name__ == "__main__":
    main()
