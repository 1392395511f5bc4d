"""GPTQ for all matmuls of a model, in the order in which the model runs them. The inputs of each matmul are computed by
the quantized layers before it."""

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from quire.checks import counted
from quire.conversion.convert import Plan, adopt
from quire.conversion.inference import inference_codes
from quire.functional import quantize
from quire.nn.own_context import callers_device
from quire.quantization.calibrate import buffer
from quire.quantization.gptq import Moments, gptq
from quire.quantization.inputs import Batch, Matmul, SameInput, arguments, matmuls, watched
from quire.tensor import QuantizedStack, QuantizedTensor

# --- the blocks of a model, each of which is given the result of the one before, and the arguments of its calls


#: A method that key-value caches of transformers have, by which they are recognised. Blocks write to caches.
_OF_A_CACHE = "get_seq_length"


class Stop(Exception):
    """Ends a call of a model when all wanted inputs have been seen."""


@dataclass
class BlockCall:
    """One call of a block. The first argument is the result of the block before; the others are kept here."""

    others: tuple[object, ...]
    named: dict[str, object]

    def run(self, block: torch.nn.Module, flowing: torch.Tensor) -> torch.Tensor:
        with callers_device():
            return first_tensor(block(flowing, *self.others, **self.named))


@dataclass
class Chain:
    """blocks: in the order of calls. calls: for each block one call for each batch. inputs: the inputs of the first
    block."""

    blocks: list[torch.nn.Module]
    calls: list[list[BlockCall]] = field(default_factory=list)
    inputs: list[torch.Tensor] = field(default_factory=list)


def first_tensor(result: object) -> object:
    """The tensor for the next block: the result of a block, or the first element if that is a tuple."""
    return result[0] if isinstance(result, tuple | list) and result else result


def run(model: torch.nn.Module, batch: Batch) -> None:
    args, named = arguments(batch)
    with contextlib.suppress(Stop), callers_device():
        model(*args, **named)


def find_chain(model: torch.nn.Module, batches: Sequence[Batch], layers: set[torch.nn.Module]) -> Chain | None:
    """The list of modules with the most of `layers`, in which each module is called once, in order, with the result of
    the module before. None if there is none, for example if blocks are called twice or take several results."""
    lists = [m for m in model.modules() if isinstance(m, torch.nn.ModuleList | torch.nn.Sequential) and len(m) > 1]
    lists.sort(key=lambda m: -len(layers.intersection(m.modules())))
    for modules in lists:
        if layers.intersection(modules.modules()) and (chain := _recorded(model, list(modules), batches)):
            return chain
    return None


def _recorded(model: torch.nn.Module, blocks: list[torch.nn.Module], batches: Sequence[Batch]) -> Chain | None:
    """The chain of these blocks, or None if they are not called as a chain. Runs the model on every batch."""
    chain = Chain(blocks, [[] for _ in blocks])
    for number, batch in enumerate(batches):
        with _recording(chain) as order:
            run(model, batch)
        if order != list(range(len(blocks))) or any(len(calls) != number + 1 for calls in chain.calls):
            return None
    return chain


def _kept(argument: object) -> object:
    """An argument for further calls of a block. A cache is left out: it would get the same tokens several times."""
    return None if hasattr(argument, _OF_A_CACHE) else argument


@contextlib.contextmanager
def _recording(chain: Chain) -> Iterator[list[int]]:
    """Adds the calls of one run of the model. Yields the numbers of blocks in the order of calls; -1 for a call whose
    argument is not the result of the block before."""
    order: list[int] = []
    before: list[object] = [None]

    def enter(index: int) -> Callable:
        def hook(block: torch.nn.Module, args: tuple[object, ...], named: dict[str, object]) -> None:
            fits = bool(args) and isinstance(args[0], torch.Tensor) and (index == 0 or args[0] is before[0])
            order.append(index if fits else -1)
            if fits:
                kept = {name: _kept(value) for name, value in named.items()}
                chain.calls[index].append(BlockCall(tuple(_kept(value) for value in args[1:]), kept))
                if index == 0:
                    chain.inputs.append(args[0].detach())

        return hook

    def leave(block: torch.nn.Module, args: object, result: object) -> None:
        before[0] = first_tensor(result)

    handles = []
    for index, block in enumerate(chain.blocks):
        handles.append(block.register_forward_pre_hook(enter(index), with_kwargs=True))
        handles.append(block.register_forward_hook(leave))
    try:
        yield order
    finally:
        for handle in handles:
            handle.remove()


