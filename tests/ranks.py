"""Processes of a torch.distributed group that run functions of tests, one after another. No test can hang: past a
deadline the processes are killed, and the error has what each of them was doing. And one process that is any rank of
PyTorch's fake group, for graphs."""

import contextlib
import faulthandler
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path

import pytest

import pytorch
from devices import DEVICES, prepare

#: Seconds that a collective waits for other ranks, and that a function may take.
PATIENCE, DEADLINE = 60, 120
SPAWN = multiprocessing.get_context("spawn")
#: The type of device on which this process computes, if it is one of Ranks.
place = "cpu"
#: Type of device -> what sends tensors between processes.
BACKENDS = {"cpu": "gloo", "quiretest": "relay", "cuda": "gloo"}


@contextlib.contextmanager
def rank_of(rank: int, size: int, device: str = "cpu", backend: str = ""):
    """This process as a rank of the fake group, whose collectives move nothing. Yields the group of all. device: where
    its tensors may lie besides the CPU. backend: of the group, if it is another one."""
    import torch
    from torch import distributed
    from torch.testing._internal.distributed.fake_pg import FakeStore

    backend = backend or ("fake" if device == "cpu" else f"cpu:fake,{device}:fake")
    distributed.init_process_group(backend, rank=rank, world_size=size, store=FakeStore())
    try:
        yield distributed.group.WORLD
    finally:
        distributed.destroy_process_group()
        torch.compiler.reset()


def here(t):
    """A tensor or module on the device of this process."""
    return t.to(place)


def settle() -> None:
    """Before gradients of fully_shard are freed, whose memory is of another stream than the optimizer's: the test
    device overwrites at once what is freed, which PyTorch's allocator does not."""
    import torch

    if place == "quiretest":
        torch.accelerator.synchronize()


def _begin(rank: int, size: int, store, device: str, backend: str) -> None:
    """Makes the group of all."""
    import torch
    from torch import distributed

    global place
    place = device
    prepare(device)
    if backend == "relay":
        from device import relay

        relay.register(device)
    if device == "cuda":
        torch.cuda.set_device(0)
    distributed.init_process_group(
        backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=PATIENCE)
    )


def end() -> None:
    """The end of a process of a group, without Python's own: beside that, threads of gloo, which functional collectives
    keep alive, can abort the process (docs/distributed.md, "When a process fails")."""
    from torch import distributed

    distributed.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _serve(rank: int, size: int, folder: str, pipe, where: tuple[str, str]) -> None:
    import torch
    from torch import distributed

    sys.stderr = open(Path(folder) / f"stderr{rank}", "w", buffering=1)  # noqa: SIM115 (for the life of the process)
    os.dup2(sys.stderr.fileno(), 2)
    faulthandler.enable()
    torch.set_num_threads(1)
    store = distributed.FileStore(str(Path(folder) / "store"), size)
    _begin(rank, size, store, *where)
    groups = Groups(distributed.new_group).install()
    imported = 0
    while (task := pipe.recv()) is not None:
        function, arguments = task
        if len(sys.modules) > imported:
            pytorch.freeze()
            imported = len(sys.modules)
        faulthandler.dump_traceback_later(DEADLINE - 10)
        try:
            with DEVICES[where[0]]():
                result = function(rank, *arguments)
            pipe.send((True, result, groups.collectives()))
        except BaseException:
            pipe.send((False, traceback.format_exc(), {}))
        groups.end_function()
        faulthandler.cancel_dump_traceback_later()
    end()


class Groups:
    """Stands for new_group(): a function of a test gets the groups that one before it has made of the same processes.
    Each has three threads, one of which wakes a hundred times a second, and PyTorch keeps what holds it in caches."""

    def __init__(self, make: Callable[..., object]) -> None:
        self._make, self._made, self._given = make, {}, Counter()

    def __call__(self, ranks: list[int] | None = None, timeout: timedelta | None = None, **options: object) -> object:
        if timeout is not None:  # a test that lets it pass
            return self._make(ranks, timeout, **options)
        rest = sorted((name, repr(value)) for name, value in options.items() if name != "group_desc")
        key = (None if ranks is None else tuple(ranks), *rest)
        made = self._made.setdefault(key, [])
        self._given[key] += 1
        if len(made) < self._given[key]:  # a function may want several
            made.append(self._make(ranks, **options))
        return made[self._given[key] - 1]

    def collectives(self) -> dict[str, int]:
        """Of each group of this process that gloo serves: how many it has begun."""
        from torch.distributed import GroupMember, get_backend, group

        groups = {"all": group.WORLD}
        groups |= {f"{key}, {at}": one for key, made in self._made.items() for at, one in enumerate(made)}
        own = {name: one for name, one in groups.items() if one != GroupMember.NON_GROUP_MEMBER}
        return {name: one._get_sequence_number_for_group() for name, one in own.items() if get_backend(one) == "gloo"}

    def end_function(self) -> None:
        self._given.clear()

    def install(self) -> "Groups":
        from torch import distributed
        from torch.distributed import device_mesh, distributed_c10d

        for module in (distributed, device_mesh, distributed_c10d):
            module.new_group = self
        return self


