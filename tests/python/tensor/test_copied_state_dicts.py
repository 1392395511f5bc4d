"""Copies that PyTorch makes of a state dict with quantized weights, to save or send it: the same codes and scales."""

import copy
import io
import pickle
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
from torch.distributed import _state_dict_utils as utils
from torch.distributed import checkpoint
from torch.distributed.checkpoint import _state_dict_stager, staging
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

import quire
from quire import QuantizedStack, QuantizedTensor

pytestmark = pytest.mark.any_device

SPECS = [
    "fp8_tensor",
    "fp8_row",
    "fp8_block",
    "mxfp8",
    "mxfp8:32x32",
    "mxfp8:swizzled",
    "mxfp4",
    "nvfp4",
    "nvfp4:16x16",
]
SPECS += ["nvfp4:row_scaled", "nvfp4:interleaved"]


def values(*shape, seed=3):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def state(spec):
    """Tensors as state dicts hold them: a weight, one with a master, one with a given scale, a stack, a plain one."""
    weight = quire.quantize(values(48, 64).bfloat16(), spec, columnwise=True)
    other = quire.quantize(values(48, 64, seed=4).bfloat16(), spec, columnwise=True)
    master = quire.quantize(values(48, 64), spec)
    master.master = values(48, 64)
    held = {"weight": weight, "master": master, "stack": QuantizedStack.of([weight, other])}
    if spec == "fp8_tensor":
        held["given"] = quire.quantize(values(48, 64), spec, scale=torch.tensor([3.7]))
    return {"model": held, "plain": values(5), "list": [torch.nn.Parameter(weight.clone(), requires_grad=False)]}


def of(tensor):
    return [tensor] if not isinstance(tensor, QuantizedTensor) else list(tensor.named().values())


def leaves(state):
    return [*state["model"].items(), ("plain", state["plain"]), ("list", state["list"][0])]


def check(copied, original):
    """Equal bytes in memory of its own, which writes to the original do not reach."""
    for (name, a), (_, b) in zip(leaves(copied), leaves(original), strict=True):
        assert isinstance(a, QuantizedTensor) == isinstance(b, QuantizedTensor), name
        if isinstance(b, QuantizedTensor):
            assert (a.spec, a.shape, a.dtype, a.stacked) == (b.spec, b.shape, b.dtype, b.stacked), name
        for x, y in zip(of(a), of(b), strict=True):
            assert x is y is None or (torch.equal(x, y) and x.data_ptr() != y.data_ptr()), name


def through_stager(share):
    def copied(state, folder):
        stager = _state_dict_stager.StateDictStager(share_memory=share)
        first = stager.stage(state)
        check(first, state)
        return stager.stage(state)  # into the storages of the first

    return copied


def through_cpu_state_dict(state, folder, **options):
    return utils._copy_state_dict(state, utils._create_cpu_state_dict(state, **options), type_check=False)


def cached(state, folder):
    stager = staging.BlockingAsyncStager(cache_staged_state_dict=False, type_check=False)
    return stager.stage(state)


def shared(state, folder):
    copied = copy.deepcopy(state)
    for _, tensor in leaves(copied):
        assert tensor.share_memory_() is tensor and tensor.is_shared()
    return copied


def saved(state, folder):
    file = io.BytesIO()
    torch.save(state, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=True)


def empty(state):
    """Tensors to load into, of other values."""
    return {
        "model": {
            name: torch.zeros_like(t) if type(t) is torch.Tensor else t.clone().zero_()
            for name, t in state["model"].items()
        },
        "plain": torch.zeros(5),
        "list": [state["list"][0].detach().clone().zero_()],
    }


def loaded(folder, like):
    into = empty(like)
    checkpoint.load(into, checkpoint_id=folder, no_dist=True)
    return into


def distributed_save(state, folder):
    checkpoint.save(state, checkpoint_id=folder, no_dist=True)
    return loaded(folder, state)


def async_save(make):
    def copied(state, folder):
        options = {} if make is None else {"async_stager": make()}
        before = copy.deepcopy(state)
        pending = checkpoint.async_save(state, checkpoint_id=folder, no_dist=True, **options)
        pending = getattr(pending, "upload_completion", pending)
        pending.result()
        return loaded(folder, before)

    return copied


def model_state(state, folder):
    module = torch.nn.Module()
    for name, tensor in state["model"].items():
        module.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))
    got = get_model_state_dict(module, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    return state | {
        "model": {name: tensor.clone() for name, tensor in got.items()},
        "plain": state["plain"].clone(),
        "list": [state["list"][0].clone()],
    }


def between_processes(state, folder):
    """What queues and pipes of torch.multiprocessing send: handles of shared memory."""
    sent = copy.deepcopy(state)  # its memory becomes shared
    return pickle.loads(bytes(ForkingPickler.dumps(sent)))


COPIES = {
    "deepcopy": lambda state, folder: copy.deepcopy(state),
    "torch.save": saved,
    "multiprocessing": between_processes,
    "shared memory": shared,
    "StateDictStager": through_stager(False),
    "StateDictStager, shared": through_stager(True),
    "_copy_state_dict": through_cpu_state_dict,
    "_copy_state_dict, shared": lambda state, folder: through_cpu_state_dict(state, folder, share_memory=True),
    "BlockingAsyncStager": cached,
    "dcp.save": distributed_save,
    "dcp.async_save": async_save(None),
    "dcp.async_save, DefaultStager": async_save(
        lambda: staging.DefaultStager(staging.StagingOptions(False, False, False, False))
    ),
    "dcp.async_save, BlockingAsyncStager": async_save(lambda: staging.BlockingAsyncStager(type_check=False)),
    "get_model_state_dict": model_state,
}


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("way", COPIES)
def test_a_copy_of_a_state_dict_has_the_same_bytes(way, spec, tmp_path):
    original = state(spec)
    expected = copy.deepcopy(original)
    check(COPIES[way](original, tmp_path), expected)
    check(original, expected)


@pytest.mark.parametrize("spec", ["mxfp8", "nvfp4:16x16", "fp8_block"])
@pytest.mark.parametrize("view", [lambda t: t.t(), lambda t: t[:, 3:], lambda t: t[16:32], lambda t: t[3]])
def test_a_copy_of_a_view_has_its_values_or_is_refused(view, spec, tmp_path):
    q = quire.quantize(values(48, 64), spec, columnwise=True)
    expected = view(q.dequantize()).clone()

    def plain(tensor):
        return tensor.dequantize() if isinstance(tensor, QuantizedTensor) else tensor.clone()

    for copied in (copy.deepcopy, lambda t: saved(t, None), lambda t: pickle.loads(pickle.dumps(t)), torch.clone):
        again = copied(view(q))
        assert torch.equal(plain(again), expected)
        again.zero_()
        assert torch.equal(plain(view(q)), expected), "a copy has memory of its own"
    stager = _state_dict_stager.StateDictStager()
    try:
        again = stager.stage({"view": view(q)})["view"]
    except TypeError as error:
        assert "data_ptr: this is a view of a QuantizedTensor" in str(error)
    else:
        assert torch.equal(plain(again), expected)
