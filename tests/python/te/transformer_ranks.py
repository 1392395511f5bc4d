"""A TransformerLayer sharded over processes beside the same one of one process, for tests/ranks.py."""

from contextlib import nullcontext

import torch
from torch import distributed

import quire
from quire import te

SEQUENCE, BATCH, HIDDEN, FFN, HEADS = 8, 4, 64, 128, 4


def made(**division):
    torch.manual_seed(0)
    options = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "activation": "swiglu", "num_gqa_groups": 2}
    return te.TransformerLayer(HIDDEN, FFN, HEADS, fuse_qkv_params=True, **options, **division)


def shard(name, whole, rank, size):
    """What a rank has of a parameter: heads with their queries, keys and values, and gate and linear part each."""
    if name.endswith(("proj.weight", "fc2_weight")):
        return whole.chunk(size, 1)[rank]
    if "fc1_" in name:
        return torch.cat([part.chunk(size)[rank] for part in whole.chunk(2)])
    return whole.chunk(size)[rank] if name.endswith(("qkv.weight", "qkv.bias")) else whole


def trained(layer, recipe, x, dy):
    x = x.detach().requires_grad_()
    with nullcontext() if recipe is None else quire.autocast(recipe=recipe):
        y = layer(x)
    y.backward(dy)
    return y.detach(), x.grad, {name: parameter.grad for name, parameter in layer.named_parameters()}


def layer_equals_one_process(rank, recipe, sequence, bound):
    """The weights are those of the whole layer, and the result and all gradients differ by at most `bound` of their
    largest value."""
    size, group = distributed.get_world_size(), distributed.group.WORLD
    x, dy = torch.randn(2, SEQUENCE, BATCH, HIDDEN, generator=torch.Generator().manual_seed(1))
    alone = made()
    expected = trained(alone, recipe, x, dy)
    layer = made(set_parallel_mode=True, tp_group=group, tp_size=size, sequence_parallel=sequence)
    drawn = dict(layer.named_parameters())  # after the same seed as the whole
    for name, whole in alone.named_parameters():
        assert torch.equal(drawn[name], shard(name, whole, rank, size)), name
    own = [part.chunk(size)[rank] if sequence else part for part in (x, dy)]
    y, dx, gradients = trained(layer, recipe, *own)
    whole = [part.chunk(size)[rank] if sequence else part for part in expected[:2]]
    compared = {"y": (y, whole[0]), "dx": (dx, whole[1])}
    compared |= {name: (grad, shard(name, expected[2][name], rank, size)) for name, grad in gradients.items()}
    far = {name: float((found - wanted).abs().max() / wanted.abs().max()) for name, (found, wanted) in compared.items()}
    assert all([distance <= bound for distance in far.values()]), far