def forget(rank: int) -> None:
    """What the functions of one file have compiled, before those of another."""
    pytorch.forget()


class Ranks:
    """size processes. run() calls a function of a module in each of them. contexts: how multiprocessing starts each of
    them. Forks of one process hash alike. A spawned one hashes differently, so that the order of a set is another in
    it, as it is for users. device: where they compute, one of it for all. backend: what sends tensors; "" for that of
    BACKENDS."""

    def __init__(
        self,
        size: int,
        contexts: Sequence[multiprocessing.context.BaseContext] | None = None,
        device: str = "cpu",
        backend: str = "",
    ) -> None:
        self.size, self._folder = size, tempfile.TemporaryDirectory()
        self._where = (device, backend or BACKENDS[device])
        self._contexts = contexts or [SPAWN] * size
        self._start()

    def _start(self) -> None:
        ends = [multiprocessing.Pipe() for _ in range(self.size)]
        self._pipes = [own for own, _ in ends]
        folder = tempfile.mkdtemp(dir=self._folder.name)
        self._processes = [
            context.Process(target=_serve, args=(rank, self.size, folder, other, self._where), daemon=True)
            for rank, (context, (_, other)) in enumerate(zip(self._contexts, ends, strict=True))
        ]
        self._stderr = [Path(folder) / f"stderr{rank}" for rank in range(self.size)]
        for path in self._stderr:
            path.touch()
        self._collectives: list[dict[str, int]] = [{} for _ in range(self.size)]
        for process in self._processes:
            process.start()

    def run(self, function: Callable[..., object], *arguments: object, deadline: float = DEADLINE) -> list[object]:
        """What function(rank, *arguments) returns in each process. Fails with the tracebacks of all that raised."""
        answers = self.outcomes(function, *arguments, deadline=deadline)
        said = [f"rank {rank}: {answer}\n{self._said(rank)}" for rank, (well, answer) in enumerate(answers) if not well]
        if not said:
            said = self._uneven()
        if said:
            self.restart()  # a rank that failed may have left others in a collective
            pytest.fail("\n".join(said), pytrace=False)
        return [result for _, result in answers]

    def outcomes(
        self, function: Callable[..., object], *arguments: object, deadline: float = DEADLINE
    ) -> list[tuple[bool, object]]:
        """Of each process: (True, what function(rank, *arguments) returned), or (False, how it failed)."""
        end = time.monotonic() + deadline
        self._begins = [path.stat().st_size for path in self._stderr]
        for pipe in self._pipes:
            pipe.send((function, arguments))
        answers = []
        for rank, pipe in enumerate(self._pipes):
            well, answer = False, f"no answer within {deadline} seconds"
            try:
                if pipe.poll(max(0.0, end - time.monotonic())):
                    well, answer, self._collectives[rank] = pipe.recv()
            except (EOFError, ConnectionResetError):
                self._processes[rank].join(10)
                answer = f"the process ended with {self._processes[rank].exitcode}"
            answers.append((well, answer))
        return answers

    def _uneven(self) -> list[str]:
        """Groups whose processes have begun unequal numbers of collectives in a function that has not failed. The next
        collective of one would meet an earlier one of another, and end a process whose tensor is the smaller one."""
        counts: dict[str, dict[int, int]] = defaultdict(dict)
        for rank, own in enumerate(self._collectives):
            for name, count in own.items():
                counts[name][rank] = count
        return [
            f"the processes of group {name} have begun unequal numbers of collectives: {of_ranks}"
            for name, of_ranks in counts.items()
            if len(set(of_ranks.values())) > 1
        ]

    def _said(self, rank: int) -> str:
        """What the process of the rank has written since the function began. Its beginning matters most: there C++
        says why it aborts, before all threads are listed."""
        said = self._stderr[rank].read_bytes()[self._begins[rank] :].decode(errors="replace")
        return said if len(said) <= 12000 else f"{said[:6000]}\n[...]\n{said[-6000:]}"

    def restart(self) -> None:
        self.kill()
        self._start()

    def kill(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join(10)
        self.kill()
