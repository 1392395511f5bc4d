"""Steps of sharded layers that a graph of a device captures with their collectives, and replays."""

import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh

import quire
from quire.distributed import Parallel, shard_weights
from ranks import here

TOKENS, WIDTH = 64, 64


def _of_shards(_):
    model = here(quire.Linear(WIDTH, WIDTH))
    shard_weights(model, init_device_mesh(model.weight.device.type, (distributed.get_world_size(),)), "mxfp8")
    return model


def _parallel(mode, **options):
    def make(group):
        inner = WIDTH * group.size() if mode == "row" else WIDTH
        return here(quire.Linear(inner, WIDTH, parallel=Parallel(mode, group, **options)))

    return make


#: Name -> recipe and what makes the layer of a group. No size of them follows from values.
STEPS = {
    "tensor": ("nvfp4", _parallel("column")),
    "sequence": ("mxfp8", _parallel("column", sequence=True)),
    "sums in float32": ("fp8_current", _parallel("row", sequence=True, reduce="float32")),
    "ring": ("nvfp4", _parallel("column", sequence=True, overlap="ring")),
    "shards": ("mxfp8", _of_shards),
    "experts": ("nvfp4", lambda group: here(quire.MoE(WIDTH, 96, 4, 2, ep_group=group, ep_capacity=2 * TOKENS))),
}


class Step:
    """A training step of a layer on inputs whose memory stays. number: which values they have."""

    def __init__(self, name):
        recipe, make = STEPS[name]
        torch.manual_seed(0)
        self.recipe, self.layer = recipe, make(distributed.group.WORLD)
        generator = torch.Generator().manual_seed(1)
        for parameter in self.layer.parameters():  # ranks of the fake group have not what another one scatters
            own = getattr(parameter.data, "_local_tensor", parameter.data)
            own.copy_(torch.randn(own.shape, generator=generator) / 8)
        self.x = here(torch.zeros(TOKENS, WIDTH)).requires_grad_()

    def set(self, number):
        drawn = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(number)) * 2.0**number
        self.x.data.copy_(drawn)

    def run(self):
        """y, and the gradients of x and of this rank's parameters."""
        self.x.grad = None
        self.layer.zero_grad()
        with quire.autocast(recipe=self.recipe):
            y = self.layer(self.x)
        y.backward(y.detach().square())
        grads = [parameter.grad for parameter in self.layer.parameters()]
        return [y.detach(), self.x.grad, *(getattr(grad, "_local_tensor", grad) for grad in grads)]


def replays_equal_eager_steps(rank, name):
    """On a GPU: a step that torch.cuda.graph has captured, with new inputs, and the step of an equal layer."""
    captured, eager = Step(name), Step(name)
    quire.set_rng_state(eager.layer, quire.rng_state(captured.layer))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    for step in (captured, eager):
        step.set(0)
        with torch.cuda.stream(side):
            step.run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = captured.run()
    for number in (1, 2, 3):
        captured.set(number)
        eager.set(number)
        graph.replay()
        expected = eager.run()
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one, other), (name, number)
