"""How a Linear runs its product with all options: which codes it takes from where, and where gradients go."""

from typing import TYPE_CHECKING, NamedTuple

import torch

from quire import delayed
from quire.functional import linear, linear_given, quantize
from quire.nn.cache import cache, cached_weight
from quire.nn.weight import weight_operand
from quire.recipe import Recipe
from quire.tensor import QuantizedActivation, QuantizedTensor, input_operand

if TYPE_CHECKING:
    from quire.nn.linear import Linear


class Call(NamedTuple):
    """How the layer was called.

    recipe: the active one. rule: as delayed.collect() takes it. dtype: of the result. is_first_microbatch, fp8_grad: of
    Linear.forward. output_spec: text of a spec for the result, "" for none.
    """

    recipe: Recipe
    rule: torch.Tensor | None
    dtype: torch.dtype
    is_first_microbatch: bool | None
    output_spec: str
    fp8_grad: bool


def run(
    layer: "Linear", x: torch.Tensor | QuantizedActivation, bias: torch.Tensor | None, call: Call
) -> torch.Tensor | QuantizedActivation:
    """y = x w^T + bias."""
    recipe, grad = call.recipe, torch.is_grad_enabled()
    text = _text(layer, call)
    given: dict[str, object] = {}
    if isinstance(x, QuantizedTensor | QuantizedActivation):
        x, given["x_buffers"], spec = input_operand(x, grad and layer.weight.requires_grad)
        text = f"x={spec},{text.split(',', 1)[1]}"
    scale = x_amax = None
    if recipe.delayed():
        scale, given["bwd_scale"] = delayed.scales(layer.delayed)
        given["bwd_amax"] = layer.delayed.bwd_amax
        if "x_buffers" not in given:
            given["x_buffers"] = delayed.quantize(x, scale, 0, grad and layer.weight.requires_grad)
            x_amax = given["x_buffers"][2]
    w, w_amax = _weight(layer, (x, bias), call, scale, given)
    if grad and layer.weight.requires_grad:
        given |= _weight_gradient(layer, call)
    # A graph has no input that it does not need.
    sr_state = layer.sr_state if recipe.stochastic and grad else None
    if given:
        y = linear_given(x, w, bias, text, call.dtype, sr_state=sr_state, **given)
    else:
        y = linear(x, w, bias, text, call.dtype, sr_state=sr_state)
    if scale is not None:  # now that the arguments are known to fit
        # An x that came quantized has a scale of its own, and leaves its slot as it is.
        delayed.collect(layer.delayed, call.rule, scale.new_zeros(1) if x_amax is None else x_amax, w_amax)
    return y if not call.output_spec else _output(layer, y, call, scale)


def _text(layer: "Linear", call: Call) -> str:
    if layer.save_original_input and call.recipe.delayed():
        raise ValueError(
            "quire.Linear: save_original_input=True does not go with DelayedScaling: x would be quantized again when "
            "its scale has changed. Use Float8CurrentScaling, or leave save_original_input False"
        )
    return call.recipe.linear_spec(call.fp8_grad, layer.save_original_input)


def _weight(
    layer: "Linear",
    others: tuple[torch.Tensor, torch.Tensor | None],
    call: Call,
    scale: torch.Tensor | None,
    given: dict[str, object],
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The tensor to pass as w, whose buffers, if any, go into `given`; its amax if it was quantized under `scale`."""
    weight, recipe = layer.weight, call.recipe
    w, buffers = weight_operand(weight, others, recipe)
    if buffers:  # it stays quantized
        given["w_buffers"] = buffers
        return w, None
    cached = cached_weight(layer, recipe, call.is_first_microbatch)
    if cached is not None:
        given |= {"w_buffers": cached.buffers, "w_fingerprint": cached.fingerprint}
        return weight, None
    if call.is_first_microbatch is not None:
        made = layer.microbatch_weight = cache(weight, recipe, scale)
        given["w_buffers"] = made.buffers
    elif scale is not None:
        given["w_buffers"] = delayed.quantize(weight, scale, 1, torch.is_grad_enabled() and others[0].requires_grad)
    else:
        return weight, None
    return weight, None if scale is None else given["w_buffers"][2]


def _weight_gradient(layer: "Linear", call: Call) -> dict[str, object]:
    """Where it goes, if not to autograd."""
    given: dict[str, object] = {}
    if layer.delay_wgrad_compute:
        given["wgrad_stash"] = layer.wgrad_stash
    elif layer.fuse_wgrad_accumulation:
        weight = layer.weight
        if not hasattr(weight, "main_grad"):
            raise RuntimeError(
                "quire.Linear: fuse_wgrad_accumulation=True needs weight.main_grad, a tensor of weight's shape to add "
                "the gradient to; got none. Assign one, or make the layer without fuse_wgrad_accumulation"
            )
        given["main_grad"] = weight.main_grad
        overwrites = getattr(weight, "overwrite_main_grad", False)
        given["overwrite_main_grad"] = bool(overwrites) or call.is_first_microbatch is True
    if given and hasattr(layer.weight, "grad_added_to_main_grad"):
        layer.weight.grad_added_to_main_grad = True
        given["placeholder"] = True
    return given


def _output(
    layer: "Linear", y: torch.Tensor, call: Call, scale: torch.Tensor | None
) -> torch.Tensor | QuantizedActivation:
    columnwise = torch.is_grad_enabled()
    if scale is None or call.output_spec != call.recipe.input_spec:
        return quantize(y, call.output_spec, columnwise=columnwise)
    q = quantize(y, call.output_spec, columnwise=columnwise, scale=scale[2:3])
    delayed.collect_output(layer.delayed, call.rule, q.buffer_list()[2])
    return q
