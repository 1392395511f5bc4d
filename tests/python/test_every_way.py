"""Every feature gives the bits of eager mode whatever way it is run, and compiled in as few graphs as it has kinds of
calls."""

import contextlib
import functools

import pytest
import torch

from every_feature import FEATURES, Model, together
from every_recipe import assert_same, some
from every_way import WAYS, Setting, infer, train, within
from ranks import rank_of

#: What a way may see of a recipe: none, specs, a random state, delayed state. Tests of eager mode have all recipes.
RECIPES = some("high_precision", "mxfp8", "nvfp4", "delayed")


#: What compiled autograd does not trace yet: a mixture's backward pass, and that of a checkpointed layer.
NOT_TRACED_BACKWARD = ("MoE", "checkpointed", "LayerNormMLP, all at once", "LayerNormMLP, microbatches")


#: Ways that drop the codes of a first microbatch, which under delayed scaling differ from those made again.
WITHOUT_KEPT_CODES = ("state_dict", "meta, assign", "meta, to_empty", "float64 and back", "to the CPU and back")


#: Features that share a model, and whether they are sharded.
TOGETHER = {"all of one process": False, "all shards": True}


def quantized(feature):
    return "quantized parameters" in feature or "stack" in feature


def allowed(feature, way, recipe):
    if way == "compiled autograd" and any(part in feature for part in NOT_TRACED_BACKWARD):
        return False
    if way == "unbacked" and "ring" in feature:
        return False  # the number of rows decides whether codes or values are exchanged
    if way == "unbacked" and feature == "TransformerLayer":
        return False  # PyTorch's attention asks whether there are rows
    summed = "MoE" in feature or feature == "TransformerLayer"
    if way == "inductor" and (summed or recipe == "high_precision"):
        return False  # Inductor's own sums of products differ in last bits; for MoE see nn/test_moe.py
    if feature == "TransformerLayer" and recipe == "high_precision":
        return False  # the last bits of PyTorch's matmuls depend on the alignment of loaded weights
    if way == "float64 and back" and quantized(feature):
        return False  # refused
    if recipe == "high_precision":
        return not quantized(feature)  # nothing says how to quantize them
    if recipe == "delayed":
        if way == "torch.utils.checkpoint":
            return False  # what it computes again is another step; see delayed/test_checkpoint.py
        return "x kept" not in feature and ("microbatches" not in feature or way not in WITHOUT_KEPT_CODES)
    return True


def cases():
    """Every feature in every way, and each of both under every recipe. Of costly ways one model has all features, and
    takes the recipes with most state."""
    found = []
    for i, feature in enumerate(FEATURES):
        for j, way in enumerate(way for way in WAYS if not WAYS[way].costly):
            names = [list(RECIPES)[(i + j + k) % len(RECIPES)] for k in range(len(RECIPES))]
            found += [(feature, way, name) for name in names if allowed(feature, way, name)][:1]
    own = zip(TOGETHER, ("nvfp4", "delayed"), strict=True)
    costly = [(which, way, name) for which, name in own for way in WAYS if WAYS[way].costly]
    return found + [pytest.param(*case, marks=pytest.mark.slow) for case in costly]


def feature_of(name, way, recipe):
    if name in FEATURES:
        return FEATURES[name]
    own = [one for one in FEATURES if FEATURES[one].sharded == TOGETHER[name] and allowed(one, way, recipe)]
    return together([FEATURES[one] for one in own])


@pytest.fixture
def group(feature, way, recipe, device):
    """That of a sharded feature: the fake one, which gives what this process sends for what others send."""
    with rank_of(0, 2, device.type) if feature_of(feature, way, recipe).sharded else contextlib.nullcontext():
        yield


@pytest.fixture
def setting(compiler, tmp_path, device, request):
    def make(feature, recipe):
        def make_model():
            return Model(feature.make(recipe))

        return Setting(recipe, make_model, compiler, tmp_path, lambda: request.getfixturevalue("serve"), device)

    return make


def models(feature, setting):
    found = []
    for _ in range(2):
        torch.manual_seed(0)
        found.append(setting.another())
    torch.manual_seed(1)
    return found


def check(feature, way, setting, same):
    eager, model = models(feature, setting)
    sizes = [max(rows, feature.fewest) for rows in way.rows]
    steps = [(index, rows, feature.calls[index if way.trains else 0]) for index, rows in enumerate(sizes)]
    for each in (eager, model):
        feature.ready(each)
        train(each, setting, steps[: way.after])
    function = way.wrap(model, setting)
    if not way.trains:
        reference = within(torch.enable_grad, feature.ready)(eager, setting)
        return same(infer(function, setting, steps), infer(reference, setting, steps))
    trained = function if isinstance(function, torch.nn.Module) else model
    for each in (eager, trained):
        feature.ready(each)
    expected = train(eager, setting, steps[way.after :])
    found = train(
        trained, setting, steps[way.after :], function=function, backward=functools.partial(way.backward, setting)
    )
    return same(found, expected)


@pytest.mark.parametrize(("feature", "way", "recipe"), cases())
@pytest.mark.filterwarnings("ignore:.*fork.*", "ignore:The tensor attributes .*microbatch_weight")
def test_a_feature_gives_the_bits_of_eager_mode(feature, way, recipe, group, setting, compiler, device, equal_bits):
    if device.type in WAYS[way].missing:
        pytest.skip(WAYS[way].missing[device.type])
    feature = feature_of(feature, way, recipe)

    def same(found, expected):
        if WAYS[way].rounds and recipe == "high_precision":
            close = [(a - b).norm() <= 1e-3 * b.norm() for a, b in zip(found, expected, strict=True)]
            assert all(close)
        else:
            assert_same(found, expected, equal_bits)

    check(feature, WAYS[way], setting(feature, RECIPES[recipe]), same)
    if WAYS[way].one_graph:
        assert compiler.graphs == feature.graphs
