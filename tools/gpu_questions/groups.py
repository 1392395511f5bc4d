"""Products of groups beside PyTorch's grouped products of bfloat16, in turns: 8 groups, weights of 4096 x 7168, 4096
and 16384 tokens that are balanced, unbalanced, or in half of the groups.

Expected on an H100, where cuBLAS has about 750 TFLOP/s and mma.sync can start a 16 x 8 x 16 every 6 to 7 cycles in each
quarter of a multiprocessor: the loop of the row "pipelined" has 131 to 145 instructions for 64 multiplications, 16
loads from shared memory among them. In tiles of 128 x 256, 32 numbers of the contraction take 816 cycles of the tensor
cores and 704 of shared memory, so 570 TFLOP/s at most, and 450 to 500 if filling the pipeline and storing take a tenth.
Tiles of 128 x 128, which small problems have: 400 to 450. Unbalanced and empty groups change less than a tenth for
16384 tokens. A product of torch._grouped_mm has 500 to 650 TFLOP/s.

Codes are decoded to bfloat16 first, which reads a byte (half a one of NVFP4) and writes two for each of 235 million
weights: 0.3 ms, beside 0.5 ms of the product of 4096 tokens and 2 ms of that of 16384. Quantizing comes to that.
"""

import torch
from speed import line, normal, seconds

import quire

GROUPS, OUTPUTS, INPUTS = 8, 4096, 7168
SPECS = {"none": "", "fp8_row": "fp8_row", "mxfp8": "mxfp8", "nvfp4": "nvfp4"}


def ends(tokens: int, how: str) -> torch.Tensor:
    shares = {
        "balanced": [1] * GROUPS,
        "unbalanced": [64, 1, 16, 3, 27, 9, 5, 3],
        "half of them empty": [0, 2, 0, 2, 0, 2, 0, 2],
    }[how]
    sizes = torch.tensor(shares, dtype=torch.float64)
    return (sizes.cumsum(0) / sizes.sum() * tokens).round().to(torch.int32).cuda()


def of_torch(x: torch.Tensor, w: torch.Tensor, dy: torch.Tensor, offsets: torch.Tensor) -> dict:
    return {
        "forward": lambda: torch._grouped_mm(x, w.transpose(1, 2), offs=offsets),
        "gradient of x": lambda: torch._grouped_mm(dy, w, offs=offsets),
        "gradient of w": lambda: torch._grouped_mm(dy.t(), x, offs=offsets),
    }


def of_quire(x: torch.Tensor, w: torch.Tensor, dy: torch.Tensor, offsets: torch.Tensor, spec: str) -> dict:
    """Each with the quantizers that it needs. A forward pass with gradients quantizes both directions, before."""
    recipe = f"x={spec},w={spec},dy={spec}" if spec else ""
    leaves = x.detach().requires_grad_(), w.detach().requires_grad_()

    def forward(*of: torch.Tensor) -> torch.Tensor:
        return quire.functional.grouped_linear(of[0], [of[1]], [], offsets, recipe, dtype=torch.bfloat16)[0]

    def no_gradients() -> None:
        with torch.no_grad():
            forward(x, w)

    def gradient(which: int):
        y = forward(*(t if i == which else t.detach() for i, t in enumerate(leaves)))
        return lambda: torch.autograd.grad(y, leaves[which], dy, retain_graph=True)

    return {"forward": no_gradients, "gradient of x": gradient(0), "gradient of w": gradient(1)}


def speed_of(call, operations: float) -> str:
    took = seconds(call)
    return f"{took * 1e6:.0f} us, {operations / took / 1e12:.0f} TFLOP/s"


def products(tokens: int, how: str) -> None:
    x, dy, w = normal(tokens, INPUTS), normal(tokens, OUTPUTS), normal(GROUPS, OUTPUTS, INPUTS)
    offsets, product = ends(tokens, how), 2.0 * tokens * OUTPUTS * INPUTS
    calls = {"torch": of_torch(x, w, dy, offsets)}
    for name, spec in SPECS.items():
        try:
            calls[name] = of_quire(x, w, dy, offsets, spec)
        except Exception as error:
            print(f"{name}: {type(error).__name__}: {str(error)[:300]}", flush=True)
    for what in ("forward", "gradient of x", "gradient of w"):
        for name, of_name in calls.items():
            line(f"{tokens} tokens, {how}, {what}, {name}", lambda c=of_name[what]: speed_of(c, product))


def kernels(tokens: int) -> None:
    """How long each kernel runs in a training step."""
    x, dy, w = normal(tokens, INPUTS).requires_grad_(), normal(tokens, OUTPUTS), normal(GROUPS, OUTPUTS, INPUTS)
    w.requires_grad_()
    offsets = ends(tokens, "balanced")
    for name, spec in SPECS.items():
        recipe = f"x={spec},w={spec},dy={spec}" if spec else ""

        def step(recipe: str = recipe) -> None:
            y = quire.functional.grouped_linear(x, [w], [], offsets, recipe, dtype=torch.bfloat16)[0]
            torch.autograd.grad(y, [x, w], dy)

        try:
            step()
            torch.cuda.synchronize()
            activities = [torch.profiler.ProfilerActivity.CUDA]
            with torch.profiler.profile(activities=activities) as found:
                step()
                torch.cuda.synchronize()
            print(f"{name}, kernels of a step of {tokens} tokens:")
            for event in sorted(found.key_averages(), key=lambda e: -e.self_device_time_total)[:12]:
                print(f"  {event.self_device_time_total:8.0f} us  {event.count:3} x {event.key[:80]}", flush=True)
        except Exception as error:
            print(f"{name}: {type(error).__name__}: {str(error)[:300]}", flush=True)


def main() -> None:
    for tokens in (4096, 16384):
        for how in ("balanced", "unbalanced", "half of them empty"):
            products(tokens, how)
    kernels(16384)


if __name__ == "__main__":
    main()
