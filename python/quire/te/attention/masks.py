"""Which tokens of a batch exist and which keys a query attends to: sequences of different lengths one after another
(qkv_format "thd") and the same as a padded batch, types of masks, sliding windows."""

from dataclasses import dataclass

import torch

from quire.loading.devices import is_known


class Packing:
    """Where sequences are among tokens [t, *].

    cu_seqlens [b + 1]: the cumulative lengths of the sequences. offsets [b + 1]: where each begins, if there is space
    between them; None: cu_seqlens. longest: at least the length of each. All shapes follow from the shapes of these and
    from `longest`, so graphs do not depend on lengths. Raises ValueError on the CPU, outside of compiled functions, if
    a sequence is longer.
    """

    def __init__(self, cu_seqlens: torch.Tensor, offsets: torch.Tensor | None, longest: int) -> None:
        self.lengths = (cu_seqlens[1:] - cu_seqlens[:-1]).long()
        self.offsets = (cu_seqlens if offsets is None else offsets).long()
        self.longest = longest
        if is_known(cu_seqlens) and len(self.lengths) > 0 and int(self.lengths.max()) > longest:
            raise ValueError(
                f"quire.te.DotProductAttention: max_seqlen must be at least the length of each sequence, got {longest} "
                f"for sequences of {self.lengths.tolist()} tokens"
            )

    def present(self) -> torch.Tensor:
        """bool [b, longest]."""
        return torch.arange(self.longest, dtype=torch.int64, device=self.lengths.device) < self.lengths[:, None]

    def pad(self, tokens: torch.Tensor) -> torch.Tensor:
        """[t, *] -> [b, longest, *], with zeros where no token is."""
        if tokens.shape[0] == 0:
            return tokens.new_zeros(len(self.lengths), self.longest, *tokens.shape[1:])
        places = self.offsets[:-1, None] + torch.arange(self.longest, dtype=torch.int64, device=self.offsets.device)
        rows = tokens[places.clamp(max=tokens.shape[0] - 1)]
        return torch.where(self._like(self.present(), rows), rows, 0)

    def unpad(self, rows: torch.Tensor, total: int) -> torch.Tensor:
        """[b, longest, *] -> [total, *], with zeros for tokens of no sequence."""
        if rows.shape[0] * rows.shape[1] == 0:
            return rows.new_zeros(total, *rows.shape[2:])
        sequence, place = self.places(total)
        token = torch.arange(total, dtype=torch.int64, device=place.device)
        there = (place < self.lengths[sequence]) & (token < self.offsets[-1])
        flat = sequence * self.longest + place.clamp(0, self.longest - 1)
        tokens = rows.flatten(0, 1)[flat]
        return torch.where(self._like(there, tokens), tokens, 0)

    def places(self, total: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The sequence of each of `total` tokens, and its place in the sequence: int64 [total] each."""
        return places_in_sequences(self.offsets, total)

    @staticmethod
    def _like(mask: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return mask.view(*mask.shape, *(1 for _ in range(values.dim() - mask.dim())))


def places_in_sequences(offsets: torch.Tensor, total: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The sequence of each of `total` tokens, which is the last that begins before it, and the token's place in the
    sequence: int64 [total] each. offsets [b + 1]: where sequences begin; b > 0."""
    token = torch.arange(total, dtype=torch.int64, device=offsets.device)
    sequence = torch.searchsorted(offsets[1:].contiguous(), token, right=True).clamp(max=len(offsets) - 2)
    return sequence, token - offsets[sequence]


def longest_of(given: int | None, cu_seqlens: torch.Tensor, total: int) -> int:
    """The size of rows that sequences of a packed batch are padded to: max_seqlen if it is given, else the length of
    the longest one, or in a compiled function, which cannot know that, the number of tokens."""
    if given is not None:
        return int(given)
    if torch.compiler.is_compiling() or cu_seqlens.is_meta or cu_seqlens.shape[0] < 2:
        return total
    return int((cu_seqlens[1:] - cu_seqlens[:-1]).max())


MASK_TYPES = (
    "no_mask",
    "padding",
    "causal",
    "padding_causal",
    "causal_bottom_right",
    "padding_causal_bottom_right",
    "arbitrary",
)
Window = tuple[int, int]


def mask_type_of(what: str, name: str) -> str:
    """One of MASK_TYPES; "padding,causal" and "causal,padding" are "padding_causal". Raises ValueError for others."""
    found = name.replace(",", "_") if isinstance(name, str) else name
    found = "padding_causal" if found == "causal_padding" else found
    if found not in MASK_TYPES:
        raise ValueError(f"{what}: the type of mask must be one of {', '.join(MASK_TYPES)}, got {name!r}")
    return found


def window_of(what: str, mask_type: str, window: Window | None) -> Window:
    """How many keys before and after its own place a query attends to, each -1 for all; 0 after it where the mask is
    causal. Raises ValueError for anything else."""
    left, right = (-1, -1) if window is None else window
    if min(left, right) < -1 or (left >= 0 and right < 0 and "causal" not in mask_type):
        raise ValueError(
            f"{what}: window_size must be (left, right) with numbers of keys >= 0, or (-1, -1) for all; got {window}"
        )
    if "causal" in mask_type:
        return left, 0
    return (left, right) if left >= 0 else (-1, -1)


def from_bottom_right(mask_type: str, given: bool | None) -> bool:
    """Whether the last query is aligned with the last key, and not the first query with the first key."""
    if mask_type in ("causal", "padding_causal"):
        return False
    return given is None or given or "bottom_right" in mask_type


@dataclass(frozen=True)
class Present:
    """Which tokens of a padded batch exist: q bool [b, sq], kv bool [b, skv]."""

    q: torch.Tensor
    kv: torch.Tensor

    def lead(self) -> torch.Tensor:
        """How many more keys than queries each sequence has: [b, 1, 1, 1]."""
        return (self.kv.sum(1) - self.q.sum(1)).view(-1, 1, 1, 1)


def present(cu_seqlens: torch.Tensor, batch: int, size: int, device: torch.device) -> torch.Tensor:
    """bool [batch, size] for sequences of these cumulative lengths [>= batch + 1], each at the start of its row."""
    lengths = (cu_seqlens[1 : batch + 1] - cu_seqlens[:batch]).to(device)
    return torch.arange(size, dtype=torch.int64, device=device) < lengths[:, None]


def present_of_masks(what: str, mask: torch.Tensor | tuple[torch.Tensor, torch.Tensor], cross: bool) -> Present:
    """The Present of a mask [b, 1, 1, s] that is True where no token exists, or of one mask for queries and one for
    keys."""
    pair = tuple(mask) if isinstance(mask, tuple | list) else (mask, mask)
    if (cross and isinstance(mask, torch.Tensor)) or len(pair) != 2:
        raise ValueError(
            f"{what}: attention_mask must be a pair of masks [b, 1, 1, seqlen_q] and [b, 1, 1, seqlen_kv] for "
            'attention_type="cross"; got one'
        )
    for one in pair:
        if one.dtype != torch.bool or one.dim() != 4 or one.shape[1] != 1 or one.shape[2] != 1:
            raise ValueError(
                f"{what}: attention_mask must be bool [b, 1, 1, seqlen], True where no token is; "
                f"got {one.dtype} {list(one.shape)}"
            )
    q, kv = (~one[:, 0, 0] for one in pair)
    return Present(q, kv)


def distance(sq: int, skv: int, bottom_right: bool, tokens: Present | None, device: torch.device) -> torch.Tensor:
    """By how many places a key is before a query: int64 [1, 1, sq, skv], or [b, 1, sq, skv] if it depends on the
    lengths of sequences."""
    queries = torch.arange(sq, dtype=torch.int64, device=device)
    places = queries[:, None] - torch.arange(skv, dtype=torch.int64, device=device)
    if not bottom_right:
        return places[None, None]
    return places[None, None] + (skv - sq if tokens is None else tokens.lead())


def kept(places: torch.Tensor, window: Window, tokens: Present | None, masked: torch.Tensor | None) -> torch.Tensor:
    """bool [1 or b, 1 or h, sq, skv]: which keys each query attends to. masked: True for keys that an arbitrary mask
    excludes."""
    left, right = window
    keep = torch.ones_like(places, dtype=torch.bool) if left < 0 else places <= left
    if right >= 0:
        keep = keep & (places >= -right)
    if tokens is not None:
        keep = keep & tokens.q[:, None, :, None] & tokens.kv[:, None, None, :]
    return keep if masked is None else keep & ~masked


def alibi_slopes(heads: int, device: torch.device) -> torch.Tensor:
    """The slopes of ALiBi (arXiv 2108.12409) for a number of heads: float32 [heads]."""
    power = 1 << (heads.bit_length() - 1)
    slopes = [2.0 ** (-8.0 * i / power) for i in range(1, power + 1)]
    slopes += [2.0 ** (-4.0 * i / power) for i in range(1, 2 * (heads - power) + 1, 2)]
    return torch.tensor(slopes, dtype=torch.float32, device=device)


def alibi(slopes: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """-slope * |distance|, for slopes [h] or [b, h]: [1 or b, h, sq, skv]."""
    return -slopes.view(-1, slopes.shape[-1], 1, 1) * places.abs()
