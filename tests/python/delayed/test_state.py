"""The state of delayed scaling: saved, restored, copied, moved, and none of it in a state_dict."""

import copy
import gc
import io
import math
import pickle
import threading

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import quire
from every_feature import LAYERS
from python.delayed.delayed_reference import RECIPE, varied
from quire.recipe import DelayedScaling, Float8CurrentScaling
from steps import same, train

pytestmark = pytest.mark.any_device

STATE = ("fwd_scale", "bwd_scale", "fwd_amax", "bwd_amax", "usage")


def make_model():
    torch.manual_seed(0)
    return torch.nn.Sequential(quire.Linear(16, 32), torch.nn.ReLU(), quire.Linear(32, 16))


def train_with_changes(model, steps, recipe=RECIPE):
    """Results of forward and backward; parameters change a lot."""
    out = []
    for step in steps:
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(3.0 if step % 2 else 0.4)
        x = varied(step, 8, 16, low=-3, high=3).requires_grad_()
        with quire.autocast(recipe=recipe):
            y = model(x)
        y.backward(varied(step, 8, 16, seed=1))
        out += [y.detach(), x.grad]
    return out


def in_a_new_thread(function):
    """Where the rules have other numbers, as in another process."""

    def run():
        with quire.autocast(recipe=DelayedScaling(margin=7)):
            pass
        with place:
            results.append(function())

    results, place = [], torch.get_default_device()
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return results[0]


@pytest.mark.parametrize("recipe", [RECIPE, DelayedScaling(), DelayedScaling(amax_history_len=1)], ids=str)
def test_a_run_is_resumed_exactly_from_a_file(recipe):
    model, file = make_model(), io.BytesIO()
    train_with_changes(model, range(5), recipe)
    torch.save({"model": model.state_dict(), "delayed": quire.delayed_state(model)}, file)
    expected = train_with_changes(model, range(5, 9), recipe)

    def resume():
        file.seek(0)
        saved, resumed = torch.load(file, weights_only=True), make_model()
        resumed.load_state_dict(saved["model"])
        quire.set_delayed_state(resumed, saved["delayed"])
        return train_with_changes(resumed, range(5, 9), recipe)

    assert same(in_a_new_thread(resume), expected)
    fresh = make_model()
    fresh.load_state_dict(model.state_dict())
    assert not same(train_with_changes(fresh, range(5, 9), recipe), train_with_changes(model, range(5, 9), recipe))


def test_what_is_saved_has_the_names_and_shapes_of_the_contract(equal_bits):
    model = make_model()
    assert quire.delayed_state(model) == {}
    train_with_changes(model, range(6))
    saved = quire.delayed_state(model)
    assert list(saved) == ["0.delayed", "2.delayed"]
    shapes = {name: tuple(t.shape) for name, t in saved["0.delayed"].items() if name != "rule"}
    assert shapes == {
        "scale_fwd": (3,),
        "amax_history_fwd": (4, 3),
        "scale_bwd": (2,),
        "amax_history_bwd": (4, 2),
    }
    state = model[0].delayed
    assert equal_bits(saved["0.delayed"]["amax_history_fwd"][0], state.fwd_amax) and state.fwd_amax[0] > 0
    assert equal_bits(saved["0.delayed"]["amax_history_bwd"][1:], state.bwd_history[1:4])
    saved["0.delayed"]["scale_fwd"].zero_()
    assert state.fwd_scale.all(), "a copy"


def test_recipes_without_state_have_none_to_save():
    model = make_model()
    train_with_changes(model, range(2), Float8CurrentScaling())
    assert quire.delayed_state(model) == {}
    assert [model[0].delayed.usage.tolist(), model[0].delayed.fwd_amax.tolist()] == [[0] * 3] * 2


def test_layers_that_the_state_does_not_name_are_as_new():
    model = make_model()
    train_with_changes(model, range(3))
    quire.set_delayed_state(model, {})
    for layer in (model[0], model[2]):
        state = layer.delayed
        assert state.fwd_scale.tolist() == [1] * 3 and not state.fwd_amax.any() and not state.fwd_history.any()
        assert state.bwd_scale.tolist() == [1] * 2 and not state.bwd_amax.any() and not state.usage.any()


