"""README.md: its example runs, its tables and lists are true."""

import re

import pytest
import torch

import dev
import quire
import torch_pin

PAGE = "README.md"


def examples(page) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page(PAGE).text, re.DOTALL)


def test_the_example_runs_and_learns(page):
    scope = {}
    exec(examples(page)[0], scope)
    x = scope["x"]
    losses = [scope["loss"](x, x).item()]
    for _ in range(20):
        value = scope["loss"](x, x)
        value.backward()
        scope["optimizer"].step()
        scope["optimizer"].zero_grad()
        losses.append(value.item())
    assert losses[-1] < losses[0]  # of one batch


def test_a_pretrained_model_is_converted(page, monkeypatch):
    monkeypatch.setattr(quire.conversion.timing, "SECONDS", 0.0)
    # Also where this machine would be slower.
    monkeypatch.setattr(quire.conversion.timing, "_SLOWER", float("inf"))
    monkeypatch.setattr(quire.conversion.recommend, "_WORTH", 0.0)
    scope = {}
    for code in examples(page):  # one after another, as a reader pastes them
        exec(code, scope)
    assert [type(layer) for layer in scope["pretrained"]] == [quire.Linear, torch.nn.GELU, quire.Linear]


def test_the_table_of_recipes_is_complete(page):
    rows = [[cell.strip("`") for cell in row] for row in page(PAGE).rows("Recipes")]
    documented = {name: recipe for recipe, name, *_ in rows if name}
    assert documented == {name: type(quire.recipe.from_name(name)).__name__ for name in quire.recipe._BY_NAME}


def test_documented_recipe_texts_are_those_of_the_recipes(page):
    rows = page("docs/numerics.md").rows("6.4 Recipes")
    texts = {row[0].split("`")[3]: row[2].strip("`") for row in rows if row[0].count("`") == 4}
    assert texts == {name: quire.recipe.from_name(name).linear_spec() for name in quire.recipe._BY_NAME}


def test_everything_in_the_layout_exists_and_nothing_is_left_out(page, root):
    block = page(PAGE).section("Where things are").split("```")[1]
    named = [line.split()[0] for line in block.strip().splitlines()]
    assert [name for name in named if not (root / name).exists()] == []
    listed = {name.split("/")[0] for name in named}
    ignored = {"build", "dist", "train-out", "__pycache__"}
    folders = {path.name for path in root.iterdir() if path.is_dir() and not path.name.startswith(".")}
    assert folders - ignored - listed == set()


def test_the_supported_versions_are_those_of_the_build(page):
    oldest, newest = torch_pin.OLDEST[1], torch_pin.NEWEST[1]
    assert f"PyTorch {', '.join(f'2.{n}' for n in range(oldest, newest))} and 2.{newest};" in page(PAGE).text


def test_the_documented_verbs_are_those_of_dev(page, capsys):
    with pytest.raises(SystemExit):
        dev.parse(["--help"])
    said = capsys.readouterr().out
    for name in (PAGE, "CONTRIBUTING.md"):
        for verb in set(re.findall(r"\./dev ([a-z]+)", page(name).text)):
            assert re.search(rf"^ +{verb} ", said, re.MULTILINE), verb


def test_links_between_pages_lead_somewhere(page, root):
    folders = [path for folder in ("src", "python/quire", "tests") for path in (root / folder).rglob("README.md")]
    for path in [root / "README.md", root / "CONTRIBUTING.md", *root.glob("docs/*.md"), *folders]:
        for target in re.findall(r"\]\(([^)#]+)", path.read_text()):
            if "://" not in target:
                assert (path.parent / target).exists(), f"{path.name} links to {target}"
