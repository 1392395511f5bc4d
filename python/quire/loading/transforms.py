"""What PyTorch learns about our operators: how its transforms of functions pass them, where the dispatcher's own ways
do not serve, and how many operations they are. And calls of them that no transform may see."""

import math
import sys
import weakref
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch
from torch._C import DispatchKey
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import CppFunctionalizeAPI, FunctionalTensor
from torch.fx.experimental.proxy_tensor import get_proxy_slot
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from quire.loading.deferred import when_imported

_NAMESPACE = "quire::"
_LIBRARY = torch.library.Library("quire", "IMPL")
#: Modules of PyTorch's operators whose functions may not write to their inputs in a graph with gradients.
_CONTROL_FLOW = {f"torch._higher_order_ops.{name}" for name in ("cond", "map", "scan", "while_loop")}


def register() -> None:
    """Registers a rule for every operator that needs one. The operators must have been loaded."""
    for op in _operators():
        if all(str(r.type) == "Tensor" for r in op._schema.returns):
            torch.library.register_vmap(op.name(), _one_by_one(op))
        if _written(op) and not op._schema.returns:
            op.py_impl(DispatchKey.Functionalize)(_on_copies(op))
        if _written(op) or any(str(a.type) == "List[Tensor]" for a in op._schema.arguments):
            _LIBRARY.impl(op.name(), _refuse_old_vmap(op), "Batched")
    _LIBRARY.impl("saved_states", _save_by_reference, "CompositeExplicitAutograd")
    refuse_control_flow()


def _save_by_reference(states: list[torch.Tensor]) -> None:
    """Marks the states among the inputs of a graph that AOTAutograd traces. It then keeps them for backward as it keeps
    what an autograd.Function stores on its ctx, and not by save_for_backward: no hook gives backward a copy, in which
    its writes would be lost, and no version is compared, because states change between forward and backward. Compiled
    autograd knows only what save_for_backward saved: with torch._dynamo.config.compiled_autograd nothing is marked."""
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None and dynamo.config.compiled_autograd:
        return
    mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY)
    for state in () if mode is None else filter(torch.is_tensor, states):  # an absent one is None
        while torch._C._functorch.is_functorch_wrapped_tensor(state):
            state = torch._C._functorch.get_unwrapped(state)
        if isinstance(state, FunctionalTensor):
            state = torch._from_functional_tensor(state.elem)
        slot = get_proxy_slot(state, mode.tracer, None)
        if slot is not None and slot.proxy.node.op == "placeholder":
            slot.proxy.node.meta["saved_tensor_with_no_vc_check"] = True


def refuse_control_flow() -> None:
    """Registers the error that says why a graph with control flow cannot advance the random state of a backward
    pass."""
    torch.ops.quire.sr_advance_.default.py_impl(FakeTensorMode)(_advance_in_control_flow)


def _advance_in_control_flow(mode: FakeTensorMode, *args: Any) -> None:
    """sr_advance_ while a graph is traced: raises RuntimeError within control flow, where PyTorch would raise an error
    that names no operator and no remedy. Otherwise it does nothing."""
    frame = sys._getframe()
    while frame is not None:
        if frame.f_globals.get("__name__") in _CONTROL_FLOW:
            raise RuntimeError(
                "quire: the backward pass of a layer with stochastic rounding advances the layer's random state, and "
                f"PyTorch allows no write within {frame.f_globals['__name__'].rpartition('.')[2]} in a graph with "
                "gradients; use a recipe with disable_stochastic_rounding=True, or a loop or condition of Python"
            )
        frame = frame.f_back


def requires_grad(t: torch.Tensor) -> bool:
    """Whether the gradient of t is needed. For a tensor that vmap has batched, the tensor within it says so."""
    if t.requires_grad or torch.compiler.is_compiling():
        return t.requires_grad
    batched = torch._C._functorch.is_batchedtensor(t)
    return batched and requires_grad(torch._C._functorch.get_unwrapped(t))


def _operators() -> Iterator[torch._ops.OpOverload]:
    # Names only: a list of the schemas of all of PyTorch's operators would take longer than all the rest.
    for name in torch._C._dispatch_get_all_op_names():
        if name.startswith(_NAMESPACE):
            packet, _, overload = name.removeprefix(_NAMESPACE).partition(".")
            op = getattr(getattr(torch.ops.quire, packet), overload or "default")
            if any("Tensor" in str(a.type) for a in op._schema.arguments):
                yield op


def _written(op: torch._ops.OpOverload) -> list[str]:
    return [a.name for a in op._schema.arguments if a.alias_info is not None and a.alias_info.is_write]


