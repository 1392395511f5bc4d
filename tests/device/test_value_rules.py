"""Errors in the values of tensors, which kernels find: a device reports each one once, with the CPU's text, at quire's
next call or where the host waits, and then works."""

import time
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import pytest
import torch
from torch.utils._pytree import tree_map_only

import quire
from device import device as testdevice
from device.twins import assert_same, device_of, stream_of

ops = torch.ops.quire
X = torch.randn(8, 32, generator=torch.Generator().manual_seed(0))
W = torch.randn(16, 32, generator=torch.Generator().manual_seed(1))
IDS = torch.tensor([[0, 2], [1, -1]], dtype=torch.int32)
MAP = torch.tensor([[0], [3], [1], [-1], [2], [5], [6], [7]], dtype=torch.int32)
DECREASING, BEYOND = torch.tensor([4, 2, 8]), torch.tensor([4, 6, 9], dtype=torch.int32)


def changed(t, index, value):
    out = t.clone()
    out[index] = value
    return out


def number(value):
    return torch.tensor([value])


class Case(NamedTuple):
    """A call with a value that breaks a rule, and what its error says."""

    rule: str
    op: object
    arguments: tuple
    words: str

    def run(self, device):
        """Moves the arguments, then returns the call."""
        arguments = tree_map_only(torch.Tensor, lambda t: t.to(device), self.arguments)
        return lambda: self.op(*arguments)


def linear(offsets, x=X, buffers=(), fingerprint=None):
    """Arguments of linear_fwd in mxfp8."""
    return (x, [W] * (1 if offsets is None else 3), [], offsets, 16, RECIPE, X.dtype, 3, [], list(buffers), fingerprint)


RECIPE = "x=mxfp8,w=mxfp8,dy=mxfp8"
W_CODES = ops.quantize(W, "mxfp8", True, True)
STATE = {"history": torch.zeros(4, 2), "scale": torch.ones(2), "amax": torch.ones(2), "reduced": torch.ones(2)}


def state(rule):
    """Arguments of delayed_update_: one state, which a rule of a length of 9 rows is for."""
    history, scale, amax, reduced = (t.clone() for t in STATE.values())
    rules = torch.tensor([[rule, 9, 0, 0, 448, 448]], dtype=torch.float64)
    return [history], [scale], [amax], [torch.tensor([7, 4, 4])], [reduced], rules, False


def grouped_codes(cut):
    """Arguments of grouped_dequantize whose codes lack the last `cut`."""
    offsets = torch.tensor([4, 6, 8])
    data, scale, amax = ops.grouped_quantize(X, offsets, "mxfp8", False)
    return data[: data.numel() - cut], scale, amax, offsets, "mxfp8", [8, 32], torch.float32


