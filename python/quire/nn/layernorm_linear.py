"""A norm followed by a Linear, whose input is quantized in the pass that computes the norm."""

from collections.abc import Callable

import torch

from quire.checks import check_eps, check_sizes, check_type_or_none, with_known_options
from quire.distributed.parallel import Parallel
from quire.distributed.placements import layout_of
from quire.functional import norm
from quire.nn.layer_base import check_factory, initialise, name_layer
from quire.nn.norm import reset_norm
from quire.nn.product import Product, active_call
from quire.nn.product_module import ProductModule, check_bias, checked_recipe
from quire.recipe import Recipe
from quire.tensor import QuantizedActivation, QuantizedTensor, QuantSpec

_NORMALIZATIONS = ("LayerNorm", "RMSNorm")


def norm_parameters(module: torch.nn.Module, size: int, options: dict[str, object]) -> None:
    """Adds the parameters layer_norm_weight [size] and layer_norm_bias [size] (None for RMSNorm) to the module. Raises
    ValueError for another normalization, and the errors of check_eps()."""
    check_eps(f"quire.{type(module).__name__}", module.eps)
    if module.normalization not in _NORMALIZATIONS:
        raise ValueError(
            f"quire.{type(module).__name__}: normalization must be 'LayerNorm' or 'RMSNorm', "
            f"got {module.normalization!r}"
        )
    module.layer_norm_weight = torch.nn.Parameter(torch.empty(size, **options))
    has_bias = module.normalization == "LayerNorm"
    module.register_parameter("layer_norm_bias", torch.nn.Parameter(torch.empty(size, **options)) if has_bias else None)


def column_parallel(what: str, parallel: Parallel | None) -> Parallel | None:
    """Raises ValueError unless the layer behind a norm keeps all inputs, which the norm needs together."""
    check_type_or_none(what, Parallel, parallel=parallel)
    if parallel is not None:
        check_column(what, parallel.mode)
    return parallel


def check_column(what: str, mode: str) -> None:
    """Raises ValueError for another mode."""
    if mode != "column":
        raise ValueError(
            f"{what}: the norm needs all features of a token, so parallel must have mode 'column', got {mode!r}; use "
            "quire.LayerNorm and quire.Linear for another sharding"
        )


