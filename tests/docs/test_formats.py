"""docs/formats.md: its table of bits decodes codes as PyTorch does, and quire gives a decoded value its code back."""

import math
import re

import pytest
import torch

import quire

PAGE = "docs/formats.md"
TORCH = {"E4M3": torch.float8_e4m3fn, "E5M2": torch.float8_e5m2, "E8M0": torch.float8_e8m0fnu}


@pytest.fixture
def table(page):
    """Format -> row -> cell, of the table of bits."""
    text = page(PAGE).section("Bits of a code")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    first = rows[: rows.index(next(row for row in rows if row[0] == "code"))]
    formats = first[0][1:]
    return {name: {row[0]: row[1 + i] for row in first[2:]} for i, name in enumerate(formats)}


def number(text: str) -> float:
    base, power = re.fullmatch(r"([\d.]+)(?:\^(-?\d+))?", text).groups()
    return float(base) ** float(power or 1)


def codes(cell: str) -> set[int]:
    found = set()
    for part in cell.split(", "):
        ends = [int(code, 16) for code in re.findall(r"0x\w+", part)]
        found |= set(range(ends[0], ends[-1] + 1)) if ends else set()
    return found


def decode(column: dict[str, str], code: int) -> float:
    """As the page says."""
    if code in codes(column["NaN"]):
        return math.nan
    layout, bias = column["bits, most significant first"].strip("`"), int(column["bias"])
    bits = f"{code:0{len(layout)}b}"
    field = {kind: "".join(bit for bit, of in zip(bits, layout, strict=True) if of == kind) for kind in "sem"}
    sign = -1 if field["s"] == "1" else 1
    if code in codes(column["Inf"]):
        return sign * math.inf
    exponent, p = int(field["e"], 2), len(field["m"])
    mantissa = int(field["m"] or "0", 2)
    if not p:
        return 2.0 ** (exponent - bias)
    if exponent:
        return sign * 2.0 ** (exponent - bias) * (1 + mantissa / 2**p)
    return sign * 2.0 ** (1 - bias) * mantissa / 2**p


@pytest.mark.parametrize("name", TORCH)
def test_every_code_of_a_byte_decodes_as_pytorch_says(name, table):
    found = torch.tensor([decode(table[name], code) for code in range(256)], dtype=torch.float64)
    expected = torch.arange(256, dtype=torch.uint8).view(TORCH[name]).double()
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found.nan_to_num(0), expected.nan_to_num(0))
    assert torch.equal(found.signbit() & ~found.isnan(), expected.signbit() & ~expected.isnan())


@pytest.mark.parametrize("name", ["E4M3", "E5M2", "E2M1"])
def test_quire_gives_a_decoded_value_its_code_back(name, table):
    size = 2 ** (len(table[name]["bits, most significant first"]) - 2)
    finite = [code for code in range(size) if math.isfinite(decode(table[name], code))]
    assert len(finite) == {"E4M3": 254, "E5M2": 248, "E2M1": 16}[name]
    values = torch.tensor([decode(table[name], code) for code in finite])
    assert quire.debug.cast(values, name.lower()).tolist() == finite


@pytest.mark.parametrize("name", ["E4M3", "E5M2", "E2M1", "E8M0"])
def test_the_named_codes_have_the_named_values(name, table):
    column = table[name]
    for row in ("largest value", "smallest normal value", "smallest value above 0"):
        value, code = column[row].split(" = ")
        assert decode(column, int(code.strip("`"), 16)) == number(value), row
    assert all(decode(column, code) == 0 for code in codes(column["zeros"]))
    finite = [decode(column, code) for code in range(2 ** (len(column["bits, most significant first"]) - 2))]
    finite = [value for value in finite if math.isfinite(value)]
    assert max(finite) == number(column["largest value"].split(" = ")[0])
    assert min(value for value in finite if value > 0) == number(column["smallest value above 0"].split(" = ")[0])
    assert finite.count(0) == len(codes(column["zeros"]))


def test_the_eight_magnitudes_are_those_of_the_bits(page, table):
    lines = [
        line.strip("|").split("|") for line in page(PAGE).section("Bits of a code").splitlines() if line[:1] == "|"
    ]
    row = {name.strip(): [cell.strip(" `") for cell in cells] for name, *cells in lines}
    assert row["code"] == [str(code) for code in range(8)]
    assert row["bits `seem`"] == [f"{code:04b}" for code in range(8)]
    assert [float(cell) for cell in row["magnitude"]] == [decode(table["E2M1"], code) for code in range(8)]


def test_the_shapes_of_buffers_are_those_of_the_table(page):
    m, k = 5, 131
    for family, data, scale, amax, *_ in page(PAGE).rows("Where codes and scales lie"):
        q = quire.quantize(torch.randn(m, k), family.strip("`"))
        for cell, found in ((data, q.rowwise_data), (scale, q.rowwise_scale), (amax, q.rowwise_amax)):
            shape = re.search(r"\[(.*?)\]", cell)
            if shape is None:
                assert cell == "none" and (found is None or found.numel() == 0)
                continue
            of = shape[1].replace("M", str(m)).replace("K", str(k))
            of = re.sub(r"ceil\((\d+) / (\d+)\)", lambda sizes: str(-(-int(sizes[1]) // int(sizes[2]))), of)
            assert list(found.shape) == [int(size) for size in of.split(", ")], (family, cell)
            assert str(found.dtype) == ("torch.float32" if cell.startswith("float32") else "torch.uint8")
