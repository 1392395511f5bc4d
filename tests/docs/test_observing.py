"""docs/observing.md: its Python runs, on a model that has what the page names."""

import re

import pytest
import torch

import quire


@pytest.mark.filterwarnings("ignore")
def test_the_python_of_the_page_runs_and_the_counts_are_those_of_the_step(page):
    model = torch.nn.Sequential()
    model.up, model.pooler = torch.nn.Linear(256, 256), torch.nn.Linear(256, 256)
    layer, x = quire.Linear(256, 256), torch.randn(32, 256)

    def train_one_step():
        model(x).sum().backward()

    scope = {"quire": quire, "layer": layer, "x": x, "model": model, "train_one_step": train_one_step}
    for code in re.findall(r"^```python\n(.*?)^```", page("docs/observing.md").text, re.DOTALL | re.MULTILINE):
        exec(code, scope)
    assert type(model.up) is quire.Linear and type(model.pooler) is torch.nn.Linear
    counted = {f"{row.role} {row.product}" for row in scope["counts"]}
    assert counted == {"x fprop", "w fprop", "dy wgrad", "x wgrad"}
    assert {row.layer for row in scope["by_layer"]} == {"up"} and scope["worst"] in scope["by_layer"]
    times_are_those_of_the_layers(scope["milliseconds"], quire.Linear(256, 128), quire.Linear(128, 16384))
    times_are_those_of_the_layers(
        scope["milliseconds"], quire.LayerNormMLP(256, 64), torch.nn.Linear(256, 16384, bias=False)
    )


def times_are_those_of_the_layers(milliseconds, *layers):
    """Of layers of which one has 64 times the work of the other, in both passes. The best of many runs: other processes
    may interrupt any of them."""
    model = torch.nn.Sequential(*layers)
    x = torch.randn(64, 256)

    def step():
        with quire.autocast(recipe="mxfp8"):
            model(x).sum().backward()

    step()
    runs = [milliseconds(model, step) for _ in range(20)]
    assert all(list(times) == ["0", "1"] for times in runs)
    for i in range(2):
        small, large = (min(times[name][i] for times in runs) for name in ("0", "1"))
        assert 0 < small < large
    assert "forward" not in vars(model[0])


#: Operators that take no time worth a word.
LOOKS = {"quire::delayed_collections", "quire::in_backward", "quire::canonical_spec"}


@pytest.mark.filterwarnings("ignore")
def test_every_operator_that_a_profile_shows_is_explained(page):
    torch.manual_seed(0)
    dense, mixture = quire.LayerNormMLP(64, 64), quire.MoE(64, 64, num_experts=4, top_k=2)
    layer, x = quire.Linear(64, 64), torch.randn(32, 64)

    def run():
        for recipe in ("mxfp8", "nvfp4", "fp8_delayed"):
            for _ in range(2):
                with quire.autocast(recipe=recipe):
                    dense(layer(x)).sum().backward()
        with quire.autocast(recipe="mxfp8"):
            mixture(x).sum().backward()
            layer(x, is_first_microbatch=True).sum().backward()
        quire.quantize_weights(layer, "mxfp8")

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as found:
        run()
    rows = page("docs/observing.md").rows("Which layer is slow? Reading a profile")
    explained = {name for cells in rows for name in re.findall(r"`(quire::\w+)`", cells[0])}
    profiled = {event.name for event in found.events() if event.name.startswith("quire::")} - LOOKS
    assert len(profiled) > 25
    assert {name for name in profiled if re.sub("_(fwd|bwd|backward)$", "", name) not in explained} == set()
