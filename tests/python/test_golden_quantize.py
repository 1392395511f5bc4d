"""The golden vectors of quantizers, layouts and random numbers, through the Python interface (tests/golden)."""

import numpy as np
import pytest
import torch

import quire

# The vectors' names for buffers, of cases with both directions and with one.
KINDS = [("codes", "data"), ("scale", "scale"), ("scale_inv", "scale"), ("amax", "amax")]
SIDES = [("_row", "rowwise"), ("_col", "columnwise")]
BOTH = [(kind + side, f"{direction}_{buffer}") for side, direction in SIDES for kind, buffer in KINDS]
ONE = [("codes", "rowwise_data"), ("scale_inv", "rowwise_scale"), ("amax", "rowwise_amax")]


def per_tensor(s):
    return "fp8_tensor" + element(s) + (":pow2" if s.get("pow2") else "") + (f":eps={s['eps']}" if s.get("eps") else "")


def element(s):
    return ":e5m2" if s["elem"] == "e5m2" else ""


def block(s):
    tile, pow2 = ":128x128" if s["dim"] == 2 else "", ":pow2" if s["pow2"] else ""
    return "fp8_block" + element(s) + tile + pow2 + (f":eps={s['eps']}" if s["eps"] else "")


def nvfp4(s):
    tile, row_scaled = ":16x16" if s["two_d"] else "", ":row_scaled" if s.get("row_scaled") else ""
    return "nvfp4" + tile + row_scaled + (":rht" if s["rht"] else "") + (":sr" if "seed" in s else "")


def hadamard(s):
    return "nvfp4:rht" + ("" if int(s["sign_mask"], 16) else "=unsigned")


SPEC_OF = {
    "current": per_tensor,
    "delayed_cast": per_tensor,
    "block": block,
    "mxfp8": lambda s: "mxfp8" + element(s) + (":32x32" if s["two_d"] else ""),
    "nvfp4": nvfp4,
    "nvfp4_4over6": lambda s: (
        f"nvfp4{':16x16' if s['two_d'] else ''}:4over6={s['mode'].lower()}{':256' if s['e4m3_max'] == 256 else ''}"
    ),
    "nvfp4_rht": hadamard,
    "rht_butterfly": hadamard,
    "sr_mapping": nvfp4,
}


def quantized(case, group, x):
    """The case's tensor in both directions. None where the vector gives random bytes instead of a seed."""
    if case.spec.get("sr") or case.spec["kind"] == "sr_words":
        return None
    seeds = {name: int(case.spec[name]) for name in ("seed", "offset") if name in case.spec}
    scale = torch.from_numpy(case["scale"].copy()).to(x.device) if group == "delayed_cast" else None
    return quire.quantize(x, SPEC_OF[group](case.spec), columnwise=True, scale=scale, **seeds)


def same(a, b):
    return a.dtype == b.dtype and np.array_equal(a, b, equal_nan=a.dtype.kind == "f")


def check(case, group, x):
    """Compares every stored tensor and dequantized value; returns how many."""
    q = quantized(case, group, x)
    if q is None:
        return 0
    compared = 0
    for name, buffer in BOTH + ONE:
        if name in case:
            assert same(case[name], getattr(q, buffer).cpu().numpy()), f"{case.id}: {name} under {q.spec}"
            compared += 1
    for name in ("dequant", "dequant_row"):
        if name in case:
            assert same(case[name], q.dequantize(torch.float32).cpu().numpy()), f"{case.id}: {name} under {q.spec}"
            compared += 1
    return compared


@pytest.mark.parametrize("group", SPEC_OF)
def test_quantized_bytes_are_golden(group, golden, tensor_of, device):
    counts = [check(case, group, tensor_of(case, "x") if "x" in case else None) for case in golden.cases(group)]
    assert sum(count > 0 for count in counts) >= 8 and max(counts) >= 3


def test_casts_are_golden(golden, device):
    every = golden.get("casts/bf16_all")
    x = torch.arange(65536).to(torch.uint16).view(torch.bfloat16).to(device)
    hard = golden.get("casts/f32_hard")
    for format in ("e4m3", "e5m2", "e2m1"):
        assert same(every[format], quire.debug.cast(x, format).cpu().numpy())
        assert same(hard[format], quire.debug.cast(torch.from_numpy(hard["x"].copy()).to(device), format).cpu().numpy())


@pytest.mark.parametrize("group", ["nvfp4_rht", "rht_butterfly"])
def test_hadamard_transforms_are_golden(group, golden, tensor_of, device):
    for case in golden.cases(group):
        got = quire.debug.rht(tensor_of(case, "x"), signs=case.spec["sign_mask"] == "0xD7E8")
        assert same(case["rht_bf16"], got.cpu().view(torch.uint16).numpy()), case.id


def test_swizzled_layouts_are_golden_both_ways(golden):
    for case in golden.cases("swizzle"):
        scale = torch.from_numpy(case["scale"].copy())
        swizzled = quire.debug.swizzle(scale)
        assert same(case["swizzled"].reshape(-1), swizzled.reshape(-1).numpy()), case.id
        assert torch.equal(quire.debug.unswizzle(swizzled, *scale.shape), scale)


def test_random_words_are_golden(golden):
    for case in golden.cases("sr_mapping"):
        if case.spec["kind"] == "sr_words":
            blocks = torch.from_numpy(case["block"].view(np.int64).copy())
            words = quire.debug.philox(int(case.spec["seed"]), int(case.spec["offset"]), blocks)
            assert same(case["words"].astype(np.int64), words.numpy()), case.id


def test_delayed_updates_are_golden(golden):
    for case in golden.cases("delayed"):
        s = case.spec
        history, scale = torch.zeros(s["history_len"], 3), torch.ones(3)
        for t, amax in enumerate(torch.from_numpy(case["step_amax"].copy())):
            history[0] = torch.fmax(history[0], amax)
            reduced = torch.from_numpy(case["reduced_amax"][t].copy()) if s["reduced"] else history[0]
            options = {"algorithm": s["algo"], "maximum": s["fp8_max"], "margin": s["margin"]}
            history, scale = quire.debug.delayed_update(history, scale, reduced, **options)
            assert same(case["history_after"][t], history.numpy()), f"{case.id}, step {t}"
            assert same(case["scale_after"][t], scale.numpy()), f"{case.id}, step {t}"
