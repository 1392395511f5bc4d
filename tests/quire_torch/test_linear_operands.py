"""linear_fwd and linear_bwd with operands that are given: scales, quantized buffers, an output spec, an accumulator."""

import json
import os
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch

import quire
from quire import recipe

ops = torch.ops.quire
MXFP8 = recipe.MXFP8BlockScaling().linear_spec()
DELAYED = "x=fp8_tensor,w=fp8_tensor,dy=fp8_tensor:e5m2"


@pytest.fixture(scope="module")
def delayed(tmp_path_factory):
    """The golden case linear/delayed_hybrid: its parameters, and a function from a tensor's name to the tensor."""
    folder = Path(os.environ.get("QUIRE_GOLDEN_DIR", "does not exist"))
    if not (folder / "manifest.json").exists():
        folder = tmp_path_factory.mktemp("golden")
        with tarfile.open(Path(__file__).parents[1] / "golden/golden.tar.xz") as archive:
            archive.extractall(folder, filter="data")
    entries = json.loads((folder / "manifest.json").read_text())["cases"]
    case = next(entry for entry in entries if entry["id"] == "linear/delayed_hybrid")

    def tensor(name):
        t = case["tensors"][name]
        array = np.fromfile(folder / t["file"], t["dtype"], int(np.prod(t["shape"])), offset=t["offset"])
        found = torch.from_numpy(array.reshape(t["shape"]))
        return found.view(torch.bfloat16) if found.dtype == torch.uint16 else found

    return case["spec"], tensor


def test_given_scales_meet_the_golden_delayed_case(delayed):
    spec, tensor = delayed
    scale = {role: torch.tensor([float(spec[f"scale_{role}"])]) for role in ("x", "w", "dy")}
    x, w, bias, dy = (tensor(name) for name in ("x", "w", "bias", "dy"))
    with quire.debug.operands() as records:
        y, _, _, *saved = ops.linear_fwd(x, w, bias, DELAYED, torch.float32, 3, [], [], scale["x"], scale["w"])
        dx, dw, db, dy_amax = ops.linear_bwd(dy, *saved, 96, DELAYED, torch.float32, 7, [], None, scale["dy"])
    for record in records:
        role, q = {"x": "x", "w": "w", "dy": "g"}[record.role], record.tensor
        for data, name in ((q.rowwise_data, "row"), (q.columnwise_data, "col")):
            assert torch.equal(data, tensor(f"{role}_{name}_codes"))
        assert torch.equal(q.rowwise_scale, tensor(f"{role}_row_scales"))
    for result, name, k in ((y, "y", 96), (dx, "dx", 32), (dw, "dw", 64)):
        bound = (k + 6) * 2.0**-24 * tensor(f"{name}_abs").double()
        assert ((result.double() - tensor(name)).abs() <= bound).all()
    assert torch.equal(dy_amax, dy.abs().max().float().reshape(1))
    assert torch.equal(saved[2], x.abs().max().float().reshape(1))
    torch.testing.assert_close(db.double(), tensor("db"), rtol=2**-8, atol=1e-6)


def test_the_amax_under_a_given_scale_is_returned_when_nothing_is_saved():
    x, w = torch.randn(4, 32), torch.randn(8, 32)
    one = torch.ones(1)
    results = ops.linear_fwd(x, w, None, DELAYED, torch.float32, 0, [], [], one, one)
    assert torch.equal(results[5], x.abs().max().reshape(1))
    assert torch.equal(results[8], w.abs().max().reshape(1))


def buffers(t, spec):
    return list(ops.quantize(t, spec, True, True))


