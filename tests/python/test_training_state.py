"""quire.TrainingState: what some processes have saved with torch.distributed.checkpoint, others load, to the bit."""

import pytest

from ranks import Ranks
from training_state_ranks import resumes


@pytest.fixture(scope="module")
def two():
    ranks = Ranks(2)
    yield ranks
    ranks.close()


QUANTIZED = {"codes": {}, "codes and masters": {"keep_master": True}}


@pytest.mark.parametrize("recipe", ["nvfp4", "delayed"])
@pytest.mark.parametrize("way", ["DistributedDataParallel", "fully_shard", "parallel=", "styles", "styles of PyTorch"])
def test_a_run_goes_on_with_the_same_bits(two, tmp_path, way, recipe):
    two.run(resumes, str(tmp_path), way, recipe, None)
