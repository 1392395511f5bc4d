"""NVFP4 whose lines have scales of their own, with two candidates for each block: numerics.md 5.7 and 5.8 in NumPy."""

import numpy as np
import pytest
import torch

import quire

F32 = np.float32
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
E4M3 = np.array([(8 * (c > 7) + c % 8) * 2.0 ** (max(c >> 3, 1) - 10) for c in range(127)])
MOST = np.finfo(F32).max


def nearest(grid, values):
    """Codes of the nearest points of a grid that begins at 0, ties to even codes, in exact arithmetic."""
    values = np.minimum(values.astype(np.float64), grid[-1])
    above = np.searchsorted(grid, values).clip(1)
    low, high = values - grid[above - 1], grid[above] - values
    return np.where((low < high) | ((low == high) & (above % 2 == 1)), above - 1, above)


def candidate(blocks, scale, g, most, mode):
    """Of one choice of the scales E4M3[scale], [M, B, 1]: codes, and the error of each block."""
    step = E4M3[scale].astype(F32)
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        encode = np.where(g == 0, F32(1), np.minimum(F32(6 * most) / g, MOST))
        multiplier = np.minimum(F32(1) / (step * (F32(1) / encode)), MOST)
        scaled = blocks * multiplier
        codes = nearest(E2M1, np.abs(scaled)) | (np.signbit(scaled) << 3)
        values = np.where(codes > 7, F32(-1), F32(1)) * E2M1[codes & 7].astype(F32)
        differences = values * step * g / F32(6 * most) - blocks
    each = np.abs(differences) if mode == "mae" else differences * differences
    error = np.zeros_like(g)
    for i in range(16):
        error = error + each[..., i : i + 1]
    return codes, error


def quantized(lines, most, mode):
    """float32 [M, K] -> nibbles [M, ceil(K / 2)], scale bytes [M, ceil(K / 16)], amaxes [M], decoded values [M, K]."""
    rows, columns = lines.shape
    blocks = np.pad(lines, ((0, 0), (0, -columns % 16))).reshape(rows, -1, 16)
    g = np.abs(lines).max(1, initial=0).astype(F32)[:, None, None]
    with np.errstate(divide="ignore", over="ignore"):
        encode = np.where(g == 0, F32(1), np.minimum(F32(6 * most) / g, MOST))
    base = np.abs(blocks).max(2, keepdims=True) / F32(6) * encode
    four, six = (nearest(E4M3, np.minimum(base * factor, F32(448))) for factor in (F32(1.5), F32(1)))
    (codes4, error4), (codes6, error6) = (candidate(blocks, each, g, most, mode) for each in (four, six))
    maps_to_4 = error4 < error6
    codes, scale = np.where(maps_to_4, codes4, codes6), np.where(maps_to_4, four, six)
    decoded = np.where(codes > 7, F32(-1), F32(1)) * E2M1[codes & 7].astype(F32)
    decoded = decoded * (E4M3[scale].astype(F32) * g * F32(1 / (6 * most)))
    flat = codes.reshape(rows, -1)[:, :columns]
    flat = np.pad(flat, ((0, 0), (0, columns % 2)))
    nibbles = flat[:, ::2] | flat[:, 1::2] << 4
    return nibbles, scale[..., 0], g[:, 0, 0], decoded.reshape(rows, -1)[:, :columns], maps_to_4


def inputs(rows, columns, dtype):
    """Lines of very different sizes, zeros, ties between the candidates and subnormal numbers."""
    generator = torch.Generator().manual_seed(rows * columns)
    x = torch.randn(rows, columns, generator=generator) * torch.logspace(-6, 4, rows)[:, None]
    few = torch.randint(-4, 5, (rows, columns), generator=generator) / 2.0
    x = torch.where(torch.arange(rows)[:, None] % 3 == 1, few, x)
    x[rows // 2 :: 5, :20] *= 2.0**-20
    x[1:2] = 0
    x[2:3] *= 2.0**-130
    x[3:4] = -0.0
    return x.to(dtype)


@pytest.mark.parametrize("most", [448, 256])
@pytest.mark.parametrize("mode", ["mae", "mse"])
@pytest.mark.parametrize(
    ("rows", "columns", "dtype"),
    [(700, 96, torch.float32), (33, 51, torch.float32), (64, 64, torch.bfloat16), (50, 48, torch.float16)],
)
def test_lines_have_the_bytes_and_values_of_the_formulas(rows, columns, dtype, most, mode, device, equal_bits):
    x = inputs(rows, columns, dtype)
    spec = f"nvfp4:row_scaled:4over6={mode}" + (":256" if most == 256 else "")
    q = quire.quantize(x.to(device), spec, columnwise=True)
    for direction, lines in (("rowwise", x.float()), ("columnwise", x.float().t())):
        nibbles, scale, amax, decoded, maps_to_4 = quantized(lines.contiguous().numpy(), most, mode)
        for name, expected in (("data", nibbles), ("scale", scale), ("amax", amax)):
            got = getattr(q, f"{direction}_{name}")
            assert equal_bits(got, torch.from_numpy(expected).to(got.dtype).reshape(got.shape)), (direction, name)
        if direction == "rowwise":
            assert maps_to_4.any() and not maps_to_4.all()
            assert torch.equal(q.dequantize(torch.float32).cpu(), torch.from_numpy(decoded))
