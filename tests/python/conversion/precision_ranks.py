"""What the two processes of test_state_precision.py do: a mixture under the mixed precision of both kinds of FSDP."""

import warnings

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy, fully_shard

import quire
from every_recipe import STATIC

RECIPE = STATIC["static_nvfp4"]
BIAS = 1.0 + torch.arange(4) * 2**-20  # of 21 bits


def make_mixture():
    torch.manual_seed(0)
    model = torch.nn.Sequential(quire.MoE(64, 96, 4, 2, expert_bias=True, recipe=RECIPE))
    model[0].expert_bias.copy_(BIAS)
    for name, buffer in model.named_buffers():
        if "input_scale" in name:
            buffer.fill_(0.0123456)
    return model


def buffers(model):
    return {name.replace("_fsdp_wrapped_module.", ""): buffer.clone() for name, buffer in model.named_buffers()}


def run(model, dtype):
    with quire.autocast(recipe=RECIPE):
        model(torch.randn(8, 64, dtype=dtype)).sum().backward()


def check_same(model, expected):
    found = buffers(model)
    assert found.keys() == expected.keys() and len(found) == 3
    for name, value in expected.items():
        assert found[name].dtype == torch.float32 and torch.equal(found[name], value), name


def fully_sharded(rank):
    model = make_mixture()
    expected = buffers(model)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.bfloat16)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)), mp_policy=policy)
    run(model, torch.float32)
    check_same(model, expected)
    model.to(torch.bfloat16)
    check_same(model, expected)


def _old(**options):
    with warnings.catch_warnings(action="ignore"):
        return FullyShardedDataParallel(
            make_mixture(),
            device_id=torch.device("cpu"),
            mixed_precision=MixedPrecision(**options),
            use_orig_params=True,
        )


def old_fsdp(rank):
    expected = buffers(make_mixture())
    for options in ({}, {"buffer_dtype": torch.float32}):
        model = _old(param_dtype=torch.bfloat16, **options)
        run(model, torch.bfloat16)
        check_same(model, expected)


def old_fsdp_that_converts_buffers(rank):
    """What it says."""
    try:
        run(_old(param_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16), torch.bfloat16)
    except TypeError as error:
        return str(error)
