"""Runners: objects that compute quire.nvfp4_linear and quire.nvfp4_moe. Operators refer to them by a handle or a name
(docs/runners.md).

    handle = quire.runners.register(quire.runners.LinearRunner(weight), name="layers.0.up")
    y = quire.nvfp4_linear(x, handle, weight.shape[0])

All functions can be called from any thread.
"""

from __future__ import annotations

import itertools
import sys
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch

from quire.autocast import is_batch_invariant_enabled
from quire.checks import check_dense, check_type, check_type_or_none, describe
from quire.loading.devices import HOST
from quire.loading.transforms import at_the_end
from quire.tensor import DTYPES, QuantizedTensor, QuantSpec

#: One weight, or a stack of them: a plain tensor, a QuantizedTensor, or a sequence of either.
Weights = torch.Tensor | Sequence[torch.Tensor]
#: A static scale of activations, or one for each expert.
Scale = float | Sequence[float] | torch.Tensor
#: Seconds after which a handle that ends was meant to live. Python does not know whether the runner was used: calls
#: from graphs and C++ do not tell it.
_SHORT_LIFE = 0.05
_ABSENT = torch.empty(0, dtype=torch.float32, device=HOST)


@dataclass(frozen=True, eq=False)
class LinearRunner:
    """y = x w^T + bias with a weight that is quantized once: the bits of the operator quire.linear under x=X,w=W.

    register() copies the values. It raises TypeError, ValueError or RuntimeError for arguments that do not fit.

    Args:
        weight: [N, K] in float32, float16 or bfloat16, or a QuantizedTensor with rowwise codes.
        bias: [N] or None.
        input_scale: a static scale of x, a number, or a tensor or a list of one (docs/runners.md). x is then not
            measured: larger values saturate, and tokens do not depend on each other. The spec x need not have the
            option `given`.
        x: the spec of activations. None: the family of a QuantizedTensor's spec, such as "mxfp8" for codes of
            "mxfp8:nan:interleaved", and "nvfp4" for a plain weight; a layer's own is layer.recipe.input_spec. Under
            "nvfp4" all tokens of a call share one amax; under "nvfp4:row_scaled" a token's result does not depend on
            the others. (With AMX the order of its sums changes at 32 tokens, except within quire.batch_invariant:
            numerics.md 7.4, 7.8.) With "none" x is not quantized, and PyTorch multiplies it with the decoded weight.
        w: the spec of the weight; None: "nvfp4", or the spec of the QuantizedTensor, from which w must not differ.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None = None
    _: KW_ONLY
    input_scale: Scale | None = None
    x: str | QuantSpec | None = None
    w: str | QuantSpec | None = None

    def _register(self, name: str) -> int:
        check_type("LinearRunner", torch.Tensor, weight=self.weight)
        _check_bias("LinearRunner", bias=self.bias)
        stack = _stack("LinearRunner: weight", [self.weight], self.w, bias=self.bias, input_scale=self.input_scale)
        x = _of_inputs(self.x, stack)
        return torch.ops.quire.runner_register_linear(name, x, *_joined("LinearRunner", stack))


@dataclass(frozen=True, eq=False)
class MoERunner:
    """A mixture of E experts, each of which computes w2 activation(w13 x), with weights that are quantized once.

    Args:
        w13: [E, 2 I, H], as for LinearRunner, in one tensor or in a sequence with one for each expert. It has the rows
            of the gate, then those of the up projection; without a gate it is [E, I, H].
        w2: [E, H, I], as w13.
        w13_bias: [E, 2 I] or [E, I]. None: no bias.
        w2_bias: [E, H]. None: no bias.
        w13_input_scale: as for LinearRunner, for the input of w13; a number, or a tensor [E] or a list of E numbers.
        w2_input_scale: the same for the input of w2.
        shared_w13: [2 Is, H], the first weight of an expert for all tokens, without routing probabilities. Its result
            is added (quire.MoE: shared_ffn_hidden_size=Is).
        shared_w2: [H, Is], the second one.
        shared_w13_bias: the bias of shared_w13, or None.
        shared_w2_bias: the bias of shared_w2, or None.
        shared_w13_input_scale: a static scale of the input of shared_w13, as for LinearRunner.
        shared_w2_input_scale: the same for shared_w2.
        x: as for LinearRunner, for both matmuls. The tokens of each expert are quantized separately.
        w: as for LinearRunner, for both matmuls.
        activation: text such as "swiglu" or "clamped_swiglu:limit=7:alpha=1.702:glu_linear_offset=1" (numerics.md
            11.3).
        weight_on_input: a token's routing probability multiplies its input instead of the expert's result.
    """

    w13: Weights
    w2: Weights
    _: KW_ONLY
    w13_bias: torch.Tensor | None = None
    w2_bias: torch.Tensor | None = None
    w13_input_scale: Scale | None = None
    w2_input_scale: Scale | None = None
    shared_w13: torch.Tensor | None = None
    shared_w2: torch.Tensor | None = None
    shared_w13_bias: torch.Tensor | None = None
    shared_w2_bias: torch.Tensor | None = None
    shared_w13_input_scale: Scale | None = None
    shared_w2_input_scale: Scale | None = None
    x: str | QuantSpec | None = None
    w: str | QuantSpec | None = None
    activation: str = "swiglu"
    weight_on_input: bool = False

    def _register(self, name: str) -> int:
        check_type("MoERunner", str, activation=self.activation)
        check_type("MoERunner", bool, weight_on_input=self.weight_on_input)
        check_type_or_none("MoERunner", torch.Tensor, shared_w13=self.shared_w13, shared_w2=self.shared_w2)
        stacks = [self._part("w13", self.w13), self._part("w2", self.w2)]
        if (self.shared_w13 is None) != (self.shared_w2 is None):
            raise ValueError("MoERunner: a shared expert has shared_w13 and shared_w2; pass both, or neither")
        if self.shared_w13 is not None:
            stacks += [self._part("shared_w13", [self.shared_w13]), self._part("shared_w2", [self.shared_w2])]
        elif unused := [part for part in _SHARED_OPTIONS if getattr(self, part) is not None]:
            raise ValueError(f"MoERunner: {unused[0]} belongs to a shared expert; pass shared_w13 and shared_w2 too")
        return torch.ops.quire.runner_register_moe(
            name,
            _of_inputs(self.x, stacks[0]),
            *_joined("MoERunner", *stacks),
            self.activation,
            self.weight_on_input,
        )

    def _part(self, name: str, weights: Weights) -> _Stack:
        bias, input_scale = getattr(self, f"{name}_bias"), getattr(self, f"{name}_input_scale")
        _check_bias("MoERunner", **{f"{name}_bias": bias})
        return _stack(f"MoERunner: {name}", weights, self.w, bias=bias, input_scale=input_scale)


_SHARED_OPTIONS = ("shared_w13_bias", "shared_w2_bias", "shared_w13_input_scale", "shared_w2_input_scale")


@dataclass(frozen=True, eq=False)
class PythonRunner:
    """A Python function as a runner, for experiments: each call acquires the GIL, costs some microseconds, and copies
    the result.

    Args:
        function: function(x) -> y for bfloat16 x `[*, in_features]` and y `[*, out_features]`. With experts > 0
            function(hidden_states, topk_weights, topk_ids) -> y, as for nvfp4_moe(). It must not write to its
            arguments, and has no gradients. Its exceptions reach the caller. Within quire.batch_invariant it should
            compute each token as if it were alone.
        in_features: the number of features of x.
        out_features: the number of features of y.
        experts: 0: the runner is a linear layer. Otherwise it is a mixture of that many experts.
        device: the device of the tensors; None: torch's default device.

    register() raises TypeError for arguments of a wrong type, and RuntimeError for sizes out of range and for a text
    that names no device.
    """

    function: Callable[..., torch.Tensor]
    in_features: int
    out_features: int
    _: KW_ONLY
    experts: int = 0
    device: str | torch.device | None = None

    def _register(self, name: str) -> int:
        check_type("PythonRunner", Callable, function=self.function)
        sizes = {"in_features": self.in_features, "out_features": self.out_features, "experts": self.experts}
        check_type("PythonRunner", int, **sizes)
        numbers = f"{self.in_features}, {self.out_features} and {self.experts}"
        if min(self.in_features, self.out_features) < 1 or self.experts < 0:
            raise RuntimeError(
                "PythonRunner: in_features, out_features and experts (of a mixture) must be at least 1; got "
                f"{numbers}; experts=0 is a linear layer"
            )
        if max(sizes.values()) >= 2**63:
            raise RuntimeError(f"PythonRunner: sizes must be below 2**63; got {numbers}")
        device = _device(self.device)
        number = next(_numbers)
        _functions[number] = self.function
        described = getattr(self.function, "__qualname__", type(self.function).__name__)
        try:
            return torch.ops.quire.runner_register_python(
                name, number, *sizes.values(), str(device), f"Python {described}"
            )
        except Exception:
            _functions.pop(number, None)
            raise


def _device(given: str | torch.device | None) -> torch.device:
    try:
        return torch.get_default_device() if given is None else torch.device(given)
    except (RuntimeError, TypeError):
        raise RuntimeError(
            f"PythonRunner: device must be a torch.device or its text, such as 'cpu' or 'cuda:0', got {describe(given)}"
        ) from None


class RunnerHandle:
    """A registered runner.

    close(), the end of a `with` block, or the deletion of the last reference to the handle unregisters the runner.
    Calls that are running complete normally. A copy of a handle is the same object. It is valid in its own process and
    in forks of it, and cannot be pickled (TypeError): a spawned process registers its own runner.

    Args:
        handle: its number, which this process never uses again.
        name: "" if it has none.
    """

    def __init__(self, handle: int, name: str) -> None:
        self.handle = handle
        self.name = name
        self._life = _Life(repr(name) if name else str(handle), time.monotonic(), weakref.ref(self))
        self._close = at_the_end(self, _unregister, handle, self._life)

    def close(self) -> None:
        """Unregisters the runner. A second call does nothing."""
        self._close()

    @property
    def closed(self) -> bool:
        return not self._close.alive

    def __enter__(self) -> RunnerHandle:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __int__(self) -> int:
        return self.handle

    def __copy__(self) -> RunnerHandle:
        return self

    def __deepcopy__(self, memo: dict[int, object]) -> RunnerHandle:
        return self

    def __reduce__(self) -> None:
        raise TypeError(
            f"{self!r} belongs to its process and cannot be pickled; save the weights, register a runner of them in "
            "the other process, and pass its handle, or a name that both use"
        )

    def __repr__(self) -> str:
        name = f", name={self.name!r}" if self.name else ""
        return f"RunnerHandle({self.handle}{name}{', closed' if self.closed else ''})"


def register(runner: LinearRunner | MoERunner | PythonRunner, name: str = "") -> RunnerHandle:
    """Quantizes and copies the runner's weights. From then on operators find the runner by the returned handle and by
    its name.

    C++ libraries register their own runners in C++ (docs/runners.md).

    Args:
        runner: what it computes.
        name: the name by which operators can find it. "": it has none.

    Raises:
        TypeError: for an object that is not a runner, and for a runner's argument of another type.
        ValueError: for a spec that does not exist, and for a weight that is no matrix.
        RuntimeError: for sizes that do not agree, for a dtype that is not float32, float16 or bfloat16, and for a name
            that another runner has.
    """
    if not isinstance(runner, LinearRunner | MoERunner | PythonRunner):
        raise TypeError(
            "runners.register: expected a LinearRunner, MoERunner or PythonRunner (which takes a function), got "
            f"{describe(runner)}"
        )
    if not isinstance(name, str):
        raise TypeError(f"runners.register: name must be a str, got {describe(name)}")
    _forget_dropped_functions()
    return RunnerHandle(runner._register(name), name)


def refit(runner: RunnerHandle | int | str, weights: LinearRunner | MoERunner) -> None:
    """Quantizes new weights into the memory of a registered runner. Operators that name it, compiled graphs, exported
    programs and captured CUDA graphs then compute with the new weights.

    Needs memory for one more copy of the runner's codes, until it returns. No call of the runner may run at the same
    time.

    Args:
        runner: its handle, number or name.
        weights: a runner of the same kind, with the same shapes, specs, dtypes of biases and options. Without static
            scales of inputs, which an x with the option `given` needs, the registered runner keeps those that it has.

    Raises:
        TypeError: for another kind of object.
        LookupError: if no runner has the name.
        RuntimeError: if no runner has the number, or for weights of another form, also as a ValueError. The runner then
            keeps its weights.
    """
    if not isinstance(weights, LinearRunner | MoERunner):
        raise TypeError(
            f"runners.refit: weights must be a LinearRunner or a MoERunner, got {describe(weights)}; a Python function "
            "has its weights itself"
        )
    found = named(runner)
    handle = find(found).handle if isinstance(found, str) else found
    with register(weights) as new:
        torch.ops.quire.runner_take(handle, new.handle)


@dataclass(frozen=True)
class RegisteredRunner:
    """One entry of registered().

    Attributes:
        handle: its number.
        name: "" if it has none.
        kind: "linear" or "moe".
        device: the device on which it computes.
        in_features: the number of features of x.
        out_features: the number of features of y.
        experts: their number, 0 for "linear".
        description: what it computes, in words.
    """

    handle: int
    name: str
    kind: str
    device: str
    in_features: int
    out_features: int
    experts: int
    description: str


def registered() -> list[RegisteredRunner]:
    """The runners of this process in the order of their handles, also those that other libraries registered."""
    runners = []
    for line in torch.ops.quire.runner_list().splitlines():
        handle, name, kind, device, *sizes, description = line.split("\t", 7)
        runners.append(RegisteredRunner(int(handle), name, kind, device, *map(int, sizes), description))
    return runners


def find(name: str) -> RegisteredRunner:
    """The runner of that name.

    Args:
        name: the name under which it was registered.

    Raises:
        LookupError: if there is none.
    """
    for runner in registered():
        if name and runner.name == name:
            return runner
    names = ", ".join(repr(runner.name) for runner in registered() if runner.name) or "none"
    raise LookupError(f"runners.find: no runner has the name {name!r}; registered are {names}; register one first")


def named(runner: RunnerHandle | int | str) -> int | str:
    """What operators take: the number of a handle, or a number or name unchanged. TypeError for another object.

    Args:
        runner: a handle, a number or a name.
    """
    if isinstance(runner, RunnerHandle):
        return runner.handle
    if isinstance(runner, int | str | torch.SymInt):
        return runner
    raise TypeError(
        f"quire: a runner is named by a RunnerHandle, its number or its name, got {describe(runner)}; register it"
    )


# --- calls


def _of(operator: Any, runner: object) -> Any:
    """The overload that takes the runner: PyTorch would find it by trying, which costs more than a small product."""
    return operator.by_name if isinstance(runner, str) else operator.default


#: A number of features, which a graph may not know.
_SIZE = int | torch.SymInt


def _check_tensors(what: str, **tensors: object) -> None:
    """Raises TypeError for what is neither a tensor nor what stands for one where torch.fx traces."""
    for name, tensor in tensors.items():
        if not hasattr(type(tensor), "__torch_function__"):
            check_type(what, torch.Tensor, **{name: tensor})


def nvfp4_linear(x: torch.Tensor, runner: RunnerHandle | int | str, out_features: int) -> torch.Tensor:
    """y `[*, out_features]` of x `[*, K]`, both bfloat16, computed by a registered runner. For inference: no gradient.

    The operator is one opaque node in a graph. Tracing reads only shapes, so the runner must exist only when the
    operator runs. Within quire.batch_invariant the operator asks the runner for kernels with that property
    (docs/invariance.md).

    Args:
        x: bfloat16 `[*, K]`.
        runner: the result of quire.runners.register, its number, or the name under which it was registered. Use names
            in exported programs.
        out_features: the number of features of y, which is that of the runner.

    Raises:
        TypeError: for an argument of another type.
        RuntimeError: if x is not bfloat16, if there is no such runner then, or if it has another kind, device or size.
            Within quire.batch_invariant also if x has one scale for all tokens.
    """
    if not isinstance(x, torch.Tensor) or not isinstance(out_features, _SIZE):  # a call of one token takes microseconds
        _check_tensors("nvfp4_linear", x=x)
        check_type("nvfp4_linear", _SIZE, out_features=out_features)
    return _of(torch.ops.quire.nvfp4_linear, runner)(x, named(runner), out_features, is_batch_invariant_enabled())


def nvfp4_moe(
    hidden_states: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    runner: RunnerHandle | int | str,
    hidden_size: int,
) -> torch.Tensor:
    """y [T, hidden_size] of hidden_states [T, H], both bfloat16. The experts topk_ids int32 [T, k] compute it, and
    topk_weights float32 [T, k] weight their results. An id of -1 means no expert. Otherwise as nvfp4_linear().

    Args:
        hidden_states: bfloat16 [T, H].
        topk_weights: float32 [T, k], which weight the results of the experts.
        topk_ids: int32 [T, k], the experts of each token. -1 is no expert.
        runner: as for `nvfp4_linear`.
        hidden_size: the number of features of y.

    Raises:
        TypeError: for an argument of another type.
        RuntimeError: if a dtype or a size does not fit; otherwise as nvfp4_linear().
    """
    _check_tensors("nvfp4_moe", hidden_states=hidden_states, topk_weights=topk_weights, topk_ids=topk_ids)
    check_type("nvfp4_moe", _SIZE, hidden_size=hidden_size)
    operator = _of(torch.ops.quire.nvfp4_moe, runner)
    return operator(hidden_states, topk_weights, topk_ids, named(runner), hidden_size, is_batch_invariant_enabled())


def nvfp4_moe_routed(
    hidden_states: torch.Tensor,
    router_logits: torch.Tensor,
    routing: str,
    runner: RunnerHandle | int | str,
    hidden_size: int,
    *,
    expert_bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """nvfp4_moe() with experts and weights that quire.moe.route returns for router_logits [T, E] (moe-reference.md 1).

    Args:
        hidden_states: bfloat16 [T, H].
        router_logits: float32, float16 or bfloat16.
        routing: "FUNCTION:topk=N[:OPTION]...", such as "softmax:topk=2:renormalize"; the RuntimeError for a wrong text
            lists the options.
        runner: as for `nvfp4_linear`.
        hidden_size: the number of features of y.
        expert_bias: [E]. Added to the scores that select the experts.

    Raises:
        TypeError: for an argument of another type.
        RuntimeError: if a dtype, a size or the routing does not fit; otherwise as nvfp4_linear().
    """
    what = "nvfp4_moe_routed"
    _check_tensors(what, hidden_states=hidden_states, router_logits=router_logits)
    check_type_or_none(what, torch.Tensor, expert_bias=expert_bias)
    check_type(what, str, routing=routing)
    check_type(what, _SIZE, hidden_size=hidden_size)
    operator = _of(torch.ops.quire.nvfp4_moe_routed, runner)
    return operator(
        hidden_states, router_logits, expert_bias, routing, named(runner), hidden_size, is_batch_invariant_enabled()
    )


# --- weights


def _text(spec: str | QuantSpec) -> str:
    """The spec's text; of inputs also "none", which the operators take."""
    return "none" if spec == "none" else (spec if isinstance(spec, QuantSpec) else QuantSpec(spec)).text


