"""A state dict with quantized weights that is loaded into a model with plain ones: it is decoded, and that is said."""

import io
import warnings

import pytest
import torch
from torch import distributed, nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import set_model_state_dict

import quire
from quire.tensor import writes

pytestmark = pytest.mark.any_device


@pytest.fixture(autouse=True)
def not_told_yet():
    writes.TOLD.clear()
    yield
    writes.TOLD.clear()


def saved(recipe="mxfp8"):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    return quire.convert(model, recipe, for_inference=True, tokens=None, min_features=1).state_dict()


def values(state_dict):
    return {name: v.dequantize() if isinstance(v, quire.QuantizedTensor) else v for name, v in state_dict.items()}


def plain(kind=nn.Linear):
    return nn.Sequential(kind(64, 64), kind(64, 64))


def for_training():
    return quire.convert(plain(), "mxfp8", min_features=1)


def _by_file(model, state_dict):
    file = io.BytesIO()
    torch.save(state_dict, file)
    file.seek(0)
    model.load_state_dict(torch.load(file))


def _by_swapping(model, state_dict):
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.load_state_dict(state_dict)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def _by_parts(model, state_dict):
    for index, layer in enumerate(model):
        layer.load_state_dict({name: state_dict[f"{index}.{name}"] for name in ("weight", "bias")})


LOADS = {
    "load_state_dict": lambda model, state_dict: model.load_state_dict(state_dict),
    "not strict": lambda model, state_dict: model.load_state_dict(state_dict, strict=False),
    "from a file": _by_file,
    "by swapping": _by_swapping,
    "layer by layer": _by_parts,
    "within no_grad": torch.no_grad()(lambda model, state_dict: model.load_state_dict(state_dict)),
    "set_model_state_dict": set_model_state_dict,
}
MODELS = {"torch": plain, "quire": lambda: plain(quire.Linear), "converted for training": for_training}


@pytest.mark.interleaved
@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("kind", MODELS)
def test_decoding_is_said_once_with_the_remedy_where_the_caller_loads(kind, load):
    model, state_dict = MODELS[kind](), saved()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        LOADS[load](model, state_dict)
        LOADS[load](MODELS[kind](), state_dict)
    assert len(caught) == 1
    text = str(caught[0].message)
    assert text.startswith("load_state_dict: a weight that is quantized as mxfp8:nan:interleaved is decoded")
    assert "quire.convert(model, recipe, for_inference=True, tokens=None" in text
    assert caught[0].filename == __file__
    expected = values(state_dict)
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4"])
def test_the_remedy_loads_the_codes_and_says_nothing(recipe):
    state_dict = saved(recipe)
    options = eval(f"dict({writes.SAME_LAYERS})", {"quire": quire, "state_dict": state_dict})
    model = quire.convert(plain(), recipe, for_inference=True, tokens=None, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.load_state_dict(state_dict, assign=True)
    buffers = {name: value.buffers() for name, value in state_dict.items() if name.endswith("weight")}
    for name, own in buffers.items():
        loaded = model.get_parameter(name).buffers()
        assert loaded.keys() == own.keys() and all(torch.equal(loaded[key], own[key]) for key in own)


def test_what_decodes_by_intention_says_nothing():
    state_dict, target = saved(), torch.empty(64, 64)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        target.copy_(state_dict["0.weight"])
        nn.Parameter(target).data.copy_(state_dict["1.weight"])
        plain().load_state_dict(values(state_dict))
    assert torch.equal(target, state_dict["1.weight"].dequantize())


@pytest.mark.interleaved
@pytest.mark.cpu_only
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_distributed_checkpoint_that_is_read_into_plain_tensors_is_said(tmp_path):
    state_dict = saved()
    checkpoint.save(state_dict, checkpoint_id=tmp_path / "a", no_dist=True)
    model = plain()
    own = model.state_dict()
    with pytest.warns(UserWarning, match="quantized as mxfp8:nan:interleaved is decoded"):
        checkpoint.load(own, checkpoint_id=tmp_path / "a", no_dist=True)
    expected = values(state_dict)
    assert not distributed.is_initialized() and all(torch.equal(v, expected[name]) for name, v in own.items())
