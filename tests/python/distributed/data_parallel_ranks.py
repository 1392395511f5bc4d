"""What the two processes of test_data_parallel.py do."""

import copy

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

import quire
from every_recipe import some

RECIPES = some("fp8_current", "mxfp8", "nvfp4_no_sr").values()
STEPS, RANKS = 3, 2
#: Layers whose parameters FullyShardedDataParallel flattens: it leaves tensors in the place of parameters.
FLATTENED = {
    "Linear": lambda: quire.Linear(32, 32),
    "Linear without bias": lambda: quire.Linear(32, 32, bias=False),
    "LayerNormLinear": lambda: quire.LayerNormLinear(32, 32),
    "LayerNormMLP": lambda: quire.LayerNormMLP(32, 64, normalization="RMSNorm"),
    "MoE": lambda: quire.MoE(32, 32, num_experts=4, top_k=2, bias=True),
    "MoE of stacked weights": lambda: quire.MoE(32, 32, num_experts=4, top_k=2, single_grouped_weight=True),
}


def make_model():
    torch.manual_seed(0)
    return torch.nn.Sequential(quire.Linear(32, 64), torch.nn.GELU(), quire.Linear(64, 32))


def quantized(recipe):
    with quire.quantized_model_init(recipe=recipe, keep_master=True):
        return make_model()


def batches():
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(RANKS, 5, 32, generator=generator) for _ in range(STEPS)]


def loss(model, x, recipe):
    with quire.autocast(recipe=recipe, enabled=recipe is not None):
        return (model(x) - x).square().mean()


def single_process(recipe, make=make_model):
    """The parameters after training on all of each batch, a rank's part after the other."""
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    for batch in batches():
        for x in batch:
            (loss(model, x, recipe) / RANKS).backward()
        optimizer.step()
        optimizer.zero_grad()
    return list(model.parameters())


def train_on_batches(model, rank, recipe):
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    for batch in batches():
        loss(model, batch[rank], recipe).backward()
        optimizer.step()
        optimizer.zero_grad()


def sharded(model, compiled):
    mesh = init_device_mesh("cpu", (RANKS,))
    for layer in (model[0], model[2]):
        if compiled:
            layer.compile(fullgraph=True, backend="aot_eager")
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def trains_with_flat_parameters(rank):
    """FullyShardedDataParallel, the older one, whose default is use_orig_params=False."""
    recipes = [*some("mxfp8", "nvfp4_no_sr").values(), None]
    for index, make in enumerate(FLATTENED.values()):
        for recipe in recipes:

            def model(make=make):
                torch.manual_seed(0)
                return torch.nn.Sequential(make(), torch.nn.GELU(), make())

            expected = single_process(recipe, model)
            options = {"use_orig_params": (index + recipes.index(recipe)) % 2 == 1}
            flat = FullyShardedDataParallel(model(), device_id=torch.device("cpu"), **options)
            train_on_batches(flat, rank, recipe)
            with FullyShardedDataParallel.summon_full_params(flat):
                found = flat.state_dict()
            for (name, a), b in zip(found.items(), expected, strict=True):
                torch.testing.assert_close(a, b, rtol=0, atol=0, msg=f"{make()}, {recipe}: {name}")


def check_quantized(rank, recipe):
    """Weights that stay quantized: replicas train as one process, shards are refused and leave the model as it was."""
    expected = single_process(recipe, lambda: quantized(recipe))
    parallel = torch.nn.parallel.DistributedDataParallel(quantized(recipe), init_sync=False)
    train_on_batches(parallel, rank, recipe)
    for a, b in zip(parallel.parameters(), expected, strict=True):
        if isinstance(a, quire.QuantizedTensor):
            a, b = a.master, b.master
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    check_synchronized(rank, recipe)
    model = quantized(recipe)
    try:
        fully_shard(model[0], mesh=init_device_mesh("cpu", (RANKS,)))
    except NotImplementedError as error:
        words = (
            "rows of a quantized tensor are not sharded",
            "Call quire.distributed.gather_codes(model, recipe) first",
            "[32, 32]",
        )
        assert all(word in str(error) for word in words), str(error)
    else:
        raise AssertionError("fully_shard took a quantized parameter")
    train_on_batches(model, rank, recipe)


def check_synchronized(rank, recipe):
    """Ranks that start differently take the first one's weights and stay alike."""
    model = quantized(recipe)
    first = [(p.master if isinstance(p, quire.QuantizedTensor) else p).detach().clone() for p in model.parameters()]
    if rank > 0:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(-3.0)
    parallel = torch.nn.parallel.DistributedDataParallel(model)
    for parameter, value in zip(model.parameters(), first, strict=True):
        if isinstance(parameter, quire.QuantizedTensor):
            torch.testing.assert_close(parameter.master, value, rtol=0, atol=0)
            assert same_on_all_ranks(parameter.detach().dequantize())
        else:
            torch.testing.assert_close(parameter, value, rtol=0, atol=0)
    train_on_batches(parallel, rank, recipe)
    for parameter in model.parameters():
        assert same_on_all_ranks(parameter.master if isinstance(parameter, quire.QuantizedTensor) else parameter)


def same_on_all_ranks(tensor):
    found = [torch.empty_like(tensor) for _ in range(RANKS)]
    torch.distributed.all_gather(found, tensor.detach().contiguous())
    return all(torch.equal(found[0], other) for other in found)


def trains_as_one_process(rank):
    states = [torch.empty(2, dtype=torch.int64) for _ in range(RANKS)]
    torch.distributed.all_gather(states, make_model()[0].sr_state)
    assert states[0][0] != states[1][0], "the ranks round alike"

    for recipe in RECIPES:
        expected = single_process(recipe)
        parallel = torch.nn.parallel.DistributedDataParallel(make_model())
        seed = parallel.module[0].sr_state.clone()
        train_on_batches(parallel, rank, recipe)
        assert torch.equal(parallel.module[0].sr_state, seed), "DistributedDataParallel wrote the random state"
        for a, b in zip(parallel.parameters(), expected, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)
        for compiled in (False, True):
            model = sharded(copy.deepcopy(make_model()), compiled)
            train_on_batches(model, rank, recipe)
            for a, b in zip(model.parameters(), expected, strict=True):
                torch.testing.assert_close(a.full_tensor(), b, rtol=0, atol=0)
        check_quantized(rank, recipe)


def seeds(rank):
    """Of a sharded layer and of one that is not, by the defaults and within data_parallel_rank(0)."""

    def made():
        torch.manual_seed(0)
        sharded = quire.Linear(64, 64, parallel=quire.distributed.Parallel("column", torch.distributed.group.WORLD))
        return [int(layer.sr_state[0]) for layer in (sharded, quire.Linear(64, 64))]

    default = made()
    with quire.distributed.data_parallel_rank(0):
        return default, made()