@dataclass(frozen=True)
class _Stack:
    """Weights [E, N, K] as the operators take them (src/quire_torch/ops/register_runner.h)."""

    tensors: list[torch.Tensor]
    shape: list[int]
    spec: str
    bias: torch.Tensor
    input_scale: torch.Tensor
    quantized: bool = False


def _of_inputs(x: str | QuantSpec | None, weights: _Stack) -> str:
    """The text of the spec of activations."""
    if x is None:
        return QuantSpec(weights.spec).family if weights.quantized else "nvfp4"
    return _text(x)


def _joined(what: str, *stacks: _Stack) -> tuple[str, list, list, list, list]:
    """Spec, weights, shapes, biases and scales of all stacks."""
    first = stacks[0]
    for stack in stacks:
        if stack.spec != first.spec:
            raise ValueError(
                f"{what}: all weights must have one spec, got {first.spec} and {stack.spec}; quantize them alike"
            )
    tensors = [tensor for stack in stacks for tensor in stack.tensors]
    sizes = [size for stack in stacks for size in stack.shape]
    return first.spec, tensors, sizes, [stack.bias for stack in stacks], [stack.input_scale for stack in stacks]


def _stack(
    what: str,
    weights: Weights,
    w: str | QuantSpec | None,
    *,
    bias: torch.Tensor | None,
    input_scale: Scale | None,
) -> _Stack:
    options = _ABSENT if bias is None else bias.detach(), _scales(what, input_scale)
    if isinstance(weights, QuantizedTensor) or not isinstance(weights, torch.Tensor):
        if not isinstance(weights, Iterable):
            raise TypeError(f"{what} must be a tensor, or a sequence of tensors, got {describe(weights)}")
        weights = list(weights)
        for weight in weights:
            check_type(what, torch.Tensor, weight=weight)
        if not weights:
            raise ValueError(f"{what}: the sequence is empty; pass a tensor for each expert")
        if not any(isinstance(weight, QuantizedTensor) for weight in weights):
            _check_alike(what, weights)
            weights = torch.stack([weight.detach() for weight in weights])
    if isinstance(weights, torch.Tensor):
        if weights.dim() != 3:
            raise ValueError(f"{what} must be a matrix for each expert, got the shape {list(weights.shape[1:])}")
        return _Stack([weights.detach()], list(weights.shape), _text(w or "nvfp4"), *options)
    return _Stack(*_quantized(what, weights, w), *options, quantized=True)