NORM = (X, torch.ones(32), None, "RMSNorm", 1e-5, False, torch.float32, "fp8_tensor:given", True, False, False)
CASES = {
    "a scale of 0": Case(
        "given_scale", ops.quantize, (X, "fp8_tensor:given", True, False, 0, 0, number(0.0)), "got 0;"
    ),
    "a scale that is NaN": Case(
        "given_scale", ops.quantize, (X, "nvfp4:given", True, False, 0, 0, number(torch.nan)), "got"
    ),
    "a scale of a norm": Case("given_scale", ops.norm_fwd, (*NORM, number(-2.0)), "got -2;"),
    "a scale of an activation": Case(
        "given_scale",
        ops.activation_fwd,
        (X, "gelu", torch.float32, "fp8_tensor:given", True, False, False, number(torch.inf)),
        "got inf;",
    ),
    "a negative amax": Case("given_amax", ops.quantize, (X, "nvfp4", True, False, 0, 0, None, number(-3.0)), "got -3;"),
    "an amax of a column": Case(
        "given_amax",
        ops.quantize,
        (X, "fp8_row", False, True, 0, 0, None, None, changed(torch.ones(32), 5, torch.nan)),
        "got",
    ),
    "offsets that decrease": Case(
        "group_end",
        ops.grouped_quantize,
        (X, DECREASING, "mxfp8", False),
        "group 1 ends at 2, the one before at 4",
    ),
    "offsets beyond x": Case("group_end", ops.grouped_amax, (X, BEYOND, "nvfp4", False), "group 2 ends at 9"),
    "offsets of a product": Case("group_end", ops.linear_fwd, linear(DECREASING), "group 1 ends at 2"),
    "offsets of an activation": Case(
        "group_end",
        ops.activation_fwd,
        (X, "gelu", torch.float32, "mxfp8", True, False, False, None, BEYOND),
        "group 2 ends at 9",
    ),
    "codes that are too few": Case(
        "group_room",
        ops.grouped_dequantize,
        grouped_codes(32),
        "rowwise_data of mxfp8 for 3 groups of 8 rows of 32 must hold 256 elements, got 224",
    ),
    "an expert that does not exist": Case(
        "expert_id",
        ops.limit_capacity,
        (changed(IDS, (1, 0), 8), 8, 2),
        "from 0 to 7, or -1 for none; got 8 at place 2",
    ),
    "an expert below -1": Case("expert_id", ops.expert_rows, (changed(IDS, (0, 1), -2), 3), "got -2 at place 1"),
    "a gradient of no expert": Case(
        "chosen_expert",
        ops.route_bwd,
        (torch.ones(2, 2), torch.ones(2, 3), IDS, "softmax:topk=2"),
        "those that route_fwd returned, got -1 at place 3",
    ),
    "a row that does not exist": Case(
        "row_map",
        ops.unpermute_fwd,
        (X, changed(MAP, (2, 0), 8), None),
        "from 0 to 7, or -1 for none; got 8 at token 2",
    ),
    "a row to be permuted": Case(
        "row_map", ops.permute_fwd, (X, changed(MAP, (4, 0), -2), None, 8), "got -2 at token 4, slot 0"
    ),
    "a row of a gradient": Case("row_map", ops.unpermute_dot, (X[:4], MAP, X), "got 5 at token 5, slot 0"),
    "a row that is named twice": Case(
        "row_once", ops.permute_fwd, (X, changed(MAP, (4, 0), 3), None, 8), "got row 3 at places 1 and 4"
    ),
    "a chunk of less than no rows": Case(
        "chunk_size", ops.chunk_rows, (torch.tensor([3, -1]), None, 1, 8), "rows, 8; got -1 after chunks of 3 rows"
    ),
    "chunks of too many rows": Case("chunk_size", ops.chunk_rows, (torch.tensor([3, 6]), None, 1, 8), "got 6 after"),
    "an order that names a chunk twice": Case(
        "chunk_order", ops.chunk_rows, (torch.tensor([3, 5]), torch.tensor([1, 1]), 1, 8), "from 0 to 1 once"
    ),
    "chunks with room for too many rows": Case(
        "chunk_rows",
        ops.chunk_rows,
        (torch.tensor([3, 5]), None, 2**30, 8),
        "fewer than 2^31, got 2147483648 with align",
    ),
    "codes of a weight that has changed": Case(
        "stale_codes",
        ops.linear_fwd,
        linear(None, buffers=W_CODES, fingerprint=ops.fingerprint(W).reshape(1) + 1),
        "linear: the weight has changed since it was quantized",
    ),
    "a history that is too short": Case(
        "history_length", ops.delayed_update_, state(7), "rows of the history, 4; got 9"
    ),
}
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def text_on_cpu(case):
    with pytest.raises(RuntimeError) as error:
        case.run("cpu")()
    assert case.words in str(error.value)
    return str(error.value)


def reported(call):
    with pytest.raises(RuntimeError) as error:
        call()
    return str(error.value)


def wait(device):
    torch.accelerator.synchronize(device)


