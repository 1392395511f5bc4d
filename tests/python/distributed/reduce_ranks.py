"""Sums over processes that follow Parallel.reduce, for functions that tests/ranks.py runs. What each process adds is
computed without a group."""

import contextlib
from dataclasses import dataclass

import torch
from torch import distributed

import quire
from python.distributed.parallel_layers import IN as LAYERS_IN
from python.distributed.parallel_layers import KINDS, chunk, compiled
from python.distributed.sums import assert_same_sums
from quire.distributed import Parallel

IN, OUT = 64, 96


@dataclass(frozen=True)
class Case:
    """mode: "row" sums y, "column" the gradient of x. tokens: sizes of x before its features, in one process."""

    mode: str
    reduce: str
    sequence: bool
    tokens: tuple[int, ...]
    dtype: torch.dtype
    recipe: str | None = "mxfp8"
    bias: bool = True
    compile: bool = False


def sum_in_order(partial, case):
    """[T, *, N] of each process, summed in float32 in the order of ranks: of all tokens."""
    all_of_them = [torch.empty_like(partial) for _ in range(distributed.get_world_size())]
    distributed.all_gather(all_of_them, partial.contiguous())
    total = 0
    for one in all_of_them:
        rows = one.reshape(-1, one.shape[-1]).float()
        each = -(-len(rows) // len(all_of_them))
        if case.reduce != "float32":  # each process gets rows of its own
            parts = [quire.quantize(part, case.reduce).dequantize() for part in rows.split(max(each, 1))]
            rows = torch.cat(parts).float()
        total = total + rows
    return total.view(partial.shape)


def layers(case):
    """The sharded layer, and the same part of the weight without a group, in float32 where the recipe makes codes."""
    parallel = Parallel(case.mode, distributed.group.WORLD, case.sequence, reduce=case.reduce)
    torch.manual_seed(0)
    sharded = quire.Linear(IN, OUT, bias=case.bias, params_dtype=case.dtype, parallel=parallel)
    out, inner = sharded.weight.shape
    partial_dtype = case.dtype if case.recipe is None else torch.float32
    own = quire.Linear(inner, out, bias=False, params_dtype=partial_dtype)
    with torch.no_grad():
        own.weight.copy_(sharded.weight)
    return sharded, own


def adds_float32_in_the_order_of_ranks(rank, case):
    sharded, own = layers(case)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(*case.tokens, IN, generator=generator).to(case.dtype)
    dy = torch.randn(*case.tokens, OUT, generator=generator).to(case.dtype)
    row = case.mode == "row"
    if row:
        own_x, own_dy = chunk(x, -1), chunk(dy, 0) if case.sequence else dy
    else:
        own_x, own_dy = chunk(x, 0) if case.sequence else x, chunk(dy, -1)
    own_x = own_x.clone().requires_grad_()
    recipe = case.recipe
    with quire.autocast(enabled=recipe is not None, recipe=recipe or "mxfp8"):
        y = (compiled(sharded) if case.compile else sharded)(own_x)
        y.backward(own_dy)
        whole = (own_x if row else x).detach().to(own.weight.dtype).requires_grad_()
        own_y = own(whole)
        own_y.backward((dy if row else own_dy).to(own_y.dtype))
    found, partial = (y, own_y.detach()) if row else (own_x.grad, whole.grad)
    expected = sum_in_order(partial, case)
    if row and case.bias:
        expected = expected + sharded.bias.detach()
    expected = expected.to(case.dtype)
    expected = chunk(expected, 0) if case.sequence else expected
    assert found.dtype == expected.dtype and found.shape == expected.shape, case
    assert torch.equal(found, expected), f"{case}: {(found - expected).abs().max()}"


def refuses_what_is_no_spec(rank):
    for reduce, text in (
        ("float16", "unknown family"),
        ("nvfp4:sr", "without stochastic rounding"),
        ("a,b", "reduce=SPEC"),
    ):
        try:
            Parallel("row", distributed.group.WORLD, reduce=reduce)
        except ValueError as error:
            assert text in str(error) and "reduce must be '', 'float32' or a spec" in str(error), str(error)
        else:
            raise AssertionError(f"took reduce={reduce!r}")


def leaves_sums_of_gradients_to_others(rank, kind, mode, recipe, tokens):
    """Gradients of parameters that every process has: each process gets a part, whose sum is what the layer gives."""
    found = []
    for reduces in (True, False):
        parallel = Parallel(mode, distributed.group.WORLD, sequence=True, reduce_gradients=reduces)
        torch.manual_seed(0)
        layer = KINDS[kind](parallel=parallel)
        x = torch.randn(tokens, layer.weight.shape[1] if kind == "Linear" else LAYERS_IN, generator=_generator(rank))
        if mode == "row":
            x = torch.cat([x, x])
        with quire.autocast(enabled=recipe is not None, recipe=recipe or "mxfp8"):
            y = layer(x)
            y.backward(torch.randn(y.shape, generator=_generator(rank)))
        names = (
            ["bias"] if mode == "row" else [n for n, _ in layer.named_parameters() if "norm" in n or n == "fc2_bias"]
        )
        found.append([layer.get_parameter(name).grad for name in names])
    for whole, part in zip(*found, strict=True):
        assert not torch.equal(whole, part)
        distributed.all_reduce(part)
        assert_same_sums(part, whole, 2 * tokens)


def sums_the_gradient_of_a_returned_bias(rank, kind, reduces, way):
    """Callers add the bias to the tokens of their process: its gradient is that of all tokens, or of theirs alone."""
    mode, name = ("row", "bias") if kind == "Linear" else ("column", "fc2_bias")
    parallel = Parallel(mode, distributed.group.WORLD, sequence=True, reduce_gradients=reduces)
    layer = KINDS[kind](parallel=parallel, return_bias=True)
    dy = torch.randint(-8, 8, (12, LAYERS_IN), generator=_generator(0)).float()
    own = chunk(dy, 0)
    x = torch.randn(12 if mode == "row" else len(own), layer.get_parameter(layer.weight_names[0]).shape[1])
    run = {"eager": layer, "compiled": compiled(layer)}.get(way, layer)
    with quire.distributed.exact() if way == "exact" else contextlib.nullcontext():
        y, bias = run(x)
        assert torch.equal(bias, layer.get_parameter(name))
        (y + bias).backward(own)
    assert torch.equal(layer.get_parameter(name).grad, (dy if reduces else own).sum(0))


def _generator(rank):
    return torch.Generator().manual_seed(rank)
