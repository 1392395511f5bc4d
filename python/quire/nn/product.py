"""One matmul y = x w^T of a module in one call: the codes that it uses, and the destinations of its gradients."""

import functools
import warnings
from collections.abc import Iterable, Sequence

import torch

from quire import delayed
from quire.distributed import one_process
from quire.distributed.one_process import Whole
from quire.distributed.parallel import Parallel, refuse_quantized
from quire.distributed.placements import is_dtensor, local
from quire.distributed.sharded_model import refuse_delayed
from quire.distributed.sharded_operators import (
    name_next_caller,
    parallel_grouped_linear,
    parallel_linear,
    sum_gradient,
)
from quire.distributed.sharded_product import plan_of, sharded_linear
from quire.distributed.sharding import check_gathered, gathered_amaxes
from quire.functional import (
    Buffers,
    grouped_linear,
    input_buffers,
    linear,
    linear_prequantized,
    quantize,
)
from quire.loading.transforms import requires_grad
from quire.nn.announcing import agree_on_shards, announce
from quire.nn.cache import cache, cached_weight
from quire.nn.call import Call
from quire.nn.product_module import ProductModule, main_grads, named
from quire.nn.weight import stored_weight, weight_operand
from quire.tensor import QuantizedActivation, QuantizedTensor, input_operand

#: What the operators of one weight take; all else is for grouped_linear().
_SHORT = {"x_buffers", "w_buffers", "w_fingerprint", "sr_state"}


