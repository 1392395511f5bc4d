"""What ranks exchange around a matmul y = x w^T of a layer: before it, after it, and of its amaxes."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from quire.distributed import check_ranks, one_process
from quire.distributed.check_ranks import Fields
from quire.distributed.data_parallel import Shards, plan_of, refuse_delayed, sharded_linear
from quire.distributed.groups import the_group
from quire.distributed.one_process import Whole
from quire.distributed.parallel import Parallel, refuse_quantized
from quire.functional import (
    grouped_linear,
    input_buffers,
    linear,
    linear_prequantized,
    name_next_caller,
    parallel_grouped_linear,
    parallel_linear,
    sum_gradient,
)
from quire.recipe.linear_spec import LinearSpec
from quire.tensor import QuantizedActivation, QuantizedTensor

#: What norm() returns, and a function that returns it.
OfTokensResult = tuple[torch.Tensor, Sequence[torch.Tensor]]
OfTokens = Callable[..., OfTokensResult]
#: y and the amaxes of x and w, as grouped_linear() returns them.
Results = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]
#: The state that linear() or linear_prequantized() takes. With any other, grouped_linear() is called.
_STATE_OF_LINEAR = {"x_buffers", "w_buffers", "w_fingerprint", "sr_state"}


class Matmul(Protocol):
    """What an exchange reads of a matmul in one call (quire.nn.product.Product)."""

    module: torch.nn.Module
    name: str
    call: Any  # quire.nn.product.Call, whose package imports this one
    specs: LinearSpec | None
    high_precision: str
    parameters: Sequence[torch.Tensor]
    weights: Sequence[torch.Tensor]
    input_scale: torch.Tensor | None
    needs_dw: bool

    def path(self) -> str:
        """Where the matmul is in the model, or ""."""


class Exchange:
    """That of a layer in one process, which exchanges nothing. The others:

    | exchange | a rank has | forward | backward |
    |---|---|---|---|
    | TensorParallel "column" | rows of w | gathers x if tokens are sharded | gathers x for dw likewise; sums dx |
    | TensorParallel "row" | columns of w | sums y | gathers dy if tokens are sharded |
    | Exact | as TensorParallel | gathers x, w and bias | gathers dy; cuts dx, dw and dbias |
    | ShardedRows | rows of w, and its own tokens | gathers w | gathers w for dx; averages dw |

    Where tokens are sharded, each sum is scattered over the tokens.
    """

    #: Whether x may be quantized before take(): by the caller, or by the norm or activation that computes it.
    takes_codes_of_x = True
    #: Whether the codes of w that a layer keeps can be used.
    takes_kept_codes = True
    #: Parallel, of layers whose weights are sharded for good.
    parallel: Parallel | None = None

    def check(self, matmul: Matmul) -> None:
        """Raises NotImplementedError for what the exchange does not do, whatever x is."""

    def take(self, matmul: Matmul, x: torch.Tensor) -> torch.Tensor:
        """The x that linear() multiplies. Raises NotImplementedError for an x that the exchange does not take, and
        RuntimeError where ranks are about to compute different things."""
        return x

    def linear(
        self,
        matmul: Matmul,
        x: torch.Tensor,
        weights: Sequence[torch.Tensor],
        biases: Sequence[torch.Tensor],
        *,
        recipe: str,
        offsets: torch.Tensor | None = None,
        **state: object,
    ) -> Results:
        """The matmul and its backward pass. recipe: the text of the specs, or matmul.high_precision. state: as for
        grouped_linear(); and input_scale, the scale of x if it does not follow from x, float32 [groups]."""
        bias, dtype = biases[0] if biases else None, matmul.call.dtype
        if not recipe and offsets is None and not state:
            return torch.nn.functional.linear(x, weights[0], bias), None, None
        scale, amax = state.pop("input_scale", None), None
        if scale is not None:
            state["x_buffers"] = input_buffers(x, matmul.specs.x, scale, offsets, matmul.needs_dw)
            amax = state["x_buffers"][2]
        if offsets is None and state.keys() <= _STATE_OF_LINEAR:
            operator = linear if state.keys() <= {"sr_state"} else linear_prequantized
            return operator(x, weights[0], bias, recipe, dtype, **state), amax, None
        y, x_amax, w_amax = grouped_linear(x, weights, biases, offsets, recipe, dtype=dtype, **state)
        return y, x_amax if amax is None else amax, w_amax

    def give(self, y: torch.Tensor) -> torch.Tensor:
        """This rank's part of the y of linear()."""
        return y

    def reduced(self, amax: torch.Tensor | None) -> torch.Tensor | None:
        """The amax of a whole tensor, of that of this rank's part."""
        return amax

    def of_tokens(self, function: OfTokens, x: torch.Tensor, *parameters: torch.Tensor | None) -> OfTokensResult:
        """A function of each token by itself, for x in front of the matmul and parameters that each rank has whole. It
        returns its result and buffers, which are returned as they are."""
        return function(x, *parameters)

    def returned_bias(self, bias: torch.Tensor) -> torch.Tensor:
        """The bias for callers, who add it to the tokens that y has."""
        return bias