def test_checkpoints_of_plain_layers_load_strictly_both_ways():
    model = make_model()
    train_with_changes(model, range(2))
    plain = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 16))
    assert list(model.state_dict()) == list(plain.state_dict())
    plain.load_state_dict(model.state_dict(), strict=True)
    model.load_state_dict(plain.state_dict(), strict=True)
    assert not any("delayed" in name for name, _ in model.named_buffers())


@pytest.mark.parametrize("name", LAYERS)
def test_no_layer_forgets_its_scales_at_a_checkpoint(name):
    layer = LAYERS[name]()
    train(layer, RECIPE)
    values, state = {k: v.clone() for k, v in layer.state_dict().items()}, quire.delayed_state(layer)
    expected = train(layer, RECIPE)
    again = LAYERS[name]()
    again.load_state_dict(values)
    quire.set_delayed_state(again, state)
    assert same(train(again, RECIPE), expected)


WRONG = {
    "a name": ({"1.delayed": {}}, "layers that the model has not: '1.delayed'"),
    "a missing part": (lambda good: {k: v for k, v in good.items() if k != "rule"}, "must be a dict of 'rule', a str"),
    "no dict": (lambda good: 3, "must be a dict of 'rule', a str, and scale_fwd.*; got 3"),
    "a dtype": (
        lambda good: good | {"scale_fwd": torch.ones(3).double()},
        "scale_fwd of '0.delayed' must have .* dense float32",
    ),
    "a shape": (
        lambda good: good | {"scale_bwd": torch.ones(3)},
        r"scale_bwd .* float32 \[2\], got torch.float32 \[3\]",
    ),
    "no rows": (lambda good: good | {"amax_history_bwd": torch.ones(0, 2)}, r"\[L, 2\] with L > 0, got .*\[0, 2\]"),
    "no tensor": (lambda good: good | {"amax_history_fwd": None}, "amax_history_fwd .* got None"),
    "no values": (
        lambda good: good | {"scale_bwd": torch.ones(2, device="meta")},
        r"scale_bwd of '0.delayed' must have values and be dense float32 \[2\], got torch.float32 \[2\] on meta",
    ),
    "a sparse tensor": (lambda good: good | {"scale_bwd": torch.ones(2).to_sparse()}, r"got .* \[2\] torch.sparse_coo"),
    "names of two kinds": ({1: {}, "a": {}}, "layers that the model has not: 'a', 1"),
    "a scale of 0": (lambda good: good | {"scale_fwd": torch.tensor([1.0, 0, 1])}, r"scale_fwd .* > 0, got 0.0"),
    "a negative scale": (lambda good: good | {"scale_bwd": torch.tensor([1.0, -2])}, r"scale_bwd .* > 0, got -2.0"),
    "a scale of NaN": (lambda good: good | {"scale_fwd": torch.full((3,), math.nan)}, "scale_fwd .* finite .* got nan"),
    "an infinite scale": (lambda good: good | {"scale_fwd": torch.full((3,), math.inf)}, "finite .* got inf"),
    "a negative amax": (lambda good: good | {"amax_history_bwd": -torch.ones(2, 2)}, "amax_history_bwd .* got -1.0"),
    "an amax of NaN": (lambda good: good | {"amax_history_fwd": torch.full((1, 3), math.nan)}, "amax_hist.* got nan"),
    "a rule that is none": (
        lambda good: good | {"rule": "foo"},
        "rule of '0.delayed' must be the text of a DelayedScaling, such as '0,HYBRID,1024,max,None,True'; got 'foo'",
    ),
    "no rule": (lambda good: good | {"rule": ""}, "rule of '0.delayed' must be the text .* got ''"),
}


