"""torchtitan: a converter that makes the linear layers of a model's configuration quire's (docs/integrations.md)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from quire.conversion.convert import MIN_FEATURES
from quire.integrations import needed
from quire.nn.linear import Linear
from quire.nn.product_module import checked_recipe

#: The version that tests run with.
KNOWN = "0.3.0"
needed("quire.integrations.torchtitan", "torchtitan.components.quantization", KNOWN)

from torchtitan.components.quantization import QuantizationConverter  # noqa: E402
from torchtitan.models.common.linear import Linear as TitanLinear  # noqa: E402
from torchtitan.protocols.module import Module  # noqa: E402


class QuireLinear(Linear, Module):
    """A quire.Linear that torchtitan builds, initializes and shards as its own modules."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(TitanLinear.Config):
        """That of torchtitan's Linear. recipe: the layer's own; None: what quire.autocast says."""

        recipe: str | None = None

    def __init__(self, config: Config) -> None:
        Linear.__init__(self, config.in_features, config.out_features, bias=config.bias, recipe=config.recipe)

    def parallelize(self, parallel_dims: Any) -> None:
        """As torchtitan's modules. Raises NotImplementedError for tensor parallelism."""
        if parallel_dims.tp > 1:
            raise NotImplementedError(
                f"quire.integrations.torchtitan: the degree of tensor parallelism must be 1, got {parallel_dims.tp}; "
                "use data, context, pipeline or expert parallelism, or convert other layers only (filter_fqns)"
            )
        Module.parallelize(self, parallel_dims)


class QuireLinearConverter(QuantizationConverter):
    """Replaces the configurations of torchtitan's Linear layers by those of QuireLinear. Pass
    QuireLinearConverter.Config(recipe="mxfp8") among the `converters` of a model.

    Configurations of subclasses stay as they are, since their layers may compute something else; experts too.
    """

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(QuantizationConverter.Config):
        """recipe: a recipe's name or text; delayed scaling is not allowed. None: what quire.autocast says.
        filter_fqns: layers whose name has one of these texts are not converted. min_features: layers with fewer inputs
        or outputs are not either.
        """

        recipe: str | None = "mxfp8"
        filter_fqns: list[str] = dataclasses.field(default_factory=lambda: ["lm_head"])
        min_features: int = MIN_FEATURES

    def __init__(self, config: Config) -> None:
        checked_recipe("QuireLinearConverter", config.recipe)
        self.config = config

    def convert(self, model_config: Any) -> Any:
        """Returns the configuration, which is changed in place; another one if it is that of a Linear itself. Raises
        ValueError if no layer is chosen."""
        chosen = list(self._chosen(model_config))
        if not chosen:
            raise ValueError(
                f"QuireLinearConverter: no Linear of {type(model_config).__qualname__} is to be converted, with "
                f"filter_fqns={self.config.filter_fqns} and min_features={self.config.min_features}; pass others"
            )
        for config, parent, place in chosen:
            given = {field.name: getattr(config, field.name) for field in dataclasses.fields(config) if field.init}
            made = QuireLinear.Config(**given, recipe=self.config.recipe)
            if parent is None:
                model_config = made
            elif isinstance(parent, list):
                parent[place] = made
            else:
                setattr(parent, place, made)
        return model_config

    def _chosen(self, model_config: Any) -> Iterator[tuple[Any, Any, Any]]:
        """Configuration, what holds it, and its place there."""
        for name, config, parent, place in model_config.traverse(TitanLinear.Config):
            small = min(config.in_features, config.out_features) < self.config.min_features
            if type(config) is TitanLinear.Config and not small:
                if not any(text in name for text in self.config.filter_fqns):
                    yield config, parent, place
