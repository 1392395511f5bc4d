"""docs/what-works.md: which recipe is tested with which feature, read from the tests' own tables.

`PYTHONPATH=tests:tools python tests/docs/what_works.py` writes the page; tests/docs/test_what_works.py compares it.
"""

import importlib
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import every_recipe
from every_way import WAYS

PAGE = Path(__file__).parents[2] / "docs/what-works.md"
CHECKPOINTS = PAGE.with_name("checkpoints.md")
#: What the page calls a recipe -> what the tests call it.
ROWS = {
    "`fp8_current`": ("fp8_current",),
    "`fp8_delayed`": ("delayed",),
    "`fp8_block`": ("fp8_block",),
    "`mxfp8`": ("mxfp8",),
    "`mxfp4`": ("mxfp4",),
    "`nvfp4`": ("nvfp4",),
    "weights only (`x=none`)": tuple(every_recipe.WEIGHT_ONLY),
    "static scale of x (`given`)": tuple(every_recipe.STATIC),
}
NAMES = every_recipe.TABLE | every_recipe.STATIC


@dataclass(frozen=True)
class Source:
    """A test of a feature. recipes: those that it is about, if no parameter of the test says so."""

    module: str
    test: str
    recipes: tuple[str, ...] = ()

    def names(self) -> set[str]:
        module = importlib.import_module(self.module)
        function = getattr(module, self.test)
        marks = [mark for mark in getattr(function, "pytestmark", []) if mark.name == "parametrize"]
        values = [value for mark in marks for value in _recipes(*mark.args[:2])]
        return {*self.recipes, *values}


def _recipes(arguments: object, values: object) -> list[str]:
    """The names of recipes among the values of a mark."""
    names = [name.strip() for name in arguments.split(",")] if isinstance(arguments, str) else list(arguments)
    if "recipe" not in names and "name" not in names:
        return []
    at = names.index("recipe" if "recipe" in names else "name")
    rows = [getattr(row, "values", row) if not callable(getattr(row, "values", None)) else row for row in values]
    cells = [row[at] if isinstance(row, tuple | list) else row for row in rows]
    return [cell if isinstance(cell, str) else _name(cell) for cell in cells]


def _name(recipe: object) -> str:
    return next((name for name, one in NAMES.items() if one is recipe), "high_precision")


def every(*tables: dict) -> tuple[str, ...]:
    """All names of tables that a fixture takes its recipes from."""
    return tuple(name for table in tables for name in table)


def in_way(way: str) -> Callable[[], set[str]]:
    """The recipes under which some feature runs in that way of every_way.py."""

    assert way in WAYS

    def names() -> set[str]:
        table = importlib.import_module("python.test_every_way").TABLE
        cases = [getattr(case, "values", case) for case in table.cases()]
        return {recipe for _, its, recipe in cases if its == way}

    return names


@dataclass(frozen=True)
class Column:
    """title, and the link to the page about it. sources: what gives names. refused: row -> why there is no such
    thing. partly: what does not hold for all of the title."""

    title: str
    sources: tuple[Source | Callable[[], set[str]], ...]
    refused: dict[str, str]
    partly: str = ""

    def recipes(self) -> str:
        """Which recipes of ROWS are tested with the feature, in words."""
        tested = {name for source in self.sources for name in _names(source)}
        others = [row for row in ROWS if tested.isdisjoint(ROWS[row])]
        refused = [f"{row} ({self.refused[row]})" for row in others if row in self.refused]
        untested = [row for row in others if row not in self.refused]
        words = f"all but {' and '.join(refused)}" if refused else "all"
        words += f"; not tested: {', '.join(untested)}" if untested else ""
        return words + (f"; {self.partly}" if self.partly else "")


def _names(source: Source | Callable[[], set[str]]) -> set[str]:
    return source.names() if isinstance(source, Source) else source()


