"""A norm, a Linear, an activation function and a Linear, whose inputs are quantized in the pass that computes them."""

from collections.abc import Callable, Mapping

import torch

from quire.checks import check_sizes, check_type_or_none, with_known_options
from quire.distributed.parallel import Parallel
from quire.distributed.placements import layout_of
from quire.functional import activation, activation_inputs, activation_text
from quire.nn.layer_base import check_factory, initialise, name_layer
from quire.nn.layernorm_linear import check_column, column_parallel, norm_parameters, normalised
from quire.nn.norm import reset_norm
from quire.nn.product import Product, active_call
from quire.nn.product_module import ProductModule, check_bias, checked_recipe
from quire.nn.recompute import checkpoint as recompute
from quire.recipe import Recipe
from quire.tensor import QuantizedActivation, QuantSpec


class LayerNormMLP(ProductModule):
    """y = fc2(activation(fc1(norm(x)))). The bits are those of quire.LayerNorm (or RMSNorm), quire.Linear, the
    activation and quire.Linear one after the other.

    The parameters are layer_norm_weight and layer_norm_bias [hidden_size] (RMSNorm has no bias), fc1_weight [F,
    hidden_size], fc1_bias [F], fc2_weight [hidden_size, ffn_hidden_size] and fc2_bias [hidden_size]. F is
    ffn_hidden_size. For a gated activation F is 2 * ffn_hidden_size: the rows of the gate, then those of the up
    projection. All are in params_dtype (None: torch's default).

    Within quire.quantized_model_init fc1_weight and fc2_weight are quantized. Each of the two matmuls has a random
    state and a state of delayed scaling, as quire.Linear has.

    Args:
        hidden_size: the number of features of x and y.
        ffn_hidden_size: the number of features between fc1 and fc2.
        eps: is added to the variance.
        return_bias: fc2_bias is returned and not added.
        init_method: of fc1_weight, as for quire.LayerNormLinear.
        bias: whether the layer adds a bias.
        normalization: "LayerNorm" or "RMSNorm".
        activation: "gelu" (its tanh form), "geglu", "glu", "qgelu", "qgeglu", "relu", "reglu", "srelu", "sreglu",
            "silu", "swiglu" or "clamped_swiglu" (numerics.md 11.3).
        activation_params: limit, alpha and glu_linear_offset of "clamped_swiglu".
        output_layer_init_method: of fc2_weight, as init_method.
        params_dtype: the dtype of the parameters. None: torch's default.
        return_layernorm_output: the norm's result is returned too, in high precision. forward returns y, (y, bias), (y,
            norm) or (y, bias, norm).
        zero_centered_gamma: the factor of the norm is weight + 1, and weight starts at 0.
        device: the device of the parameters. None: torch's default.
        fuse_wgrad_accumulation: as for quire.Linear, for both weights.
        delay_wgrad_compute: as for quire.Linear, for both weights.
        save_original_input: as for quire.Linear, for both weights.
        name: an attribute for the caller; quire does not use it.
        checkpoint: the forward pass saves only x for backward (and codes of cached weights). Backward then computes the
            forward pass again, under the same recipe and scales.
        recipe: of both matmuls, as for quire.Linear.
        parallel: as for quire.Linear, with mode "column". It shards ffn_hidden_size over ranks: fc1 is a "column"
            layer, fc2 a "row" layer of the same group. With a gated activation, gate and up are sharded separately.

    Raises:
        NotImplementedError: for an unknown activation.
        TypeError: for an unknown option, and for a value of the wrong type. bias is a bool; a recipe goes to recipe=.
        ValueError: for another normalization, for an eps that is not finite or below 0, for a size below 0, for
            parameters that the activation does not have, if recipe has an unknown name or is delayed, and if parallel
            has another mode than "column" or cannot shard ffn_hidden_size evenly.
        RuntimeError: as for quire.Linear.

    Shape:
        - x and y: `[*, hidden_size]`.

    Examples:
        >>> layer = quire.LayerNormMLP(64, 128, activation="swiglu")
        >>> layer(torch.randn(32, 64)).shape
        torch.Size([32, 64])
    """

    products = ("fc1", "fc2")
    fc1_parallel: Parallel | None = None
    fc2_parallel: Parallel | None = None
    weight_names, bias_names = ("fc1_weight", "fc2_weight"), ("fc1_bias", "fc2_bias")

    @with_known_options
    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        eps: float = 1e-5,
        *,
        return_bias: bool = False,
        init_method: Callable[[torch.Tensor], object] | None = None,
        bias: bool = True,
        normalization: str = "LayerNorm",
        activation: str = "gelu",
        activation_params: Mapping[str, float] | None = None,
        output_layer_init_method: Callable[[torch.Tensor], object] | None = None,
        params_dtype: torch.dtype | None = None,
        return_layernorm_output: bool = False,
        zero_centered_gamma: bool = False,
        device: torch.device | str | None = None,
        fuse_wgrad_accumulation: bool = False,
        delay_wgrad_compute: bool = False,
        save_original_input: bool = False,
        name: str | None = None,
        checkpoint: bool = False,
        recipe: Recipe | str | None = None,
        parallel: Parallel | None = None,
    ) -> None:
        check_bias("quire.LayerNormMLP", bias)
        check_factory("quire.LayerNormMLP", device, params_dtype=params_dtype)
        check_sizes("quire.LayerNormMLP", hidden_size=hidden_size, ffn_hidden_size=ffn_hidden_size)
        methods = {"init_method": init_method, "output_layer_init_method": output_layer_init_method}
        check_type_or_none("quire.LayerNormMLP", Callable, **methods)
        recipe = checked_recipe("quire.LayerNormMLP", recipe)
        super().__init__()
        self._set_flags(
            return_bias=return_bias,
            return_layernorm_output=return_layernorm_output,
            zero_centered_gamma=zero_centered_gamma,
            fuse_wgrad_accumulation=fuse_wgrad_accumulation,
            delay_wgrad_compute=delay_wgrad_compute,
            save_original_input=save_original_input,
            checkpoint=checkpoint,
        )
        self.activation, self.eps, self.name, self.recipe = activation, eps, name, recipe
        self._activation = activation_text("quire.LayerNormMLP", activation, activation_params)
        self.normalization = normalization
        self.init_method, self.output_layer_init_method = init_method, output_layer_init_method
        factory = {"device": device, "dtype": params_dtype}
        norm_parameters(self, hidden_size, factory)
        if column_parallel("quire.LayerNormMLP", parallel) is not None:
            self.fc2_parallel = parallel.then()
            self.fc1_parallel = parallel.of_parts(*[ffn_hidden_size] * activation_inputs(activation))
            _, ffn_hidden_size = parallel.sizes("quire.LayerNormMLP", hidden_size, ffn_hidden_size)
        inner = ffn_hidden_size * activation_inputs(activation)
        for product, n, k in (("fc1", inner, hidden_size), ("fc2", hidden_size, ffn_hidden_size)):
            self.register_parameter(f"{product}_weight", torch.nn.Parameter(torch.empty(n, k, **factory)))
            self.register_parameter(f"{product}_bias", torch.nn.Parameter(torch.empty(n, **factory)) if bias else None)
        self._add_states()
        self.reset_parameters()
        self._quantize_weights()

    def sharded_dims(self, mode: str) -> dict[str, int | None]:
        check_column("quire.LayerNormMLP", mode)
        if activation_inputs(self.activation) != 1:
            raise NotImplementedError(
                f"quire.LayerNormMLP, activation={self.activation!r}: each half of fc1 would be sharded by itself, and "
                "torch.distributed.checkpoint cannot save such a DTensor; make the layer with parallel= instead"
            )
        whole = {"layer_norm_weight": None, "layer_norm_bias": None, "fc2_bias": None}
        return {"fc1_weight": 0, "fc1_bias": 0, "fc2_weight": 1} | whole

    def reset_parameters(self) -> None:
        """Initialises the parameters again, and sets new seeds with their counters at 0."""
        reset_norm(self.layer_norm_weight, self.layer_norm_bias, self.zero_centered_gamma)
        initialise(self.fc1_weight, self.fc1_bias, self.init_method, self.fc1_parallel)
        initialise(self.fc2_weight, self.fc2_bias, self.output_layer_init_method, self.fc2_parallel)
        self._reset_sr_states()

    def forward(
        self,
        x: torch.Tensor,
        is_first_microbatch: bool | None = None,
        *,
        fp8_output: bool = False,
        fp8_grad: bool = False,
        output_spec: QuantSpec | str | None = None,
    ) -> torch.Tensor | QuantizedActivation | tuple[torch.Tensor | QuantizedActivation | None, ...]:
        """x `[*, hidden_size]` -> the same shape. Options, dtype of the result and errors are those of quire.Linear,
        for each of the two matmuls: fp8_grad rounds the gradients of the norm's and of the activation's result;
        fp8_output and output_spec apply to the module's result. x is float32, float16 or bfloat16, without a recipe
        too; another dtype is a TypeError.

        Args:
            x: `[*, hidden_size]`.
            is_first_microbatch: as for quire.Linear.
            fp8_output: as for quire.Linear.
            fp8_grad: as for quire.Linear.
            output_spec: as for quire.Linear.
        """
        try:
            options = {"fp8_output": fp8_output, "fp8_grad": fp8_grad, "output_spec": output_spec}
            call = active_call(self, x, is_first_microbatch, layout=layout_of(self, x), **options)
            fc1, fc2 = (Product(self, name, call) for name in self.products)

            def compute(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
                normed, buffers = normalised(self, x, fc1, self.return_layernorm_output)
                h = fc1.run(normed, x_buffers=buffers)
                activated, buffers = activation(h, self._activation, h.dtype, **fc2.input())
                return fc2.run(activated, x_buffers=buffers, bias=not self.return_bias), normed

            if self.checkpoint and torch.is_grad_enabled():
                y, normed = recompute(compute, call.take(x), preserve_rng_state=False)
            else:
                y, normed = compute(call.take(x))
            y = fc2.output(y)
            for product in (fc1, fc2):
                product.commit()
            y, normed = call.give(y, x), call.give_normed(normed, x)
            extra = (fc2.returned_bias(),) if self.return_bias else ()
            extra += (normed,) if self.return_layernorm_output else ()
            return (y, *extra) if extra else y
        except Exception as error:
            name_layer(error, self)
            raise

    def extra_repr(self) -> str:
        hidden, ffn = self.fc2_weight.shape
        kinds = f"{self.normalization}, {self._activation}"
        return f"{hidden}, {ffn}, bias={self.fc1_bias is not None}, {kinds}{self._recipe_text()}"
