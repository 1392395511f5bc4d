"""Layers whose weights fully_shard divides, for functions that tests/ranks.py runs."""

import copy
import math
import warnings
from typing import NamedTuple

import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import checkpoint

import quire
import ranks
from every_recipe import TABLE
from python.distributed import style_ranks
from python.distributed.sums import assert_same_sums
from quire.distributed import gather_codes, shard_weights
from ranks import here

IN, OUT, TOKENS, STEPS = 256, 512, 48, 2
_GATHER = getattr(distributed, "all_gather_single", distributed.all_gather_into_tensor)


class Case(NamedTuple):
    """mesh: sizes, the last one of shards; (1,): each process for itself. low: MixedPrecisionPolicy of bfloat16.
    outputs: of the first layer."""

    recipe: str
    kind: str = "linears"
    mesh: tuple[int, ...] = (2,)
    reshard: bool | None = None
    low: bool = False
    backend: str = ""
    accumulate: int = 1
    outputs: int = OUT


class Grouped(torch.nn.Module):
    """Two groups of tokens, through weights of their own and stacked ones."""

    def __init__(self, outputs):
        super().__init__()
        self.up = quire.GroupedLinear(2, IN, outputs)
        self.down = quire.GroupedLinear(2, outputs, IN, single_grouped_weight=True)

    def forward(self, x):
        splits = [len(x) // 2, len(x) - len(x) // 2]
        return self.down(self.up(x, splits), splits)


class Checkpointed(torch.nn.Module):
    """Its forward pass runs again in backward."""

    def __init__(self, outputs, reentrant=False):
        super().__init__()
        self.up, self.down, self.reentrant = quire.Linear(IN, outputs), quire.Linear(outputs, IN), reentrant

    def forward(self, x):
        return checkpoint(lambda x: self.down(self.up(x)), x, use_reentrant=self.reentrant)


def layers_of(kind, outputs):
    if kind == "linears":
        return [quire.Linear(IN, outputs), torch.nn.GELU(), quire.Linear(outputs, IN)]
    if kind == "norms":
        return [quire.LayerNormLinear(IN, outputs), quire.Linear(outputs, IN), quire.LayerNormMLP(IN, outputs)]
    if kind == "grouped":
        return [Grouped(outputs)]
    if kind == "mixture":
        return [quire.MoE(IN, outputs, 4, 2)]
    return [Checkpointed(outputs, kind == "reentrant") for _ in range(2)]


def make_layers(case):
    torch.manual_seed(0)
    model = torch.nn.Sequential(*layers_of(case.kind, case.outputs))
    for i, state in enumerate(model.modules()):
        for name in ("sr_state", "fc1_sr_state", "fc2_sr_state"):
            if hasattr(state, name):
                getattr(state, name).copy_(torch.tensor([i, 0]))
    return here(model)


def mesh_of(case):
    names = ("replicate", "shard")[-len(case.mesh) :]
    if case.mesh == (1,):
        sizes = (distributed.get_world_size(), 1)
        return init_device_mesh(ranks.place, sizes, mesh_dim_names=("replicate", "shard"))["shard"]
    return init_device_mesh(ranks.place, case.mesh, mesh_dim_names=names)


def shard(model, case, **options):
    options |= {} if case.reshard is None else {"reshard_after_forward": case.reshard}
    if case.low:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model:
        if next(layer.parameters(), None) is not None:
            if case.backend:
                layer.compile(fullgraph=True, backend=case.backend)
            fully_shard(layer, mesh=mesh_of(case), **options)
    return fully_shard(model, mesh=mesh_of(case), **options)


def sharded(case, codes, **options):
    """A model, and what warnings said."""
    model = make_layers(case)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        if codes:
            gather_codes(model, TABLE[case.recipe], **options)
        shard(model, case)
    return model, [str(one.message) for one in said]


class CountedGather:
    """What set_custom_all_gather() takes. bytes: of this process, of each gather."""

    def __init__(self, model):
        self.bytes = []
        for module in model.modules():
            if hasattr(module, "set_custom_all_gather"):
                module.set_custom_all_gather(self)

    def allocate(self, size, *, dtype, device):
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        self.bytes.append(input_tensor.nbytes)
        return _GATHER(output_tensor, input_tensor, group, async_op)


def batches(case):
    """x of each rank, for each step and each pass that accumulates."""
    generator = torch.Generator().manual_seed(7)
    dtype = torch.bfloat16 if case.low else torch.float32
    shape = (STEPS, case.accumulate, math.prod(case.mesh), TOKENS, IN)
    return here(torch.randn(shape, generator=generator).to(dtype))


def whole(t):
    """All rows of a tensor of which each rank has some, or which each has."""
    if not isinstance(t, DTensor):
        return t.detach()
    if ranks.place == "cpu":
        return t.full_tensor()
    own = t.to_local().detach() * 1  # a plain tensor; and gloo has the gather of full_tensor() for the CPU alone
    parts = [torch.empty_like(own) for _ in range(t.device_mesh.size())]
    distributed.all_gather(parts, own, group=t.device_mesh.get_group())
    return torch.cat(parts)


def passes(model, x, recipe):
    """y, and the gradient of x."""
    x = x.clone().requires_grad_()
    with quire.autocast(enabled=recipe is not None, recipe=recipe):
        y = model(x)
        y = y[0] if isinstance(y, tuple) else y
        (y - x.detach()).square().mean().backward()
    return [y.detach(), x.grad]


@torch.no_grad()
def update(parameters, processes=1):
    parameters = list(parameters)
    for parameter in parameters:
        parameter -= parameter.grad * (0.125 / processes)
    ranks.settle()
    for parameter in parameters:
        parameter.grad = None


def train_shards(model, rank, case):
    """All results of this rank, and in the end whole parameters."""
    found = []
    for xs in batches(case):
        for i, each in enumerate(xs):
            model.set_requires_gradient_sync(i == len(xs) - 1)
            found += passes(model, each[rank % len(each)], TABLE[case.recipe])
        update(model.parameters())
    return found + [whole(parameter) for parameter in model.parameters()]


def differing(a, b):
    return [i for i, (one, other) in enumerate(zip(a, b, strict=True)) if not torch.equal(one, other)]


# ---------------------------------------------------------------- what is equal


def values_equal_one_process(rank, case):
    model, _ = sharded(case, codes=False)
    found, one, expected = train_shards(model, rank, case), make_layers(case), []
    processes = math.prod(case.mesh)
    for xs in batches(case):
        for each in xs:
            expected += [passes(one, x, TABLE[case.recipe]) for x in each][rank]
        update(one.parameters(), processes)
    expected += [parameter.detach() for parameter in one.parameters()]
    if processes == 2:  # a sum of two has one order
        assert differing(found, expected) == []
    for a, b in zip(found, expected, strict=True):
        assert_same_sums(a, b, OUT)


def shards_equal_replicas(rank, recipe):
    """fully_shard, with values and with codes, and DistributedDataParallel: scales of delayed scaling, which processes
    agree about, and random bits, which each has for itself."""
    case, found = Case(recipe, "norms"), []
    for codes in (None, False, True):
        model = make_layers(case) if codes is None else sharded(case, codes)[0]
        run = torch.nn.parallel.DistributedDataParallel(model) if codes is None else model
        results = []
        for xs in batches(case):
            results += passes(run, xs[0, rank], TABLE[recipe])
            update(model.parameters())
        found.append([*results, *map(whole, model.parameters())])
    assert differing(found[0], found[1]) == [] and differing(found[1], found[2]) == []


def codes_equal_values(rank, case, warned=0):
    """Returns bytes that this process gives to gathers of values, and of codes."""
    found, sent = [], []
    for codes in (False, True):
        model, said = sharded(case, codes, **({"recompute": True} if codes and "check" in case.kind else {}))
        assert len(said) == (warned if codes else 0), said
        counted = CountedGather(model)
        found.append(train_shards(model, rank, case))
        sent.append(counted.bytes)
        torch._dynamo.reset()
    assert differing(*found) == []
    return sent


def weights_of_a_graph_equal_values(rank, case, shards, warned=0):
    """shard_weights, of the whole model in one graph where there is a backend, and fully_shard."""
    expected = train_shards(sharded(case._replace(backend=""), codes=False)[0], rank, case)
    model, found, mesh = make_layers(case), [], mesh_of(case)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        shard_weights(model, mesh, TABLE[case.recipe])
    assert len(said) == warned, [str(one.message) for one in said]
    assert sum(isinstance(parameter, DTensor) for parameter in model.parameters()) == shards
    run = torch.compile(model, fullgraph=True, backend=case.backend) if case.backend else model
    for xs in batches(case):
        for each in xs:
            found += passes(run, each[rank % len(each)], TABLE[case.recipe])
        update(model.parameters())
    found += [whole(parameter) for parameter in model.parameters()]
    torch._dynamo.reset()
    if TABLE[case.recipe] is not None:
        assert differing(found, expected) == []
    for a, b in zip(found, expected, strict=True):  # matmuls of PyTorch and of quire
        assert_same_sums(a, b, OUT)


def linears_share_their_gathers(rank, recipe):
    """Codes of one direction for each gather, where weights are all that is gathered."""
    case, sent = Case(recipe), []
    for codes in (False, True):
        model = make_layers(case)
        for layer in (model[0], model[2]):
            layer.bias = None
        if codes:
            gather_codes(model, TABLE[recipe])
        shard(model, case)
        counted = CountedGather(model)
        passes(model, batches(case)[0, 0, rank], TABLE[recipe])
        sent.append(counted.bytes)
    assert len(sent[0]) == len(sent[1]) == 4  # two weights, forward and backward
    return [codes / (values / 2) for values, codes in zip(*sent, strict=True)]


def sharded_features_and_rows(rank, kind, dim, recipe):
    """parallelize_module on one dimension of a mesh, fully_shard on the other."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    replica, part = mesh["dp"].get_local_rank(), mesh["tp"].get_local_rank()
    one, model = (style_ranks.converted(style_ranks.model()) for _ in range(2))
    parallelize_module(model, mesh["tp"], style_ranks.plan(kind, len(model), dim, True))
    for layer in (*model, model):
        fully_shard(layer, mesh=mesh["dp"])
    generator = torch.Generator().manual_seed(3)

    def own(t):
        return t if dim is None else t.chunk(2, dim)[part]

    for _ in range(STEPS):
        xs = torch.randn(2, *style_ranks.TOKENS, style_ranks.HIDDEN, generator=generator)
        expected = [passes(one, x, TABLE[recipe]) for x in xs][replica]
        x = own(xs[replica]).clone().requires_grad_()
        with quire.autocast(enabled=TABLE[recipe] is not None, recipe=TABLE[recipe]):
            y = model(x)
        # The mean is over all tokens.
        ((y - x.detach()).square().sum() / xs[replica].numel()).backward()
        for a, b in zip((y, x.grad), expected, strict=True):
            assert_same_sums(a, own(b), OUT)
        for (name, a), b in zip(model.named_parameters(), one.parameters(), strict=True):
            found = a.grad.full_tensor()
            assert_same_sums(found, b.grad / 2, OUT, name)
        update(one.parameters(), 2)
        update(model.parameters())


def quantized_parameters_have_masters(rank, recipe):
    case = Case(recipe)
    with quire.quantized_model_init(recipe=TABLE[recipe], keep_master=True):
        model = make_layers(case)
    gather_codes(model, TABLE[recipe])
    found = train_shards(shard(model, case), rank, case)
    assert differing(found, train_shards(sharded(case, codes=True)[0], rank, case)) == []
    assert model[0].weight.dtype == torch.float32


def static_scales_equal_one_process(rank, recipe, ways):
    """Layers whose x has a scale of their own, a buffer that every rank has whole; values and codes are gathered, by
    fully_shard and within a graph."""
    xs = torch.randn(2, TOKENS, IN, generator=torch.Generator().manual_seed(7))

    def layers():
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(quire.Linear(IN, IN, recipe=recipe) for _ in range(2)))
        for layer, scale in zip(model, (0.02, 0.005), strict=True):
            layer.input_scale.fill_(scale)
        return model

    one = layers()
    expected = [passes(one, x, recipe) for x in xs][rank] + [parameter.grad / 2 for parameter in one.parameters()]
    for way in ways:
        model = run = layers()
        if way in ("in a graph", "compiled"):
            shard_weights(model, mesh_of(Case(recipe)), recipe)
            run = torch.compile(model, fullgraph=True, backend="aot_eager") if way == "compiled" else model
        else:
            if way == "codes":
                gather_codes(model, recipe)
            shard(model, Case(recipe))
        found = passes(run, xs[rank], recipe)
        found += [p.grad.full_tensor() if isinstance(p, DTensor) else p.grad for p in model.parameters()]
        assert differing(found, expected) == [], way
        with torch.no_grad(), quire.autocast(recipe=recipe):
            assert torch.equal(run(xs[rank]), expected[0]), way
    torch._dynamo.reset()


def an_explanation_keeps_nothing_gathered(rank):
    """After a pass without gradients fully_shard leaves the parameters of its root gathered. The next pass would not
    see the values that a step has given them."""
    torch.manual_seed(0)
    whole, case = layers_of("linears", OUT)[0], Case("mxfp8")
    root, x = here(copy.deepcopy(whole)), batches(case)[0, 0, rank]
    fully_shard(root, mesh=mesh_of(case))
    parts = [*root.parameters()]
    with quire.autocast(recipe="mxfp8"), torch.no_grad():
        quire.explain(root, x)
        for parameter in (*here(whole).parameters(), *parts):
            parameter.mul_(2)
        assert torch.equal(root(x), whole(x))


def explanations_change_nothing(rank, recipe):
    """Of passes with and without gradients, before and behind each pass. Returns the collectives that the first two
    list, and what is said of a function that calls the model."""
    case, listed, found = Case(recipe), [], []
    expected = train_shards(sharded(case, codes=True)[0], rank, case)
    model, x = sharded(case, codes=True)[0], batches(case)[1, 0, 0]

    def explain(function=model):
        with quire.autocast(recipe=TABLE[recipe]):
            steps = quire.explain(function, x).steps
        listed.append([step.problem for step in steps if step.operation == "collective"])

    explain()
    with torch.no_grad():
        explain()
    try:
        explain(lambda x: model(x))
    except RuntimeError as error:
        listed.append(str(error))
    for xs in batches(case):
        found += passes(model, xs[0, rank], TABLE[recipe])
        before = [parameter.grad for parameter in model.parameters()]
        explain()
        assert all(p.grad is grad for p, grad in zip(model.parameters(), before, strict=True))
        update(model.parameters())
    found += [parameter.full_tensor() for parameter in model.parameters()]
    assert differing(found, expected) == []
    return listed[:3]
