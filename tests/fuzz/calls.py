"""Calls of operators that are right, recorded while layers run: what the fuzzer changes something about."""

import os
import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

import every_recipe
import quire

ops = torch.ops.quire

#: Operators whose only effect is to switch something on in the process, or to take a runner of other calls away.
LEFT_OUT = ("runner_unregister", "explain_", "debug_count", "debug_record", "in_backward")


@dataclass
class Call:
    operator: torch._ops.OpOverload
    arguments: list[object]  # one for each of the schema, defaults included


def operators() -> list[torch._ops.OpOverload]:
    schemas = [s for s in torch._C._jit_get_all_schemas() if s.name.startswith("quire::")]
    names = sorted((s.name.removeprefix("quire::"), s.overload_name or "default") for s in schemas)
    return [getattr(getattr(ops, name), overload) for name, overload in names if not name.startswith(LEFT_OUT)]


class Recorder(TorchDispatchMode):
    """Keeps a few calls of every operator of quire, their tensors as they were before the call."""

    MOST = 12

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, list[Call]] = defaultdict(list)
        self.random = random.Random(0)

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if operator.namespace == "quire":
            self.keep(operator, args, kwargs or {})
        return operator(*args, **(kwargs or {}))

    def keep(self, operator: torch._ops.OpOverload, args: tuple, kwargs: dict) -> None:
        given = dict(zip([a.name for a in operator._schema.arguments], args, strict=False)) | kwargs
        arguments = [given.get(a.name, a.default_value) for a in operator._schema.arguments]
        kept, call = self.calls[str(operator)], Call(operator, tree_map_only(torch.Tensor, plain, arguments))
        if len(kept) < self.MOST:
            kept.append(call)
        elif self.random.random() < 0.1:
            kept[self.random.randrange(self.MOST)] = call


def plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone()


def recorded_once(seed: int, store: str) -> dict[str, list[Call]]:
    """The same, kept in a file for the process that goes on where this one ends."""
    if os.path.exists(store):
        runners()  # a file does not keep them
        found = torch.load(store, weights_only=True)
        every = {str(operator): operator for operator in operators()}
        return {name: [Call(every[name], arguments) for arguments in kept] for name, kept in found.items()}
    calls = recorded(seed)
    known = {str(operator) for operator in operators()}
    torch.save({name: [c.arguments for c in kept] for name, kept in calls.items() if name in known}, store)
    return calls


def recorded(seed: int) -> dict[str, list[Call]]:
    """Operator -> calls."""
    torch.manual_seed(seed)
    recorder = Recorder()
    with recorder:
        for recipe in (None, *every_recipe.ALL.values()):
            for step in (layers(recipe), experts(recipe)):
                for function in step:
                    with quire.autocast(enabled=recipe is not None, recipe=recipe):
                        with torch.no_grad():
                            function()
                        result = function()
                    result.float().sum().backward()
        others()
    return recorder.calls


def layers(recipe: object) -> Iterator[Callable[[], torch.Tensor]]:
    x = torch.randn(5, 32, requires_grad=True)
    for layer in (quire.Linear(32, 48), quire.LayerNormLinear(32, 16), quire.LayerNormMLP(32, 64)):
        yield lambda layer=layer: layer(x)
    fused = quire.Linear(32, 16, fuse_wgrad_accumulation=True)
    fused.weight.main_grad, fused.weight.grad_added_to_main_grad = torch.zeros(16, 32), False
    yield lambda: fused(x, is_first_microbatch=True)
    late = quire.GroupedLinear(2, 32, 16, delay_wgrad_compute=True)
    yield lambda: late(x, [2, 2])
    late.backward_dw()


def experts(recipe: object) -> Iterator[Callable[[], torch.Tensor]]:
    x = torch.randn(7, 32, requires_grad=True)
    layer, mixture = quire.GroupedLinear(3, 32, 16, fuse_wgrad_accumulation=True), quire.MoE(32, 32, 4, 2)
    for name in layer.weight_names:
        weight = getattr(layer, name)
        weight.main_grad, weight.grad_added_to_main_grad = torch.zeros(16, 32), False
    yield lambda: layer(x, [3, 0, 2])
    yield lambda: mixture(x)


def others() -> None:
    """What no layer calls in so few steps."""
    x = torch.randn(5, 64)
    for spec in ("mxfp8", "nvfp4", "nvfp4:swizzled", "mxfp8:swizzled", "fp8_block", "fp8_row", "nvfp4:interleaved"):
        try:
            q = quire.quantize(x, spec, columnwise=True)
        except RuntimeError:
            continue  # this spec has not that direction
        q.dequantize()
        six = [torch.empty(0) if b is None else b for b in q.buffer_list()]
        for columnwise in (False, True):
            three = six[3:] if columnwise else six[:3]
            try:
                ops.reorder(*three, spec, columnwise, [5, 64])
            except RuntimeError:
                continue
    ids = torch.tensor([[0, 1], [2, -1], [1, 0]], dtype=torch.int32)
    ops.limit_capacity(ids, 3, 1)
    ops.chunk_rows(torch.tensor([2, 3]), torch.tensor([1, 0]), 4, 6)
    ops.fingerprint(x)
    ops.empty_quantized(x, "nvfp4", True, True)
    ops.grouped_accumulate_([torch.zeros(4, 8), torch.zeros(4, 8)], torch.ones(2, 4, 8), False)
    ops.accumulate_(torch.zeros(4, 8), torch.ones(4, 8), False)
    ops.wgrad_stash_(torch.tensor([77, 0]), [x, x], 5, "", False)
    ops.wgrad_take_(torch.tensor([77, 1]))
    ops.debug_cast(x, "e4m3")
    ops.debug_rht(torch.randn(4, 64), True)
    ops.debug_philox(torch.tensor([0, 1]), 5, 6)
    runners()


def runners() -> None:
    none, x = torch.empty(0), torch.randn(3, 64).bfloat16()
    w, w13, w2 = torch.randn(1, 32, 64), torch.randn(4, 64, 64), torch.randn(4, 64, 32)
    linear = ops.runner_register_linear("fuzz.linear", "nvfp4", "nvfp4", [w], [1, 32, 64], [none], [none])
    stacks = [w13, w2], [4, 64, 64, 4, 64, 32], [none, none], [none, none]
    mixture = ops.runner_register_moe("fuzz.moe", "nvfp4", "nvfp4", *stacks, "swiglu", False)
    ids, weights = torch.tensor([[0, 1], [2, 3], [1, 0]], dtype=torch.int32), torch.full((3, 2), 0.5)
    for runner in (linear, "fuzz.linear"):
        ops.nvfp4_linear(x, runner, 32)
    for runner in (mixture, "fuzz.moe"):
        ops.nvfp4_moe(x, weights, ids, runner, 64)
        ops.nvfp4_moe_routed(x, torch.randn(3, 4), None, "softmax:topk=2", runner, 64)