# --- GPTQ of all matmuls


#: Rows of x, for each weight of a matmul.
Rows = list[torch.Tensor]


@dataclass
class Gptq:
    """names: of the layers to quantize. scales: the static scales [groups] of each matmul's input, if the recipe has
    such. made: id of each weight -> its quantized parameter. unseen: names of layers and groups that got no rows; they
    are rounded to nearest."""

    model: torch.nn.Module
    names: dict[torch.nn.Module, str]
    plan: Plan
    damping: float
    scales: Mapping[Matmul, torch.Tensor]

    def __post_init__(self) -> None:
        self.made: dict[int, torch.nn.Parameter] = {}
        self.unseen: list[str] = []
        recipe = self.plan.recipe
        self.input_spec = None if recipe.weight_only else recipe.input_spec
        self.weight_spec = self.plan.recipe.weight_spec

    def quantize(self, batches: Sequence[Batch]) -> None:
        from tqdm import tqdm

        chain = find_chain(self.model, batches, set(self.names))
        blocks = [] if chain is None else chain.blocks
        given = [] if chain is None else chain.inputs
        for index in tqdm(range(len(blocks)), desc="quire.quantize_model", unit="block", delay=1, disable=None):
            given = self._block(chain, index, given)
        within = {layer for block in blocks for layer in block.modules()}
        rest = [layer for layer in self.names if layer not in within]
        if rest:
            self._rest(rest, batches, blocks[-1] if blocks else None, given)

    def _block(self, chain: Chain, index: int, given: list[torch.Tensor]) -> list[torch.Tensor]:
        """Quantizes the layers of a block. given: its input for each batch, after quantized blocks; returns that of the
        next block."""
        block, calls = chain.blocks[index], chain.calls[index]
        twin = copy.deepcopy(block)  # which is quantized first; the model changes when all has succeeded
        twins = dict(zip(block.modules(), twin.modules(), strict=True))
        layers, same = [layer for layer in block.modules() if layer in self.names], SameInput()
        with watched(layers, lambda matmul, x, rows: same.see(matmul, x)):
            calls[0].run(block, given[0])
        stages = same.groups()
        for stage in stages:
            moments = self._shared_moments(stage)
            of_twins = {Matmul(twins[one.layer], one.product): one for one in stage}
            for call, x in zip(calls, given, strict=True):
                seen = _inputs(of_twins, lambda: call.run(twin, x))  # noqa: B023 (at once)
                self._add(moments, {of_twins[one]: rows for one, rows in seen.items()})
            self._finish(moments)
            self._adopt(stage, twins)
        reached = {one for stage in stages for one in stage}
        missed = [one for layer in layers for one in matmuls(layer) if one not in reached]
        self._finish({one: self._moments(one) for one in missed})
        self._adopt(missed, twins)
        return [call.run(twin, x) for call, x in zip(calls, given, strict=True)]

    def _rest(
        self,
        layers: list[torch.nn.Module],
        batches: Sequence[Batch],
        last: torch.nn.Module | None,
        given: list[torch.Tensor],
    ) -> None:
        """Quantizes the layers outside of blocks, all by the same runs of the model. given: results of the last block
        when quantized."""
        moments = {one: self._moments(one) for layer in layers for one in matmuls(layer)}
        for number, batch in enumerate(batches):
            replaced = None if last is None else last.register_forward_hook(_replace(given[number]))
            try:
                self._add(moments, _inputs(moments, lambda: run(self.model, batch)))  # noqa: B023
            finally:
                if replaced is not None:
                    replaced.remove()
        self._finish(moments)

    def _shared_moments(self, stage: list[Matmul]) -> dict[Matmul, list[Moments]]:
        """The moments of matmuls with the same input: shared by all, unless the matmuls have groups of rows or
        different scales."""
        first, alike = self._moments(stage[0]), len({self._scale_of(one) for one in stage}) == 1
        return {one: first if len(first) == 1 and alike else self._moments(one) for one in stage}

    def _scale_of(self, one: Matmul) -> tuple[float, ...]:
        return tuple(self.scales[one].tolist()) if one in self.scales else ()

    def _moments(self, one: Matmul) -> list[Moments]:
        return [Moments.zeros(weight.shape[1], weight.device) for weight in one.weights()]

    def _add(self, moments: dict[Matmul, list[Moments]], inputs: dict[Matmul, list[Rows]]) -> None:
        for one, sums in {id(sums): (one, sums) for one, sums in moments.items()}.values():
            for groups in inputs.get(one, []):
                for group, (of_group, x) in enumerate(zip(sums, groups, strict=True)):
                    if len(x):
                        of_group.add(self._as_multiplied(x, one, group))

    def _as_multiplied(self, x: torch.Tensor, one: Matmul, group: int) -> torch.Tensor:
        """x as the matmul has it, in float32."""
        if self.input_spec is None:
            return x.float()
        scale = self.scales[one][group : group + 1].to(x.device) if one in self.scales else None
        return quantize(x, self.input_spec, scale=scale).dequantize(torch.float32)

    def _finish(self, moments: dict[Matmul, list[Moments]]) -> None:
        for one, sums in moments.items():
            each = []
            for name, weight, of_group in zip(one.labels(self.names[one.layer]), one.weights(), sums, strict=True):
                if not of_group.finite():
                    raise ValueError(
                        f"quantize_model: the input of {name!r} is not finite; leave out that batch, or run the model "
                        "in float32"
                    )
                if of_group.rows:
                    each.append(self._rounded(name, weight, of_group))
                else:
                    self.unseen.append(name)
                    each.append(quantize(weight.detach(), self.weight_spec, columnwise=False))
            keep(self.made, one, each)

    def _rounded(self, name: str, weight: torch.Tensor, moments: Moments) -> QuantizedTensor:
        """The weight by GPTQ. name: of its input, for errors."""
        try:
            return gptq(weight.detach(), moments, self.weight_spec, self.damping)
        except torch.linalg.LinAlgError as error:
            raise RuntimeError(
                f"quantize_model: the Gram matrix of the input of {name!r}, {counted(moments.rows, 'row')} of "
                f"{len(moments.gram)} values, cannot be factorized with damping={self.damping:g}; pass a larger "
                "damping, such as the default of 0.01, or more batches"
            ) from error

    def _adopt(self, stage: Iterable[Matmul], twins: dict[torch.nn.Module, torch.nn.Module]) -> None:
        """Gives the twins of matmuls their codes and the recipe; other matmuls of their layers keep their weights."""
        for one in stage:
            twin = Matmul(twins[one.layer], one.product)
            if type(twin.layer) is torch.nn.Linear:
                adopt([twin.layer], Plan(self.plan.recipe, False, None), {})
            twin.layer.recipe = self.plan.recipe
            twin.layer.add_input_scales()
            if one in self.scales:
                buffer(twin).copy_(self.scales[one])
            for name in one.weight_names():
                setattr(twin.layer, name, self.made[id(getattr(one.layer, name))])
            twin.layer._forget_weights()