DELAYED = {"`fp8_delayed`": "a"}
CONVERTED = Source("python.conversion.test_for_inference", "test_the_bits_are_those_of_weights_quantized_in_every_call")
WEIGHTS = every(every_recipe.WEIGHT_ONLY)
STATIC = every(every_recipe.STATIC)
STATIC_SHARDED = "test_static_scales_are_those_of_one_process"
PACKAGED = every(every_recipe.DEFAULTS, every_recipe.WEIGHT_ONLY)
COLUMNS = (
    Column(
        "[training](train-and-resume.md)",
        (
            Source(
                "python.compile.test_layers",
                "test_every_recipe_compiles_to_the_bits_of_eager_mode",
                every(every_recipe.DEFAULTS, every_recipe.VARIANTS),
            ),
            in_way("fullgraph"),
            Source("python.recipe.test_weight_only", "test_graphs_give_the_same_bits", WEIGHTS),
            Source("python.nn.test_static_input", "test_graphs_give_the_same_bits", STATIC),
        ),
        {},
    ),
    Column(
        "[conversion for inference](inference.md)",
        (
            CONVERTED,
            Source("python.recipe.test_weight_only", "test_quantized_parameters_stay_as_they_are", WEIGHTS),
            Source("python.quantization.test_static_scales", "test_one_call_quantizes_calibrates_and_applies", STATIC),
        ),
        DELAYED,
    ),
    Column(
        "[export](inference.md#compile-and-export), of converted models and of layers that quantize in each call",
        (
            CONVERTED,
            in_way("export"),
            Source("python.recipe.test_weight_only", "test_graphs_give_the_same_bits", WEIGHTS),
            Source("python.quantization.test_static_scales", "test_scales_go_wherever_the_model_goes", STATIC),
        ),
        {},
        "`fp8_delayed`: only layers that quantize in each call (a)",
    ),
    Column(
        "[AOTInductor](serve-cpp.md), of what can be exported (b)",
        (
            in_way("AOTInductor"),
            Source(
                "python.compile.test_aotinductor_groups",
                "test_a_package_with_groups_of_tokens_does_not_die_at_its_first_call",
                ("mxfp8", "nvfp4"),
            ),
            Source("python.conversion.test_for_inference", "test_aotinductor_compiles_a_converted_model", PACKAGED),
        ),
        {},
        "`fp8_delayed` as for export",
    ),
    Column(
        "[tensor parallel](distributed.md) training",
        (Source("python.distributed.test_linear", "test_results_are_those_of_one_process"),),
        {},
    ),
    Column(
        "training with [FSDP](distributed.md)",
        (
            Source("python.distributed.test_sharded_weights", "test_codes_give_the_bits_that_values_give"),
            Source("python.distributed.test_sharded_weights", "test_weights_of_a_graph_give_the_bits_of_fully_shard"),
            Source("python.distributed.test_sharded_weights", STATIC_SHARDED, STATIC),
        ),
        {},
    ),
    Column(
        "training in [pipelines](distributed.md#pipelines)",
        (Source("python.distributed.test_pipelining", "test_a_pipeline_trains_as_one_process"),),
        {},
    ),
    Column(
        "training of [experts](moe.md)",
        (
            Source("python.distributed.test_expert_parallel", "test_results_are_those_of_one_process"),
            Source(
                "python.nn.test_moe",
                "test_it_is_its_parts",
                every(every_recipe.IN_ANY_PRECISION),
            ),
        ),
        {},
    ),
    Column(
        "[LoRA](lora.md) on the quantized weights of a converted model",
        (
            Source(
                "python.conversion.test_input_gradients",
                "test_the_gradient_of_x_is_the_product_with_the_decoded_weight",
            ),
            Source(
                "python.conversion.test_input_gradients",
                "test_a_recipe_that_says_what_backward_needs_is_kept",
                WEIGHTS,
            ),
        ),
        DELAYED,
    ),
)