class Product:
    """One matmul of a module in one call, for all rows of x or for groups of rows.

    Only the constructor reads the module; run() does not. So if the object is constructed before a checkpoint, the
    recomputation in the checkpoint uses the same values. commit() writes to the module.
    """

    def __init__(self, module: ProductModule, name: str, call: Call) -> None:
        call = call.of_product(name)
        recipe, grad = call.recipe, torch.is_grad_enabled()
        self.module, self.name, self.call = module, name, call
        self.parameters, self.state = list(module.weights(name).values()), module.of(name, "delayed")
        self.weights = [call.part(parameter) for parameter in self.parameters]
        self.needs_dw = grad and any([requires_grad(parameter) for parameter in self.parameters])
        self.new_cache, self.parallel = None, divided(module, name, call)
        self.given: dict[str, object] = external_wgrad(module, name, call) if self.needs_dw else {}
        self.whole = as_one_process(module, name, self.parallel)
        if self.whole is not None:
            self._take_whole()
        self.shards = None if module.shards is None else module.shards.get(named(name, "weight"))
        if self.shards is not None:
            _check_sharded(self)
        self.input_scale = self.weight_scales = None
        if recipe is None:
            return
        self.text = linear_text(module, call)
        if recipe.static_input:
            self.input_scale = static_scale(module, name, self.text, needs_dw=self.needs_dw)
        # A graph has no input that it does not need.
        if recipe.stochastic and grad:
            self.given["sr_state"] = module.of(name, "sr_state")
            if self.parallel is not None:
                self.given["part"] = module.of(name, "part")
        if recipe.delayed():
            self._take_scales(recipe.delayed_operands)
        if isinstance(self.weights[0], QuantizedTensor):
            self.text = stored_weight(self.text, recipe, self.weights[0].spec_text)
            if module.gathering is not None:
                check_gathered(module, name, recipe)
        elif self.whole is None:
            self._take_codes()

    def _take_whole(self) -> None:
        """Within exact(): the weight of all ranks. Raises NotImplementedError if its gradient is not for autograd,
        which gives each rank its part."""
        what = f"quire.{type(self.module).__name__}, within quire.distributed.exact()"
        if self.given:
            raise NotImplementedError(
                f"{what}: fuse_wgrad_accumulation and delay_wgrad_compute are not available; make the layer without "
                "them"
            )
        if isinstance(self.weights[0], QuantizedTensor):
            refuse_quantized(what, self.parallel.text)
        self.weights, self.parallel = [self.whole.weight(weight) for weight in self.weights], None

    def _take_scales(self, operands: tuple[str, ...]) -> None:
        """The scales of delayed scaling, of these operands. If not both of x and w have one, what has is quantized
        before the operator."""
        forward, backward = delayed.scales(self.state)
        if "dy" in operands:
            self.given |= {"bwd_scale": backward, "bwd_amax": self.state.bwd_amax}
        if "x" in operands and "w" in operands:
            self.given["fwd_scale"] = forward
        elif "x" in operands:
            self.input_scale = forward[: self.module.groups]
        elif "w" in operands:
            self.weight_scales = forward
        if len(operands) < 3 and (self.parallel is not None or self.whole is not None):
            raise NotImplementedError(
                f"quire.{type(self.module).__name__}: delayed scaling of {' and '.join(operands)} alone does not go "
                "with weights that are sharded over ranks; give all operands of the matmul delayed scaling, or none"
            )

    @property
    def scale(self) -> torch.Tensor | None:
        """Forward scales of delayed scaling."""
        return self.given.get("fwd_scale")

    def _take_codes(self) -> None:
        """Of weights, those that outlive the call: looks for them or makes them."""
        recipe, first = self.call.recipe, self.call.is_first_microbatch
        found = cached_weight(self.module, self.name, recipe, first)
        if found is not None:
            self.text = stored_weight(self.text, recipe, found.stored)
            self.given |= {"w_buffers": found.operand(), "w_fingerprint": found.fingerprint}
        elif first is not None or self.weight_scales is not None:
            weights = self.module.group_weights(self.name)
            scale = self.scale if self.weight_scales is None else self.weight_scales
            self.new_cache = cache(weights, recipe, scale, parallel=self.parallel)
            self.given["w_buffers"] = self.new_cache.buffers
            if self.text.endswith("backward=high_precision"):  # of w itself
                self.given["w_fingerprint"] = self.new_cache.fingerprint

    def input(self, keep: bool = False) -> dict[str, object]:
        """Keyword arguments of norm() and activation() for an x that run() takes. keep: they return x itself too."""
        recipe = self.call.recipe
        divided = self.parallel is not None or self.whole is not None or self.shards is not None
        if recipe is None or recipe.weight_only or _starts_from_x(self.text) or divided or self.module.input_observer:
            return {}
        scale = self.input_scale if self.scale is None else self.scale[: self.module.groups]
        return {"spec": recipe.input_spec, "rowwise": True, "columnwise": self.needs_dw, "keep_y": keep, "scale": scale}

    def run(
        self,
        x: torch.Tensor | QuantizedActivation,
        biases: Sequence[torch.Tensor],
        offsets: torch.Tensor | None = None,
        x_buffers: Buffers = (),
    ) -> torch.Tensor:
        """y = x w^T + bias. offsets: the row at which each group ends, or None if one group has all rows. biases: one
        for each group, or one for all groups, or none. x_buffers: what norm() or activation() returned for the
        arguments of input(). A quantized x is used directly, under its own spec."""
        biases = [self.call.part(bias) for bias in biases]
        if self.module.input_observer is not None:
            self.module.input_observer(self.name, x, offsets)
            x_buffers = ()
        if self.whole is not None:
            _check_parallel(self, self.whole.parallel, x)
            if not torch.compiler.is_compiling():
                announce(self, x, self.whole.parallel)
            whole_biases = [self.whole.bias(bias) for bias in biases]
            return self.whole.y(self._run(self.whole.x(x), whole_biases, offsets, ()))
        if self.parallel is not None:
            _check_parallel(self, self.parallel, x)
            if not torch.compiler.is_compiling():
                name_next_caller(announce(self, x, self.parallel))
        if self.shards is not None:
            return self._sharded(x, biases)
        return self._run(x, biases, offsets, x_buffers)

    def _run(
        self,
        x: torch.Tensor | QuantizedActivation,
        biases: Sequence[torch.Tensor],
        offsets: torch.Tensor | None,
        x_buffers: Buffers,
    ) -> torch.Tensor:
        if self.call.recipe is None:
            return self._high_precision(x, biases, offsets)
        given = dict(self.given)
        if self.input_scale is not None and self.parallel is not None:
            given["input_scale"] = self.input_scale
        elif self.input_scale is not None and not is_quantized(x, x_buffers):
            x_buffers = input_buffers(x, self.call.recipe.input_spec, self.input_scale, offsets, self.needs_dw)
        x, text, own_amax = self._x_operand(x, x_buffers, given)
        weights = self._w_operands((x, *biases), given)
        if offsets is None and given.keys() <= _SHORT and self.parallel is None:
            operator, x_amax, w_amax = linear if given.keys() <= {"sr_state"} else linear_prequantized, None, None
            y = operator(x, weights[0], biases[0] if biases else None, text, self.call.dtype, **given)
        else:
            y, x_amax, w_amax = self._stateful(x, weights, biases, text, offsets=offsets, **given)
        if self.scale is not None:  # now that the arguments are known to fit
            if "w_buffers" in given:
                made = self.new_cache
                w_amax = gathered_amaxes(self.module, self.name) if made is None else made.buffers[2]
            delayed.collect(self.state, self.call.rule, x_amax if own_amax is None else own_amax, w_amax)
        elif self.call.recipe.delayed():
            self._collect_some(own_amax)
        return y

    def _collect_some(self, own_amax: torch.Tensor | None) -> None:
        """Collects amaxes where not both of x and w have delayed scaling. own_amax: of an x quantized before."""
        x_amax = own_amax if self.input_scale is not None else None
        if x_amax is None:
            x_amax = self.state.fwd_amax.new_zeros(self.module.groups)
        w_amax = self.new_cache.buffers[2] if self.weight_scales is not None and self.new_cache is not None else None
        delayed.collect(self.state, self.call.rule, x_amax, w_amax)

    def _sharded(self, x: torch.Tensor | QuantizedActivation, biases: Sequence[torch.Tensor]) -> torch.Tensor:
        if isinstance(x, QuantizedTensor | QuantizedActivation):
            raise NotImplementedError(
                f"quire.{type(self.module).__name__}: its weight is sharded by shard_weights, and x must be a plain "
                f"tensor, got a {type(x).__name__}; pass x.dequantize()"
            )
        text = "" if self.call.recipe is None else self.text
        plan = plan_of(text, self.weights[0].shape[0], self.call.dtype, self.shards)
        if not torch.compiler.is_compiling():
            agree_on_shards(self, plan)
        state = {"sr_state": self.given.get("sr_state"), "input_scale": self.input_scale}
        return sharded_linear(x, self.weights[0], biases[0] if biases else None, plan, **state)

    def _stateful(
        self,
        x: torch.Tensor,
        weights: Sequence[torch.Tensor],
        biases: Sequence[torch.Tensor],
        text: str,
        **given: object,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(y, x_amax, w_amax) of an operator that takes all options."""
        offsets = given.pop("offsets")
        if self.parallel is None:
            return grouped_linear(x, weights, biases, offsets, text, dtype=self.call.dtype, **given)
        bias, divided = biases[0] if biases else None, self.parallel.text
        if offsets is not None:
            given |= {"part": self.module.of(self.name, "part"), "parallel": divided, "dtype": self.call.dtype}
            return parallel_grouped_linear(x, weights, biases, offsets, text, **given)
        return parallel_linear(x, weights[0], bias, text, divided, dtype=self.call.dtype, **given)

    def _x_operand(
        self, x: torch.Tensor | QuantizedActivation, buffers: Buffers, given: dict[str, object]
    ) -> tuple[torch.Tensor, str, torch.Tensor | None]:
        """The tensor to pass as x, the recipe's text, and x's amaxes where the operator will not measure them."""
        if isinstance(x, QuantizedTensor | QuantizedActivation):
            if self.call.recipe.weight_only:
                return x.dequantize(), self.text, None
            x, given["x_buffers"], spec = input_operand(x, self.needs_dw)
            # Its scale is its own, and the slot stays as it is.
            unchanged = None if self.scale is None else self.scale.new_zeros(self.module.groups)
            return x, f"x={spec},{self.text.split(',', 1)[1]}", unchanged
        itself = self.call.recipe.weight_only or (self.input_scale is None and _starts_from_x(self.text))
        if not buffers or self.parallel is not None or itself:
            return x, self.text, None
        given["x_buffers"] = buffers
        return x, self.text, buffers[2]

    def _w_operands(self, others: tuple[torch.Tensor, ...], given: dict[str, object]) -> list[torch.Tensor]:
        """The tensors to pass as w. others: inputs that may want a gradient."""
        if not isinstance(self.weights[0], QuantizedTensor):
            return self.weights
        operands = [weight_operand(weight, others, self.call.recipe) for weight in self.weights]
        given["w_buffers"] = [buffer for _, buffers in operands for buffer in buffers]
        return [weight for weight, _ in operands]

    def _high_precision(
        self, x: torch.Tensor | QuantizedActivation, biases: Sequence[torch.Tensor], offsets: torch.Tensor | None
    ) -> torch.Tensor:
        if isinstance(x, QuantizedTensor | QuantizedActivation):
            x = x.dequantize()
        if isinstance(self.weights[0], QuantizedTensor) and not torch.compiler.is_compiling():
            tell_decoding(type(self.module).__name__)
        if offsets is None and not self.given and self.parallel is None:
            y = torch.nn.functional.linear(x, self.weights[0], biases[0] if biases else None)
        else:
            weights = [w.dequantize() if isinstance(w, QuantizedTensor) else w for w in self.weights]
            y = self._stateful(x, weights, biases, "", offsets=offsets, **self.given)[0]
        if self.call.rule is not None:  # now that the arguments are known to fit
            each = self.weights if self.weights[0].dim() == 2 else list(self.weights[0].unbind())
            amaxes = delayed.measure(self.state, x, each, offsets)
            if self.parallel is not None:
                amaxes = [self.parallel.reduced(amax) for amax in amaxes]
            delayed.collect(self.state, self.call.rule, *amaxes)
        return y

    def commit(self) -> None:
        """Stores in the module what later calls need. Call it once, after run() has shown that the arguments are valid,
        and outside of any checkpoint."""
        if self.new_cache is not None and self.call.is_first_microbatch is not None:
            setattr(self.module, named(self.name, "microbatch_weight"), self.new_cache)
        if "placeholder" in self.given:
            mark_added(self.parameters)

    def output(self, y: torch.Tensor) -> torch.Tensor | QuantizedActivation:
        """y in the form that the options of the call request."""
        spec, columnwise = self.call.output_spec, torch.is_grad_enabled()
        if not spec:
            return y
        if self.scale is None or spec != self.call.recipe.input_spec:
            return quantize(y, spec, columnwise=columnwise)
        q = quantize(y, spec, columnwise=columnwise, scale=self.scale[2:3])
        delayed.collect_output(self.state, self.call.rule, q.buffer_list()[2])
        return q


def divided(module: ProductModule, product: str, call: Call) -> Parallel | None:
    """How the weight of a matmul is sharded in this call. Raises RuntimeError if the layer waits for its group."""
    parallel = module.of(product, "parallel")
    if parallel is None:
        return None
    if not parallel.group:
        parallel.check_group()
    return parallel.for_tokens(call.sequence)


def returned_bias(product: Product) -> torch.Tensor | None:
    """The bias as a layer returns it apart. Callers add it to the tokens that y has: where those are sharded over
    ranks, its gradient is summed over them."""
    bias, parallel = product.module.of(product.name, "bias"), divided(product.module, product.name, product.call)
    if bias is None or parallel is None or is_dtensor(bias):
        return bias
    own_tokens = parallel.mode == "row" and parallel.sequence and parallel.reduce_gradients
    return sum_gradient(bias, parallel.text) if own_tokens else bias


def as_one_process(module: ProductModule, product: str, parallel: Parallel | None) -> Whole | None:
    """Within quire.distributed.exact(), what makes whole tensors of those of a matmul; elsewhere None."""
    if parallel is None or not one_process.enabled():
        return None
    return Whole(parallel, module.of(product, "part"))


def _check_sharded(product: Product) -> None:
    """Raises NotImplementedError for what a layer whose weight shard_weights has sharded does not do."""
    what, call = f"quire.{type(product.module).__name__}", product.call
    if call.rule is not None or (call.recipe is not None and call.recipe.delayed()):
        refuse_delayed(what)
    if call.is_first_microbatch is not None:
        raise NotImplementedError(
            f"{what}: its weight is sharded by shard_weights, and codes are not kept from call to call; leave "
            "is_first_microbatch out"
        )


def _check_parallel(product: Product, parallel: Parallel, x: torch.Tensor | QuantizedActivation) -> None:
    """Raises NotImplementedError for what a layer that is sharded over ranks does not do, before anything runs."""
    what = f"quire.{type(product.module).__name__}, {parallel.text}"
    if isinstance(x, QuantizedTensor | QuantizedActivation):
        raise NotImplementedError(f"{what}: x must be a plain tensor, got a {type(x).__name__}; pass x.dequantize()")
    if isinstance(product.weights[0], QuantizedTensor):
        refuse_quantized(f"quire.{type(product.module).__name__}", parallel.text)
    if product.call.output_spec:
        raise NotImplementedError(f"{what}: results are not quantized; leave fp8_output and output_spec out")


@functools.cache
def tell_decoding(layer: str) -> None:
    """Warns, once for each class of layers."""
    warnings.warn(
        f"quire.{layer}: its weight is quantized, and decoded in every call, because no recipe is active; run it "
        "within quire.autocast(recipe=...), or give it a recipe by quire.convert(model, recipe, for_inference=True)",
        stacklevel=2,
    )


def linear_text(module: ProductModule, call: Call) -> str:
    """The recipe of a matmul as text for the operators. Raises ValueError if the options of the module forbid the
    recipe."""
    if module.save_original_input and call.recipe.delayed():
        raise ValueError(
            f"quire.{type(module).__name__}: save_original_input=True does not go with DelayedScaling: x would be "
            "quantized again when its scale has changed. Use Float8CurrentScaling, or leave save_original_input False"
        )
    return call.recipe.linear_spec(call.fp8_grad, module.save_original_input)


def _starts_from_x(text: str) -> bool:
    """Whether backward reads x itself, so that an x that is given quantized is no use to it."""
    return text.endswith(("backward=high_precision", "backward=requantized"))


# ------------------------------------------------------------ gradients of weights that do not go to autograd


def external_wgrad(module: ProductModule, product: str, call: Call) -> dict[str, object]:
    """Arguments of grouped_linear() that say where the gradient of a product's weights goes, if not to autograd."""
    weights = module.weights(product)
    given: dict[str, object] = {}
    if not any([weight.requires_grad for weight in weights.values()]):
        return given
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
    """Tells hooks that wait for a gradient of these weights that it goes elsewhere (external_wgrad)."""
    for weight in weights:
        if hasattr(weight, "grad_added_to_main_grad"):
            weight.grad_added_to_main_grad = True


# ------------------------------------------------------------ inputs with a scale of the layer (numerics.md 2.5, 5.9)


def is_quantized(x: torch.Tensor | QuantizedActivation, given: Buffers) -> bool:
    """Whether x is quantized already, by itself or by what made it."""
    return bool(given) or isinstance(x, QuantizedTensor | QuantizedActivation)


def static_scale(module: ProductModule, product: str, text: str, *, needs_dw: bool) -> torch.Tensor:
    """The scale of a matmul's input. text: of its recipe. Raises RuntimeError if the layer has no scale,
    NotImplementedError for what does not go with one."""
    what, name, spec = f"quire.{type(module).__name__}", named(product, "input_scale"), text.split(",")[0]
    scale = module._buffers.get(name)
    if scale is None:
        raise RuntimeError(
            f"{what}: {spec} has its scale from the layer, which has no buffer {name!r}; give the layer its recipe "
            "(recipe= of its constructor, or quire.convert), and load its state dict"
        )
    module.check_float32(what, name)
    if needs_dw and text.endswith(("backward=high_precision", "backward=requantized")):
        raise NotImplementedError(
            f"{what}: the gradient of its weight starts from x itself ({text.rsplit(',', 1)[1]}), and {spec} is "
            "quantized before; take backward_override='dequantized' or None, without save_original_input"
        )
    return local(scale)  # parallelize_module makes buffers DTensors, which all processes have whole
