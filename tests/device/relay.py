"""A process group for tensors of the test device, which gloo does not take: copies of them travel by gloo."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta

import torch
from torch import distributed
from torch.futures import Future

NAME = "relay"
Tensors = list[torch.Tensor]


def _done(result: object) -> distributed.Work:
    future: Future = Future()
    future.set_result(result)
    return torch._C._distributed_c10d._create_work_from_future(future)


class Relay(distributed.ProcessGroup):
    """Each collective has happened when it returns: the host waits for the device, for gloo, and copies back."""

    def __init__(self, store: distributed.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._gloo = distributed.ProcessGroupGloo(store, rank, size, timeout)

    def getBackendName(self) -> str:  # noqa: N802, PyTorch calls it
        return NAME

    @property
    def group_name(self) -> str:
        return distributed.distributed_c10d._world.pg_names[self]

    _device_types = (torch.device("cpu"),)

    def _get_backend(self, device: torch.device) -> distributed.Backend:
        return self._gloo

    def _run(self, collective: Callable[..., distributed.Work], into: Tensors, sent: Tensors) -> distributed.Work:
        """collective(copies of into, copies of sent), and the first copies back."""
        results = [t.cpu() for t in into]
        collective(results, [t.cpu() for t in sent]).wait()
        for t, result in zip(into, results, strict=True):
            t.copy_(result)
        return _done(into)

    def allreduce(self, tensors: Tensors, opts: object) -> distributed.Work:
        return self._run(lambda own, _: self._gloo.allreduce(own, opts), tensors, [])

    def allreduce_coalesced(self, tensors: Tensors, opts: object) -> distributed.Work:
        for t in tensors:
            self.allreduce([t], distributed.AllreduceOptions())
        return _done(tensors)

    def broadcast(self, tensors: Tensors, opts: object) -> distributed.Work:
        return self._run(lambda own, _: self._gloo.broadcast(own, opts), tensors, [])

    def allgather(self, outputs: list[Tensors], inputs: Tensors, opts: object) -> distributed.Work:
        (into,), (own,) = outputs, inputs
        return self._run(lambda every, sent: self._gloo.allgather([every], sent), into, [own])

    def _allgather_base(self, output: torch.Tensor, own: torch.Tensor, opts: object) -> distributed.Work:
        return self._run(lambda every, sent: self._gloo._allgather_base(every[0], sent[0]), [output], [own])

    def _reduce_scatter_base(self, output: torch.Tensor, every: torch.Tensor, opts: object) -> distributed.Work:
        return self._run(lambda own, sent: self._gloo._reduce_scatter_base(own[0], sent[0], opts), [output], [every])

    def alltoall_base(
        self, output: torch.Tensor, own: torch.Tensor, receive: list[int], send: list[int], opts: object
    ) -> distributed.Work:
        return self._run(
            lambda every, sent: self._gloo.alltoall_base(every[0], sent[0], receive, send), [output], [own]
        )

    def reduce_scatter_tensor_coalesced(self, outputs: Tensors, inputs: Tensors, opts: object) -> distributed.Work:
        for output, every in zip(outputs, inputs, strict=True):
            self._reduce_scatter_base(output, every, opts)
        return _done(outputs)

    def allgather_into_tensor_coalesced(self, *_: object) -> distributed.Work:
        raise RuntimeError("gloo has no such gather on a device: it would read memory of the device by the host")

    # As PyTorch 2.13 calls them.
    all_gather_single, reduce_scatter_single, all_to_all_single = _allgather_base, _reduce_scatter_base, alltoall_base
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced
    all_gather_single_coalesced = allgather_into_tensor_coalesced

    def scatter(self, outputs: Tensors, inputs: list[Tensors], opts: object) -> distributed.Work:
        parts = [part.cpu() for part in inputs[0]] if inputs else []
        return self._run(lambda own, _: self._gloo.scatter(own, [parts] if inputs else [], opts), outputs, [])

    def gather(self, outputs: list[Tensors], inputs: Tensors, opts: object = None) -> distributed.Work:
        every = [t.cpu() for t in outputs[0]] if outputs else []
        self._gloo.gather([every] if outputs else [], [t.cpu() for t in inputs], opts).wait()
        for t, result in zip(outputs[0] if outputs else [], every, strict=True):
            t.copy_(result)
        return _done(None)

    def barrier(self, opts: object) -> distributed.Work:
        self._gloo.barrier().wait()
        return _done(None)


def register(device: str) -> None:
    """Makes the group PyTorch's for a device and for the CPU: init_process_group(relay.NAME). It is called gloo, to
    which its collectives are alike: with a GPU this would be gloo itself."""

    def make(store: distributed.Store, rank: int, size: int, timeout: timedelta) -> Relay:
        return Relay(store, rank, size, timeout)

    os.environ["TORCH_FR_BUFFER_SIZE"] = "0"  # no flight recorder: that of PyTorch 2.15 wants a group with backends
    distributed.Backend.register_backend(NAME, make, devices=["cpu", device])
    distributed.get_backend_config = lambda group=None: f"cpu:gloo,{device}:gloo"
