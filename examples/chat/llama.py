"""A Llama language model in plain PyTorch, with a key-value cache of fixed size.

Nothing here knows of quire: a model that exists is what quire.convert and quire.quantize_model are for. Projections of
one input are one matrix, as in inference servers: q, k and v, and gate and up.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

#: Of one layer: keys and values, each [sentences, key-value heads, length, head size].
Cache = list[torch.Tensor]


@dataclass(frozen=True)
class Sizes:
    """Of a model. The names are those of transformers' LlamaConfig."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads


class Attention(nn.Module):
    """Causal attention with rotary positions; several query heads share one key-value head."""

    def __init__(self, sizes: Sizes):
        super().__init__()
        self.heads = [sizes.num_attention_heads, sizes.num_key_value_heads, sizes.num_key_value_heads]
        self.head_dim = sizes.head_dim
        self.qkv_proj = nn.Linear(sizes.hidden_size, sum(self.heads) * sizes.head_dim, bias=False)
        self.o_proj = nn.Linear(sizes.hidden_size, sizes.hidden_size, bias=False)

    def forward(self, x: torch.Tensor, turn: "Turn", cache: Cache | None) -> torch.Tensor:
        heads = self.qkv_proj(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        q, k, v = heads.split(self.heads, dim=1)
        q, k = turn.rotate(q), turn.rotate(k)
        if cache is not None:
            for kept, new in zip(cache, (k, v), strict=True):
                kept.index_copy_(2, turn.positions, new)
            k, v = cache
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=turn.mask, enable_gqa=True)
        return self.o_proj(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, sizes: Sizes):
        super().__init__()
        self.gate_up_proj = nn.Linear(sizes.hidden_size, 2 * sizes.intermediate_size, bias=False)
        self.down_proj = nn.Linear(sizes.intermediate_size, sizes.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up)


class Layer(nn.Module):
    def __init__(self, sizes: Sizes):
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = (
            nn.RMSNorm(sizes.hidden_size, eps=sizes.rms_norm_eps) for _ in range(2)
        )
        self.self_attn, self.mlp = Attention(sizes), MLP(sizes)

    def forward(self, x: torch.Tensor, turn: "Turn", cache: Cache | None) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), turn, cache)
        return x + self.mlp(self.post_attention_layernorm(x))


@dataclass(frozen=True)
class Turn:
    """What all layers of one call share. positions: int64 [T]. mask: bool [T, length], True where a token may look.
    cos, sin: [T, head size]."""

    positions: torch.Tensor
    mask: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor

    def rotate(self, x: torch.Tensor) -> torch.Tensor:
        """x [*, T, head size], whose halves are the two coordinates of each pair."""
        one, other = x.chunk(2, dim=-1)
        return x * self.cos + torch.cat([-other, one], dim=-1) * self.sin


class Llama(nn.Module):
    """tokens int64 [sentences, T] -> logits [sentences, T, vocabulary]. The output layer shares the embedding."""

    def __init__(self, sizes: Sizes):
        super().__init__()
        self.sizes = sizes
        self.embed_tokens = nn.Embedding(sizes.vocab_size, sizes.hidden_size)
        self.layers = nn.ModuleList(Layer(sizes) for _ in range(sizes.num_hidden_layers))
        self.norm = nn.RMSNorm(sizes.hidden_size, eps=sizes.rms_norm_eps)
        self.lm_head = nn.Linear(sizes.hidden_size, sizes.vocab_size, bias=False)
        self.lm_head.weight = self.embed_tokens.weight
        # Not a buffer, which would follow model.bfloat16(): angles need more bits.
        self.frequencies = [sizes.rope_theta ** (-i / sizes.head_dim) for i in range(0, sizes.head_dim, 2)] * 2

    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor | None = None, caches: list[Cache] | None = None
    ) -> torch.Tensor:
        """positions: int64 [T], of the tokens in their sentence. Without caches: 0 to T - 1. caches: of new_caches(),
        which have the tokens before, and then these ones too."""
        x, turn = self.embed_tokens(tokens), self._turn(tokens, positions, caches)
        for i, layer in enumerate(self.layers):
            x = layer(x, turn, None if caches is None else caches[i])
        return self.lm_head(self.norm(x))

    def _turn(self, tokens: torch.Tensor, positions: torch.Tensor | None, caches: list[Cache] | None) -> Turn:
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        length = tokens.shape[1] if caches is None else caches[0][0].shape[2]
        mask = torch.arange(length, device=tokens.device) <= positions[:, None]
        angles = positions[:, None] * torch.tensor(self.frequencies, device=tokens.device)
        dtype = self.embed_tokens.weight.dtype
        return Turn(positions, mask, angles.cos().to(dtype), angles.sin().to(dtype))

    def new_caches(self, length: int, sentences: int = 1) -> list[Cache]:
        """Empty caches for `length` tokens, one for each layer."""
        shape = (sentences, self.sizes.num_key_value_heads, length, self.sizes.head_dim)
        like = self.embed_tokens.weight
        return [
            [torch.zeros(shape, dtype=like.dtype, device=like.device) for _ in range(2)]
            for _ in range(len(self.layers))
        ]

    def load_transformers(self, state_dict: Mapping[str, torch.Tensor]) -> "Llama":
        """Loads the state dict of a LlamaForCausalLM of transformers with tied embeddings."""
        ours = {}
        for name, tensor in state_dict.items():
            ours[name.removeprefix("model.")] = tensor
        for i in range(len(self.layers)):
            for joined, parts in (("self_attn.qkv", "qkv"), ("mlp.gate_up", ("gate", "up"))):
                prefix = f"layers.{i}.{joined.split('.')[0]}"
                each = [ours.pop(f"{prefix}.{part}_proj.weight") for part in parts]
                ours[f"layers.{i}.{joined}_proj.weight"] = torch.cat(each)
        ours.setdefault("lm_head.weight", ours["embed_tokens.weight"])
        self.load_state_dict(ours)
        return self


@torch.no_grad()
def generate(step, caches: list[Cache], prompt: list[int], limit: int, end: int) -> list[int]:
    """Greedily, up to `limit` tokens or the token `end`. step(tokens, positions, caches) -> logits: the model, or the
    same compiled. The prompt is read one token at a time too, so that there is one graph."""
    made: list[int] = []
    for position in range(len(prompt) + limit - 1):
        token = prompt[position] if position < len(prompt) else made[-1]
        logits = step(torch.tensor([[token]]), torch.tensor([position]), caches)
        if position >= len(prompt) - 1:
            made.append(int(logits[0, -1].argmax()))
            if made[-1] == end:
                break
    return made
