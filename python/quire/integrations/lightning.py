"""PyTorch Lightning: a precision plugin that trains torch.nn.Linear layers in the formats of a recipe
(docs/integrations.md)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import torch

from quire.autocast import autocast
from quire.conversion.convert import MIN_FEATURES, convert
from quire.integrations import needed
from quire.loading.devices import devices
from quire.recipe import Recipe, as_recipe, default

#: The version that tests run with.
KNOWN = "2.6.6"
needed("quire.integrations.lightning", "lightning.pytorch", KNOWN)

from lightning.pytorch.plugins.precision import Precision  # noqa: E402


class QuirePrecision(Precision):
    """lightning.pytorch.Trainer(plugins=[QuirePrecision("mxfp8")]): the model's torch.nn.Linear become quire.Linear,
    and steps of training, validation, test and prediction run within quire.autocast.

    recipe: as for quire.autocast; None: its default. Delayed scaling is allowed.
    filter, min_features: as for quire.convert.
    dtype: torch.bfloat16 or torch.float16 also runs steps within torch.autocast of that dtype; None does not. Losses
        are not scaled, which float16 may need.
    """

    def __init__(
        self,
        recipe: Recipe | str | None = None,
        filter: Callable[[torch.nn.Module, str], bool] | None = None,
        *,
        min_features: int = MIN_FEATURES,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if dtype not in (None, torch.bfloat16, torch.float16):
            raise ValueError(f"QuirePrecision: dtype must be torch.bfloat16, torch.float16 or None, got {dtype}")
        self.recipe = as_recipe("QuirePrecision", recipe) or default()
        self.filter, self.min_features, self.dtype = filter, min_features, dtype
        self.precision = {None: "32-true", torch.bfloat16: "bf16-mixed", torch.float16: "16-mixed"}[dtype]

    def convert_module(self, module: torch.nn.Module) -> torch.nn.Module:
        """Converts the model in place, before its optimizers are made."""
        return convert(module, None, self.filter, min_features=self.min_features)

    @contextlib.contextmanager
    def forward_context(self) -> Iterator[None]:
        """What a step runs within."""
        with contextlib.ExitStack() as stack:
            if self.dtype is not None:
                for device in devices():
                    stack.enter_context(torch.autocast(device, self.dtype))
            stack.enter_context(autocast(recipe=self.recipe))
            yield
