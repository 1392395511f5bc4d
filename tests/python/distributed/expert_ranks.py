"""Mixtures of one process and the same mixtures with experts on several processes, for functions that tests/ranks.py
runs."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import distributed
from torch._dynamo.decorators import mark_unbacked
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

import quire
from python.distributed.parallel_layers import RECIPES, with_scales
from python.distributed.sums import assert_same_sums, assert_same_up_to
from quire.distributed import ExpertParallel
from quire.distributed.experts import ExpertGroup, Sender, plan
from quire.distributed.pieces import PlainPart
from quire.moe import permute
from ranks import here

HIDDEN, INNER, EXPERTS, STEPS = 64, 96, 4, 2


@dataclass(frozen=True)
class Case:
    """tokens: of each process. options: of both mixtures. ep: of the sharded one. to: the experts that all tokens
    choose. way: how the sharded one is run, of WAYS."""

    recipe: str
    tokens: tuple[int, ...] = (13, 27)
    options: Mapping[str, object] = field(default_factory=dict)
    ep: Mapping[str, object] = field(default_factory=dict)
    to: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float32
    way: str = "eager"

    def make(self, **ep):
        torch.manual_seed(0)
        options = {"top_k": 2, "renormalize": True} | self.options
        if self.to:
            options |= {"expert_bias": True, "top_k": len(self.to)}
        layer = quire.MoE(HIDDEN, INNER, EXPERTS, params_dtype=self.dtype, **options, **ep)
        for expert in self.to:
            layer.expert_bias[expert] = 9.0
        return here(with_scales(layer, RECIPES[self.recipe]))

    def mixtures(self):
        """(of one process, of all processes)."""
        whole, part = self.make(), self.make(ep_group=distributed.group.WORLD, **self.ep)
        quire.set_rng_state(whole, quire.rng_state(part))
        for name, parameter in whole.named_parameters():
            if "bias" in name:
                drawn = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(sum(name.encode())))
                parameter.data.copy_(drawn)
        for name, parameter in part.named_parameters():
            if "bias" in name:
                parameter.data.copy_(part_of(part, name, whole.get_parameter(name)))
            assert torch.equal(parameter, part_of(part, name, whole.get_parameter(name))), name
        return whole, part


def part_of(part, name, t):
    """What this process has of a parameter or buffer of the whole mixture, or of its gradient."""
    own, (layer, _, kind) = part.fc1.own_groups(), name.rpartition(".")
    sharded = layer in ("fc1", "fc2") and kind in ("weight", "bias", "input_scale")
    return t[own.start : own.stop] if sharded else t


def own_tokens(case, t):
    return t.split(case.tokens)[distributed.get_rank()]


def data(case):
    generator = torch.Generator().manual_seed(1)
    return [
        [here(torch.randn(sum(case.tokens), HIDDEN, generator=generator).to(case.dtype)) for _ in range(STEPS)]
        for _ in range(2)
    ]


def under(recipe):
    return quire.autocast(enabled=RECIPES[recipe] is not None, recipe=RECIPES[recipe])


def in_two_dimensions(layer):
    return lambda x: layer(x.view(1, *x.shape))[0]


def with_routing(layer):
    def run(x):
        y, routing = layer(x, return_routing=True)
        assert routing.topk_ids.shape == (len(x), layer.top_k) and routing.logits.shape == (len(x), EXPERTS)
        return y

    return run


def compiled(layer):
    torch.compiler.reset()
    return torch.compile(layer, fullgraph=True, backend="aot_eager")


#: How a mixture is run.
WAYS: dict[str, Callable[[torch.nn.Module], Callable[..., torch.Tensor]]] = {
    "eager": lambda layer: layer.__call__,
    "compiled": compiled,
    "checkpointed": lambda layer: lambda x: quire.checkpoint(layer, x, use_reentrant=False),
    "in two dimensions": in_two_dimensions,
    "with routing": with_routing,
}


def passes(layer, xs, dys, recipe, run, *, group=None):
    """name -> values, of each step. group: over which delayed scaling reduces amaxes; None: all ranks."""
    found = []
    for x, dy in zip(xs, dys, strict=True):
        x = x.clone().requires_grad_()
        layer.zero_grad()
        with quire.autocast(enabled=recipe is not None, recipe=recipe, amax_reduction_group=group):
            y = run(x)
        y.backward(dy)
        grads = {name: parameter.grad.clone() for name, parameter in layer.named_parameters()}
        found.append({"y": y.detach(), "dx": x.grad} | grads)
    return found


def compare(case, part, found, expected):
    """Equal; gradients of what every process has are sums over processes."""
    for step, (one, other) in enumerate(zip(found, expected, strict=True)):
        for name, value in one.items():
            where = f"{case}, step {step}: {name}"
            if name.startswith(("router", "shared")):
                distributed.all_reduce(value)
                # Terms of tokens are equal. Sums of them are rounded to 16 bits once in one process, and here those of
                # processes, which count as one because they are that much smaller, and each addition of two.
                wide = value.dtype == torch.float32
                roundings = sum(case.tokens) if wide else distributed.get_world_size() + 1
                assert_same_up_to(value, other[name], roundings, where)
                continue
            wanted = own_tokens(case, other[name]) if name in ("y", "dx") else part_of(part, name, other[name])
            assert value.dtype == wanted.dtype and value.shape == wanted.shape, where
            # The router's product is PyTorch's, whose bits depend on the number of rows there: weights of experts have
            # errors of roundings to float32, and the same codes.
            if value.is_cuda:
                assert (value - wanted).norm() <= 1e-6 * wanted.norm(), f"{where}: {(value - wanted).abs().max()}"
                continue
            assert torch.equal(value, wanted), f"{where}: {(value - wanted).abs().max()}"


def equals_one_process(rank, case):
    whole, part = case.mixtures()
    xs, dys = data(case)
    recipe = RECIPES[case.recipe]
    expected = passes(whole, xs, dys, recipe, whole)
    own = ([own_tokens(case, x) for x in xs], [own_tokens(case, dy) for dy in dys])
    compare(case, part, passes(part, *own, recipe, WAYS[case.way](part)), expected)


def equals_without_gradients(rank, case):
    """y of copies under no_grad, inference_mode and torch.autocast."""
    whole, part = case.mixtures()
    x = data(case)[0][0]
    for mode in (torch.no_grad(), torch.inference_mode(), torch.autocast("cpu", torch.bfloat16)):
        with mode, under(case.recipe):
            y = copy.deepcopy(part)(own_tokens(case, x))
            assert torch.equal(y, own_tokens(case, copy.deepcopy(whole)(x))) and y.dtype in (torch.bfloat16, case.dtype)


# ---------------------------------------------------------------- the exchange alone


def rows_travel(rank, ids, capacity):
    """ids: of each process, also with an expert twice and with -1. Rows arrive as in one process, and come back."""
    sender = Sender(ExpertGroup.of("test", distributed.group.WORLD, EXPERTS), "test")
    every = torch.cat(ids)
    x = torch.arange(len(every) * 3.0).view(-1, 3) + 1
    first = sum(len(one) for one in ids[:rank])
    trip = plan(sender, ids[rank], capacity, "raise")
    assert torch.equal(trip.ids, ids[rank])
    leaving = permute(x[first : first + len(ids[rank])], trip.ids, EXPERTS)
    if capacity is None:
        assert torch.equal(trip.row_map, leaving.row_map) and sum(trip.send) == int((ids[rank] >= 0).sum())
    rows = torch.zeros(sum(trip.send), 3)
    for t, s in (trip.row_map >= 0).nonzero().tolist():
        rows[trip.row_map[t, s]] = x[first + t]
    sorted_rows = trip.by_expert(sender.exchange(rows, trip.receive, trip.send))
    own, whole = sender.group.own(), permute(x, every, EXPERTS)
    begins = torch.cat([torch.zeros(1, dtype=torch.int32), whole.offsets])
    assert torch.equal(sorted_rows[: trip.ends[-1]], whole.rows[begins[own.start] : begins[own.stop]])
    assert torch.equal(trip.ends, (whole.offsets[own.start : own.stop] - begins[own.start]).long())
    assert not sorted_rows[trip.ends[-1] :].any()
    assert torch.equal(sender.exchange(trip.by_process(sorted_rows), trip.send, trip.receive), rows)


# ---------------------------------------------------------------- graphs over steps


def graphs_of_steps(rank, recipe, ep, backend):
    """How many graphs serve steps with other numbers of tokens on each process, none and one included, whose results
    are those of eager calls."""
    torch.compiler.reset()
    case = Case(recipe, ep=ep)
    _, layer = case.mixtures()
    eager = copy.deepcopy(layer)
    counter = CompileCounterWithBackend(backend)
    run = torch.compile(layer, fullgraph=True, backend=counter)

    def unbacked(x):
        mark_unbacked(x, 0)
        return run(x)

    for counts in ((13, 27), (0, 8), (1, 0), (0, 0), (5, 1)):
        x = torch.randn(counts[rank], HIDDEN, generator=torch.Generator().manual_seed(rank))
        one, other = (passes(m, [x], [x], RECIPES[recipe], f)[0] for m, f in ((layer, unbacked), (eager, eager)))
        for name, value in one.items():
            if name in ("dx", "router.weight"):  # the router's matmul is PyTorch's, which a compiler may add otherwise
                assert_same_sums(value, other[name], HIDDEN, (counts, name))
            else:
                assert torch.equal(value, other[name]), (counts, name)
    return counter.frame_count


# ---------------------------------------------------------------- parallelize_module, states


def sharded_by_style(rank, case):
    """The same mixture, whose experts a style divides."""
    whole = case.make()
    part = case.make()
    if rank:  # whose own values are not taken
        for own in (next(part.fc1.parameters()), *part.fc1.buffers()):
            torch.nn.init.ones_(own)
    part.router.load_state_dict(whole.router.state_dict())
    part = parallelize_module(part, init_device_mesh("cpu", (2,)), ExpertParallel(**case.ep))
    quire.set_rng_state(whole, quire.rng_state(part))
    for name, parameter in part.named_parameters():
        wanted = whole.get_parameter(name)
        assert torch.equal(parameter.full_tensor() if isinstance(parameter, DTensor) else parameter, wanted), name
    xs, dys = data(case)
    recipe = RECIPES[case.recipe]
    expected = passes(whole, xs, dys, recipe, whole)
    own = ([own_tokens(case, x) for x in xs], [own_tokens(case, dy) for dy in dys])
    found = passes(part, *own, recipe, WAYS[case.way](part))
    for step in found:
        for name, value in step.items():
            step[name] = value.to_local() if isinstance(value, DTensor) else value
    compare(case, part, found, expected)
    return [name for name, _ in part.named_parameters()], [type(p).__name__ for p in part.parameters()]


def states(rank, single):
    """The state dict of this process's part, after it has loaded one process's; and the other way."""

    def make(single, **ep):
        return Case("static_fp8", options={"bias": True, "single_grouped_weight": single}).make(**ep)

    group = distributed.group.WORLD
    whole, part, other = make(False), make(single, ep_group=group), make(not single, ep_group=group)
    for parameter in (*whole.parameters(), *part.parameters()):
        torch.nn.init.normal_(parameter)
    saved = whole.state_dict()
    for form in (saved, stacked(saved)):
        for own in (*part.parameters(), *part.buffers()):
            torch.nn.init.zeros_(own)
        assert not any(part.load_state_dict(form, strict=True))
        for name, own in (*part.named_parameters(), *part.named_buffers()):
            wanted = part_of(part, name, (stacked(saved) if single else saved)[name])
            assert torch.equal(own, wanted), name
    other.load_state_dict(part.state_dict())
    again = make(single, ep_group=group)
    again.load_state_dict(other.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(part.state_dict().values(), again.state_dict().values(), strict=True))
    return set(saved), set(part.state_dict())


def stacked(state):
    """A state dict of the form of single_grouped_weight."""
    found = dict(state)
    for name in [name for name in state if name.endswith("0")]:
        each = [found.pop(f"{name[:-1]}{expert}") for expert in range(EXPERTS)]
        found[name[:-1]] = torch.stack(each)
    return found


def saved_by_both(rank, folder):
    """torch.distributed.checkpoint of both processes' parts, in the middle of training."""
    _, part = Case("mxfp8").mixtures()
    optimizer = torch.optim.AdamW(part.parameters())
    part(data(Case(""))[0][0][:9]).sum().backward()
    optimizer.step()
    model, optimizer_state = get_state_dict(part, optimizer)
    checkpoint.save({"model": model, "optimizer": optimizer_state}, checkpoint_id=folder)
    return {name: value.clone() for name, value in part.state_dict().items()}


