"""How a product y = x w^T of a module runs: which codes it takes from where, and where gradients go."""

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch

from quire import delayed
from quire.autocast import active_rule, recipe_of
from quire.checks import check_kind, check_kind_or_none
from quire.functional import Buffers, grouped_linear, linear, linear_given, quantize
from quire.nn.cache import cache, cached_weight
from quire.nn.dtype import activation_dtype, check_dtypes, uses_torch_autocast
from quire.nn.product import ProductModule, main_grads, named
from quire.nn.weight import stored_weight, weight_operand
from quire.recipe import Recipe
from quire.tensor import QuantizedActivation, QuantizedTensor, QuantSpec, input_operand


class Call(NamedTuple):
    """How a module was called, the same for all of its products.

    recipe: the active one; None computes in high precision. rule: as delayed.collect() takes it. dtype: of results.
    is_first_microbatch, fp8_grad: of Linear.forward. output_spec: text of a spec for the module's result, "" for none.
    """

    recipe: Recipe | None
    rule: delayed.Rule | None
    dtype: torch.dtype
    is_first_microbatch: bool | None
    fp8_grad: bool
    output_spec: str


def active_call(
    module: ProductModule,
    x: torch.Tensor | QuantizedActivation,
    is_first_microbatch: bool | None = None,
    *,
    fp8_output: bool = False,
    fp8_grad: bool = False,
    output_spec: QuantSpec | str | None = None,
) -> Call:
    """A call now, with the options of Linear.forward. Raises TypeError where dtypes or
    the kinds of options do not fit, ValueError for an output_spec that rounds stochastically."""
    if is_first_microbatch is not None or fp8_output is not False or fp8_grad is not False:
        what = f"quire.{type(module).__name__}.forward"
        check_kind(what, bool, fp8_output=fp8_output, fp8_grad=fp8_grad)
        check_kind_or_none(what, bool, is_first_microbatch=is_first_microbatch)
    if isinstance(x, QuantizedActivation):
        x.check()
    module.place_states()
    recipe, spec = recipe_of(module.recipe), ""
    if output_spec is not None:
        spec = _result_spec(module, output_spec)
    elif fp8_output and recipe is not None:
        spec = recipe.input_spec
    if recipe is not None or not _is_torchs(module):
        names = (*module.weight_names, *module.bias_names)
        check_dtypes(module, x, [(name, getattr(module, name)) for name in names])
    return Call(recipe, active_rule(), activation_dtype(x), is_first_microbatch, fp8_grad, spec)


def _is_torchs(module: ProductModule) -> bool:
    """Whether, without a recipe, the module is a torch.nn.Linear in every respect, dtypes that quire lacks included."""
    return isinstance(module, torch.nn.Linear) and not module.gradient_goes_elsewhere


def _result_spec(module: ProductModule, output_spec: QuantSpec | str) -> str:
    spec = QuantSpec(output_spec)
    if spec.stochastic:
        raise ValueError(
            f"quire.{type(module).__name__}.forward: output_spec={spec.text!r} rounds stochastically, and results are "
            "rounded to nearest; remove 'sr' from it"
        )
    return spec.text


def plain_call(layer: ProductModule, x: torch.Tensor) -> torch.Tensor | None:
    """y of the call that most calls are, sooner than by a Product: x and the weight are plain tensors, no option asks
    for more, and scaling is not delayed. None where that is not so.

    It restates what active_call() and Product do with such a call, because those cost more than the call: 12 us on top
    of 10 without a recipe, 30 us on top of 19 with kept codes (./dev bench host, 1x16x16, forward, Zen 3).
    """
    # Twenty times as quick as Module.__getattr__. A weight that is computed (parametrized, split) is not there.
    parameters = layer._parameters
    if "weight" not in parameters or "bias" not in parameters:
        return None
    weight, bias = parameters["weight"], parameters["bias"]
    own = type(weight) is torch.nn.Parameter and (bias is None or type(bias) is torch.nn.Parameter)
    if not own or type(x) is not torch.Tensor or layer.return_bias:
        return None
    if layer.gradient_goes_elsewhere:
        return None
    recipe = recipe_of(layer.recipe)
    if recipe is None:
        return torch.nn.functional.linear(x, weight, bias) if active_rule() is None else None
    if layer.save_original_input or recipe.delayed():
        return None
    if uses_torch_autocast(x):
        dtype = torch.get_autocast_dtype(x.device.type)
    else:
        dtype = x.dtype
        if weight.dtype != dtype or (bias is not None and bias.dtype != dtype):
            return None
    text = recipe.linear_spec()
    sr_state = layer.sr_state if recipe.stochastic and torch.is_grad_enabled() else None
    if sr_state is not None and sr_state.device != weight.device:
        return None
    kept = layer.kept_weight
    if kept is None or kept.spec != recipe.weight_spec:
        return linear(x, weight, bias, text, dtype, sr_state=sr_state)
    text = stored_weight(text, recipe, kept.stored)
    return linear_given(
        x, weight, bias, text, dtype, w_buffers=kept.operand(), w_fingerprint=kept.fingerprint, sr_state=sr_state
    )


