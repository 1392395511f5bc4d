"""A refused call of an operator that writes leaves all its arguments as they were, whichever of them is wrong."""

import json

import pytest
import torch
from torch.utils._pytree import tree_leaves, tree_map_only

import quire  # noqa: F401  (registers the operators)
from forks import in_child

ops = torch.ops.quire
RECIPE = "x=mxfp8,w=mxfp8,dy=mxfp8"


def numbers(*values):
    return torch.tensor(values)


def kept():
    """Columnwise codes of dy [8, 16] and x [8, 32] in two groups, as a backward pass keeps them."""
    ends = torch.tensor([3, 8])
    dy, x = torch.arange(128.0).view(8, 16), torch.arange(256.0).view(8, 32)
    return [*ops.grouped_quantize(dy, ends, "mxfp8", True), *ops.grouped_quantize(x, ends, "mxfp8", True), ends]


def state():
    """history, scale, amax and usage of one state of delayed scaling."""
    return torch.ones(4, 3), torch.full((3,), 2.0), torch.tensor([1.0, 4.0, 9.0]), numbers(7, 2, 2)


RULES = torch.tensor([[7, 4, 0, 2, 448.0, 57344.0]], dtype=torch.float64)


def lists():
    return [list(each) for each in zip(state(), state(), strict=True)]


def stash():
    return numbers(2**40 + 11, 0)


#: A right call of every operator whose schema writes.
CALLS = {
    "accumulate_": lambda: [torch.zeros(4, 8), torch.ones(4, 8), False],
    "amax_max_": lambda: [torch.zeros(6), torch.ones(2), 1],
    "delayed_collect_": lambda: [torch.zeros(6), numbers(0, 0, 0), torch.tensor(7), torch.ones(2), torch.ones(2)],
    "delayed_update_": lambda: [*lists(), [torch.full((3,), 5.0), torch.ones(3)], RULES.clone(), False],
    "delayed_update_in_python_": lambda: (
        [each + more for each, more in zip(lists()[:3], lists(), strict=False)] + lists()[3:]
    ),
    "grouped_accumulate_": lambda: [[torch.zeros(4, 8), torch.zeros(4, 8)], torch.ones(2, 4, 8), True],
    "grouped_linear": lambda: [
        *(torch.ones(8, 32), [torch.ones(16, 32)], [torch.ones(16)], None, RECIPE, torch.float32, [], []),
        *([torch.zeros(16, 32)], None, numbers(1, 2), None, None, None, None, False, False, torch.zeros(8, 16)),
    ],
    "grouped_wgrad_": lambda: [[torch.zeros(16, 32), torch.zeros(16, 32)], *kept(), 8, RECIPE, False],
    "sr_advance_": lambda: [numbers(5, 6)],
    "wgrad_": lambda: [torch.zeros(2, 16, 32), *kept(), 8, RECIPE, True],
    "wgrad_stash_": lambda: [stash(), [torch.ones(2, 2), torch.ones(2, 3)], 2, RECIPE, False],
    "wgrad_take_": lambda: [stash()],
}

