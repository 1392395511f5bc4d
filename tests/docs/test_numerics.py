"""docs/numerics.md: its worked examples come out as written, and the sections that the code cites exist."""

import re

import pytest
import torch

import quire  # noqa: F401  (loads the operators)

OPS = torch.ops.quire
PAGE = "docs/numerics.md"
X = torch.tensor([((37 * i) % 101 - 50) / 16 for i in range(32)])


@pytest.fixture
def examples(page):
    """Lines `key: text` of section 9's code blocks, as a list of (key, text)."""
    section = page(PAGE).section("9. Worked examples")
    lines = "\n".join(section.split("```")[1::2]).splitlines()
    return [tuple(line.split(": ", 1)) for line in lines if line]


def pairs(text: str) -> list[list[str]]:
    """[["1.0", "38"], ...] of "1.0 -> 38, ..."; a comma inside brackets does not separate."""
    return [part.split(" -> ") for part in re.split(r", (?![^(]*\))", text)]


def hexadecimal(tensor: torch.Tensor, digits: int) -> str:
    return " ".join(f"{value & (16**digits - 1):0{digits}x}" for value in tensor.flatten().tolist())


def quantized(x: torch.Tensor, spec: str) -> str:
    """The first row of x as section 9 writes it: scale and data in hexadecimal."""
    data, scale, *_ = OPS.quantize(x, spec, True, False)
    is_float = scale.dtype == torch.float32
    bits = hexadecimal(scale.flatten()[:1].view(torch.int32), 8) if is_float else hexadecimal(scale[0], 2)
    return f"scale {bits} data {hexadecimal(data[0], 2)}"


def test_every_worked_example_is_read_by_a_test(examples):
    casts = {"e4m3", "e5m2", "e2m1", "e8m0"}
    quantizers = {"mxfp8", "fp8_tensor", "fp8_block:pow2", "nvfp4", "nvfp4 under 10"}
    others = {"rht", "philox", "swizzle", "delayed max", "delayed most_recent"}
    assert {key for key, _ in examples} == casts | quantizers | others


def test_casts_give_the_documented_codes(examples):
    for key, text in examples:
        if key in ("e4m3", "e5m2", "e2m1"):
            values, codes = zip(*pairs(text), strict=True)
            found = OPS.debug_cast(torch.tensor([float(value) for value in values]), key)
            assert hexadecimal(found, 1 if key == "e2m1" else 2).split() == list(codes)


def test_e8m0_scales_are_the_documented_ones(examples):
    for amax, byte in pairs(dict(examples)["e8m0"]):
        x = torch.zeros(1, 32)
        x[0, 5] = float(amax)
        scale = OPS.quantize(x, "mxfp8", True, False)[1]
        assert hexadecimal(scale, 2) == byte, amax


def test_quantizers_give_the_documented_bytes(examples):
    documented = dict(examples)
    for spec in ("mxfp8", "fp8_tensor", "fp8_block:pow2", "nvfp4"):
        assert quantized(X[None], spec) == documented[spec]
    under_10 = torch.stack([X, torch.full_like(X, 10)])
    assert quantized(under_10, "nvfp4") == documented["nvfp4 under 10"]


def test_the_transform_gives_the_documented_bits(examples):
    assert hexadecimal(OPS.debug_rht(X[:16, None], True).view(torch.int16), 4) == dict(examples)["rht"]


def test_random_words_are_the_documented_ones(examples):
    lines = [text for key, text in examples if key == "philox"]
    assert len(lines) == 3
    for line in lines:
        numbers, words = line.split(" -> ")
        seed, offset, block = map(int, re.findall(r"-?\d+", numbers))
        assert hexadecimal(OPS.debug_philox(torch.tensor([block]), seed, offset), 8) == words


def test_swizzled_offsets_are_the_documented_ones(examples):
    for place, offset in pairs(dict(examples)["swizzle"]):
        i, j = map(int, re.findall(r"\d+", place))
        scale = torch.zeros(256, 8, dtype=torch.uint8)
        scale[i, j] = 1
        assert OPS.debug_swizzle(scale).flatten().nonzero().item() == int(offset)


def test_delayed_updates_are_the_documented_ones(examples):
    history, scale = torch.tensor([[3.0], [1.0], [2.0], [5.0]]), torch.ones(1)
    for algorithm in ("max", "most_recent"):
        new_history, new_scale = OPS.debug_delayed_update(history, scale, torch.tensor([3.0]), algorithm, 448.0, 0)
        values = " ".join(f"{value:g}" for value in new_history.flatten().tolist())
        bits = hexadecimal(new_scale.view(torch.int32), 8)
        assert f"history {values} scale {bits}" == dict(examples)[f"delayed {algorithm}"]


@pytest.mark.parametrize("family", ["fp8_tensor", "fp8_row", "fp8_block", "mxfp8", "mxfp4", "nvfp4", "nvfp4:rht"])
def test_a_gradient_scaler_sees_of_inf_and_nan_what_is_documented(family):
    """numerics.md 1.8."""
    inf_is_lost, nan_is_lost = family.startswith("fp8"), "fp4" in family
    for value, finite in ((float("inf"), inf_is_lost), (float("nan"), nan_is_lost)):
        x, w, dy = torch.randn(32, 32), torch.randn(32, 32), torch.randn(32, 32)
        dy[3, 4] = value
        dx, dw, dbias = gradients(x, w, dy, family)
        assert dx.isfinite().all() == finite and dw.isfinite().all() == finite, value
        assert not dbias.isfinite().all(), "the bias gradient is summed from the unquantized dy"


def gradients(x: torch.Tensor, w: torch.Tensor, dy: torch.Tensor, family: str) -> tuple[torch.Tensor, ...]:
    x, w, bias = x.clone().requires_grad_(), w.clone().requires_grad_(), torch.zeros(len(w), requires_grad=True)
    recipe = f"x={family},w={family.removesuffix(':rht')},dy={family}"
    OPS.linear(x, w, bias, recipe, torch.float32).backward(dy)
    return x.grad, w.grad, bias.grad


def test_every_section_that_the_code_cites_exists(page, root):
    text = page(PAGE).text
    known = set(re.findall(r"^#+ (\d+(?:\.\d+)?)[. ]", text, re.MULTILINE))
    known |= {f"0.{number}" for number in re.findall(r"^(\d+)\. \*", page(PAGE).section("0. Decisions"), re.MULTILINE)}
    cited = {}
    for folder in ("src", "python", "tests", "docs"):
        for source in (root / folder).rglob("*"):
            if source.suffix not in (".h", ".cpp", ".cu", ".cuh", ".py", ".md"):
                continue
            for numbers in re.findall(r"numerics\.md[)`]* ((?:\d+(?:\.\d+)*(?:, |-| and )?)+)", source.read_text()):
                for number in re.findall(r"\d+(?:\.\d+)?", numbers):
                    cited.setdefault(number, source.relative_to(root))
    assert len(cited) > 20
    assert {number: str(source) for number, source in cited.items() if number not in known} == {}