@pytest.mark.parametrize("wrong, words", WRONG.values(), ids=WRONG)
def test_a_state_that_does_not_fit_is_refused_in_words_and_changes_nothing(wrong, words):
    model = make_model()
    train_with_changes(model, range(3))
    before = quire.delayed_state(model)
    bad = (
        wrong
        if isinstance(wrong, dict)
        else {"2.delayed": before["2.delayed"], "0.delayed": wrong(before["0.delayed"])}
    )
    with pytest.raises(ValueError, match=f"set_delayed_state: .*{words}"):
        quire.set_delayed_state(model, bad)
    after = quire.delayed_state(model)
    assert str(after) == str(before)


def test_an_overflow_stays_in_a_saved_history():
    model = make_model()
    train_with_changes(model, range(2))
    saved = quire.delayed_state(model)
    saved["0.delayed"]["amax_history_fwd"][1, 0] = math.inf
    quire.set_delayed_state(model, saved)
    assert str(quire.delayed_state(model)) == str(saved)


def test_a_state_whose_rule_is_one_too_many_is_refused_and_changes_nothing():
    model = make_model()
    train_with_changes(model, range(3))
    good = quire.delayed_state(model)

    def fills_the_table():
        rules = [f"{i},HYBRID,4,max,None,True" for i in range(63)]  # and that of in_a_new_thread
        for rule in rules:
            quire.delayed.rules.rule_of(rule)
        bad = {
            "0.delayed": good["0.delayed"] | {"rule": rules[0]},
            "2.delayed": good["2.delayed"] | {"rule": "-1,HYBRID,4,max,None,True"},
        }
        bad["0.delayed"]["scale_fwd"] = torch.full((3,), 7.0)
        with pytest.raises(RuntimeError, match="more than 64 different ones in a thread"):
            quire.set_delayed_state(model, bad)
        return str(quire.delayed_state(model))

    assert in_a_new_thread(fills_the_table) == str(good)


WRONG_ARGUMENTS = {
    "a slot below": (lambda: quantized(-2), ValueError, "slot must be from 0 to 2.* 3 elements of scale, got -2"),
    "a slot above": (lambda: quantized(3), ValueError, "slot must be from 0 to 2.* got 3"),
    "a text for a slot": (lambda: quantized("a"), TypeError, "slot must be an int, got 'a'"),
    "a scalar": (lambda: quantized(0, torch.tensor(1.0)), ValueError, r"scale must have one dimension.* got \[\]"),
    "no groups": (lambda: quire.delayed.DelayedState("cpu", 0), ValueError, "groups must be at least 1, got 0"),
    "negative groups": (lambda: quire.delayed.DelayedState("cpu", -1), ValueError, "groups must be at least 1, got -1"),
    "nothing for groups": (
        lambda: quire.delayed.DelayedState("cpu", None),
        TypeError,
        "groups must be an int, got None",
    ),
    "a number for a bool": (
        lambda: quire.delayed.DelayedState("cpu", 1, 3),
        TypeError,
        "reduced must be a bool, got 3",
    ),
}


def quantized(slot, scale=None):
    return quire.delayed.quantize(torch.ones(4, 32), torch.ones(3) if scale is None else scale, slot, False)


@pytest.mark.parametrize("wrong, error, words", WRONG_ARGUMENTS.values(), ids=WRONG_ARGUMENTS)
def test_arguments_that_do_not_fit_are_refused_in_words(wrong, error, words):
    with pytest.raises(error, match=f"^(delayed.quantize|DelayedState): {words}"):
        wrong()


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_go_on_as_the_original_would_and_apart_from_it(duplicate):
    model = make_model()
    train_with_changes(model, range(4))
    twin, pickled = duplicate(model), pickle.dumps(model)
    expected = train_with_changes(model, range(4, 8))
    assert same(train_with_changes(twin, range(4, 8)), expected)
    assert same(in_a_new_thread(lambda: train_with_changes(pickle.loads(pickled), range(4, 8))), expected)


