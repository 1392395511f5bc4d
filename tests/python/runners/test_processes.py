"""Runners in many threads, and in other processes."""

import multiprocessing
import subprocess
import sys
import threading

import pytest
import torch

import quire
from python.runners.runner_inputs import INNER, E, H, N, choices, linear_bits, nothing_stays_registered, rand  # noqa: F401  a fixture of every test
from quire import runners

GATED = (rand(E, 2 * INNER, H, seed=3), rand(E, H, INNER, seed=4))


def test_threads_register_call_and_close_at_the_same_time():
    x, weights = rand(5, H), [rand(N, H, seed=seed) for seed in range(4)]
    expected, wrong = [linear_bits(x, w) for w in weights], []

    def work(number):
        for round_ in range(30):
            made = runners.LinearRunner(weights[number])
            if round_ % 3 == 0:
                made = runners.PythonRunner(lambda x: expected[number].clone(), H, N)
            with runners.register(made, name=f"thread {number}") as runner:
                for which in (runner, runner.handle, f"thread {number}"):
                    if not torch.equal(quire.nvfp4_linear(x, which, N), expected[number]):
                        wrong.append((number, round_))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_one_runner_serves_many_threads_at_once():
    x, (weights, ids) = rand(7, H), choices()
    with runners.register(runners.MoERunner(*GATED)) as runner:
        expected, results = quire.nvfp4_moe(x, weights, ids, runner, H), []

        def work():
            results.extend(torch.equal(quire.nvfp4_moe(x, weights, ids, runner, H), expected) for _ in range(100))

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert results == [True] * 400


def in_child(names, x, queue):
    """What each name gives in another process: a result, or an error's words."""
    said = []
    for name in names:
        try:
            said.append(quire.nvfp4_linear(x, name, N).float().tolist())
        except RuntimeError as error:
            said.append(str(error))
    with runners.register(runners.LinearRunner(rand(N, H, seed=8)), name="the child's") as own:
        said.append(quire.nvfp4_linear(x, own, N).float().tolist())
    queue.put(said)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_forked_child_has_the_runners_and_a_spawned_one_registers_its_own(method):
    x, w = rand(5, H), rand(N, H)
    context = multiprocessing.get_context(method)
    with (
        runners.register(runners.LinearRunner(w), name="weights"),
        runners.register(runners.PythonRunner(lambda x: x @ w.t(), H, N), name="function"),
    ):
        queue = context.Queue()
        child = context.Process(target=in_child, args=(["weights", "function"], x, queue))
        child.start()
        weights, function, own = queue.get(timeout=120)
        child.join(60)
        assert child.exitcode == 0
    assert own == linear_bits(x, rand(N, H, seed=8)).float().tolist()
    if method == "fork":
        assert weights == linear_bits(x, w).float().tolist()
        assert function == (x @ w.t()).float().tolist()
    else:
        for said, name in ((weights, "weights"), (function, "function")):
            assert f"no runner has the name '{name}'; none is registered in this process; register one" in said


ENDS_AT_ONCE = """
import sys
import torch
from quire import runners
torch.set_num_threads(1)
kept = runners.register(runners.LinearRunner(torch.ones(32, 32)), name="kept")
kept._life.began = sys.float_info.max  # however slow the machine is
"""


@pytest.mark.parametrize(("then", "told"), [("", False), ("sys.exit()", False), ("del kept", True)])
def test_a_handle_that_lives_as_long_as_its_process_was_not_dropped(then, told):
    command = [sys.executable, "-c", ENDS_AT_ONCE + then]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout
    assert ("the handle of runner 'kept' was dropped within 50 ms" in done.stdout) == told, done.stdout
    assert told or done.stdout == ""
