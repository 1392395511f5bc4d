"""Reports what a layer or a function of quire runs: matmuls and quantizations, their operands, and their kernels."""

import contextlib
import inspect
import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from quire.autocast import active_recipe, recipe_of
from quire.checks import check_type, check_type_or_none
from quire.distributed.fully_sharded import fsdp_groups
from quire.nn.own_context import in_eager_mode
from quire.nn.product_module import ProductModule
from quire.nn.running_layers import told
from quire.tensor import QuantizedTensor


@dataclass(frozen=True)
class Kernel:
    """A row of a kernel table. verdict: "runs", the reason why it cannot compute the problem, or the row that comes
    first."""

    name: str
    verdict: str

    @property
    def runs(self) -> bool:
        return self.verdict == "runs"


@dataclass(frozen=True)
class Operand:
    """One direction of a quantized tensor that a step reads or writes.

    role: "x", "w", "dy", or "" if no matmul has used it. outer, contraction: its sizes as an operand of a matmul. made:
    whether a step of this explanation quantized it; otherwise it was already quantized.
    """

    role: str
    spec: str
    direction: str
    outer: int
    contraction: int
    made: bool

    def __str__(self) -> str:
        origin = "" if self.made else ", given quantized"
        return f"{self.role or 'operand':<4}{self.spec} {self.direction} [{self.outer}, {self.contraction}]{origin}"


@dataclass(frozen=True)
class Step:
    """One problem that has run.

    operation: "quantize", "gemm", "matmul" (of unquantized matrices, by PyTorch), "dequantize", "column_sum", "norm",
        "activation" are the kernel tables; "torch" is a matmul that PyTorch computes outside of quire's operators;
        "moe" is routing and permutation (docs/moe.md); "collective" is a collective of ranks, of tensors of this
        one: tensors of uint8 are codes and their scales; "runner" is a call of a runner. For quire's own runners their
        steps follow (docs/runners.md).
    name: the matmul, "fprop", "dgrad", "wgrad" or "dbias", or in a runner's mixture "expert 3 w13"; the role of a
        quantized tensor; "grad" of a norm, an activation or a routing.
    problem: a description. operands: the operands of a matmul, or the results of a quantization. kernels: the rows of
    the table. layer: the path of the module that computed it, in the module that was explained; "" for that one itself,
    and for a function.
    """

    operation: str
    name: str
    problem: str
    operands: tuple[Operand, ...]
    kernels: tuple[Kernel, ...]
    layer: str = ""

    @property
    def kernel(self) -> str | None:
        """The name of the row that ran; None if PyTorch computes."""
        return next((kernel.name for kernel in self.kernels if kernel.runs), None)

    def __str__(self) -> str:
        lines = [f"{self.name or '-':<7} {self.problem}"]
        if self.operation == "gemm":  # the text of a quantization names what it writes
            lines += [f"  {operand}" for operand in self.operands]
        lines += [f"  kernel {kernel.name}: {kernel.verdict}" for kernel in self.kernels]
        return "\n".join(lines)


