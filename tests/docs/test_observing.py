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
