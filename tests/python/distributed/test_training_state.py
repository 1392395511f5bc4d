"""quire.TrainingState: what some processes have saved with torch.distributed.checkpoint, others load, to the bit."""

import copy
import io
import math

import pytest
import torch

import quire
import ranks
from python.distributed.training_state_ranks import (
    PARTS,
    Model,
    Run,
    assert_same,
    disagrees,
    entries_are_refused,
    loads,
    resumes,
    saves_in_background,
    sharded_without_a_rank,
    stages,
    trains_and_saves,
    unsharded_layers,
)
from quire.distributed import Parallel
from ranks import rank_of


@pytest.fixture(autouse=True)
def place(device, monkeypatch):
    """This process computes where the test does, as processes of a group do (ranks.here)."""
    monkeypatch.setattr(ranks, "place", device.type)


#: Options of quantized_model_init.
QUANTIZED = {"codes": {}, "codes and masters": {"keep_master": True}}


@pytest.mark.parametrize("recipe", ["nvfp4", "delayed"])
@pytest.mark.parametrize("way", ["DistributedDataParallel", "fully_shard", "parallel=", "styles", "styles of PyTorch"])
def test_a_run_goes_on_with_the_same_bits(two, tmp_path, way, recipe):
    two.run(resumes, str(tmp_path), way, recipe, None)


@pytest.mark.parametrize("storage", QUANTIZED)
def test_codes_of_quantized_weights_are_kept(two, tmp_path, storage):
    two.run(resumes, str(tmp_path), "DistributedDataParallel", "mxfp8", QUANTIZED[storage])


@pytest.mark.parametrize("storage", QUANTIZED)
def test_one_process_keeps_them_too(tmp_path, storage, device):
    resumes(0, str(tmp_path), "one process", "nvfp4_no_sr", QUANTIZED[storage])


def test_a_compiled_model_has_the_names_of_the_model(tmp_path, device):
    resumes(0, str(tmp_path), "torch.compile", "mxfp8", None)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("saved", "loaded", "model", "recipe"),
    [
        ("parallel=", ["fully_shard", "DistributedDataParallel", "parallel="], "swiglu", "nvfp4"),
        ("parallel=", ["fully_shard"], "swiglu", "delayed"),
        ("fully_shard", ["parallel="], "swiglu", "nvfp4"),
        ("styles", ["fully_shard", "parallel=", "styles of PyTorch"], "gelu", "nvfp4"),
    ],
)
def test_what_two_processes_save_one_and_four_and_others_load(two, four, tmp_path, saved, loaded, model, recipe):
    expected, other = two.run(trains_and_saves, str(tmp_path), saved, recipe, model)
    assert expected == other
    assert len(expected["up.weight "]) == sum(PARTS) and len(expected["up.weight exp_avg"]) == sum(PARTS)
    assert ("up.delayed rule" in expected) is (recipe == "delayed")
    assert loads(0, str(tmp_path), "one process", recipe, model) == expected
    for way in loaded:
        for group in (two, four):
            assert group.run(loads, str(tmp_path), way, recipe, model) == [expected] * group.size, (way, group.size)


@pytest.mark.slow
def test_parts_that_fully_shard_divides_are_saved_at_their_places(four, two, tmp_path):
    way, folder, back = "parallel= and fully_shard", str(tmp_path / "four"), str(tmp_path / "two")
    expected, *others = four.run(trains_and_saves, folder, way, "nvfp4", "swiglu")
    assert others == [expected] * 3
    assert loads(0, folder, "one process", "nvfp4", "swiglu") == expected
    assert two.run(loads, folder, "parallel=", "nvfp4", "swiglu") == [expected] * 2
    assert four.run(loads, folder, way, "nvfp4", "swiglu") == [expected] * 4
    expected, _ = two.run(trains_and_saves, back, "fully_shard", "nvfp4", "swiglu")
    assert four.run(loads, back, way, "nvfp4", "swiglu") == [expected] * 4


