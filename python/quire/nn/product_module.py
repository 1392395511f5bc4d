"""Modules with products y = x w^T: what they remember of each, whatever makes its x."""

import math
import secrets
from collections.abc import Callable, Mapping

import torch

from quire import delayed, functional
from quire.checks import check_type, check_type_or_none, describe
from quire.ends import at_the_end
from quire.nn.random_state import reset_streams
from quire.nn.weight import initial_weight, kept_attributes
from quire.recipe import Recipe
from quire.tensor import DTYPES


def named(product: str, what: str) -> str:
    """The attribute of a module that holds `what` of a product: "weight", or "fc1_weight" for the product "fc1"."""
    return f"{product}_{what}" if product else what


class ProductModule(torch.nn.Module):
    """A module with products, named in `products`: "" for the one of `weight`, else "fc1" for that of `fc1_weight`.

    Beside weight and bias it has of each, as attributes that are named likewise and are in no state_dict
    sr_state: int64 [2] {seed, counter}, for gradients that round stochastically (numerics.md 0.11).
    delayed: its DelayedState.
    microbatch_weight, kept_weight: CachedWeight or None (quire/nn/cache.py).
    wgrad_stash: int64 [2] {number, count} for weight gradients that wait for backward_dw(), or None. Always on the CPU:
        the process keeps their operands, and finds them by the number.
    None of them is a buffer: DistributedDataParallel would give all ranks those of the first one. The others are on the
    device of the parameters, by whichever way those got there (place_states).
    """

    products: tuple[str, ...] = ("",)
    #: Names of the weights and of their biases.
    weight_names: tuple[str, ...] = ("weight",)
    bias_names: tuple[str, ...] = ("bias",)
    #: Groups of tokens that a product has a weight for, each.
    groups = 1
    #: What the module runs under outside of any autocast.
    recipe: Recipe | None = None
    fuse_wgrad_accumulation = delay_wgrad_compute = save_original_input = False

    @property
    def external_wgrad(self) -> bool:
        """Whether autograd is not what gets the gradients of the weights."""
        return self.delay_wgrad_compute or self.fuse_wgrad_accumulation

    def of(self, product: str, what: str) -> object:
        """The attribute that holds `what` of a product."""
        return getattr(self, named(product, what))

    def weights(self, product: str) -> dict[str, torch.Tensor]:
        """Name -> weight of a product: one, or that of each group."""
        name = named(product, "weight")
        return {name: getattr(self, name)}

    def group_weights(self, product: str) -> list[torch.Tensor]:
        """The weight of each group of a product: [out_features, in_features]."""
        weights = list(self.weights(product).values())
        return weights if weights[0].dim() == 2 else list(weights[0].unbind())

    def biases(self, product: str) -> list[torch.Tensor]:
        """The bias of a product: one, or that of each group, or one for all of them, or none."""
        bias = getattr(self, named(product, "bias"))
        return [] if bias is None else [bias]

    def _device(self) -> torch.device:
        """That of the parameters. Of parametrized ones modules within have them."""
        for parameter in self._parameters.values():
            if parameter is not None:
                return parameter.device
        return next(self.parameters()).device

    def sr_states(self) -> dict[str, torch.Tensor]:
        """Product -> its {seed, counter}."""
        self.place_states()
        return {product: self.of(product, "sr_state") for product in self.products}

    # ------------------------------------------------------------ what constructors call

    def _set_flags(self, **flags: bool) -> None:
        """Options that say yes or no, as attributes of their names. TypeError for another kind of value."""
        check_type(f"quire.{type(self).__name__}", bool, **flags)
        for name, value in flags.items():
            setattr(self, name, value)

    def _add_states(self) -> None:
        """When the parameters are there; seeds are then still to be reset."""
        device = self._device()
        for product in self.products:
            setattr(self, named(product, "sr_state"), torch.empty(2, dtype=torch.int64, device=device))
            setattr(self, named(product, "delayed"), delayed.DelayedState(device, self.groups))
        self._forget_weights()
        self._number_stashes()

    def _quantize_weights(self) -> None:
        """When the parameters have values: within quantized_model_init, weights become quantized ones."""
        for product in self.products:
            for name, weight in self.weights(product).items():
                setattr(self, name, initial_weight(weight))

    def _reset_sr_states(self) -> None:
        reset_streams(list(self.sr_states().values()))

    def _forget_weights(self) -> None:
        for product in self.products:
            setattr(self, named(product, "microbatch_weight"), None)
            setattr(self, named(product, "kept_weight"), None)

    # A copy of a module must not share the operands that the original keeps for backward_dw().
    def _number_stashes(self) -> None:
        for product in self.products:
            stash = None
            if self.delay_wgrad_compute:
                number = secrets.randbits(62)
                stash = torch.tensor([number, 0], device="cpu")
                at_the_end(self, functional.drop_stashed_wgrads, number)
            setattr(self, named(product, "wgrad_stash"), stash)

    # ------------------------------------------------------------ moves and copies

    def __setstate__(self, state: dict[str, object]) -> None:
        super().__setstate__(state)
        self._number_stashes()

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> "ProductModule":
        with kept_attributes(self._parameters):
            super()._apply(fn, recurse)
        self._move_states(self._device())
        self._forget_weights()
        return self

    # load_state_dict(assign=True) comes here, and whoever sets an attribute; constructors do before there are states.
    def register_parameter(self, name: str, param: torch.nn.Parameter | None) -> None:
        super().register_parameter(name, param)
        if named(self.products[-1], "wgrad_stash") in vars(self):
            self.place_states()

    def place_states(self) -> None:
        """Moves states to the device of the parameters, if those got there past this module, as by accelerate, which
        writes into _parameters. Parameters on the meta device leave the states where they are: only Module.to("meta")
        gives up values. Raises RuntimeError within a compiled function, where no state can be made."""
        device, state = self._device(), self.of(self.products[0], "sr_state")
        if state.device == device or device.type == "meta":
            return
        if torch.compiler.is_compiling():
            raise RuntimeError(
                f"quire.{type(self).__name__}: its parameters are on {device} and its random state is on "
                f"{state.device}, and a compiled function cannot move it; call .to({str(device)!r}) on the model first"
            )
        self._move_states(device)

    def _move_states(self, device: torch.device) -> None:
        """What leaves the meta device is new."""
        leave_meta = self.of(self.products[0], "sr_state").is_meta and device.type != "meta"
        for product in self.products:
            name = named(product, "sr_state")
            state = getattr(self, name)
            setattr(self, name, torch.zeros_like(state, device=device) if leave_meta else state.to(device))
            self.of(product, "delayed").to(device)
        if leave_meta:
            self._reset_sr_states()

    # ------------------------------------------------------------ weight gradients

    def need_backward_dw(self) -> bool:
        """Whether the module was made with delay_wgrad_compute."""
        return self.delay_wgrad_compute

    def backward_dw(self) -> None:
        """Computes the gradients of the weights of the oldest backward pass that kept their operands, and adds them to
        weight.main_grad (fuse_wgrad_accumulation) or weight.grad. Weights that require no gradient are left alone, and
        so are all without delay_wgrad_compute. Not within a compiled function. Raises RuntimeError if no backward pass
        kept any."""
        for product in reversed(self.products if self.delay_wgrad_compute else ()):
            weights = self.weights(product)
            if any(weight.requires_grad for weight in weights.values()):
                with torch.no_grad():
                    self._add_stashed(weights, self.of(product, "wgrad_stash"))

    def _add_stashed(self, named_weights: dict[str, torch.nn.Parameter], stash: torch.Tensor) -> None:
        fused, weights = self.fuse_wgrad_accumulation, list(named_weights.values())
        new = (torch.empty(w.shape, dtype=w.dtype, device=w.device) for w in weights)
        grads = main_grads(self, named_weights) if fused else list(new)
        overwrite = not fused or any(getattr(w, "overwrite_main_grad", False) for w in weights)
        if not functional.stashed_wgrad(stash, grads, overwrite):
            raise RuntimeError(
                f"quire.{type(self).__name__}.backward_dw: no backward pass has kept operands for it; call it once "
                "after each backward pass of the layer"
            )
        for weight, grad in zip(weights, () if fused else grads, strict=not fused):
            if weight.requires_grad:
                weight.grad = grad if weight.grad is None else weight.grad.add_(grad)


