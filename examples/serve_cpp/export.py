"""Export two small quantized models for a C++ program that has no Python.

    python examples/serve_cpp/export.py FOLDER

writes, for each recipe, FOLDER/RECIPE.pt2, the compiled model, and FOLDER/RECIPE.cases.pt, a list of inputs and of what
the compiled model says to them in Python: [input, output, input, output, ...], batches of 1, 16 and 100 rows.
"""

import argparse
from pathlib import Path

import torch
from torch import nn

import quire

RECIPES = ("mxfp8", "nvfp4")
BATCHES = (1, 16, 100)
WIDTHS = (64, 128, 32)


class Served(nn.Module):
    """Linear, GELU, Linear under one recipe. What runs under `quire.autocast` is exported as it runs."""

    def __init__(self, recipe: str):
        super().__init__()
        self.recipe = quire.recipe.from_name(recipe)
        self.up = quire.Linear(WIDTHS[0], WIDTHS[1])
        self.down = quire.Linear(WIDTHS[1], WIDTHS[2])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with quire.autocast(recipe=self.recipe):
            return self.down(nn.functional.gelu(self.up(x)))


@torch.no_grad()
def export(recipe: str, folder: Path) -> None:
    torch.manual_seed(0)
    model = Served(recipe).eval().requires_grad_(False)
    example = torch.randn(BATCHES[-1], WIDTHS[0])
    batch = torch.export.Dim.DYNAMIC
    program = torch.export.export(model, (example,), dynamic_shapes={"x": {0: batch}})
    package = str(folder / f"{recipe}.pt2")
    torch._inductor.aoti_compile_and_package(program, package_path=package)

    served, cases = torch._inductor.aoti_load_package(package), []
    for rows in BATCHES:
        x = torch.randn(rows, WIDTHS[0])
        y = served(x)
        # Not compared exactly: Inductor's GELU differs from eager's in last bits, which quantization may magnify.
        distance = (y - model(x)).norm() / y.norm()
        assert distance < 0.01, f"{recipe}: compiled and eager are {distance:.2g} apart"
        cases += [x, y]
    torch.save(cases, folder / f"{recipe}.cases.pt")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where to write; made if it is not there")
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    for recipe in RECIPES:
        export(recipe, folder)
        print(f"exported {folder / recipe}.pt2")


if __name__ == "__main__":
    main()
