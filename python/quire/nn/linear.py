"""A Linear whose products run in the precision of the active recipe."""

import secrets
import weakref
from collections.abc import Callable, Mapping, Sequence

import torch

from quire import delayed, functional
from quire.autocast import active_rule, recipe_of
from quire.nn import options as unavailable
from quire.nn.cache import CachedWeight
from quire.nn.call import Call, run
from quire.nn.dtype import activation_dtype, check_dtypes
from quire.nn.product import initialise
from quire.nn.weight import initial_weight
from quire.recipe import Recipe
from quire.seed import reset_streams
from quire.tensor import QuantizedActivation, QuantizedTensor, QuantSpec


def check_own_recipe(what: str, recipe: object) -> None:
    """Raises TypeError unless it is a recipe or None, ValueError for delayed scaling."""
    if recipe is None:
        return
    if not isinstance(recipe, Recipe):
        raise TypeError(
            f"{what}: recipe must be a recipe of quire.recipe or None, got {recipe!r}; "
            "quire.recipe.from_name makes one by name"
        )
    if recipe.delayed():
        raise ValueError(
            f"{what}: a layer's own recipe cannot be {type(recipe).__name__}, whose scales change on entering "
            "quire.autocast. Leave recipe None and run the model within quire.autocast(recipe=...)"
        )


