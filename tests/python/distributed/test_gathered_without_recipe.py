"""What a model whose weights are gathered as codes says where no recipe is active."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import quire
from quire.nn import product


def test_a_gathered_model_without_a_recipe_is_told_to_run_within_that_of_gather_codes():
    torch.distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        model = torch.nn.Sequential(quire.Linear(256, 256))
        quire.distributed.gather_codes(model, "mxfp8")
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        product.tell_decoding.cache_clear()
        words = "Linear: .* run it within quire.autocast of the recipe that quire.distributed.gather_codes got$"
        with pytest.warns(UserWarning, match=words):
            model(torch.randn(4, 256))
    finally:
        torch.distributed.destroy_process_group()