def files() -> Iterator[list[str]]:
    """Recipes, and the dialects that store them without loss, by the table of docs/checkpoints.md."""
    lines = CHECKPOINTS.read_text().split("| recipe | dialects |\n", 1)[1].split("\n\n", 1)[0].splitlines()[1:]
    stored = {}
    for recipes, names in (line.strip("| ").split(" | ") for line in lines):
        found = re.findall(r"`[\w-]+`", names.split(";")[0])
        stored |= {recipe: ", ".join(["`quire`", *found]) for recipe in recipes.split(", ") if recipe[0] == "`"}
    for row in ROWS:
        if row.startswith("`"):
            yield [row, f"no ({DELAYED[row]})" if row in DELAYED else stored.pop(row, "`quire`")]
    yield from map(list, stored.items())
    yield ["others", "`quire`; [Dialects](checkpoints.md#dialects) says which other files have the formats of w and x"]


TEXT = """# What works

This page says which recipe works with which feature. It is made from the tables of the tests
(`PYTHONPATH=tests:tools python tests/docs/what_works.py` writes it, and a test compares it).

## Recipes and features

*All* are these: {rows}. The last two are [custom recipes](custom-recipes.md#static-scales-of-activations).

{features}

A test runs each pair of a feature and a recipe, but for those that the table names. *Not tested* means that no test
runs the pair; as far as we know it raises no error.

(a) Only `quire.autocast` can select delayed scaling, and a converted layer has a recipe of its own. `quire.convert` and
`quire.quantize_model` raise an error.

(b) The tests make packages with PyTorch 2.12 and later, and run them in Python. From C++ they run `mxfp8` and `nvfp4`,
with 2.13.

Every feature of every layer, such as activation checkpointing, microbatches, or gradients that are added to
`main_grad`, has its own tests. CONTRIBUTING.md says where they are.

## Files

These files of [other tools](checkpoints.md#i-have-quantized-a-model-with-quire) store a converted model without loss:

{files}

The linked page also says which spec each kind of file can store.

## Ways to run

Each layer gives the bits of eager mode in each of the ways below. The tests use these recipes: {recipes}.
Every pair is tested: a layer or option with a way, a layer or option with a recipe, and a way with a recipe. Not every
triple is. *unbacked* compiles with a number of tokens that the compiler does not know (`mark_unbacked`). *meta, assign*
makes the model on the meta device, and loads its state with `load_state_dict(..., assign=True)`.

{ways}

## Hardware

| | all recipes | speed |
|---|---|---|
| x86-64 with AVX2, AVX-512 or AMX | run, with the same bytes | [Which recipe](which-recipe.md#measured-speed) |
| other x86-64, and 64-bit ARM | run; ARM is tested under emulation | never timed |
| NVIDIA H100 | run, except what [Install](install.md#nvidia-gpus) lists | [Benchmarks on a GPU](benchmarks-cuda.md) |
| other NVIDIA GPUs | not tested | |

A wheel is for Linux, and has operators for one or several minor versions of PyTorch ([Install](install.md)).
"""


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"|{'|'.join(f' {cell} ' if cell != '---' else cell for cell in line)}|" for line in lines)


def text() -> str:
    features = table(["feature", "recipes"], [[column.title, column.recipes()] for column in COLUMNS])
    stored = table(["recipe", "files, by the name of their dialect"], list(files()))
    own = importlib.import_module("every_way").RECIPES
    names = ", ".join(name.replace("_", " ") if name == "high_precision" else f"`{name}`" for name in own)
    ways = table(
        ["way, by its name in `tests/every_way.py`", "compared"],
        [[name, "forward and backward" if way.trains else "forward"] for name, way in WAYS.items()],
    )
    recipes = names.replace("`delayed`", "`fp8_delayed`")
    return TEXT.format(features=features, files=stored, rows=", ".join(ROWS), ways=ways, recipes=recipes)


if __name__ == "__main__":
    PAGE.write_text(text())
    print(f"wrote {PAGE}", file=sys.stderr)
