"""Whether a training step of a quire.Linear is captured in a CUDA graph and replays with new inputs.

Expected: for each recipe "equal": three replays give the bytes of three eager steps.
"""

import sys

import torch

import quire


def step(layer: torch.nn.Module, x: torch.Tensor, recipe: str) -> tuple[torch.Tensor, ...]:
    with quire.autocast(recipe=recipe):
        y = layer(x)
    return y, *torch.autograd.grad(y.float().square().sum(), [x, *layer.parameters()])


def main() -> int:
    wrong = 0
    for recipe in ("fp8_current", "fp8_delayed", "fp8_block", "mxfp8", "nvfp4"):
        layer = quire.Linear(128, 256, device="cuda", dtype=torch.bfloat16)
        x = torch.randn(64, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        try:
            side = torch.cuda.Stream()
            with torch.cuda.stream(side):
                step(layer, x, recipe)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                captured = step(layer, x, recipe)
            same = True
            for _ in range(3):
                with torch.no_grad():
                    x.copy_(torch.randn_like(x))
                graph.replay()
                torch.cuda.synchronize()
                found = [t.clone() for t in captured]
                if recipe not in ("fp8_delayed", "nvfp4"):  # their state goes on
                    same &= all(torch.equal(a, b) for a, b in zip(found, step(layer, x, recipe), strict=True))
                same &= all(bool(t.isfinite().all()) for t in found)
            quire.synchronize("cuda")
            print(f"{recipe}: {'equal' if same else 'DIFFERENT'}")
            wrong += not same
        except Exception as error:  # every recipe is tried
            print(f"{recipe}: {type(error).__name__}: {error}")
            wrong += 1
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