ONE_PROCESS = Exchange()


class TensorParallel(Exchange):
    """Ranks have parts of w, and the same tokens, or with `sequence` some of the tokens each (Parallel). The operators
    exchange codes and reduce amaxes. part: parallel.place(), on the device of the layer."""

    takes_codes_of_x = False

    def __init__(self, parallel: Parallel, part: torch.Tensor) -> None:
        self.parallel, self.part = parallel, part

    def check(self, matmul: Matmul) -> None:
        _check_parallel(matmul, self.parallel)

    def take(self, matmul: Matmul, x: torch.Tensor) -> torch.Tensor:
        _check_plain(matmul, self.parallel, x)
        if not torch.compiler.is_compiling():
            name_next_caller(_announce(matmul, x, self.parallel))
        return x

    def linear(
        self,
        matmul: Matmul,
        x: torch.Tensor,
        weights: Sequence[torch.Tensor],
        biases: Sequence[torch.Tensor],
        *,
        recipe: str,
        offsets: torch.Tensor | None = None,
        **state: object,
    ) -> Results:
        how = {"parallel": self.parallel.text, "dtype": matmul.call.dtype}
        if offsets is not None:
            return parallel_grouped_linear(x, weights, biases, offsets, recipe, part=self.part, **how, **state)
        if "sr_state" in state:
            state["part"] = self.part
        return parallel_linear(x, weights[0], biases[0] if biases else None, recipe, **how, **state)

    def reduced(self, amax: torch.Tensor | None) -> torch.Tensor | None:
        return None if amax is None else self.parallel.reduced(amax)

    def of_tokens(self, function: OfTokens, x: torch.Tensor, *parameters: torch.Tensor | None) -> OfTokensResult:
        return function(x, *[None if parameter is None else self._shared(parameter) for parameter in parameters])

    def returned_bias(self, bias: torch.Tensor) -> torch.Tensor:
        return self._shared(bias) if self.parallel.mode == "row" else bias

    def _shared(self, parameter: torch.Tensor) -> torch.Tensor:
        """A parameter that each rank has whole and uses for its own tokens: gradients are summed over the ranks."""
        own_tokens = self.parallel.sequence and self.parallel.reduce_gradients
        return sum_gradient(parameter, self.parallel.text) if own_tokens else parameter


