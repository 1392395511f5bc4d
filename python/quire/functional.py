"""The operators as plain functions of tensors and texts."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.compiler import is_dynamo_compiling

from quire.checks import check_type, check_type_or_none, describe, signed64
from quire.loading import library
from quire.runners import RunnerHandle, named
from quire.tensor import (
    BUFFER_NAMES,
    QuantizedActivation,
    QuantizedTensor,
    QuantSpec,
    from_results,
    named_buffers,
)

#: The buffers of a quantized operand, in the order of quire.tensor.BUFFER_NAMES and None where absent, or () for none.
Buffers = Sequence[torch.Tensor | None]

#: Operators as functions that give None where anybody but the kernel has a say in the call (src/quire_python); not for
#: Dynamo, which knows operators only.
DIRECT = library.direct()


def linear(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    recipe: str,
    dtype: torch.dtype,
    *,
    sr_state: torch.Tensor | None = None,
) -> torch.Tensor:
    """y = x w^T + bias with the operands of its three products quantized as `recipe` says (numerics.md 6.1).

    x [*, K], w [N, K], bias [N]: each float32, float16 or bfloat16 -> y [*, N] in `dtype`. Differentiable once.
    recipe: "x=SPEC,w=SPEC,dy=SPEC[,dx=SPEC][,backward=requantized|dequantized|high_precision]" (numerics.md 6.8, 6.9).
    sr_state: int64 [2] {seed, counter}, needed for gradients if dy rounds stochastically; backward adds 1 to the
        counter (numerics.md 0.11).

    Raises RuntimeError if anything does not fit.
    """
    if not is_dynamo_compiling() and DIRECT is not None:
        y = DIRECT.linear(x, w, bias, recipe, dtype, sr_state)
        if y is not None:
            return y
    return torch.ops.quire.linear(x, w, bias, recipe, dtype, sr_state)


def linear_prequantized(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    recipe: str,
    dtype: torch.dtype,
    *,
    x_buffers: Buffers = (),
    w_buffers: Buffers = (),
    sr_state: torch.Tensor | None = None,
    w_fingerprint: torch.Tensor | None = None,
) -> torch.Tensor:
    """linear() of operands that are given quantized.

    x_buffers, w_buffers: the six buffers of the operand under its spec, or () to quantize it here. Its tensor is then
        not read: it tells shape and dtype and receives the gradient. Columnwise buffers are needed for the other
        operand's gradient.

    sr_state: as for linear().
    w_fingerprint: fingerprint(w) when w_buffers were made; a call after w has changed raises.

    Raises RuntimeError if anything does not fit.
    """
    if not is_dynamo_compiling() and DIRECT is not None:
        y = DIRECT.linear_prequantized(
            x, w, bias, recipe, dtype, x_buffers, w_buffers, sr_state, w_fingerprint=w_fingerprint
        )
        if y is not None:
            return y
    return torch.ops.quire.linear_prequantized(
        x, w, bias, recipe, dtype, x_buffers, w_buffers, sr_state, w_fingerprint=w_fingerprint
    )


def grouped_linear(
    x: torch.Tensor,
    w: Sequence[torch.Tensor],
    bias: Sequence[torch.Tensor],
    offsets: torch.Tensor | None,
    recipe: str,
    *,
    dtype: torch.dtype,
    **state: Buffers | torch.Tensor | bool | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """linear() of each group of rows of x with a w and a bias of its own: (y, x_amax, w_amax). Differentiable once.

    x [*, K] -> y [*, N] in `dtype`. w: E matrices [N, K], or one [E, N, K] in a list. bias: E vectors [N], one [E, N],
        or none.
    offsets: int32 or int64 [E], the row at which each group ends; it begins where the one before ends. A group may be
        empty: its weight's gradient is then zero. Rows beyond the last group give zero and get a zero gradient. None:
        one group has all rows.
    recipe: as for linear(), or "" for products of x and w as they are.

    Each group's result has the bits of linear() of its rows alone: blocks, amaxes and transforms do not cross groups
    (numerics.md 0.19). state, by keyword, each absent or
    x_buffers: the six buffers of x that activation() gives with these offsets (norm() too, without offsets).
    w_buffers: six buffers of each w. An operand that is given so is not read (linear_prequantized).
    w_fingerprint: int64 [E], fingerprint() of each w when these were made; a call after one has changed raises.
    sr_state: as for linear(); group e uses seed + e.
    main_grad, a list as w, overwrite_main_grad: backward adds the gradient of w to it (or writes it there), and w gets
        none.
    wgrad_stash: int64 [2] {number, count} on the CPU; backward keeps the operands of w's gradient for stashed_wgrad(),
        with overwrite_main_grad, and w gets none.
    placeholder: where w gets no gradient by one of these, it gets zeros, for hooks that wait for one.
    fwd_scale, bwd_scale, bwd_amax: delayed scaling (numerics.md 1.5), float32 [3 E], [2 E], [2 E]: backward multiplies
        with the scales as they are now and puts its amaxes into bwd_amax. x_amax and w_amax are then the amaxes [E] of
        this call; without fwd_scale they say nothing.
    out, dgrad_out: memory that y and dx are copied to (GroupedLinear.forward).

    Raises RuntimeError if anything does not fit.
    """
    lists = [state.pop(name, ()) for name in ("x_buffers", "w_buffers", "main_grad")]
    return torch.ops.quire.grouped_linear(x, w, bias, offsets, recipe, dtype, *lists, **state)


def norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    normalization: str,
    dtype: torch.dtype,
    *,
    eps: float = 1e-5,
    zero_centered: bool = False,
    **quantized: str | bool | torch.Tensor | None,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """ "LayerNorm" or "RMSNorm" of the last dimension of x (numerics.md 11.2): (y, buffers). Differentiable once.

    x [*, K], weight [K], bias [K] in weight's dtype or None; float32, float16 or bfloat16 each -> y [*, K] in `dtype`.

    quantized, by keyword, each absent or
    spec, rowwise, columnwise: y is quantized as it is computed, to the bytes that quantize(y, ...) would give. buffers
        are its six, empty where absent, and y is then a tensor of y's shape over one element, which nobody may read and
        which takes the gradient: pass both to linear_prequantized().
    keep_y: y itself all the same.
    scale: as for quantize().

    Raises RuntimeError if anything does not fit.
    """
    y, *buffers = torch.ops.quire.norm(x, weight, bias, normalization, eps, zero_centered, dtype, **quantized)
    return y, buffers


def activation(
    x: torch.Tensor, name: str, dtype: torch.dtype, **quantized: str | bool | torch.Tensor | None
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """An activation function of x (numerics.md 11.3), quantized as norm() is: (y, buffers). Differentiable once.

    x [*, H], or [*, 2H] for a gated activation -> y [*, H] in `dtype`. name: "gelu", "swiglu", ...; RuntimeError lists
    them. offsets, by keyword: rows belong to groups, as in grouped_linear(), which takes the buffers; scale is then
    float32 [E], and rows beyond the last group give zero.
    """
    y, *buffers = torch.ops.quire.activation(x, name, dtype, **quantized)
    return y, buffers


def operand_buffers(w: torch.Tensor, spec: str, columnwise: bool) -> list[torch.Tensor]:
    """The six buffers of w, as linear_prequantized() takes them: rowwise, and columnwise too if asked."""
    return torch.ops.quire.quantize(w.detach(), spec, True, columnwise, 0, 0, None)


def quantize(
    x: torch.Tensor,
    spec: QuantSpec | str,
    rowwise: bool = True,
    columnwise: bool = False,
    seed: int | None = None,
    *,
    offset: int = 0,
    scale: torch.Tensor | None = None,
    amax: tuple[torch.Tensor | None, torch.Tensor | None] | None = None,
) -> QuantizedTensor | QuantizedActivation:
    """Codes, scales and amaxes of x under `spec` (numerics.md 1-5).

    x: float32, float16 or bfloat16, rank >= 1, any sizes and strides.
    rowwise, columnwise: along which dimension blocks run, K or M; both give both from one pass.
    seed, offset: 64-bit numbers, signed or unsigned, of the random stream (numerics.md 0.11); both directions draw from
        it. A spec that rounds stochastically needs a seed.
    scale: float32 [1], multiplies x before the cast instead of a scale from x's own amax; fp8_tensor only
        (numerics.md 1.5).
    amax: rowwise and columnwise amaxes as amax() gives them, instead of x's own: those of a larger tensor that x is a
        part of, or calibrated ones (numerics.md 5.9). One of the two may be None, and is then measured.

    Gives a QuantizedTensor; where x requires a gradient, and grad mode is on, a QuantizedActivation, through which the
    gradient passes as if quantization were the identity. Raises ValueError for a wrong spec, a missing seed or one out
    of range, RuntimeError for a wrong x or scale, TypeError for what is no tensor.
    """
    check_type("quantize", torch.Tensor, x=x)
    check_type_or_none("quantize", torch.Tensor, scale=scale)
    spec = spec if isinstance(spec, QuantSpec) else QuantSpec(spec)
    if spec.stochastic and seed is None:
        raise ValueError(f"quantize: {spec} rounds stochastically and needs a seed; pass seed= an int")
    rowwise_amax, columnwise_amax = (None, None) if amax is None else amax
    check_type_or_none("quantize", torch.Tensor, rowwise_amax=rowwise_amax, columnwise_amax=columnwise_amax)
    arguments = (rowwise, columnwise, signed64(seed or 0, "seed"), signed64(offset, "offset"), scale)
    arguments += (rowwise_amax, columnwise_amax)
    if x.requires_grad and torch.is_grad_enabled():
        carrier, *results = torch.ops.quire.quantize_through(x, spec.text, *arguments)
        named = named_buffers(results, rowwise, columnwise)
        return QuantizedActivation(carrier, tuple([named[name] for name in BUFFER_NAMES]), spec.text)
    results = torch.ops.quire.quantize(x, spec.text, *arguments)
    return from_results(results, spec.text, x.shape, x.dtype, (rowwise, columnwise), scale=scale)


def amax(
    x: torch.Tensor, spec: QuantSpec | str, rowwise: bool = True, columnwise: bool = False
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The amaxes above the blocks that quantize(x, spec) would measure, rowwise and columnwise (numerics.md 1.2, 5.2):
    float32 [1], or one for each of the M rows and K columns (fp8_row, row_scaled); None for a direction not wanted.

    quantize(x, spec, amax=amax(x, spec)) gives the bytes of quantize(x, spec). Between the two, amaxes may be reduced
    over the parts of a tensor that several processes hold: quantized under the largest, each part has the bytes that it
    has in the whole. Raises RuntimeError for specs whose scales follow from blocks alone (mxfp8, mxfp4, fp8_block).
    """
    check_type("amax", torch.Tensor, x=x)
    spec = spec if isinstance(spec, QuantSpec) else QuantSpec(spec)
    found = torch.ops.quire.amax(x.detach(), spec.text, rowwise, columnwise)
    return found[0] if rowwise else None, found[1] if columnwise else None