def test_one_processs_state_is_loaded_by_many(two, tmp_path):
    run = Run("one process", "nvfp4")
    run.step(0)
    torch.distributed.checkpoint.save({"train": run.state}, checkpoint_id=str(tmp_path), no_dist=True)
    expected = loads(0, str(tmp_path), "one process", "nvfp4", "swiglu")
    for way in ("parallel=", "fully_shard"):
        assert two.run(loads, str(tmp_path), way, "nvfp4", "swiglu") == [expected] * 2


def test_a_state_is_saved_in_the_background(two, tmp_path):
    two.run(saves_in_background, str(tmp_path))


def test_stages_of_a_pipeline_save_what_each_has(two, tmp_path):
    two.run(stages, str(tmp_path))


def names_quire(file, device):
    """Whether a file needs quire to be read. It names the device, which may be called after quire."""
    return b"quire" in file.getvalue().replace(device.type.encode(), b"")


def test_torch_save_takes_the_same_state(device):
    for storage in (None, {}, {"keep_master": True}):
        run = Run("one process", "delayed", storage)
        run.step(0), run.step(1)
        file = io.BytesIO()
        torch.save(run.state.state_dict(), file)
        assert not names_quire(file, device)
        expected = [run.step(2), run.step(3)]
        file.seek(0)
        again = Run("one process", "delayed", storage, seed=5)
        again.state.load_state_dict(torch.load(file, weights_only=True))
        for number, values in zip((2, 3), expected, strict=True):
            assert_same(again.step(number), values, storage)


KINDS = {
    "experts": lambda: quire.GroupedLinear(2, 64, 64),
    "experts in one weight": lambda: quire.GroupedLinear(2, 64, 64, single_grouped_weight=True),
    "a mixture": lambda: quire.MoE(64, 64, 2),
    "a layer with a norm": lambda: quire.LayerNormLinear(64, 64),
    "no layer of quire": lambda: torch.nn.Linear(4, 4),
}
OPTIMIZERS = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, 0.1),
    "fused": lambda parameters: torch.optim.AdamW(parameters, fused=True),
    "two": lambda parameters: [torch.optim.AdamW([each]) for each in parameters],
    "none": lambda parameters: None,
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_every_layer_and_optimizer(kind, quantized, optimizer, device):
    def make():
        with quire.quantized_model_init(enabled=quantized, recipe="mxfp8"):
            model = torch.nn.Sequential(KINDS[kind]()).to(device)
        return model, quire.TrainingState(model, OPTIMIZERS[optimizer](model.parameters()))

    file = io.BytesIO()
    model, state = make()
    torch.save(state.state_dict(), file)
    assert not names_quire(file, device)
    file.seek(0)
    other, state = make()
    state.load_state_dict(torch.load(file, weights_only=True))
    assert_same(dict(other.named_parameters()), dict(model.named_parameters()))
    assert_same(quire.rng_state(other), quire.rng_state(model))


def test_copies_of_a_sharded_layers_state_dict_are_plain(device):
    with rank_of(0, 2, device.type) as group:
        layer = quire.Linear(64, 64, parallel=Parallel("row", group), device=device)
        state, file = layer.state_dict(), io.BytesIO()
        torch.save(state, file)
        assert not names_quire(file, device)
        file.seek(0)
        other = copy.deepcopy(layer)
        for given in (torch.load(file, weights_only=True), copy.deepcopy(state), state):
            torch.nn.init.zeros_(other.weight)
            other.load_state_dict(given)
            assert torch.equal(other.weight, layer.weight)
            other.load_state_dict(given, assign=True)
            assert type(other.weight) is torch.nn.Parameter and type(other.weight.data) is torch.Tensor