def _check_alike(what: str, weights: Sequence[torch.Tensor]) -> None:
    first = weights[0]
    for weight in weights:
        if (weight.shape, weight.device) != (first.shape, first.device):
            raise RuntimeError(
                f"{what} must have one shape and device for all experts, got {list(first.shape)} on {first.device} and "
                f"{list(weight.shape)} on {weight.device}; pass weights of experts that are alike"
            )


def _check_bias(what: str, **biases: torch.Tensor | None) -> None:
    """The operators would name the weight."""
    given = {name: bias for name, bias in biases.items() if bias is not None}
    check_type(what, torch.Tensor, **given)
    check_dense(what, **given)
    for name, bias in given.items():
        if bias.dtype not in DTYPES:
            raise RuntimeError(
                f"{what}: {name} must be float32, float16 or bfloat16, got {bias.dtype}; convert it with .to()"
            )


def _scales(what: str, scale: Scale | None) -> torch.Tensor:
    """[1] or [E]; [0] without. What is float64, the operator rounds to float32: Python's mode may be another."""
    if scale is None:
        return _ABSENT
    if isinstance(scale, torch.Tensor):
        if scale.numel() == 0 or not scale.is_floating_point():
            raise ValueError(
                f"{what}: input_scale must be a number, or a float tensor of one or one for each expert, got "
                f"{scale.dtype} {list(scale.shape)}"
            )
        scale = scale.detach().reshape(-1)
        return scale if scale.dtype == torch.float64 else scale.float()
    each = [scale] if isinstance(scale, str) or not isinstance(scale, Sequence) else scale
    for one in each:
        check_type(what, float | int, input_scale=one)
    if not each:
        raise ValueError(f"{what}: input_scale must be a number, or a list of one for each expert, got an empty list")
    return torch.tensor([float(one) for one in each], dtype=torch.float64, device=HOST)