def _inputs(wanted: Iterable[Matmul], call: Callable[[], object]) -> dict[Matmul, list[Rows]]:
    """What each of the matmuls is given in one call, which ends when all have run."""
    seen: dict[Matmul, list[Rows]] = {one: [] for one in wanted}
    waiting = set(seen)

    def see(matmul: Matmul, x: object, rows: Rows) -> None:
        if matmul not in seen:  # another one of the same layer
            return
        seen[matmul].append(rows)
        waiting.discard(matmul)
        if not waiting:
            raise Stop

    with watched({one.layer for one in seen}, see):
        try:
            call()
        except Stop:
            pass
    return seen


def _replace(flowing: torch.Tensor) -> Callable:
    def hook(block: torch.nn.Module, args: object, result: object) -> object:
        return (flowing, *result[1:]) if first_tensor(result) is not result else flowing

    return hook


def keep(made: dict[int, torch.nn.Parameter], one: Matmul, each: list[QuantizedTensor]) -> None:
    """Puts the quantized matrices of a matmul where quantize_for_inference finds them."""
    weights = [getattr(one.layer, name) for name in one.weight_names()]
    parts = each if weights[0].dim() == 2 else [QuantizedStack.of(each)]
    for weight, q in zip(weights, parts, strict=True):
        codes = inference_codes(q, q.spec_text)
        made.setdefault(id(weight), torch.nn.Parameter(codes, requires_grad=False))