def test_saving_a_new_optimizer_leaves_codes_as_they_are(device):
    changed = 0
    for recipe in ("mxfp8", "nvfp4_no_sr", "fp8_current"):
        run = Run("one process", recipe, {})
        before = copy.deepcopy(dict(run.model.named_parameters()))
        run.state.state_dict()
        assert_same(dict(run.model.named_parameters()), before, recipe)
        run.model.up.weight.detach().add_(0)
        changed += not torch.equal(run.model.up.weight.rowwise_data, before["up.weight"].rowwise_data)
    assert changed  # by a second rounding


def test_parts_of_a_weight_are_not_taken_for_the_whole(two, tmp_path):
    for said in two.run(entries_are_refused, str(tmp_path)):
        assert len(said) == 2 and all("quire.TrainingState" in text and "shard of a tensor" in text for text in said)


def test_processes_that_differ_are_told(two):
    for seeds, scales, layers in two.run(disagrees):
        assert "do not follow from one torch.manual_seed" in seeds
        assert "different states of delayed scaling" in scales and "reduce_amax=False" in scales
        assert "the ranks have different layers" in layers


def test_the_random_state_of_layers_that_were_sharded_later_is_that_of_one_process(two):
    first, second = two.run(sharded_without_a_rank)
    assert first[0] == second[0] == {name: state.tolist() for name, state in first[1].items()}


def test_what_does_not_fit_is_refused(device):
    model = Model().to(device)
    with pytest.raises(TypeError, match="TrainingState: model must be a torch.nn.Module"):
        quire.TrainingState({})
    with pytest.raises(TypeError, match="TrainingState: optimizer must be a torch.optim.Optimizer, got 3"):
        quire.TrainingState(model, 3)
    for _ in range(2):
        with quire.autocast(recipe="fp8_delayed"):
            model(torch.ones(4, 128, device=device))
    with pytest.warns(UserWarning, match="without recipe= their scales and amax histories are not in the state"):
        quire.TrainingState(model).state_dict()
    other = quire.recipe.DelayedScaling(margin=1)
    with pytest.raises(RuntimeError, match="'mlp.fc1_delayed' has run under the delayed scaling '0,HYBRID,1024,.*pass"):
        quire.TrainingState(model, recipe=other).state_dict()
    with quire.quantized_model_init(recipe="mxfp8"):
        quantized = quire.Linear(64, 64)
    state = quire.TrainingState(quire.Linear(64, 64)).state_dict()
    with pytest.raises(ValueError, match="has no 'weight.mxfp8:nan.rowwise_data'; make the model with the recipe of"):
        quire.TrainingState(quantized).load_state_dict(state)
    state, before = quire.TrainingState(quantized), copy.deepcopy(quantized.bias)
    saved = state.state_dict()["model"] | {"bias": torch.full((64,), 7.0)}
    name = "weight.mxfp8:nan.rowwise_data"
    for wrong, words in (
        (3, "got 3"),
        (saved[name][:3], "got torch.uint8.*3,"),
        (saved[name].float(), "got torch.float"),
    ):
        with pytest.raises(ValueError, match=rf"'{name}' must have .* torch.uint8 .*shape \[64, 64\], {words}"):
            state.load_state_dict({"model": saved | {name: wrong}, "rng": quire.rng_state(quantized)})
        assert torch.equal(quantized.bias, before)


def without(state, name):
    return {key: value for key, value in state.items() if key != name}


def entry(name, change):
    return lambda state: state | {name: change(state[name])}


def of_layer(change):
    return entry("delayed", lambda states: {name: change(value) for name, value in states.items()})


def of_group(change):
    return entry("optimizer", lambda saved: saved | {"param_groups": [change(one) for one in saved["param_groups"]]})


