"""Collectives of two processes that would write to quantized tensors, for test_received_tensors.py."""

import contextlib

import torch
from torch import distributed
from torch.distributed import _functional_collectives as functional

import quire
from steps import same

N = 32


def values(seed):
    return torch.randn(N, N, generator=torch.Generator().manual_seed(seed))


def plain(rank):
    return torch.full((N, N), 1.0 + rank)


#: Each writes to its first argument; q is a quantized tensor, x plain.
RECEIVE = {
    "broadcast": lambda q, x, rank: distributed.broadcast(q, 0),
    "all_reduce": lambda q, x, rank: distributed.all_reduce(q),
    "all_reduce, later": lambda q, x, rank: distributed.all_reduce(q, async_op=True).wait(),
    "all_reduce_coalesced": lambda q, x, rank: distributed.all_reduce_coalesced([q]),
    "reduce": lambda q, x, rank: distributed.reduce(q, 0),
    "recv": lambda q, x, rank: distributed.recv(q, 1 - rank),
    "irecv": lambda q, x, rank: distributed.irecv(q, 1 - rank),
    "recv from any": lambda q, x, rank: distributed.recv(q),
    "scatter": lambda q, x, rank: distributed.scatter(q, [x, x] if rank == 0 else None, 0),
    "all_gather_into_tensor": lambda q, x, rank: distributed.all_gather_into_tensor(q, x[: N // 2].contiguous()),
    "reduce_scatter": lambda q, x, rank: distributed.reduce_scatter(q, [x, x]),
    "reduce_scatter_tensor": lambda q, x, rank: distributed.reduce_scatter_tensor(q, torch.cat([x, x])),
    "all_to_all": lambda q, x, rank: distributed.all_to_all([q, q], [x, x]),
    "all_to_all_single": lambda q, x, rank: distributed.all_to_all_single(q, x),
    "functional all_reduce_": lambda q, x, rank: torch.ops._c10d_functional.all_reduce_(q, "sum", "0"),
    "functional broadcast_": lambda q, x, rank: torch.ops._c10d_functional.broadcast_(q, 0, "0"),
}
if hasattr(torch.ops._c10d_functional, "irecv"):  # not in PyTorch 2.11
    RECEIVE["functional irecv"] = lambda q, x, rank: torch.ops._c10d_functional.irecv(q, 1 - rank, 0, "0")
#: What PyTorch writes to a view, from each rank's x.
RECEIVE_IN_VIEW = {
    "broadcast": lambda v, x, rank: distributed.broadcast(v, 0),
    "all_reduce": lambda v, x, rank: distributed.all_reduce(v),
    "all_reduce, later": lambda v, x, rank: distributed.all_reduce(v, async_op=True).wait(),
    "all_to_all_single": lambda v, x, rank: distributed.all_to_all_single(v, x.view(v.shape)),
}


def refuses(rank, spec):
    for name, receive in RECEIVE.items():
        for make in (lambda q: q, torch.nn.Parameter, lambda q: q[:N]):
            q = make(quire.quantize(values(0), spec, columnwise=True)).detach()
            before = q.clone()
            try:
                receive(q, plain(rank), rank)
            except TypeError as error:
                assert "would write to a QuantizedTensor" in str(error) and "buffers()" in str(error), (name, error)
            else:
                raise AssertionError(f"{name} was silent")
            assert same(q, before), name


def reads(rank, spec):
    """Where a quantized tensor is only read, its values are sent."""
    q = quire.quantize(values(rank), spec, columnwise=True)
    each = [quire.quantize(values(r), spec).dequantize() for r in range(2)]
    into = [torch.zeros(N, N) for _ in range(2)]
    distributed.all_gather(into, q)
    assert all(map(torch.equal, into, each))
    if rank == 0:
        distributed.send(q, 1)
    else:
        distributed.recv(into[1], 0)
        assert torch.equal(into[1], each[0])
    summed = torch.zeros(N // 2, N)
    distributed.reduce_scatter_tensor(summed, q)
    assert torch.equal(summed, (each[0] + each[1]).chunk(2)[rank])
    distributed.gather(q, into if rank == 0 else None, 0)
    assert rank == 1 or all(map(torch.equal, into, each))
    got = functional.all_reduce(q, "sum", distributed.group.WORLD)
    q.copy_(got)
    assert same(q, quire.quantize(each[0] + each[1], spec, columnwise=True)), "copy_ of a functional collective"


def copies(rank, spec):
    """Lists of results are copied to: PyTorch's dispatcher does not see tensors in lists of lists."""
    expected = [quire.quantize(plain(r) * values(r), spec, columnwise=True) for r in range(2)]
    for gather in (
        lambda into, x: distributed.all_gather(into, x),
        lambda into, x: [distributed.gather(x, into if rank == r else None, r) for r in range(2)],
    ):
        into = [quire.quantize(values(0), spec, columnwise=True) for _ in range(2)]
        gather(into, plain(rank) * values(rank))
        assert all(map(same, into, expected))


def follows_remedies(rank, spec):
    q = quire.quantize(values(rank), spec, columnwise=True)
    for tensor in q.buffers().values():
        distributed.broadcast(tensor, 0)
    assert same(q, quire.quantize(values(0), spec, columnwise=True))
    received = values(5 + rank)
    distributed.broadcast(received, 1)
    q.copy_(received)
    assert same(q, quire.quantize(values(6), spec, columnwise=True))


def writes_through_views(rank, spec):
    for name, receive in RECEIVE_IN_VIEW.items():
        for view in (lambda t: t.view(-1), lambda t: t.view(-1)[N:]):
            for master in (False, True):
                q = quire.quantize(values(rank), spec, columnwise=True)
                if master:
                    q.master = values(rank)
                exact = values(rank) if master else q.dequantize()
                sent = view(exact).clone()
                expected = view(exact)
                plain, x = sent.clone(), view(values(2))
                receive(plain, x, rank)
                before = q.clone()
                receive(view(q), x, rank)
                if torch.equal(plain, sent):  # the rank that broadcasts
                    assert same(q, before), name
                    continue
                expected.copy_(plain)
                assert same(q, quire.quantize(exact, spec, columnwise=True)), name
                assert not master or torch.equal(q.master, exact)


def refuses_views(rank, spec):
    """That would wait for a process which may wait for this one."""
    view = quire.quantize(values(0), spec).view(-1)
    for receive in (lambda: distributed.irecv(view, 1 - rank), lambda: distributed.recv(view, 1 - rank)):
        with contextlib.suppress(TypeError):
            receive()
            raise AssertionError("silent")
