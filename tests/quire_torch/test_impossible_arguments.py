"""Sizes that no memory has, also beside sizes of 0; negative ones; and numbers that are no dtype: every operator that
takes one refuses it with its own name, or has a result that exists."""

import json

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.utils._pytree import tree_map_only

import quire  # noqa: F401  (registers the operators)
from forks import in_child

pytestmark = pytest.mark.any_device

ops = torch.ops.quire

NEGATIVE = (-1, -7, -(2**62), -(2**63))
HUGE = (2**31, 2**32 + 3, 2**40, 2**56 + 1, 2**58 + 1, 2**60, 2**62, (2**64 + 2) // 3, 2**63 - 1)
NO_DTYPE = 47 if hasattr(torch, "bcomplex32") else 46  # the first number after those of dtypes
NO_DTYPES = (-1, -128, NO_DTYPE, NO_DTYPE + 1, 100, 127, 128, 255, 256, 256 + 6, 2**31, 2**32 + 6, 2**62, -(2**63))

E, U = torch.empty(0), torch.empty(0, dtype=torch.uint8)
RECIPE = "x=mxfp8,w=mxfp8,dy=mxfp8"
F32 = torch.float32


def integers(*sizes):
    return torch.zeros(sizes, dtype=torch.int32)


def codes(*sizes, **directions):
    """The six buffers of a tensor; those of a direction that is not wanted are absent."""
    given = {"rowwise": True, "columnwise": True} | directions
    return list(ops.quantize(torch.zeros(sizes), "mxfp8", *given.values()))


def calls():
    """Right calls of every operator with a number that is a size, or a dtype; most of tensors without elements."""
    dy, x, w = codes(6, 0), codes(6, 0), [*codes(0, 0)]
    wide = torch.zeros(6, 0)
    return {
        "activation": (wide, "swiglu", F32, "mxfp8", True, True, True, None, None),
        "activation_fwd": (wide, "gelu", F32, "", False, False, False, None, None),
        "chunk_rows": (torch.zeros(0, dtype=torch.int64), None, 2**31 - 1, 0),
        "debug_unswizzle": (torch.zeros(128, 4, dtype=torch.uint8), 6, 3),
        "dequantize": (*dy[:3], "mxfp8", False, [6, 0], F32),
        "grouped_dequantize": (U, U, E, torch.tensor([3, 6]), "mxfp8", [6, 0], F32),
        "grouped_linear": (wide, [torch.zeros(4, 0)], [], None, RECIPE, F32, [], [], []),
        "grouped_wgrad_": ([torch.zeros(0, 0), torch.zeros(0, 0)], U, U, E, U, U, E, torch.tensor([3, 6]), 6, RECIPE),
        "limit_capacity": (integers(0, 2), 4, 1),
        "linear": (wide, torch.zeros(4, 0), None, RECIPE, F32, None),
        "linear_bwd": (torch.zeros(6, 0), None, *x[3:], w, 0, RECIPE, F32, 7),
        "linear_dgrad": (*dy[:3], w, [6, 0], 0, RECIPE, F32),
        "linear_fwd": (wide, [torch.zeros(0, 0)], [], None, 0, RECIPE, F32, 3, [], []),
        "linear_prequantized": (wide, torch.zeros(4, 0), None, RECIPE, F32, [], [], None, None),
        "linear_unquantized_bwd": (torch.zeros(6, 0), None, wide, [torch.zeros(0, 0)], [], 0, "", F32, 7),
        "linear_wgrad": (*dy[3:], *x[3:], 6, 0, 0, RECIPE, F32),
        "norm": (torch.zeros(0, 32), torch.ones(32), None, "RMSNorm", 1e-5, False, F32, "", False, False, False, None),
        "norm_fwd": (wide, torch.ones(0), None, "LayerNorm", 1e-5, False, F32, "", False, False, False, None),
        "permute": (wide, integers(6, 2) - 1, None, 6),
        "permute_fwd": (torch.zeros(6, 0, dtype=torch.uint8), integers(6, 2) - 1, None, 6),
        "reorder": (*codes(16, 32, columnwise=False)[:3], "mxfp8", False, [16, 32]),
        "wgrad_": (torch.zeros(0, 0), U, U, E, U, U, E, None, 6, RECIPE),
        "wgrad_stash_": (torch.tensor([2**40 + 9, 0]), [], 6, RECIPE),
    }


#: Of ranks, or with runners for numbers: their sizes are those of operators above, or are compared with the runner's.
ELSEWHERE = {"parallel_linear", "parallel_grouped_linear", "agree_"}
ELSEWHERE |= {"nvfp4_linear", "nvfp4_moe", "nvfp4_moe_routed", "runner_register_linear", "runner_register_moe"}


def kinds():
    """Operator -> the types of its arguments, as schemas write them."""
    every = [str(s).removeprefix("quire::") for s in torch._C._jit_get_all_schemas() if s.name.startswith("quire::")]
    texts = {text.partition("(")[0].partition(".")[0]: text[text.index("(") + 1 : text.index(") ->")] for text in every}
    return {name: [argument.split(" ")[0] for argument in text.split(", ")] for name, text in texts.items()}


def changed(name, arguments):
    """(what kind of number, the number, the call's arguments) for every place of a number."""
    for place, (kind, value) in enumerate(zip(kinds()[name], arguments, strict=False)):
        numbers = NO_DTYPES if kind == "ScalarType" else NEGATIVE + HUGE
        others = []
        if kind == "SymInt[]":
            others = [(n, [*value[:i], n, *value[i + 1 :]]) for n in numbers for i in range(len(value))]
            others += [(n, [n, *value]) for n in numbers] + [(n, [*value, n]) for n in numbers]
        elif kind in ("SymInt", "ScalarType"):
            others = [(n, n) for n in numbers]
        for number, other in others:
            yield kind, number, [*arguments[:place], other, *arguments[place + 1 :]]


def outcome(call, arguments):
    """The words of the refusal, or the sizes of the results."""
    try:
        results = call(*arguments)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    results = results if isinstance(results, tuple) else (results,)
    return [list(t.shape) for t in results if isinstance(t, torch.Tensor)]


def outcomes(name, arguments):
    """Of all changed calls, in a child, which they may end."""
    call = getattr(ops, name)
    made = [(kind, number) for kind, number, _ in changed(name, arguments)]
    work = lambda: json.dumps([outcome(call, other) for *_, other in changed(name, arguments)]).encode()  # noqa: E731
    return list(zip(made, json.loads(in_child(work, seconds=60)), strict=True))


def is_right(kind, number, found, name):
    if isinstance(found, list):  # what a number of rows of nothing gives must exist
        exists = all(torch.Size(max(1, n) for n in sizes).numel() <= 2**56 for sizes in found)
        return exists and kind != "ScalarType" and number >= 0
    error, _, words = found.partition(": ")
    named = error == "RuntimeError" and set(words.partition(":")[0].split("_")) & set(name.split("_")) - {""}
    if kind == "ScalarType":
        return named and f"must be a dtype, got the number {number}" in found
    return named and (number >= 0 or "must not be negative" in found)


def test_the_table_has_every_operator_with_a_size_or_a_dtype():
    numbers = {"SymInt", "SymInt[]", "ScalarType"}
    assert {name for name, each in kinds().items() if numbers & set(each)} == set(calls()) | ELSEWHERE


@pytest.mark.parametrize("name", calls())
def test_the_calls_of_the_table_are_right(name):
    assert isinstance(outcome(getattr(ops, name), calls()[name]), list)


@pytest.mark.parametrize("name", calls())
def test_impossible_sizes_and_dtypes_are_refused_by_name(name):
    wrong = [(made, found) for made, found in outcomes(name, calls()[name]) if not is_right(*made, found, name)]
    assert not wrong


#: Traced with tensors on the meta device, but for the stash, which is on the CPU.
TRACED = sorted(set(calls()) - {"wgrad_stash_"})


@pytest.mark.parametrize("name", TRACED)
def test_tracing_refuses_them_too(name):
    meta = tree_map_only(torch.Tensor, lambda t: t.to("meta"), calls()[name])
    assert isinstance(outcome(getattr(ops, name), meta), list)
    wrong = [(made, found) for made, found in outcomes(name, meta) if not is_right(*made, found, name)]
    assert not wrong


@pytest.mark.parametrize("number", [-1, 2**62])
def test_fake_tensors_and_compiled_code_refuse_a_number_of_rows(number):
    x, row_map = torch.zeros(6, 0), integers(6, 2) - 1
    words = "rows must not be negative" if number < 0 else "y cannot be of size"
    with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(RuntimeError, match=words):
        ops.permute(torch.empty(6, 0), torch.empty(6, 2, dtype=torch.int32), None, number)
    compiled = torch.compile(lambda x, rows: ops.permute(x, row_map, None, rows), fullgraph=True, backend="eager")
    with pytest.raises(Exception, match=words):
        compiled(x, number)


def test_a_symbolic_number_of_rows_is_refused_when_the_graph_runs():
    row_map = integers(6, 2) - 1
    compiled = torch.compile(lambda x, n: ops.permute(x, row_map, None, n.item()), fullgraph=True, backend="aot_eager")
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        assert compiled(torch.ones(6, 0), torch.tensor(8)).shape == (8, 0)
        for number, words in ((-1, "negative|[Rr]untime assertion|>= 0"), (2**62, "y cannot be of size")):
            with pytest.raises(Exception, match=words):
                compiled(torch.ones(6, 0), torch.tensor(number))
