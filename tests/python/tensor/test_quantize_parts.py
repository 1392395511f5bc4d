"""Parts of a tensor, each quantized by a process of its own, have the bytes of the whole (numerics.md 0.11, 5.9)."""

import pytest
import torch

ops = torch.ops.quire
STATE = torch.tensor([77, 3])
SPECS = [
    "nvfp4:sr",
    "nvfp4:rht:sr",
    "nvfp4:16x16:sr",
    "nvfp4:rht",
    "mxfp4",
    "mxfp8",
    "fp8_block",
    "fp8_tensor",
    "fp8_row",
]
#: The axis along which each buffer of a part lies in the whole, by the axis that is divided; None: all parts have it.
ALONG = {
    ("mxfp8", 0): (0, 0, None, 0, 0, None),
    ("mxfp8", 1): (1, 1, None, 1, 1, None),
    ("fp8_block", 0): (0, 1, None, 1, 0, None),
    ("fp8_block", 1): (1, 0, None, 0, 1, None),
    ("fp8_tensor", 0): (0, None, None, 1, None, None),
    ("fp8_tensor", 1): (1, None, None, 0, None, None),
    ("fp8_row", 0): (0, 0, None, 1, None, None),
    ("fp8_row", 1): (1, None, None, 0, 0, None),
}


def amaxes_of(x, spec):
    if spec.startswith(("mx", "fp8_block")):
        return None
    return ops.amax(x, spec, True, True)


def own_amaxes(whole, spec, axis, index, count):
    """Those of one part: lines that a part has whole have amaxes of their own."""
    if whole is None:
        return (None, None)
    if not spec.startswith("fp8_row"):
        return whole
    rows, columns = whole
    return (rows.chunk(count)[index], columns) if axis == 0 else (rows, columns.chunk(count)[index])


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("spec", SPECS)
def test_parts_have_the_bytes_of_the_whole(spec, count, axis):
    torch.manual_seed(0)
    x = torch.randn(128 * count, 384 if axis == 0 else 128 * count)
    whole = ops.quantize(x, spec, True, True, sr_state=STATE)
    amaxes = amaxes_of(x, spec)
    parts = [
        ops.quantize(
            part.contiguous(),
            spec,
            True,
            True,
            0,
            0,
            None,
            *own_amaxes(amaxes, spec, axis, i, count),
            sr_state=STATE,
            part=torch.tensor([i, count]),
            axis=axis,
        )
        for i, part in enumerate(x.chunk(count, axis))
    ]
    family = spec.split(":")[0]
    along = ALONG.get((family, axis), (axis, axis, None, 1 - axis, 1 - axis, None))
    for i, of in enumerate(along):
        if of is not None:
            assert torch.equal(torch.cat([part[i] for part in parts], of), whole[i]), i


@pytest.mark.parametrize("axis", [0, 1])
# Pieces that end within and between the tiles of kernels, one of a single block, one of none.
@pytest.mark.parametrize("pieces", [(64, 32, 32), (192, 192), (32, 0, 96), (480, 32)])
@pytest.mark.parametrize("spec", ["nvfp4:sr", "nvfp4:16x16:sr", "nvfp4:rht:sr"])
def test_pieces_that_are_divided_each_by_itself_draw_the_bits_of_the_whole(spec, pieces, axis):
    torch.manual_seed(0)
    sizes = (sum(pieces), 80) if axis == 0 else (80, sum(pieces))
    x = torch.randn(sizes)
    whole = ops.quantize(x, spec, True, True, sr_state=STATE)
    amaxes = amaxes_of(x, spec)
    cuts = torch.tensor(pieces).cumsum(0)[:-1] // 2
    for i in (0, 1):
        own = torch.cat([piece.chunk(2, axis)[i] if len(piece) else piece for piece in x.split(pieces, axis)], axis)
        part = torch.cat([torch.tensor([i, 2]), cuts])
        found = ops.quantize(own, spec, True, True, 0, 0, None, *amaxes, sr_state=STATE, part=part, axis=axis)
        for buffer, along, unit in ((0, axis, 2 if axis else 1), (3, 1 - axis, 1 if axis else 2)):
            of_whole = whole[buffer].split([piece // unit for piece in pieces], along)
            expected = torch.cat([piece.chunk(2, along)[i] for piece in of_whole if piece.numel()], along)
            assert torch.equal(found[buffer], expected), (i, buffer)


def test_a_part_draws_other_bits_than_the_first():
    x = torch.randn(16, 64)
    first, second = (
        ops.quantize(x, "nvfp4:sr", True, True, sr_state=STATE, part=torch.tensor([i, 2]), axis=0) for i in (0, 1)
    )
    assert not torch.equal(first[0], second[0])


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (
            {"sr_state": torch.zeros(3, dtype=torch.int64)},
            "sr_state must be a contiguous int64 .2. tensor .seed, counter",
        ),
        ({"part": torch.zeros(2)}, "part must be a contiguous int64 .2 . cuts. tensor .index, count"),
        ({"part": torch.zeros(1, dtype=torch.int64)}, "part must be a contiguous int64 .2 . cuts. tensor"),
        ({"sr_state": STATE, "seed": 1}, "sr_state stands for seed and offset"),
        ({"part": torch.tensor([0, 2]), "axis": 2}, r"axis must be 0 \(rows\) or 1 \(columns\), got 2"),
    ],
)
def test_wrong_arguments_are_refused(given, says):
    with pytest.raises(RuntimeError, match=says):
        ops.quantize(torch.randn(16, 64), "nvfp4:sr", True, True, **given)
