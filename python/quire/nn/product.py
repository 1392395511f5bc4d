"""A call of a module: its options, which all of its matmuls share (Call), and each matmul y = x w^T with the codes that
it uses and the destinations of its gradients (Product)."""

import functools
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch

from quire import delayed
from quire.autocast import Rule, active_in, is_batch_invariant_enabled, is_within_autocast
from quire.checks import check_type, check_type_or_none
from quire.delayed.step import RulesByLayer
from quire.distributed.exchange import exchange_of
from quire.distributed.fully_sharded import check_gathered, gathered_amaxes
from quire.distributed.placements import PLAIN, Layout, check_parameters, is_dtensor, local
from quire.functional import Buffers, quantize
from quire.loading.transforms import requires_grad
from quire.nn.cache import CachedWeight, cache
from quire.nn.input_scale import same_unit
from quire.nn.layer_base import is_any_autocast_enabled, path_of, uses_torch_autocast
from quire.nn.product_module import Parameters, ProductModule, groups_of, main_grads, named
from quire.nn.weight import weight_operand
from quire.recipe import Recipe
from quire.recipe.linear_spec import LinearSpec, high_precision
from quire.tensor import DTYPES, QuantizedActivation, QuantizedTensor, QuantSpec, input_operand
from quire.tensor.operators import called_by_layer

#: is_first_microbatch -> the codes of a weight that a call uses, where there are any: those of quantize_weights(), or
#: those of the first microbatch.
_KEPT_CODES = {None: "kept_weight", False: "microbatch_weight"}


class Call(NamedTuple):
    """The options of one call of a module, shared by all of its matmuls.

    recipe: the active recipe; None means high precision. rule: active_rule(). dtype: of
    the results. is_first_microbatch, fp8_grad: arguments of Linear.forward. output_spec: the text of a spec for the
    module's result, "" for none. layout: how the tensors of a call with a DTensor are sharded; None for a plain x.
    parameters: those of the module by name. What is computed (parametrized) is computed once in a call.
    """

    recipe: Recipe | None
    rule: Rule
    dtype: torch.dtype
    is_first_microbatch: bool | None
    fp8_grad: bool
    output_spec: str
    layout: Layout | None
    parameters: Parameters

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
        if type(t) in PLAIN:
            return t
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
    autocast = (type(x) is not torch.Tensor or is_any_autocast_enabled()) and uses_torch_autocast(x)
    parameters = {name: module.parameter(name) for name in (*module.weight_names, *module.bias_names)}
    if recipe is not None or not _is_torchs(module):
        if layout is None and any([type(tensor) not in PLAIN for tensor in (x, *parameters.values())]):
            check_parameters(module, x, parameters.items())
        _check_dtypes(module, x, () if autocast else parameters.items())
    dtype = torch.get_autocast_dtype(x.device.type) if autocast else x.dtype
    return Call(recipe, rule, dtype, is_first_microbatch, fp8_grad, spec, layout, parameters)


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


def _check_dtypes(
    layer: torch.nn.Module,
    x: torch.Tensor | QuantizedActivation,
    parameters: Iterable[tuple[str, torch.Tensor | None]],
) -> None:
    """Raises TypeError for an x in a dtype that quire lacks, and if one of these parameters has another than x."""
    if x.dtype not in DTYPES and not x.is_quantized:  # operators refuse those of PyTorch's quantization
        raise TypeError(
            f"quire.{type(layer).__name__}: x must be float32, float16 or bfloat16, got {x.dtype}; convert it with "
            ".to()"
        )
    for name, parameter in parameters:
        if parameter is not None and parameter.dtype != x.dtype:
            raise TypeError(
                f"quire.{type(layer).__name__}: outside torch.autocast {name} must have the dtype of x; got x "
                f"{x.dtype} and {name} {parameter.dtype}. Convert one with .to(), or enter torch.autocast"
            )


# ------------------------------------------------------------ one matmul of a call


