"""Mixtures of one process and the same mixtures with experts on several processes, for functions that tests/ranks.py
runs."""

import copy
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta

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
from every_recipe import TABLE
from failing_ranks import SHORT, leave, message
from quire.distributed import ExpertParallel
from quire.distributed.experts import ExpertGroup, Sender, plan
from quire.moe import permute, unpermute

HIDDEN, INNER, EXPERTS, STEPS = 64, 96, 4, 2


@dataclass(frozen=True)
class Case:
    """tokens: of each process. options: of both mixtures. ep: of the divided one. to: the experts that all tokens
    choose. way: how the divided one is run, of WAYS."""

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
        return layer

    def mixtures(self):
        """(of one process, of all processes)."""
        whole, part = self.make(), self.make(ep_group=distributed.group.WORLD, **self.ep)
        quire.set_rng_state(whole, quire.rng_state(part))
        for name, parameter in whole.named_parameters():
            if "bias" in name:
                torch.nn.init.normal_(parameter, generator=torch.Generator().manual_seed(sum(name.encode())))
        for name, parameter in part.named_parameters():
            if "bias" in name:
                parameter.data.copy_(part_of(part, name, whole.get_parameter(name)))
            assert torch.equal(parameter, part_of(part, name, whole.get_parameter(name))), name
        return whole, part


def part_of(part, name, t):
    """What this process has of a parameter of the whole mixture, or of its gradient."""
    own = part.fc1.own_groups()
    return t[own.start : own.stop] if name in ("fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias") else t


def own_tokens(case, t):
    return t.split(case.tokens)[distributed.get_rank()]


def data(case):
    generator = torch.Generator().manual_seed(1)
    return [
        [torch.randn(sum(case.tokens), HIDDEN, generator=generator).to(case.dtype) for _ in range(STEPS)]
        for _ in range(2)
    ]


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


def passes(layer, xs, dys, recipe, run):
    """name -> values, of each step."""
    found = []
    for x, dy in zip(xs, dys, strict=True):
        x = x.clone().requires_grad_()
        layer.zero_grad()
        with quire.autocast(enabled=recipe is not None, recipe=recipe):
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
                off, size = (value - other[name]).float().norm(), other[name].float().norm()
                assert off <= 8 * torch.finfo(value.dtype).eps * size, f"{where}: {off / size}"
                continue
            wanted = own_tokens(case, other[name]) if name in ("y", "dx") else part_of(part, name, other[name])
            assert value.dtype == wanted.dtype and value.shape == wanted.shape, where
            assert torch.equal(value, wanted), f"{where}: {(value - wanted).abs().max()}"


def equals_one_process(rank, case):
    whole, part = case.mixtures()
    xs, dys = data(case)
    recipe = TABLE[case.recipe]
    expected = passes(whole, xs, dys, recipe, whole)
    own = ([own_tokens(case, x) for x in xs], [own_tokens(case, dy) for dy in dys])
    compare(case, part, passes(part, *own, recipe, WAYS[case.way](part)), expected)


def equals_without_gradients(rank, case):
    """y of copies under no_grad, inference_mode and torch.autocast."""
    whole, part = case.mixtures()
    x = data(case)[0][0]
    for mode in (torch.no_grad(), torch.inference_mode(), torch.autocast("cpu", torch.bfloat16)):
        with mode, quire.autocast(recipe=TABLE[case.recipe]):
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
        one, other = (passes(m, [x], [x], TABLE[recipe], f)[0] for m, f in ((layer, unbacked), (eager, eager)))
        for name, value in one.items():
            if name in ("dx", "router.weight"):  # the router's matmul is PyTorch's, which a compiler may add otherwise
                torch.testing.assert_close(value, other[name], msg=lambda text, at=(counts, name): f"{at}: {text}")
            else:
                assert torch.equal(value, other[name]), (counts, name)
    return counter.frame_count


# ---------------------------------------------------------------- parallelize_module, states


def divided_by_style(rank, case):
    """The same mixture, whose experts a style divides."""
    whole = case.make()
    part = case.make()
    if rank:  # whose own values are not taken
        torch.nn.init.zeros_(next(part.fc1.parameters()))
    part.router.load_state_dict(whole.router.state_dict())
    part = parallelize_module(part, init_device_mesh("cpu", (2,)), ExpertParallel(**case.ep))
    quire.set_rng_state(whole, quire.rng_state(part))
    for name, parameter in part.named_parameters():
        wanted = whole.get_parameter(name)
        assert torch.equal(parameter.full_tensor() if isinstance(parameter, DTensor) else parameter, wanted), name
    xs, dys = data(case)
    recipe = TABLE[case.recipe]
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
        return Case("mxfp8", options={"bias": True, "single_grouped_weight": single}).make(**ep)

    group = distributed.group.WORLD
    whole, part, other = make(False), make(single, ep_group=group), make(not single, ep_group=group)
    for parameter in (*whole.parameters(), *part.parameters()):
        torch.nn.init.normal_(parameter)
    saved = whole.state_dict()
    for form in (saved, stacked(saved)):
        for parameter in part.parameters():
            torch.nn.init.zeros_(parameter)
        assert not any(part.load_state_dict(form, strict=True))
        for name, parameter in part.named_parameters():
            wanted = part_of(part, name, (stacked(saved) if single else saved)[name])
            assert torch.equal(parameter, wanted), name
    other.load_state_dict(part.state_dict())
    again = make(single, ep_group=group)
    again.load_state_dict(other.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(part.parameters(), again.parameters(), strict=True))
    return set(saved), set(part.state_dict())


