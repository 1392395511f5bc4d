"""The options of one call of a module, and the fast path for ordinary calls."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from quire import delayed
from quire.autocast import active_rule, recipe_of
from quire.checks import check_type, check_type_or_none
from quire.delayed.step import RulesByLayer
from quire.distributed import one_process
from quire.distributed.placements import (
    Layout,
    is_dtensor,
    layout_of_features,
    layout_of_tokens,
    local,
    placed_for,
    refuse_division,
)
from quire.functional import grouped_linear, linear, linear_prequantized
from quire.nn.dtype import activation_dtype, check_dtypes, uses_torch_autocast
from quire.nn.product_module import ProductModule
from quire.nn.weight import stored_weight
from quire.recipe import Recipe
from quire.tensor import QuantizedActivation, QuantizedTensor, QuantSpec
from quire.tensor.order import same_codes

# A graph has a guard for each step of torch._C._is_any_autocast_enabled.
_is_any_autocast_enabled = torch._C._is_any_autocast_enabled

#: y, and where the layer returns it apart, the bias.
Result = torch.Tensor | tuple[torch.Tensor, torch.Tensor | None]


class Call(NamedTuple):
    """The options of one call of a module, shared by all of its matmuls.

    recipe: the active recipe; None means high precision. rule: active_rule(). dtype: of the
    results. is_first_microbatch, fp8_grad: arguments of Linear.forward. output_spec: the text of a spec for the
    module's result, "" for none. layout: how the tensors of a call with a DTensor are sharded; None for a plain x.
    """

    recipe: Recipe | None
    rule: delayed.Rule | RulesByLayer | None
    dtype: torch.dtype
    is_first_microbatch: bool | None
    fp8_grad: bool
    output_spec: str
    layout: Layout | None = None

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
    options do not fit, ValueError for an output_spec with stochastic rounding. layout: of taken(), which gave x."""
    if is_first_microbatch is not None or fp8_output is not False or fp8_grad is not False:
        what = f"quire.{type(module).__name__}.forward"
        check_type(what, bool, fp8_output=fp8_output, fp8_grad=fp8_grad)
        check_type_or_none(what, bool, is_first_microbatch=is_first_microbatch)
    if isinstance(x, QuantizedActivation):
        x.check()
    module.place_states()
    recipe, spec = recipe_of(module), ""
    if output_spec is not None:
        spec = _result_spec(module, output_spec)
    elif fp8_output and recipe is not None:
        if recipe.weight_only or recipe.static_input:
            raise ValueError(
                f"quire.{type(module).__name__}.forward: fp8_output=True quantizes the result as x, and x is "
                f"{recipe.input_spec}, which a result cannot be; give an output_spec"
            )
        spec = recipe.input_spec
    if recipe is not None or not _is_torchs(module):
        parameters = [(name, getattr(module, name)) for name in (*module.weight_names, *module.bias_names)]
        if layout is None:
            _check_plain(module, x, parameters)
        elif spec:
            raise NotImplementedError(
                f"quire.{type(module).__name__}: the result is a DTensor, and those are not quantized; leave "
                "fp8_output and output_spec out"
            )
        check_dtypes(module, x, parameters)
    return Call(recipe, active_rule(), activation_dtype(x), is_first_microbatch, fp8_grad, spec, layout)


def _check_plain(
    module: ProductModule, x: torch.Tensor | QuantizedActivation, parameters: list[tuple[str, torch.Tensor | None]]
) -> None:
    """Raises NotImplementedError for a DTensor of which the layer does not take this rank's shard."""
    divided = module.expert_group is not None or module.of(module.products[0], "parallel") is not None
    for name, tensor in (("x", x), *(() if divided else parameters)):
        if is_dtensor(tensor) and (module.shards is None or name not in module.shards):
            refuse_division(f"quire.{type(module).__name__}", name, tensor)


def taken(
    module: ProductModule, x: torch.Tensor | QuantizedActivation
) -> tuple[torch.Tensor | QuantizedActivation, Layout | None]:
    """What this rank computes from, and of a DTensor x how the call is sharded."""
    if not is_dtensor(x):
        return x, None
    what, parameters = f"quire.{type(module).__name__}", list(module._parameters.items())
    if module.shards is not None:
        raise NotImplementedError(
            f"{what}: its weights are sharded by shard_weights, and x must be a plain tensor of this rank's tokens, "
            "got a DTensor; pass x.to_local()"
        )
    each = [module.of(product, "parallel") for product in module.products]
    if None in each:
        layout = layout_of_tokens(x, parameters, what)
    else:
        layout = layout_of_features(x, parameters, what, each[0], each[-1])
    return layout.take(x), layout


def torchs_result(layer: ProductModule, x: torch.Tensor) -> Result | None:
    """The result of a call with a DTensor x that PyTorch computes as for a torch.nn.Linear: without a recipe, for all
    placements and dtypes that it supports. None for other calls."""
    if not is_dtensor(x) or layer.external_wgrad or recipe_of(layer) is not None or active_rule() is not None:
        return None
    if layer.shards is not None or (layer.parallel is not None and (layer.parallel.sequence or one_process.enabled())):
        return None
    if layer.parallel is not None:
        x = placed_for(x, layer.parallel)
    y = torch.nn.functional.linear(x, layer.weight, None if layer.return_bias else layer.bias)
    return (y, layer.bias) if layer.return_bias else y


