"""What the report of a conversion says of memory: every byte that the model holds, and which parameters no longer share
theirs."""

import copy
import gc
import types
import warnings

import pytest
import torch
from torch import nn

import quire

pytestmark = [
    pytest.mark.filterwarnings("ignore:quire..*shared memory", "ignore:.*stay in high precision"),
    pytest.mark.any_device,
]
_NOT_OF_THE_MODEL = (type, types.ModuleType, types.FunctionType, types.FrameType, types.MethodType)


def reachable_bytes(model):
    """Of the storages of all tensors that Python's garbage collector finds from the model."""
    seen, storages, waiting = set(), {}, [model]
    while waiting:
        one = waiting.pop()
        if id(one) in seen or isinstance(one, _NOT_OF_THE_MODEL):
            continue
        seen.add(id(one))
        waiting += gc.get_referents(one)
        if isinstance(one, torch.Tensor):
            waiting += [one.grad] if one.is_leaf and one.grad is not None else []
            if not isinstance(one, quire.QuantizedTensor):
                storages[one.untyped_storage().data_ptr()] = one.untyped_storage().nbytes()
    return sum(storages.values())


class Tied(nn.Module):
    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.embedding = nn.Embedding(320, 128, dtype=dtype)
        self.inner = nn.Linear(128, 128, dtype=dtype)
        self.head = nn.Linear(128, 320, bias=False, dtype=dtype)
        self.head.weight = self.embedding.weight
        self.register_buffer("positions", torch.arange(1000))

    def forward(self, ids):
        return self.head(self.inner(self.embedding(ids)))


def _with_gradients():
    model = Tied()
    model(torch.arange(3)).sum().backward()
    return model


def _with_kept_codes():
    model = nn.Sequential(quire.Linear(64, 64), quire.LayerNormMLP(64, 64))
    quire.quantize_weights(model, "mxfp8")
    return model


def _slices_of_one_tensor():
    model, all = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)), torch.randn(192, 64)
    for layer, part in zip(model, all.split(64), strict=False):
        layer.weight = nn.Parameter(part)
    return model


def _sparse():
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64, bias=False))
    diagonal = torch.sparse_csr_tensor(torch.arange(65), torch.arange(64), torch.ones(64), (64, 64))
    model[1].weight = nn.Parameter(diagonal, requires_grad=False)
    return model


MODELS = {
    "tied": Tied,
    "tied, bfloat16": lambda: Tied(torch.bfloat16),
    "with gradients": _with_gradients,
    "layers of quire with kept codes": _with_kept_codes,
    "mixture": lambda: quire.MoE(64, 96, 4, 2, expert_bias=True, shared_ffn_hidden_size=64),
    "slices of one tensor": _slices_of_one_tensor,
    "no parameters shared": lambda: nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64, bias=False)),
}
WAYS = {
    "for inference": lambda model: quire.convert(model, "mxfp8", for_inference=True, tokens=None, min_features=1),
    "for training": lambda model: quire.convert(model, "mxfp8", min_features=1),
    "quantize_model": lambda model: quire.quantize_model(model, "nvfp4"),
    "leaving the head": lambda model: quire.convert(
        model, "mxfp8", lambda layer, name: name != "head", for_inference=True, tokens=None, min_features=1
    ),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", MODELS)
def test_the_report_counts_every_byte_that_the_model_holds_before_and_after(kind, way):
    model = MODELS[kind]()
    before = reachable_bytes(model)
    report = quire.conversion_report(WAYS[way](model))
    assert report.nbytes == (before, reachable_bytes(model))


@pytest.mark.cpu_only
@pytest.mark.filterwarnings("ignore:Sparse")
def test_a_sparse_weight_counts_by_what_it_stores():
    model = _sparse()
    indices = (65 + 64) * 8 + 64 * 4
    before = 64 * 64 * 4 + 64 * 4 + indices
    report = quire.conversion_report(WAYS["for inference"](model))
    assert report.nbytes[0] == before and report.left[0].names == ("1",)


def test_on_the_meta_device_the_report_counts_what_a_model_with_values_would_hold():
    with torch.device("meta"):
        model = Tied()
    report = quire.conversion_report(WAYS["for inference"](model))
    assert report.nbytes == quire.conversion_report(WAYS["for inference"](Tied())).nbytes


def _two_heads():
    model = Tied()
    model.second = nn.Linear(128, 320, bias=False)
    model.second.weight = model.embedding.weight
    return model


def _two_parameters_of_one_memory():
    model = nn.Sequential(nn.Embedding(320, 128), nn.Linear(128, 320, bias=False))
    model[1].weight = nn.Parameter(model[0].weight.detach())
    return model


def _two_layers():
    model = nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 128))
    model[1].weight = model[0].weight
    return model


def _two_layers_with_a_parameter_each():
    model = nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 128))
    model[1].weight = nn.Parameter(model[0].weight.detach())
    return model


CODES = 320 * 128 + 320 * 4  # mxfp8: a byte for each value, and one for 32
#: Name -> the model, names of weights that are codes apart, names of those that keep values, bytes of the codes.
UNTIED = {
    "head": (Tied, ("head.weight",), ("embedding.weight",), CODES),
    "two heads": (_two_heads, ("head.weight", "second.weight"), ("embedding.weight",), CODES),
    "two parameters of one memory": (_two_parameters_of_one_memory, ("1.weight",), ("0.weight",), CODES),
    "two layers": (_two_layers, (), (), 0),
    "two layers with a parameter each": (
        _two_layers_with_a_parameter_each,
        ("0.weight", "1.weight"),
        (),
        2 * (128 * 128 + 128 * 4),
    ),
    "slices of one tensor": (_slices_of_one_tensor, (), (), 0),
}


@pytest.mark.parametrize("kind", UNTIED)
def test_parameters_that_no_longer_share_memory_are_said(kind):
    make, codes, others, nbytes = UNTIED[kind]
    model = make()
    if not codes:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert quire.conversion_report(WAYS["for inference"](model)).untied == ()
        return
    said = f"{' and '.join(codes)} shared memory" + (f" with {others[0]}" if others else "")
    with pytest.warns(UserWarning, match=said):
        WAYS["for inference"](model)
    report = quire.conversion_report(model)
    assert [tuple(one) for one in report.untied] == [(codes, others, nbytes)]
    assert f"note: {said}" in str(report)
    assert copy.deepcopy(report) == report


def test_quantize_model_says_what_it_unties_and_the_filter_that_is_proposed_keeps_it_tied():
    model = Tied()
    with pytest.warns(UserWarning, match=r"quantize_model: head.weight shared memory.* leave the layer out by filter="):
        quire.quantize_model(model, "mxfp8")
    model = Tied()
    report = quire.conversion_report(WAYS["leaving the head"](model))
    assert report.untied == () and model.head.weight is model.embedding.weight


def test_layers_alike_are_said_once():
    pairs = [nn.Sequential(nn.Embedding(64, 64), nn.Linear(64, 64, bias=False)) for _ in range(3)]
    for embedding, head in pairs:
        head.weight = embedding.weight
    report = quire.conversion_report(WAYS["for inference"](nn.Sequential(*pairs)))
    assert len(report.untied) == 3 and sum("shared memory" in note for note in report.notes) == 1
