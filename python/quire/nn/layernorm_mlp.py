"""A norm, a Linear, an activation function and a Linear, whose inputs are quantized as they are computed."""

from collections.abc import Callable, Mapping

import torch
from torch.utils.checkpoint import checkpoint as recompute

from quire.functional import activation
from quire.nn import options as unavailable
from quire.nn.layernorm_linear import norm_parameters, normalised
from quire.nn.norm import reset_norm
from quire.nn.product import Pass, ProductModule, initialise

_GATED = ("geglu", "glu", "qgeglu", "reglu", "sreglu", "swiglu", "clamped_swiglu")
_ACTIVATIONS = ("gelu", "qgelu", "relu", "srelu", "silu", *_GATED)
_IGNORED = {"seq_length": None, "micro_batch_size": None}  # sizes to warm up kernels for, which nothing here needs
_OPTIONS = unavailable.PARALLEL | {
    "fuse_wgrad_accumulation": False,
    "delay_wgrad_compute": False,
    "return_layernorm_output_gathered": False,
    "set_parallel_mode": False,
}


def _activation_text(name: str, parameters: Mapping[str, float] | None) -> str:
    """The operator's text of an activation with its parameters."""
    if name not in _ACTIVATIONS:
        raise NotImplementedError(
            f"quire.LayerNormMLP: activation={name!r} is not available; use one of {', '.join(_ACTIVATIONS)}"
        )
    known = ("limit", "alpha", "glu_linear_offset") if name == "clamped_swiglu" else ()
    if wrong := [key for key in parameters or {} if key not in known]:
        raise ValueError(
            f"quire.LayerNormMLP: activation_params has {wrong[0]!r}, but {name} takes {', '.join(known) or 'none'}"
        )
    return ":".join([name, *(f"{key}={float(value)!r}" for key, value in (parameters or {}).items())])


class LayerNormMLP(ProductModule):
    """fc2(activation(fc1(norm(x)))): quire.LayerNorm (or RMSNorm), quire.Linear, activation, quire.Linear, bit for bit.

    Parameters: layer_norm_weight and layer_norm_bias [hidden_size] (RMSNorm has no bias), fc1_weight [F,
    hidden_size], fc1_bias [F], fc2_weight [hidden_size, ffn_hidden_size], fc2_bias [hidden_size], with F
    ffn_hidden_size, or twice that for a gated activation, whose first half goes through the activation function. All in
    params_dtype (None: torch's default); bias=False: no fc1_bias and fc2_bias.

    activation: "gelu" (its tanh form), "geglu", "glu", "qgelu", "qgeglu", "relu", "reglu", "srelu", "sreglu", "silu",
        "swiglu" or "clamped_swiglu" (numerics.md 11.3). activation_params: limit, alpha and glu_linear_offset of
        "clamped_swiglu".
    init_method, output_layer_init_method: of fc1_weight and fc2_weight, as for quire.LayerNormLinear.
    return_bias: fc2_bias is returned and not added. return_layernorm_output: the norm's result is returned too.
    checkpoint: nothing but x is kept for backward, which computes the module again, under the recipe and the scales of
        the first time.
    seq_length, micro_batch_size: accepted, and without a meaning here.
    Within quire.quantized_model_init fc1_weight and fc2_weight are quantized.

    Further keywords are TransformerEngine's; one that is not available raises NotImplementedError unless it has its
    default. Randomness and delayed scaling: as for quire.Linear, for each of the two products.
    """

    products = ("fc1", "fc2")

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
        name: str | None = None,
        checkpoint: bool = False,
        **options: object,
    ) -> None:
        unavailable.refuse(
            "quire.LayerNormMLP", {key: value for key, value in options.items() if key not in _IGNORED}, _OPTIONS
        )
        super().__init__()
        self.activation, self.eps, self.name, self.checkpoint = activation, eps, name, checkpoint
        self._activation = _activation_text(activation, activation_params)
        self.normalization, self.zero_centered_gamma = normalization, zero_centered_gamma
        self.init_method, self.output_layer_init_method = init_method, output_layer_init_method
        self.return_bias, self.return_layernorm_output = return_bias, return_layernorm_output
        factory = {"device": device, "dtype": params_dtype}
        norm_parameters(self, hidden_size, factory)
        inner = ffn_hidden_size * (2 if activation in _GATED else 1)
        for product, n, k in (("fc1", inner, hidden_size), ("fc2", hidden_size, ffn_hidden_size)):
            self.register_parameter(f"{product}_weight", torch.nn.Parameter(torch.empty(n, k, **factory)))
            self.register_parameter(f"{product}_bias", torch.nn.Parameter(torch.empty(n, **factory)) if bias else None)
        self._add_states(self.fc1_weight.device)
        self.reset_parameters()
        self._quantize_weights()

    def reset_parameters(self, defer_init: bool = False) -> None:
        """New parameters, and new seeds with their counters at 0. With defer_init, nothing."""
        if defer_init:
            return
        reset_norm(self.layer_norm_weight, self.layer_norm_bias, self.zero_centered_gamma)
        initialise(self.fc1_weight, self.fc1_bias, self.init_method)
        initialise(self.fc2_weight, self.fc2_bias, self.output_layer_init_method)
        self._reset_sr_states()

    def forward(
        self, x: torch.Tensor, is_first_microbatch: bool | None = None
    ) -> torch.Tensor | tuple[torch.Tensor | None, ...]:
        """x [*, hidden_size] -> the same shape, of the dtype that quire.Linear would give."""
        unavailable.refuse(
            "quire.LayerNormMLP.forward", {"is_first_microbatch": is_first_microbatch}, {"is_first_microbatch": None}
        )
        current = Pass(self, x)
        if self.checkpoint and torch.is_grad_enabled():
            y, normed, first, second = recompute(
                lambda x: self._compute(current, x), x, use_reentrant=False, preserve_rng_state=False
            )
        else:
            y, normed, first, second = self._compute(current, x)
        current.collect("fc1", first)
        current.collect("fc2", second)
        extra = ((self.fc2_bias,) if self.return_bias else ()) + ((normed,) if self.return_layernorm_output else ())
        return (y, *extra) if extra else y

    def _compute(self, current: Pass, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, list, list]:
        """y, the norm's result, and the amaxes that the products measured."""
        keep = self.return_layernorm_output
        normed = normalised(self, x, current.dtype, current.input("fc1", self.fc1_weight, keep))
        h, first = current.run("fc1", normed, self.fc1_weight, self.fc1_bias)
        activated = activation(h, self._activation, h.dtype, **current.input("fc2", self.fc2_weight))
        y, second = current.run("fc2", activated, self.fc2_weight, None if self.return_bias else self.fc2_bias)
        return y, normed[0], first, second

    def extra_repr(self) -> str:
        hidden, ffn = self.fc2_weight.shape
        return f"{hidden}, {ffn}, bias={self.fc1_bias is not None}, {self.normalization}, {self._activation}"
