"""Functions that make tensors of numbers, of files and of their own, under each default: the same bits as without."""

import functools

import pytest
import torch

import quire
from defaults import DEFAULTS, in_turn, randn, under_and_without
from every_recipe import DEFAULTS as RECIPES
from every_recipe import STATIC
from every_way import PLAIN
from python.io.checkpoint_kinds import KINDS
from python.io.stored_golden import CASES, FOLDER
from quire import io, moe
from steps import same

SPECS = ("mxfp8", "nvfp4", "nvfp4:sr", "nvfp4:row_scaled", "fp8_block", "fp8_tensor", "fp8_row", "mxfp4")


def model():
    first, second = (torch.nn.Linear(256, 256, **PLAIN) for _ in range(2))
    return torch.nn.Sequential(first, torch.nn.ReLU(), second)


def stored(tensors):
    """The tensors, of quantized ones their buffers."""
    found = []
    for tensor in tensors:
        quantized = isinstance(tensor, quire.QuantizedTensor)
        found += [*tensor.buffers().values(), tensor.dequantize()] if quantized else [tensor]
    return found


def state(model):
    return stored([*model.parameters(), *model.buffers()]) + [model(randn(16, 256))]


def quantized(spec):
    seed = {"seed": 1} if "sr" in spec else {}
    return stored([quire.quantize(randn(32, 64), spec, **seed)])


def converted(recipe):
    return state(quire.convert(model(), recipe, for_inference=True, tokens=None))


def calibrated():
    report = quire.calibrate(model(), [randn(16, 256)], STATIC["static_nvfp4"])
    return state(report.apply(quire.convert(model(), STATIC["static_nvfp4"])))


def by_method(recipe, method, reads):
    return state(quire.quantize_model(model(), recipe, [randn(64, 256)] if reads else None, method))


def routed():
    weights, ids = moe.route(randn(32, 8), 2, score_function="sigmoid", renormalize=True, capacity=5)
    load, scores = moe.tokens_per_expert(ids, 8), moe.scores(randn(32, 8))
    losses = [moe.load_balancing_loss(scores, load, topk=2, total_num_tokens=total) for total in (None, 301)]
    return [weights, ids, load, *losses]


def run_by_a_runner():
    runner = quire.runners.LinearRunner(randn(64, 32), randn(64), input_scale=0.0123)
    return [quire.nvfp4_linear(randn(4, 32).bfloat16(), quire.runners.register(runner), 64)]


def informed():
    reasons = [quire.info.why_no_spec("mxfp8", "cpu"), quire.info.why_not(RECIPES["mxfp8"], "cpu")]
    assert reasons == ["", ""]
    return []


#: Name -> a function without arguments that returns tensors. Seeds are set before.
CALLS = {
    **{f"quantize {spec}": functools.partial(quantized, spec) for spec in SPECS},
    **{f"convert {name}": functools.partial(converted, recipe) for name, recipe in RECIPES.items()},
    **{f"gptq {name}": functools.partial(by_method, recipe, "gptq", True) for name, recipe in RECIPES.items()},
    **{f"gptq {name}": functools.partial(by_method, recipe, "gptq", True) for name, recipe in STATIC.items()},
    "rtn": functools.partial(by_method, "nvfp4", "rtn", False),
    "4over6": functools.partial(by_method, "nvfp4", "4over6", False),
    **{function.__name__: function for function in (calibrated, routed)},
    "run_by_a_runner": run_by_a_runner,
    "informed": informed,
}


@pytest.mark.parametrize(("name", "default"), in_turn(CALLS))
def test_a_call_under_a_default_has_the_bits_of_one_without(name, default):
    assert same(*under_and_without(default, CALLS[name]))


def read(path):
    checkpoint = io.read(path, missing_input_scale="dynamic")
    found = []
    for name in checkpoint.groups:
        layer = checkpoint[name]
        found += [layer.weight, *(t for t in (layer.bias, layer.input_scale) if t is not None)]
    return stored(found)


@pytest.mark.parametrize(("case", "default"), in_turn([*KINDS, *CASES]))
def test_a_checkpoint_that_is_read_and_run_under_a_default_has_the_same_bits(case, default, tmp_path):
    path = FOLDER / case if case in CASES else KINDS[case]().write(tmp_path / "files")
    path = next(path.glob("*.gguf"), path)
    with DEFAULTS[default]():
        found, errors = read(path), str(io.run(path))
    assert found and not any(tensor.is_meta for tensor in found)
    assert same(found, read(path))
    assert errors == str(io.run(path))
