"""A quantized tensor knows where it was read from until somebody writes to it."""

import copy
import io
import pickle

import pytest
import torch

import quire
from quire.tensor.origin import Origin

pytestmark = pytest.mark.any_device

SPECS = ("fp8_tensor", "mxfp8", "mxfp4", "nvfp4")


def origin() -> Origin:
    return Origin("a tool", "A", {"data": "x.weight"}, {"data": torch.uint8}, {"data": (4, 32)}, {"k": torch.ones(3)})


def made(spec: str = "nvfp4", stacked: bool = False, parameter: bool = False) -> torch.Tensor:
    torch.manual_seed(3)
    parts = [quire.quantize(torch.randn(4, 32), spec) for _ in range(2)]
    q = quire.QuantizedStack.of(parts) if stacked else parts[0]
    q = torch.nn.Parameter(q) if parameter else q
    q.remember(origin())
    return q


def saved(q: torch.Tensor) -> torch.Tensor:
    file = io.BytesIO()
    torch.save(q, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def state_dict_loaded(q: torch.Tensor) -> torch.Tensor:
    target = made()
    target.remember(None)
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(target, requires_grad=False)
    module.load_state_dict({"weight": q})
    return module.weight


KEEP = {
    "detach": lambda q: q.detach(),
    "clone": lambda q: q.clone(),
    "deepcopy": copy.deepcopy,
    "pickle": lambda q: pickle.loads(pickle.dumps(q)),
    "torch.save": saved,
    "half": lambda q: q.to(torch.float16),
    "meta": lambda q: q.to("meta"),
    "parameter": lambda q: torch.nn.Parameter(q),
    "data": lambda q: q.data,
    "data=": lambda q: with_data(made(parameter=True), q),
    "share_memory_": lambda q: q.share_memory_(),
}


def with_data(target: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    target.remember(None)
    target.data = q
    return target


@pytest.mark.parametrize("parameter", [False, True])
@pytest.mark.parametrize("way", KEEP)
def test_copies_of_the_same_bytes_know_where_they_are_from(way, parameter):
    q = made(parameter=parameter)
    copied = KEEP[way](q)
    assert copied.origin is not None
    assert copied.origin.names == {"data": "x.weight"}
    assert copied.origin.dtypes == {"data": torch.uint8}
    assert copied.origin.shapes == {"data": (4, 32)}
    assert torch.equal(copied.origin.verbatim["k"], torch.ones(3))
    assert q.origin is not None


def test_a_state_dict_carries_it_into_a_module_of_the_same_bytes():
    assert state_dict_loaded(made()).origin.layout == "A"
    plain = made()
    plain.remember(None)
    assert state_dict_loaded(plain).origin is None


def by_optimizer(optimizer: type, **options) -> None:
    def write(q: torch.Tensor) -> None:
        q.grad = torch.ones(q.shape)
        optimizer([q], **options).step()

    return write


def compiled(q: torch.Tensor) -> None:
    torch._dynamo.reset()

    @torch.compile(backend="aot_eager", fullgraph=True)
    def write(q: torch.Tensor) -> None:
        q.add_(1.0)

    with torch.no_grad():
        write(q)


WRITE = {
    "copy_": lambda q: q.copy_(torch.ones(q.shape)),
    "zero_": lambda q: q.zero_(),
    "quantize_": lambda q: q.quantize_(torch.ones(q.shape)),
    "__setitem__": lambda q: q.__setitem__(0, 1.0),
    "data=": lambda q: setattr(q, "data", torch.ones(q.shape)),
    "a buffer": lambda q: q.rowwise_data.zero_(),
    "an alias": lambda q: q.detach().add_(1.0),
    "sgd": by_optimizer(torch.optim.SGD, lr=0.5),
    "adamw foreach": by_optimizer(torch.optim.AdamW, foreach=True),
    "adamw fused": by_optimizer(torch.optim.AdamW, fused=True),
    "compiled": compiled,
}


@pytest.mark.parametrize("way", WRITE)
@pytest.mark.parametrize("stacked", [False, True])
def test_who_writes_ends_it(way, stacked):
    q = made(stacked=stacked, parameter=True)
    copied = q.detach().clone()
    with torch.no_grad():
        WRITE[way](q)
    assert q.origin is None
    assert copied.origin is not None  # its bytes are as they were
    assert pickle.loads(pickle.dumps(q)).origin is None and copy.deepcopy(q).origin is None


def test_writing_in_inference_mode_ends_it():
    with torch.inference_mode():
        q = made()
        assert q.origin is not None
        q.copy_(torch.ones(q.shape))
        assert q.origin is None


def test_values_and_parts_have_none():
    q = made()
    assert q[:2].origin is None and torch.empty_like(q).origin is None
    assert not hasattr(q + 1, "origin")


@pytest.mark.interleaved
@pytest.mark.parametrize("spec", SPECS)
def test_moving_a_module_keeps_it_and_rounding_ends_it(spec):
    layer = quire.Linear(32, 4, recipe=f"x={spec},w={spec},dy={spec}")
    layer.weight = made(spec, parameter=True)
    assert layer.to(torch.bfloat16).weight.origin is not None  # codes stay
    assert copy.deepcopy(layer).weight.origin is not None
    quire.prepack_weights(layer)
    assert layer.weight.spec_text.endswith("interleaved") and layer.weight.origin is not None  # the same in an order
    layer.weight.data = torch.ones(4, 32, dtype=torch.bfloat16)
    assert layer.weight.origin is None
    assert layer.to(torch.float32).weight.origin is None


def test_a_dropped_direction_ends_it_only_if_files_have_it():
    q = quire.quantize(torch.randn(32, 32), "fp8_tensor", columnwise=True)
    q.remember(origin())
    q.update_usage(columnwise_usage=False)
    assert q.origin is not None
    q.update_usage(columnwise_usage=True)
    q.update_usage(rowwise_usage=False)
    assert q.origin is None


def test_a_forged_origin_is_refused():
    rebuild, arguments = made().__reduce_ex__(4)
    forged = {**arguments[-1], "names": {"data": 3}}
    with pytest.raises(TypeError, match="a saved Origin"):
        rebuild(*arguments[:-1], forged)
    with pytest.raises(TypeError, match="a saved Origin"):
        rebuild(*arguments[:-1], ["modelopt"])
