"""torch.distributed.pipelining with layers of quire: losses and gradients are those of one process, bit by bit."""

import pytest
from torch.distributed.pipelining import schedules, stage

from python.distributed.pipeline_ranks import (
    Case,
    needs_a_group_for_amaxes,
    trains_as_one_process,
    trains_when_traced,
)

GPIPE, ONE_F_ONE_B, ZERO_BUBBLE = "ScheduleGPipe", "Schedule1F1B", "ScheduleInterleavedZeroBubble"


@pytest.mark.parametrize(
    ("schedule", "recipe", "shapes_given", "wgrad"),
    [
        (GPIPE, "delayed", False, "autograd"),
        (GPIPE, "nvfp4", True, "main_grad"),
        (GPIPE, "mxfp8", False, "delayed"),
        (GPIPE, "weight_only", False, "autograd"),
        (ONE_F_ONE_B, "nvfp4", False, "autograd"),
        (ONE_F_ONE_B, "delayed", False, "main_grad"),
        (ONE_F_ONE_B, "fp8_current", True, "delayed"),
        (ONE_F_ONE_B, "mxfp4", True, "autograd"),
        (ZERO_BUBBLE, "delayed", True, "autograd"),
        (ZERO_BUBBLE, "mxfp8", False, "main_grad"),
        (ZERO_BUBBLE, "fp8_block", True, "autograd"),
        # A zero-bubble schedule runs backward twice, and random numbers are drawn twice, but for this.
        (ZERO_BUBBLE, "nvfp4", False, "delayed"),
    ],
)
def test_a_pipeline_trains_as_one_process(two, schedule, recipe, shapes_given, wgrad):
    two.run(trains_as_one_process, Case(schedule, recipe, shapes_given, wgrad))


@pytest.mark.parametrize("recipe", ["nvfp4", "delayed"])
def test_a_compiled_pipeline_trains_as_one_process(two, recipe):
    two.run(trains_as_one_process, Case(ONE_F_ONE_B, recipe, shapes_given=False, compiled=True))


@pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated")
@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4"])
def test_a_traced_pipeline_trains_as_one_process(two, recipe):
    two.run(trains_when_traced, recipe)


def test_dry_runs_of_this_pytorch_are_known():
    """Or amaxes of memory without values would be collected (quire/nn/dry_runs.py)."""
    guarded = [name for name in vars(stage.PipelineStage) if hasattr(getattr(stage.PipelineStage, name), "__wrapped__")]
    assert guarded in (["_forward_metadata_inference", "_backward_metadata_inference"], ["_shape_inference"])
    assert hasattr(schedules, ZERO_BUBBLE)


def test_stages_with_other_layers_need_a_group_for_amaxes(two):
    two.run(needs_a_group_for_amaxes)
