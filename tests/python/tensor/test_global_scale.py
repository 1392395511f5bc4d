"""NVFP4 weights of other tools: their global scale is kept as it is stored (numerics.md 5.11)."""

import numpy as np
import pytest
import torch

import quire
from quire import runners

N, K = 96, 128
#: The formulas of ModelOpt and of compressed-tensors, in float32.
FORMULAS = {"mul": lambda code, scale, g: code * (scale * g), "div": lambda code, scale, g: code * (scale / g)}
ways = pytest.mark.parametrize("way", list(FORMULAS))


def e4m3(byte: np.ndarray) -> np.ndarray:
    sign, exponent, fraction = byte >> 7, (byte >> 3 & 15).astype(np.float32), (byte & 7).astype(np.float32)
    value = np.where(exponent > 0, (1 + fraction / 8) * 2.0 ** (exponent - 7), fraction * 2.0**-9).astype(np.float32)
    value[(byte & 0x7F) == 0x7F] = np.nan
    return np.where(sign == 1, -value, value)


def e2m1(data: np.ndarray) -> np.ndarray:
    codes = np.stack((data & 15, data >> 4), -1).reshape(data.shape[0], -1)
    magnitude = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)[codes & 7]
    return np.where(codes & 8, -magnitude, magnitude)


def expected(buffers: dict, way: str, columns: int = K) -> np.ndarray:
    """The values of rowwise buffers by a formula of numpy."""
    scale = np.repeat(e4m3(buffers["rowwise_scale"].numpy()), 16, 1)[:, :columns]
    g = buffers["rowwise_amax"].numpy()[:, None]
    with np.errstate(all="ignore"):
        return FORMULAS[way](e2m1(buffers["rowwise_data"].numpy())[:, :columns], scale, g)


