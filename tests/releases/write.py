"""Writes the files that this release promises to read for ever: python tests/releases/write.py (README.md)."""

import json
import sys
from pathlib import Path

import torch

import quire

HERE = Path(__file__).parent
RECIPES = ("mxfp4", "mxfp8", "nvfp4", "fp8_block", "fp8_current")
DELAYED = {"amax_history_len": 4}


def quantized() -> torch.nn.ModuleDict:
    """A layer with a quantized weight under each recipe."""
    layers = {}
    for name in RECIPES:
        with torch.no_grad(), quire.quantized_model_init(recipe=name):
            layers[name] = quire.Linear(64, 32, device="cpu", params_dtype=torch.float32)
    return torch.nn.ModuleDict(layers)


def with_state() -> torch.nn.Module:
    """A layer that has a state of delayed scaling and one of stochastic rounding, once it has run."""
    return quire.Linear(64, 32, device="cpu", params_dtype=torch.float32)


def integers(*shape: int) -> torch.Tensor:
    """Numbers of which every format here has each, and every sum of products is exact in float32."""
    return torch.randint(-4, 5, shape, generator=torch.Generator().manual_seed(1), dtype=torch.int64).float()


def step(layer: torch.nn.Module, amax: float) -> None:
    x = torch.full((16, 64), amax, requires_grad=True)
    with quire.autocast(recipe=quire.recipe.DelayedScaling(**DELAYED)):
        layer(x).sum().backward()


def exact() -> tuple[torch.export.ExportedProgram, torch.Tensor, torch.Tensor]:
    """A program with codes of a weight, its input, and the output that plain arithmetic gives."""
    with torch.no_grad(), quire.quantized_model_init(recipe="mxfp8"):
        layer = quire.Linear(64, 32, bias=False, device="cpu", params_dtype=torch.float32).requires_grad_(False)
        weight, x = integers(32, 64), integers(8, 64).flip(0)
        layer.weight.copy_(weight)
        with quire.autocast(recipe="mxfp8"):
            program = torch.export.export(layer, (x,), dynamic_shapes=({0: torch.export.Dim("rows", min=2)},))
    return program, x, (x.double() @ weight.double().T).float()


def write(folder: Path) -> None:
    folder.mkdir()
    torch.manual_seed(0)
    model, stateful = quantized(), with_state()
    for amax in (1.0, 2.0):
        step(stateful, amax)
    stack = quire.QuantizedStack.of([model["mxfp8"].weight.detach(), model["mxfp8"].weight.detach()])
    checkpoint = {"model": model.state_dict(), "stateful": stateful.state_dict(), "stack": stack}
    checkpoint |= {"delayed": quire.delayed_state(stateful), "rng": quire.rng_state(stateful)}
    torch.save(checkpoint, folder / "checkpoint.pt")
    program, x, y = exact()
    torch.export.save(program, folder / "exported.pt2")
    values = {f"{name}.weight": layer.weight.detach().dequantize() for name, layer in model.items()}
    torch.save(values | {"x": x, "y": y}, folder / "values.pt")
    versions = {"quire": quire.__version__, "torch": torch.__version__}
    state = quire.delayed_state(stateful)["delayed"]
    lists = {key: value.tolist() for key, value in state.items() if isinstance(value, torch.Tensor)}
    (folder / "values.json").write_text(json.dumps({"written by": versions, "delayed": lists}, indent=1) + "\n")


if __name__ == "__main__":
    target = HERE / quire.__version__
    if target.exists():
        sys.exit(f"{target} exists: the files of a release do not change")
    write(target)
