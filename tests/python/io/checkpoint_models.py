"""A small transformer of plain modules, and its checkpoint, for tests of quire.io."""

from pathlib import Path

import torch

import quire
from python.io.checkpoint_files import BF16, F32, Files, Tensors, modelopt_config, modelopt_nvfp4, plain_scales

HIDDEN, FFN, EXPERTS, VOCABULARY, LAYERS = 64, 96, 4, 50, 2
INPUT_SCALE = 0.05
QKV = {"q_proj": 64, "k_proj": 32, "v_proj": 32}


class Attention(torch.nn.Module):
    """Not attention, but with its layers."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        if fused:
            self.qkv_proj = torch.nn.Linear(HIDDEN, sum(QKV.values()))
        else:
            for name, rows in QKV.items():
                setattr(self, name, torch.nn.Linear(HIDDEN, rows))
        self.o_proj = torch.nn.Linear(HIDDEN, HIDDEN, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if hasattr(self, "qkv_proj"):
            q, k, v = self.qkv_proj(x).split(list(QKV.values()), -1)
        else:
            q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        return self.o_proj(q * torch.cat([k, v], -1).sigmoid())


class Dense(torch.nn.Module):
    """The experts of a quire.MoE as plain layers, for the reference."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = torch.nn.Linear(HIDDEN, EXPERTS, bias=False)
        each = [("gate_proj", HIDDEN, FFN), ("up_proj", HIDDEN, FFN), ("down_proj", FFN, HIDDEN)]
        self.experts = torch.nn.ModuleList(
            torch.nn.ModuleDict({name: torch.nn.Linear(k, n, bias=False) for name, k, n in each})
            for _ in range(EXPERTS)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores, chosen = self.gate(x).softmax(-1).topk(2)
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            h = torch.nn.functional.silu(expert["gate_proj"](x)) * expert["up_proj"](x)
            y = y + expert["down_proj"](h) * (scores * (chosen == number)).sum(-1, keepdim=True)
        return y


class Block(torch.nn.Module):
    def __init__(self, fused: bool, mixture: torch.nn.Module) -> None:
        super().__init__()
        self.input_layernorm = torch.nn.RMSNorm(HIDDEN)
        self.self_attn = Attention(fused)
        self.mlp = mixture

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.input_layernorm(x))


class Model(torch.nn.Module):
    def __init__(self, *, fused: bool = False, single: bool = False, dense: bool = False, tied: bool = True) -> None:
        super().__init__()
        self.model = torch.nn.Module()
        self.model.embed_tokens = torch.nn.Embedding(VOCABULARY, HIDDEN)

        def mixture() -> torch.nn.Module:
            options = {"single_grouped_weight": single, "softmax_after_topk": False, "renormalize": False}
            return Dense() if dense else quire.MoE(HIDDEN, FFN, EXPERTS, **options)

        self.model.layers = torch.nn.ModuleList(Block(fused, mixture()) for _ in range(LAYERS))
        self.model.norm = torch.nn.RMSNorm(HIDDEN)
        self.lm_head = torch.nn.Linear(HIDDEN, VOCABULARY, bias=False)
        if tied:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.model.embed_tokens(tokens)
        for layer in self.model.layers:
            x = layer(x)
        return self.lm_head(self.model.norm(x))


def files(*, static: bool = True) -> Files:
    """Each layer has a global scale of its own; those of gate and up differ by 2. static: layers have scales of inputs,
    alike for those that read the same input."""
    torch.manual_seed(1)
    found: Tensors = {"model.embed_tokens.weight": torch.randn(VOCABULARY, HIDDEN).to(BF16)}
    values = {}

    def add(stem: str, rows: int, columns: int, scale: float, bias: bool = False) -> None:
        scales = plain_scales(rows, columns // 16, seed=len(found))
        tensors, value = modelopt_nvfp4(stem, rows, columns, scale2=scale, scales=scales)
        tensors[f"{stem}.input_scale"] = torch.tensor(INPUT_SCALE, dtype=F32)
        if not static:
            del tensors[f"{stem}.input_scale"]
        found.update(tensors)
        values[f"{stem}.weight"] = value
        if bias:
            found[f"{stem}.bias"] = torch.randn(rows).to(BF16)

    for layer in range(LAYERS):
        outer = f"model.layers.{layer}"
        found[f"{outer}.input_layernorm.weight"] = torch.rand(HIDDEN).to(BF16) + 0.5
        for number, (name, rows) in enumerate(QKV.items()):
            add(f"{outer}.self_attn.{name}", rows, HIDDEN, 0.0004 * (number + 1.1), bias=True)
        add(f"{outer}.self_attn.o_proj", HIDDEN, HIDDEN, 0.0005)
        found[f"{outer}.self_attn.k_proj.k_scale"] = torch.tensor(0.5)
        found[f"{outer}.mlp.gate.weight"] = torch.randn(EXPERTS, HIDDEN).to(BF16)
        for e in range(EXPERTS):
            expert = f"{outer}.mlp.experts.{e}"
            add(f"{expert}.gate_proj", FFN, HIDDEN, 0.0003 * (e + 1))
            add(f"{expert}.up_proj", FFN, HIDDEN, 0.0006 * (e + 1))
            add(f"{expert}.down_proj", HIDDEN, FFN, 0.0005)
    found["model.norm.weight"] = torch.ones(HIDDEN).to(BF16)
    return Files(found, modelopt_config("NVFP4" if static else "W4A16_NVFP4", group_size=16), values)


def reference(checkpoint: Files) -> Model:
    """The model in float32, of values that formulas give."""
    model = Model(dense=True)
    state = {name: tensor.float() for name, tensor in checkpoint.tensors.items() if tensor.dtype in (BF16, F32)}
    state |= {name: torch.from_numpy(value) for name, value in checkpoint.values.items()}
    kept = {name: state[name] for name in model.state_dict() if name in state}
    missing, unexpected = model.load_state_dict(kept, strict=False)
    assert missing == ["lm_head.weight"] and not unexpected
    return model


def tokens(count: int = 12) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (count,), generator=torch.Generator().manual_seed(2))


def write(folder: Path, **options: bool) -> Path:
    return files(**options).write(folder, 3)