def finish(device):
    """Kernels end, and nobody has waited for them."""
    stream = torch.accelerator.current_stream(device)
    for _ in range(2000):
        if stream.query():
            return
        time.sleep(0.005)
    raise AssertionError("a kernel has not ended")


def assert_works(device):
    """Nothing is reported any more, and a call computes what it does on the CPU."""
    wait(device)
    assert_same(ops.quantize(X.to(device), "nvfp4", True, True), ops.quantize(X, "nvfp4", True, True))
    wait(device)


def test_there_is_a_case_for_every_rule_of_the_core():
    rules = dict(line.split("\t") for line in torch.ops.testdevice.value_rules().splitlines())
    assert {case.rule for case in CASES.values()} == set(rules) and len(rules) == 13
    for case in CASES.values():
        # The words of the rule's text, whatever the numbers are.
        first = rules[case.rule].partition("{")[0]
        assert first in text_on_cpu(case)


@every_case
def test_an_error_is_raised_where_the_host_waits(case):
    device = device_of("default")
    call = case.run(device)
    call()
    assert reported(lambda: wait(device)) == text_on_cpu(case)
    assert_works(device)


@pytest.mark.parametrize("place", ["default", "side", "other"])
@every_case
def test_an_error_is_raised_by_the_next_call_which_has_done_nothing(case, place):
    device = device_of(place)
    call, after, counter = case.run(device), X.to(device), torch.zeros(2, dtype=torch.int64, device=device)
    wait(device)
    testdevice.counts()
    with stream_of(place):
        call()
        finish(device)
        with testdevice.Launches() as launches:
            assert reported(lambda: ops.sr_advance_(counter)) == text_on_cpu(case)
        assert launches.names == [] and "synchronize" not in testdevice.counts()
        ops.sr_advance_(counter)
        codes = ops.quantize(after, "mxfp8", True, False)
    assert_same(codes, ops.quantize(X, "mxfp8", True, False))
    assert counter[1].item() == 1
    assert_works(device)


@pytest.mark.parametrize("trains", [False, True])
def test_an_error_is_raised_by_a_call_that_goes_past_the_dispatcher(trains):
    device, case = device_of("default"), CASES["a negative amax"]
    x, w = X.to(device), W.to(device).requires_grad_(trains)
    case.run(device)()
    finish(device)
    assert reported(lambda: quire.functional.linear(x, w, None, RECIPE, X.dtype)) == text_on_cpu(case)
    assert quire.functional.linear(x, w, None, RECIPE, X.dtype).requires_grad == trains
    assert_works(device)


@every_case
def test_an_error_of_a_captured_call_is_raised_after_each_replay(case):
    device = device_of("default")
    call, counter = case.run(device), torch.zeros(2, dtype=torch.int64, device=device)
    with testdevice.Graph() as graph:
        call()
        ops.sr_advance_(counter)
    wait(device)
    for replay in (1, 2):
        graph.replay()
        assert reported(lambda: wait(device)) == text_on_cpu(case)
        assert counter[1].item() == replay
    graph.replay()
    finish(device)
    assert reported(lambda: ops.sr_advance_(counter)) == text_on_cpu(case)
    assert_works(device)


def test_an_update_whose_rule_is_wrong_has_changed_no_state():
    device, case = device_of("default"), CASES["a history that is too short"]
    arguments = tree_map_only(torch.Tensor, lambda t: t.to(device), case.arguments)
    case.op(*arguments)
    reported(lambda: wait(device))
    for kept, given in zip(arguments[:4], case.arguments[:4], strict=True):
        assert_same(kept, given)


def test_of_several_errors_the_first_is_raised_and_the_others_are_dropped():
    device = device_of("default")
    first, second = CASES["a row that is named twice"], CASES["a negative amax"]
    calls = [first.run(device), second.run(device), first.run(device)]
    for case in (first, second):  # the first use of a kernel of CUDA waits, to compare it with the reference
        case.run(device)()
        reported(lambda: wait(device))
    torch.ops.testdevice.set_delay(2_000)  # all are called before one has run
    for call in calls:
        call()
    torch.ops.testdevice.set_delay(0)
    assert reported(lambda: wait(device)) == text_on_cpu(first)
    assert_works(device)


