"""Rotary embeddings against multiplications of complex numbers in float64."""

import pytest
import torch

from python.te.transformer_reference import angles_of, close, rotate, tokens
from quire import te

B, S, HEADS, DIM = 2, 5, 4, 4


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("layout", ["sbhd", "bshd", "thd"])
@pytest.mark.parametrize("starts", [None, (3, 1)])
def test_rotary_embeddings_are_a_multiplication_of_complex_numbers(interleaved, layout, starts):
    part = DIM // 2 * 2
    freqs = te.RotaryPositionEmbedding(2 * part, rotary_percent=0.5, interleaved=interleaved)(S + 3)
    assert freqs.shape == (S + 3, 1, 1, part) and freqs.dtype == torch.float32
    x = tokens(B, S, HEADS, 2 * part)
    positions = torch.arange(S) + torch.tensor(starts or (0, 0))[:, None]
    angles = angles_of(positions, part)[:, :, None]
    options = {"interleaved": interleaved, "tensor_format": layout}
    options |= {} if starts is None else {"start_positions": torch.tensor(starts, dtype=torch.int32)}
    t = x.transpose(0, 1) if layout == "sbhd" else x
    if layout == "thd":
        t, options["cu_seqlens"] = x.flatten(0, 1), torch.arange(0, B * S + 1, S, dtype=torch.int32)
    y = te.apply_rotary_pos_emb(t, freqs, **options)
    y = y.transpose(0, 1) if layout == "sbhd" else y.reshape(x.shape)
    close(y[..., :part], rotate(x[..., :part].detach(), angles, interleaved), 1e-6)
    assert torch.equal(y[..., part:], x[..., part:])
    dy = tokens(*y.shape, seed=4).detach()
    (dx,) = torch.autograd.grad(y, x, dy)
    close(dx[..., :part], rotate(dy[..., :part], -angles, interleaved), 1e-6)
    short = te.RotaryPositionEmbedding(part)(S - 1)
    with pytest.raises(ValueError, match=f"freqs has angles for {S - 1} positions"):
        te.apply_rotary_pos_emb(t, short, **options)
    for wrong, message in (([1, 2, 3], r"for each of 2 sequences, got \[3\]"), ([0, -1], r"0 or more, got \[0, -1\]")):
        with pytest.raises(ValueError, match=f"start_positions must .*{message}"):
            te.apply_rotary_pos_emb(t, freqs, **options | {"start_positions": torch.tensor(wrong)})
    with pytest.raises(TypeError, match="t must have a floating-point dtype, got torch.int64"):
        te.apply_rotary_pos_emb(t.detach().long(), freqs, **options)


def test_an_offset_and_interpolated_positions():
    assert torch.equal(te.RotaryPositionEmbedding(DIM)(S, offset=2), te.RotaryPositionEmbedding(DIM)(S + 2)[2:])
    factor = {"seq_len_interpolation_factor": 2, "pretrained_max_position_embeddings": 4}
    for length, divisor in ((8, 2), (12, 3)):
        freqs = te.RotaryPositionEmbedding(DIM, rotary_base=100.0, **factor)(length)
        wanted = angles_of(torch.arange(length, dtype=torch.float32) / divisor, DIM, base=100.0)
        close(freqs[:, 0, 0], torch.cat([wanted, wanted], -1), 1e-6)