# A torch.nn.Linear, because it is one in all but its products: the same parameters, initialisation and state_dict, so
# that checkpoints go both ways and code that looks for nn.Linear (parallel styles, initialisation) finds it.
class Linear(unavailable.Unparallel, torch.nn.Linear):
    """y = x w^T + bias, quantized as the active recipe says (quire.autocast), else exactly torch.nn.Linear.

    weight [out_features, in_features] and bias [out_features] or None, in params_dtype (or `dtype`; None: torch's
    default). They are initialised as torch.nn.Linear's would be after the same torch.manual_seed, and are all of its
    state_dict. Within quire.quantized_model_init the weight is quantized.

    init_method: called with weight; bias is then 0. return_bias: forward gives (y, bias), y without it.
    fuse_wgrad_accumulation: backward adds the weight's gradient to weight.main_grad (float32, float16 or bfloat16, of
        weight's shape), in its dtype; overwrites it where weight.overwrite_main_grad is true or is_first_microbatch is.
        weight.grad stays None; where weight has an attribute grad_added_to_main_grad, that is set, and the gradient is
        zeros, for hooks that wait for one.
    delay_wgrad_compute: backward keeps what the weight's gradient is computed from; backward_dw() computes the oldest.
    save_original_input: x is kept for backward as it is, and quantized again there.
    recipe: what it runs under outside of any quire.autocast; None is high precision. Not one of delayed scaling.
    name: kept as an attribute.
    parameters_split: the layer has a weight and a bias for each part of the outputs, q_weight, k_weight, ... for
        ("q", "k", "v") or {"q": 64, "k": 16, "v": 16}, in state_dict too; `weight` is their concatenation.

    Rounding gradients stochastically uses `sr_state`, int64 [2] {seed, counter}: each backward adds 1 to the counter
    (numerics.md 0.11). It is no buffer, since DistributedDataParallel would give all ranks that of the first one. The
    seed is taken from torch's generator without advancing it, and from the rank in torch.distributed's default group,
    in reset_parameters() and when the module leaves the meta device. quire.rng_state saves it. Modules that leave the
    meta device together and are not reset have one seed: give them others with quire.set_rng_state. `delayed` is its
    state of delayed scaling.

    Further keywords are TransformerEngine's; one that is not available raises NotImplementedError unless it has its
    default.
    """

    # What adopt() leaves as it is.
    init_method: Callable[[torch.Tensor], object] | None = None
    return_bias: bool = False
    fuse_wgrad_accumulation: bool = False
    delay_wgrad_compute: bool = False
    save_original_input: bool = False
    name: str | None = None
    microbatch_weight: CachedWeight | None = None
    kept_weight: CachedWeight | None = None

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
        recipe: Recipe | None = None,
        name: str | None = None,
        parameters_split: Sequence[str] | Mapping[str, int] | None = None,
        **options: object,
    ) -> None:
        unavailable.refuse("quire.Linear", options, unavailable.PARALLEL)
        if None not in (dtype, params_dtype) and dtype != params_dtype:
            raise ValueError(
                f"quire.Linear: dtype and params_dtype are the same option, got {dtype} and {params_dtype}; pass one"
            )
        super().__init__(in_features, out_features, bias, device, params_dtype if dtype is None else dtype)
        self.init_method, self.return_bias, self.name = init_method, return_bias, name
        self.fuse_wgrad_accumulation, self.delay_wgrad_compute = fuse_wgrad_accumulation, delay_wgrad_compute
        self.save_original_input = save_original_input
        check_own_recipe("quire.Linear", recipe)
        self.recipe = recipe
        if init_method is not None:
            initialise(self.weight, self.bias, init_method)
        self.weight = initial_weight(self.weight)
        self.delayed = delayed.DelayedState(self.weight.device)
        stash = torch.zeros(2, dtype=torch.int64, device=device) if delay_wgrad_compute else None
        self.register_buffer("wgrad_stash", stash, persistent=False)
        self._number_stash()
        if parameters_split is not None:
            from quire.nn.split import split  # of this class

            split(self, parameters_split)

    @classmethod
    def adopt(cls, layer: torch.nn.Linear, recipe: Recipe | None) -> "Linear":
        """Makes a torch.nn.Linear one of these in place: the same object, with its parameters, hooks and flags. Its
        random state is uninitialised (reset_streams)."""
        layer.__class__ = cls
        layer.recipe = recipe
        layer.sr_state = torch.empty(2, dtype=torch.int64, device=layer.weight.device)
        layer.delayed = delayed.DelayedState(layer.weight.device)
        layer.register_buffer("wgrad_stash", None, persistent=False)
        return layer

    def reset_parameters(self, defer_init: bool = False) -> None:
        """New weights, as torch.nn.Linear or by init_method, and a new seed with the counter at 0. With defer_init,
        nothing."""
        if defer_init:
            return
        super().reset_parameters()
        if not hasattr(self, "sr_state"):  # torch.nn.Linear's constructor ends with this call
            self.sr_state = torch.empty(2, dtype=torch.int64, device=self.weight.device)
        elif self.init_method is not None:
            initialise(self.weight, self.bias, self.init_method)
        reset_streams([self.sr_state])

    # A copy of a layer must not share the operands that the original keeps for backward_dw().
    def _number_stash(self) -> None:
        if self.wgrad_stash is not None and not self.wgrad_stash.is_meta:
            number = secrets.randbits(62)
            self.wgrad_stash.copy_(torch.tensor([number, 0]))
            weakref.finalize(self, functional.drop_stashed_wgrads, number)

    def __setstate__(self, state: dict[str, object]) -> None:
        super().__setstate__(state)
        self._number_stash()

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> "Linear":
        was_meta = self.sr_state.is_meta
        super()._apply(fn, recurse)
        self.sr_state = fn(self.sr_state)
        if was_meta and not self.sr_state.is_meta:  # to_empty() left it uninitialised
            reset_streams([self.sr_state])
            self._number_stash()
        self.delayed.to(self.weight.device)
        self.microbatch_weight = self.kept_weight = None
        return self

    def forward(
        self,
        x: torch.Tensor | QuantizedActivation,
        is_first_microbatch: bool | None = None,
        fp8_output: bool = False,
        fp8_grad: bool = False,
        *,
        output_spec: QuantSpec | str | None = None,
    ) -> torch.Tensor | QuantizedActivation | tuple[torch.Tensor | QuantizedActivation, torch.Tensor | None]:
        """x [*, in_features] -> [*, out_features].

        x: a plain tensor, or a QuantizedTensor or QuantizedActivation, which is used as it is, under its own spec.
        is_first_microbatch: True quantizes the weight and keeps the codes, False uses the kept ones (and makes them if
            there are none), None neither. Codes of a weight that has changed since are refused.
        output_spec: the result is quantized so: a QuantizedTensor, or where there will be a backward pass a
            QuantizedActivation, both of which another layer takes. fp8_output=True: under the recipe's spec for x.
        fp8_grad: the gradient of x is rounded to the recipe's format of gradients.

        The result has torch.autocast's dtype where that is enabled, and x, weight and bias may then have any of
        float32, float16 and bfloat16: each is quantized from its own dtype. Elsewhere it has x's dtype, which weight
        and bias must have too, or TypeError (numerics.md 6.2, 6.7). RuntimeError if shapes or devices do not fit.
        """
        recipe, rule = recipe_of(self.recipe), active_rule()
        bias = None if self.return_bias else self.bias
        if recipe is None:
            y = self._high_precision(x, bias, rule)
            if output_spec is not None:
                y = functional.quantize(y, output_spec, columnwise=torch.is_grad_enabled())
        else:
            spec = self._output_spec(recipe, fp8_output, output_spec)
            check_dtypes(self, x, (("weight", self.weight), ("bias", self.bias)))
            call = Call(recipe, rule, activation_dtype(x), is_first_microbatch, spec, fp8_grad)
            y = run(self, x, bias, call)
        return (y, self.bias) if self.return_bias else y

    def _high_precision(
        self, x: torch.Tensor | QuantizedActivation, bias: torch.Tensor | None, rule: torch.Tensor | None
    ) -> torch.Tensor:
        if isinstance(x, QuantizedTensor | QuantizedActivation):
            x = x.dequantize()
        if rule is not None:
            delayed.collect(self.delayed, rule, *delayed.measure(self.delayed, x, self.weight))
        return torch.nn.functional.linear(x, self.weight, bias)

    def extra_repr(self) -> str:
        own = "" if self.recipe is None else f", recipe={type(self.recipe).__name__}"
        return super().extra_repr() + own

    def _output_spec(self, recipe: Recipe, fp8_output: bool, output_spec: QuantSpec | str | None) -> str:
        if output_spec is not None:
            return QuantSpec(output_spec).text
        return recipe.input_spec if fp8_output else ""

    # ------------------------------------------------------------ weight gradients

    def need_backward_dw(self) -> bool:
        """Whether the layer was made with delay_wgrad_compute."""
        return self.delay_wgrad_compute

    def backward_dw(self) -> None:
        """Computes the weight's gradient of the oldest backward pass that kept its operands, and adds it to
        weight.main_grad (fuse_wgrad_accumulation) or weight.grad. Not within a compiled function. Raises RuntimeError
        if no backward pass kept any."""
        if not self.delay_wgrad_compute:
            return
        fused = self.fuse_wgrad_accumulation
        with torch.no_grad():
            grad = self.weight.main_grad if fused else torch.empty(self.weight.shape, dtype=self.weight.dtype)
            overwrite = not fused or getattr(self.weight, "overwrite_main_grad", False)
            if not functional.stashed_wgrad(self.wgrad_stash, grad, overwrite):
                raise RuntimeError(
                    "quire.Linear.backward_dw: no backward pass has kept operands for it; call it once after each "
                    "backward pass of the layer"
                )
            if not fused:
                self.weight.grad = grad if self.weight.grad is None else self.weight.grad.add_(grad)