def test_an_error_is_raised_for_its_device_only():
    one, other = device_of("default"), device_of("other")
    case = CASES["offsets beyond x"]
    case.run(other)()
    finish(other)
    assert_works(one)
    assert reported(lambda: wait(other)) == text_on_cpu(case)
    assert_works(other)


def test_of_threads_that_call_at_the_same_time_one_is_told():
    device, case = device_of("default"), CASES["a negative amax"]
    x = X.to(device)
    case.run(device)()
    finish(device)

    def call(_):
        try:
            ops.quantize(x, "mxfp8", True, False)
        except RuntimeError as error:
            return str(error)

    with ThreadPoolExecutor(8) as threads:
        told = [text for text in threads.map(call, range(64)) if text is not None]
    assert told == [text_on_cpu(case)]
    assert_works(device)


def test_quire_synchronize_waits_and_raises():
    device, case = device_of("other"), CASES["a negative amax"]
    torch.ops.testdevice.set_delay_of(1, 0, 20_000)
    case.run(device)()
    assert reported(lambda: quire.synchronize(device)) == text_on_cpu(case)
    torch.ops.testdevice.set_delay_of(1, 0, 0)
    quire.synchronize(str(device))
    case.run(device_of("default"))()
    assert reported(quire.synchronize) == text_on_cpu(case)
    quire.synchronize()
    quire.synchronize("cpu")
    with pytest.raises(RuntimeError, match="quire has no kernels for meta"):
        quire.synchronize("meta")


def test_an_error_in_a_backward_pass_is_raised_by_the_next_step():
    layer = quire.Linear(32, 16, device=device_of("default"))
    x = X.to(layer.weight.device).requires_grad_()
    with quire.autocast(recipe=quire.recipe.MXFP8BlockScaling()):
        layer(x, is_first_microbatch=True).sum().backward()
        with torch.no_grad():
            layer.weight.mul_(2)
        y = layer(x, is_first_microbatch=False)
        finish(x.device)
        with pytest.raises(RuntimeError, match=r"^linear: the weight has changed since it was quantized"):
            y.sum().backward()
    assert_works(x.device)


# ---- What else a context says of a device.


def test_a_context_knows_whether_its_stream_is_captured():
    t = torch.zeros(1, device=testdevice.NAME)
    assert not torch.ops.testdevice.is_captured(t)
    with testdevice.Graph():
        assert torch.ops.testdevice.is_captured(t)
    assert not torch.ops.testdevice.is_captured(t)


def test_lent_zeros_are_the_same_memory_in_each_call_of_a_stream_and_nobody_fills_them():
    found, use = torch.ones(1, dtype=torch.int64, device=testdevice.NAME), torch.ops.testdevice.use_zeroed
    with testdevice.Launches() as launches:
        addresses = [use(found, size) for size in (100, 4096, 1, 100_000, 100, 100_000)]
    assert addresses[:3] == addresses[:1] * 3 and addresses[3:] == addresses[3:4] * 3
    assert addresses[3] != addresses[0] and found.item() == 0
    assert [name for name in launches.names if name != "use_zeroed"].count("aten::zero_") <= 2
    with stream_of("side"):
        on_side = use(found, 100)
    assert on_side not in addresses and found.item() == 0


def test_lent_zeros_of_a_graph_are_its_own_and_filled_by_each_replay():
    found, use = torch.ones(1, dtype=torch.int64, device=testdevice.NAME), torch.ops.testdevice.use_zeroed
    eager = use(found, 100)
    found.fill_(1)
    with testdevice.Graph() as graph:
        captured = use(found, 100)
    assert captured != eager
    for _ in range(2):
        found.fill_(1)
        graph.replay()
        assert found.item() == 0
