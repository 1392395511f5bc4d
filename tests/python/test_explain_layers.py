"""quire.explain of a model: steps have the paths of their layers, and the report joins layers with the same steps."""

import dataclasses

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import quire

pytestmark = pytest.mark.any_device


class Block(torch.nn.Module):
    def __init__(self, recomputed: bool = False) -> None:
        super().__init__()
        self.norm, self.recomputed = torch.nn.RMSNorm(64), recomputed
        self.q, self.k = quire.Linear(64, 64, bias=False), quire.Linear(64, 64, bias=False)
        self.gate, self.down = quire.Linear(64, 128, bias=False), quire.Linear(128, 64, bias=False)

    def inner(self, x):
        h = self.norm(x)
        h = x + self.q(h) * self.k(h)
        return h + self.down(torch.nn.functional.silu(self.gate(h)))

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False) if self.recomputed else self.inner(x)


def model(blocks, **options):
    torch.manual_seed(0)
    return torch.nn.Sequential(*[Block(**options) for _ in range(blocks)], torch.nn.Linear(64, 32))


def steps_of(explanation, layer):
    return [step for step in explanation.steps if step.layer == layer]


@pytest.mark.parametrize("recomputed", [False, True])
def test_each_step_of_both_passes_has_the_path_of_its_layer(recomputed):
    with quire.autocast(recipe="mxfp8"):
        found = quire.explain(model(2, recomputed=recomputed), torch.randn(32, 64))
        alone = quire.explain(quire.Linear(64, 128, bias=False), torch.randn(32, 64))
    expected = sorted((step.operation, step.name, step.problem) for step in alone.steps)
    forward = [(s.operation, s.name, s.problem) for s in alone.steps if s.name in ("x", "w", "fprop")]
    for number in range(2):
        got = sorted((step.operation, step.name, step.problem) for step in steps_of(found, f"{number}.gate"))
        assert got == sorted([*expected, *(forward if recomputed else [])])
    assert {step.layer for step in found.steps if step.operation == "gemm"} == {
        f"{number}.{name}" for number in range(2) for name in ("q", "k", "gate", "down")
    }
    assert [step.problem.split()[0] for step in steps_of(found, "2")] == [
        "aten.addmm.default",
        *["aten.mm.default"] * 2,
    ]


def test_a_model_of_60_layers_fits_a_screen_and_verbose_gives_all():
    x = torch.randn(32, 64)
    with quire.autocast(recipe="nvfp4"):
        found = quire.explain(model(60), x)
        every = quire.explain(model(60), x, verbose=True)
    lines = str(found).splitlines()
    assert len(lines) < 40 and max(map(len, lines)) < 200
    assert "*.q, *.k (120 layers):" in lines and "*.gate (60 layers):" in lines and "60:" in lines
    gemms = {step.kernel for step in found.steps if step.operation == "gemm"}
    assert sum(int(line.split()[2]) for line in lines if line.startswith("  gemm ")) == 60 * 4 * 3
    assert {line.split()[1] for line in lines if line.startswith("  gemm ")} == gemms
    assert found.steps == every.steps and str(dataclasses.replace(found, verbose=True)) == str(every)
    assert str(every).count("\n5.gate:\n") == 2 and str(every).count("  kernel reference: ") == len(
        [step for step in every.steps if step.kernels]
    )


def test_steps_that_differ_are_not_joined():
    net = model(3)
    net[1].q.recipe = "mxfp8"
    net[0].q.recipe = net[2].q.recipe = "nvfp4"
    lines = str(quire.explain(net, torch.randn(32, 64))).splitlines()
    assert "0.q, 2.q (2 layers):" in lines and "1.q:" in lines


def test_one_layer_is_explained_in_full_unless_asked_otherwise():
    layer, x = quire.Linear(64, 64), torch.randn(32, 64)
    with quire.autocast(recipe="mxfp8"):
        assert "  kernel reference: not asked" in str(quire.explain(layer, x))
        short = str(quire.explain(lambda x: layer(x), x, verbose=False))
    assert "not asked" not in short and "\nthe call itself:\n" in short


def test_hooks_of_the_model_stay_and_those_of_the_report_go():
    net, calls = model(1), []
    net[0].register_forward_hook(lambda *_: calls.append("hook"))
    before = {name: len(m._forward_hooks) + len(m._forward_pre_hooks) for name, m in net.named_modules()}
    for arguments in ((torch.randn(32, 64),), (torch.randn(32, 65),)):
        try:
            quire.explain(net, *arguments)
        except RuntimeError:
            assert arguments[0].shape[1] == 65
    assert calls == ["hook"]
    assert not torch.nn.modules.module._has_any_global_hook()
    assert before == {name: len(m._forward_hooks) + len(m._forward_pre_hooks) for name, m in net.named_modules()}


@pytest.mark.cpu_only  # PyTorch has the fast path for the CPU and CUDA alone
def test_a_layer_that_pytorch_computes_past_its_modules_stays_so():
    """Hooks of modules would turn off the fast path."""
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(64, 4, 128, batch_first=True).eval()
    with torch.no_grad():
        found = quire.explain(layer, torch.randn(2, 16, 64))
    assert found.steps == ()  # which one operator of PyTorch computes