@pytest.mark.parametrize("name", ["mxfp8", "fp8_current", "fp8_block"])
def test_operands_that_are_given_quantized_give_the_same_bits(name):
    text = recipe.from_name(name).linear_spec()
    specs = dict(part.split("=", 1) for part in text.split(","))
    x, w, dy = torch.randn(2, 5, 64), torch.randn(40, 64), torch.randn(2, 5, 40)
    here = ops.linear_fwd(x, w, None, text, torch.float32, 3, [], [])
    xq, wq = buffers(x, specs["x"]), buffers(w, specs["w"])
    carrier = torch.zeros(()).expand(x.shape)  # tells shape and dtype, is never read
    given = ops.linear_fwd(carrier, torch.zeros(()).expand(w.shape), None, text, torch.float32, 3, xq, wq)
    assert torch.equal(here[0], given[0])
    assert all(t.numel() == 0 for t in given[3:])  # whoever gave the buffers has them
    back = ops.linear_bwd(dy, *here[3:], 64, text, torch.float32, 7, [])
    again = ops.linear_bwd(dy, *xq[3:], *wq[3:], 64, text, torch.float32, 7, buffers(dy, specs["dy"]))
    assert all(torch.equal(a, b) for a, b in zip(back, again, strict=True))


def test_given_buffers_that_do_not_fit_are_refused_in_words():
    x, w = torch.randn(5, 64), torch.randn(40, 64)
    xq = buffers(x[:4], "mxfp8")
    with pytest.raises(
        RuntimeError, match=r"linear: x does not fit its spec: rowwise_data of mxfp8 .*\[5, 64\], got .*\[4, 64\]"
    ):
        ops.linear_fwd(x, w, None, MXFP8, torch.float32, 0, xq, [])
    with pytest.raises(RuntimeError, match="linear: x's buffers must be the six of quire.TensorProto, got 2"):
        ops.linear_fwd(x, w, None, MXFP8, torch.float32, 0, xq[:2], [])
    saved = ops.linear_fwd(x, w, None, MXFP8, torch.float32, 3, [], [])[3:]
    with pytest.raises(RuntimeError, match="linear_bwd: x must be what linear_fwd returned for it: columnwise_data"):
        ops.linear_bwd(torch.randn(6, 40), *saved, 64, MXFP8, torch.float32, 7, [])


@pytest.mark.parametrize("spec", ["mxfp8", "nvfp4", "fp8_row"])
def test_an_output_spec_returns_the_output_quantized(spec):
    x, w = torch.randn(3, 5, 64), torch.randn(48, 64)
    y = ops.linear_fwd(x, w, None, MXFP8, torch.bfloat16, 0, [], [])[0]
    codes, scale, amax, *_ = ops.linear_fwd(x, w, None, MXFP8, torch.bfloat16, 0, [], [], None, None, spec)
    expected = ops.quantize(y, spec, True, False)
    assert torch.equal(codes, expected[0]) and torch.equal(scale, expected[1]) and torch.equal(amax, expected[2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_weight_gradient_is_added_to_an_accumulator_in_its_dtype(dtype):
    x, w, dy = torch.randn(5, 64), torch.randn(40, 64), torch.randn(5, 40)
    saved = ops.linear_fwd(x, w, None, MXFP8, torch.float32, 3, [], [])[3:]
    before = torch.randn(40, 64, dtype=dtype)
    kept = before.clone()
    dw = ops.linear_bwd(dy, *saved, 64, MXFP8, torch.float32, 2, [])[1]
    added = ops.linear_bwd(dy, *saved, 64, MXFP8, torch.float32, 2, [], None, None, before)[1]
    assert added.dtype == dtype and torch.equal(before, kept)
    assert torch.equal(added, (before.float() + dw.to(dtype).float()).to(dtype))


def test_results_that_were_not_asked_for_are_empty():
    x, w, dy = torch.randn(5, 64), torch.randn(40, 64), torch.randn(5, 40)
    saved = ops.linear_fwd(x, w, None, MXFP8, torch.float32, 1, [], [])[3:]
    assert [t.numel() > 0 for t in saved] == [True, True, False, False, False, False]
    dx, dw, db, _ = ops.linear_bwd(dy, *saved, 64, MXFP8, torch.float32, 2, [])
    assert dx.numel() == 0 and dw.shape == (40, 64) and db.numel() == 0