def _one_by_one(op: torch._ops.OpOverload) -> Callable[..., tuple[Any, Any]]:
    """Batching by a loop, so that each sample has the same bits as alone. (PyTorch's own loop accepts neither lists of
    tensors nor operators that write.)"""

    def rule(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
        values, spec = pytree.tree_flatten(args)
        dims = pytree.tree_leaves(in_dims)
        if info.batch_size == 0:
            raise ValueError(f"{op.name()}: vmap over no samples has no result; call it with one sample at least")
        results = []
        for sample in range(info.batch_size):
            own = [v if d is None else v.select(d, sample) for v, d in zip(values, dims, strict=True)]
            results.append(op(*pytree.tree_unflatten(own, spec)))
        if not op._schema.returns:
            return None, None
        if len(op._schema.returns) == 1:
            return torch.stack(results), 0
        return tuple(map(torch.stack, zip(*results, strict=True))), (0,) * len(op._schema.returns)

    return rule


def _refuse_old_vmap(op: torch._ops.OpOverload) -> Callable[..., None]:
    """The older vmap of PyTorch (torch._vmap_internals) has no rules of ours, and passes neither lists of tensors nor
    operators that write."""

    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError(
            f"{op.name()}: torch.autograd.grad(is_grads_batched=True) and torch.autograd.functional.jacobian("
            "vectorize=True) cannot batch this operator; use torch.func.jacrev, or torch.func.vmap of torch.func.vjp"
        )

    return refuse


def _on_copies(op: torch._ops.OpOverload) -> Callable[..., None]:
    """torch.func.functionalize of an operator that writes: it writes to copies, which then take the tensors' place.

    PyTorch 2.13 functionalizes the body of a torch.compiler.nested_compile_region that writes to its inputs, as the
    backward pass of a layer does, and has rules only for PyTorch's operators. The rule is a kernel that only Python's
    dispatcher sees: a C++ kernel would disable AOTAutograd's better rule (can_auto_functionalize).
    """
    names = [a.name for a in op._schema.arguments]

    def rule(*args: Any, **options: Any) -> None:
        context = CppFunctionalizeAPI()
        given = dict(zip(names, args, strict=False)) | options
        inner = context.unwrap_tensors(given)
        written = _written(op)
        with context.redispatch_to_next():
            for name in written:
                inner[name] = pytree.tree_map(torch.clone, inner[name])
            op(**inner)
        for name in written:
            for tensor, copy in zip(pytree.tree_leaves(given[name]), pytree.tree_leaves(inner[name]), strict=True):
                context.replace(tensor, copy)
                context.commit_update(tensor)
                context.sync(tensor)

    return rule


# --- how many floating-point operations our matmuls are: for torch.utils.flop_counter, and for overlap_scheduling of
# Inductor, which overlaps communication only with operators that have such a formula


Given = dict[str, object]


def register_flops() -> None:
    """Registers a formula for every operator that multiplies matrices, when somebody imports torch.utils.flop_counter
    (which loads Triton, if there is one). The operators must have been loaded."""
    when_imported("torch.utils.flop_counter", _register_flops)


def _register_flops(flop_counter: ModuleType) -> None:
    for name, multiplications in _MULTIPLICATIONS.items():
        packet = getattr(torch.ops.quire, name)
        formula = _formula(packet.default._schema, multiplications)
        flop_counter.register_flop_formula(packet, get_raw=True)(formula)


def _formula(schema: torch.FunctionSchema, multiplications: Callable[[Given], int]) -> Callable[..., int]:
    names = [argument.name for argument in schema.arguments]

    def flops(*args: object, out_val: object = None, **kwargs: object) -> int:
        return 2 * multiplications(dict(zip(names, args, strict=False)) | kwargs)  # and as many additions

    return flops


def _matrix(weights: object) -> torch.Size:
    """The sizes [N, K] of a weight, of a stack [E, N, K] and of each weight in a list."""
    return (weights if isinstance(weights, torch.Tensor) else weights[0]).shape[-2:]


def _of_forward(given: Given) -> int:
    return given["x"].numel() * _matrix(given["w"])[0]


def _of_backward(given: Given) -> int:
    """needs: one bit each for dx, dw, and for results that are no matmuls (linear_bwd.h)."""
    return given["dy"].numel() * given["in_features"] * (given["needs"] & 3).bit_count()


def _of_wgrad(given: Given) -> int:
    return given["tokens"] * math.prod(_matrix(given["main_grad"]))


#: Name of an operator -> the number of its multiplications, computed from its arguments.
_MULTIPLICATIONS: dict[str, Callable[[Given], int]] = {
    "linear": _of_forward,
    "linear_prequantized": _of_forward,
    "grouped_linear": _of_forward,
    "linear_fwd": lambda given: given["x"].numel() * given["out_features"],
    "nvfp4_linear": lambda given: given["x"].numel() * given["out_features"],
    "linear_bwd": _of_backward,
    "linear_unquantized_bwd": _of_backward,
    "linear_dgrad": lambda given: math.prod(given["shape"]) * given["out_features"],
    "linear_wgrad": lambda given: given["tokens"] * given["out_features"] * given["in_features"],
    "grouped_wgrad_": _of_wgrad,
    "wgrad_": _of_wgrad,
}


def at_the_end(owner: object, function: Callable[..., object], *arguments: object) -> weakref.finalize:
    """weakref.finalize for a function that calls operators. The garbage collector may end an object while somebody
    exports or traces another one: the call is kept out of that graph."""
    return weakref.finalize(owner, _untraced, function, *arguments)


def _untraced(function: Callable[..., object], *arguments: object) -> None:
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        function(*arguments)
