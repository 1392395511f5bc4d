"""FP8 weights with a scale for each 128 x 128 block, as files have them: scales of smaller dtypes are widened to
float32, which is exact (numerics.md 3.3), and blocks are ragged."""

import numpy as np
import pytest
import torch

import quire

SPEC = "fp8_block:128x128"
SHAPES = [(192, 256), (576, 128), (200, 300), (1, 129), (384, 128)]


def e4m3(byte: np.ndarray) -> np.ndarray:
    exponent, fraction = (byte >> 3 & 15).astype(np.float32), (byte & 7).astype(np.float32)
    value = np.where(exponent > 0, (1 + fraction / 8) * 2.0 ** (exponent - 7), fraction * 2.0**-9).astype(np.float32)
    value[(byte & 0x7F) == 0x7F] = np.nan
    return np.where(byte >> 7 == 1, -value, value)


def bf16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def e8m0(byte: np.ndarray) -> np.ndarray:
    bits = np.where(byte == 0, 0x00400000, byte.astype(np.uint32) << 23).astype(np.uint32)
    return np.where(byte == 255, np.float32(np.nan), bits.view(np.float32))


def spread(scales: np.ndarray, n: int, k: int) -> np.ndarray:
    """A scale for each element, by its own indices."""
    rows, cols = np.arange(n) // 128, np.arange(k) // 128
    return scales[rows[:, None], cols[None, :]]


def same_bits(got: torch.Tensor, wanted: np.ndarray) -> bool:
    number, got = ~np.isnan(wanted), got.numpy()
    return np.isnan(got[~number]).all() and np.array_equal(got[number].view(np.uint32), wanted[number].view(np.uint32))


def random_codes(n: int, k: int) -> torch.Tensor:
    codes = torch.randint(0, 256, (n, k), dtype=torch.uint8, generator=torch.Generator().manual_seed(n + k))
    codes.view(-1)[: min(256, n * k)] = torch.arange(min(256, n * k)).to(torch.uint8)  # NaN and -0 too
    return codes


def of_file(codes: torch.Tensor, scales: torch.Tensor) -> quire.QuantizedTensor:
    buffers = {"rowwise_data": codes, "rowwise_scale": scales.to(torch.float32)}
    return quire.QuantizedTensor.from_buffers(buffers, SPEC, codes.shape)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bfloat16_scales_decode_as_the_formula(shape):
    n, k = shape
    random = torch.Generator().manual_seed(1)
    scales = torch.rand(-(-n // 128), -(-k // 128), generator=random).to(torch.bfloat16)
    scales[0, 0] = 0.0
    scales[-1, -1] = torch.nan if scales.numel() > 1 else scales[-1, -1]
    codes = random_codes(n, k)
    bits = scales.view(torch.int16).numpy().view(np.uint16)
    with np.errstate(invalid="ignore"):
        wanted = e4m3(codes.numpy()) * spread(bf16(bits), n, k)
    q = of_file(codes, scales)
    assert same_bits(q.dequantize(), wanted)
    narrow = (q.rowwise_scale.view(torch.int32) >> 16).to(torch.int16)  # .to(bfloat16) changes bits of NaN
    assert torch.equal(narrow, scales.view(torch.int16))
    rounded = torch.from_numpy(wanted).to(torch.bfloat16)
    assert torch.equal(q.dequantize(torch.bfloat16).nan_to_num(7), rounded.nan_to_num(7))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_e8m0_scales_decode_as_the_formula(shape):
    n, k = shape
    blocks = (-(-n // 128), -(-k // 128))
    for first in (0, 127, 250):
        bytes_ = (first + torch.arange(blocks[0] * blocks[1])).clamp(max=255).to(torch.uint8).reshape(blocks)
        codes = random_codes(n, k)
        with np.errstate(invalid="ignore", over="ignore"):
            wanted = e4m3(codes.numpy()) * spread(e8m0(bytes_.numpy()), n, k)
        q = of_file(codes, bytes_.view(torch.float8_e8m0fnu))
        assert same_bits(q.dequantize(), wanted)
        assert torch.equal(q.rowwise_scale.to(torch.float8_e8m0fnu).view(torch.uint8), bytes_)


@pytest.mark.parametrize("shape", [(192, 256), (576, 128), (200, 300)], ids=str)
@pytest.mark.parametrize("x_spec", ["fp8_block", "mxfp8", "fp8_row"])
def test_products_of_ragged_blocks_are_within_the_bound(shape, x_spec):
    n, k = shape
    random = torch.Generator().manual_seed(2)
    codes = torch.randint(0, 0x7F, (n, k), dtype=torch.uint8, generator=random)
    scales = (0.5 + torch.rand(-(-n // 128), -(-k // 128), generator=random)).to(torch.bfloat16)
    w = of_file(codes, scales)
    bits = scales.view(torch.int16).numpy().view(np.uint16)
    exact = e4m3(codes.numpy()).astype(np.float64) * spread(bf16(bits), n, k)
    x = torch.randn(9, k, generator=random)
    a = quire.quantize(x, x_spec).dequantize().double().numpy()
    text = f"x={x_spec},w={SPEC},dy=mxfp8"
    y = quire.functional.linear_prequantized(x, w.carrier(), None, text, torch.float32, w_buffers=w.buffer_list())
    error = np.abs(y.double().numpy() - a @ exact.T)
    assert (error <= (k + 6) * 2.0**-24 * (np.abs(a) @ np.abs(exact).T)).all()


def test_scales_of_another_dtype_are_refused_in_words():
    buffers = {"rowwise_data": random_codes(192, 256), "rowwise_scale": torch.ones(2, 2, dtype=torch.bfloat16)}
    with pytest.raises(ValueError, match=r"rowwise_scale.*float32"):
        quire.QuantizedTensor.from_buffers(buffers, SPEC, (192, 256))


@pytest.mark.parametrize("spec", ["mxfp8", "mxfp4"])
def test_e8m0_bytes_of_block_scales_are_no_numbers_but_powers(spec):
    """Byte 0 is 2^-127 and byte 255 NaN; the codes are 0x88 and others, with -0."""
    k = 8192
    scale = torch.arange(256, dtype=torch.uint8).reshape(1, 256)
    packed = spec == "mxfp4"
    data = torch.randint(0, 256, (1, k // 2 if packed else k), dtype=torch.uint8)
    data[0, ::7] = 0x88 if packed else 0x80
    q = quire.QuantizedTensor.from_buffers({"rowwise_data": data, "rowwise_scale": scale}, spec, (1, k))
    if packed:
        codes = np.stack((data.numpy() & 15, data.numpy() >> 4), -1).reshape(1, k)
        values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)[codes & 7]
        values = np.where(codes & 8, -values, values)
    else:
        values = e4m3(data.numpy())
    with np.errstate(invalid="ignore", over="ignore"):
        wanted = values * np.repeat(e8m0(scale.numpy()), 32, 1)
    assert same_bits(q.dequantize(), wanted)