class Product:
    """One matmul of a module in one call, for all rows of x or for groups of rows.

    Only the constructor reads weights, scales and kept codes. So if the object is constructed before a checkpoint, the
    recomputation in the checkpoint uses the same values. run() collects amaxes of delayed scaling. commit() writes what
    later calls need. What the layer refuses whatever x is, the constructor refuses, before anything runs.

    specs: those of the matmul, None in high precision. high_precision: the text of a recipe without specs. given:
    further arguments of the operator. exchange: what ranks exchange, nothing in one process.
    """

    new_cache: CachedWeight | None = None
    specs: LinearSpec | None = None
    high_precision = ""
    #: Scales of x and of w, where these are quantized before the operator.
    input_scale: torch.Tensor | None = None
    weight_scales: torch.Tensor | None = None

    def __init__(self, module: ProductModule, name: str, call: Call) -> None:
        module.place_states()
        self.module, self.name, self.call = module, name, call.of_product(name)
        self.parameters = own = module.weights(name, call.parameters)
        self.weights = [call.part(parameter) for parameter in own.values()]
        self.needs_dw = torch.is_grad_enabled() and any([p.requires_grad or requires_grad(p) for p in own.values()])
        self.exchange = exchange_of(module, name, call.sequence)
        self.exchange.check(self)
        self.given: dict[str, object] = {}
        if self.needs_dw and module.external_wgrad:
            self.given |= external_wgrad(self)
        if self.call.recipe is None:
            self.high_precision = high_precision(is_batch_invariant_enabled())
        else:
            self._take_states()

    def _take_states(self) -> None:
        """What the recipe needs of the module: random state, scales, codes of the weight."""
        module, name, recipe = self.module, self.name, self.call.recipe
        self.specs = specs_of(module, self.call)
        if recipe.stochastic and torch.is_grad_enabled():  # a graph has no input that it does not need
            self.given["sr_state"] = module.of(name, "sr_state")
        if recipe.static_input:
            self.input_scale = static_scale(module, name, self.specs, needs_dw=self.needs_dw)
        if recipe.delayed_operands:
            self._take_scales(recipe.delayed_operands)
        if isinstance(self.weights[0], QuantizedTensor):
            self.specs = self.specs.of_w(self.weights[0].spec_text)
            self._check_gathered()
        elif self.exchange.takes_kept_codes:
            self._take_codes()

    def _check_gathered(self) -> None:
        if self.module.gathering is not None:
            check_gathered(self.module, self.name, self.call.recipe)

    def _take_scales(self, operands: tuple[str, ...]) -> None:
        """The scales of delayed scaling, of these operands. If not both of x and w have one, what has is quantized
        before the operator."""
        state = self.module.of(self.name, "delayed")
        forward, backward = delayed.scales(state)
        if "dy" in operands:
            self.given |= {"bwd_scale": backward, "bwd_amax": state.bwd_amax}
        if "x" in operands and "w" in operands:
            self.given["fwd_scale"] = forward
        elif "x" in operands:
            self.input_scale = forward[: self.module.groups]
        elif "w" in operands:
            self.weight_scales = forward

    def _take_codes(self) -> None:
        """Codes of weights that outlive the call: looks for them or makes them."""
        recipe, first = self.call.recipe, self.call.is_first_microbatch
        # A first microbatch reads neither, so that its graph does not depend on whether there are any.
        found = None if first is True else self.module.of(self.name, _KEPT_CODES[first])
        if found is not None and found.spec == recipe.weight_spec:
            self.specs = self.specs.of_w(found.stored)
            self.given |= {"w_buffers": found.operand(), "w_fingerprint": found.fingerprint}
        elif first is not None or self.weight_scales is not None:
            weights = groups_of(self.parameters.values())
            scale = self.scale if self.weight_scales is None else self.weight_scales
            self.new_cache = cache(weights, recipe, scale, parallel=self.exchange.parallel)
            self.given["w_buffers"] = self.new_cache.buffers
            if self.specs.backward == "high_precision":  # of w itself
                self.given["w_fingerprint"] = self.new_cache.fingerprint

    @property
    def scale(self) -> torch.Tensor | None:
        """Forward scales of delayed scaling."""
        return self.given.get("fwd_scale")

    def path(self) -> str:
        """Where the matmul is in the model, or ""."""
        return ".".join(filter(None, (path_of(self.module), self.name)))

    def input(self, keep: bool = False) -> dict[str, object]:
        """Keyword arguments of norm() and activation() for an x that run() takes. keep: they return x itself too."""
        if not self._takes_codes_of_x():
            return {}
        spec, scale = self.specs.x, self.input_scale if self.scale is None else self.scale[: self.module.groups]
        return {"spec": spec, "rowwise": True, "columnwise": self.needs_dw, "keep_y": keep, "scale": scale}

    def _takes_codes_of_x(self) -> bool:
        if self.specs is None or self.specs.x == "none" or self.specs.saves_x or not self.exchange.takes_codes_of_x:
            return False
        return self.module.input_observer is None

    def run(
        self,
        x: torch.Tensor | QuantizedActivation,
        offsets: torch.Tensor | None = None,
        x_buffers: Buffers = (),
        bias: bool = True,
    ) -> torch.Tensor:
        """y = x w^T, plus the module's biases unless `bias` is False. offsets: the row at which each group ends, or
        None if one group has all rows. x_buffers: what norm() or activation() returned for the arguments of input(). A
        quantized x is used directly, under its own spec."""
        if self.module.input_observer is not None:
            self.module.input_observer(self.name, x, offsets)
        biases = [self.call.part(b) for b in self.module.biases(self.name, self.call.parameters) if bias]
        x = self.exchange.take(self, x)
        if self.specs is None:
            y = self._high_precision(x, biases, offsets)
        else:
            y = self._quantized(x, biases, offsets, x_buffers)
        return self.exchange.give(y)

    def _quantized(
        self,
        x: torch.Tensor | QuantizedActivation,
        biases: Sequence[torch.Tensor],
        offsets: torch.Tensor | None,
        x_buffers: Buffers,
    ) -> torch.Tensor:
        given, weights = dict(self.given), self.weights
        if offsets is not None:
            given["offsets"] = offsets
        x, specs, own_amax = self._x_operand(x, x_buffers, given)
        if isinstance(weights[0], QuantizedTensor):
            operands = [self._w_operand(weight, x, biases) for weight in weights]
            given["w_buffers"] = [buffer for _, buffers in operands for buffer in buffers]
            weights = [weight for weight, _ in operands]
        y, x_amax, w_amax = self.exchange.linear(self, x, weights, biases, recipe=specs.text, **given)
        if self.call.recipe.delayed_operands:  # now that the arguments are known to fit
            self._collect(x_amax if own_amax is None else own_amax, w_amax)
        return y

    def _w_operand(
        self, weight: QuantizedTensor, x: torch.Tensor, biases: Sequence[torch.Tensor]
    ) -> tuple[torch.Tensor, Buffers]:
        """weight_operand(). Raises RuntimeError if the layer's own recipe gives the gradient of x, and the one that
        replaces it cannot."""
        self._check_gathered()  # this may be a recomputation, for which other codes have been gathered
        own, wanted = self.module.recipe, torch.is_grad_enabled() and x.requires_grad
        gives = own is not None and own.backward_override == "dequantized" and weight.columnwise_data is None
        if wanted and gives and self.specs.backward in ("", "requantized"):
            raise RuntimeError(
                f"quire.{type(self.module).__name__}: the recipe of quire.autocast, {type(self.call.recipe).__name__}, "
                "replaces the recipe of this layer, and needs w with columnwise_data for the gradient of x. The layer "
                f"has only rowwise codes ({weight.spec_text}), from which its own recipe computes this gradient: run "
                'the model outside of quire.autocast (quire.convert with gradients="input", or weights only)'
            )
        return weight_operand(weight, (x, *biases), self.call.recipe)

    def _x_operand(
        self, x: torch.Tensor | QuantizedActivation, buffers: Buffers, given: dict[str, object]
    ) -> tuple[torch.Tensor, LinearSpec, torch.Tensor | None]:
        """The tensor to pass as x, the specs, and x's amaxes where the operator will not measure them."""
        recipe = self.call.recipe
        if isinstance(x, QuantizedTensor | QuantizedActivation):
            if recipe.weight_only:
                return x.dequantize(), self.specs, None
            x, given["x_buffers"], spec = input_operand(x, self.needs_dw)
            # Its scale is its own, and the slot stays as it is.
            return x, self.specs.of_x(spec), self._no_amax() if recipe.delayed_operands else None
        if buffers and self._takes_codes_of_x():
            given["x_buffers"] = buffers
            return x, self.specs, buffers[2]
        if self.input_scale is not None:
            given["input_scale"] = self.input_scale
        return x, self.specs, None

    def _collect(self, x_amax: torch.Tensor | None, w_amax: torch.Tensor | None) -> None:
        """Collects amaxes of delayed scaling: those that the operator measured, or that are known from before."""
        state, made = self.module.of(self.name, "delayed"), self.new_cache
        if self.scale is None:  # not both of x and w have delayed scaling
            if self.input_scale is None:
                x_amax = self._no_amax()
            w_amax = made.buffers[2] if self.weight_scales is not None and made is not None else None
        elif made is not None:
            w_amax = made.buffers[2]
        elif "w_buffers" in self.given or isinstance(self.weights[0], QuantizedTensor):
            w_amax = gathered_amaxes(self.module, self.name)
        delayed.collect(state, self.call.rule, x_amax, w_amax)

    def _no_amax(self) -> torch.Tensor:
        """Amaxes of x that change nothing."""
        return self.module.of(self.name, "delayed").fwd_amax.new_zeros(self.module.groups)

    def _high_precision(
        self, x: torch.Tensor | QuantizedActivation, biases: Sequence[torch.Tensor], offsets: torch.Tensor | None
    ) -> torch.Tensor:
        weights, given, linear = self.weights, self.given, self.exchange.linear
        if isinstance(x, QuantizedTensor | QuantizedActivation):
            x = x.dequantize()
        if isinstance(weights[0], QuantizedTensor):
            if not torch.compiler.is_compiling():
                linear = called_by_layer(linear)
                if not is_within_autocast():  # one that is disabled asks for this
                    tell_decoding(type(self.module).__name__, self.module.gathering is not None)
            if offsets is not None or given or self.high_precision:
                weights = [weight.dequantize() for weight in weights]
        if offsets is not None:
            given = given | {"offsets": offsets}
        y, *_ = linear(self, x, weights, biases, recipe=self.high_precision, **given)
        if self.call.rule is not None:  # now that the arguments are known to fit
            each = self.weights if self.weights[0].dim() == 2 else list(self.weights[0].unbind())
            state = self.module.of(self.name, "delayed")
            amaxes = [self.exchange.reduced(amax) for amax in delayed.measure(state, x, each, offsets)]
            delayed.collect(state, self.call.rule, *amaxes)
        return y

    def commit(self) -> None:
        """Stores in the module what later calls need. Call it once, after run() has shown that the arguments are valid,
        and outside of any checkpoint."""
        if self.new_cache is not None and self.call.is_first_microbatch is not None:
            setattr(self.module, named(self.name, "microbatch_weight"), self.new_cache)
        if "placeholder" in self.given:
            mark_added(self.parameters.values())

    def output(self, y: torch.Tensor) -> torch.Tensor | QuantizedActivation:
        """y in the form that the options of the call request."""
        spec, columnwise = self.call.output_spec, torch.is_grad_enabled()
        if not spec:
            return y
        if self.scale is None or spec != self.call.recipe.input_spec:
            return quantize(y, spec, columnwise=columnwise)
        q = quantize(y, spec, columnwise=columnwise, scale=self.scale[2:3])
        delayed.collect_output(self.module.of(self.name, "delayed"), self.call.rule, q.buffer_list()[2])
        return q

    def returned_bias(self) -> torch.Tensor | None:
        """The bias as a layer returns it apart."""
        bias = next(iter(self.module.biases(self.name, self.call.parameters)), None)
        return bias if bias is None or is_dtensor(bias) else self.exchange.returned_bias(bias)


