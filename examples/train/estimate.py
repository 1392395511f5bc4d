"""How long a comparison will take on this machine, from a measurement of at most two seconds before it starts."""

import time

from data import Corpus
from run import Run
from settings import Settings

BUDGET, MOST_STEPS = 2.0, 10  # seconds of measuring, and what is enough of each run: small models take long to compile
#: Seconds of torch.compile with an empty cache where a loop of LOOP additions took LOOP_SECONDS (Zen 3, two
#: cores): of its first use, of each recipe, and of each layer of each recipe. It is Python for the most part, and so is
#: the loop.
COMPILE_FIRST, COMPILE_RECIPE, COMPILE_LAYER = 25.0, 5.0, 3.0
LOOP, LOOP_SECONDS = 1_000_000, 0.045


def seconds_of_a_step(name: str, settings: Settings, corpus: Corpus, budget: float) -> float:
    """The quickest of the eager steps that fit into the budget, 1 to MOST_STEPS. A compiled step takes about as long:
    nearly all of it is matrix products."""
    run = Run(name, settings, corpus)
    run.compiled_loss = run.loss
    end, times = time.perf_counter() + budget, []
    while not times or (len(times) < MOST_STEPS and time.perf_counter() < end):
        start = time.perf_counter()
        run.train_step()
        run.progress.losses.append(0.0)  # the next step is another
        times.append(time.perf_counter() - start)
    return min(times)


def seconds_of_a_loop() -> float:
    start = time.perf_counter()
    total = 0
    for i in range(LOOP):
        total += i
    return time.perf_counter() - start


def compile_seconds(recipes: int, settings: Settings) -> float:
    speed = min(seconds_of_a_loop() for _ in range(5)) / LOOP_SECONDS
    return speed * (COMPILE_FIRST + recipes * (COMPILE_RECIPE + COMPILE_LAYER * settings.layers))


def describe(names: list[str], settings: Settings, corpus: Corpus) -> str:
    """One line: how long the runs of `names` take, if none of their steps is done and nothing is compiled yet."""
    measured = list(dict.fromkeys((names[0], names[-1])))
    steps = [seconds_of_a_step(name, settings, corpus, BUDGET / len(measured)) for name in measured]
    step, compiling = sum(steps) / len(steps), compile_seconds(len(names), settings)
    # A validation batch has no backward pass, which is two thirds of a step.
    training = len(names) * step * (settings.steps + settings.validation_batches / 3)
    return (
        f"this takes about {duration(training + compiling)} here: {duration(training)} for {len(names)} "
        f"{'run' if len(names) == 1 else 'runs'} of {settings.steps} steps of {step:.2f} s, and {duration(compiling)} "
        "for torch.compile, less if its cache knows the graphs"
    )


def duration(seconds: float) -> str:
    if seconds < 90:
        return f"{max(5, round(seconds / 5) * 5)} seconds"
    return f"{round(seconds / 60)} minutes"
