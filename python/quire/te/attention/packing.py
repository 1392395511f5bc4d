"""Sequences of different lengths one after another (qkv_format "thd"), and the same as a padded batch."""

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