@functools.cache
def tell_decoding(layer: str, gathered: bool = False) -> None:
    """Warns, once for each class of layers. gathered: whether the codes come from quire.distributed.gather_codes, whose
    layers quire.convert cannot give weights for inference."""
    remedy = "(recipe=...), or give it a recipe by quire.convert(model, recipe, for_inference=True)"
    if gathered:
        remedy = " of the recipe that quire.distributed.gather_codes got"
    warnings.warn(
        f"quire.{layer}: its weight is quantized, and decoded in every call, because no recipe is active; run it "
        f"within quire.autocast{remedy}",
        stacklevel=2,
    )


def specs_of(module: ProductModule, call: Call) -> LinearSpec:
    """The specs of a matmul. Raises ValueError if the options of the module forbid the recipe."""
    if module.save_original_input and call.recipe.delayed():
        raise ValueError(
            f"quire.{type(module).__name__}: save_original_input=True does not go with DelayedScaling: x would be "
            "quantized again when its scale has changed. Use Float8CurrentScaling, or leave save_original_input False"
        )
    return call.recipe.specs_for(call.fp8_grad, module.save_original_input, is_batch_invariant_enabled())


# ------------------------------------------------------------ gradients of weights that do not go to autograd


def external_wgrad(product: Product) -> dict[str, object]:
    """Arguments of grouped_linear() that say where the gradient of a product's weights goes, if not to autograd."""
    module, call, weights = product.module, product.call, product.parameters
    _check_leaves(module, weights)
    if module.delay_wgrad_compute:
        given = {
            "wgrad_stash": module.of(product.name, "wgrad_stash"),
            "overwrite_main_grad": call.is_first_microbatch is True,
        }
    else:
        overwrites = any([getattr(weight, "overwrite_main_grad", False) for weight in weights.values()])
        given = {
            "main_grad": main_grads(module, weights),
            "overwrite_main_grad": overwrites or call.is_first_microbatch is True,
        }
    return given | {"placeholder": any([hasattr(weight, "grad_added_to_main_grad") for weight in weights.values()])}


