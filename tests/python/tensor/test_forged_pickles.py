"""Files that hold what no quantized tensor is: refused when they are loaded, in words, and not later."""

import io
import random

import pytest
import torch

import quire
from python.tensor.tensor_specs import SPECS
from quire import QuantizedStack, QuantizedTensor
from quire.tensor.quantized import rebuild

pytestmark = pytest.mark.any_device

WORDS = "a saved QuantizedTensor: .*(damaged or was not written by quire|use .to_dense)"


def quantized(spec, *shape):
    return quire.quantize(torch.randn(shape, generator=torch.Generator().manual_seed(0)), spec, columnwise=True)


def parts(q):
    """Arguments of rebuild(), as lists that may be changed."""
    flags, text, shape, dtype, tensors = q.__reduce_ex__(2)[1]
    return [list(flags), text, list(shape), dtype, list(tensors)]


def put(*path_and_value):
    """Replaces one part of a state."""
    *path, last, value = path_and_value

    def forge(state):
        place = state
        for index in path:
            place = place[index]
        place[last] = value(place[last]) if callable(value) and not isinstance(value, type) else value

    return forge


FORGERIES = {
    "another class": put(0, 0, torch.Tensor),
    "no class": put(0, 0, "QuantizedTensor"),
    "a stack of a matrix": put(0, 0, QuantizedStack),
    "a number as a flag": put(0, 1, 1),
    "a flag too many": put(0, lambda flags: [*flags, True]),
    "another spec": put(1, "mxfp4"),
    "another element": put(1, "fp8_tensor"),
    "no spec": put(1, "mxfp9"),
    "a number as a spec": put(1, 8),
    "other sizes": put(2, [64, 32]),
    "one size fewer": put(2, [32]),
    "no size": put(2, []),
    "a negative size": put(2, [-32, 64]),
    "a size beyond 64 bits": put(2, [2**70, 64]),
    "a huge size": put(2, [2**62, 2**62]),
    "a text as a size": put(2, ["32", 64]),
    "another dtype": put(3, torch.int8),
    "no dtype": put(3, "float32"),
    "no data": put(4, 0, None),
    "no scale": put(4, 1, None),
    "an amax too many": put(4, 2, torch.ones(1)),
    "nothing": put(4, lambda tensors: [None] * len(tensors)),
    "a tensor fewer": put(4, lambda tensors: tensors[:5]),
    "a tensor more": put(4, lambda tensors: [*tensors, None]),
    "no list": put(4, None),
    "data of another dtype": put(4, 0, lambda data: data.float()),
    "data of another shape": put(4, 0, lambda data: data[:-1]),
    "data across": put(4, 0, lambda data: data.t().contiguous().t()),
    "sparse data": put(4, 0, lambda data: data.to_sparse()),
    "data elsewhere": put(4, 0, lambda data: data.to("meta")),
    "quantized data": put(4, 0, lambda data: quantized("mxfp8", 32, 64)),
    "text as data": put(4, 0, "data"),
    "a master of another dtype": put(4, 6, torch.zeros(32, 64).half()),
    "a master of another shape": put(4, 6, torch.zeros(32)),
    "a given scale under blocks": put(4, 7, torch.ones(1)),
}


def forged(forge, q):
    state = parts(q)
    forge(state)
    return [tuple(state[0]), state[1], tuple(state[2]) if isinstance(state[2], list) else state[2], *state[3:]]


@pytest.mark.parametrize("forge", FORGERIES.values(), ids=FORGERIES)
def test_a_forged_state_is_not_accepted(forge):
    with pytest.raises((TypeError, ValueError), match=f"(?s){WORDS}"):
        rebuild(*forged(forge, quantized("mxfp8", 32, 64)))


@pytest.mark.parametrize("spec", SPECS)
def test_parts_of_two_tensors_do_not_make_one(spec):
    """Any mixture that is accepted is a tensor that decodes."""
    chance, accepted = random.Random(spec), 0
    sources = [parts(quantized(s, *shape)) for s in (spec, "mxfp8", "nvfp4") for shape in ((32, 64), (64, 32))]
    for _ in range(60):
        state = parts(quantized(spec, 32, 64))
        for _ in range(chance.randint(1, 2)):
            index, other = chance.randrange(1, 5), chance.choice(sources)
            if index < 4:
                state[index] = other[index]
            else:
                slot = chance.randrange(len(state[4]))
                state[4][slot] = chance.choice([None, *other[4]])
        try:
            q = rebuild(tuple(state[0]), state[1], tuple(state[2]), state[3], state[4])
        except (TypeError, ValueError) as error:
            assert "a saved QuantizedTensor: " in str(error)
        else:
            accepted += 1
            assert type(q) is QuantizedTensor and all(t.is_contiguous() for t in q.buffers().values())
            assert q.stores("rowwise") is False or q.dequantize().shape == q.shape
    assert accepted < 60


def test_a_forged_file_is_not_loaded():
    class Forged:
        def __init__(self, state):
            self.state = state

        def __reduce__(self):
            return rebuild, tuple(self.state)

    def load(state):
        file = io.BytesIO()
        torch.save(Forged(state), file)
        file.seek(0)
        return torch.load(file, weights_only=True)

    q = quantized("nvfp4:16x16", 32, 64)
    with pytest.raises(ValueError, match="a saved QuantizedTensor: .*must be contiguous torch.uint8"):
        load(forged(FORGERIES["data of another shape"], q))
    with pytest.raises(TypeError, match="tensors must be 8, plain ones or None"):
        load(forged(put(4, lambda tensors: tensors[:7]), q))
