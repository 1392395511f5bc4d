"""The products y = x w^T of modules that make x themselves: what each one remembers, and how it runs."""

import math
from collections.abc import Callable

import torch

from quire import delayed
from quire.autocast import active_recipe, active_rule
from quire.delayed import DelayedState
from quire.functional import linear_given, operand_buffers
from quire.nn.dtype import activation_dtype, check_dtypes
from quire.nn.options import Unparallel
from quire.nn.weight import initial_weight, weight_operand
from quire.seed import reset_streams


class ProductModule(Unparallel, torch.nn.Module):
    """A module with products, named in `products`: "" for the one of `weight`, else "fc1" for that of `fc1_weight`.

    Each has a tensor `sr_state` (`fc1_sr_state`), int64 [2] {seed, counter}, for gradients that round
    stochastically, as quire.Linear, and `delayed` (`fc1_delayed`), its state of delayed scaling.
    """

    products: tuple[str, ...] = ("",)

    @property
    def weight_names(self) -> tuple[str, ...]:
        return tuple(self._named(product, "weight") for product in self.products)

    @property
    def bias_names(self) -> tuple[str, ...]:
        return tuple(self._named(product, "bias") for product in self.products)

    def _named(self, product: str, what: str) -> str:
        return f"{product}_{what}" if product else what

    def _add_states(self, device: torch.device) -> None:
        """To be called when the parameters are there."""
        for product in self.products:
            state = torch.empty(2, dtype=torch.int64, device=device)
            setattr(self, self._named(product, "sr_state"), state)
            setattr(self, self._named(product, "delayed"), DelayedState(device))

    def _quantize_weights(self) -> None:
        """To be called when the parameters have values: within quantized_model_init, weights become quantized ones."""
        for product in self.products:
            name = self._named(product, "weight")
            setattr(self, name, initial_weight(getattr(self, name)))

    def sr_states(self) -> dict[str, torch.Tensor]:
        """Product -> its {seed, counter}."""
        return {product: getattr(self, self._named(product, "sr_state")) for product in self.products}

    def _reset_sr_states(self) -> None:
        reset_streams(list(self.sr_states().values()))

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> "ProductModule":
        was_meta = any(state.is_meta for state in self.sr_states().values())
        super()._apply(fn, recurse)
        for product, state in self.sr_states().items():
            setattr(self, self._named(product, "sr_state"), fn(state))
        if was_meta and not any(state.is_meta for state in self.sr_states().values()):
            self._reset_sr_states()  # to_empty() left them uninitialised
        for product, state in self.sr_states().items():
            getattr(self, self._named(product, "delayed")).to(state.device)
        return self


class Pass:
    """One forward pass: the active recipe, and the dtype of activations.

    Everything that has to be the same when the pass is recomputed is found out here; run() changes no state, and
    collect() takes what it measured into the state of delayed scaling.
    """

    def __init__(self, module: ProductModule, x: torch.Tensor) -> None:
        self.active, self.rule = active_recipe(), active_rule()
        recipe = self.active
        self.dtype = activation_dtype(x)
        self.recipe = "" if recipe is None else recipe.linear_spec()
        self.x_spec = "" if recipe is None else recipe.input_spec
        # These start backward from x itself.
        self.keeps_x = self.recipe.endswith(("backward=high_precision", "backward=requantized"))
        delays = recipe is not None and recipe.delayed()
        stochastic = recipe is not None and recipe.stochastic and torch.is_grad_enabled()
        self.sr_states = module.sr_states() if stochastic else {}
        self.states = {product: getattr(module, module._named(product, "delayed")) for product in module.products}
        self.scales = {product: delayed.scales(state) for product, state in self.states.items()} if delays else {}
        if recipe is not None:
            named = module.named_parameters(recurse=False)
            check_dtypes(module, x, [(name, p) for name, p in named if not name.startswith("layer_norm")])

    def input(self, product: str, w: torch.Tensor, keep: bool = False) -> dict[str, object]:
        """Keywords of norm() and activation() with which they make x of a product."""
        if not self.recipe or self.keeps_x:
            return {}
        columnwise = torch.is_grad_enabled() and w.requires_grad
        scale = self.scales[product][0][:1] if self.scales else None
        return {"spec": self.x_spec, "rowwise": True, "columnwise": columnwise, "keep": keep, "scale": scale}

    def run(
        self, product: str, x: tuple[torch.Tensor, list[torch.Tensor]], w: torch.Tensor, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
        """y of x, as norm() or activation() returned it with input(); and the amaxes of x and w, if they are wanted."""
        carrier, buffers = x
        if not self.recipe:
            y = torch.nn.functional.linear(carrier, w, bias)
            return y, [] if self.rule is None else delayed.measure(self.states[product], carrier, w)
        given: dict[str, object] = {"x_buffers": () if self.keeps_x else buffers}
        # A plain weight is quantized here: a program of AOTInductor cannot pass an empty list.
        w, w_buffers = weight_operand(w, (carrier, bias), self.active)
        stays_quantized, columnwise = bool(w_buffers), torch.is_grad_enabled() and carrier.requires_grad
        if self.scales:
            scale, given["bwd_scale"] = self.scales[product]
            given["bwd_amax"] = self.states[product].bwd_amax
            w_buffers = w_buffers or delayed.quantize(w, scale, 1, columnwise)
        else:
            w_buffers = w_buffers or operand_buffers(w, self.active.weight_spec, columnwise)
        given |= {"w_buffers": w_buffers, "sr_state": self.sr_states.get(product)}
        y = linear_given(carrier, w, bias, self.recipe, self.dtype, **given)
        if not self.scales:
            return y, []
        return y, [given["x_buffers"][2], None if stays_quantized else w_buffers[2]]  # its scale is its own

    def collect(self, product: str, amaxes: list[torch.Tensor | None]) -> None:
        if amaxes:
            delayed.collect(self.states[product], self.rule, *amaxes)


def initialise(
    weight: torch.Tensor, bias: torch.Tensor | None, init_method: Callable[[torch.Tensor], object] | None
) -> None:
    """As torch.nn.Linear; with an init_method, that for weight and 0 for bias."""
    if init_method is not None:
        with torch.no_grad():
            init_method(weight)
        if bias is not None:
            torch.nn.init.zeros_(bias)
        return
    torch.nn.init.kaiming_uniform_(weight, a=math.sqrt(5))
    if bias is not None:
        bound = 1 / math.sqrt(weight.shape[1]) if weight.shape[1] > 0 else 0
        torch.nn.init.uniform_(bias, -bound, bound)
