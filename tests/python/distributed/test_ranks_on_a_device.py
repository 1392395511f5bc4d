"""Ranks whose tensors are on a device have the results of one process: two that share it over gloo, and on a GPU one
with NCCL. Ranks of the CPU have tests of their own for each row of the table."""

import pytest

from python.distributed import captured_ranks, expert_ranks, parallel_layers, shard_ranks, training_state_ranks
from ranks import Ranks

pytestmark = pytest.mark.off_cpu


def tensor(run, folder, size):
    for kind, mode, recipe in (("LayerNormMLP", "column", "nvfp4"), ("Linear", "row", "fp8_current")):
        run(parallel_layers.equals_one_process, parallel_layers.Case(recipe, kind, mode))


def sequence(run, folder, size):
    for kind, mode, recipe in (("LayerNormMLP", "column", "mxfp8"), ("Linear", "row", "nvfp4")):
        for tokens in ((64,), (14,)):
            run(parallel_layers.equals_one_process, parallel_layers.Case(recipe, kind, mode, True, tokens))


def delayed(run, folder, size):
    run(parallel_layers.equals_one_process, parallel_layers.Case("delayed", "LayerNormLinear", "column", True))


def compiled(run, folder, size):
    for mode, recipe in (("column", "nvfp4"), ("row", "mxfp8")):
        run(parallel_layers.equals_one_process, parallel_layers.Case(recipe, "Linear", mode, True, way="compiled"))


def values_of_shards(run, folder, size):
    run(shard_ranks.values_equal_one_process, shard_ranks.Case("mxfp8", "norms", (size,)))


def codes_of_shards(run, folder, size):
    for recipe in ("mxfp8", "nvfp4"):
        run(shard_ranks.codes_equal_values, shard_ranks.Case(recipe, mesh=(size,)))


def shards_in_a_graph(run, folder, size):
    for recipe, backend in (("mxfp8", ""), ("fp8_current", "aot_eager")):
        run(shard_ranks.weights_of_a_graph_equal_values, shard_ranks.Case(recipe, mesh=(size,), backend=backend), 2)


def experts(run, folder, size):
    for recipe, ep in (("nvfp4", {}), ("mxfp8", {"ep_capacity": 60, "ep_overflow": "drop"})):
        run(expert_ranks.equals_one_process, expert_ranks.Case(recipe, (13, 27)[:size], ep=ep))


def checkpoints(run, folder, size):
    for way in ("parallel=", "fully_shard"):
        run(training_state_ranks.resumes, str(folder / way), way, "nvfp4", None)


TABLE = {
    function.__name__: function
    for function in (
        tensor,
        sequence,
        delayed,
        compiled,
        values_of_shards,
        codes_of_shards,
        shards_in_a_graph,
        experts,
        checkpoints,
    )
}


@pytest.fixture(scope="module")
def group():
    made = {}

    def of(device, size, backend=""):
        key = (size, backend)
        if key not in made:
            made[key] = Ranks(size, device=device.type, backend=backend)
        return made[key].run

    yield of
    for ranks in made.values():
        ranks.close()


rows = pytest.mark.parametrize("row", TABLE)
of_a_gpu = pytest.mark.skipif("config.getoption('--device') != 'cuda'", reason="NCCL is of GPUs")


@rows
def test_two_ranks_that_share_a_device_have_the_results_of_one_process(row, device, group, tmp_path):
    TABLE[row](group(device, 2), tmp_path, 2)


@of_a_gpu
@rows
def test_a_rank_with_nccl_has_the_results_of_one_process(row, device, group, tmp_path):
    TABLE[row](group(device, 1, "nccl"), tmp_path, 1)


@of_a_gpu
@pytest.mark.parametrize("name", captured_ranks.STEPS)
def test_collectives_are_captured_and_replayed(name, device, group):
    group(device, 1, "nccl")(captured_ranks.replays_equal_eager_steps, name)