def _check_leaves(module: ProductModule, weights: Mapping[str, torch.Tensor]) -> None:
    """Raises NotImplementedError for weights that are not parameters themselves: nobody would read the gradient."""
    for name, weight in weights.items():
        leaf = name in module._parameters and (torch.compiler.is_compiling() or weight.is_leaf)
        read = not module.delay_wgrad_compute and getattr(weight, "main_grad", None) is not None
        if weight.requires_grad and not leaf and not read:
            option = "delay_wgrad_compute" if module.delay_wgrad_compute else "fuse_wgrad_accumulation"
            raise NotImplementedError(
                f"quire.{type(module).__name__}: {option}=True keeps the gradient of a weight from autograd, and "
                f"{name} is computed from other tensors (parametrized, pruned, flattened by FullyShardedDataParallel), "
                f"which would get none; make the layer without {option}"
            )


def mark_added(weights: Iterable[torch.Tensor]) -> None:
    """Tells hooks that wait for a gradient of these weights that it goes elsewhere (external_wgrad)."""
    for weight in weights:
        if hasattr(weight, "grad_added_to_main_grad"):
            weight.grad_added_to_main_grad = True


# ------------------------------------------------------------ inputs with a scale of the layer (numerics.md 2.5, 5.9)


def static_scale(module: ProductModule, product: str, specs: LinearSpec, *, needs_dw: bool) -> torch.Tensor:
    """The scale of a matmul's input. Raises RuntimeError if the layer has no scale, NotImplementedError for what does
    not go with one."""
    what, name = f"quire.{type(module).__name__}", named(product, "input_scale")
    scale = module._buffers.get(name)
    if scale is None:
        raise RuntimeError(
            f"{what}: x={specs.x} has its scale from the layer, which has no buffer {name!r}; give the layer its "
            "recipe (recipe= of its constructor, or quire.convert), and load its state dict"
        )
    of_layer = module.scale_spec
    if of_layer is not None and of_layer != specs.x and not same_unit(of_layer, specs.x):
        raise RuntimeError(
            f"{what}: the static scale of its input is one for x={of_layer}, and the active recipe has x={specs.x}, "
            "for which another number has the same amax. Give the layer that recipe, layer.recipe = recipe, which "
            "converts the scale, or run it outside of quire.autocast"
        )
    module.check_float32(what, name)
    if needs_dw and specs.saves_x:
        raise NotImplementedError(
            f"{what}: the gradient of its weight starts from x itself (backward={specs.backward}), and x={specs.x} is "
            "quantized before; take backward_override='dequantized' or None, without save_original_input"
        )
    return local(scale)  # parallelize_module makes buffers DTensors, which all processes have whole