def test_a_pickle_from_before_there_were_newest_scales_goes_on_as_its_original_would():
    model = make_model()
    train_with_changes(model, range(4))
    older = copy.deepcopy(model)
    for layer in (older[0], older[2]):
        fields = layer.delayed.__getstate__()
        layer.delayed = quire.delayed.DelayedState.__new__(quire.delayed.DelayedState)
        layer.delayed.__setstate__({k: v for k, v in fields.items() if k not in ("fwd_newest", "bwd_newest", "_lent")})
    assert same(train_with_changes(older, range(4, 8)), train_with_changes(model, range(4, 8)))


def test_casting_a_model_leaves_its_scales_in_float32():
    model = make_model()
    train_with_changes(model, range(3))
    before = [getattr(model[0].delayed, name) for name in STATE]
    model.bfloat16().float().half()
    assert same([getattr(model[0].delayed, name) for name in STATE], before)


def test_what_leaves_the_meta_device_is_new_and_what_is_there_is_left_alone():
    with torch.device("meta"):
        model = make_model()
    assert model[0].delayed.fwd_scale.is_meta and not model[0].delayed.usable
    assert quire.delayed_state(model) == {}
    with quire.autocast(recipe=RECIPE):
        model(torch.empty(4, 16, device="meta"))
    other = make_model()
    train_with_changes(other, range(2))
    model.to_empty(device=torch.get_default_device())
    state = model[0].delayed
    assert state.usable and state.fwd_scale.tolist() == [1] * 3 and state.usage.tolist() == [0] * 3
    train_with_changes(model, range(2))
    assert model[0].delayed.fwd_scale[0] != 1
    model.to("meta")
    assert not model[0].delayed.usable
    train_with_changes(other, range(2))


def test_a_layer_may_move_between_forward_and_backward():
    model, still = make_model(), make_model()
    for m in (model, still):
        train_with_changes(m, range(3))
    results = []
    for m in (model, still):
        x = varied(3, 8, 16).requires_grad_()
        with quire.autocast(recipe=RECIPE):
            y = m(x)
        if m is model:
            m.double().float()
        y.backward(torch.ones(8, 16))
        results.append([y.detach(), x.grad, *(getattr(m[0].delayed, name).clone() for name in STATE[:4])])
    assert same(*results)


def test_the_state_of_a_layer_that_is_gone_is_forgotten():
    gc.collect()
    before = len(quire.delayed.state._STATES)
    model = make_model()
    train_with_changes(model, range(2))
    assert len(quire.delayed.state._STATES) == before + 2
    del model
    gc.collect()
    assert len(quire.delayed.state._STATES) == before


def train_fake_layer():
    with FakeTensorMode():
        layer = quire.Linear(16, 32)
        for _ in range(2):
            with quire.autocast(recipe=RECIPE):
                y = layer(torch.randn(8, 16))
            y.sum().backward()
    assert y.shape == (8, 32) and layer.weight.grad.shape == (32, 16)


def run_real_layer_in_a_fake_mode():
    layer = quire.Linear(16, 32)
    with quire.autocast(recipe=RECIPE), FakeTensorMode(allow_non_fake_inputs=True):
        assert layer(torch.randn(8, 16)).shape == (8, 32)


FAKE = {"a fake layer": train_fake_layer, "a real layer": run_real_layer_in_a_fake_mode}


@pytest.mark.parametrize("run", FAKE.values(), ids=FAKE)
@pytest.mark.parametrize("used", [False, True], ids=["new layers", "layers in training"])
def test_fake_tensors_leave_states_of_real_layers_alone(run, used):
    expected = train_with_changes(make_model(), range(4))
    model = make_model()
    first = train_with_changes(model, range(2)) if used else []
    run()
    assert same(expected, first + train_with_changes(model, range(2 if used else 0, 4)))


@pytest.mark.cpu_only
def test_too_many_recipes_are_refused_in_words():
    def run():
        try:
            for margin in range(100):
                with quire.autocast(recipe=DelayedScaling(margin=margin)):
                    pass
        except RuntimeError as error:
            results.append((margin, str(error)))

    results = []
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert results[0][0] == 64 and "more than 64 different ones in a thread" in results[0][1]
