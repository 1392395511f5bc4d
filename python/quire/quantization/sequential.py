"""GPTQ of all layers of a model, in the order in which it calls them: the data of each layer come through the quantized
layers before it."""

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from quire.conversion.convert import Plan, adopt
from quire.conversion.inference import inference_codes
from quire.functional import quantize
from quire.nn.grouped_linear import GroupedLinear
from quire.nn.product_module import ProductModule
from quire.quantization.chain import Chain, Stop, find_chain, first_tensor, run
from quire.quantization.gptq import Moments, gptq
from quire.quantization.inputs import Batch, SameInput, measured, watched
from quire.tensor import QuantizedStack, QuantizedTensor

#: Rows of x, for each weight of a layer.
Rows = list[torch.Tensor]


@dataclass
class Gptq:
    """names: of the layers to quantize. made: id of each weight -> its quantized parameter. unseen: names of layers and
    groups that no row reached; they are rounded to nearest."""

    model: torch.nn.Module
    names: dict[torch.nn.Module, str]
    plan: Plan
    damping: float

    def __post_init__(self) -> None:
        self.made: dict[int, torch.nn.Parameter] = {}
        self.unseen: list[str] = []
        recipe = self.plan.recipe
        self.input_spec = None if recipe.weight_only else measured(recipe.input_spec)
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
        with same.watched(layers):
            calls[0].run(block, given[0])
        stages = same.groups()
        for stage in stages:
            moments = self._shared_moments(stage)
            for call, x in zip(calls, given, strict=True):
                seen = _inputs([twins[layer] for layer in stage], lambda: call.run(twin, x))  # noqa: B023 (at once)
                self._add(moments, {layer: seen.get(twins[layer], []) for layer in stage})
            self._finish(moments)
            self._adopt(stage, twins)
        missed = [layer for layer in layers if layer not in {layer for stage in stages for layer in stage}]
        self._finish({layer: self._moments(layer) for layer in missed})
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
        moments = {layer: self._moments(layer) for layer in layers}
        for number, batch in enumerate(batches):
            replaced = None if last is None else last.register_forward_hook(_replace(given[number]))
            try:
                self._add(moments, _inputs(layers, lambda: run(self.model, batch)))  # noqa: B023
            finally:
                if replaced is not None:
                    replaced.remove()
        self._finish(moments)

    def _shared_moments(self, stage: list[torch.nn.Module]) -> dict[torch.nn.Module, list[Moments]]:
        """Of layers with the same input: one for all, unless they divide it into groups."""
        first = self._moments(stage[0])
        return {layer: first if len(first) == 1 else self._moments(layer) for layer in stage}

    def _moments(self, layer: torch.nn.Module) -> list[Moments]:
        weights = group_weights(layer)
        return [Moments.zeros(weight.shape[1], weight.device) for weight in weights]

    def _add(self, moments: dict[torch.nn.Module, list[Moments]], inputs: dict[torch.nn.Module, list[Rows]]) -> None:
        for layer, sums in {id(sums): (layer, sums) for layer, sums in moments.items()}.values():
            for groups in inputs.get(layer, []):
                for one, x in zip(sums, groups, strict=True):
                    if len(x):
                        one.add(self._as_multiplied(x))

    def _as_multiplied(self, x: torch.Tensor) -> torch.Tensor:
        """x as the layer's matmul has it, in float32."""
        return x.float() if self.input_spec is None else quantize(x, self.input_spec).dequantize(torch.float32)

    def _finish(self, moments: dict[torch.nn.Module, list[Moments]]) -> None:
        for layer, sums in moments.items():
            each = []
            for group, (weight, one) in enumerate(zip(group_weights(layer), sums, strict=True)):
                name = f"{self.names[layer]}[{group}]" if isinstance(layer, GroupedLinear) else self.names[layer]
                if not one.finite():
                    raise ValueError(
                        f"quantize_model: the input of {name!r} is not finite; leave out that batch, or run the model "
                        "in float32"
                    )
                if one.rows:
                    each.append(gptq(weight.detach(), one, self.weight_spec, self.damping))
                else:
                    self.unseen.append(name)
                    each.append(quantize(weight.detach(), self.weight_spec, columnwise=False))
            keep(self.made, layer, each)

    def _adopt(self, layers: Iterable[torch.nn.Module], twins: dict[torch.nn.Module, torch.nn.Module]) -> None:
        made = {}
        for layer in layers:
            for name in weight_names(layer):
                made[id(getattr(twins[layer], name))] = self.made[id(getattr(layer, name))]
        adopt([twins[layer] for layer in layers], self.plan, made)


def _inputs(layers: Iterable[torch.nn.Module], call: Callable[[], object]) -> dict[torch.nn.Module, list[Rows]]:
    """What each of the layers is given in one call, which ends when all have been called."""
    seen: dict[torch.nn.Module, list[Rows]] = {}
    waiting = set(layers)

    def see(layer: torch.nn.Module, rows: Rows) -> None:
        seen.setdefault(layer, []).append(rows)
        waiting.discard(layer)
        if not waiting:
            raise Stop

    with watched(layers, see):
        try:
            call()
        except Stop:
            pass
    return seen


def _replace(flowing: torch.Tensor) -> Callable:
    def hook(block: torch.nn.Module, args: object, result: object) -> object:
        return (flowing, *result[1:]) if first_tensor(result) is not result else flowing

    return hook


def weight_names(layer: torch.nn.Module) -> tuple[str, ...]:
    return layer.weight_names if isinstance(layer, ProductModule) else ("weight",)


def group_weights(layer: torch.nn.Module) -> list[torch.Tensor]:
    """The matrices [N, K] of a layer: one, or one for each group."""
    weights = [getattr(layer, name) for name in weight_names(layer)]
    return weights if weights[0].dim() == 2 else list(weights[0].unbind())


def keep(made: dict[int, torch.nn.Parameter], layer: torch.nn.Module, each: list[QuantizedTensor]) -> None:
    """Puts the quantized matrices of a layer where quantize_for_inference finds them."""
    weights = [getattr(layer, name) for name in weight_names(layer)]
    parts = each if weights[0].dim() == 2 else [QuantizedStack.of(each)]
    for weight, q in zip(weights, parts, strict=True):
        codes = inference_codes(q, q.spec_text)
        made.setdefault(id(weight), torch.nn.Parameter(codes, requires_grad=False))