class Exact(TensorParallel):
    """That within quire.distributed.exact(): every rank computes the whole."""

    takes_kept_codes = False

    def __init__(self, parallel: Parallel, part: torch.Tensor) -> None:
        super().__init__(parallel, part)
        self.whole = Whole(parallel, part)

    def check(self, matmul: Matmul) -> None:
        what = f"quire.{type(matmul.module).__name__}, within quire.distributed.exact()"
        if matmul.module.external_wgrad and matmul.needs_dw:
            raise NotImplementedError(
                f"{what}: fuse_wgrad_accumulation and delay_wgrad_compute are not available; make the layer without "
                "them"
            )
        if isinstance(matmul.weights[0], QuantizedTensor):
            refuse_quantized(what, self.parallel.text)
        _check_parallel(matmul, self.parallel)

    def take(self, matmul: Matmul, x: torch.Tensor) -> torch.Tensor:
        _check_plain(matmul, self.parallel, x)
        if not torch.compiler.is_compiling():
            _announce(matmul, x, self.parallel)
        return self.whole.x(x)

    def linear(
        self,
        matmul: Matmul,
        x: torch.Tensor,
        weights: Sequence[torch.Tensor],
        biases: Sequence[torch.Tensor],
        **how: object,
    ) -> Results:
        weights, biases = [self.whole.weight(w) for w in weights], [self.whole.bias(bias) for bias in biases]
        return Exchange.linear(self, matmul, x, weights, biases, **how)

    def give(self, y: torch.Tensor) -> torch.Tensor:
        return self.whole.y(y)

    def of_tokens(self, function: OfTokens, x: torch.Tensor, *parameters: torch.Tensor | None) -> OfTokensResult:
        y, buffers = function(self.whole.tokens(x), *parameters)
        return self.whole.own_tokens(y), buffers


class ShardedRows(Exchange):
    """Ranks have rows of w and their own tokens: w comes together in each pass (quire.distributed.shard_weights)."""

    takes_codes_of_x = takes_kept_codes = False

    def __init__(self, shards: Shards) -> None:
        self.shards = shards

    def check(self, matmul: Matmul) -> None:
        what = f"quire.{type(matmul.module).__name__}"
        if matmul.call.rule is not None or (matmul.call.recipe is not None and matmul.call.recipe.delayed()):
            refuse_delayed(what)
        if matmul.call.is_first_microbatch is not None:
            raise NotImplementedError(
                f"{what}: its weight is sharded by shard_weights, and codes are not kept from call to call; leave "
                "is_first_microbatch out"
            )
        if matmul.module.external_wgrad and matmul.needs_dw:
            raise NotImplementedError(
                f"{what}: its weight is sharded by shard_weights, which reduces the gradient; leave "
                "fuse_wgrad_accumulation and delay_wgrad_compute False"
            )

    def take(self, matmul: Matmul, x: torch.Tensor) -> torch.Tensor:
        what = f"quire.{type(matmul.module).__name__}"
        if isinstance(x, QuantizedTensor | QuantizedActivation):
            raise NotImplementedError(
                f"{what}: its weight is sharded by shard_weights, and x must be a plain tensor, got a "
                f"{type(x).__name__}; pass x.dequantize()"
            )
        if not torch.compiler.is_compiling():
            _agree_on_shards(matmul, self.shards)
        return x

    def linear(
        self,
        matmul: Matmul,
        x: torch.Tensor,
        weights: Sequence[torch.Tensor],
        biases: Sequence[torch.Tensor],
        *,
        recipe: str,
        **state: object,
    ) -> Results:
        plan = plan_of(matmul.specs, weights[0].shape[0], matmul.call.dtype, self.shards)
        if matmul.specs is None:
            plan = plan._replace(text=recipe)
        return sharded_linear(x, weights[0], biases[0] if biases else None, plan, **state), None, None


def exchange_of(module: torch.nn.Module, product: str, sequence: bool | None) -> Exchange:
    """The exchange of a matmul in this call. sequence: whether tokens are sharded, None for what the layer says. Raises
    RuntimeError if the layer waits for its group."""
    parallel, name = module.of(product, "parallel"), f"{product}_weight" if product else "weight"
    if parallel is not None:
        if not parallel.group:
            parallel.check_group()
        parallel, part = parallel.for_tokens(sequence), module.of(product, "part")
        return Exact(parallel, part) if one_process.enabled() else TensorParallel(parallel, part)
    shards = None if module.shards is None else module.shards.get(name)
    return ONE_PROCESS if shards is None else ShardedRows(shards)