@dataclass(frozen=True)
class Explanation:
    """The steps that ran, in order. str() gives a report.

    recipe: the active recipe's text, None without one. isa: the instruction set of kernels named "generic". notes: what
    to know before results are compared with those of another run. verbose: whether the report has every step with its
    operands and with the reasons of all kernels. Otherwise layers with the same steps share one entry, and a step has
    one line with the kernel that ran.
    """

    recipe: str | None
    isa: str
    steps: tuple[Step, ...]
    notes: tuple[str, ...] = ()
    verbose: bool = True

    @property
    def products(self) -> tuple[Step, ...]:
        """The matmuls, both quire's and PyTorch's."""
        return tuple(step for step in self.steps if step.operation in ("gemm", "matmul", "torch"))

    @property
    def quantizations(self) -> tuple[Step, ...]:
        return tuple(step for step in self.steps if step.operation == "quantize")

    def __str__(self) -> str:
        recipe = self.recipe or "that of each layer, else high precision (no quire.autocast is active)"
        head = f"recipe: {recipe}\ninstruction set: {self.isa}"
        lines = self._every_step() if self.verbose else self._joined()
        return "\n".join([head, *lines, *self._summary(), *(f"note: {note}" for note in self.notes)])

    def _every_step(self) -> Iterator[str]:
        named = any(step.layer for step in self.steps)
        for path, steps in itertools.groupby(self.steps, lambda step: step.layer):
            if named:
                yield f"{path or _ITSELF}:"
            yield from map(str, steps)

    def _joined(self) -> Iterator[str]:
        """One entry for the layers with the same steps, in the order of the first ones."""
        of_layer: dict[str, list[str]] = {}
        for step in self.steps:
            line = f"  {step.name or '-':<7} {step.problem}" + (f": kernel {step.kernel}" if step.kernel else "")
            of_layer.setdefault(step.layer, []).append(line)
        alike: dict[tuple[str, ...], list[str]] = {}
        for path, lines in of_layer.items():
            alike.setdefault(tuple(lines), []).append(path)
        for lines, paths in alike.items():
            yield f"{_named(paths)}:"
            yield from (f"{line} x {n}" if n > 1 else line for line, n in _counts(lines))

    def _summary(self) -> Iterator[str]:
        """How many steps of each operation each kernel ran, if there are several of one."""
        calls = Counter((step.operation, step.kernel or "-") for step in self.steps)
        if not calls or max(calls.values()) == 1:
            return
        yield "calls of each kernel:"
        width = max(len(operation) for operation, _ in calls)
        of_kernel = max(len(kernel) for _, kernel in calls)
        for (operation, kernel), n in calls.items():
            yield f"  {operation:<{width}}  {kernel:<{of_kernel}}  {n:>5}"

    __repr__ = __str__


#: What a report calls the module that was explained, or the function.
_ITSELF = "the call itself"
#: The most names of an entry of joined layers, and the most layers that all have theirs.
_NAMES, _FEW = 8, 3


def _named(paths: list[str]) -> str:
    """The names of layers, those of many that differ only in numbers once."""
    names = [path or _ITSELF for path in paths]
    if len(names) == 1:
        return names[0]
    patterns = names if len(names) <= _FEW else list(dict.fromkeys(re.sub(r"\b\d+\b", "*", name) for name in names))
    more = f" and {len(patterns) - _NAMES} more names" if len(patterns) > _NAMES else ""
    return f"{', '.join(patterns[:_NAMES])}{more} ({len(paths)} layers)"


#: A number within brackets.
_SIZE = re.compile(r"\d+(?=[^\[\]]*\])")


def _counts(lines: Sequence[str]) -> Iterator[tuple[str, int]]:
    """Each line, and how often it stands there in a row. Lines of experts, which differ in the number of tokens alone,
    are one line: `[10 to 23, 64]`."""
    for _, alike in itertools.groupby(lines, lambda line: _SIZE.sub("", line)):
        run: list[str] = []
        for line in alike:
            if run and not _differ_in_one([*run, line]):
                yield _range(run), len(run)
                run = []
            run.append(line)
        yield _range(run), len(run)


def _differ_in_one(lines: Sequence[str]) -> bool:
    """Whether one size explains all differences of lines, in however many places it stands."""
    columns = set(zip(*map(_SIZE.findall, lines), strict=True))
    return sum(len(set(column)) > 1 for column in columns) <= 1


def _range(lines: Sequence[str]) -> str:
    """The line of several, from the smallest to the largest size."""
    sizes = [sorted(set(column), key=int) for column in zip(*map(_SIZE.findall, lines), strict=True)]
    shown = iter(f"{each[0]} to {each[-1]}" if len(each) > 1 else each[0] for each in sizes)
    return _SIZE.sub(lambda _: next(shown), lines[0])


# Products of PyTorch, as they arrive below autograd.
_TORCH_PRODUCTS = ("aten.mm.", "aten.addmm.", "aten.bmm.", "aten.baddbmm.", "aten.mv.", "aten.addmv.", "aten.dot.")


# quire's operators that have one kernel, as they arrive: what they are called, and the name of the step.
_ROUTING = {
    **dict.fromkeys(("route", "route_fwd"), ("route", "")),
    **dict.fromkeys(("permute", "permute_fwd"), ("permute", "")),
    **dict.fromkeys(("unpermute", "unpermute_fwd"), ("unpermute", "")),
    **{name: (name, "") for name in ("limit_capacity", "expert_rows", "chunk_rows")},
    "route_bwd": ("route", "grad"),
    "unpermute_dot": ("unpermute", "grad"),
}

