"""A Linear layer whose matmuls run in the formats of the active recipe."""

from collections.abc import Callable

import torch

from quire import delayed
from quire.autocast import Rule, active_in, is_batch_invariant_enabled
from quire.checks import check_sizes, check_type_or_none, with_known_options
from quire.delayed.step import RulesByLayer
from quire.distributed.parallel import Parallel, sharded_dims
from quire.distributed.placements import is_dtensor, layout_of, sharding_of, torchs_result
from quire.functional import grouped_linear, input_buffers, linear, linear_prequantized
from quire.nn.layer_base import check_factory, initialise, is_any_autocast_enabled, name_layer, uses_torch_autocast
from quire.nn.product import Product, active_call, static_scale
from quire.nn.product_module import ProductModule, check_bias, checked_recipe
from quire.recipe import Recipe
from quire.recipe.linear_spec import LinearSpec
from quire.tensor import QuantizedActivation, QuantizedTensor, QuantSpec
from quire.tensor.order import same_codes

torchs_linear = torch.nn.functional.linear


def applied_sharding(layer: torch.nn.Linear) -> Parallel | None:
    """How a parallel style has sharded the weight of a torch.nn.Linear; None if none has. Raises ValueError if no
    quire.Linear is sharded like that. fully_shard makes DTensors too, which say nothing of how the layer computes."""
    if "parallel" in vars(layer):
        return layer.parallel
    by_a_style = getattr(layer, "_distribute_module_applied", False)
    return sharding_of(layer.weight, "quire.Linear") if by_a_style else None


