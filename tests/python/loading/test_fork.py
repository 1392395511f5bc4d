"""A forked child waits neither for threads that it has not, nor for locks that such threads held."""

import hashlib
import itertools
import os
import re
import subprocess
import threading
from pathlib import Path

import pytest
import torch

import forks
import quire
from forks import in_child
from quire import runners
from quire.delayed.state import DelayedState
from quire.recipe import NVFP4BlockScaling

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*")

LIBRARIES = sorted((Path(quire.__file__).parent / "lib").resolve().rglob("*.so"))

X, W = torch.randn(512, 512), torch.randn(512, 512)


@pytest.fixture(autouse=True)
def several_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(max(2, before))
    yield
    torch.set_num_threads(before)


def digest(*tensors):
    return hashlib.sha256(b"".join(t.detach().numpy().tobytes() for t in tensors)).digest()


def digest_of_a_step(threads):
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    layer = quire.Linear(512, 512)
    with quire.autocast(recipe=NVFP4BlockScaling()):
        y = layer(X)
    y.sum().backward()
    return digest(y, layer.weight.grad, layer.bias.grad, layer.sr_state)


def step_and_fork(threads):
    expected = digest_of_a_step(2)
    assert in_child(lambda: digest_of_a_step(threads)) == expected


@pytest.mark.parametrize("threads", [1, 2])
def test_a_child_of_a_process_that_has_computed_does_not_wait_for_its_threads(threads):
    # In a process of its own: once autograd has started threads, as the deeply nested backward pass of another test
    # makes it do, PyTorch refuses backward passes in children.
    forks.call(step_and_fork, threads)


def test_a_child_does_not_wait_for_threads_that_only_pytorch_has_used():
    code = """
import os, signal, torch, quire
torch.set_num_threads(2)
torch.ones(1000, 1000).sum()
pid = os.fork()
if pid == 0:
    signal.alarm(30)
    quire.quantize(torch.ones(512, 512), "nvfp4")
    os._exit(0)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
    forks.run(code)


def test_pytorchs_own_operators_do_not_wait_for_threads_a_child_has_not():
    expected = digest(X.sum(0), X @ W)
    assert in_child(lambda: digest(X.sum(0), X @ W)) == expected


def test_a_runner_that_computes_with_pytorch_does_not_wait_for_threads_a_child_has_not():
    x = X.bfloat16()
    with runners.register(runners.PythonRunner(lambda x: x @ x.t(), 512, 512)) as runner:
        expected = digest(quire.nvfp4_linear(x, runner, 512).float())
        assert in_child(lambda: digest(quire.nvfp4_linear(x, runner, 512).float())) == expected


def test_the_parent_computes_on_as_many_threads_after_a_fork():
    def threads():
        X.sum(0)
        return len(os.listdir("/proc/self/task"))

    before = threads()
    in_child(lambda: b"")
    assert threads() == before


# --- Locks. One call of each, over and over in another thread; the child makes the same call.

NUMBERS = itertools.count(1)
SMALL, WIDE = torch.ones(1, 16), torch.ones(1, 2**16)


def new_text():
    quire.quantize(SMALL, f"fp8_tensor:eps={next(NUMBERS) * 1e-9:.12f}")


def quantized():
    quire.quantize(SMALL, "mxfp8")


def multiplied():
    torch.ops.quire.linear(WIDE, WIDE, None, "x=fp8_tensor,w=fp8_tensor,dy=fp8_tensor", torch.float32)


def stashed():
    stash = torch.tensor([next(NUMBERS) + 10**9, 0])
    torch.ops.quire.wgrad_stash_(stash, [SMALL], 1, "")
    torch.ops.quire.wgrad_take_(stash)


def dropped():
    runners.register(runners.PythonRunner(abs, 16, 16)).close()


def history():
    DelayedState().reserve(1024)


LOCKS = {
    "texts": (new_text, None),
    "statistics": (quantized, quire.debug.statistics),
    "operands": (multiplied, quire.debug.operands),
    "stashes": (stashed, None),
    "runners": (dropped, None),
    "histories of delayed scaling": (history, None),
}


def fork_while_others_hold(name, times=60):
    torch.set_num_threads(2)
    call, context = LOCKS[name]
    done = threading.Event()

    def work():
        while not done.is_set():
            call()

    def once():
        call()
        return b"done"

    others = [threading.Thread(target=work) for _ in range(2)]
    with context() if context else torch.no_grad():
        call()  # a first call imports modules, and a child waits for one that another thread was importing
        for thread in others:
            thread.start()
        try:
            for _ in range(times):
                assert in_child(once, seconds=10) == b"done"
        finally:
            done.set()
            for thread in others:
                thread.join()


def test_functions_have_no_static_variables_that_a_first_call_makes():
    """A child waits for ever for one that another thread was making. Those of a thread are its own."""
    symbols = subprocess.run(
        ["readelf", "-sW", "--demangle", *LIBRARIES], stdout=subprocess.PIPE, text=True, check=True
    )
    guards = re.findall(r" OBJECT .*guard variable for (quire.*\).*)", symbols.stdout)
    assert len(LIBRARIES) >= 4 and " FUNC " in symbols.stdout and not guards


@pytest.mark.parametrize("name", LOCKS)
@pytest.mark.slow
def test_a_child_does_not_wait_for_locks_that_other_threads_held(name):
    forks.call(fork_while_others_hold, name)  # a small process is forked sooner than that of all tests
