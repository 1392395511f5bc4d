"""How far quire's rows are from a device copy (quantizers) and from bfloat16 (products), in turns.

Expected on an H100, where about 40 instructions an element for both directions run as fast as the copy of as many
bytes: the row "tiles" executes 68 for MXFP8, 66 for fp8_block, 74 for NVFP4 (95 and 126 in recipes, with the Hadamard
transform and stochastic rounding), so 0.6, 0.6, 0.5, 0.4 and 0.3 of a copy. decode32 multiplies in float32 without
tensor cores: at most 0.06 of bfloat16 for 512 rows. few_rows reads half or a quarter of bfloat16's bytes: 0.5 to 1.5
for one row.

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


def seconds(call, repeats: int = 5) -> float:
    """The best of a few, by events of the stream."""
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


def main() -> None:
    x = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    copy = seconds(lambda: x.clone())
    print(f"copy of 32 MiB: {copy * 1e6:.0f} us")
    for spec in ("fp8_tensor", "fp8_row", "fp8_block", "mxfp8", "mxfp4", "nvfp4"):
        for columnwise in (False, True):
            took = seconds(lambda s=spec, c=columnwise: quire.functional.quantize(x, s, columnwise=c, seed=0), 2)
            print(
                f"quantize {spec} {'both' if columnwise else 'rowwise'}: {took * 1e6:.0f} us, {copy / took:.4f} of copy"
            )
    w = torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16)
    for rows in (1, 16, 512):
        a = torch.randn(rows, 2048, device="cuda", dtype=torch.bfloat16)
        plain = seconds(lambda a=a: a @ w)
        for recipe in ("fp8_current", "mxfp8", "nvfp4"):
            layer = quire.Linear(2048, 2048, bias=False, device="cuda", dtype=torch.bfloat16)
            with quire.autocast(recipe=recipe), torch.no_grad():
                took = seconds(lambda a=a, layer=layer: layer(a), 2)
            print(f"Linear {recipe} of {rows} rows: {took * 1e6:.0f} us, {plain / took:.4f} of bfloat16's speed")
    products()


def products() -> None:
    """The products alone, of operands that are quantized: QUIRE_KERNEL=gemm:exact,... measures other rows."""
    for rows, outputs, inputs in ((16, 4096, 4096), (64, 4096, 4096), (512, 4096, 4096), (4096, 4096, 4096)):
        x = torch.randn(rows, inputs, device="cuda", dtype=torch.bfloat16)
        w = torch.randn(outputs, inputs, device="cuda", dtype=torch.bfloat16)
        plain = seconds(lambda x=x, w=w: x @ w.t())
        for spec in ("fp8_tensor", "fp8_block", "mxfp8", "mxfp4", "nvfp4"):
            of_x, of_w = (quire.functional.operand_buffers(t, spec, columnwise=False) for t in (x, w))
            with torch.no_grad():
                took = seconds(
                    lambda x=x, w=w, s=spec, a=of_x, b=of_w: quire.functional.linear_prequantized(
                        x, w, None, f"x={s},w={s},dy={s}", torch.bfloat16, x_buffers=a, w_buffers=b
                    ),
                    2,
                )
            speed = 2e-12 * rows * outputs * inputs / took
            print(
                f"product {spec} of {rows} x {outputs} x {inputs}: {took * 1e6:.0f} us, {speed:.0f} TFLOP/s, "
                f"{plain / took:.4f} of bfloat16's speed"
            )


if __name__ == "__main__":
    main()