def _is_torchs(module: ProductModule) -> bool:
    """Whether, without a recipe, the module is a torch.nn.Linear in every respect, dtypes that quire lacks included."""
    return isinstance(module, torch.nn.Linear) and not module.external_wgrad and module.parallel is None


def _result_spec(module: ProductModule, output_spec: QuantSpec | str) -> str:
    spec = QuantSpec(output_spec)
    if spec.stochastic:
        raise ValueError(
            f"quire.{type(module).__name__}.forward: output_spec={spec.text!r} rounds stochastically, and results are "
            "rounded to nearest; remove 'sr' from it"
        )
    if "given" in spec.options:
        raise ValueError(
            f"quire.{type(module).__name__}.forward: output_spec={spec.text!r} has a scale that a caller gives, and "
            "results have none; remove 'given' from it"
        )
    return spec.text


def fast_path(layer: ProductModule, x: torch.Tensor) -> Result | None:
    """The result of an ordinary call, faster than with a Product, or torchs_result(). An ordinary call has a plain
    tensor x, a plain weight or, if no gradient is wanted, a quantized one, and no option that needs a Product. Under
    delayed scaling the weight is plain, and no codes of it are kept.

    It repeats the steps of active_call() and Product for such a call, because these cost more than the call: 12 us on
    top of 10 without a recipe, 30 us on top of 19 with cached codes (./dev bench host, 1x16x16, forward, Zen 3).
    """
    # Twenty times as quick as Module.__getattr__. A weight that is computed (parametrized, split) is not there.
    parameters = layer._parameters
    weight, bias = parameters.get("weight"), parameters.get("bias", ...)
    plain = type(weight) is Parameter
    own = (plain or type(weight) is QuantizedTensor) and (bias is None or type(bias) is Parameter)
    if not own or type(x) is not Tensor or layer.return_bias:
        return torchs_result(layer, x)
    if layer.fuse_wgrad_accumulation or layer.delay_wgrad_compute or layer.parallel is not None:
        return None
    recipe = recipe_of(layer)
    if recipe is None:
        return torch.nn.functional.linear(x, weight, bias) if plain and active_rule() is None else None
    text = recipe.stateless_spec or recipe.delayed_spec
    if layer.save_original_input or text is None:
        return None
    dtype = x.dtype
    if _is_any_autocast_enabled() and uses_torch_autocast(x):
        dtype = torch.get_autocast_dtype(x.device.type)
    elif weight.dtype != dtype or (bias is not None and bias.dtype != dtype):
        return None
    if not plain or recipe.stateless_spec is None:
        return (_delayed if plain else _of_codes)(layer, x, recipe, dtype)
    sr_state = layer.sr_state if recipe.stochastic and torch.is_grad_enabled() else None
    if sr_state is not None and sr_state.device != weight.device:
        return None
    kept = layer.kept_weight
    if kept is None or kept.spec != recipe.weight_spec:
        return linear(x, weight, bias, text, dtype, sr_state=sr_state)
    text, codes = stored_weight(text, recipe, kept.stored), kept.operand()
    return linear_prequantized(
        x, weight, bias, text, dtype, x_buffers=(), w_buffers=codes, w_fingerprint=kept.fingerprint, sr_state=sr_state
    )


def _delayed(layer: ProductModule, x: Tensor, recipe: Recipe, dtype: torch.dtype) -> Tensor | None:
    """fast_path() of delayed scaling; None if codes of the weight are kept or scales differ by layer."""
    rule, state, parameters = active_rule(), layer.delayed, layer._parameters
    weight, bias = parameters["weight"], parameters["bias"]
    if isinstance(rule, RulesByLayer) or layer.kept_weight is not None or state.usage.device != weight.device:
        return None
    forward, backward = delayed.scales(state)
    given = {"fwd_scale": forward, "bwd_scale": backward, "bwd_amax": state.bwd_amax}
    biases = [] if bias is None else [bias]
    y, x_amax, w_amax = grouped_linear(x, [weight], biases, None, recipe.delayed_spec, dtype=dtype, **given)
    delayed.collect(state, rule, x_amax, w_amax)
    return y


def _of_codes(layer: ProductModule, x: Tensor, recipe: Recipe, dtype: torch.dtype) -> Tensor | None:
    """fast_path() of a quantized weight, in calls that want no gradient."""
    weight, bias = layer._parameters["weight"], layer._parameters["bias"]
    if torch.is_grad_enabled() and any([t is not None and t.requires_grad for t in (x, weight, bias)]):
        return None
    if layer.gathering is not None or layer.shards is not None or not same_codes(weight.spec_text, recipe.weight_spec):
        return None
    if recipe.stateless_spec is None:
        return None
    text = stored_weight(recipe.stateless_spec, recipe, weight.spec_text)
    return linear_prequantized(x, weight.carrier(), bias, text, dtype, w_buffers=weight.buffer_list())
