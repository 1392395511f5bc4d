"""A norm followed by a Linear, whose input is quantized as the norm computes it."""

from collections.abc import Callable

import torch

from quire.functional import norm
from quire.nn import options as unavailable
from quire.nn.norm import reset_norm
from quire.nn.product import Pass, ProductModule, initialise

_NORMALIZATIONS = ("LayerNorm", "RMSNorm")
_OPTIONS = unavailable.PARALLEL | {
    "fuse_wgrad_accumulation": False,
    "delay_wgrad_compute": False,
    "parameters_split": None,
    "return_layernorm_output_gathered": False,
}
_FORWARD_OPTIONS = {"is_first_microbatch": None, "fp8_output": False, "fp8_grad": False}


def norm_parameters(module: torch.nn.Module, size: int, options: dict[str, object]) -> None:
    """Gives the module layer_norm_weight [size] and layer_norm_bias [size], None for RMSNorm."""
    if module.normalization not in _NORMALIZATIONS:
        raise ValueError(
            f"quire.{type(module).__name__}: normalization must be 'LayerNorm' or 'RMSNorm', "
            f"got {module.normalization!r}"
        )
    module.layer_norm_weight = torch.nn.Parameter(torch.empty(size, **options))
    has_bias = module.normalization == "LayerNorm"
    module.register_parameter("layer_norm_bias", torch.nn.Parameter(torch.empty(size, **options)) if has_bias else None)


def normalised(
    module: torch.nn.Module, x: torch.Tensor, dtype: torch.dtype, quantized: dict[str, object]
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """norm() with the module's parameters."""
    return norm(
        x,
        module.layer_norm_weight,
        module.layer_norm_bias,
        module.normalization,
        dtype,
        eps=module.eps,
        zero_centered=module.zero_centered_gamma,
        **quantized,
    )


class LayerNormLinear(ProductModule):
    """quire.LayerNorm (or quire.RMSNorm) followed by quire.Linear, bit for bit, in one pass over the norm's result.

    Parameters: layer_norm_weight and layer_norm_bias [in_features] (RMSNorm has no bias), weight [out_features,
    in_features], bias [out_features] or None, all in params_dtype (None: torch's default).

    normalization: "LayerNorm" or "RMSNorm"; eps, zero_centered_gamma: as for those.
    init_method: called with weight; bias is then 0. None: torch.nn.Linear's initialisation.
    return_bias: bias is returned and not added. return_layernorm_output: the norm's result is returned too, in high
        precision: forward gives y, (y, bias), (y, norm) or (y, bias, norm).
    Within quire.quantized_model_init the weight is quantized.

    Further keywords are TransformerEngine's; one that is not available raises NotImplementedError unless it has its
    default. Randomness and delayed scaling: as for quire.Linear.
    """

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
        name: str | None = None,
        **options: object,
    ) -> None:
        unavailable.refuse("quire.LayerNormLinear", options, _OPTIONS)
        super().__init__()
        self.in_features, self.out_features, self.eps, self.name = in_features, out_features, eps, name
        self.normalization, self.zero_centered_gamma, self.init_method = normalization, zero_centered_gamma, init_method
        self.return_bias, self.return_layernorm_output = return_bias, return_layernorm_output
        factory = {"device": device, "dtype": params_dtype}
        norm_parameters(self, in_features, factory)
        self.weight = torch.nn.Parameter(torch.empty(out_features, in_features, **factory))
        self.register_parameter("bias", torch.nn.Parameter(torch.empty(out_features, **factory)) if bias else None)
        self._add_states(self.weight.device)
        self.reset_parameters()
        self._quantize_weights()

    def reset_parameters(self, defer_init: bool = False) -> None:
        """New parameters, and a new seed with the counter at 0. With defer_init, nothing."""
        if defer_init:
            return
        reset_norm(self.layer_norm_weight, self.layer_norm_bias, self.zero_centered_gamma)
        initialise(self.weight, self.bias, self.init_method)
        self._reset_sr_states()

    def forward(self, x: torch.Tensor, **options: object) -> torch.Tensor | tuple[torch.Tensor | None, ...]:
        """x [*, in_features] -> [*, out_features], of the dtype that quire.Linear would give."""
        if options:
            unavailable.refuse("quire.LayerNormLinear.forward", options, _FORWARD_OPTIONS)
        current, keep = Pass(self, x), self.return_layernorm_output
        made = normalised(self, x, current.dtype, current.input("", self.weight, keep))
        y, amaxes = current.run("", made, self.weight, None if self.return_bias else self.bias)
        current.collect("", amaxes)
        extra = ((self.bias,) if self.return_bias else ()) + ((made[0],) if keep else ())
        return (y, *extra) if extra else y

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, bias={self.bias is not None}, {self.normalization}"
