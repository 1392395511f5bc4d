"""Pipelines of PyTorch with one stage on each of two ranks, for functions that tests/ranks.py runs. The reference is
the whole model in one process, one microbatch after the other."""

import copy
import gc
from dataclasses import dataclass

import pytest
import torch
from torch import distributed
from torch.distributed.pipelining import PipelineStage, SplitPoint, pipeline, schedules

import every_recipe
import quire
from quire.distributed import data_parallel_rank

WIDTH, MICROBATCHES, TOKENS, STEPS = 64, 4, 8, 3


@dataclass(frozen=True)
class Case:
    """schedule: the name of a class of PyTorch. recipe: a name of every_recipe.py. shapes_given: whether the stage is
    told its shapes, so that PyTorch does not run it to learn them. wgrad: where gradients of weights go: "autograd";
    "main_grad"; "delayed", until backward_dw(). compiled: by Inductor."""

    schedule: str
    recipe: str
    shapes_given: bool
    wgrad: str = "autograd"
    compiled: bool = False


def loss_of(y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return ((y - target) ** 2).mean()


def stages(case: Case) -> list[torch.nn.Module]:
    options = {"fuse_wgrad_accumulation": case.wgrad == "main_grad", "delay_wgrad_compute": case.wgrad == "delayed"}
    # Not GELU, whose gradient Inductor rounds otherwise than eager mode.
    with data_parallel_rank(0):  # or the random states would be those of the rank
        first = [quire.Linear(WIDTH, WIDTH, **options), torch.nn.ReLU(), quire.LayerNormLinear(WIDTH, WIDTH, **options)]
        last = [quire.Linear(WIDTH, WIDTH, **options), quire.LayerNormMLP(WIDTH, 2 * WIDTH, **options)]
    return [torch.nn.Sequential(*layers) for layers in (first, last)]


def prepare(stage: torch.nn.Module, case: Case) -> None:
    """Gives weights what takes their gradients."""
    for weight in [p for p in stage.parameters() if p.dim() == 2 and case.wgrad == "main_grad"]:
        weight.main_grad = torch.zeros_like(weight)
        weight.grad_added_to_main_grad = False  # so that autograd gets zeros, which zero-bubble schedules ask for


def compute_delayed(stage: torch.nn.Module, case: Case) -> None:
    for layer in stage.modules():
        if case.wgrad == "delayed" and hasattr(layer, "backward_dw"):
            layer.backward_dw()


def schedule_of(part: torch.nn.Module, case: Case, rank: int) -> schedules._PipelineSchedule:
    options = {}
    if case.shapes_given:
        example = torch.zeros(TOKENS, WIDTH)
        options = {
            "input_args": example.clone().requires_grad_(rank > 0),
            "output_args": example.clone().requires_grad_(),
        }
    if case.wgrad == "delayed":
        options["dw_builder"] = lambda: lambda: compute_delayed(part, case)
    module = torch.compile(part, fullgraph=True) if case.compiled else part
    stage = PipelineStage(module, rank, 2, torch.device("cpu"), **options)
    kind = getattr(schedules, case.schedule)
    several = issubclass(kind, schedules.PipelineScheduleMulti)
    return kind([stage] if several else stage, MICROBATCHES, loss_fn=loss_of)


def one_after_the_other(model: torch.nn.Module, x: torch.Tensor, target: torch.Tensor, case: Case) -> list[float]:
    losses = []
    for tokens, wanted in zip(x.chunk(MICROBATCHES), target.chunk(MICROBATCHES), strict=True):
        loss = loss_of(model(tokens), wanted)
        loss.backward()
        compute_delayed(model, case)
        losses.append(loss.item())
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad /= MICROBATCHES  # as schedules do; they know nothing of main_grad
    return losses


def gradients(stage: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: getattr(p, "main_grad", p.grad) for name, p in stage.named_parameters()}


def trains_as_one_process(rank: int, case: Case) -> None:
    alone = [distributed.new_group([each]) for each in range(2)][rank]  # stages have different layers
    torch.manual_seed(0)
    parts = stages(case)
    whole = copy.deepcopy(torch.nn.Sequential(*parts))
    for stage in (*parts, *whole):
        prepare(stage, case)
    part, schedule = parts[rank], schedule_of(parts[rank], case, rank)
    recipe = every_recipe.TABLE[case.recipe]
    for _ in range(STEPS):
        x, target = torch.randn(MICROBATCHES * TOKENS, WIDTH), torch.randn(MICROBATCHES * TOKENS, WIDTH)
        losses: list[torch.Tensor] = []
        with quire.autocast(recipe=recipe, amax_reduction_group=alone):
            schedule.step(target=target, losses=losses) if rank else schedule.step(x)
        with quire.autocast(recipe=recipe, amax_reduction_group=alone):
            expected = one_after_the_other(whole, x, target, case)
        assert rank == 0 or [loss.item() for loss in losses] == expected
        found = gradients(part)
        for name, wanted in gradients(whole[rank]).items():
            assert torch.equal(found[name], wanted), (case, name)
        for parameter in (*part.parameters(), *whole.parameters()):
            parameter.grad = None


def trains_when_traced(rank: int, recipe: str) -> None:
    """One step of a pipeline that torch.export has cut the model into."""
    case = Case("ScheduleGPipe", recipe, True)
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(layer for stage in stages(case) for layer in stage))
    whole = copy.deepcopy(model)
    x, target = torch.randn(MICROBATCHES * TOKENS, WIDTH), torch.randn(MICROBATCHES * TOKENS, WIDTH)
    with quire.autocast(recipe=recipe):
        cut = pipeline(model, (x[:TOKENS],), split_spec={"3": SplitPoint.BEGINNING})
    schedule = schedules.ScheduleGPipe(cut.build_stage(rank, torch.device("cpu")), MICROBATCHES, loss_fn=loss_of)
    losses: list[torch.Tensor] = []
    schedule.step(target=target, losses=losses) if rank else schedule.step(x)
    with quire.autocast(recipe=recipe):
        expected = one_after_the_other(whole, x, target, case)
    assert rank == 0 or [loss.item() for loss in losses] == expected
    wanted = gradients(whole)
    found = gradients(cut.get_stage_module(rank))
    assert found and all(torch.equal(gradient, wanted[name]) for name, gradient in found.items())


def needs_a_group_for_amaxes(rank: int) -> None:
    # A rank compares the number of its amaxes with other ranks only if it has changed: first both have another one.
    layers = [quire.Linear(WIDTH, WIDTH) for _ in range(5)]
    for _ in range(2):
        with quire.autocast(recipe="fp8_delayed"):
            for layer in layers:
                layer(torch.randn(TOKENS, WIDTH)).sum().backward()
    del layers, layer
    gc.collect()
    layers = quire.LayerNormMLP(WIDTH, WIDTH) if rank else quire.Linear(WIDTH, WIDTH)
    with quire.autocast(recipe="fp8_delayed"):
        layers(torch.randn(TOKENS, WIDTH)).sum().backward()
    with (
        pytest.raises(RuntimeError, match=r"differ in states: .*; .*pass amax_reduction_group= to quire\.autocast"),
        quire.autocast(recipe="fp8_delayed"),
    ):
        pass
    del layers
    gc.collect()  # later steps reduce the amaxes of all layers that are left
