"""The options of one call of a module."""

from typing import NamedTuple

import torch

from quire.autocast import Rule, active_in
from quire.checks import check_type, check_type_or_none
from quire.delayed.step import RulesByLayer
from quire.distributed.placements import Layout, check_parameters, local
from quire.nn.dtype import activation_dtype, check_dtypes
from quire.nn.product_module import ProductModule
from quire.recipe import Recipe
from quire.tensor import QuantizedActivation, QuantSpec


class Call(NamedTuple):
    """The options of one call of a module, shared by all of its matmuls.

    recipe: the active recipe; None means high precision. rule: active_rule(). dtype: of
    the results. is_first_microbatch, fp8_grad: arguments of Linear.forward. output_spec: the text of a spec for the
    module's result, "" for none. layout: how the tensors of a call with a DTensor are sharded; None for a plain x.
    """

    recipe: Recipe | None
    rule: Rule
    dtype: torch.dtype
    is_first_microbatch: bool | None
    fp8_grad: bool
    output_spec: str
    layout: Layout | None

    @property
    def sequence(self) -> bool | None:
        """Whether tokens are sharded along the first dimension, None for what the layer says."""
        return None if self.layout is None else self.layout.sequence

    def of_product(self, product: str) -> "Call":
        """The same with the recipe of a matmul, and the argument of delayed.collect() as rule."""
        recipe, rule = None if self.recipe is None else self.recipe.of_product(product), self.rule
        if isinstance(rule, RulesByLayer):
            rule = None if recipe is None else rule.of(recipe)
        return self if recipe is self.recipe and rule is self.rule else self._replace(recipe=recipe, rule=rule)

    def take(self, x: torch.Tensor | QuantizedActivation) -> torch.Tensor | QuantizedActivation:
        """What this rank computes from."""
        return x if self.layout is None else self.layout.take(x)

    def give(self, y: torch.Tensor, given: torch.Tensor | QuantizedActivation) -> torch.Tensor | QuantizedActivation:
        """The result of which this rank computed the part y. given: the call's x."""
        return y if self.layout is None else self.layout.give(y, given)

    def give_normed(self, normed: torch.Tensor, given: torch.Tensor | QuantizedActivation) -> torch.Tensor:
        """give() of a tensor that is sharded as x is."""
        return normed if self.layout is None else self.layout.give_normed(normed, given)

    def part(self, t: torch.Tensor | None) -> torch.Tensor | None:
        """What this rank has of a parameter."""
        return local(t, None if self.layout is None else self.layout.gradients)


def active_call(
    module: ProductModule,
    x: torch.Tensor | QuantizedActivation,
    is_first_microbatch: bool | None = None,
    *,
    fp8_output: bool = False,
    fp8_grad: bool = False,
    output_spec: QuantSpec | str | None = None,
    layout: Layout | None = None,
) -> Call:
    """The Call for the present context, with the options of Linear.forward. Raises TypeError if dtypes or the types of
    options do not fit, ValueError for an output_spec with stochastic rounding. layout: layout_of() x."""
    (recipe, rule), spec = active_in(module), ""
    if is_first_microbatch is not None or fp8_output is not False or fp8_grad is not False or output_spec is not None:
        what = f"quire.{type(module).__name__}.forward"
        check_type(what, bool, fp8_output=fp8_output, fp8_grad=fp8_grad)
        check_type_or_none(what, bool, is_first_microbatch=is_first_microbatch)
        spec = _result_spec(what, recipe, fp8_output, output_spec)
        if layout is not None and spec:
            raise NotImplementedError(
                f"quire.{type(module).__name__}: the result is a DTensor, and those are not quantized; leave "
                "fp8_output and output_spec out"
            )
    if isinstance(x, QuantizedActivation):
        x.check()
    if recipe is not None or not _is_torchs(module):
        parameters = [(name, module.parameter(name)) for name in (*module.weight_names, *module.bias_names)]
        if layout is None:
            check_parameters(module, x, parameters)
        check_dtypes(module, x, parameters)
    return Call(recipe, rule, activation_dtype(x), is_first_microbatch, fp8_grad, spec, layout)


def _is_torchs(module: ProductModule) -> bool:
    """Whether, without a recipe, the module is a torch.nn.Linear in every respect, dtypes that quire lacks included."""
    return isinstance(module, torch.nn.Linear) and not module.external_wgrad and module.parallel is None


def _result_spec(what: str, recipe: Recipe | None, fp8_output: bool, output_spec: QuantSpec | str | None) -> str:
    """The spec of the result; "" if it is not quantized."""
    if output_spec is None:
        if not fp8_output or recipe is None:
            return ""
        if recipe.weight_only or recipe.static_input:
            raise ValueError(
                f"{what}: fp8_output=True quantizes the result as x, and x is {recipe.input_spec}, which a result "
                "cannot be; give an output_spec"
            )
        return recipe.input_spec
    spec = QuantSpec(output_spec)
    if spec.stochastic:
        raise ValueError(
            f"{what}: output_spec={spec.text!r} rounds stochastically, and results are rounded to nearest; remove 'sr' "
            "from it"
        )
    if "given" in spec.options:
        raise ValueError(
            f"{what}: output_spec={spec.text!r} has a scale that a caller gives, and results have none; remove 'given' "
            "from it"
        )
    return spec.text
