"""GPTQ of all matmuls of a model, in the order in which it runs them: the data of each come through the quantized
layers before it."""

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from quire.conversion.convert import Plan, adopt
from quire.conversion.inference import inference_codes
from quire.functional import quantize
from quire.quantization.chain import Chain, Stop, find_chain, first_tensor, run
from quire.quantization.gptq import Moments, gptq
from quire.quantization.inputs import Batch, Matmul, SameInput, matmuls, watched
from quire.quantization.static_scales import buffer
from quire.tensor import QuantizedStack, QuantizedTensor

#: Rows of x, for each weight of a matmul.
Rows = list[torch.Tensor]


@dataclass
class Gptq:
    """names: of the layers to quantize. scales: the static scales [groups] of each matmul's input, if the recipe has
    such. made: id of each weight -> its quantized parameter. unseen: names of layers and groups that no row reached;
    they are rounded to nearest."""

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
        """Of matmuls with the same input: one for all, unless they divide it into groups, or have scales of their
        own."""
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
        scale = self.scales[one][group : group + 1] if one in self.scales else None
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
                    each.append(gptq(weight.detach(), of_group, self.weight_spec, self.damping))
                else:
                    self.unseen.append(name)
                    each.append(quantize(weight.detach(), self.weight_spec, columnwise=False))
            keep(self.made, one, each)

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
