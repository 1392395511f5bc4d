"""Export four small quantized models for a C++ program that has no Python.

    python examples/serve_cpp/export.py FOLDER

writes for each model FOLDER/MODEL.pt2, the compiled model, and FOLDER/MODEL.cases.pt, inputs with the outputs of the
compiled model in Python: [input, output, input, output, ...], batches of 1, 16 and 100 rows. Two models are named
after their recipe. The third, "mixture", is a mixture of experts. The fourth, "runners", has no weights for its
products, only the names of runners, which the program registers from FOLDER/runners.weights.pt: [w, w13, w2].
"""

import argparse
from pathlib import Path

import torch
from torch import nn

import quire

RECIPES = ("mxfp8", "nvfp4")
EXPERTS, TOP_K, INNER = 8, 2, 48
BATCHES = (1, 16, 100)
WIDTHS = (64, 128, 32)


class Served(nn.Module):
    """Linear, GELU, Linear under one recipe. `quire.autocast` can be a part of an exported model."""

    def __init__(self, recipe: str):
        super().__init__()
        self.recipe = quire.recipe.from_name(recipe)
        self.up = quire.Linear(WIDTHS[0], WIDTHS[1])
        self.down = quire.Linear(WIDTHS[1], WIDTHS[2])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with quire.autocast(recipe=self.recipe):
            return self.down(nn.functional.gelu(self.up(x)))


class Mixture(nn.Module):
    """A mixture of experts and a linear layer under one recipe."""

    def __init__(self):
        super().__init__()
        self.recipe = quire.recipe.from_name("mxfp8")
        self.experts = quire.MoE(WIDTHS[0], INNER, EXPERTS, TOP_K)
        self.down = quire.Linear(WIDTHS[0], WIDTHS[2])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with quire.autocast(recipe=self.recipe):
            return self.down(self.experts(x))


class Routed(nn.Module):
    """A mixture of experts and a linear layer, computed by the runners "served.experts" and "served.linear"."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTHS[0], EXPERTS, bias=False, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = torch.softmax(self.router(x).float(), dim=-1)
        weights, ids = scores.topk(TOP_K)
        y = quire.nvfp4_moe(x, weights / weights.sum(-1, keepdim=True), ids.int(), "served.experts", WIDTHS[0])
        return quire.nvfp4_linear(y, "served.linear", WIDTHS[2])


@torch.no_grad()
def export(name: str, model: nn.Module, dtype: torch.dtype, folder: Path) -> None:
    model = model.eval().requires_grad_(False)
    example = torch.randn(BATCHES[-1], WIDTHS[0]).to(dtype)
    batch = torch.export.Dim.DYNAMIC
    program = torch.export.export(model, (example,), dynamic_shapes={"x": {0: batch}})
    package = str(folder / f"{name}.pt2")
    torch._inductor.aoti_compile_and_package(program, package_path=package)

    served, cases = torch._inductor.aoti_load_package(package), []
    for rows in BATCHES:
        x = torch.randn(rows, WIDTHS[0]).to(dtype)
        y = served(x)
        # Not compared exactly: Inductor's GELU differs from eager's in last bits, which quantization may magnify.
        distance = (y - model(x)).norm() / y.norm()
        assert distance < 0.01, f"{name}: compiled and eager are {distance:.2g} apart"
        cases += [x, y]
    torch.save(cases, folder / f"{name}.cases.pt")


def export_runners(folder: Path) -> None:
    weights = [
        torch.randn(shape).to(torch.bfloat16) / shape[-1] ** 0.5
        for shape in ((WIDTHS[2], WIDTHS[0]), (EXPERTS, 2 * INNER, WIDTHS[0]), (EXPERTS, WIDTHS[0], INNER))
    ]
    torch.save(weights, folder / "runners.weights.pt")
    w, w13, w2 = weights
    with (
        quire.runners.register(quire.runners.LinearRunner(w), name="served.linear"),
        quire.runners.register(quire.runners.MoERunner(w13, w2), name="served.experts"),
    ):
        export("runners", Routed(), torch.bfloat16, folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where to write; made if it is not there")
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    for recipe in RECIPES:
        torch.manual_seed(0)
        export(recipe, Served(recipe), torch.float32, folder)
        print(f"exported {folder / recipe}.pt2")
    export("mixture", Mixture(), torch.float32, folder)
    print(f"exported {folder / 'mixture'}.pt2")
    export_runners(folder)
    print(f"exported {folder / 'runners'}.pt2")


if __name__ == "__main__":
    main()