def stacked(state):
    """A state dict of the form of single_grouped_weight."""
    found = dict(state)
    for name in [name for name in state if name.endswith("0")]:
        each = [found.pop(f"{name[:-1]}{expert}") for expert in range(EXPERTS)]
        found[name[:-1]] = torch.stack(each)
    return found


# ---------------------------------------------------------------- what does not fit, and what fails


def of_size_one(rank, case):
    """A group of this process alone computes what a mixture without a group does."""
    groups = [distributed.new_group([other]) for other in range(distributed.get_world_size())]
    whole, part = case.make(), case.make(ep_group=groups[rank], **case.ep)
    quire.set_rng_state(part, quire.rng_state(whole))
    xs, dys = data(case)
    found, expected = (passes(layer, xs, dys, TABLE[case.recipe], layer) for layer in (part, whole))
    for one, other in zip(found, expected, strict=True):
        for name, value in one.items():
            assert torch.equal(value, other[name]), name


def overflow(rank, way):
    """Rank 0 has more rows for one process than fit. What every rank raises."""
    case = Case("mxfp8", (20, 3), ep={"ep_capacity": 8})
    _, part = case.mixtures()
    run = WAYS[way](part)
    for count in (3, 20, 3):
        x = torch.randn(count if rank == 0 else 3, HIDDEN)
        mark_unbacked(x, 0)
        with quire.autocast(recipe=TABLE[case.recipe]):
            if count == 3:
                run(x)
                continue
            try:
                run(x)
            except RuntimeError as error:
                said = str(error)
    return said


def drops(rank, capacity):
    """The rows that exceed the capacity of this process for another one are dropped, in the order of tokens, and the
    rest is what one process computes."""
    case = Case("mxfp8", (20, 9), ep={"ep_capacity": capacity, "ep_overflow": "drop"})
    whole, part = case.mixtures()
    x = data(case)[0][0]
    with torch.no_grad(), quire.autocast(recipe=TABLE[case.recipe]):
        y, routing = part(own_tokens(case, x), return_routing=True)
        _, undropped = whole(own_tokens(case, x), return_routing=True)
    sent, kept = [0, 0], []
    for expert in undropped.topk_ids.flatten().tolist():
        process = expert // (EXPERTS // 2)
        kept.append(expert if sent[process] < capacity else -1)
        sent[process] += 1
    assert routing.topk_ids.flatten().tolist() == kept
    assert torch.equal(routing.topk_weights, torch.where(routing.topk_ids >= 0, undropped.topk_weights, 0.0))
    everywhere = [None, None]
    distributed.all_gather_object(everywhere, (routing.topk_ids, routing.topk_weights))
    ids, weights = (torch.cat(each) for each in zip(*everywhere, strict=True))
    rows, offsets, row_map = permute(x, ids, EXPERTS)
    splits = offsets.diff(prepend=offsets.new_zeros(1))
    with torch.no_grad(), quire.autocast(recipe=TABLE[case.recipe]):
        h = quire.functional.activation(whole.fc1(rows, splits), "swiglu", x.dtype)[0]
        wanted = unpermute(whole.fc2(h, splits), row_map, weights)
    assert torch.equal(y, own_tokens(case, wanted))
    return kept.count(-1)


class Model(torch.nn.Module):
    def __init__(self, **options):
        super().__init__()
        group = distributed.new_group(timeout=timedelta(seconds=SHORT))
        self.mixture = quire.MoE(HIDDEN, INNER, EXPERTS, ep_group=group, **options)

    def forward(self, x):
        return self.mixture(x)


def other_rank(rank, where, act):
    """act: "ends" or "hangs", what rank 1 does instead of the forward or of the backward pass."""
    torch.manual_seed(0)
    model, x = Model(), torch.randn(8, HIDDEN, requires_grad=True)
    y = model(x)
    if rank == 1:
        return leave(act)
    return message(y.sum().backward if where == "backward" else lambda: model(x))


def differs(rank, change):
    """Rank 1 has another recipe, and ranks are compared."""
    os.environ["QUIRE_CHECK_RANKS"] = "1"
    try:
        model = Model()
        recipe = "mxfp8" if rank == 1 and change else "fp8_current"

        def step():
            with quire.autocast(recipe=recipe):
                return torch.compile(model)(torch.randn(4 + rank, HIDDEN))

        return message(step)
    finally:
        del os.environ["QUIRE_CHECK_RANKS"]
        torch.compiler.set_stance("default")


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
