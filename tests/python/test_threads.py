"""Threads that compute at the same time get the bits that one thread alone gets."""

import _thread
import threading

import pytest
import torch

import quire

THREADS = 8
ROUNDS = 20


def at_the_same_time(tasks):
    """Runs the tasks in a thread each, which begin together; their results in order. Raises what a task raised."""
    start, results = threading.Barrier(len(tasks)), [None] * len(tasks)

    def work(i):
        start.wait()
        try:
            results[i] = tasks[i]()
        except BaseException as error:
            results[i] = error

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(tasks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def model(seed):
    torch.manual_seed(seed)
    return torch.nn.Sequential(quire.Linear(48, 80), torch.nn.GELU(), quire.Linear(80, 33))


def training(layers, recipe, seed):
    """Parameters, gradient of x and random state after some steps; each thread has its own of all of these."""

    def run():
        generator = torch.Generator().manual_seed(seed)
        optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)
        for _ in range(ROUNDS):
            x = torch.randn(37, 48, generator=generator, requires_grad=True)
            with quire.autocast(recipe=recipe):
                y = layers(x)
            y.backward(torch.randn(37, 33, generator=generator))
            optimizer.step()
            optimizer.zero_grad()
        return [x.grad, *layers.state_dict().values(), *quire.rng_state(layers).values()]

    return run


def gradients(layers, recipe, seed):
    """Results and gradients of x through layers that have none of their own."""

    def run():
        generator, found = torch.Generator().manual_seed(seed), []
        for _ in range(ROUNDS):
            x = torch.randn(37, 48, generator=generator, requires_grad=True)
            with quire.autocast(recipe is not None, recipe=recipe):
                y = layers(x)
            y.backward(torch.randn(37, 33, generator=generator))
            found += [y.detach(), x.grad]
        return found

    return run


def no_stochastic_rounding(recipe):
    """A shared layer has one counter, so that threads draw in the order in which they come."""
    if not recipe.stochastic:
        return recipe
    return quire.recipe.NVFP4BlockScaling(disable_stochastic_rounding=True)


@pytest.fixture
def recipes():
    """One for each thread, of those that keep no state in a module."""
    named = map(quire.recipe.from_name, quire.recipe.names())
    found = [recipe for recipe in named if not recipe.delayed()]
    return (found * THREADS)[:THREADS]


@pytest.fixture
def all_equal(equal_bits):
    def check(found, expected):
        assert len(found) == len(expected) == THREADS
        for i, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert all(equal_bits(a, b) for a, b in zip(one, other, strict=True)), f"thread {i}"

    return check


def test_threads_with_modules_of_their_own(recipes, all_equal):
    """Also with stochastic rounding, whose counters are the modules'."""
    assert any(recipe.stochastic for recipe in recipes)
    recipes[-2:] = [quire.recipe.DelayedScaling(amax_history_len=3)] * 2

    def tasks():
        return [training(model(seed=i), recipe, seed=i) for i, recipe in enumerate(recipes)]

    all_equal(at_the_same_time(tasks()), [task() for task in tasks()])


def test_threads_that_share_a_frozen_module_under_different_recipes(recipes, all_equal):
    shared = model(seed=0).requires_grad_(False)
    recipes[-1] = None
    tasks = [gradients(shared, recipe and no_stochastic_rounding(recipe), seed=i) for i, recipe in enumerate(recipes)]
    all_equal(at_the_same_time(tasks), [task() for task in tasks])


def test_threads_that_share_a_frozen_module_without_gradients(recipes, all_equal):
    shared = model(seed=0).eval()
    x = torch.randn(37, 48)

    def infer(recipe):
        def run():
            with torch.no_grad(), quire.autocast(recipe=recipe):
                return [shared(x) for _ in range(ROUNDS)]

        return run

    tasks = [infer(recipe) for recipe in recipes]
    all_equal(at_the_same_time(tasks), [task() for task in tasks])


def test_threads_that_share_a_compiled_module(compiler, recipes, all_equal):
    shared = model(seed=0).requires_grad_(False)
    recipes = [no_stochastic_rounding(recipe) for recipe in recipes]
    eager = [gradients(shared, recipe, seed=i)() for i, recipe in enumerate(recipes)]
    compiled = compiler(shared)
    tasks = [gradients(compiled, recipe, seed=i) for i, recipe in enumerate(recipes)]
    for task in tasks:
        task()  # compiling is torch's business and serial
    all_equal(at_the_same_time(tasks), eager)


def test_specs_seen_for_the_first_time_by_all_threads_at_once(all_equal):
    """Texts are parsed once per process: the first to come fills a table that all share."""
    x = torch.randn(16, 32)

    def task():
        found = []
        for i in range(200):
            q = quire.quantize(x, f"fp8_tensor:eps={1e-30 * (1 + i)}")
            found += [q.rowwise_data, q.rowwise_scale]
        return found

    all_equal(at_the_same_time([task] * THREADS), [task()] * THREADS)


def test_threads_that_explain_and_count_at_once(recipes):
    with quire.debug.statistics() as counted:
        found = at_the_same_time([lambda r=recipe, i=i: explained(model(i), r) for i, recipe in enumerate(recipes)] * 2)
    assert found == [["fprop"] * 2 + ["dgrad", "wgrad"] * 2] * (2 * THREADS)
    assert sum(row.tensors for row in counted if row.role == "x" and row.direction == "rowwise") == 4 * THREADS


def explained(layers, recipe):
    with quire.autocast(recipe=recipe):
        return [step.name for step in quire.explain(layers, torch.randn(37, 48)).products]


def test_a_thread_that_python_did_not_start_compiles_and_has_a_recipe_of_its_own():
    m, x, done, results = quire.Linear(64, 32), torch.randn(8, 64), threading.Event(), []
    recipe = quire.recipe.MXFP8BlockScaling()
    with quire.autocast(recipe=recipe):
        quantized = m(x)

    def work():
        try:
            compiled = torch.compile(m, fullgraph=True, backend="aot_eager")
            results.append(type(threading.current_thread()) is threading.Thread)
            results.append(compiled(x).equal(torch.nn.functional.linear(x, m.weight, m.bias)))
            with quire.autocast(recipe=recipe):
                results.append(compiled(x).equal(quantized))
                results.append(quire.active_recipe() == recipe)
            results.append(quire.active_recipe() is None)
        finally:
            done.set()

    _thread.start_new_thread(work, ())
    assert done.wait(120) and results == [False, True, True, True, True]
