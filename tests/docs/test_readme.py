"""README.md: its example runs, its tables and lists are true."""

import re
import types

import pytest
import torch

import dev
import quire
import torch_pin

PAGE, RECIPES = "README.md", "docs/which-recipe.md"


def examples(page) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page(PAGE).text, re.DOTALL)


def test_the_example_runs_and_learns(page):
    def batch(*sizes):  # the same in each step
        return torch.randn(*sizes, generator=torch.Generator().manual_seed(0))

    steps, losses = examples(page)[0].split("for step in range(10):")
    scope, torchs = {}, torch.randn
    exec(steps, scope)
    scope["torch"] = types.SimpleNamespace(**vars(torch) | {"randn": batch})
    for _ in range(3):
        exec("for step in range(10):" + losses, scope)
        scope.setdefault("first", scope["loss"].item())
    assert torch.randn is torchs and scope["loss"].item() < scope["first"]


def test_a_pretrained_model_is_converted(page, monkeypatch):
    monkeypatch.setattr(quire.conversion.timing, "SECONDS", 0.0)
    # Also where this machine would be slower.
    monkeypatch.setattr(quire.conversion.timing, "_SLOWER", float("inf"))
    scope = {}
    for code in examples(page):  # one after another, as a reader pastes them
        exec(code, scope)
    assert [type(layer) for layer in scope["pretrained"]] == [quire.Linear, torch.nn.GELU, quire.Linear]


def test_the_line_of_a_model_is_that_of_its_page(page):
    speeds = {
        row[0].strip("`"): [float(cell) for cell in row[1:]] for row in speed_rows(page) if row[0].startswith("`")
    }
    bits = {"half": 1 / 2, "a third": 1 / 3}
    said = page(PAGE).text.replace("\n", " ")
    for name, share in (("fp8_current", "half"), ("nvfp4", "a third")):
        megabytes, _, times = speeds[name]
        # 269 MB are those of bfloat16; a share in words is right to a hundredth.
        assert abs(megabytes / 269 - bits[share]) < 0.01 and share in said
        rows = {row[0]: row for row in page("docs/language-model.md").rows("Perplexity")}
        higher = rows[f"`{name}`"][2].split(" ±")[0]
        assert f"{times:.2f} times as many" in said and f"{higher} % higher" in said


def speed_rows(page) -> list[list[str]]:
    return page("docs/language-model.md").rows("A language model")


def test_the_table_of_recipes_is_complete(page):
    rows = [[cell.strip("`") for cell in row] for row in page(RECIPES).rows("The formats of each recipe")]
    documented = {name: recipe for recipe, name, *_ in rows if name}
    assert documented == {name: type(quire.recipe.from_name(name)).__name__ for name in quire.recipe._BY_NAME}


def test_documented_recipe_texts_are_those_of_the_recipes(page):
    rows = page("docs/numerics.md").rows("6.4 Recipes")
    texts = {row[0].split("`")[3]: row[2].strip("`") for row in rows if row[0].count("`") == 4}
    assert texts == {name: quire.recipe.from_name(name).linear_spec() for name in quire.recipe._BY_NAME}


def test_everything_in_the_layout_exists_and_nothing_is_left_out(page, root):
    block = page("CONTRIBUTING.md").section("Where things are").split("```")[1]
    named = [line.split()[0] for line in block.strip().splitlines()]
    assert [name for name in named if not (root / name).exists()] == []
    listed = {name.split("/")[0] for name in named}
    ignored = {"build", "dist", "train-out", "__pycache__"}
    folders = {path.name for path in root.iterdir() if path.is_dir() and not path.name.startswith(".")}
    assert folders - ignored - listed == set()


def test_the_supported_versions_are_those_of_the_build(page):
    assert f"quire supports PyTorch {torch_pin.RANGE};" in page(PAGE).text
    assert f"PyTorch {torch_pin.RANGE}, g++" in page(PAGE).text


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
