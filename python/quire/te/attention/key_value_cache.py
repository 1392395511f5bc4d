"""Keys and values of earlier tokens, kept from call to call while a model generates."""

import weakref
from collections import OrderedDict
from collections.abc import Mapping

import torch

from quire.checks import check_type
from quire.te.arguments import takes
from quire.te.attention.masks import Packing, longest_of

_OPTIONS = {
    "num_heads_kv": None,
    "head_dim_k": None,
    "dtype": None,
    "head_dim_v": None,
    "is_paged": False,
    "total_num_pages": None,
    "page_size": None,
    "max_ctx_len": None,
    "qkv_format": "bshd",
    "custom_cache_manager": None,
}
_WHAT = "quire.te.InferenceParams"


class InferenceParams:
    """A cache of keys and values for all attention layers of a model, by their layer_number.

    max_batch_size, max_sequence_length: the sizes of the cache. num_heads_kv, head_dim_k, head_dim_v (None:
    head_dim_k), dtype: of keys and values. All of these are needed.
    qkv_format: of the tokens of a call. max_ctx_len: for "thd", at least the number of new tokens of each sequence in a
        call. None: found in each call, as the largest of them, or in compiled functions as the number of all.
    is_paged, total_num_pages, page_size, custom_cache_manager are not available: they raise NotImplementedError.

    Before each call of the model, pre_step({sequence: number of its new tokens}) says what the rows of the batch are.
    A sequence keeps its tokens as long as it is named in each step; the order may change. The model is called with
    inference_params= and a padding type of mask, in which "padding_causal" counts from the last key. The tokens stand
    at the start of their rows. Each layer needs a different layer_number.

    cache: layer number -> keys [max_batch_size, max_sequence_length, num_heads_kv, head_dim_k], and values. A layer's
    memory is allocated in its first call, on the device of its keys, or by allocate_memory() before,
    without which a compiled function compiles its first call twice.
    """

    @takes(_OPTIONS)
    def __init__(self, max_batch_size: int, max_sequence_length: int, options: dict[str, object]) -> None:
        check_type(_WHAT, int, max_batch_size=max_batch_size, max_sequence_length=max_sequence_length)
        paged = {name: options[name] for name in ("is_paged", "total_num_pages", "page_size", "custom_cache_manager")}
        for name, value in paged.items():
            if value not in (None, False):
                raise NotImplementedError(
                    f"{_WHAT}: {name}={value!r} is not available: the cache is one tensor for each layer; leave it "
                    f"{_OPTIONS[name]!r}, and choose max_batch_size and max_sequence_length as large as needed"
                )
        heads, dim, dtype = (options[name] for name in ("num_heads_kv", "head_dim_k", "dtype"))
        if None in (heads, dim, dtype):
            raise ValueError(
                f"{_WHAT}: num_heads_kv, head_dim_k and dtype are needed, got {heads!r}, {dim!r} and {dtype!r}"
            )
        self.max_batch_size, self.max_sequence_length = max_batch_size, max_sequence_length
        self.num_heads_kv, self.head_dim_k, self.dtype, self.is_paged = heads, dim, dtype, False
        self.head_dim_v = dim if options["head_dim_v"] is None else options["head_dim_v"]
        self.max_ctx_len, self.input_qkv_format = options["max_ctx_len"], options["qkv_format"]
        self.cache: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.sequences: OrderedDict[object, int] = OrderedDict()
        self.batch_size = 0
        self.cu_seqlens_q = torch.zeros(max_batch_size + 1, dtype=torch.int32, device="cpu")
        self.cu_seqlens_kv = torch.zeros(max_batch_size + 1, dtype=torch.int32, device="cpu")
        self.pre_step_seqlens = torch.zeros(max_batch_size, dtype=torch.int32, device="cpu")
        self._owners: dict[int, weakref.ref[torch.nn.Module]] = {}

    def reset(self) -> None:
        """Forgets all sequences."""
        self.sequences = OrderedDict()

    def allocate_memory(self, layer_number: int, device: torch.device | str | None = None) -> None:
        """Memory of zeros for a layer, on a device (None: torch's default)."""
        shape = (self.max_batch_size, self.max_sequence_length, self.num_heads_kv)
        keys, values = (
            torch.zeros(*shape, dim, dtype=self.dtype, device=device) for dim in (self.head_dim_k, self.head_dim_v)
        )
        self.cache[layer_number] = keys, values

    def pre_step(self, step_dict: Mapping[object, int]) -> None:
        """Before each call of the model. step_dict: sequence -> number of its new tokens, in the order of the batch.
        Sequences that are not in it are forgotten. Raises ValueError if the cache is too small for them, and leaves it
        as it was."""
        before = {sequence: self.sequences.get(sequence, 0) for sequence in step_dict}
        after = OrderedDict((sequence, before[sequence] + new) for sequence, new in step_dict.items())
        longest = max(after.values(), default=0)
        if len(after) > self.max_batch_size or longest > self.max_sequence_length:
            raise ValueError(
                f"{_WHAT}.pre_step: the cache has room for {self.max_batch_size} sequences of "
                f"{self.max_sequence_length} tokens; got {len(after)}, with {longest} tokens in the longest one"
            )
        self._reorder(list(after))
        self.sequences, self.batch_size = after, len(after)
        self.pre_step_seqlens[: len(after)].copy_(torch.tensor(list(before.values()), dtype=torch.int32, device="cpu"))
        for buffer, lengths in ((self.cu_seqlens_q, step_dict.values()), (self.cu_seqlens_kv, after.values())):
            ends = torch.tensor([*lengths], dtype=torch.int32, device="cpu").cumsum(0)
            buffer[1 : len(after) + 1].copy_(ends)
            buffer[len(after) + 1 :].fill_(int(ends[-1]) if len(after) else 0)

    def _reorder(self, wanted: list[object]) -> None:
        """Moves rows of the cache to the present places of their sequences in the batch."""
        rows = {sequence: row for row, sequence in enumerate(self.sequences)}
        kept = {place: rows[sequence] for place, sequence in enumerate(wanted) if sequence in rows}
        if any(place != row for place, row in kept.items()):
            places, sources = list(kept), list(kept.values())
            for tensor in (tensor for pair in self.cache.values() for tensor in pair):
                tensor[places] = tensor[sources]

    def get_seqlens_pre_step(self) -> torch.Tensor:
        """How many tokens of each sequence were there before this step: int32 [max_batch_size]."""
        return self.pre_step_seqlens

    def claim(self, layer_number: int, layer: torch.nn.Module, device: torch.device) -> None:
        """Allocates a layer's memory if it has none. Raises ValueError if another layer has the same number, and before
        the first pre_step()."""
        if self.batch_size == 0 and not torch.compiler.is_compiling():
            raise ValueError(
                f"{_WHAT}: it is not known which sequences are in the batch, got batch_size=0; call "
                "pre_step({sequence: number of its new tokens}) before the model"
            )
        if layer_number not in self.cache:
            self.allocate_memory(layer_number, device)
        if torch.compiler.is_compiling():
            return
        owner = self._owners.setdefault(layer_number, weakref.ref(layer))()
        if owner is not None and owner is not layer:
            raise ValueError(
                f"{_WHAT}: two layers have layer_number={layer_number}, and would share their keys and values; give "
                "each layer of the model a number of its own"
            )
        self._owners[layer_number] = weakref.ref(layer)

    def step(
        self, layer_number: int, new_k: torch.Tensor, new_v: torch.Tensor, qkv_format: str
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Adds the new tokens to a layer's cache. new_k, new_v: in qkv_format. Returns keys and values
        [b, max_sequence_length, heads, dim], which are views of the cache, and cu_seqlens_q, cu_seqlens_kv. Raises
        ValueError for shapes that do not fit."""
        keys, values = self.cache[layer_number]
        cu_seqlens = self.cu_seqlens_q.to(keys.device)
        if qkv_format == "thd":
            packing = self.packing(cu_seqlens, new_k.shape[0])
            new_k, new_v = packing.pad(new_k), packing.pad(new_v)
        elif qkv_format == "sbhd":
            new_k, new_v = new_k.transpose(0, 1), new_v.transpose(0, 1)
        batch, new = new_k.shape[:2]
        fits = new_k.shape[2:] == keys.shape[2:] and new_v.shape[2:] == values.shape[2:]
        if batch > self.max_batch_size or new > self.max_sequence_length or not fits:
            raise ValueError(
                f"{_WHAT}: the cache has room for {self.max_batch_size} sequences of {self.max_sequence_length} "
                f"tokens, {self.num_heads_kv} heads, keys of {self.head_dim_k} and values of {self.head_dim_v} "
                f"features; got keys {list(new_k.shape)} and values {list(new_v.shape)} as [b, s, heads, features]"
            )
        tokens = torch.arange(new, dtype=torch.int64, device=keys.device)
        there = tokens < (cu_seqlens[1 : batch + 1] - cu_seqlens[:batch])[:, None]
        # All places are different, so the places of absent tokens keep their content.
        places = (self.pre_step_seqlens.to(keys.device)[:batch, None] + tokens) % self.max_sequence_length
        rows = torch.arange(batch, dtype=torch.int64, device=keys.device)[:, None]
        with torch.no_grad():
            for kept, added in ((keys, new_k), (values, new_v)):
                kept[rows, places] = torch.where(there[..., None, None], added.to(self.dtype), kept[rows, places])
        return keys[:batch], values[:batch], cu_seqlens, self.cu_seqlens_kv.to(keys.device)

    def packing(self, cu_seqlens_q: torch.Tensor, total: int) -> Packing:
        """The places of the sequences' new tokens among the `total` tokens of a call in the format "thd"."""
        longest = longest_of(self.max_ctx_len, self.cu_seqlens_q, total)
        return Packing(cu_seqlens_q, None, min(longest, self.max_sequence_length))

    def __repr__(self) -> str:
        return (
            f"InferenceParams(dtype={self.dtype}, max_batch_size={self.max_batch_size}, "
            f"max_sequence_length={self.max_sequence_length}, num_heads_kv={self.num_heads_kv}, "
            f"head_dim_k={self.head_dim_k}, head_dim_v={self.head_dim_v})"
        )
