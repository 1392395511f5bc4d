"""Calls of operators that are refused end in words: the process goes on, and nothing has been written."""

import multiprocessing
import re

import pytest
import torch

import quire  # noqa: F401  (registers the operators)
from quire_torch.one_group import linear

ops = torch.ops.quire
MXFP8 = "x=mxfp8,w=mxfp8,dy=mxfp8"


def words_of(call):
    """The error of a call, which is made in a child: it may end the process."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)

    def child():
        torch.set_num_threads(1)
        try:
            there.send(f"accepted: {call()}")
        except Exception as error:
            there.send(str(error))

    process = context.Process(target=child)
    process.start()
    there.close()
    try:
        return here.recv() if here.poll(60) else "no answer within a minute"
    except EOFError:
        process.join()
        return f"the process ended with {process.exitcode}"
    finally:
        process.kill()
        process.join()


CODES = [torch.zeros(64, 32, dtype=torch.uint8), torch.zeros(64, 2, dtype=torch.uint8), torch.ones(1)]
COUNTS = [(2**64 + 2) // 3, 2**62, 2**63 - 1, -(2**62), 0, 2]  # three times the first is 2, in 64 bits


@pytest.mark.parametrize("count", COUNTS)
def test_a_count_of_weights_that_wraps_when_it_is_tripled_does_not_end_the_process(count):
    none = torch.empty(0)
    words = words_of(lambda: ops.runner_register_linear("", "nvfp4", "nvfp4", CODES, [count, 64, 64], [none], [none]))
    assert re.search("three rowwise buffers for each of|shapes must not be negative", words)
    stacks = [count, 64, 64] * 2, [none] * 2, [none] * 2
    words = words_of(lambda: ops.runner_register_moe("", "nvfp4", "nvfp4", CODES, *stacks, "swiglu", False))
    assert re.search("three rowwise buffers for each of|shapes must not be negative", words)


def test_a_bias_of_a_count_that_wraps_does_not_end_the_process():
    weight, bias = torch.zeros(1, 64, 64), torch.zeros(64)
    shape = [2**58 + 1, 64, 64]  # 64 times that is 64, in 64 bits
    words = words_of(lambda: ops.runner_register_linear("", "nvfp4", "nvfp4", [weight], shape, [bias], [bias[:0]]))
    assert "bias must have 64 features for each of" in words


STASHES = {
    "on the meta device": torch.zeros(2, dtype=torch.int64, device="meta"),
    "of zeros without memory": torch._efficientzerotensor(2, dtype=torch.int64),
    "sparse": torch.zeros(2, dtype=torch.int64).to_sparse(),
    "nested": torch.nested.nested_tensor([torch.zeros(2, dtype=torch.int64)]),
}


@pytest.mark.parametrize("name", STASHES)
def test_a_stash_without_memory_does_not_end_the_process(name):
    words = words_of(lambda: ops.wgrad_take_(STASHES[name]))
    assert re.search("wgrad_take_: stash must be a dense tensor on the CPU|ZeroTensors are immutable", words)


# ---------------------------------------------------------------- nothing written


def kept(dy, x, w, offsets):
    """Columnwise codes of dy and x, as a backward pass keeps them for wgrad_."""
    _, *saved = ops.linear_fwd(x, w, [], offsets, w[0].shape[0], MXFP8, torch.float32, 3, [], [])
    codes_w = [None, None, None, *saved[3:]]
    buffers = ops.linear_bwd(dy, offsets, *saved[:3], codes_w, x.shape[1], MXFP8, torch.float32, 8)[3:]
    return [*buffers, *saved[:3]]


def groups():
    w = [torch.randn(16, 32), torch.randn(16, 32)]
    return torch.randn(8, 16), torch.randn(8, 32), w, torch.tensor([3, 8])


def test_a_second_main_grad_that_does_not_fit_leaves_the_first_as_it_was():
    main_grad = [torch.zeros(16, 32), torch.zeros(16, 31)]
    with pytest.raises(RuntimeError, match="accumulate_: value must have main_grad's shape"):
        ops.grouped_accumulate_(main_grad, torch.ones(2, 16, 32))
    assert not main_grad[0].any()


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("ends", [[0, 2**60], [3, 2**60], [3, 2**62], [3, 2**63 - 1], [3, 9999]])
def test_offsets_of_more_rows_than_there_are_codes_leave_main_grad_as_it_was(ends, overwrite):
    codes = kept(*groups())
    main_grad = [torch.ones(16, 32), torch.ones(16, 32)]
    with pytest.raises(RuntimeError, match="wgrad_"):
        ops.grouped_wgrad_(main_grad, *codes, torch.tensor(ends), 8, MXFP8, overwrite)
    assert all(torch.equal(one, torch.ones(16, 32)) for one in main_grad)


@pytest.mark.parametrize("tokens", [2**60, 2**62, 2**63 - 1, -1, 9])
def test_tokens_of_more_rows_than_there_are_codes_are_refused(tokens):
    dy, x, w, _ = groups()
    codes = kept(dy, x, w[:1], None)
    main_grad = torch.ones(16, 32)
    with pytest.raises(RuntimeError, match="wgrad_"):
        ops.wgrad_(main_grad, *codes, None, tokens, MXFP8, True)
    assert torch.equal(main_grad, torch.ones(16, 32))


WRONG = {
    "another shape": lambda: torch.zeros(16, 31),
    "another dtype": lambda: torch.zeros(16, 32).double(),
    "not contiguous": lambda: torch.zeros(32, 16).t(),
}


@pytest.mark.parametrize("recipe", ["", MXFP8])
@pytest.mark.parametrize("wrong", WRONG)
def test_a_main_grad_of_another_kind_is_refused_in_forward(wrong, recipe):
    _, x, w, offsets = groups()
    w = [one.requires_grad_() for one in w]
    with pytest.raises(RuntimeError, match="linear: .*main_grad must be"):
        ops.grouped_linear(x, w, [], offsets, recipe, x.dtype, [], [], [torch.zeros(16, 32), WRONG[wrong]()])


def resized(tensor):
    tensor.resize_(tensor.shape[0] + 1, *tensor.shape[1:])


NVFP4 = "x=nvfp4,w=nvfp4,dy=nvfp4:sr"


@pytest.mark.parametrize("grouped", [False, True])
def test_a_main_grad_resized_since_forward_leaves_all_state_as_it_was(grouped):
    dy, x, w, offsets = groups()
    w = [one.requires_grad_() for one in w]
    main_grad, state = [torch.zeros(16, 32), torch.zeros(16, 32)], torch.tensor([1, 5])
    if grouped:
        y = ops.grouped_linear(x, w, [], offsets, NVFP4, x.dtype, [], [], main_grad, sr_state=state)[0]
    else:
        y = linear(x, w[0], None, NVFP4, x.dtype, sr_state=state, main_grad=main_grad[1])
    resized(main_grad[1])
    with pytest.raises(RuntimeError, match="linear: .*main_grad must"):
        y.backward(dy)
    assert state.tolist() == [1, 5] and not main_grad[0].any()


def test_memory_for_dx_resized_since_forward_leaves_main_grad_as_it_was():
    dy, x, w, offsets = groups()
    main_grad, memory = [torch.zeros(16, 32), torch.zeros(16, 32)], torch.zeros(8, 32)
    w = [one.requires_grad_() for one in w]
    x.requires_grad_()
    y = ops.grouped_linear(x, w, [], offsets, MXFP8, x.dtype, [], [], main_grad, dgrad_out=memory)[0]
    resized(memory)
    with pytest.raises(RuntimeError, match="dgrad_out was changed since the forward pass"):
        y.backward(dy)
    assert not any(one.any() for one in main_grad)


MUTATIONS = {
    "delayed_collect_": lambda here, there: ops.delayed_collect_(
        here(3), here(3).long(), here(1).long(), there(1), None
    ),
    "amax_max_": lambda here, there: ops.amax_max_(here(2), there(1), 0),
    "accumulate_": lambda here, there: ops.accumulate_(here(4, 4), there(4, 4)),
    "grouped_accumulate_": lambda here, there: ops.grouped_accumulate_([here(4, 4)], there(1, 4, 4)),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_what_is_half_on_the_meta_device_is_not_left_unwritten_without_a_word(name):
    with pytest.raises(RuntimeError, match=f"{name}: tensors must be on one device; got meta and cpu"):
        MUTATIONS[name](torch.ones, lambda *sizes: torch.ones(*sizes, device="meta"))
    meta = lambda *sizes: torch.ones(*sizes, device="meta")  # noqa: E731
    MUTATIONS[name](meta, meta)


@pytest.mark.parametrize("needs", [0, 4, 16, 2**62, -(2**63)])
def test_no_result_of_a_backward_operator_is_left_unwritten(needs):
    dy, x, w, offsets = groups()
    _, *saved = ops.linear_fwd(x, w, [], offsets, 16, MXFP8, torch.float32, 3, [], [])
    arguments = (dy, offsets, *saved[:3], [None, None, None, *saved[3:]], 32, MXFP8, torch.float32, needs)
    if needs not in (0, 4):
        with pytest.raises(RuntimeError, match="linear_bwd: needs must be a sum of 1"):
            ops.linear_bwd(*arguments, None, torch.ones(4))
        return
    *_, dy_amax = ops.linear_bwd(*arguments, None, torch.ones(4))
    assert dy_amax.numel() == 0


@pytest.mark.parametrize("count", [-(2**63), -1, 2**63 - 1])
def test_a_stash_whose_count_nobody_counted_is_not_counted_on(count):
    stash = torch.tensor([2**40 + 5, 0])
    ops.wgrad_stash_(stash, [torch.ones(2, 2)], 2, "", False)
    forged = torch.tensor([2**40 + 5, count])
    for call in (
        lambda: ops.wgrad_take_(forged),
        lambda: ops.wgrad_stash_(forged, [torch.ones(2, 2)], 2, "", False),
    ):
        with pytest.raises(RuntimeError, match=r"the count of stash must be from 0 to \d+, got \{1099511627781, "):
            call()
    assert forged.tolist() == [2**40 + 5, count] and stash.tolist() == [2**40 + 5, 1]
    assert ops.wgrad_take_(stash)[1] == 2 and stash.tolist() == [2**40 + 5, 0]


@pytest.mark.parametrize("operand", ["x", "w"])
def test_codes_without_a_recipe_do_not_end_the_process(operand):
    x, w = torch.randn(5, 32), torch.randn(16, 32)
    codes = {"x": [], "w": [], operand: list(ops.quantize({"x": x, "w": w}[operand], "fp8_tensor", True, True))}
    words = words_of(lambda: ops.linear_prequantized(x, w, None, "", torch.float32, codes["x"], codes["w"], None, None))
    assert "an operand is given quantized, and recipe '' multiplies x and w themselves" in words
    words = words_of(lambda: ops.linear_fwd(x, [w], [], None, 16, "", torch.float32, 0, codes["x"], codes["w"]))
    assert "an operand is given quantized, and recipe '' multiplies x and w themselves" in words


def test_rows_without_columns_are_not_counted_one_by_one():
    words = words_of(lambda: [t.item() for t in ops.amax(torch.empty(2**50, 0), "fp8_tensor", True, True)])
    assert words == "accepted: [0.0, 0.0]"


def test_after_the_last_counter_comes_the_first():
    state = torch.tensor([7, 2**63 - 1])
    ops.sr_advance_(state)
    assert state.tolist() == [7, -(2**63)]