def _quantized(
    what: str, weights: Sequence[QuantizedTensor], w: str | QuantSpec | None
) -> tuple[list[torch.Tensor], list[int], str]:
    first = next(weight for weight in weights if isinstance(weight, QuantizedTensor))
    for weight in weights:
        alike = isinstance(weight, QuantizedTensor) and weight.spec_text == first.spec_text
        if not alike or weight.shape != first.shape or weight.dim() != 2:
            raise ValueError(
                f"{what}: quantized weights must be matrices of one spec and shape, got {describe(weight)} among "
                f"{first.spec_text} {list(first.shape)}; quantize all alike"
            )
        if not weight.stores("rowwise"):
            raise ValueError(f"{what}: {weight.spec_text} has no rowwise codes; quantize it with rowwise=True")
    if w is not None and _text(w) != first.spec_text:
        raise ValueError(f"{what}: is quantized as {first.spec_text} but w says {_text(w)}; leave w out")
    absent = _ABSENT.to(first.device)
    buffers = [absent if b is None else b.detach() for weight in weights for b in weight.buffer_list()[:3]]
    return buffers, [len(weights), *first.shape], first.spec_text


# --- Python functions

_numbers = itertools.count(1)
_functions: dict[int, Callable[..., torch.Tensor]] = {}


