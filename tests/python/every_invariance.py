"""What may change without changing bits: the tables of docs/invariance.md. The page has these cells, and each of them
is a test: of test_invariance.py, or of the files that HELD_BY names."""

from quire import recipe as recipes

#: What a cell may say.
EQUAL = "equal"  # the same bits
OPTION = "option"  # the same bits within quire.batch_invariant
BOUND = "7.5"  # the same codes, and sums within the bound of numerics.md 7.5
CODES = "codes"  # other codes, because a scale, a block or a random number covers what has changed
NONE = "-"  # there is no such result

#: The columns: a recipe of each kind.
RECIPES = {
    "none": None,
    "fp8_current": recipes.Float8CurrentScaling(),
    "fp8_delayed": recipes.DelayedScaling(),
    "fp8_block": recipes.Float8BlockScaling(),
    "mxfp8": recipes.MXFP8BlockScaling(),
    "mxfp4": recipes.MXFP4BlockScaling(),
    "nvfp4": recipes.NVFP4BlockScaling(),
    "nvfp4, rows": recipes.NVFP4BlockScaling(disable_rht=True, row_scaled_activation=True),
    "static x": recipes.CustomRecipe({"x": "fp8_tensor:given:nan", "w": "fp8_tensor:nan", "dy": "mxfp8:e5m2"}.get),
    "weights only": recipes.CustomRecipe({"x": "none", "w": "nvfp4:nan", "dy": "none"}.get),
}
RESULTS = {"y": "Forward: y", "dx": "Gradient of x", "dw": "Gradient of w"}
_WORDS = {"e": EQUAL, "o": OPTION, "b": BOUND, "c": CODES, "-": NONE}


def _row(*letters: str) -> dict[str, dict[str, str]]:
    """Of y, dx and dw the word for each recipe, by its first letter."""
    each = [dict(zip(RECIPES, [_WORDS[letter] for letter in row], strict=True)) for row in letters]
    return dict(zip(RESULTS, each, strict=True))


ALL_EQUAL, NO_RESULT, ALL_BOUND = "e" * 10, "-" * 10, "b" * 10
#: What changes -> the words of y, dx and dw, in the order of RECIPES.
ROWS = {
    "batch size": _row("oceeeecoeo", "oceeeecceo", NO_RESULT),
    "position in the batch": _row("oeeeeeeeeo", "oeeeeecceo", "bbbccccccb"),
    "padding by rows of zeros": _row("oeeeeeboeo", "oeeeeeboeo", "oeeebbccbo"),
    "microbatches": _row("oceeeecoeo", "oceeeecceo", "bcbbbbccbb"),
    "threads": _row("oeeeeeeeeo", "oeeeeeeeeo", "oeeeeeeeeo"),
    "instruction set": _row(ALL_BOUND, ALL_BOUND, ALL_BOUND),
    "eager or torch.compile": _row("oeeeeeeeee", "oeeeeeeeee", "oeeeeeeeee"),
    "eager or torch.export": _row("oeeeeeeeee", NO_RESULT, NO_RESULT),
    "eager or AOTInductor, also from C++": _row("oeeeeeeeee", NO_RESULT, NO_RESULT),
    "weights prepacked or not": _row("-e-eeeeeee", NO_RESULT, NO_RESULT),
    "codes of the weight kept or not": _row("-eeeeeeeee", "-eeeeeeeee", "-eeeeeeeee"),
    'training or inference (like="training")': _row("-e-eeeeeee", NO_RESULT, NO_RESULT),
    "checkpoint and resume": _row(ALL_EQUAL, ALL_EQUAL, ALL_EQUAL),
    "tensor and sequence parallel, column": _row(ALL_EQUAL, ALL_BOUND, ALL_EQUAL),
    "tensor and sequence parallel, row": _row(ALL_BOUND, ALL_EQUAL, ALL_EQUAL),
    "tensor and sequence parallel, both, within quire.distributed.exact()": _row(ALL_EQUAL, ALL_EQUAL, ALL_EQUAL),
    "data parallel": _row("oceeeecoeo", "oceeeecceo", "bcbbbbccbb"),
    "expert parallel": _row(ALL_EQUAL, ALL_EQUAL, ALL_EQUAL),
    "CPU or GPU": _row(ALL_BOUND, ALL_BOUND, ALL_BOUND),
}

_DISTRIBUTED = "tests/python/distributed"
#: The rows that need several processes, or a device: which tests hold them.
HELD_BY = {
    "tensor and sequence parallel, column": (f"{_DISTRIBUTED}/test_linear.py", "test_results_are_those_of_one_process"),
    "tensor and sequence parallel, row": (f"{_DISTRIBUTED}/test_linear.py", "test_results_are_those_of_one_process"),
    "tensor and sequence parallel, both, within quire.distributed.exact()": (
        f"{_DISTRIBUTED}/test_linear.py",
        "test_all_results_are_those_of_one_process_within_exact",
    ),
    "data parallel": (f"{_DISTRIBUTED}/test_data_parallel.py", "test_two_ranks_train_as_one_process"),
    "expert parallel": (f"{_DISTRIBUTED}/test_expert_parallel.py", "test_results_are_those_of_one_process"),
    "CPU or GPU": ("tests/python/golden/test_linear.py", "test_the_golden_linear_is_met"),
}


def tables() -> str:
    """The tables of docs/invariance.md."""
    text = ""
    for result, title in RESULTS.items():
        rows = {name: row[result] for name, row in ROWS.items() if set(row[result].values()) != {NONE}}
        lines = [
            f"### {title}",
            "",
            "| what changes | " + " | ".join(RECIPES) + " |",
            "|---" * (len(RECIPES) + 1) + "|",
        ]
        lines += [f"| {name} | " + " | ".join(row.values()) + " |" for name, row in rows.items()]
        text += "\n".join(lines) + "\n\n"
    return text
