"""The golden vectors of quantizers, layouts and random numbers, through the Python interface."""

import numpy as np
import pytest
import torch

import quire
from quire.golden.cases import SPEC_OF, compared


def same_arrays(a, b):
    return a.dtype == b.dtype and np.array_equal(a, b, equal_nan=a.dtype.kind == "f")


@pytest.mark.parametrize("group", SPEC_OF)
def test_quantized_bytes_are_golden(group, golden, device):
    counts = []
    for case in golden.cases(group):
        results = list(compared(case, group, device))
        assert [result.what for result in results if result.differing] == []
        counts.append(len(results))
    assert sum(count > 0 for count in counts) >= 8 and max(counts) >= 3


def test_casts_are_golden(golden):
    every = golden.get("casts/bf16_all")
    x = torch.arange(65536).to(torch.uint16).view(torch.bfloat16)
    hard = golden.get("casts/f32_hard")
    for format in ("e4m3", "e5m2", "e2m1"):
        assert same_arrays(every[format], quire.debug.cast(x, format).numpy())
        assert same_arrays(hard[format], quire.debug.cast(torch.from_numpy(hard["x"].copy()), format).numpy())


@pytest.mark.parametrize("group", ["nvfp4_rht", "rht_butterfly"])
def test_hadamard_transforms_are_golden(group, golden, tensor_of):
    for case in golden.cases(group):
        got = quire.debug.rht(tensor_of(case, "x").cpu(), signs=case.spec["sign_mask"] == "0xD7E8")
        assert same_arrays(case["rht_bf16"], got.view(torch.uint16).numpy()), case.id


def test_swizzled_layouts_are_golden_both_ways(golden):
    for case in golden.cases("swizzle"):
        scale = torch.from_numpy(case["scale"].copy())
        swizzled = quire.debug.swizzle(scale)
        assert same_arrays(case["swizzled"].reshape(-1), swizzled.reshape(-1).numpy()), case.id
        assert torch.equal(quire.debug.unswizzle(swizzled, *scale.shape), scale)


@pytest.mark.parametrize("direction", ["rowwise", "columnwise"])
@pytest.mark.parametrize("family", ["mxfp8", "mxfp4", "nvfp4"])
def test_swizzled_scales_lie_where_the_contract_says(family, direction, device):
    """Of more lines and blocks than a tile has (numerics.md 4.4, 4.5)."""
    generator = torch.Generator().manual_seed(0)
    exponents = torch.randint(-6, 6, (200, 300), generator=generator)
    x = (torch.randn(200, 300, generator=generator) * torch.exp2(exponents)).to(device)
    plain, swizzled = [
        getattr(quire.quantize(x, family + option, columnwise=True), f"{direction}_scale").cpu()
        for option in ("", ":swizzled")
    ]
    scale = plain.t() if (family, direction) == ("mxfp8", "columnwise") else plain  # [lines, blocks]
    i, j = torch.arange(scale.shape[0])[:, None], torch.arange(scale.shape[1])
    offset = (i // 128 * -(-scale.shape[1] // 4) + j // 4) * 512 + i % 32 * 16 + i % 128 // 32 * 4 + j % 4
    expected = torch.zeros(swizzled.numel(), dtype=torch.uint8)
    expected[offset] = scale
    assert len(scale.unique()) > 4 and torch.equal(expected, swizzled.flatten())


def test_random_words_are_golden(golden):
    for case in golden.cases("sr_mapping"):
        if case.spec["kind"] == "sr_words":
            blocks = torch.from_numpy(case["block"].view(np.int64).copy())
            words = quire.debug.philox(int(case.spec["seed"]), int(case.spec["offset"]), blocks)
            assert same_arrays(case["words"].astype(np.int64), words.numpy()), case.id


def test_delayed_updates_are_golden(golden):
    for case in golden.cases("delayed"):
        s = case.spec
        history, scale = torch.zeros(s["history_len"], 3), torch.ones(3)
        for t, amax in enumerate(torch.from_numpy(case["step_amax"].copy())):
            history[0] = torch.fmax(history[0], amax)
            reduced = torch.from_numpy(case["reduced_amax"][t].copy()) if s["reduced"] else history[0]
            options = {"algorithm": s["algo"], "maximum": s["fp8_max"], "margin": s["margin"]}
            history, scale = quire.debug.delayed_update(history, scale, reduced, **options)
            assert same_arrays(case["history_after"][t], history.numpy()), f"{case.id}, step {t}"
            assert same_arrays(case["scale_after"][t], scale.numpy()), f"{case.id}, step {t}"
