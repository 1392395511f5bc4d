"""Rotary position embeddings (arXiv 2104.09864)."""

import torch

from quire.checks import check_type
from quire.loading.devices import is_known
from quire.nn.layer_base import Float32Buffers
from quire.te.arguments import takes
from quire.te.attention.masks import places_in_sequences

_EMBEDDING = {
    "rotary_percent": 1.0,
    "seq_len_interpolation_factor": None,
    "pretrained_max_position_embeddings": None,
    "rotary_base": 10000.0,
    "interleaved": False,
}
_APPLY = {
    "tensor_format": "sbhd",
    "start_positions": None,
    "interleaved": False,
    "fused": False,
    "cu_seqlens": None,
    "cp_size": 1,
    "cp_rank": 0,
}


class RotaryPositionEmbedding(Float32Buffers):
    """The angles by which features of queries and keys are turned, which depend on their positions.

    dim: of a head. rotary_percent: the part of it that is turned. seq_len_interpolation_factor: positions are divided
    by this factor, or if pretrained_max_position_embeddings * factor is exceeded by what makes them fit (arXiv
    2306.15595); both options are needed. rotary_base: the base of the wave lengths. interleaved: features 2i and 2i + 1
    form a pair, else i and i + dim / 2. inv_freq is a buffer on torch's default device; it stays float32.
    """

    @takes(_EMBEDDING)
    def __init__(self, dim: int, options: dict[str, object]) -> None:
        super().__init__()
        percent, base = options["rotary_percent"], options["rotary_base"]
        dim = int(dim * percent) if percent < 1.0 else dim
        self.rotary_base, self.interleaved = base, options["interleaved"]
        self.seq_len_interpolation_factor = options["seq_len_interpolation_factor"]
        self.pretrained_max_position_embeddings = options["pretrained_max_position_embeddings"]
        self._dim = dim
        self.add_float32_buffer("inv_freq", len(range(0, dim, 2)), None)

    def float32_buffers(self) -> list[str]:
        return ["inv_freq"]

    def fill_new(self, name: str, buffer: torch.Tensor) -> None:
        pairs = torch.arange(0, self._dim, 2, dtype=torch.float32, device=buffer.device)
        buffer.copy_(1.0 / self.rotary_base ** (pairs / self._dim))

    def forward(self, max_seq_len: int, offset: int = 0) -> torch.Tensor:
        """Angles of positions offset, offset + 1, ...: float32 [max_seq_len, 1, 1, dim]."""
        self.check_float32("quire.te.RotaryPositionEmbedding", "inv_freq")
        frequencies = self.inv_freq
        positions = torch.arange(max_seq_len, device=frequencies.device, dtype=torch.float32) + offset
        factor, known = self.seq_len_interpolation_factor, self.pretrained_max_position_embeddings
        if factor is not None and known is not None:
            positions = positions / (max_seq_len / known if max_seq_len > known * factor else factor)
        angles = positions[:, None] * frequencies
        pairs = angles.repeat_interleave(2, dim=-1) if self.interleaved else torch.cat([angles, angles], dim=-1)
        return pairs[:, None, None, :]


@takes(_APPLY)
def apply_rotary_pos_emb(t: torch.Tensor, freqs: torch.Tensor, options: dict[str, object]) -> torch.Tensor:
    """t with its features turned by the angles of their positions, computed in float32, in t's dtype.

    t: [s, b, h, d], [b, s, h, d] or [t, h, d], as tensor_format says: "sbhd", "bshd" or "thd".
    freqs: [s2, 1, 1, d2], the angles of positions 0 to s2 - 1, with d2 <= d; features after the first d2 stay.
    start_positions: [b], the position of the first token of each sequence; None: 0.
    interleaved: as for RotaryPositionEmbedding. cu_seqlens: [b + 1], where sequences begin, for "thd".
    fused changes nothing. Raises TypeError for a t that is not of floating point, ValueError for shapes and positions
    that do not fit, NotImplementedError for cp_size > 1.
    """
    layout, starts, cu_seqlens = options["tensor_format"], options["start_positions"], options["cu_seqlens"]
    if options["cp_size"] != 1:
        raise NotImplementedError(
            f"quire.te.apply_rotary_pos_emb: cp_size={options['cp_size']} is not available: sequences are not sharded "
            "over processes here; leave it 1"
        )
    _check(t, freqs, layout, cu_seqlens, starts)
    positions = positions_of(t, layout, starts, cu_seqlens)
    _check_positions(positions, freqs, starts)
    return turn(t, freqs, positions, options["interleaved"])