def gradient_elsewhere(module: ProductModule, product: str, call: Call) -> dict[str, object]:
    """Arguments of grouped_linear, and of linear_given but for main_grad, which is a list here, that say where the
    gradient of a product's weights goes, if not to autograd."""
    weights = module.weights(product)
    given: dict[str, object] = {}
    if module.delay_wgrad_compute:
        given["wgrad_stash"] = module.of(product, "wgrad_stash")
        given["overwrite_main_grad"] = call.is_first_microbatch is True
    elif module.fuse_wgrad_accumulation:
        given["main_grad"] = main_grads(module, weights)
        overwrites = any([getattr(weight, "overwrite_main_grad", False) for weight in weights.values()])
        given["overwrite_main_grad"] = overwrites or call.is_first_microbatch is True
    if given:
        given["placeholder"] = any([hasattr(weight, "grad_added_to_main_grad") for weight in weights.values()])
    return given


def mark_added(weights: Iterable[torch.Tensor]) -> None:
    """Tells hooks that wait for a gradient of these weights that it goes elsewhere (gradient_elsewhere)."""
    for weight in weights:
        if hasattr(weight, "grad_added_to_main_grad"):
            weight.grad_added_to_main_grad = True


class Product:
    """One product of a module in one call.

    The constructor reads the module and run() does not, so that what is constructed before a checkpoint is recomputed
    within it as it was. remember() writes to it.
    """

    def __init__(self, module: ProductModule, name: str, call: Call) -> None:
        recipe, grad = call.recipe, torch.is_grad_enabled()
        self.call, self.weight, self.state = call, module.of(name, "weight"), module.of(name, "delayed")
        self.module, self.name, self.made = module, name, None
        self.needs_dw = grad and self.weight.requires_grad
        self.given: dict[str, object] = {}  # to linear_given
        self.scale: torch.Tensor | None = None  # of delayed scaling
        self.elsewhere = gradient_elsewhere(module, name, call) if self.needs_dw else {}
        if recipe is None:
            return
        self.text = linear_text(module, call)
        self.keeps_x = starts_from_x(self.text)
        if recipe.delayed():
            self.scale, self.given["bwd_scale"] = delayed.scales(self.state)
            self.given["bwd_amax"] = self.state.bwd_amax
        self._take_codes(module, name)
        self.given |= self.elsewhere
        if "main_grad" in self.elsewhere:
            self.given["main_grad"] = self.elsewhere["main_grad"][0]
        # A graph has no input that it does not need.
        self.sr_state = module.of(name, "sr_state") if recipe.stochastic and grad else None

    def _take_codes(self, module: ProductModule, name: str) -> None:
        """Of w, those that outlive the call: looks for them or makes them."""
        recipe, first = self.call.recipe, self.call.is_first_microbatch
        if isinstance(self.weight, QuantizedTensor):
            self.text = stored_weight(self.text, recipe, self.weight.spec_text)
            return
        found = cached_weight(module, name, recipe, first)
        if found is not None:
            self.text = stored_weight(self.text, recipe, found.stored)
            self.given |= {"w_buffers": found.operand(), "w_fingerprint": found.fingerprint}
        elif first is not None:
            self.made = cache([self.weight], recipe, self.scale)
            self.given["w_buffers"] = self.made.buffers

    def input(self, keep: bool = False) -> dict[str, object]:
        """Keywords of norm() and activation() for an x that run() takes. keep: they return x itself too."""
        recipe = self.call.recipe
        if recipe is None or self.keeps_x:
            return {}
        scale = None if self.scale is None else self.scale[:1]
        return {"spec": recipe.input_spec, "rowwise": True, "columnwise": self.needs_dw, "keep": keep, "scale": scale}

    def run(
        self, x: torch.Tensor | QuantizedActivation, bias: torch.Tensor | None, x_buffers: Buffers = ()
    ) -> torch.Tensor:
        """y = x w^T + bias. x_buffers: what norm() or activation() returned with input(). An x that is quantized is
        used as it is, under its own spec."""
        if self.call.recipe is None:
            return self._high_precision(x, bias)
        given = dict(self.given)
        x, text, x_amax = self._x_operand(x, x_buffers, given)
        w, w_amax = self._w_operand(x, bias, given)
        if given:
            y = linear_given(x, w, bias, text, self.call.dtype, sr_state=self.sr_state, **given)
        else:
            y = linear(x, w, bias, text, self.call.dtype, sr_state=self.sr_state)
        if self.scale is not None:  # now that the arguments are known to fit
            delayed.collect(self.state, self.call.rule, x_amax, w_amax)
        return y

    def _x_operand(
        self, x: torch.Tensor | QuantizedActivation, buffers: Buffers, given: dict[str, object]
    ) -> tuple[torch.Tensor, str, torch.Tensor | None]:
        """The tensor to pass as x, the recipe's text, and x's amax if that is to be collected."""
        if isinstance(x, QuantizedTensor | QuantizedActivation):
            x, given["x_buffers"], spec = input_operand(x, self.needs_dw)
            # Its scale is its own, and the slot stays as it is.
            unchanged = None if self.scale is None else self.scale.new_zeros(1)
            return x, f"x={spec},{self.text.split(',', 1)[1]}", unchanged
        if self.scale is not None and not buffers:
            buffers = delayed.quantize(x, self.scale, 0, self.needs_dw)
        if buffers and not self.keeps_x:
            given["x_buffers"] = buffers
        return x, self.text, None if self.scale is None else buffers[2]

    def _w_operand(
        self, x: torch.Tensor, bias: torch.Tensor | None, given: dict[str, object]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The tensor to pass as w, and its amax if that is to be collected."""
        w, buffers = weight_operand(self.weight, (x, bias), self.call.recipe)
        if buffers:  # it stays quantized
            given["w_buffers"] = buffers
        elif self.scale is not None and "w_buffers" not in given:
            given["w_buffers"] = delayed.quantize(w, self.scale, 1, torch.is_grad_enabled() and x.requires_grad)
        is_new = self.scale is not None and not buffers and "w_fingerprint" not in given
        return w, given["w_buffers"][2] if is_new else None

    def _high_precision(self, x: torch.Tensor | QuantizedActivation, bias: torch.Tensor | None) -> torch.Tensor:
        if isinstance(x, QuantizedTensor | QuantizedActivation):
            x = x.dequantize()
        y = self._one_group(x, bias) if self.elsewhere else torch.nn.functional.linear(x, self.weight, bias)
        if self.call.rule is not None:  # now that the arguments are known to fit
            delayed.collect(self.state, self.call.rule, *delayed.measure(self.state, x, self.weight))
        return y

    def _one_group(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """The product in high precision whose gradient of w goes elsewhere: that of groups, of which there is one."""
        tokens = math.prod(x.shape[:-1])
        offsets = torch.full((1,), tokens, dtype=torch.int64, device=x.device)
        w = self.weight.dequantize() if isinstance(self.weight, QuantizedTensor) else self.weight
        biases = [] if bias is None else [bias]
        return grouped_linear(x, [w], biases, offsets, "", dtype=self.call.dtype, **self.elsewhere)[0]

    def remember(self) -> None:
        """Leaves with the module what the call makes known to later ones: to be called once, after run(), when the
        arguments are known to fit, and outside of any checkpoint."""
        if self.made is not None:
            setattr(self.module, named(self.name, "microbatch_weight"), self.made)
        if self.elsewhere:
            mark_added([self.weight])

    def output(self, y: torch.Tensor) -> torch.Tensor | QuantizedActivation:
        """y as the call wants it."""
        spec, columnwise = self.call.output_spec, torch.is_grad_enabled()
        if not spec:
            return y
        if self.scale is None or spec != self.call.recipe.input_spec:
            return quantize(y, spec, columnwise=columnwise)
        q = quantize(y, spec, columnwise=columnwise, scale=self.scale[2:3])
        delayed.collect_output(self.state, self.call.rule, q.buffer_list()[2])
        return q


def linear_text(module: ProductModule, call: Call) -> str:
    """The recipe of a product, as operators take it. Raises ValueError where the module's options forbid it."""
    if module.save_original_input and call.recipe.delayed():
        raise ValueError(
            f"quire.{type(module).__name__}: save_original_input=True does not go with DelayedScaling: x would be "
            "quantized again when its scale has changed. Use Float8CurrentScaling, or leave save_original_input False"
        )
    return call.recipe.linear_spec(call.fp8_grad, module.save_original_input)


def starts_from_x(text: str) -> bool:
    """Whether backward reads x itself, so that an x that is given quantized is no use to it."""
    return text.endswith(("backward=high_precision", "backward=requantized"))
