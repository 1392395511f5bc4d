"""docs/specs.md says what the parser does."""

import itertools

import pytest
import torch

import quire

OPS = torch.ops.quire
PAGE = "docs/specs.md"


def code(cell: str) -> str:
    """`x` of a cell that holds nothing else."""
    assert cell.startswith("`") and cell.endswith("`"), f"expected code, found {cell}"
    return cell.strip("`")


def test_the_table_of_options_is_the_parsers_own(page):
    documented = [line for line in page(PAGE).section("Options").splitlines() if line.startswith("|")][2:]
    assert [line.replace("`, `", " or ") for line in documented] == OPS.spec_grammar().splitlines()


def test_errors_list_what_the_tables_have(page):
    rows = [(code(row[0].replace("`, `", " or ")), row[1].split(", ")) for row in page(PAGE).rows("Options")]
    families = [code(row[0]) for row in page(PAGE).rows("Families")]
    for family in families:
        options = [option for option, its in rows if family in its]
        with pytest.raises(RuntimeError) as refusal:
            OPS.canonical_spec(f"{family}:nothing")
        assert str(refusal.value).endswith(f"{family} takes: {', '.join(options)}")
    with pytest.raises(ValueError) as refusal:
        quire.recipe.from_name("nothing")
    assert ", ".join(quire.recipe.names()) in str(refusal.value) and len(quire.recipe.names()) == 6


def test_every_family_of_the_table_exists_and_no_other(page):
    families = [code(row[0]) for row in page(PAGE).rows("Families")]
    assert [OPS.canonical_spec(family) for family in families] == families
    with pytest.raises(RuntimeError) as refusal:
        OPS.canonical_spec("nothing")
    assert str(refusal.value).splitlines()[0].endswith("use one of " + ", ".join(families))


def test_every_example_has_the_documented_canonical_text(page):
    examples = [(code(row[0]), code(row[1])) for row in page(PAGE).rows("Examples")]
    assert len(examples) >= 5
    assert [OPS.canonical_spec(written) for written, _ in examples] == [canonical for _, canonical in examples]
    assert [OPS.canonical_spec(canonical) for _, canonical in examples] == [canonical for _, canonical in examples]


def is_refused(options: tuple[str, ...]) -> bool:
    try:
        OPS.canonical_spec(":".join(["nvfp4", *options]))
    except RuntimeError as error:
        assert "cannot be" in str(error) and "out" in str(error).splitlines()[0]
        return True
    return False


def test_the_table_of_refused_combinations_is_complete(page):
    documented = [row[0] for row in page(PAGE).rows("Combinations that are refused")]
    assert "`256` without `4over6`" in documented
    pairs = {frozenset(map(code, both.split(", "))) for both in documented if "without" not in both}
    options = ("16x16", "row_scaled", "rht", "sr", "4over6=mae", "swizzled", "interleaved", "given")
    refused = {frozenset(both) for both in itertools.combinations(options, 2) if is_refused(both)}
    assert refused == pairs
    assert not any(is_refused((option,)) for option in options)
    assert is_refused(("256",)) and not is_refused(("256", "4over6=mse"))


def test_the_documented_recipe_texts_run_and_the_role_rules_hold(page):
    texts = [line for line in page(PAGE).section("Examples").splitlines() if line.startswith("x=")]
    assert texts == [quire.recipe.from_name(name).linear_spec() for name in ("mxfp8", "nvfp4")]
    x, w = torch.randn(3, 32), torch.randn(16, 32)
    for text in texts:
        OPS.linear(x, w, None, text, torch.float32)
    for wrong, rule in (
        ("x=nvfp4:sr,w=nvfp4,dy=nvfp4", "only dy may be"),
        ("x=nvfp4,w=nvfp4:rht,dy=nvfp4", "transforms w"),
        ("x=nvfp4:rht,w=nvfp4,dy=nvfp4", "differently"),
        ("x=mxfp8,w=nvfp4:given,dy=mxfp8", "gives another operand than x a scale"),
        ("x=none,w=nvfp4,dy=mxfp8", "quantizes one of x and dy only"),
        ("x=none,w=nvfp4", "expected 'dy=SPEC'"),
        ("x=mxfp8,w=none,dy=mxfp8", "does not quantize w"),
        ("x=none,w=nvfp4,dy=none,backward=requantized", "has another backward"),
    ):
        with pytest.raises(RuntimeError, match=rule):
            OPS.linear(x, w, None, wrong, torch.float32)
