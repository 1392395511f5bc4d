"""Processes that begin with PyTorch and quire imported, which takes seconds: forks of one that has done nothing else,
which all hash alike, and forks of this one."""

import gc
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

import pytorch  # noqa: F401, changes Dynamo

#: What most of them use.
MODULES = ["quire", "torch._inductor.compile_fx", "torch.distributed.fsdp", "torch.distributed.checkpoint"]
MODULES += ["matplotlib.pyplot", "tqdm"]

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(MODULES)


class Program:
    """A Python program in a process, as if started by `python script *arguments`, with more environment variables.
    missing: a module that it cannot import."""

    def __init__(
        self, script: Path, *arguments: object, environment: Mapping[str, str] | None = None, missing: str = ""
    ) -> None:
        self.command = [str(script), *map(str, arguments)]
        self._folder = tempfile.TemporaryDirectory()
        self._outputs = [Path(self._folder.name) / name for name in ("stdout", "stderr")]
        given = dict(environment or {}), missing, os.getcwd()
        self._process = CONTEXT.Process(target=_run, args=(self.command, self._outputs, *given))
        self._process.start()

    def finished(self, seconds: float) -> subprocess.CompletedProcess:
        """What it wrote, and its exit status, when it has ended; past the deadline it is killed."""
        self._process.join(seconds)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        outputs = [path.read_text(encoding="utf-8", errors="replace") for path in self._outputs]
        return subprocess.CompletedProcess(self.command, self._process.exitcode, *outputs)


def as_torchrun(script: Path, processes: int, *arguments: object, seconds: float) -> list[subprocess.CompletedProcess]:
    """Programs that find each other as those of torchrun do, without its start, when they have ended."""
    from torch.distributed import TCPStore

    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    world = {"WORLD_SIZE": processes, "MASTER_ADDR": store.host, "MASTER_PORT": store.port}
    world |= {"TORCHELASTIC_USE_AGENT_STORE": True, "TORCHELASTIC_RESTART_COUNT": 0, "OMP_NUM_THREADS": 1}
    environment = {name: str(value) for name, value in world.items()}
    ranks = [
        Program(script, *arguments, environment=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(processes)
    ]
    return [rank.finished(seconds) for rank in ranks]


def run(code: str, **environment: str) -> str:
    """What `python -c code` prints, which must succeed."""
    with tempfile.NamedTemporaryFile("w", suffix=".py") as file:
        file.write(code)
        file.flush()
        done = Program(Path(file.name), environment=environment).finished(120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def call(function: Callable[..., object], *arguments: object) -> None:
    """Calls a function of a module in a process of its own, which fails with what that raises."""
    reading, writing = CONTEXT.Pipe(duplex=False)
    process = CONTEXT.Process(target=_call, args=(writing, function, arguments))
    process.start()
    said = reading.recv() if reading.poll(120) else "no answer within 120 seconds"
    process.kill()
    process.join()
    assert not said, said


def _call(answer: Connection, function: Callable[..., object], arguments: tuple) -> None:
    gc.freeze()  # no collection looks at what imports have made
    try:
        function(*arguments)
        answer.send("")
    except BaseException:
        answer.send(traceback.format_exc())


def _run(command: list[str], outputs: list[Path], environment: dict[str, str], missing: str, folder: str) -> None:
    gc.freeze()
    os.environ.update(environment)
    os.chdir(folder)
    for number, stream, path in zip((1, 2), (sys.stdout, sys.stderr), outputs, strict=True):
        with open(path, "wb") as file:
            os.dup2(file.fileno(), number)
        stream.reconfigure(encoding="utf-8", errors="surrogateescape")
    if missing:
        sys.modules[missing] = None
    sys.argv = list(command)
    sys.path.insert(0, str(Path(command[0]).parent))
    runpy.run_path(command[0], run_name="__main__")


def in_child(work, seconds=30):
    """What work() returns, bytes, in a forked child; fails if it raises, or has not ended after so many seconds. Skips
    the test in a process that has used a GPU."""
    if torch.cuda.is_initialized():
        pytest.skip("PyTorch refuses CUDA in a forked child of a process that has used it")
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(seconds)
        try:
            os.write(writing, work())
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as results:
        answer = results.read()
    _, status = os.waitpid(pid, 0)
    assert not os.WIFSIGNALED(status), f"the child ended by signal {os.WTERMSIG(status)}, {signal.SIGALRM} is a timeout"
    assert status == 0
    return answer