# ------------------------------------------------------------ what ranks refuse, and say to one another


def _check_plain(matmul: Matmul, parallel: Parallel, x: torch.Tensor | QuantizedActivation) -> None:
    if isinstance(x, QuantizedTensor | QuantizedActivation):
        raise NotImplementedError(
            f"quire.{type(matmul.module).__name__}, {parallel.text}: x must be a plain tensor, got a "
            f"{type(x).__name__}; pass x.dequantize()"
        )


def _check_parallel(matmul: Matmul, parallel: Parallel) -> None:
    """Raises NotImplementedError for what a layer whose weights are sharded for good does not do."""
    layer = f"quire.{type(matmul.module).__name__}"
    delayed = () if matmul.call.recipe is None else matmul.call.recipe.delayed_operands
    if 0 < len(delayed) < 3:
        raise NotImplementedError(
            f"{layer}: delayed scaling of {' and '.join(delayed)} alone does not go with weights that "
            "are sharded over ranks; give all operands of the matmul delayed scaling, or none"
        )
    if isinstance(matmul.weights[0], QuantizedTensor):
        refuse_quantized(layer, parallel.text)
    if matmul.call.output_spec:
        raise NotImplementedError(
            f"{layer}, {parallel.text}: results are not quantized; leave fp8_output and output_spec out"
        )


def _announce(matmul: Matmul, x: torch.Tensor, parallel: Parallel) -> str:
    """Which layer calls collectives, for their errors. Says to the other ranks what is to be computed: with
    QUIRE_CHECK_RANKS=1 all of it in each call, and otherwise what sizes follow from, where it has changed."""
    layer, weight = _named(matmul), matmul.weights[0]
    caller = parallel.caller(layer)

    def said() -> tuple[str, Fields]:
        fields: Fields = {"layer": layer, "sharded as": parallel.text, "tokens": x.shape[:-1].numel()}
        fields |= {"x": f"{x.dtype} [*, {x.shape[-1]}]", "weight": f"{weight.dtype} {list(weight.shape)}"}
        return caller, fields | check_ranks.fields_of_recipe(matmul.specs, matmul.high_precision)

    if not check_ranks.enabled():
        recipe = matmul.high_precision or "none" if matmul.specs is None else matmul.specs.text
        parallel.agree(matmul.module, matmul.name, (x, weight, recipe), said)
        return caller
    fields = said()[1] | {"x": f"{x.dtype} {list(x.shape)}"}
    if matmul.input_scale is not None:
        fields["input_scale"] = str(matmul.input_scale.tolist())
    fields["gradient"] = "yes" if torch.is_grad_enabled() else "no"
    parallel.check_ranks(caller, fields | check_ranks.drawn(next(iter(matmul.parameters.values()))))
    return caller


def _agree_on_shards(matmul: Matmul, shards: Shards) -> None:
    """Raises RuntimeError if the ranks would gather parts of different sizes of a weight of shard_weights."""
    layer, weight = _named(matmul), matmul.weights[0]

    def said() -> tuple[str, Fields]:
        fields: Fields = {"layer": layer, "shard of the weight": f"{weight.dtype} {list(weight.shape)}"}
        return layer, fields | check_ranks.fields_of_recipe(matmul.specs, matmul.high_precision)

    sizes = (weight.dtype, weight.shape, matmul.specs, matmul.high_precision)
    check_ranks.agree(matmul.module, matmul.name, sizes, said, the_group(shards.group), device=weight.device)


def _named(matmul: Matmul) -> str:
    path, layer = matmul.path(), f"quire.{type(matmul.module).__name__}"
    return f"{layer} {path!r}" if path else layer
