"""Which models quire.recommend refuses, and what its errors say."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

import quire


@pytest.fixture
def mesh():
    torch.distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    torch.distributed.destroy_process_group()


def fully_shard_each(model, mesh):
    for module in (model[0], model):
        fully_shard(module, mesh=mesh)


def fully_shard_codes(model, mesh):
    quire.distributed.gather_codes(model, "mxfp8")
    fully_shard(model, mesh=mesh)


WAYS = {
    "each": fully_shard_each,
    "together": lambda model, mesh: fully_shard(model, mesh=mesh),
    "codes": fully_shard_codes,
    "before fully_shard": lambda model, mesh: quire.distributed.gather_codes(model, "mxfp8"),
    "rows": lambda model, mesh: quire.distributed.shard_weights(model, mesh, "mxfp8"),
    "a style": lambda model, mesh: parallelize_module(model, mesh, {"0": quire.distributed.ColumnParallel()}),
}


@pytest.mark.parametrize("way", WAYS)
def test_weights_that_are_sharded_are_not_timed_and_the_error_says_so(mesh, way):
    model = torch.nn.Sequential(quire.Linear(256, 512), torch.nn.GELU(), torch.nn.Linear(512, 256))
    WAYS[way](model, mesh)
    with pytest.raises(
        ValueError,
        match=r"^recommend: weights of \S+ are sharded.*; sharded are 0.*; call recommend before fully_shard",
    ):
        quire.recommend(model)


@pytest.mark.parametrize("unsharded", [False, True])
def test_a_sharded_layer_that_is_the_model_itself_is_told_from_one_that_is_missing(mesh, unsharded):
    model = torch.nn.Linear(256, 256)
    fully_shard(model, mesh=mesh)
    if unsharded:
        model.unshard()
    with pytest.raises(ValueError, match="^recommend: weights of FSDPLinear .*; sharded are the model itself; call"):
        quire.recommend(model)


OTHERS = {
    "GroupedLinear": lambda: quire.MoE(256, 256, 4),
    "LayerNormMLP": lambda: torch.nn.Sequential(quire.LayerNormMLP(256, 512)),
    "GroupedLinear and LayerNormLinear": lambda: torch.nn.Sequential(
        quire.LayerNormLinear(256, 256), quire.GroupedLinear(2, 256, 256, device="meta")
    ),
}


@pytest.mark.parametrize("kinds", OTHERS)
def test_a_model_without_linear_layers_is_told_that_its_experts_and_layers_with_a_norm_are_not_timed(kinds):
    match = (
        f"^recommend: .* experts are not timed, nor layers with a norm, here {kinds}; time a linear layer of the same"
    )
    with pytest.raises(ValueError, match=match):
        quire.recommend(OTHERS[kinds]())
