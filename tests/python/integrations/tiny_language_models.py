"""Language models of transformers of a few thousand parameters, and quantized checkpoints of them whose bytes are drawn
at random: every code and scale that a format has may occur, whatever a quantizer would write."""

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
from safetensors.torch import save_file  # noqa: E402

SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "dtype": "bfloat16",
}
#: Name -> class of model, configuration.
FAMILIES = {
    "llama": ("Llama", {"intermediate_size": 96}),
    "mixtral": ("Mixtral", {"intermediate_size": 96, "num_local_experts": 4}),
    "qwen3_moe": (
        "Qwen3Moe",
        {"intermediate_size": 96, "moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2},
    ),
    "gpt_oss": ("GptOss", {"intermediate_size": 96, "num_local_experts": 4, "num_experts_per_tok": 2}),
}


def config_of(family: str, **options: object):
    kind, own = FAMILIES[family]
    return getattr(transformers, f"{kind}Config")(**SIZES, **own, **options)


def model_of(family: str, seed: int = 0, dtype: torch.dtype = torch.float32, **options: object):
    """options: of the configuration."""
    torch.manual_seed(seed)
    model = getattr(transformers, f"{FAMILIES[family][0]}ForCausalLM")(config_of(family, **options)).eval()
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)  # buffers of positions stay float32, as in from_pretrained
    return model


def tokens(rows: int = 2, columns: int = 12) -> torch.Tensor:
    return torch.randint(3, 64, (rows, columns), generator=torch.Generator().manual_seed(1))


def layers_of(family: str) -> dict[str, tuple[int, int]]:
    """Name of each layer in a file -> its shape."""
    found = {}
    for i in range(2):
        block = f"model.layers.{i}"
        found |= {f"{block}.self_attn.{name}_proj": (64, 64) for name in "qo"}
        found |= {f"{block}.self_attn.{name}_proj": (32, 64) for name in "kv"}
        if family == "llama":
            found |= {f"{block}.mlp.{name}_proj": (96, 64) for name in ("gate", "up")}
            found[f"{block}.mlp.down_proj"] = (64, 96)
        for e in range(4 if family != "llama" else 0):
            if family == "mixtral":
                expert, inner, names = f"{block}.block_sparse_moe.experts.{e}", 96, ("w1", "w3", "w2")
            else:
                expert, inner, names = f"{block}.mlp.experts.{e}", 32, ("gate_proj", "up_proj", "down_proj")
            found |= {f"{expert}.{name}": (inner, 64) for name in names[:2]}
            found[f"{expert}.{names[2]}"] = (64, inner)
    return found


def plain_of(family: str) -> dict[str, torch.Tensor]:
    """What is not quantized, in bfloat16."""
    draw = torch.Generator().manual_seed(5)
    shapes = {"model.embed_tokens.weight": (64, 64), "lm_head.weight": (64, 64), "model.norm.weight": (64,)}
    for i in range(2):
        block = f"model.layers.{i}"
        shapes |= {f"{block}.{name}_layernorm.weight": (64,) for name in ("input", "post_attention")}
        if family == "mixtral":
            shapes[f"{block}.block_sparse_moe.gate.weight"] = (4, 64)
        elif family == "qwen3_moe":
            shapes[f"{block}.mlp.gate.weight"] = (4, 64)
            shapes |= {f"{block}.self_attn.{name}_norm.weight": (16,) for name in "qk"}
    return {
        name: (
            torch.rand(shape, generator=draw) + 0.5 if len(shape) == 1 else 0.1 * torch.randn(shape, generator=draw)
        ).to(torch.bfloat16)
        for name, shape in shapes.items()
    }


def _e4m3(shape: tuple[int, ...], draw: torch.Generator, most: int = 256) -> torch.Tensor:
    """All codes but NaN."""
    codes = torch.randint(0, most, shape, generator=draw, dtype=torch.int32)
    return codes.where((codes & 0x7F) != 0x7F, 0).to(torch.uint8).view(torch.float8_e4m3fn)


def quantized_of(algorithm: str, shape: tuple[int, int], draw: torch.Generator) -> dict[str, torch.Tensor]:
    """Suffix -> tensor of a layer as ModelOpt writes it."""
    rows, columns = shape
    small = torch.rand((rows,), generator=draw) * 1e-3 + 1e-4
    match algorithm:
        case "MXFP8":
            exponents = torch.randint(110, 119, (rows, columns // 32), generator=draw, dtype=torch.uint8)
            return {"weight": _e4m3(shape, draw), "weight_scale": exponents}
        case "FP8_PER_CHANNEL_PER_TOKEN":
            return {"weight": _e4m3(shape, draw), "weight_scale": small}
        case "FP8":
            return {"weight": _e4m3(shape, draw), "weight_scale": small[0], "input_scale": 30 * small[1]}
        case "NVFP4":
            codes = torch.randint(0, 256, (rows, columns // 2), generator=draw, dtype=torch.uint8)
            return {
                "weight": codes,
                "weight_scale": _e4m3((rows, columns // 16), draw, 0x7F),
                "weight_scale_2": small[0] * 0.1,
                "input_scale": small[1],
            }
    raise ValueError(algorithm)


_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])


def values_of(layer: dict[str, torch.Tensor]) -> torch.Tensor:
    """The float32 values of such a layer, by ModelOpt's formulas."""
    weight, scale = layer["weight"], layer["weight_scale"]
    if "weight_scale_2" in layer:
        codes = torch.stack([weight & 15, weight >> 4], -1).flatten(1)
        scales = scale.float() * layer["weight_scale_2"]
        return _E2M1[codes.int()] * scales.repeat_interleave(16, 1)
    if scale.dtype == torch.uint8:
        return weight.float() * torch.exp2(scale.float() - 127).repeat_interleave(32, 1)
    return weight.float() * (scale if scale.dim() == 0 else scale[:, None])


def write_modelopt(folder: Path, family: str, algorithm: str) -> dict[str, dict[str, torch.Tensor]]:
    """Writes a checkpoint, and returns its quantized layers."""
    folder.mkdir()
    draw = torch.Generator().manual_seed(3)
    layers = {name: quantized_of(algorithm, shape, draw) for name, shape in layers_of(family).items()}
    tensors = {f"{name}.{part}": value for name, each in layers.items() for part, value in each.items()}
    if algorithm in ("FP8", "NVFP4"):  # of the cache of keys and values, which is nobody's weight
        tensors["model.layers.0.self_attn.k_proj.k_scale"] = torch.tensor(0.125)
    save_file(tensors | plain_of(family), folder / "model.safetensors", {"format": "pt"})
    config = json.loads(config_of(family).to_json_string(use_diff=False))
    config["architectures"] = [f"{FAMILIES[family][0]}ForCausalLM"]
    config["quantization_config"] = {
        "quant_method": "modelopt",
        "quant_algo": algorithm,
        "producer": {"name": "modelopt", "version": "0.47.0"},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return layers