def turn(t: torch.Tensor, freqs: torch.Tensor, positions: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """apply_rotary_pos_emb() for given positions, broadcastable to t.shape[:-2]. Positions beyond freqs, which only
    absent tokens may have, are treated as its last position."""
    angles = freqs[:, 0, 0].float()[positions.clamp(max=freqs.shape[0] - 1)].unsqueeze(-2)
    turned, rest = t[..., : freqs.shape[-1]], t[..., freqs.shape[-1] :]
    values = turned.to(torch.promote_types(t.dtype, torch.float32))
    values = values * angles.cos() + _partners(values, interleaved) * angles.sin()
    return torch.cat([values.to(t.dtype), rest], dim=-1)


def _partners(x: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """For each feature the other feature of its pair; second features with their sign changed."""
    if interleaved:
        return torch.stack([-x[..., 1::2], x[..., ::2]], dim=-1).flatten(-2)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([-second, first], dim=-1)


def positions_of(
    t: torch.Tensor, layout: str, starts: torch.Tensor | None, cu_seqlens: torch.Tensor | None
) -> torch.Tensor:
    """The position of each token: int64, broadcastable to t.shape[:-2]."""
    if layout == "thd":
        sequence, place = places_in_sequences(cu_seqlens.long(), t.shape[0])
        return place.clamp(min=0) if starts is None else place.clamp(min=0) + starts.long()[sequence]
    places = torch.arange(t.shape[0 if layout == "sbhd" else 1], dtype=torch.int64, device=t.device)
    places = places[:, None] if layout == "sbhd" else places[None]
    if starts is None:
        return places
    starts = starts.long()
    return places + (starts[None] if layout == "sbhd" else starts[:, None])


def _check(
    t: torch.Tensor, freqs: torch.Tensor, layout: str, cu_seqlens: torch.Tensor | None, starts: torch.Tensor | None
) -> None:
    what = "quire.te.apply_rotary_pos_emb"
    check_type(what, torch.Tensor, t=t, freqs=freqs)
    if not t.is_floating_point():
        raise TypeError(f"{what}: t must have a floating-point dtype, got {t.dtype}; convert it with .to()")
    if layout not in ("sbhd", "bshd", "thd"):
        raise ValueError(f"{what}: tensor_format must be 'sbhd', 'bshd' or 'thd', got {layout!r}")
    if t.dim() != len(layout):
        raise ValueError(f"{what}: t must have the dimensions {layout}, got {list(t.shape)}")
    if layout == "thd" and cu_seqlens is None:
        raise ValueError(f"{what}: tensor_format 'thd' needs cu_seqlens, got None")
    if freqs.dim() != 4 or freqs.shape[1:3] != (1, 1) or freqs.shape[-1] > t.shape[-1] or freqs.shape[-1] % 2:
        raise ValueError(
            f"{what}: freqs must be [positions, 1, 1, features], with an even number of features of at most "
            f"{t.shape[-1]}, got {list(freqs.shape)}"
        )
    batch = cu_seqlens.shape[0] - 1 if layout == "thd" else t.shape[layout.index("b")]
    if starts is not None and starts.shape != (batch,):
        raise ValueError(
            f"{what}: start_positions must have one position for each of {batch} sequences, got {list(starts.shape)}"
        )


def _check_positions(positions: torch.Tensor, freqs: torch.Tensor, starts: torch.Tensor | None) -> None:
    """Of tokens that follow the first ones by shapes alone; starts are known in eager mode on the CPU only."""
    if positions.numel() == 0 or (not is_known(positions) and (starts is not None or positions.dim() == 1)):
        return
    last = max(positions.shape) - 1 if starts is None and positions.dim() == 2 else int(positions.max())
    if starts is not None and int(positions.min()) < 0:
        raise ValueError(
            f"quire.te.apply_rotary_pos_emb: start_positions must be 0 or more, got {starts.tolist()}; positions count "
            "from the first token of a sequence"
        )
    if last >= freqs.shape[0]:
        raise ValueError(
            f"quire.te.apply_rotary_pos_emb: freqs has angles for {freqs.shape[0]} positions, and t has a token at "
            f"position {last}; call RotaryPositionEmbedding with a larger max_seq_len"
        )
