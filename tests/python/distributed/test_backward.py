"""What backward of a layer reads of what forward saved, where each rank has some of the tokens."""

import contextlib

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

import quire
from every_recipe import some
from python.distributed.parallel_graphs import IN, OUT, TOKENS
from pytorch import Operators
from quire.distributed import Parallel
from ranks import rank_of

SIZE = 2
#: Those that round to nearest, and so give the same bits in one process, whichever its random states are.
RECIPES = some("high_precision", "fp8_current", "fp8_block", "mxfp8")


@pytest.fixture
def gathered(device):
    """The storages that a group gathers, whose ranks all have what this one has."""
    starts = []

    def gather(t, size, group):
        starts.append(t.untyped_storage().data_ptr())
        return torch.cat([t] * size)

    def gather_all(several, size, group):
        return [gather(t, size, group) for t in several]

    library = torch.library.Library("_c10d_functional", "IMPL")
    for name, kernel in {"all_gather_into_tensor": gather, "all_gather_into_tensor_coalesced": gather_all}.items():
        library.impl(name, kernel, {"cpu": "CPU", "cuda": "CUDA"}.get(device.type, "PrivateUse1"))
    yield starts
    library._destroy()


def weight_gradient(device, recipe, gathered, watch):
    """dw of a layer; and how many tensors backward gathered that forward had not saved itself."""
    torch.manual_seed(0)
    x, dy, saved = torch.randn(TOKENS // SIZE, IN), torch.randn(TOKENS, OUT // SIZE), set()

    def pack(t):
        saved.add(t.untyped_storage().data_ptr())
        return t

    with rank_of(0, SIZE, device.type) as group:
        layer = quire.Linear(IN, OUT, bias=False, parallel=Parallel("column", group, sequence=True)).to(device)
        with quire.autocast(recipe is not None, recipe=recipe), saved_tensors_hooks(pack, lambda t: t):
            y = layer(x.to(device))
        gathered.clear()
        with watch():
            (dw,) = torch.autograd.grad(y, layer.weight, dy.to(device))
    whole = quire.Linear(IN, OUT // SIZE, bias=False).to(device)
    whole.load_state_dict({"weight": layer.weight.detach()}, strict=False)
    with quire.autocast(recipe is not None, recipe=recipe):
        y = whole(torch.cat([x] * SIZE).to(device))
    assert torch.equal(dw.cpu(), torch.autograd.grad(y, whole.weight, dy.to(device))[0].cpu())
    return len([start for start in gathered if start not in saved])


@pytest.mark.parametrize("watch", [contextlib.nullcontext, torch.profiler.profile])
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_what_forward_saved_is_gathered_from_where_it_lies(device, gathered, recipe, watch):
    assert weight_gradient(device, recipe, gathered, watch) == 0 < len(gathered)


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_somebody_who_traces_sees_it_tied_to_the_gradient(device, gathered, recipe):
    assert weight_gradient(device, recipe, gathered, Operators) > 0
