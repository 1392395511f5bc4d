"""Runners that somebody else wrote: Python functions, and C++ in a library."""

import gc
import os
import shutil
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import pytest
import torch

import quire
from python.runners.runner_inputs import E, H, N, choices, nothing_stays_registered, rand  # noqa: F401  a fixture of every test
from quire import runners
from quire.loading import library as loaded

ROOT = Path(__file__).parents[3]


def test_a_function_is_a_runner():
    w = rand(N, H)
    with runners.register(runners.PythonRunner(lambda x: x @ w.t(), H, N)) as runner:
        for shape in [(5, H), (H,), (2, 3, H)]:
            x = rand(*shape)
            assert torch.equal(quire.nvfp4_linear(x, runner, N), x @ w.t())
        assert quire.nvfp4_linear(rand(0, H), runner, N).shape == (0, N)
        torch._dynamo.reset()
        compiled = torch.compile(lambda x: quire.nvfp4_linear(x, runner, N), fullgraph=True)
        assert torch.equal(compiled(rand(5, H)), rand(5, H) @ w.t())


def test_a_function_of_a_mixture_gets_the_choices():
    seen = []

    def function(hidden_states, topk_weights, topk_ids):
        seen.append((hidden_states, topk_weights, topk_ids))
        return hidden_states * 2

    x, (weights, ids) = rand(7, H), choices()
    with runners.register(runners.PythonRunner(function, H, H, experts=E)) as runner:
        assert torch.equal(quire.nvfp4_moe(x, weights, ids, runner, H), x * 2)
    # They are tensors that it may keep.
    del function
    assert all(torch.equal(a, b) for a, b in zip(seen[0], (x, weights, ids), strict=True))


class Unusual(Exception):
    pass


def test_what_a_function_raises_reaches_the_caller_as_it_is():
    def function(x):
        raise Unusual("its own words")

    with runners.register(runners.PythonRunner(function, H, N)) as runner:
        with pytest.raises(Unusual, match="its own words"):
            quire.nvfp4_linear(rand(5, H), runner, N)
        torch._dynamo.reset()
        with pytest.raises(Unusual, match="its own words"):
            torch.compile(lambda x: quire.nvfp4_linear(x, runner, N), backend="aot_eager")(rand(5, H))


@pytest.mark.parametrize(
    ("result", "error", "words"),
    [
        (lambda x: x, RuntimeError, r"must return BFloat16 \[5, 32\] on cpu, got BFloat16 \[5, 48\] on cpu"),
        (lambda x: x[:, :N].float(), RuntimeError, "got Float"),
        (lambda x: None, TypeError, "the function's result: y must be a tensor, got None"),
    ],
)
def test_a_function_that_returns_something_else_is_refused(result, error, words):
    with runners.register(runners.PythonRunner(result, H, N)) as runner, pytest.raises(error, match=words):
        quire.nvfp4_linear(rand(5, H), runner, N)


def test_a_function_may_use_runners_itself_and_be_compiled():
    with runners.register(runners.LinearRunner(rand(N, H))) as inner:
        torch._dynamo.reset()
        function = torch.compile(lambda x: quire.nvfp4_linear(x, inner, N) + 1, backend="aot_eager")
        with runners.register(runners.PythonRunner(function, H, N)) as outer:
            x = rand(5, H)
            assert torch.equal(quire.nvfp4_linear(x, outer, N), quire.nvfp4_linear(x, inner, N) + 1)


def test_a_function_on_another_device_is_not_called_from_here():
    with runners.register(runners.PythonRunner(lambda x: x, H, H, device="cuda:0")) as runner:
        with pytest.raises(
            RuntimeError, match="computes on cuda:0 and x lies on cpu; registered: .* move x, or register"
        ):
            quire.nvfp4_linear(rand(5, H), runner, H)


def test_a_function_is_forgotten_when_its_runner_is_closed_and_its_last_call_has_ended():
    inside, leave = threading.Event(), threading.Event()

    class Function:
        def __call__(self, x):
            inside.set()
            assert leave.wait(60)
            return x

    function = Function()
    gone, results = weakref.ref(function), []
    runner = runners.register(runners.PythonRunner(function, H, H))
    del function
    caller = threading.Thread(target=lambda: results.append(quire.nvfp4_linear(rand(5, H), runner.handle, H)))
    caller.start()
    assert inside.wait(60)
    runner.close()
    leave.set()
    caller.join()
    assert torch.equal(results[0], rand(5, H))
    runners.register(runners.LinearRunner(rand(N, H))).close()  # which tidies up
    gc.collect()
    assert gone() is None


# ---------------------------------------------------------------- a library of somebody else


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """tests/consumer/runner.cpp, built against this tree's headers and library."""
    made = tmp_path_factory.mktemp("runner") / "librunner.so"
    launcher = ["ccache"] if shutil.which("ccache") else []
    compiler = [*launcher, os.environ.get("CXX", "g++"), "-std=c++20", "-O1", "-fPIC", "-shared", f"-I{ROOT / 'src'}"]
    link = [f"-L{loaded.FOLDER}", "-lquire"]
    subprocess.run([*compiler, ROOT / "tests/consumer/runner.cpp", "-o", made, *link], check=True)
    return made


IN_ANOTHER_PROCESS = """
import ctypes, sys, torch, quire
torch.ops.load_library(sys.argv[1])
c = ctypes.CDLL(sys.argv[1])
c.consumer_handle.restype = c.consumer_register.restype = ctypes.c_int64
c.consumer_register.argtypes = ctypes.c_int64, ctypes.c_float, ctypes.c_char_p
found = quire.runners.find("consumer.scale")
assert found.handle == c.consumer_handle() and found.description == "y = scale * x", found
x = torch.randn(3, 8).bfloat16()
compiled = torch.compile(lambda x: quire.nvfp4_linear(x, "consumer.scale", 8), fullgraph=True, backend="aot_eager")
for y in (quire.nvfp4_linear(x, "consumer.scale", 8), quire.nvfp4_linear(x, found.handle, 8), compiled(x)):
    assert torch.equal(y, 2 * x)
assert torch.equal(quire.nvfp4_linear(x, c.consumer_register(8, 0.5, b"cpu"), 8), x / 2)
for arguments, words in (((8, 0.0, b"cpu"), "a factor of 0 is no use"), ((8, 1.0, b"cuda:1"), "computes on cuda:1")):
    try:
        quire.nvfp4_linear(x, c.consumer_register(*arguments), 8)
    except RuntimeError as error:
        assert words in str(error), error
    else:
        raise AssertionError(words)
print("done")
"""


@pytest.mark.slow
def test_a_library_of_somebody_else_has_runners(library):
    done = subprocess.run([sys.executable, "-c", IN_ANOTHER_PROCESS, library], capture_output=True, text=True)
    assert done.stdout == "done\n", done.stderr