_RUNNERS = ("nvfp4_linear", "nvfp4_moe", "nvfp4_moe_routed")


class _Restoring(TorchDispatchMode):
    """Notes products that PyTorch computes, collectives, where tokens go and what runners returned, and keeps every
    tensor's value from before it was first written."""

    def __init__(self, function: Callable) -> None:
        super().__init__()
        self._sharded = bool(fsdp_groups(function))
        #: What runners returned, which has no gradient.
        self.of_runners: list[torch.Tensor] = []
        self._before: dict[tuple[int, tuple[int, ...], int], tuple[torch.Tensor, torch.Tensor]] = {}
        # Schemas of batch normalisations do not say that they write running statistics.
        for buffer in function.buffers() if isinstance(function, torch.nn.Module) else ():
            self._keep(buffer)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func.namespace == "quire" and func._opname == "wgrad_stash_":
            return None  # what it keeps is not in tensors
        if func.namespace == "fsdp" and not self._sharded:
            raise RuntimeError(
                "explain: the function calls a model that fully_shard shards, whose gathered parameters explain could "
                "not give back; pass the module and its arguments"
            )
        if func._schema.is_mutable:
            self._keep_written(func._schema.arguments, args, kwargs)
        if str(func).startswith(_TORCH_PRODUCTS):
            torch.ops.quire.explain_note(f"torch\t\t{func} {' x '.join(_shapes(args))}")
        elif func.namespace == "quire" and func._opname in _ROUTING:
            operator, name = _ROUTING[func._opname]
            options = "".join(f" {value}" for value in args if isinstance(value, str))
            torch.ops.quire.explain_note(f"moe\t{name}\t{operator}{options} of {', '.join(_shapes(args))}")
        elif collective := _collective(func, args):
            text, given = collective
            torch.ops.quire.explain_note(f"collective\t\t{text.format(', '.join(_shapes((given,))))}")
        elif _calls_collectives(func):
            with self:
                return _run_below(func, args, kwargs)
        result = func(*args, **kwargs)
        if func.namespace == "quire" and func._opname in _RUNNERS:
            self.of_runners.append(result)
        return result

    def _keep_written(self, arguments, args, kwargs) -> None:
        for i, argument in enumerate(arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            for value in pytree.tree_leaves(args[i] if i < len(args) else kwargs.get(argument.name)):
                if isinstance(value, torch.Tensor):
                    self._keep(value)

    def _keep(self, tensor: torch.Tensor) -> None:
        # The first value of a piece of memory counts. The tensor is held, so that its memory is not given away.
        key = (tensor.data_ptr(), tuple(tensor.shape), tensor.storage_offset())
        if key not in self._before:
            self._before[key] = (tensor, tensor.detach().clone())

    def restore(self) -> None:
        """Through .data: a version that moved would invalidate what an earlier forward pass has saved."""
        for tensor, before in reversed(self._before.values()):
            if tensor.untyped_storage().nbytes():  # fully_shard frees memory and keeps the tensor
                tensor.data.copy_(before)


def _shapes(args: tuple) -> list[str]:
    tensors = [value for value in pytree.tree_leaves(args) if isinstance(value, torch.Tensor)]
    return [f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}" for tensor in tensors]


def explain(function: Callable, *args: object, verbose: bool | None = None, **kwargs: object) -> Explanation:
    """Runs function(*args, **kwargs) and, if gradients are enabled, its backward pass, and reports what quire computed.

    Within torch.no_grad only the forward pass runs. The same holds for models that were converted for inference without
    gradients="input", and for runners (quire.runners).

    Afterwards all tensors have their previous values, including the state of layers (amaxes, counters, main_grad) and
    torch's random state. No gradient is accumulated. Python attributes that the function sets keep their new values,
    and hooks run. Other threads can compute at the same time, but not with the same module.

    Args:
        function: a module, also one that torch.compile wraps, or any function of tensors, such as quire.quantize. A
            layer without a recipe of its own runs under the active recipe, so call explain within quire.autocast. A
            compiled module runs in eager mode; a note says if its compiled results can differ (docs/inference.md).
        *args: its arguments. Floating-point tensors among them are treated as tensors that need gradients. Parameters
            need gradients according to their requires_grad.
        verbose: what the report has. True: every step with its operands, and for each kernel why it ran or not. False:
            layers with the same steps are joined, and each step has one line. None: True if only one layer computes, as
            when function is a layer. It is not passed on; call a function that has an argument of this name by a
            lambda.
        **kwargs: its keyword arguments.

    Returns:
        An Explanation. str() gives the report. `products` are the matmuls, `quantizations` the quantizations, and
            `steps` everything, in the order of execution. Each is a Step with the attributes operation, name, problem,
            operands and kernels; `kernel` is the name of the kernel that ran.

    Raises:
        TypeError: if function cannot be called, or verbose is no bool or None.
        RuntimeError: for a function that calls a model that fully_shard shards: pass the model itself. Also within
            another explain and within a compiled function. Errors of the function reach the caller.
    """
    check_type("explain", Callable, function=function)
    check_type_or_none("explain", bool, verbose=verbose)
    if torch.compiler.is_compiling():
        raise RuntimeError(
            "explain: not available within a compiled function; call it on the function that is compiled"
        )
    notes = (_FUSED,) if _keeps_float32(function, (args, kwargs)) else ()
    function = getattr(function, "_orig_mod", function)  # what torch.compile wraps does the same in eager mode
    recipe = active_recipe()
    mode = _Restoring(function)
    torch.ops.quire.explain_begin()
    text = ""
    with _sharded_as_before(function):
        try:
            # Eager: with a mode Dynamo would compile nothing, and never try again.
            with torch.random.fork_rng(devices=[]), in_eager_mode(), mode, told(function, _note_layer):
                _run(function, args, kwargs, mode.of_runners)
        finally:
            text = torch.ops.quire.explain_end()
            mode.restore()
    isa = next(line.split(":")[0] for line in torch.ops.quire.isas().splitlines() if line.endswith(": in use"))
    said = None if recipe is None else "another one for each layer" if recipe.by_layer else recipe.linear_spec()
    steps = tuple(_steps(text))
    detailed = verbose if verbose is not None else len({step.layer for step in steps}) <= 1
    return Explanation(said, isa, steps, notes, detailed)


def _note_layer(path: str) -> None:
    torch.ops.quire.explain_note(f"{_LAYER}\t{path}\t")


_ROUNDS = "emulate_precision_casts"
_FUSED = (
    "Inductor compiles this, and keeps float32 between operators that it fuses, where eager mode rounds to 16 bits. "
    "Layers then quantize other values, and results can differ from eager ones by several percent. To compare them, "
    f"set torch._inductor.config.{_ROUNDS} = True before compiling"
)


def _keeps_float32(function: Callable, arguments: object) -> bool:
    """Whether Inductor compiles the function, or a module of it, with 16-bit values that it does not round between
    operators."""
    modules = list(function.modules()) if isinstance(function, torch.nn.Module) else []
    options = [found for one in (function, *modules) for found in _inductor_options(one)]
    if not options or all([found.get(_ROUNDS, getattr(torch._inductor.config, _ROUNDS)) for found in options]):
        return False
    tensors = [t for t in pytree.tree_leaves(arguments) if isinstance(t, torch.Tensor)]
    parameters = function.parameters() if isinstance(function, torch.nn.Module) else ()
    halves = any([t.dtype in (torch.bfloat16, torch.float16) for t in (*tensors, *parameters)])
    return halves or torch._C._is_any_autocast_enabled()


def _inductor_options(compiled: object) -> Iterator[dict[str, object]]:
    """The options of what torch.compile or Module.compile has made for Inductor; nothing for other backends. PyTorch
    has no public way to ask for a backend."""
    for one in (compiled, getattr(compiled, "_compiled_call_impl", None)):
        if hasattr(one, "get_compiler_config"):
            backend = inspect.getclosurevars(one.get_compiler_config).nonlocals["self"].callback
            while hasattr(backend, "_torchdynamo_orig_backend"):
                backend = backend._torchdynamo_orig_backend
            if isinstance(backend, torch._TorchCompileInductorWrapper):
                yield backend.config


def _needs_gradient(value: object) -> object:
    if type(value) is not torch.Tensor or not value.is_floating_point() or value.requires_grad:
        return value
    return value.detach().requires_grad_()


def _run(function: Callable, args: tuple, kwargs: dict, of_runners: list[torch.Tensor]) -> None:
    """of_runners: fills while the function runs."""
    if not torch.is_grad_enabled() or _is_for_inference(function):
        with torch.no_grad():
            function(*args, **kwargs)
        return
    args, kwargs = pytree.tree_map(_needs_gradient, (args, kwargs))
    parameters = list(function.parameters()) if isinstance(function, torch.nn.Module) else []
    wanted = [t for t in [*pytree.tree_leaves((args, kwargs)), *parameters] if _differentiable(t)]
    outputs = [t for t in pytree.tree_leaves(function(*args, **kwargs)) if _differentiable(t)]
    outputs = _without_history(outputs, of_runners)
    ones = [torch.ones_like(t) for t in outputs]
    if outputs and fsdp_groups(function):  # whole parameters, which fully_shard differentiates, are its own
        with _own_gradients([t for t in wanted if t.is_leaf]):
            torch.autograd.backward(outputs, ones)
    elif outputs and wanted:
        # Not backward(): that would accumulate into .grad.
        torch.autograd.grad(outputs, wanted, ones, allow_unused=True)


def _without_history(tensors: list[torch.Tensor], of: list[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors that autograd's graph does not derive from one of those."""
    ends = {t.grad_fn for t in of if t.grad_fn is not None}
    return [t for t in tensors if ends.isdisjoint(_nodes(t))] if ends else tensors


def _nodes(tensor: torch.Tensor) -> set[object]:
    """The nodes of its history."""
    found: set[object] = set()
    ahead = [tensor.grad_fn]
    while ahead:
        node = ahead.pop()
        if node is not None and node not in found:
            found.add(node)
            ahead += [following for following, _ in node.next_functions]
    return found


def _is_for_inference(function: Callable) -> bool:
    """Whether it is a module with a layer that gives its input no gradient, as after quire.convert(for_inference=True)
    without gradients="input"."""
    modules = function.modules() if isinstance(function, torch.nn.Module) else ()
    return any([isinstance(module, ProductModule) and _gives_no_gradient(module) for module in modules])


def _gives_no_gradient(layer: ProductModule) -> bool:
    """Whether its weights have codes for the forward pass alone, and its recipe multiplies codes in backward."""
    recipe, weights = recipe_of(layer), layer.parameters(recurse=False)
    without = any([isinstance(weight, QuantizedTensor) and weight.columnwise_data is None for weight in weights])
    return without and recipe is not None and recipe.backward_override is None


def _differentiable(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


_QUANTIZING = {"quantize", "norm", "activation"}
#: In place of an operation: the following steps are of the layer of this name.
_LAYER = "layer"


def _steps(text: str) -> list[Step]:
    """Parses the lines of end_explanation (src/quire_torch/bridge/observe.h)."""
    steps: list[tuple[list[str], list[list[str]], list[Kernel]]] = []
    layers, layer = [], ""
    for line in text.splitlines():
        word, rest = line.split(" ", 1)
        if word == "step" and rest.startswith(f"{_LAYER}\t"):
            layer = rest.split("\t")[1]
        elif word == "step":
            steps.append((rest.split("\t"), [], []))
            layers.append(layer)
        elif word == "operand":
            steps[-1][1].append(rest.split("\t"))
        else:
            steps[-1][2].append(Kernel(*rest.split(": ", 1)))
    made: dict[str, list[str]] = {}  # what lies at an address now
    for (operation, *_), operands, _ in steps:
        for operand in operands:
            address = operand[-1]
            if operation in _QUANTIZING:
                made[address] = operand
            elif address in made and _is_another(operand, made[address]):
                del made[address]
            elif address in made:
                made[address][0] = operand[0]  # a role is known once a product has read the codes
            operand.append(address in made)
    for head, operands, _ in steps:
        if head[0] == "quantize" and not head[1]:
            head[1] = operands[0][0]
    return [
        Step(*head, tuple(map(_operand, operands)), tuple(kernels), layer)
        for (head, operands, kernels), layer in zip(steps, layers, strict=True)
    ]


def _is_another(read: list[str], made: list[str]) -> bool:
    """Whether what a product reads is not what was quantized at its address: another role, or more elements. Then the
    memory was used again, for codes of other ranks."""
    (role, _, _, outer, contraction, *_), (of, _, _, *sizes) = read, made
    return of not in ("", role) or int(outer) * int(contraction) > int(sizes[0]) * int(sizes[1])


def _operand(fields: list) -> Operand:
    role, spec, direction, outer, contraction, _, made = fields
    return Operand(role, spec, direction, int(outer), int(contraction), made)


# --- collectives, and models whose parameters fully_shard shards

#: Operators that start a collective, functional ones and those of process groups: its name, and which argument has the
#: tensors that this rank gives.
_COLLECTIVES = {
    "_c10d_functional::all_gather_into_tensor": ("all_gather", 0),
    "_c10d_functional::all_gather_into_tensor_coalesced": ("all_gather", 0),
    "_c10d_functional::all_reduce": ("all_reduce", 0),
    "_c10d_functional::broadcast": ("broadcast", 0),
    "_c10d_functional::reduce_scatter_tensor": ("reduce_scatter", 0),
    "_c10d_functional::all_to_all_single": ("all_to_all", 0),
    "c10d::_allgather_base_": ("all_gather", 1),
    "c10d::allgather_": ("all_gather", 1),
    "c10d::allgather_into_tensor_coalesced_": ("all_gather", 1),
    "c10d::allreduce_": ("all_reduce", 0),
    "c10d::allreduce_coalesced_": ("all_reduce", 0),
    "c10d::alltoall_base_": ("all_to_all", 1),
    "c10d::broadcast_": ("broadcast", 0),
    "c10d::_reduce_scatter_base_": ("reduce_scatter", 1),
    "c10d::reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1),
}

#: Operators of quire whose kernel calls collectives. Without gradients a mode sees such an operator only.
_CALLERS = ("quire::parallel_linear", "quire::parallel_grouped_linear")


def _collective(operator: torch._ops.OpOverload, args: Sequence[Any]) -> tuple[str, object] | None:
    """Of an operator that starts a collective: the collective with its options and its group, as "{} over 'tp'", and
    the tensors that this rank gives. None for any other operator."""
    found = _COLLECTIVES.get(operator._schema.name)
    if found is None:
        return None
    name, given = found
    objects = {value._type().name(): value for value in args if isinstance(value, torch.ScriptObject)}
    if not objects:
        *options, group = [value for value in args if isinstance(value, str)]
    else:
        its = distributed.ProcessGroup.unbox(objects["ProcessGroup"])
        group = its.group_desc or its.group_name
        reduction = objects.get("ReduceOp")
        options = [] if reduction is None else [distributed.ReduceOp.RedOpType(reduction.op()).name.lower()]
    return f"{' '.join([name, *options])} of {{}} over {group!r}", args[given]


def _calls_collectives(operator: torch._ops.OpOverload) -> bool:
    """Whether its kernel calls collectives, which _run_below() shows to a mode."""
    return operator._schema.name in _CALLERS


def _run_below(operator: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The kernel of the operator for the device of its first argument."""
    key = getattr(torch._C.DispatchKey, torch._C._dispatch_key_for_device(args[0].device.type))
    return operator.redispatch(torch._C.DispatchKeySet(key), *args, **kwargs)


@contextlib.contextmanager
def _sharded_as_before(model: object) -> Iterator[None]:
    """Afterwards, fully_shard's groups of parameters that had parts have parts again: what they gathered may have other
    values by then."""
    with_parts = [group for group in fsdp_groups(model) if group.is_sharded]
    try:
        yield
    finally:
        for group in with_parts:
            group.reshard()


@contextlib.contextmanager
def _own_gradients(tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """Within it their .grad begins as None; afterwards it is what it was."""
    before = [t.grad for t in tensors]
    try:
        for t in tensors:
            t.grad = None
        yield
    finally:
        for t, grad in zip(tensors, before, strict=True):
            t.grad = grad