def normalised(
    module: ProductModule, x: torch.Tensor | QuantizedActivation, product: Product, keep: bool
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """norm() with the module's parameters, for the matmul behind it. A quantized x is decoded. keep: the result itself
    is needed too. Raises RuntimeError for an x with other features than those of the norm."""
    if isinstance(x, QuantizedTensor | QuantizedActivation):
        x = x.dequantize()
    weight, bias = product.call.part(module.layer_norm_weight), product.call.part(module.layer_norm_bias)
    options = {"eps": module.eps, "zero_centered": module.zero_centered_gamma} | product.input(keep)

    def normalise(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> tuple:
        return norm(x, weight, bias, module.normalization, product.call.dtype, **options)

    try:
        return product.exchange.of_tokens(normalise, x, weight, bias)
    except RuntimeError:  # looking at the sizes before would take time in every call
        if x.is_nested or x.shape[-1:] == weight.shape:
            raise
        raise RuntimeError(
            f"quire.{type(module).__name__}: x must be [..., {weight.shape[0]}], got {[*x.shape]}; the norm of "
            f"the layer has {weight.shape[0]} features"
        ) from None


class LayerNormLinear(ProductModule):
    """quire.LayerNorm (or quire.RMSNorm) followed by quire.Linear, with the same bits, in one pass over the norm's
    result.

    The parameters are layer_norm_weight and layer_norm_bias [in_features] (RMSNorm has no bias), weight [out_features,
    in_features], bias [out_features] or None, all in params_dtype (None: torch's default).

    Within quire.quantized_model_init the weight is quantized.

    Random state and delayed scaling: as for quire.Linear.

    Args:
        in_features: the number of features of x, over which the norm is computed.
        out_features: the number of features of y.
        eps: is added to the variance.
        bias: whether the layer adds a bias.
        normalization: "LayerNorm" or "RMSNorm".
        init_method: called with weight; bias is then 0. None: the initialisation of torch.nn.Linear.
        return_bias: bias is returned and not added.
        params_dtype: the dtype of the parameters. None: torch's default.
        return_layernorm_output: the norm's result is returned too, in high precision. forward returns y, (y, bias), (y,
            norm) or (y, bias, norm).
        zero_centered_gamma: the factor of the norm is weight + 1, and weight starts at 0.
        device: the device of the parameters. None: torch's default.
        fuse_wgrad_accumulation: as for quire.Linear.
        delay_wgrad_compute: as for quire.Linear.
        save_original_input: as for quire.Linear.
        name: an attribute for the caller; quire does not use it.
        recipe: as for quire.Linear.
        parallel: as for quire.Linear, with mode "column". If tokens are sharded (sequence=True), the gradients of the
            norm's parameters are summed over the group.

    Raises:
        TypeError: for an unknown option, and for a value of the wrong type. bias is a bool; a recipe goes to recipe=.
        ValueError: for another normalization, for an eps that is not finite or below 0, for a size below 0, if recipe
            has an unknown name or is delayed, and if parallel has another mode than "column" or cannot shard
            out_features evenly.
        RuntimeError: as for quire.Linear.

    Shape:
        - x: `[*, in_features]`.
        - y: `[*, out_features]`.

    Examples:
        >>> layer = quire.LayerNormLinear(64, 96, normalization="RMSNorm")
        >>> layer(torch.randn(32, 64)).shape
        torch.Size([32, 96])
    """

    @with_known_options
    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        *,
        bias: bool = True,
        normalization: str = "LayerNorm",
        init_method: Callable[[torch.Tensor], object] | None = None,
        return_bias: bool = False,
        params_dtype: torch.dtype | None = None,
        return_layernorm_output: bool = False,
        zero_centered_gamma: bool = False,
        device: torch.device | str | None = None,
        fuse_wgrad_accumulation: bool = False,
        delay_wgrad_compute: bool = False,
        save_original_input: bool = False,
        name: str | None = None,
        recipe: Recipe | str | None = None,
        parallel: Parallel | None = None,
    ) -> None:
        check_bias("quire.LayerNormLinear", bias)
        check_factory("quire.LayerNormLinear", device, params_dtype=params_dtype)
        check_sizes("quire.LayerNormLinear", in_features=in_features, out_features=out_features)
        check_type_or_none("quire.LayerNormLinear", Callable, init_method=init_method)
        recipe = checked_recipe("quire.LayerNormLinear", recipe)
        super().__init__()
        self._set_flags(
            return_bias=return_bias,
            return_layernorm_output=return_layernorm_output,
            zero_centered_gamma=zero_centered_gamma,
            fuse_wgrad_accumulation=fuse_wgrad_accumulation,
            delay_wgrad_compute=delay_wgrad_compute,
            save_original_input=save_original_input,
        )
        self.parallel = column_parallel("quire.LayerNormLinear", parallel)
        if parallel is not None:
            _, out_features = parallel.sizes("quire.LayerNormLinear", in_features, out_features)
        self.in_features, self.out_features, self.eps, self.name = in_features, out_features, eps, name
        self.normalization, self.init_method, self.recipe = normalization, init_method, recipe
        factory = {"device": device, "dtype": params_dtype}
        norm_parameters(self, in_features, factory)
        self.weight = torch.nn.Parameter(torch.empty(out_features, in_features, **factory))
        self.register_parameter("bias", torch.nn.Parameter(torch.empty(out_features, **factory)) if bias else None)
        self._add_states()
        self.reset_parameters()
        self._quantize_weights()

    def sharded_dims(self, mode: str) -> dict[str, int | None]:
        check_column("quire.LayerNormLinear", mode)
        return {"layer_norm_weight": None, "layer_norm_bias": None, "weight": 0, "bias": 0}

    def reset_parameters(self) -> None:
        """Initialises the parameters again, and sets a new seed with the counter at 0."""
        reset_norm(self.layer_norm_weight, self.layer_norm_bias, self.zero_centered_gamma)
        initialise(self.weight, self.bias, self.init_method, self.parallel)
        self._reset_sr_states()

    def forward(
        self,
        x: torch.Tensor,
        is_first_microbatch: bool | None = None,
        fp8_output: bool = False,
        fp8_grad: bool = False,
        *,
        output_spec: QuantSpec | str | None = None,
    ) -> torch.Tensor | QuantizedActivation | tuple[torch.Tensor | QuantizedActivation | None, ...]:
        """x `[*, in_features]` -> `[*, out_features]`. Options, dtype of the result and errors are those of a
        quire.Linear whose input is the norm's result: fp8_grad rounds the gradient of the norm's result. x is float32,
        float16 or bfloat16, without a recipe too; another dtype is a TypeError.

        Args:
            x: `[*, in_features]`.
            is_first_microbatch: as for quire.Linear.
            fp8_output: as for quire.Linear.
            fp8_grad: as for quire.Linear.
            output_spec: as for quire.Linear.
        """
        try:
            options = {"fp8_output": fp8_output, "fp8_grad": fp8_grad, "output_spec": output_spec}
            call = active_call(self, x, is_first_microbatch, layout=layout_of(self, x), **options)
            product, keep = Product(self, "", call), self.return_layernorm_output
            normed, buffers = normalised(self, call.take(x), product, keep)
            y = product.output(product.run(normed, x_buffers=buffers, bias=not self.return_bias))
            product.commit()
            y, normed = call.give(y, x), call.give_normed(normed, x)
            extra = ((product.returned_bias(),) if self.return_bias else ()) + ((normed,) if keep else ())
            return (y, *extra) if extra else y
        except Exception as error:
            name_layer(error, self)
            raise

    def extra_repr(self) -> str:
        sizes = f"{self.in_features}, {self.out_features}"
        return f"{sizes}, bias={self.bias is not None}, {self.normalization}{self._recipe_text()}"
