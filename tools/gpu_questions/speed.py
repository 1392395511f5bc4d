"""How far quire's rows are from a device copy (quantizers) and from bfloat16 (products), in turns.

An H100 executes about 27 instructions an element while it copies the 2.5 bytes that four-bit codes of bfloat16 move,
but only 13 of those that compare, select or work on bits. The row "tiles" executed 27 for a direction of MXFP4, 19 of
them of that kind, and as many for NVFP4. Measured, rowwise and both directions: MXFP8 0.91 and 0.81 of a copy of as
many bytes, MXFP4 0.51 and 0.38, NVFP4 0.36 and 0.30 (16x16: 0.32 and 0.29; in recipes, with the Hadamard transform 0.36
and 0.27, and with stochastic rounding too 0.29 and 0.20), fp8_tensor 0.51 and 0.66. NVFP4 and fp8_tensor read x twice.
Their first pass, which measures amaxes, runs as fast as memory.

Since then additions of float32 encode four bits. Rows and columns execute so many instructions of sm_90 an element, and
so many of those on bits: MXFP4 15 and 13, 5 and 5; NVFP4 15 and 13, 5 and 4; 16x16 15 and 12, 5 and 3; with the
transform 15 and 19, 5 and 6; with stochastic rounding too 24 and 28, 12 and 12. Expected, rowwise and both: MXFP4 0.88
and 0.72; NVFP4 with amaxes given 0.88 and 0.72, 16x16 0.75 and 0.6, with the transform 0.88 and 0.65, with stochastic
rounding too 0.75 and 0.5. With amaxes measured: NVFP4 0.47 and 0.46, with the transform 0.45 and 0.42, with stochastic
rounding too 0.4 and 0.36.

norm_vector and column_vector, rows of 4096 bfloat16: RMSNorm's loops execute 47 instructions for 8 terms of a lane (its
gradient 89) and about 75 for 8 results (101). With up to 13 warps (6) on a multiprocessor these are 19 us (29 us) of
8192 rows if no cycle is lost, beside 48 us (72 us) of memory. The sums over rows read 134 MB once more, in 49 us. They
had been measured at 0.50 and 0.13 of a copy, LayerNorm at 0.32 and 0.10. Expected: RMSNorm 0.8 and 0.5, LayerNorm 0.7
and 0.45.

decode32 multiplies in float32 without tensor cores: at most 0.06 of bfloat16 for 512 rows.

skinny, which up to 64 rows computes both kinds of products, executes so many instructions of SASS for each code of w
and up to 16 rows: 4.6 for fp8, 5.2 for mxfp8, 4.3 for mxfp4, 3.9 for nvfp4. (plain_few_rows has 154 to 192 registers,
so 8 warps on a multiprocessor, which have 16 KB of fp8 or 8 KB of 4 bits on their way when all wait; 32 to 40 KB fill
the memory. It was measured at 0.5 to 0.8 TB/s. skinny has 128 registers, so 16 warps, and twice as much in each lane:
32 to 64 KB.) A multiprocessor of an H100 starts four in a cycle, of 32 lanes each: about 3 if none waits. Memory
brings it 15 codes of a byte or 29 of 4 bits in a cycle. So fp8 needs 2.1 instructions a cycle and mxfp8 2.4 at the
full bandwidth, mxfp4 3.9 and nvfp4 3.5: 2.6 TB/s of w for fp8 and mxfp8 with 1 to 16 rows (52 and 54 us of 8192 x
16384), 2.2 to 2.4 for nvfp4 (32 us), 2.0 to 2.3 for mxfp4 (34 us), and 3 to 5 us for the kernel that writes x. 64
rows: 28 us of tensor cores beside 15 us of decoding in two warps for each quarter of a multiprocessor, and x from the
L2 cache once for each 128 columns: 65 us for fp8, 55 us for 4 bits.

decode executes, for each 16 x 8 x 16 that a warp multiplies in a tile of 128 x 128, so many instructions of PTX: 16 for
fp8_tensor, 20 for MXFP8, MXFP4 and NVFP4, 21 for fp8_block, of which ptxas removes about a third, because they move
registers. An H100 can start such a multiplication every 4 cycles in each quarter of a multiprocessor, and every 6 by
this instruction; the quarter starts one instruction a cycle. So 11 and 14 cycles: 0.36 and 0.29 of the peak, which is
0.45 and 0.36 of bfloat16's speed for 4096 rows if no cycle is lost, and 0.3 if a quarter of them is. exact adds four
numbers for each multiplication, six where scales are E8M0, in tiles that decode each code twice as often: 0.2. Products
of 17 to 64 rows have too few tiles for the GPU, and each waits for memory at each of its steps: 0.1 to 0.3.
"""

import torch

import quire

SPECS = ("fp8_tensor", "fp8_row", "fp8_block", "mxfp8", "mxfp4", "nvfp4", "nvfp4:16x16", "nvfp4:rht", "nvfp4:rht:sr")
OPERANDS = ("fp8_tensor", "fp8_row", "fp8_block", "mxfp8", "mxfp4", "nvfp4")


def seconds(call, calls: int = 5, repeats: int = 5) -> float:
    """Of one call, the best of a few rounds: the device finds all calls of a round in its queue."""
    call()
    best = float("inf")
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(4_000_000)
        begin.record()
        for _ in range(calls):
            call()
        end.record()
        end.synchronize()
        best = min(best, begin.elapsed_time(end) / 1e3 / calls)
    return best


