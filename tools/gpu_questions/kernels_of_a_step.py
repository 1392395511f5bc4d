"""Which kernels a layer's training step launches and how long each runs, and the host's time for a call.

Expected: the products of fp8_current take most of its time, and quantizers less than 0.4 of it; a forward pass launches
two quantizers (three kernels each with current scaling) and one product. The host needs at most 40 us for an eager
forward pass of Linear.
"""

import time

import torch
from torch.profiler import ProfilerActivity, profile

import quire


def step(layer: torch.nn.Module, x: torch.Tensor, dy: torch.Tensor, recipe: str) -> None:
    with quire.autocast(recipe=recipe):
        y = layer(x)
    torch.autograd.grad(y, [x, *layer.parameters()], dy)


def plain_step(layer: torch.nn.Module, x: torch.Tensor) -> None:
    y = layer(x)
    torch.autograd.grad(y, [x, *layer.parameters()], y.detach())


def profiled(recipe: str, tokens: int, features: int, steps: int) -> list:
    """What the profiler has seen of so many training steps of a layer, by name."""
    layer = quire.Linear(features, features, device="cuda", dtype=torch.bfloat16)
    x, dy = (torch.randn(tokens, features, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    x.requires_grad_()
    for _ in range(3):
        step(layer, x, dy, recipe)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        for _ in range(steps):
            step(layer, x, dy, recipe)
        torch.cuda.synchronize()
    return found.key_averages()


def kernels(recipe: str, steps: int = 3) -> None:
    print(f"{recipe}, kernels of one step:")
    for event in sorted(profiled(recipe, 8192, 4096, steps), key=lambda e: -e.self_device_time_total):
        if event.self_device_time_total > 0:
            took, count = event.self_device_time_total / steps, event.count / steps
            print(f"  {took:8.0f} us  {count:4.1f} x {event.key[:90]}")


def calls_of_the_host(recipe: str, steps: int = 10) -> None:
    """Which calls of PyTorch and of the driver a small step's time of the host goes to."""
    print(f"{recipe}, calls of the host in one small step:")
    for event in sorted(profiled(recipe, 256, 256, steps), key=lambda e: -e.self_cpu_time_total)[:16]:
        print(f"  {event.self_cpu_time_total / steps:6.1f} us  {event.count / steps:4.1f} x {event.key[:90]}")


def host(recipe: str) -> None:
    layer = quire.Linear(256, 256, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(256, 256, device="cuda", dtype=torch.bfloat16)
    dy = torch.randn_like(x)
    with torch.no_grad(), quire.autocast(recipe=recipe):
        print(f"{recipe}, host time of a forward pass without gradients: {best(lambda: layer(x)):.1f} us")
    x.requires_grad_()
    print(f"{recipe}, host time of a training step: {best(lambda: step(layer, x, dy, recipe)):.1f} us", flush=True)


def best(call, repeats: int = 5, calls: int = 50) -> float:
    call()
    found = float("inf")
    for _ in range(repeats):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        found = min(found, (time.perf_counter() - begin) / calls * 1e6)
    return found


def main() -> None:
    plain = torch.nn.Linear(256, 256, device="cuda", dtype=torch.bfloat16)
    x = torch.randn(256, 256, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        print(f"torch.nn.Linear, host time of a forward pass without gradients: {best(lambda: plain(x)):.1f} us")
    x.requires_grad_()
    print(f"torch.nn.Linear, host time of a training step: {best(lambda: plain_step(plain, x)):.1f} us")
    for recipe in ("fp8_current", "fp8_delayed", "fp8_block", "mxfp8", "nvfp4"):
        for measure in (host, kernels):
            try:
                measure(recipe)
            except Exception as error:  # the others are measured all the same
                print(f"{recipe}: {type(error).__name__}: {str(error)[:300]}", flush=True)
    calls_of_the_host("fp8_current")


if __name__ == "__main__":
    main()