def foreign(g: torch.Tensor, seed: int = 0, every_byte: bool = False) -> dict:
    """Buffers as a file has them: any codes, any block scales (every_byte: NaN and negative ones too)."""
    random = torch.Generator().manual_seed(seed)
    scale = torch.randint(1 if every_byte else 32, 256 if every_byte else 120, (N, K // 16), generator=random)
    if every_byte:
        scale.view(-1)[:256] = torch.arange(256)
    data = torch.randint(0, 256, (N, K // 2), dtype=torch.uint8, generator=random)
    return {"rowwise_data": data, "rowwise_scale": scale.to(torch.uint8), "rowwise_amax": g}


def lossy(count: int) -> list[float]:
    """Numbers that neither 2688 nor two reciprocals give back."""
    random = np.random.default_rng(7)
    g = (random.uniform(1, 2, 10000) * 2.0 ** random.integers(-24, 12, 10000)).astype(np.float32)
    most, one = np.float32(2688), np.float32(1)
    lost = (g * most / most != g) & (one / (one / g) != g)
    assert lost.sum() == 569  # of 10000; of other tests most numbers are not of these
    return [float(x) for x in g[lost][:count]]


@ways
def test_codes_decode_as_the_formula_bit_for_bit(way):
    for g in lossy(20):
        buffers = foreign(torch.tensor([g]), every_byte=True)
        q = quire.QuantizedTensor.from_buffers(buffers, f"nvfp4:global={way}", (N, K))
        assert torch.equal(q.rowwise_amax, torch.tensor([g]))
        got, wanted = q.dequantize().numpy(), expected(buffers, way)
        assert np.array_equal(got.view(np.uint32)[~np.isnan(wanted)], wanted.view(np.uint32)[~np.isnan(wanted)])
        assert np.isnan(got[np.isnan(wanted)]).all() and np.isnan(wanted).sum() > 0


@ways
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_quantizing_and_decoding_follow_the_formula(way, dtype):
    x = torch.randn(35, 80, generator=torch.Generator().manual_seed(1)).to(dtype)
    x[3, 5] = -0.0
    q = quire.quantize(x, f"nvfp4:global={way}")
    amax, most = np.float32(x.float().abs().max()), np.float32(2688)
    assert q.rowwise_amax.numpy()[0] == (amax / most if way == "mul" else most / amax)
    wanted = torch.from_numpy(expected(q.named(), way, 80))
    assert torch.equal(q.dequantize(torch.float32), wanted)
    assert torch.equal(q.dequantize(dtype), wanted.to(dtype))
    assert (wanted - x.float()).abs().max() < amax * 0.2
    assert wanted[3, 5] == 0 and wanted[3, 5].signbit()


@ways
def test_zeros_have_an_ordinary_global_scale(way):
    for shape in ((0, 32), (3, 0), (4, 32)):
        q = quire.quantize(torch.zeros(shape), f"nvfp4:global={way}", columnwise=True)
        assert q.rowwise_amax.item() == q.columnwise_amax.item() == 1
        assert torch.equal(q.dequantize(), torch.zeros(shape))


@ways
def test_products_take_it_beside_every_kind_of_operand(way):
    w_buffers = foreign(torch.tensor([lossy(1)[0]]), 3)
    w = quire.QuantizedTensor.from_buffers(w_buffers, f"nvfp4:global={way}", (N, K))
    exact_w = expected(w_buffers, way).astype(np.float64)
    x = torch.randn(37, K, generator=torch.Generator().manual_seed(2))
    for spec in ("nvfp4", "nvfp4:global=mul", "nvfp4:row_scaled:global=div", "mxfp8", "fp8_row", "mxfp4"):
        a = quire.quantize(x, spec).dequantize(torch.float32).double().numpy()
        text = f"x={spec},w={w.spec.text},dy={spec}"
        buffers = w.buffer_list()
        y = quire.functional.linear_prequantized(x, w.carrier(), None, text, torch.float32, w_buffers=buffers)
        y = y.numpy()
        bound = (K + 12) * 2.0**-24 * (np.abs(a) @ np.abs(exact_w).T)
        assert (np.abs(y - a @ exact_w.T) <= bound).all(), spec


@ways
def test_gate_and_up_with_scales_of_their_own_are_one_operand(way):
    """As rows of one weight they have the bits that they have as two."""
    parts = [foreign(torch.tensor([g]), seed) for seed, g in enumerate(lossy(2))]
    both = {name: torch.cat([part[name] for part in parts]) for name in ("rowwise_data", "rowwise_scale")}
    both["rowwise_amax"] = torch.cat([part["rowwise_amax"].expand(N) for part in parts])
    spec = f"nvfp4:row_scaled:global={way}"
    fused = quire.QuantizedTensor.from_buffers(both, spec, (2 * N, K))
    x = torch.randn(5, K, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(3))
    each = []
    for part in parts:
        w = quire.QuantizedTensor.from_buffers(part, f"nvfp4:global={way}", (N, K))
        with runners.register(runners.LinearRunner(w)) as runner:
            each.append(quire.nvfp4_linear(x, runner, N))
    with runners.register(runners.LinearRunner(fused)) as runner:
        assert torch.equal(quire.nvfp4_linear(x, runner, 2 * N), torch.cat(each, -1))
    rows = [quire.QuantizedTensor.from_buffers(p, f"nvfp4:global={way}", (N, K)).dequantize() for p in parts]
    assert torch.equal(fused.dequantize(), torch.cat(rows))


@ways
def test_a_stack_keeps_the_scale_of_each_expert(way):
    parts = [foreign(torch.tensor([g]), seed) for seed, g in enumerate(lossy(3))]
    spec = f"nvfp4:global={way}"
    stack = quire.QuantizedStack.from_buffers(
        {name: torch.stack([part[name] for part in parts]) for name in parts[0]}, spec, (3, N, K)
    )
    for e, part in enumerate(parts):
        assert np.array_equal(stack[e].dequantize().numpy(), expected(part, way))


def test_amaxes_of_parts_are_reduced_and_global_scales_are_not():
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(4))
    for way in FORMULAS:
        spec = f"nvfp4:global={way}"
        whole = quire.quantize(x, spec)
        amax = quire.amax(x, spec)[0]
        assert amax.item() == x.abs().max().item()
        lower = quire.quantize(x[:16], spec, amax=(amax, None))
        assert torch.equal(lower.rowwise_amax, whole.rowwise_amax)
        assert torch.equal(lower.rowwise_data, whole.rowwise_data[:16])