ANOTHER = "pass what state_dict\\(\\) of a TrainingState with the same arguments gave"
#: What somebody has made of a state, and words of the error.
NOT_SAVED = {
    "no weights": (lambda state: without(state, "model"), f"the state has no 'model'; {ANOTHER}"),
    "weights that are none": (entry("model", lambda _: 1), f"'model' must be a dict by names, got 1; {ANOTHER}"),
    "names that are none": (entry("model", lambda _: {1: 2}), "'model' must be a dict by names, got {1: 2}"),
    "none of the weights": (
        entry("model", lambda _: {}),
        f"'model': the model has tensors .* has not: '0.bias', .*; {ANOTHER}",
    ),
    "one weight more": (entry("model", lambda own: own | {"9": torch.ones(1)}), "the model has not: '9'"),
    "a weight that is none": (entry("model", lambda own: own | {"2.bias": 3}), r"'2.bias' must .* \[32\], got 3"),
    "a shape": (
        entry("model", lambda own: own | {"2.bias": torch.ones(3)}),
        r"'2.bias' must have values and be torch.strided of shape \[32\], got torch.float32 \[3\]",
    ),
    "no values": (entry("model", lambda own: own | {"2.bias": own["2.bias"].to("meta")}), "'2.bias' must .* on meta"),
    "no random states": (lambda state: without(state, "rng"), f"the state has no 'rng'; {ANOTHER}"),
    "random states of none": (entry("rng", lambda _: {}), "'rng': the model has layers that the state has not: '0'"),
    "a random state that is none": (entry("rng", lambda _: 1), "'rng' must be a dict by names, got 1"),
    "a random state of 3": (
        entry("rng", lambda own: own | {"2": torch.full((3,), 9)}),
        r"'rng': the random state of '2' must .* shape \[2\], got torch.int64 \[3\]",
    ),
    "no scales": (
        lambda state: without(state, "delayed"),
        "'delayed': the model .* state has not: '0.delayed', '2.del",
    ),
    "scales of none": (entry("delayed", lambda _: {}), "'delayed': the model .* state has not: '0.delayed'"),
    "scales of another layer": (entry("delayed", lambda own: own | {"9.delayed": 1}), "the model has not: '9.delayed'"),
    "a scale that is none": (of_layer(lambda own: 1), "'delayed': the state of '0.delayed' must be .* 'used'; got 1"),
    "a missing scale": (of_layer(lambda own: without(own, "scale_bwd")), "must be a dict of .* 'used'; got"),
    "a scale of NaN": (of_layer(lambda own: own | {"scale_bwd": own["scale_bwd"] * math.nan}), "must be finite"),
    "a history that is none": (of_layer(lambda own: own | {"amax_history_fwd": 3}), "amax_history_fwd of .* got 3"),
    "rows that are none": (
        of_layer(lambda own: own | {"used": 3}),
        r"used of '0.delayed' must .* int64 \[2\].*, got 3",
    ),
    "too many rows": (
        of_layer(lambda own: own | {"used": own["used"] + 9}),
        r"rows in use .* got \[13, 13\] of \[4, 4\]",
    ),
    "rows of one direction": (
        of_layer(lambda own: own | {"used": own["used"] * own["used"].new_tensor([0, 1])}),
        "or 0 of both",
    ),
    "no optimizer": (lambda state: without(state, "optimizer"), f"the state has no 'optimizer'; {ANOTHER}"),
    "an optimizer that is none": (entry("optimizer", lambda _: 1), "'optimizer' must be a dict by names, got 1"),
    "an optimizer without groups": (
        entry("optimizer", lambda own: without(own, "param_groups")),
        "'optimizer' must be",
    ),
    "groups that are none": (of_group(lambda _: 3), "'optimizer' must be a dict of 'state', .* and 'param_groups'"),
    "groups without parameters": (
        of_group(lambda own: without(own, "params")),
        "'optimizer' must be a dict of 'state'",
    ),
    "no moments": (
        entry("optimizer", lambda own: own | {"state": without(own["state"], "2.bias")}),
        "'optimizer' has no state of the parameter '2.bias'",
    ),
}