def fingerprint(x: torch.Tensor) -> torch.Tensor:
    """int64 [1], 64 bits that change when x does; any dtype that quantize() takes."""
    return torch.ops.quire.fingerprint(x)


def _of(operator: Any, runner: object) -> Any:
    """The overload that takes the runner: PyTorch would find it by trying, which costs more than a small product."""
    return operator.by_name if isinstance(runner, str) else operator.default


def nvfp4_linear(x: torch.Tensor, runner: RunnerHandle | int | str, out_features: int) -> torch.Tensor:
    """y [*, out_features] of x [*, K], both bfloat16, by a registered runner. For inference: no gradient.

    runner: what quire.runners.register returned, its number, or the name it was registered under, which is what
        programs that are exported should carry.

    One opaque node in a graph; tracing asks for nothing but shapes, so the runner must exist only when it runs. Raises
    RuntimeError if there is no such runner then, or it computes something else, elsewhere or of other sizes.
    """
    return _of(torch.ops.quire.nvfp4_linear, runner)(x, named(runner), out_features)


def nvfp4_moe(
    hidden_states: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    runner: RunnerHandle | int | str,
    hidden_size: int,
) -> torch.Tensor:
    """y [T, hidden_size] of hidden_states [T, H], both bfloat16, by the experts topk_ids int32 [T, k], whose results
    are weighted by topk_weights float32 [T, k]. An id of -1 stands for no expert. Otherwise as nvfp4_linear()."""
    operator = _of(torch.ops.quire.nvfp4_moe, runner)
    return operator(hidden_states, topk_weights, topk_ids, named(runner), hidden_size)


