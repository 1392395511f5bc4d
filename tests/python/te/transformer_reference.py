"""A transformer layer in float64, from its parameters, by what TransformerEngine's documentation says of options."""

import math

import torch

from python.te.attention_reference import attention

EPS = 1e-5


def rotate(x, angles, interleaved=False):
    """x [..., d] times exp(i * angles), angles [..., d / 2]: features 2i and 2i + 1, or i and i + d / 2, are the real
    and the imaginary part of a complex number."""
    real, imaginary = (x[..., ::2], x[..., 1::2]) if interleaved else x.double().chunk(2, dim=-1)
    turned = torch.complex(real.double(), imaginary.double()) * torch.polar(torch.ones_like(angles), angles)
    y = torch.empty_like(x, dtype=torch.float64)
    half = x.shape[-1] // 2
    parts = (slice(0, None, 2), slice(1, None, 2)) if interleaved else (slice(0, half), slice(half, None))
    y[..., parts[0]], y[..., parts[1]] = turned.real, turned.imag
    return y


def angles_of(positions, d, base=10000.0):
    """float64 [*positions.shape, d / 2]."""
    return positions.double()[..., None] / torch.tensor([base ** (2 * i / d) for i in range(d // 2)]).double()


def tokens(*shape, seed=1):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def close(found, wanted, tolerance=2e-5):
    assert found.shape == wanted.shape
    assert (found.double() - wanted).abs().max() <= tolerance * max(1.0, wanted.abs().max())


class Reference:
    """parameters: name -> float64 tensor. options: of the layer. rotary: queries and keys are turned by positions."""

    def __init__(self, parameters, hidden, heads, options, rotary=False):
        self.parameters, self.heads, self.options, self.rotary = parameters, heads, options, rotary
        self.groups, self.dim = options.get("num_gqa_groups", heads), hidden // heads

    def layer(self, x, encoded=None):
        """x [b, s, hidden] -> the same shape; encoded: the encoder's output."""
        on_normed = self.options.get("apply_residual_connection_post_layernorm", False)
        normed = x if self.options.get("output_layernorm") else self.norm(x, "self_attention.layernorm_qkv.layer_norm_")
        q, k, v = self.self_projections(normed)
        attended = self.attend("self_attention.", q, k, v, causal=True)
        mlp = "layernorm_mlp.layer_norm_"
        if self.options.get("parallel_attention_mlp"):
            return x + attended + self.mlp(self.norm(x, mlp))
        x = (normed if on_normed else x) + attended
        if self.options.get("layer_type") == "decoder":
            normed = self.norm(x, "inter_attention.layernorm_query.layer_norm_")
            q = self.heads_of(self.part(normed, "inter_attention.layernorm_query.", "query_"))
            x = (normed if on_normed else x) + self.attend("inter_attention.", q, *self.cross(encoded), causal=False)
        normed = self.norm(x, mlp)
        x = (normed if on_normed else x) + self.mlp(normed)
        return self.norm(x, "layernorm.") if self.options.get("output_layernorm") else x

    def linear(self, x, weight, bias):
        y = x @ self.parameters[weight].T
        return y + self.parameters[bias] if bias in self.parameters else y

    def part(self, x, layer, name=""):
        name = name if layer + name + "weight" in self.parameters else ""
        return self.linear(x, f"{layer}{name}weight", f"{layer}{name}bias")

    def heads_of(self, x):
        return x.unflatten(-1, (-1, self.dim))

    def self_projections(self, x):
        layer = "self_attention." + ("qkv." if self.options.get("output_layernorm") else "layernorm_qkv.")
        if not self.options.get("fuse_qkv_params"):
            return [self.heads_of(self.part(x, layer, name)) for name in ("query_", "key_", "value_")]
        rows, share = self.heads_of(self.part(x, layer)), self.heads // self.groups
        if not self.options.get("qkv_weight_interleaved", True):
            return rows.split([self.heads, self.groups, self.groups], dim=-2)
        of_queries = [g * (share + 2) + i for g in range(self.groups) for i in range(share)]
        last = [g * (share + 2) + share for g in range(self.groups)]
        return rows[..., of_queries, :], rows[..., last, :], rows[..., [i + 1 for i in last], :]

    def cross(self, encoded):
        layer = "inter_attention.key_value."
        if not self.options.get("fuse_qkv_params"):
            return [self.heads_of(self.part(encoded, layer, name)) for name in ("key_", "value_")]
        rows = self.heads_of(self.part(encoded, layer))
        if not self.options.get("qkv_weight_interleaved", True):
            return rows[..., : self.groups, :], rows[..., self.groups :, :]
        return rows[..., 0::2, :], rows[..., 1::2, :]

    def attend(self, prefix, q, k, v, causal):
        before = self.options.get("qk_norm_before_rope", False)
        q, k = (self.head_norm(t, prefix + name) if before else t for t, name in ((q, "q_norm."), (k, "k_norm.")))
        if self.rotary:
            interleaved = self.options.get("rotary_pos_interleaved", False)
            q, k = (rotate(t, angles_of(torch.arange(t.shape[1]), self.dim)[:, None], interleaved) for t in (q, k))
        q, k = (t if before else self.head_norm(t, prefix + name) for t, name in ((q, "q_norm."), (k, "k_norm.")))
        y = attention(q, k, v, lambda b, i, j: j <= i or not causal).flatten(2)
        return self.part(y, prefix + "proj.")

    def head_norm(self, x, name):
        kind, eps = self.options.get("qk_norm_type"), self.options.get("qk_norm_eps", 1e-6)
        if kind is None:
            return x
        if kind == "L2Normalization":
            return x / (x.square().sum(-1, keepdim=True) + eps).sqrt()
        return self.normalized(x, kind, eps) * self.parameters[name + "weight"] + self.parameters.get(name + "bias", 0)

    def norm(self, x, name):
        gain = self.parameters[name + "weight"] + (1 if self.options.get("zero_centered_gamma") else 0)
        y = self.normalized(x, self.options.get("normalization", "LayerNorm"), EPS) * gain
        return y + self.parameters.get(name + "bias", 0)

    def normalized(self, x, kind, eps):
        x = x - x.mean(-1, keepdim=True) if kind == "LayerNorm" else x
        return x / (x.square().mean(-1, keepdim=True) + eps).sqrt()

    def mlp(self, x):
        x = self.linear(x, "layernorm_mlp.fc1_weight", "layernorm_mlp.fc1_bias")
        if self.options.get("activation", "gelu") == "swiglu":
            gate, x = x.chunk(2, dim=-1)
            x = x * gate / (1 + (-gate).exp())
        else:
            x = x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2
        return self.linear(x, "layernorm_mlp.fc2_weight", "layernorm_mlp.fc2_bias")
