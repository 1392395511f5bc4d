"""A Linear whose products run in the precision of the active recipe."""

from collections.abc import Callable

import torch

from quire import delayed
from quire.autocast import active_recipe, active_rule
from quire.functional import linear, linear_given
from quire.nn.weight import initial_weight, weight_operand
from quire.recipe import Recipe
from quire.tensor import QuantizedTensor

# TransformerEngine's options that are not available in this version, with the value that asks for nothing.
_CONSTRUCTOR_OPTIONS = {
    "sequence_parallel": False,
    "fuse_wgrad_accumulation": False,
    "tp_group": None,
    "tp_size": 1,
    "get_rng_state_tracker": None,
    "rng_tracker_name": None,
    "init_method": None,
    "return_bias": False,
    "parallel_mode": None,
    "parameters_split": None,
    "ub_overlap_ag": False,
    "ub_overlap_rs": False,
    "ub_overlap_rs_dgrad": False,
    "ub_bulk_dgrad": False,
    "ub_bulk_wgrad": False,
    "ub_name": None,
    "delay_wgrad_compute": False,
    "symmetric_ar_type": None,
    "save_original_input": False,
    "name": None,
}
_FORWARD_OPTIONS = {"is_first_microbatch": None, "fp8_output": False, "fp8_grad": False}


def _refuse_options(what: str, options: dict[str, object], known: dict[str, object]) -> None:
    for name, value in options.items():
        if name not in known:
            raise TypeError(f"{what} got an unexpected keyword argument {name!r}")
        if value != known[name]:
            raise NotImplementedError(
                f"{what}: {name}={value!r} is not available in this version; leave it at {known[name]!r}"
            )


# A torch.nn.Linear, because it is one in all but its products: the same parameters, initialisation and state_dict, so
# that checkpoints go both ways and code that looks for nn.Linear (parallel styles, initialisation) finds it.
class Linear(torch.nn.Linear):
    """y = x w^T + bias, quantized as the active recipe says (quire.autocast), else exactly torch.nn.Linear.

    weight [out_features, in_features] and bias [out_features] or None, in params_dtype (or `dtype`; None: torch's
    default). They are initialised as torch.nn.Linear's would be after the same torch.manual_seed, and are all of its
    state_dict.

    Rounding gradients stochastically uses `sr_state`, a non-persistent int64 [2] buffer {seed, counter}: each backward
    adds 1 to the counter (numerics.md 0.11). The seed is taken from torch's generator without advancing it, in
    reset_parameters() and when the module leaves the meta device. quire.rng_state saves it. Modules that leave the meta
    device together and are not reset have one seed: give them others with quire.set_rng_state.

    Further keywords are TransformerEngine's; one that is not available raises NotImplementedError unless it has its
    default.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        params_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        *,
        dtype: torch.dtype | None = None,
        **options: object,
    ) -> None:
        _refuse_options("quire.Linear", options, _CONSTRUCTOR_OPTIONS)
        if None not in (dtype, params_dtype) and dtype != params_dtype:
            raise ValueError(
                f"quire.Linear: dtype and params_dtype are the same option, got {dtype} and {params_dtype}; pass one"
            )
        super().__init__(in_features, out_features, bias, device, params_dtype if dtype is None else dtype)
        self.weight = initial_weight(self.weight)
        self.delayed = delayed.DelayedState(self.weight.device)

    def reset_parameters(self) -> None:
        """New weights, as torch.nn.Linear, and a new seed with the counter at 0."""
        super().reset_parameters()
        if "sr_state" not in self._buffers:  # torch.nn.Linear's constructor ends with this call
            state = torch.empty(2, dtype=torch.int64, device=self.weight.device)
            self.register_buffer("sr_state", state, persistent=False)
        self._reset_sr_state()

    def _reset_sr_state(self) -> None:
        fork = torch.default_generator.clone_state()
        seed = torch.randint(2**63 - 1, (1,), generator=fork, device="cpu")
        with torch.no_grad():
            self.sr_state[:1].copy_(seed)
            self.sr_state[1:].zero_()

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> "Linear":
        was_meta = self.sr_state.is_meta
        super()._apply(fn, recurse)
        if was_meta and not self.sr_state.is_meta:  # to_empty() left it uninitialised
            self._reset_sr_state()
        self.delayed.to(self.weight.device)
        return self

    def forward(self, x: torch.Tensor, **options: object) -> torch.Tensor:
        """x [*, in_features] -> [*, out_features].

        The result has torch.autocast's dtype where that is enabled, and x, weight and bias may then have any of
        float32, float16 and bfloat16: each is quantized from its own dtype. Elsewhere it has x's dtype, which weight
        and bias must have too, or TypeError (numerics.md 6.2, 6.7). RuntimeError if shapes or devices do not fit.
        """
        if options:
            _refuse_options("quire.Linear.forward", options, _FORWARD_OPTIONS)
        recipe, rule = active_recipe(), active_rule()
        if recipe is None:
            if rule is not None:
                plain = None if isinstance(self.weight, QuantizedTensor) else self.weight
                delayed.calibrate(self.delayed, rule, x, plain)
            return torch.nn.functional.linear(x, self.weight, self.bias)
        device = x.device.type
        if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
        else:
            dtype = x.dtype
            self._check_dtypes(dtype)
        if recipe.delayed():
            return self._forward_delayed(x, recipe, dtype, rule)
        # A graph has no input that it does not need.
        sr_state = self.sr_state if recipe.stochastic and torch.is_grad_enabled() else None
        w, w_buffers = weight_operand(self.weight, (x, self.bias), recipe)
        if not w_buffers:
            return linear(x, w, self.bias, recipe.linear_spec(), dtype, sr_state=sr_state)
        return linear_given(x, w, self.bias, recipe.linear_spec(), dtype, w_buffers=w_buffers, sr_state=sr_state)

    def _forward_delayed(
        self, x: torch.Tensor, recipe: Recipe, dtype: torch.dtype, rule: torch.Tensor | None
    ) -> torch.Tensor:
        state, grad = self.delayed, torch.is_grad_enabled()
        scale, bwd_scale = delayed.scales(state)
        x_buffers = delayed.quantize(x, scale, 0, grad and self.weight.requires_grad)
        w, w_buffers = weight_operand(self.weight, (x, self.bias), recipe)
        w_amax = None  # of a weight that stays quantized, under a scale of its own
        if not w_buffers:
            w_buffers = delayed.quantize(w, scale, 1, grad and x.requires_grad)
            w_amax = w_buffers[2]
        given = {"x_buffers": x_buffers, "w_buffers": w_buffers, "bwd_scale": bwd_scale, "bwd_amax": state.bwd_amax}
        y = linear_given(x, w, self.bias, recipe.linear_spec(), dtype, **given)
        delayed.collect(state, rule, x_buffers[2], w_amax)  # now that the arguments are known to fit
        return y

    def _check_dtypes(self, dtype: torch.dtype) -> None:
        for name, parameter in (("weight", self.weight), ("bias", self.bias)):
            if parameter is not None and parameter.dtype != dtype:
                raise TypeError(
                    f"quire.Linear: outside torch.autocast {name} must have the dtype of x; got x {dtype} and {name} "
                    f"{parameter.dtype}. Convert one with .to(), or enter torch.autocast"
                )
