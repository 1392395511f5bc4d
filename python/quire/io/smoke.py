"""Running the quantized layers of a checkpoint, without the model around them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from quire.io.assigning import load_layer
from quire.io.errors import CheckpointError
from quire.io.inspection import table
from quire.io.reading import read
from quire.nn.own_context import running


@dataclass(frozen=True)
class LayerRun:
    """A layer that ran. error: the largest difference from the product of the decoded weight with unquantized inputs,
    relative to the largest result. finite: whether all results are."""

    name: str
    recipe: str
    error: float
    finite: bool


@dataclass(frozen=True)
class Run:
    """The result of run(). str() gives a table; it is true if all results are finite.

    layers: for each layer its name, recipe and error. The error is the largest difference from the matmul of the
    decoded weight with inputs that are not quantized, relative to the largest result.
    """

    path: str
    layers: tuple[LayerRun, ...]

    def __bool__(self) -> bool:
        """Whether all results are finite."""
        return all(layer.finite for layer in self.layers)

    def __str__(self) -> str:
        worst = sorted(self.layers, key=lambda layer: (layer.finite, -layer.error))[:10]
        rows = [("layer", "recipe", "error"), *((w.name, w.recipe, f"{w.error:.2%}") for w in worst)]
        wrong = sum(not layer.finite for layer in self.layers)
        head = f"{self.path}: {len(self.layers)} layers ran, {wrong} with results that are not finite"
        return "\n".join([head, *table(rows)])

    def state(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {"path": self.path, "layers": [vars(layer) for layer in self.layers]}


@running()
def run(path: str | Path, tokens: int = 4) -> Run:
    """Runs each quantized layer by itself, with random inputs of standard deviation 1, under the recipe that load()
    would give it, outside of every autocast of the caller.

    path: as for read(). tokens: the number of rows of the inputs. Raises CheckpointError if no layer is quantized, and
    the errors of read().
    """
    from tqdm import tqdm

    checkpoint = read(path, missing_input_scale="dynamic")
    if not checkpoint.groups:
        raise CheckpointError("no layer is quantized", "nothing is to be run", file=checkpoint.container.path)
    found, generator = [], torch.Generator().manual_seed(0)
    # A bar appears after a second, where someone watches.
    for name in tqdm(checkpoint.groups, desc="quire.io.run", unit="layer", delay=1, disable=None):
        stored = checkpoint[name]
        for index in range(stored.shape[0]) if len(stored.shape) == 3 else [None]:
            layer = load_layer(stored, checkpoint.groups[name].layout, index)
            x = torch.randn(tokens, layer.in_features, generator=generator, dtype=torch.float32, device="cpu")
            x = x.to(checkpoint.dtype)
            y = layer(x).float()
            true = torch.nn.functional.linear(x.float(), layer.weight.dequantize(torch.float32))
            true = true if layer.bias is None else true + layer.bias.float()
            error = float((y - true).abs().max() / true.abs().max().clamp_min(1e-30))
            full = name if index is None else f"{name}[{index}]"
            found.append(LayerRun(full, layer.recipe.linear_spec(), error, bool(torch.isfinite(y).all())))
    return Run(str(path), tuple(found))
