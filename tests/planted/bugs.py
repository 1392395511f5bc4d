"""The bugs that tools/planted_bugs.py plants: each breaks one sentence of the contract, and the tests have to notice.

A bug is planted from outside of what it breaks, by the name that callers use or in the tables of kernels and operators.
So it stays when the code behind them is written anew. tests/planted/README.md says how."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import distributed

import quire
from planted.plant import Bug, Kernel, Name, Operator


def with_arguments(**changed: Callable[[Any], Any]) -> Callable[..., Any]:
    """Calls the original with other values of some keywords."""

    def call(original: Callable[..., Any], *args: Any, **options: Any) -> Any:
        return original(*args, **options | {name: new(options.get(name)) for name, new in changed.items()})

    return call


def without_transform_of_x(original: Callable[..., Any], recipe: Any) -> Any:
    specs = original(recipe)
    return replace(specs, x=specs.x.replace(":rht", ""))


def enters_with_gradients(original: Callable[..., Any], *args: Any) -> Any:
    with torch.enable_grad():
        return original(*args)


def restores_only_the_seed(original: Callable[..., Any], model: Any, state: Any) -> None:
    original(model, {name: value * torch.tensor([1, 0]) for name, value in state.items()})


def converts_replaced_forwards(original: Callable[..., Any], model: torch.nn.Module, *args: Any, **options: Any) -> Any:
    for layer in model.modules():
        vars(layer).pop("forward", None)
    return original(model, *args, **options)


def says_that_gradients_were_added(original: Callable[..., Any], layer: Any, *args: Any, **options: Any) -> Any:
    layer.weight.grad_added_to_main_grad = True
    return original(layer, *args, **options)


def writes_reciprocal_scales(original: Callable[..., Any], *args: Any) -> dict[str, torch.Tensor]:
    tensors = original(*args)
    return {name: 1 / t if "scale" in name and t.dtype == torch.float32 else t for name, t in tensors.items()}


def one_more_row(original: Callable[..., Any], *args: Any) -> Any:
    data, *others = original(*args)
    return [data.new_empty((data.shape[0] + 1, *data.shape[1:])), *others]


def own_part(original: Callable[..., Any], t: torch.Tensor, reduction: str, size: int, group: str) -> torch.Tensor:
    return t.chunk(size)[distributed.get_rank()].clone()


def unreduced(operation: str) -> Callable[..., Any]:
    """all_reduce() of that name returns what this rank has."""

    def call(original: Callable[..., Any], t: torch.Tensor, reduction: str, group: str) -> torch.Tensor:
        return t.clone() if reduction == operation else original(t, reduction, group)

    return call


def no_largest(original: Callable[..., Any], t: torch.Tensor, op: Any = None, *args: Any, **options: Any) -> Any:
    return None if op == distributed.ReduceOp.MAX else original(t, op, *args, **options)


def in_reverse_order(original: Callable[..., Any], t: torch.Tensor, size: int, group: str) -> torch.Tensor:
    gathered = torch.ops._c10d_functional.wait_tensor(original(t, size, group))
    return torch.cat(gathered.chunk(size)[::-1])


def rounded(original: Callable[..., Any], t: torch.Tensor, *args: Any) -> torch.Tensor:
    return original(t.bfloat16().float() if t.dtype == torch.float32 else t, *args)


def leaves_the_first_codes(original: Callable[..., Any], *args: Any, out: Any = None, **options: Any) -> Any:
    return original(*args, **options) if out is None else None


QUANTIZE, LINEAR = "golden/test_quantize.py", "golden/test_linear.py -k 'not compiled'"

BUGS = [
    # Quantized tensors
    Bug("the amax of a tensor leaves out its last row", "numerics.md 2.1", Kernel("amax_without_last_row"), QUANTIZE),
    Bug("E8M0 scales round down", "numerics.md 1.3", Kernel("stores_lower_e8m0"), QUANTIZE),
    Bug("the Hadamard transform has no signs", "numerics.md 5.3", Kernel("hadamard_without_signs"), QUANTIZE),
    Bug("swizzled scales lie at each other's places", "numerics.md 4.5", Kernel("swaps_swizzled_scales"), QUANTIZE),
    Bug("the padding nibble of a line is not zero", "numerics.md 0.12", Kernel("sets_padding"), QUANTIZE),
    Bug(
        "NaN and Inf get lost in codes", "numerics.md 1.9", Kernel("forgets_nan"), "recipe/test_not_finite.py -k input"
    ),
    Bug(
        "a static scale is not used",
        "numerics.md 2.5",
        Kernel("ignores_static_scale"),
        "nn/test_static_input.py -k own_scale",
    ),
    Bug(
        "a scale that is no positive number is taken",
        "numerics.md 2.5",
        Kernel("accepts_any_value"),
        "nn/test_static_input.py -k refused",
    ),
    Bug(
        "a write to a tensor takes another scale than the given one",
        "numerics.md 2.5",
        Name("quire:QuantizedTensor.store", with_arguments(scale=lambda scale: None)),
        "tensor/test_writes.py -k another_scale",
    ),
    # Stochastic rounding
    Bug(
        "both directions of a gradient draw the same bits",
        "numerics.md 0.11",
        Kernel("one_offset_for_both_directions"),
        "nn/test_random.py -k two_directions",
    ),
    Bug(
        "the counter of a layer stands still",
        "numerics.md 0.11",
        Kernel("does_not_count"),
        "nn/test_random.py -k counter",
    ),
    Bug(
        "a random state is restored without its counter",
        "train-and-resume.md Resume",
        Name("quire:set_rng_state", restores_only_the_seed),
        "nn/test_random.py -k continued",
    ),
    Bug(
        "converted layers round by whatever their memory holds",
        "numerics.md 0.11",
        Name("quire.nn.random_state:reset_streams", lambda original, states, ranks: None),
        "conversion/test_convert.py -k seed_of_its_own",
    ),
    # Products
    Bug("a product leaves out the bias", "numerics.md 7.4", Kernel("leaves_out_bias"), LINEAR),
    Bug("a product leaves out the last output", "numerics.md 6.11", Kernel("leaves_out_last_column"), LINEAR),
    Bug(
        "a gradient replaces the sum in main_grad",
        "numerics.md 7.4",
        Kernel("leaves_out_addend"),
        "nn/test_linear_options.py -k 'main_grad and autograd'",
    ),
    Bug(
        "the gradient of a bias leaves out the last token",
        "numerics.md 6.6",
        Kernel("sum_without_last_row"),
        "nn/test_linear_gradients.py -k bias_gradient",
    ),
    Bug(
        "a token has other bits among other tokens",
        "numerics.md 7.8",
        Kernel("depends_on_other_rows"),
        "test_batch_invariant.py -k every_layer",
    ),
    Bug(
        "the first group ends a token early",
        "numerics.md 6.13",
        Kernel("ends_first_group_early"),
        "nn/test_grouped_linear.py -k 'groups_are_linears and not override'",
    ),
    Bug(
        "rows of no group are not zero",
        "numerics.md 0.19",
        Kernel("writes_rows_of_no_group"),
        "nn/test_grouped_linear.py -k beyond",
    ),
    Bug(
        "the gradient of a norm forgets zero_centered_gamma",
        "numerics.md 11.2",
        Kernel("forgets_zero_centered"),
        "nn/test_norm.py -k float64",
    ),
    Bug(
        "codes of a weight that has changed are used",
        "quire_torch/ops/README.md",
        Kernel("accepts_stale_codes"),
        "nn/test_weight_cache.py -k stale",
    ),
    # Recipes
    Bug(
        "x of NVFP4 is not transformed",
        "numerics.md 6.4",
        Name("quire.recipe:NVFP4BlockScaling._specs", without_transform_of_x),
        "recipe/test_recipe.py -k has_this_text",
    ),
    Bug(
        "dx is never rounded",
        "numerics.md 6.8",
        Name("quire.recipe:Recipe.specs_for", with_arguments(fp8_grad=lambda wanted: False)),
        "nn/test_linear_options.py -k fp8_grad",
    ),
    Bug(
        "a disabled autocast does not switch off a layer's own recipe",
        "quire.autocast",
        Name("quire.autocast:active_in", lambda original, layer: (original(layer)[0] or layer.own_recipe, None)),
        "nn/test_own_recipe.py",
    ),
    # Delayed scaling
    Bug(
        "x is quantized by the scale of w",
        "numerics.md 1.5",
        Kernel("scale_of_another_operand"),
        "delayed/test_scales.py -k ordinary",
    ),
    Bug(
        "amaxes of earlier microbatches are forgotten",
        "numerics.md 1.5",
        Kernel("forgets_earlier_amaxes"),
        "delayed/test_operators.py -k collected",
    ),
    Bug(
        "the oldest amax of a history does not count",
        "numerics.md 1.6",
        Kernel("forgets_oldest_amax"),
        "delayed/test_operators.py -k golden",
    ),
    Bug(
        "inference ends a step",
        "numerics.md 1.7",
        Name("quire:autocast.__enter__", enters_with_gradients),
        "delayed/test_scales.py -k without_grad",
    ),
    # Mixtures of experts
    Bug(
        "equal scores go to the larger number",
        "moe-reference.md 1",
        Kernel("swaps_equal_scores"),
        "moe/test_routing.py -k equal_scores",
    ),
    Bug(
        "a dropped choice keeps its weight",
        "moe-reference.md 1",
        Name("quire.moe:limit_capacity", lambda original, weights, *args: (weights, original(weights, *args)[1])),
        "moe/test_routing.py -k dropped",
    ),
    # Models, graphs, files
    Bug(
        "a replaced forward is converted",
        "quire.convert",
        Name("quire:convert", converts_replaced_forwards),
        "conversion/test_convert.py -k left_alone",
    ),
    Bug(
        "copies of a layer share its operands",
        "quire.Linear",
        Name("quire.nn.product_module:ProductModule.__setstate__", lambda _, self, state: vars(self).update(state)),
        "nn/test_linear_options.py -k copies",
    ),
    Bug(
        "a refused call has changed the weight's state",
        "design.md 5",
        Name("quire:Linear.forward", says_that_gradients_were_added),
        "nn/test_refused_calls.py -k 'refused_call and not compiled'",
    ),
    Bug(
        "tracing sees codes of another shape",
        "design.md 1",
        Operator("quire::quantize", "Meta", one_more_row),
        "../quire_torch/test_opcheck.py -k quantize_and",
    ),
    Bug(
        "a checkpoint has the reciprocals of its scales",
        "checkpoints.md Dialects",
        Name("quire.io.dialect:LayoutDialect.write", writes_reciprocal_scales),
        "io/test_round_trip.py -k same_bytes",
    ),
    # Ranks
    Bug(
        "amaxes of a sharded tensor are not reduced",
        "distributed-reference.md",
        Operator("_c10d_functional::all_reduce", "CPU", unreduced("max")),
        "distributed/test_linear.py -k 'fp8_current and results'",
    ),
    Bug(
        "results of ranks are not summed",
        "numerics.md 6.10",
        Operator("_c10d_functional::all_reduce", "CPU", unreduced("sum")),
        "distributed/test_linear.py -k 'mxfp8 and results'",
    ),
    Bug(
        "a sum over sharded tokens has one rank's part",
        "numerics.md 6.10",
        Operator("_c10d_functional::reduce_scatter_tensor", "CPU", own_part),
        "distributed/test_linear.py -k 'mxfp8 and results'",
    ),
    Bug(
        "gathered tokens are in another order",
        "distributed-reference.md",
        Operator("_c10d_functional::all_gather_into_tensor", "CPU", in_reverse_order),
        "distributed/test_linear.py -k 'mxfp8 and results'",
    ),
    Bug(
        "results of ranks are rounded before they are added in float32",
        "numerics.md 6.10",
        Operator("_c10d_functional::all_to_all_single", "CPU", rounded),
        "distributed/test_reduce.py -k 'results_of_ranks_are and not graph'",
    ),
    Bug(
        "a piece of a ring is this rank's own",
        "distributed-reference.md Exchange in pieces",
        Operator("_c10d_functional::broadcast", "CPU", lambda original, t, source, group: t.clone()),
        "distributed/test_ring.py -k 'one_exchange and mxfp8'",
    ),
    Bug(
        "each part of a gradient draws the bits of the first",
        "numerics.md 0.11",
        Kernel("draws_as_first_part"),
        "distributed/test_linear.py -k 'nvfp4 and results'",
    ),
    Bug(
        "ranks have their own scales of delayed scaling",
        "numerics.md 1.6",
        Name("torch.distributed:all_reduce", no_largest),
        "delayed/test_distributed.py",
    ),
    Bug(
        "what ranks are about to compute is not compared",
        "distributed.md Which rank is it?",
        Name("quire.distributed.check_ranks:check_ranks", lambda original, *args: None),
        "distributed/test_failing_ranks.py -k told_apart_before",
    ),
    Bug(
        "rows stay in the order in which ranks sent them",
        "distributed.md Experts on many ranks",
        Kernel("ignores_order_of_chunks"),
        "distributed/test_expert_parallel.py -k arrive",
    ),
    Bug(
        "a gather leaves the codes of the first one",
        "distributed.md gather_codes",
        Name("quire.distributed.fully_sharded:MasterShard.fsdp_post_all_gather", leaves_the_first_codes),
        "distributed/test_sharded_weights.py -k 'bits_that_values_give and mxfp8 and not options'",
    ),
    Bug(
        "a training state has the seeds of whichever rank saved it",
        "distributed.md Checkpoints",
        Name("quire.nn.random_state:seeds_of_rank_0", lambda original, model: quire.rng_state(model)),
        "distributed/test_training_state.py -k 'same_bits and DistributedDataParallel-nvfp4'",
    ),
    Bug(
        "a training state has each shard at the place of the first",
        "distributed.md Checkpoints",
        Name("quire.distributed:Parallel.index", lambda original, parallel: 0),
        "distributed/test_training_state.py -k 'save_one and parallel'",
    ),
]