def loaded_by_one(folder):
    """(state dict, names that the optimizer has a state for) of a mixture of one process."""
    whole = Case("mxfp8").make()
    optimizer = torch.optim.AdamW(whole.parameters())
    model, optimizer_state = get_state_dict(whole, optimizer)
    checkpoint.load({"model": model, "optimizer": optimizer_state}, checkpoint_id=folder)
    set_state_dict(whole, optimizer, model_state_dict=model, optim_state_dict=optimizer_state)
    return whole.state_dict(), [optimizer.state[parameter]["exp_avg"].any() for parameter in whole.parameters()]


STACKED = {"single_grouped_weight": True, "bias": False}


def stacks_saved_by_both(rank, folder):
    """A TrainingState of mixtures whose experts are one parameter, which has one name in all processes."""
    _, part = Case("static_fp8", options=STACKED).mixtures()
    optimizer = torch.optim.AdamW(part.parameters())
    part(data(Case(""))[0][0][:9]).sum().backward()
    optimizer.step()
    try:
        checkpoint.save(part.state_dict(), checkpoint_id=folder + "-refused")
    except BaseException as error:  # CheckpointException is no Exception
        assert "would take for the whole" in str(error), str(error)
    else:
        raise AssertionError("a process's experts were saved as all of them")
    checkpoint.save({"train": quire.TrainingState(part, optimizer)}, checkpoint_id=folder)
    return {name: value.plain() if isinstance(value, PlainPart) else value for name, value in part.state_dict().items()}


def stacks_loaded_by_one(folder):
    whole = Case("static_fp8", options=STACKED).make()
    for scale in whole.buffers():
        scale.fill_(torch.nan)
    optimizer = torch.optim.AdamW(whole.parameters())
    checkpoint.load({"train": quire.TrainingState(whole, optimizer)}, checkpoint_id=folder)
    return whole.state_dict(), [optimizer.state[parameter]["exp_avg"].any() for parameter in whole.parameters()]