def _call_function(function: int, inputs: list[torch.Tensor]) -> torch.Tensor:
    """The kernel of quire::runner_call_python."""
    if function not in _functions:
        raise LookupError(f"runners: no Python function has the number {function}; register() a PythonRunner of it")
    y = _functions[function](*inputs)
    check_type("PythonRunner: the function's result", torch.Tensor, y=y)
    return y


_library = torch.library.Library("quire", "IMPL")
_library.impl("runner_call_python", _call_function, "CompositeExplicitAutograd")


def _forget_dropped_functions() -> None:
    for number in torch.ops.quire.runner_dropped_functions():
        _functions.pop(number, None)


@dataclass
class _Life:
    """Of a handle."""

    name: str
    began: float
    handle: weakref.ref[RunnerHandle]


def _unregister(handle: int, life: _Life) -> None:
    torch.ops.quire.runner_unregister(handle)
    _forget_dropped_functions()
    # Whoever closes a handle still has it. So has a process that ends: its finalizers run before anything is freed.
    dropped = life.handle() is None and not sys.is_finalizing()
    if dropped and time.monotonic() - life.began < _SHORT_LIFE:
        warnings.warn(
            f"runners.register: the handle of runner {life.name} was dropped within {1000 * _SHORT_LIFE:.0f} ms, and "
            "so the runner is not registered any more; keep the handle as long as the runner is used, and close() "
            "it if the runner is no longer needed",
            stacklevel=4,
        )
