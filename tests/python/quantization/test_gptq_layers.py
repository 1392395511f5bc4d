"""GPTQ of layers with several matmuls or groups: the codes of an equal model of plain layers."""

import pytest
import torch
from torch import nn

import quire
from quire.functional import activation
from quire.moe import permute, route, unpermute

pytestmark = [pytest.mark.any_device, pytest.mark.filterwarnings("ignore:quire.quantize_model")]

WIDTH, FFN, EXPERTS = 64, 48, 4
RECIPES = ["nvfp4", "x=none,w=mxfp4", "x=fp8_row,w=fp8_block:128x128,dy=mxfp8"]


class Normed(nn.Module):
    """LayerNormLinear in parts, under its names."""

    def __init__(self, layer: quire.LayerNormLinear) -> None:
        super().__init__()
        self.norm = quire.LayerNorm(WIDTH)
        self.norm.load_state_dict({"weight": layer.layer_norm_weight, "bias": layer.layer_norm_bias})
        self.linear = plain(layer.weight, layer.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.norm(x))

    def pairs(self, layer: quire.LayerNormLinear) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [(layer.weight, self.linear.weight)]


class Mlp(nn.Module):
    """LayerNormMLP in parts."""

    def __init__(self, layer: quire.LayerNormMLP) -> None:
        super().__init__()
        self.norm = quire.RMSNorm(WIDTH)
        self.norm.load_state_dict({"weight": layer.layer_norm_weight})
        self.fc1, self.fc2 = plain(layer.fc1_weight, layer.fc1_bias), plain(layer.fc2_weight, layer.fc2_bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.fc1(self.norm(x))
        return self.fc2(activation(h, "swiglu", h.dtype)[0])

    def pairs(self, layer: quire.LayerNormMLP) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [(layer.fc1_weight, self.fc1.weight), (layer.fc2_weight, self.fc2.weight)]


class Groups(nn.Module):
    """GroupedLinear as a layer for each group."""

    def __init__(self, layer: quire.GroupedLinear) -> None:
        super().__init__()
        self.each = nn.ModuleList(plain(w, None) for w in layer.group_weights(""))

    def forward(self, x: torch.Tensor, splits: list[int]) -> torch.Tensor:
        return torch.cat([layer(rows) for layer, rows in zip(self.each, x.split(splits), strict=True)])

    def pairs(self, layer: quire.GroupedLinear) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [(w, one.weight) for w, one in zip(layer.group_weights(""), self.each, strict=True)]


class Mixture(nn.Module):
    """MoE with a layer for each expert."""

    def __init__(self, layer: quire.MoE) -> None:
        super().__init__()
        self.router = layer.router.weight.detach().clone()
        self.fc1, self.fc2 = Groups(layer.fc1), Groups(layer.fc2)
        self.shared_fc1, self.shared_fc2 = plain(layer.shared_fc1.weight, None), plain(layer.shared_fc2.weight, None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, ids = route(x @ self.router.T, 2)
        rows, offsets, row_map = permute(x, ids, EXPERTS)
        splits = offsets.diff(prepend=offsets.new_zeros(1)).tolist()
        h = self.fc1(rows, splits)
        y = unpermute(self.fc2(activation(h, "swiglu", h.dtype)[0], splits), row_map, weights)
        h = self.shared_fc1(x)
        return y + self.shared_fc2(activation(h, "swiglu", h.dtype)[0])

    def pairs(self, layer: quire.MoE) -> list[tuple[torch.Tensor, torch.Tensor]]:
        shared = [(getattr(layer, name).weight, getattr(self, name).weight) for name in ("shared_fc1", "shared_fc2")]
        return self.fc1.pairs(layer.fc1) + self.fc2.pairs(layer.fc2) + shared


def plain(weight: torch.Tensor, bias: torch.Tensor | None) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias is not None)
    layer.load_state_dict({"weight": weight} if bias is None else {"weight": weight, "bias": bias})
    return layer.requires_grad_(False)


class Block(nn.Module):
    """Of quire's layers, or of parts of these."""

    def __init__(self, *, single: bool) -> None:
        super().__init__()
        self.normed = quire.LayerNormLinear(WIDTH, WIDTH)
        self.mlp = quire.LayerNormMLP(WIDTH, FFN, activation="swiglu", normalization="RMSNorm")
        self.grouped = quire.GroupedLinear(3, WIDTH, WIDTH, bias=False, single_grouped_weight=single)
        self.moe = quire.MoE(WIDTH, FFN, EXPERTS, shared_ffn_hidden_size=FFN, single_grouped_weight=single)
        self.requires_grad_(False)

    def in_parts(self) -> nn.Module:
        made = Block.__new__(Block)
        nn.Module.__init__(made)
        made.normed, made.mlp, made.grouped = Normed(self.normed), Mlp(self.mlp), Groups(self.grouped)
        made.moe = Mixture(self.moe)
        return made

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.mlp(self.normed(x))
        return self.moe(self.grouped(x, [len(x) // 2, 0, len(x) - len(x) // 2]))

    def pairs(self, other: nn.Module) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [pair for name, layer in other.named_children() for pair in layer.pairs(getattr(self, name))]


@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
def test_layers_of_several_matmuls_get_the_codes_of_plain_layers(recipe, single):
    torch.manual_seed(0)
    blocks = [Block(single=single) for _ in range(2)]
    model, parts = nn.Sequential(*blocks), nn.Sequential(*(block.in_parts() for block in blocks))
    nearest = nn.Sequential(*(block.in_parts() for block in blocks))
    batches = [torch.randn(40, WIDTH), torch.randn(23, WIDTH)]
    quire.quantize_model(model, recipe, batches, "gptq")
    quire.quantize_model(parts, recipe, batches, "gptq")
    quire.quantize_model(nearest, recipe)
    pairs = [pair for block, other in zip(model, parts, strict=True) for pair in block.pairs(other)]
    assert len(pairs) == 2 * (1 + 2 + 3 + 2 * EXPERTS + 2)
    assert all(isinstance(w, quire.QuantizedTensor) and torch.equal(w.dequantize(), p.dequantize()) for w, p in pairs)
    rounded = [pair for block, other in zip(model, nearest, strict=True) for pair in block.pairs(other)]
    assert sum(torch.equal(w.dequantize(), p.dequantize()) for w, p in rounded) == 2  # of groups without rows
    with torch.no_grad():
        assert torch.equal(model(batches[0]), parts(batches[0]))


def test_groups_without_rows_are_named_and_the_model_stays_usable(compiler):
    torch.manual_seed(1)
    model, x = nn.Sequential(Block(single=False), Block(single=True)), torch.randn(12, WIDTH)
    with pytest.warns(UserWarning, match=r"no row of the batches reached 0\.grouped\[1\].*1\.grouped\[1\]"):
        quire.quantize_model(model, "nvfp4", [x], "gptq")
    assert not [m for m in model.modules() if getattr(m, "input_observer", None) is not None or m._forward_pre_hooks]
    with torch.no_grad():
        assert torch.equal(torch.export.export(model, (x,)).module()(x), model(x))


class Experts(nn.Module):
    """As transformers has all experts in one tensor for each layer."""

    def __init__(self, *, is_transposed: bool) -> None:
        super().__init__()
        self.has_gate, self.has_bias, self.is_concatenated, self.num_experts = True, False, True, EXPERTS
        self.is_transposed = is_transposed
        sizes = {"gate_up_proj": (2 * FFN, WIDTH), "down_proj": (WIDTH, FFN)}
        for name, (n, k) in sizes.items():
            shape = (EXPERTS, k, n) if is_transposed else (EXPERTS, n, k)
            setattr(self, name, nn.Parameter(torch.randn(shape) / 8, requires_grad=False))

    def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        y = torch.zeros_like(x)
        for e in range(EXPERTS):
            up, down = self.gate_up_proj[e], self.down_proj[e]
            up, down = (up, down) if self.is_transposed else (up.T, down.T)
            y = y + (self._apply_gate(x @ up) @ down) * (weights * (ids == e)).sum(-1, keepdim=True)
        return y

    def _apply_gate(self, h: torch.Tensor) -> torch.Tensor:
        gate, up = h.chunk(2, -1)
        return nn.functional.silu(gate) * up


class Routed(nn.Module):
    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.experts = experts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ids = torch.arange(len(x))[:, None] % EXPERTS
        return self.experts(x, ids, torch.ones(ids.shape))


@pytest.mark.parametrize("is_transposed", [False, True])
def test_experts_of_another_library_are_quantized_once_they_are_quires(is_transposed):
    torch.manual_seed(2)
    experts = Experts(is_transposed=is_transposed)
    model, x = nn.Sequential(Routed(experts)), torch.randn(40, WIDTH)
    up, down = experts.gate_up_proj.clone(), experts.down_proj.clone()
    up, down = (up.transpose(1, 2), down.transpose(1, 2)) if is_transposed else (up, down)
    with pytest.raises(ValueError, match="'0.experts', a Experts of another library.*quire.convert"):
        quire.quantize_model(model, "nvfp4", [x], "gptq")
    assert quire.calibrate(model, [x], "nvfp4").uncalibrated == ("0.experts",)
    quire.convert(model, min_features=1)
    quire.quantize_model(model, "x=fp8_row,w=nvfp4,dy=mxfp8", [x], "gptq")
    for e in range(EXPERTS):
        rows = x[e::EXPERTS]
        one = nn.Sequential(plain(up[e], None))
        quire.quantize_model(one, "x=fp8_row,w=nvfp4,dy=mxfp8", [rows], "gptq")
        assert torch.equal(experts.gate_up_proj[e].dequantize(), one[0].weight.dequantize())
        assert experts.down_proj[e].dequantize().shape == down[e].shape