def run_of_delayed_scaling(device):
    model = torch.nn.Sequential(quire.Linear(32, 32), torch.nn.ReLU(), quire.Linear(32, 32)).to(device)
    optimizer, recipe = torch.optim.AdamW(model.parameters()), quire.recipe.DelayedScaling(amax_history_len=4)
    for _ in range(2):
        with quire.autocast(recipe=recipe):
            model(torch.randn(4, 32, device=device)).sum().backward()
        optimizer.step()
    return quire.TrainingState(model, optimizer, recipe)


def all_of(state):
    model, (optimizer,) = state.model, state.optimizers
    found = model.state_dict(), optimizer.state_dict(), quire.rng_state(model), quire.delayed_state(model)
    return copy.deepcopy(found)


@pytest.mark.parametrize("change, words", NOT_SAVED.values(), ids=NOT_SAVED)
def test_what_such_a_state_did_not_save_is_refused_before_anything_changes(change, words, device):
    bad, state = change(run_of_delayed_scaling(device).state_dict()), run_of_delayed_scaling(device)
    before = all_of(state)
    with pytest.raises(ValueError, match=f"^TrainingState: .*{words}"):
        state.load_state_dict(bad)
    assert str(all_of(state)) == str(before)


def test_a_mixture_takes_the_weights_of_the_other_form(device):
    """Its layers convert names and shapes when they load, so these are not compared before."""
    for single in (False, True):
        torch.manual_seed(0)
        saved = quire.MoE(32, 32, 4, single_grouped_weight=single).to(device)
        other = quire.MoE(32, 32, 4, single_grouped_weight=not single).to(device)
        quire.TrainingState(other).load_state_dict(quire.TrainingState(saved).state_dict())
        x = torch.randn(8, 32, device=device)
        assert torch.equal(saved(x), other(x))


def test_arguments_of_another_model_or_type_are_refused(device):
    model, other = quire.Linear(32, 32, device=device), quire.Linear(32, 32, device=device)
    state = quire.TrainingState(model, torch.optim.AdamW(other.parameters()))
    saved = quire.TrainingState(model, torch.optim.AdamW(model.parameters())).state_dict()
    for call in (state.state_dict, lambda: state.load_state_dict(saved)):
        with pytest.raises(ValueError, match=r"^TrainingState: an optimizer has a parameter \[32, 32\] that the model"):
            call()
    for name in ("group", "amax_reduction_group"):
        with pytest.raises(TypeError, match=f"^TrainingState: {name} must be a process group.* got 'a'"):
            quire.TrainingState(model, **{name: "a"})


def test_a_model_without_layers_of_quire_has_no_states_of_delayed_scaling(device):
    state = quire.TrainingState(torch.nn.Linear(4, 4, device=device), recipe="fp8_delayed")
    saved = state.state_dict()
    assert saved.keys() == {"model", "rng"}
    state.load_state_dict(saved)


def test_a_layer_that_is_not_sharded_rounds_as_the_data_of_its_process(four):
    """Of a mesh of 2 x 2: processes of a tensor-parallel group have the same tokens, those of another different ones.
    Process i computes on the data i // 2."""
    seeds, numbers = zip(*four.run(unsharded_layers), strict=True)
    for name in ("head", "sharded", "reset", "converted"):
        a, b, c, d = (one[name] for one in seeds)
        assert a == b != c == d, name
    assert len({one["tokens"] for one in seeds}) == 4
    assert len({one["not told"] for one in seeds}) == 4
    torch.manual_seed(0)
    assert seeds[0]["head"] == quire.Linear(32, 32).sr_state.tolist()[0]
    # The same tokens, of which a gradient is rounded.
    assert numbers[0] == numbers[1] != numbers[2] == numbers[3]


def test_a_rank_that_is_none_is_refused():
    for rank, error in ((-1, ValueError), ("0", TypeError), (None, TypeError)):
        with pytest.raises(error, match="data_parallel_rank: rank must be"), quire.distributed.data_parallel_rank(rank):
            pass