def main_grads(module: ProductModule, weights: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """What gradients of the weights are added to: for one that requires no gradient, memory that nobody reads. Raises
    RuntimeError where another has none, or one that does not fit."""
    grads = []
    for name, weight in weights.items():
        if not weight.requires_grad:
            grads.append(torch.empty(weight.shape, dtype=weight.dtype, device=weight.device))
            continue
        grad = getattr(weight, "main_grad", None)
        is_tensor = isinstance(grad, torch.Tensor)
        fits = is_tensor and grad.shape == weight.shape and grad.dtype in DTYPES and grad.device == weight.device
        if not fits or grad.layout != torch.strided or not grad.is_contiguous():
            got = f"{grad.dtype} {list(grad.shape)}, {grad.layout}, on {grad.device}" if is_tensor else describe(grad)
            raise RuntimeError(
                f"quire.{type(module).__name__}: fuse_wgrad_accumulation=True needs {name}.main_grad, a contiguous "
                f"float32, float16 or bfloat16 tensor of {name}'s shape {list(weight.shape)} on {weight.device} to add "
                f"the gradient to; got {got}. Assign one, or make the layer without fuse_wgrad_accumulation"
            )
        grads.append(grad)
    return grads


def initialise(
    weight: torch.Tensor, bias: torch.Tensor | None, init_method: Callable[[torch.Tensor], object] | None
) -> None:
    """As torch.nn.Linear; with an init_method, that for weight and 0 for bias."""
    check_type_or_none("quire", Callable, init_method=init_method)
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
