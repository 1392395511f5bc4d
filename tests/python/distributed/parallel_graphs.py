"""Graphs of layers that are sharded over processes, as AOTAutograd makes them."""

import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd

import quire

IN, OUT, TOKENS = 256, 256, 64


def graphs(layer, x, recipe):
    """The names of operators, and the shapes of results, of the forward and the backward graph."""
    found = []

    def keep(graph, inputs):
        nodes = [node for node in graph.graph.nodes if node.op == "call_function"]
        names = [str(node.target).split(".")[1] for node in nodes if str(node.target).startswith(("quire", "_c10d"))]
        values = [node.meta["val"] for node in next(iter(reversed(graph.graph.nodes))).args[0] if node is not None]
        shapes = [tuple(value.shape) for value in values if isinstance(value, torch.Tensor)]
        found.append((names, shapes, str(graph.code)))
        return make_boxed_func(graph.forward)

    compilers = {"fw_compiler": keep, "bw_compiler": keep, "inference_compiler": keep}
    backend = aot_autograd(**compilers, partition_fn=min_cut_rematerialization_partition)
    run = torch.compile(layer, fullgraph=True, backend=backend)
    with quire.autocast(enabled=recipe is not None, recipe=recipe):
        y = run(x)
    if y.requires_grad:
        y.sum().backward()
    return found


def inputs(mode, sequence, size=2, device="cpu"):
    tokens = TOKENS // size if mode == "column" and sequence else TOKENS
    return torch.randn(tokens, IN if mode == "column" else IN // size).to(device).requires_grad_()
