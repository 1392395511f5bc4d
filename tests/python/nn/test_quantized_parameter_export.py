"""Frozen models with quantized weights, exported."""

import pytest
import torch

import quire
from every_recipe import DEFAULTS, TABLE, VARIANTS


def frozen(recipe):
    torch.manual_seed(2)
    with torch.no_grad(), quire.quantized_model_init(recipe=recipe):
        layers = [quire.Linear(48, 96), torch.nn.ReLU(), quire.Linear(96, 32)]
    return torch.nn.Sequential(*layers).requires_grad_(False)


def exported(model, recipe, **options):
    with torch.no_grad(), quire.autocast(recipe=recipe):
        rows = torch.export.Dim("rows", min=2)
        return torch.export.export(model, (torch.randn(5, 48),), dynamic_shapes=({0: rows},), **options)


@pytest.mark.parametrize(
    ("name", "strict"), [*((name, False) for name in DEFAULTS | VARIANTS), *((name, True) for name in DEFAULTS)]
)
@pytest.mark.slow
def test_an_exported_model_holds_codes_only_and_gives_the_same_bits(name, strict, equal_bits):
    recipe = TABLE[name]
    model = frozen(recipe)
    program = exported(model, recipe, strict=strict)
    decomposed = program.run_decompositions()
    targets = [str(node.target) for node in program.graph.nodes]
    assert targets.count("quire.linear_prequantized.default") == 2
    for rows in (5, 2, 33):
        x = torch.randn(rows, 48)
        with torch.no_grad(), quire.autocast(recipe=recipe):
            expected = model(x)
        assert equal_bits(program.module()(x), expected)
        assert equal_bits(decomposed.module()(x), expected)


def test_an_exported_model_is_saved_and_loaded(recipe, tmp_path, equal_bits):
    model, x = frozen(recipe), torch.randn(7, 48)
    torch.export.save(exported(model, recipe), tmp_path / "model.pt2")
    loaded = torch.export.load(tmp_path / "model.pt2").module()
    with torch.no_grad(), quire.autocast(recipe=recipe):
        assert equal_bits(loaded(x), model(x))