#: Ways in which a tensor can be wrong. Those of its memory say nothing about its dtype, sizes and strides.
WRONG = {
    "freed": lambda t: freed(t, 0),
    "half freed": lambda t: freed(t, t.untyped_storage().nbytes() // 2),
    "of another dtype": lambda t: t.to(torch.int16),
    "of another size": lambda t: t.new_zeros([n + 1 for n in t.shape]),
    "empty": lambda t: t.new_zeros(0),
    "a scalar": lambda t: t.new_zeros(()),
    "not contiguous": lambda t: torch.stack([t, t], -1)[..., 0],
    "on the meta device": lambda t: t.to("meta"),
    "of zeros without memory": lambda t: torch._efficientzerotensor(t.shape, dtype=t.dtype),
    "sparse": lambda t: t.to_sparse(),
    "nested": lambda t: torch.nested.nested_tensor([t]),
}


def freed(t, bytes_left):
    new = t.clone()
    new.untyped_storage().resize_(bytes_left)
    return new


def tensors(arguments):
    return [t for t in tree_leaves(arguments) if isinstance(t, torch.Tensor)]


def with_wrong(arguments, place, wrong):
    """The arguments with the tensor of that number made wrong."""
    number = iter(range(10**6))
    return tree_map_only(torch.Tensor, lambda t: WRONG[wrong](t) if next(number) == place else t, arguments)


def memory(t):
    if t.is_meta or t.layout != torch.strided or t.is_nested or t._is_zerotensor():
        return None
    return bytes(t.untyped_storage())


def test_the_table_has_every_operator_that_writes():
    written = {s.name.removeprefix("quire::") for s in torch._C._jit_get_all_schemas() if "!" in str(s)}
    # These say it of an argument that they leave as it is, so that graphs send that one afterwards.
    assert {name for name in written if hasattr(ops, name) and "::" not in name} == set(CALLS) | {"agree_", "agree_on_"}


@pytest.mark.parametrize("name", CALLS)
def test_the_calls_of_the_table_are_right_and_write(name):
    arguments = CALLS[name]()
    before = [memory(t) for t in tensors(arguments)]
    getattr(ops, name)(*arguments)
    unwritten = name in ("wgrad_take_", "delayed_update_in_python_")  # nothing is kept, and no rule is known
    assert unwritten or [memory(t) for t in tensors(arguments)] != before
    torch.ops.quire.wgrad_drop(2**40 + 11)


def refusals(name, wrong):
    """Of each tensor made wrong, in a child, which the calls may end: the words of the refusal, or none, and whether
    anything has changed."""

    def work():
        found = []
        for place in range(len(tensors(CALLS[name]()))):
            arguments = with_wrong(CALLS[name](), place, wrong)
            before = [memory(t) for t in tensors(arguments)]
            try:
                getattr(ops, name)(*arguments)
                words = None
            except (RuntimeError, TypeError, ValueError) as error:
                words = str(error)
            found.append((words, [memory(t) for t in tensors(arguments)] != before))
        return json.dumps(found).encode()

    return json.loads(in_child(work))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("name", CALLS)
def test_a_refused_call_has_written_nothing(name, wrong):
    refused = [(words, changed) for words, changed in refusals(name, wrong) if words is not None]
    assert not [words for words, changed in refused if changed]
    if wrong in ("freed", "half freed", "sparse"):
        assert refused


@pytest.mark.parametrize("left", ["freed", "half freed"])
@pytest.mark.parametrize("name", sorted(set(CALLS) - {"delayed_update_in_python_"}))
def test_a_tensor_whose_storage_was_freed_is_named(name, left):
    """Every tensor that a kernel reads or writes."""
    for (words, _), tensor in zip(refusals(name, left), tensors(CALLS[name]()), strict=True):
        if tensor.numel():
            assert words is not None and ("its storage holds" in words or "the count of stash" in words)


def test_a_step_in_python_that_is_refused_has_changed_no_state():
    recipe = quire.recipe.DelayedScaling(amax_history_len=4, amax_compute_algo=lambda history: history.amax(0))
    layer = quire.Linear(32, 32)
    with quire.autocast(recipe=recipe):
        layer(torch.ones(2, 32)).sum().backward()
    number = max(rule.number for rule in quire.delayed.rules.THREAD.rules.values())

    def states(**changed):
        sizes = {"rows": 4, "slots": 2} | changed
        history = [torch.ones(4, 3), torch.ones(sizes["rows"], 2)]
        scale, amax = ([torch.ones(3), torch.ones(sizes["slots"])] for _ in range(2))
        return [history, scale, amax, [numbers(number, 4, 4)]]

    right = states()
    ops.delayed_update_in_python_(*right)
    assert right[2][0].tolist() == [0, 0, 0] and right[1][1].tolist() == [57344, 57344]
    lost = states()
    lost[2][1] = freed(lost[2][1], 0)
    for wrong in (states(rows=3), states(slots=3), states()[:3] + [[]], lost):
        before = [memory(t) for t in tensors(wrong)]
        with pytest.raises(ValueError, match="delayed_update_in_python_"):
            ops.delayed_update_in_python_(*wrong)
        assert [memory(t) for t in tensors(wrong)] == before
