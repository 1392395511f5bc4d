"""Mixtures of one process and the same mixtures whose experts are sharded over a tp_group, and over an ep_group too,
for functions that tests/ranks.py runs."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import distributed
from torch.distributed import checkpoint
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

import quire
from every_recipe import TABLE
from python.distributed.expert_ranks import WAYS, passes
from python.distributed.parallel_layers import RECIPES, exact, exact_and_compiled, with_scales
from python.distributed.sums import assert_same_up_to
from quire.distributed import ExpertParallel, name_group

HIDDEN, INNER, EXPERTS, STEPS, TP = 64, 256, 4, 2, 2

WAYS = WAYS | {"exact": exact, "exact and compiled": exact_and_compiled}


@dataclass(frozen=True)
class Case:
    """tokens: of each place along ep, of which there is one without an ep_group. options: of both mixtures. ep: further
    ones of the sharded one. way: how the sharded one is run, of WAYS. style: whether ExpertParallel divides it."""

    recipe: str
    tokens: tuple[int, ...] = (29,)
    options: Mapping[str, object] = field(default_factory=dict)
    ep: Mapping[str, object] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    way: str = "eager"
    style: bool = False

    @property
    def experts_are_sharded(self):
        return len(self.tokens) > 1

    def make(self, **groups):
        torch.manual_seed(0)
        options = {"top_k": 2, "renormalize": True} | self.options
        made = quire.MoE(HIDDEN, INNER, EXPERTS, params_dtype=self.dtype, **options, **groups)
        return with_scales(made, RECIPES[self.recipe])

    def sharded(self):
        if not self.experts_are_sharded:
            return self.make(tp_group=distributed.group.WORLD)
        if self.style:
            part = self.make()
            if distributed.get_rank():  # whose own values are not taken
                for layer in (part.fc1, part.fc2):
                    for own in (next(layer.parameters()), *layer.buffers()):
                        torch.nn.init.ones_(own)
            return parallelize_module(part, mesh(), ExpertParallel(**self.ep))
        return self.make(ep_group=mesh().get_group("ep"), tp_group=mesh().get_group("tp"), **self.ep)

    def mixtures(self):
        """(of one process, of all processes), with the same values."""
        whole, part = self.make(), self.sharded()
        quire.set_rng_state(whole, quire.rng_state(part))
        for name, parameter in whole.named_parameters():
            if "bias" in name:
                torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(sum(name.encode())))
        for name, parameter in part.named_parameters():
            if "bias" in name:
                parameter.data.copy_(part_of(name, whole.get_parameter(name)))
            assert torch.equal(parameter, part_of(name, whole.get_parameter(name))), name
        return whole, part


@functools.cache
def mesh():
    made = init_device_mesh("cpu", (2, TP), mesh_dim_names=("ep", "tp"))
    for name in ("ep", "tp"):  # the same on all ranks
        name_group(made.get_group(name), f"test:{name}")
    return made


def place(case):
    """(along ep, along tp)."""
    return divmod(distributed.get_rank(), TP)


def part_of(name, t):
    """What this process has of a parameter of the mixture, or of its gradient. fc1 has gates, and then the others."""
    tp, layer = distributed.get_rank() % TP, name.split(".")[0]
    if layer.endswith("fc1"):
        axis = -1 if "bias" in name else -2
        return torch.cat([half.chunk(TP, axis)[tp] for half in t.chunk(2, axis)], axis)
    if layer.endswith("fc2") and "weight" in name:
        return t.chunk(TP, -1)[tp]
    return t


def scales_do_not_wait_for_the_end_of_a_step(rank, case):
    """equals_one_process() where delayed scaling itself reduces amaxes over nobody."""
    equals_one_process(rank, case, [distributed.new_group([each]) for each in range(TP)][rank])


def equals_one_process(rank, case, group=None):
    """Gradients of experts are equal; y and the gradient of x, and what follows from them, have sums over processes.
    group: of passes()."""
    whole, part = case.mixtures()
    generator = torch.Generator().manual_seed(1)
    xs, dys = (
        [torch.randn(sum(case.tokens), HIDDEN, generator=generator).to(case.dtype) for _ in range(STEPS)]
        for _ in range(2)
    )
    recipe, ep = RECIPES[case.recipe], place(case)[0] if case.experts_are_sharded else 0
    expected = passes(whole, xs, dys, recipe, whole, group=group)
    own = ([t.split(case.tokens)[ep] for t in ts] for ts in (xs, dys))
    found = passes(part, *own, recipe, WAYS[case.way](part), group=group)
    for step, (one, other) in enumerate(zip(found, expected, strict=True)):
        for name, value in one.items():
            where = f"{case}, step {step}: {name}"
            wanted = other[name].split(case.tokens)[ep] if name in ("y", "dx") else part_of(name, other[name])
            of_tokens = name.startswith(("router", "shared"))
            if of_tokens and case.experts_are_sharded:  # of this process's tokens
                distributed.all_reduce(value, group=mesh().get_group("ep"))
            assert value.dtype == wanted.dtype and value.shape == wanted.shape, where
            sums = name in ("y", "dx") or of_tokens
            if sums and not (case.way.startswith("exact") and not (of_tokens and case.experts_are_sharded)):
                if name.startswith("router") and case.tokens == (1,):
                    continue  # a difference of two numbers, which may cancel; "exact" compares it
                # Sums in float32 of at most 512 products, in 8 chains or more. In 16 bits two halves, which count as
                # one, their sum and that of one process are rounded, and those that the gradient of logits and the
                # result follow from in both.
                assert_same_up_to(value, wanted, 512 // 8 if value.dtype == torch.float32 else 3 + 4, where)
            else:
                assert torch.equal(value, wanted), f"{where}: {(value - wanted).abs().max()}"


def infinite_biases_stay_infinite(rank, case):
    """A bias is added by one process, and the others may not turn it into NaN."""
    whole, part = case.mixtures()
    for mixture in (whole, part):
        for name, bias in mixture.named_parameters():
            if "fc2" in name and "bias" in name:
                bias.data[..., 0] = -torch.inf
    x = torch.randn(8, HIDDEN, generator=torch.Generator().manual_seed(1))
    with torch.no_grad(), quire.autocast(recipe=TABLE[case.recipe]):
        infinite, found = whole(x).isinf(), part(x)
    assert infinite[:, 0].all() and torch.equal(found.isinf(), infinite) and not found.isnan().any()


def graphs_of_the_mixture(rank, case):
    """How many graphs there are, and which collectives each has."""
    torch.compiler.reset()
    found = []

    def keep(graph, inputs):
        found.append(sum("parallel_grouped_linear" in str(node.target) for node in graph.graph.nodes))
        return graph.forward

    _, part = case.mixtures()
    with quire.autocast(recipe=TABLE[case.recipe]):
        torch.compile(part, fullgraph=True, backend=keep)(torch.ones(8, HIDDEN))
    return found


def states_travel(rank, case, folder):
    """TrainingState of the parts, saved by all processes, is that of one process."""
    whole, part = case.mixtures()
    optimizer = torch.optim.AdamW(part.parameters())
    part(torch.ones(8, HIDDEN)).sum().backward()
    optimizer.step()
    checkpoint.save({"train": quire.TrainingState(part, optimizer)}, checkpoint_id=folder)
    other = case.sharded()
    for scale in other.buffers():
        scale.fill_(torch.nan)
    checkpoint.load({"train": quire.TrainingState(other, torch.optim.AdamW(other.parameters()))}, checkpoint_id=folder)
    for (name, loaded), saved in zip(other.state_dict().items(), part.state_dict().values(), strict=True):
        assert torch.equal(loaded, saved), name
    return {name: parameter.detach().clone() for name, parameter in part.named_parameters()}


def loaded_by_one(case, folder):
    whole = case.make()
    optimizer = torch.optim.AdamW(whole.parameters())
    checkpoint.load({"train": quire.TrainingState(whole, optimizer)}, checkpoint_id=folder, no_dist=True)
    return whole.state_dict()


def says(rank):
    """What is refused."""
    group, said = distributed.group.WORLD, {}
    tries = {
        "codes": lambda: quire.MoE(64, 64, 4, ep_group=group, tp_group=group, ep_dispatch="codes"),
        "stacked": lambda: quire.MoE(64, 64, 4, ep_group=group, tp_group=group, single_grouped_weight=True),
        "sizes": lambda: quire.MoE(64, 63, 4, tp_group=group),
        "sequence": lambda: quire.GroupedLinear(
            2, 64, 64, parallel=quire.distributed.Parallel("row", group, sequence=True)
        ),
        "out": lambda: quire.GroupedLinear(2, 64, 64, parallel=quire.distributed.Parallel("column", group))(
            torch.ones(4, 64), [2, 2], out=torch.empty(4, 32)
        ),
    }
    with quire.quantized_model_init(recipe="mxfp8"):
        try:
            quire.MoE(64, 64, 4, tp_group=group)
        except NotImplementedError as error:
            said["quantized"] = str(error)
    for name, attempt in tries.items():
        try:
            attempt()
        except (NotImplementedError, ValueError) as error:
            said[name] = str(error)
    return said
