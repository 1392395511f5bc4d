"""A small GPT over bytes, written the usual way; only the name of the Linear class tells that it can be quantized.

Nothing in the model mentions a recipe. `quire.Linear` is an ordinary Linear until a recipe is active, so one piece of
code serves the high-precision baseline and every recipe, and their checkpoints have the same keys. The embeddings and
the output head stay `torch.nn` modules: they are a small part of the work and the part most sensitive to rounding.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from data import VOCABULARY
from settings import Settings
from torch import nn

import quire
from quire.distributed import Parallel

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def rotary_angles(seq: int, width: int) -> torch.Tensor:
    """Cosines and sines of rotary position embedding, [2, seq, width / 2] float32."""
    frequency = 10000.0 ** (-torch.arange(0, width, 2) / width)
    angle = torch.outer(torch.arange(seq), frequency)
    return torch.stack([angle.cos(), angle.sin()])


def rotate(x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    """x [batch, heads, seq, width] with each pair of channels turned by an angle that grows with the position."""
    cos, sin = rotation.to(x.dtype)
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class Network(nn.Module):
    """Two layers with a GELU between, four times as wide inside."""

    def __init__(self, width: int, column: Parallel | None = None, row: Parallel | None = None):
        super().__init__()
        self.up = quire.Linear(width, 4 * width, parallel=column)
        self.down = quire.Linear(4 * width, width, parallel=row)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x), approximate="tanh"))


def mixture(width: int, experts: int) -> nn.Module:
    """Experts half as wide as Network is inside, of which each token takes two."""
    return quire.MoE(width, 2 * width, experts, top_k=2, activation="gelu", renormalize=True)


class Block(nn.Module):
    """Attention, and a network or a mixture of experts, each behind a LayerNorm and added to its input.

    column: how qkv and up are sharded over ranks, by their outputs. row: attention_out and down, by their inputs.
    """

    def __init__(self, settings: Settings, column: Parallel | None = None, row: Parallel | None = None):
        super().__init__()
        width = settings.width
        self.head_width = width // settings.heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = quire.Linear(width, 3 * width, parallel=column and column.of_parts(width, width, width))
        self.attention_out = quire.Linear(width, width, parallel=row)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = mixture(width, settings.moe) if settings.moe else Network(width, column, row)

    def attention(self, x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
        qkv = self.qkv(x)  # if the layer is sharded: all sequences, and some of the heads
        qkv = qkv.view(*qkv.shape[:2], 3, -1, self.head_width)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        q, k = rotate(q, rotation), rotate(k, rotation)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.attention_out(mixed.transpose(1, 2).flatten(2))

    def forward(self, x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), rotation)
        return x + self.mlp(self.mlp_norm(x))


class Gpt(nn.Module):
    """Tokens [batch, seq] (int64) to logits [batch, seq, 256]; `seq` may be anything up to the length trained with."""

    def __init__(self, settings: Settings, column: Parallel | None = None, row: Parallel | None = None):
        super().__init__()
        self.seq = settings.seq
        self.tokens = nn.Embedding(VOCABULARY, settings.width)
        self.register_buffer(
            "rotation", rotary_angles(settings.seq, settings.width // settings.heads), persistent=False
        )
        self.blocks = nn.ModuleList(Block(settings, column, row) for _ in range(settings.layers))
        self.norm = nn.LayerNorm(settings.width)
        self.head = nn.Linear(settings.width, VOCABULARY, bias=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """GPT-2's start: small normal weights, smaller still where a product is added to the residual stream."""
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
            elif parameter.dim() == 2:
                residual = name.endswith(("attention_out.weight", "down.weight")) or ".fc2." in name
                parameter.normal_(std=0.02 / (2 * len(self.blocks)) ** 0.5 if residual else 0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        rotation = self.rotation[:, : tokens.shape[1]]
        for block in self.blocks:
            x = block(x, rotation)
        return self.head(self.norm(x))


def make_logits(model: Gpt, recipe: object | None, dtype: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """The model as a function from tokens to logits, in `dtype`, its blocks in `recipe` (None: no quantization).

    Parameters are always float32. `torch.autocast` sets the dtype of activations and products, `quire.autocast` says
    which of them are quantized. Both are entered inside the function, so that a compiled graph contains them.
    """
    bf16 = DTYPES[dtype] == torch.bfloat16

    def logits(tokens: torch.Tensor) -> torch.Tensor:
        with (
            torch.autocast(tokens.device.type, dtype=torch.bfloat16, enabled=bf16),
            quire.autocast(enabled=recipe is not None, recipe=recipe),
        ):
            return model(tokens)

    return logits


def make_loss(model: Gpt, recipe: object | None, dtype: str) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """The mean cross entropy (float32, nats per byte) as a function of inputs and targets [batch, seq]."""
    logits = make_logits(model, recipe, dtype)

    def loss(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits(tokens).float().flatten(0, 1), targets.flatten())

    return loss
