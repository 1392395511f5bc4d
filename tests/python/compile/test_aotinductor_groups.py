"""Layers of groups of tokens, exported and run by AOTInductor, whose runtime hands over empty lists as None."""

import pytest
import torch

import pytorch
import quire
from every_recipe import some

RECIPES = some("high_precision", "mxfp8", "nvfp4")


class Layers(torch.nn.Module):
    """Of each recipe a mixture, GroupedLinears with rows in no group, and a LayerNormMLP, in one package for all: what
    takes long is the compiler of C++."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.mixtures = torch.nn.ModuleList(quire.MoE(64, 96, 5, 2) for _ in RECIPES)
        self.groups = torch.nn.ModuleList(
            quire.GroupedLinear(3, 64, 32, bias=bias) for _ in RECIPES for bias in (False, True)
        )
        self.others = torch.nn.ModuleList(quire.LayerNormMLP(64, 96) for _ in RECIPES)

    def forward(self, x, sizes):
        exact, close = [], []
        for index, recipe in enumerate(RECIPES.values()):
            with quire.autocast(enabled=recipe is not None, recipe=recipe):
                close.append(self.mixtures[index](x))
                exact += [layer(x, sizes) for layer in self.groups[2 * index : 2 * index + 2]]
                (exact if recipe else close).append(self.others[index](x))
        return exact, close


@pytest.mark.slow
@pytorch.aotinductor
def test_a_package_with_groups_of_tokens_does_not_die_at_its_first_call(tmp_path, equal_bits):
    model, example = Layers(), (torch.randn(8, 64), torch.tensor([3, 0, 4]))
    with torch.no_grad():
        shapes = ({0: torch.export.Dim("tokens")}, {})
        program = torch.export.export(model, example, dynamic_shapes=shapes)
        package = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "model.pt2"))
    run = torch._inductor.aoti_load_package(package)
    for rows, sizes in ((8, [3, 0, 4]), (100, [1, 90, 9]), (3, [0, 0, 2])):
        x, sizes = torch.randn(rows, 64), torch.tensor(sizes)
        with torch.no_grad():
            (exact, close), (exact_in_python, close_in_python) = run(x, sizes), model(x, sizes)
        assert len(exact) == 8 and len(close) == 4
        assert all(map(equal_bits, exact, exact_in_python))
        for y, expected in zip(close, close_in_python, strict=True):
            # Inductor's products, of the router too, may have another order of sums than eager's: at most 64 + 96
            # roundings by 2^-24, of sums whose magnitudes are below 12 times the result.
            assert y.shape == expected.shape and (y - expected).norm() / expected.norm() < 2**-13