# A torch.nn.Linear, because it is one in all but its products: the same parameters, initialisation and state_dict, so
# that checkpoints go both ways and code that looks for nn.Linear (parallel styles, initialisation) finds it.
class Linear(ProductModule, torch.nn.Linear):
    """y = x w^T + bias. The active recipe determines the quantization (quire.autocast). Without a recipe, and outside
    of quire.batch_invariant, the layer computes exactly what torch.nn.Linear computes (with fuse_wgrad_accumulation or
    delay_wgrad_compute, up to the last bits of the bias's gradient).

    The parameters are weight [out_features, in_features] and bias [out_features] or None, in params_dtype (or `dtype`;
    None: torch's default). After the same torch.manual_seed they have the same initial values as in torch.nn.Linear.
    The state_dict holds weight and bias, and input_scale if the recipe has a static scale. Within
    quire.quantized_model_init the weight is quantized.

    Args:
        in_features: the number of features of x.
        out_features: the number of features of y.
        bias: whether the layer adds a bias.
        params_dtype: the dtype of the parameters. None: torch's default.
        device: the device of the parameters. None: torch's default.
        dtype: the same as params_dtype, under the name that torch.nn.Linear has for it.
        init_method: a function that initialises weight; bias is then 0.
        return_bias: forward returns (y, bias), and y does not include bias.
        fuse_wgrad_accumulation: backward adds the weight's gradient to weight.main_grad (float32, float16 or bfloat16,
            of weight's shape), in the dtype of main_grad. It overwrites main_grad if weight.overwrite_main_grad or
            is_first_microbatch is true. weight.grad stays None. If weight has an attribute grad_added_to_main_grad,
            backward sets it to True and gives weight a gradient of zeros, for hooks that wait for one.
        delay_wgrad_compute: backward does not compute the weight's gradient, and keeps its operands. Each call of
            backward_dw() computes the oldest gradient.
        save_original_input: the unquantized x is saved for backward and quantized there.
        recipe: the recipe outside of every quire.autocast; None is high precision. Delayed scaling is not allowed.
        name: an attribute for the caller; quire does not use it.
        parallel: how the weight is sharded over ranks (quire.distributed.Parallel). The arguments in_features and
            out_features are those of the whole layer. The attributes of these names are those of this rank. Every rank
            draws the whole weight and keeps its shard. x must be a plain tensor, and forward takes no output_spec or
            fp8_output.

    Raises:
        TypeError: for an unknown option, and for a value of the wrong type. bias is a bool; a recipe goes to recipe=.
        ValueError: if dtype and params_dtype differ, for a size below 0, if recipe has an unknown name or is delayed,
            and for sizes that parallel cannot shard evenly.
        RuntimeError: for a device that this PyTorch or this machine does not have.

    Shape:
        - x: `[*, in_features]`, in float32, float16 or bfloat16, with any number of rows, also 0.
        - y: `[*, out_features]`, in the dtype of x, or that of torch.autocast.

    Examples:
        >>> layer = quire.Linear(64, 96)
        >>> with quire.autocast(recipe="mxfp8"):
        ...     y = layer(torch.randn(32, 64))
        >>> y.shape
        torch.Size([32, 96])

    Stochastic rounding of gradients uses `sr_state`, int64 [2] {seed, counter}. Each backward adds 1 to the counter
    (numerics.md 0.11). quire.rng_state saves this state. It is not a buffer, because DistributedDataParallel would copy
    the first rank's state to all ranks. reset_parameters() sets the seed. So does moving the module from the meta
    device to another one. The seed follows from the state of torch's generator, which does not change, and from the
    data-parallel rank (quire.distributed.data_parallel_rank). Modules that leave the meta device together and are not
    reset have the same seed; quire.set_rng_state sets another one. `delayed` is the layer's state of delayed scaling.
    """

    # What adopt() leaves as it is.
    init_method: Callable[[torch.Tensor], object] | None = None
    return_bias: bool = False
    name: str | None = None

    @with_known_options
    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        params_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        *,
        dtype: torch.dtype | None = None,
        init_method: Callable[[torch.Tensor], object] | None = None,
        return_bias: bool = False,
        fuse_wgrad_accumulation: bool = False,
        delay_wgrad_compute: bool = False,
        save_original_input: bool = False,
        recipe: Recipe | str | None = None,
        name: str | None = None,
        parallel: Parallel | None = None,
    ) -> None:
        if None not in (dtype, params_dtype) and dtype != params_dtype:
            raise ValueError(
                f"quire.Linear: dtype and params_dtype are the same option, got {dtype} and {params_dtype}; pass one"
            )
        check_bias("quire.Linear", bias)
        check_factory("quire.Linear", device, params_dtype=params_dtype, dtype=dtype)
        check_sizes("quire.Linear", in_features=in_features, out_features=out_features)
        check_type_or_none("quire.Linear", Callable, init_method=init_method)
        recipe = checked_recipe("quire.Linear", recipe)
        check_type_or_none("quire.Linear", Parallel, parallel=parallel)
        self.parallel = parallel  # before the parameters, which are this rank's shard
        sizes = (
            (in_features, out_features)
            if parallel is None
            else parallel.sizes("quire.Linear", in_features, out_features)
        )
        super().__init__(*sizes, bias, device, params_dtype if dtype is None else dtype)
        self._set_flags(
            return_bias=return_bias,
            fuse_wgrad_accumulation=fuse_wgrad_accumulation,
            delay_wgrad_compute=delay_wgrad_compute,
            save_original_input=save_original_input,
        )
        self.init_method, self.name, self.recipe = init_method, name, recipe
        self._add_states()
        initialise(self.weight, self.bias, init_method, parallel)
        self._reset_sr_states()
        self._quantize_weights()

    @classmethod
    def adopt(cls, layer: torch.nn.Linear, recipe: Recipe | None) -> "Linear":
        """Converts a torch.nn.Linear to this class in place: the same object, with its parameters, hooks and flags. Its
        random state is uninitialised (reset_streams)."""
        parallel = applied_sharding(layer)
        layer.__class__ = cls
        layer.recipe, layer.parallel = recipe, parallel
        layer._add_states()
        return layer

    def sharded_dims(self, mode: str) -> dict[str, int | None]:
        return sharded_dims(mode)

    def reset_parameters(self) -> None:
        """Initialises the weights as torch.nn.Linear or by init_method, and sets a new seed with the counter at 0."""
        if not hasattr(self, "sr_state"):  # torch.nn.Linear's constructor ends with this call: too early
            return
        initialise(self.weight, self.bias, self.init_method, self.parallel)
        self._reset_sr_states()

    def forward(
        self,
        x: torch.Tensor | QuantizedActivation,
        is_first_microbatch: bool | None = None,
        fp8_output: bool = False,
        fp8_grad: bool = False,
        *,
        output_spec: QuantSpec | str | None = None,
    ) -> torch.Tensor | QuantizedActivation | tuple[torch.Tensor | QuantizedActivation, torch.Tensor | None]:
        """x `[*, in_features]` -> `[*, out_features]`, in the dtype of x or of torch.autocast (numerics.md 6.2, 6.7).

        Args:
            x: a plain tensor, or a QuantizedTensor or QuantizedActivation, which is used directly, under its own spec.
            is_first_microbatch: True quantizes the weight and keeps the codes, None does not keep them. False uses
                kept codes; where there are none, it quantizes the weight as None does.
            fp8_output: whether the result is quantized under the recipe's spec for x.
            fp8_grad: whether the gradient of x is rounded to the recipe's format of gradients.
            output_spec: of a quantized result, a QuantizedTensor, or for backward a QuantizedActivation.

        Raises:
            NotImplementedError: with parallel=, for a quantized x, fp8_output and output_spec.
            RuntimeError: if shapes or devices do not fit; without a recipe, also if dtypes do not; under a recipe for
                an x that is not float32, float16 or bfloat16. For kept codes (is_first_microbatch=False,
                quire.quantize_weights) of a weight that has changed. In backward, for a main_grad that is missing or
                does not fit.
            TypeError: if dtypes do not fit under a recipe, and for an option of the wrong type.
            ValueError: for an output_spec that is unknown or stochastic, and for fp8_output under a recipe that does
                not quantize x as a result can be (weights only, static scales). Without a recipe fp8_output has no
                effect.
        """
        try:
            if is_first_microbatch is None and output_spec is None and fp8_output is fp8_grad is False:
                y = self._without_product(x)
                if y is None and is_dtensor(x) and not is_batch_invariant_enabled() and active_in(self) == (None, None):
                    y = torchs_result(self, x)
                if y is not None:
                    return y
            options = {"fp8_output": fp8_output, "fp8_grad": fp8_grad, "output_spec": output_spec}
            call = active_call(self, x, is_first_microbatch, layout=layout_of(self, x), **options)
            product = Product(self, "", call)
            y = product.output(product.run(call.take(x), bias=not self.return_bias))
            product.commit()
            y = call.give(y, x)
            return (y, product.returned_bias()) if self.return_bias else y
        except Exception as error:
            name_layer(error, self)
            raise

    def _without_product(self, x: torch.Tensor) -> torch.Tensor | None:
        """forward() without options. None if the layer has some, of other tensors than plain ones and other dtypes."""
        weight, bias = self._parameters.get("weight"), self._parameters.get("bias", ...)  # quicker than getattr
        unquantized = type(weight) is torch.nn.Parameter
        own = (unquantized or type(weight) is QuantizedTensor) and (bias is None or type(bias) is torch.nn.Parameter)
        if not own or type(x) is not torch.Tensor or self.return_bias or self.parallel is not None:
            return None
        if self.fuse_wgrad_accumulation or self.delay_wgrad_compute:
            return None
        recipe, rule = active_in(self)
        if recipe is None:
            torchs = unquantized and rule is None and not is_batch_invariant_enabled()
            return torchs_linear(x, weight, bias) if torchs else None
        dtype = x.dtype
        if is_any_autocast_enabled() and uses_torch_autocast(x):
            dtype = torch.get_autocast_dtype(x.device.type)
        elif weight.dtype != dtype or (bias is not None and bias.dtype != dtype):
            return None
        if self.save_original_input or (recipe.static_input and unquantized):
            return None
        specs = recipe.batch_invariant_specs if is_batch_invariant_enabled() else recipe.specs
        if recipe.delayed_operands and unquantized:
            return self._delayed(x, recipe, rule, specs, dtype)
        if not unquantized:
            return self._of_codes(x, recipe, specs, dtype)
        sr_state = self.sr_state if recipe.stochastic and torch.is_grad_enabled() else None
        if sr_state is not None and sr_state.device != weight.device:
            return None
        kept = self.kept_weight
        if kept is None or kept.spec != recipe.weight_spec:
            return linear(x, weight, bias, specs.text, dtype, sr_state=sr_state)
        text, codes, mark = specs.of_w(kept.stored).text, kept.operand(), kept.fingerprint
        return linear_prequantized(x, weight, bias, text, dtype, w_buffers=codes, sr_state=sr_state, w_fingerprint=mark)

    def _delayed(
        self, x: torch.Tensor, recipe: Recipe, rule: Rule, specs: LinearSpec, dtype: torch.dtype
    ) -> torch.Tensor | None:
        """_without_product() of delayed scaling of all operands; None if codes of the weight are kept, or rules differ
        by layer."""
        weight, bias, state = self._parameters["weight"], self._parameters["bias"], self.delayed
        if isinstance(rule, RulesByLayer) or self.kept_weight is not None or len(recipe.delayed_operands) < 3:
            return None
        if state.usage.device != weight.device:
            return None
        forward, backward = delayed.scales(state)
        given = {"fwd_scale": forward, "bwd_scale": backward, "bwd_amax": state.bwd_amax}
        biases = [] if bias is None else [bias]
        y, x_amax, w_amax = grouped_linear(x, [weight], biases, None, specs.text, dtype=dtype, **given)
        delayed.collect(state, rule, x_amax, w_amax)
        return y

    def _of_codes(self, x: torch.Tensor, recipe: Recipe, specs: LinearSpec, dtype: torch.dtype) -> torch.Tensor | None:
        """_without_product() of a quantized weight, in calls that want no gradient."""
        weight, bias = self._parameters["weight"], self._parameters["bias"]
        if torch.is_grad_enabled() and any([t is not None and t.requires_grad for t in (x, weight, bias)]):
            return None
        if (
            self.gathering is not None
            or recipe.delayed_operands
            or not same_codes(weight.spec_text, recipe.weight_spec)
        ):
            return None
        specs, x_buffers = specs.of_w(weight.spec_text), ()
        if recipe.static_input:
            x_buffers = input_buffers(x, specs.x, static_scale(self, "", specs, needs_dw=False), None, False)
        codes, carrier = weight.buffer_list(), weight.carrier()
        return linear_prequantized(x, carrier, bias, specs.text, dtype, x_buffers=x_buffers, w_buffers=codes)

    def extra_repr(self) -> str:
        sharded = "" if self.parallel is None else f", parallel={self.parallel.text!r}"
        return super().extra_repr() + self._recipe_text() + sharded