def nvfp4_moe_routed(
    hidden_states: torch.Tensor,
    router_logits: torch.Tensor,
    routing: str,
    runner: RunnerHandle | int | str,
    hidden_size: int,
    *,
    expert_bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """nvfp4_moe() with the experts and weights that quire.moe.route gives for router_logits [T, E] (docs/moe.md 1).

    routing: "FUNCTION:topk=N[:OPTION]...", such as "softmax:topk=2:renormalize"; RuntimeError lists what there is.
    router_logits: float32, float16 or bfloat16. expert_bias [E]: added to the scores that experts are chosen by.
    """
    operator = _of(torch.ops.quire.nvfp4_moe_routed, runner)
    return operator(hidden_states, router_logits, expert_bias, routing, named(runner), hidden_size)


def stashed_wgrad(stash: torch.Tensor, grads: Sequence[torch.Tensor], overwrite: bool = True) -> bool:
    """Computes the oldest weight gradient whose operands a backward pass kept under `stash` (grouped_linear:
    wgrad_stash) and writes it to grads, or adds it: [N, K], or of a grouped product one for each group or one for all.
    It is added unless `overwrite` says not to, or overwrite_main_grad of its call did. False if none is kept. Not for
    compiled functions."""
    kept, tokens, recipe, kept_overwrite = torch.ops.quire.wgrad_take_(stash)
    overwrite |= kept_overwrite
    # The buffers of dy and x, or these themselves; and of groups offsets behind them.
    operands, offsets = (kept[:-1], kept[-1]) if len(kept) % 2 else (kept, None)
    if len(operands) == 2:
        needs_w, of_w = 2, ([], [])  # which dw does not need
        dy, x = operands
        dw = torch.ops.quire.linear_unquantized_bwd(dy, offsets, x, *of_w, x.shape[-1], "", x.dtype, needs_w)[1]
        _writing("accumulate_", grads)(dw, overwrite)
    elif operands:
        _writing("wgrad_", grads)(*operands, offsets, tokens, recipe, overwrite)
    return bool(kept)


def _writing(operator: str, grads: Sequence[torch.Tensor]) -> Callable:
    """The operator that writes to one tensor, or the one that writes to a list of them."""
    if len(grads) == 1:
        return functools.partial(getattr(torch.ops.quire, operator), grads[0])
    return functools.partial(getattr(torch.ops.quire, f"grouped_{operator}"), grads)


def drop_stashed_wgrads(number: int) -> None:
    """Forgets the operands kept under that number."""
    torch.ops.quire.wgrad_drop(number)


def dequantize(q: QuantizedTensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """q.dequantize(dtype). Raises TypeError for a plain tensor."""
    if not isinstance(q, QuantizedTensor | QuantizedActivation):
        raise TypeError(
            f"dequantize: expected what quire.quantize returns, got {describe(q)}; a plain tensor has no codes"
        )
    return q.dequantize(dtype)