def eager_seconds(call, repeats: int = 5) -> float:
    """The best of a few, as a caller sees it: the host's time counts where the device waits for it."""
    call()
    best = float("inf")
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        call()
        end.record()
        end.synchronize()
        best = min(best, begin.elapsed_time(end) / 1e3)
    return best


def normal(*sizes: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*sizes, device="cuda", dtype=dtype)


def line(what: str, measure) -> None:
    """One figure, or why there is none."""
    try:
        print(f"{what}: {measure()}", flush=True)
    except Exception as error:  # the others are measured all the same
        print(f"{what}: {type(error).__name__}: {str(error)[:300]}", flush=True)


def quantizers() -> None:
    x = normal(8192, 8192)
    y = torch.empty_like(x)
    copied = 4 * x.numel() / seconds(lambda: y.copy_(x))
    print(f"copy of 128 MiB: {copied / 1e12:.2f} TB/s")

    def of(spec: str, both: bool) -> str:
        moved = 2 * x.numel()

        def share(*amaxes) -> str:
            took = seconds(lambda: torch.ops.quire.quantize(x, spec, True, both, 0, 0, None, *amaxes))
            return f"{took * 1e6:.0f} us, {moved / took / copied:.3f} of a copy of as many bytes"

        results = torch.ops.quire.quantize(x, spec, True, both, 0, 0, None)
        moved += sum(t.numel() * t.element_size() for t in results if t is not None)
        if not spec.startswith(("fp8_tensor", "fp8_row", "nvfp4")):
            return share()
        amaxes = torch.ops.quire.amax(x, spec, True, both)
        return f"{share()}; with amaxes given {share(amaxes[0], amaxes[1] if both else None)}"

    for spec in SPECS:
        for both in (False, True):
            line(f"quantize {spec} {'both' if both else 'rowwise'}", lambda s=spec, b=both: of(s, b))


def scaled_mm(rows: int, outputs: int, inputs: int) -> None:
    """PyTorch's FP8, the peer of fp8_tensor."""
    x, w = normal(rows, inputs).to(torch.float8_e4m3fn), normal(outputs, inputs).to(torch.float8_e4m3fn)
    one = torch.ones((), device="cuda")
    took = seconds(lambda: torch._scaled_mm(x, w.t(), one, one, out_dtype=torch.bfloat16))
    print(f"torch._scaled_mm of {rows} x {outputs} x {inputs}: {took * 1e6:.0f} us", flush=True)


def products(rows: int, outputs: int, inputs: int) -> None:
    """The products alone, of operands that are quantized: QUIRE_KERNEL=gemm:exact,... measures other rows."""
    x, w = normal(rows, inputs), normal(outputs, inputs)
    plain = seconds(lambda: x @ w.t())
    print(f"bfloat16 of {rows} x {outputs} x {inputs}: {plain * 1e6:.0f} us", flush=True)
    if rows >= 16:
        scaled_mm(rows, outputs, inputs)

    def of(spec_x: str, spec_w: str) -> str:
        def buffers(t, s):
            return () if s == "none" else quire.functional.operand_buffers(t, s, columnwise=False)

        of_x, of_w = buffers(x, spec_x), buffers(w, spec_w)
        recipe = f"x={spec_x},w={spec_w},dy={spec_x}"
        with torch.no_grad():
            took = seconds(
                lambda: quire.functional.linear_prequantized(
                    x, w, None, recipe, torch.bfloat16, x_buffers=of_x, w_buffers=of_w
                ),
                3,
            )
        speed = 2e-12 * rows * outputs * inputs / took
        read = sum(t.numel() * t.element_size() for t in of_w if t is not None) / took / 1e12
        return f"{took * 1e6:.0f} us, {speed:.0f} TFLOP/s, {read:.2f} TB/s of w, {plain / took:.3f} of bfloat16's speed"

    for spec in OPERANDS:
        line(f"product {spec} of {rows} x {outputs} x {inputs}", lambda s=spec: of(s, s))
    for spec in ("fp8_tensor", "mxfp8", "mxfp4", "nvfp4"):
        line(f"product bf16 x {spec} of {rows} x {outputs} x {inputs}", lambda s=spec: of("none", s))


def layers() -> None:
    """A training step of a layer, beside torch.nn.Linear."""
    x, dy = normal(8192, 4096).requires_grad_(), normal(8192, 4096)

    def step(layer, recipe) -> None:
        with quire.autocast(enabled=recipe is not None, recipe=recipe or "mxfp8"):
            y = layer(x)
        torch.autograd.grad(y, [x, *layer.parameters()], dy)

    layer = torch.nn.Linear(4096, 4096, bias=False, device="cuda", dtype=torch.bfloat16)
    plain = eager_seconds(lambda: step(layer, None))
    print(f"step of torch.nn.Linear: {plain * 1e6:.0f} us", flush=True)
    layer = quire.Linear(4096, 4096, bias=False, device="cuda", dtype=torch.bfloat16)

    def of(recipe: str) -> str:
        took = eager_seconds(lambda: step(layer, recipe))
        return f"{took * 1e6:.0f} us, {plain / took:.3f} of torch.nn.Linear's speed"

    for recipe in ("fp8_current", "fp8_delayed", "fp8_block", "mxfp8", "nvfp4"):
        line(f"step of quire.Linear {recipe}", lambda r=recipe: of(r))


def main() -> None:
    quantizers()
    layers()
    for rows, outputs, inputs in ((4096, 4096, 4096), (8192, 8192, 8192), (1, 8192, 16384), (16, 8192, 16384)):
        products(rows, outputs, inputs)
    for rows in (4, 64, 512):
        products(rows, 8192, 16384)


if __name__ == "__main__":
    main()
