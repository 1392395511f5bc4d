"""A model that quantize_model has quantized is written in every dialect that holds its recipe, and read with the same
bits; other dialects refuse it in words."""

import itertools
import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import quire
from python.io.checkpoint_files import raw
from quire import io
from steps import products_checked

pytestmark = pytest.mark.any_device

DIALECTS = (
    "modelopt",
    "compressed-tensors",
    "deepseek",
    "autofp8",
    "comfyui",
    "fbgemm_fp8",
    "gpt_oss",
    "torchao",
    "gguf",
    "te",
    "quire",
)
FP8 = ("modelopt", "compressed-tensors", "deepseek")
#: Recipe -> dialects that hold weights and inputs, dialects that hold the weights alone and say so.
HOLD = {
    "fp8_current": (("compressed-tensors", "deepseek", "autofp8", "comfyui", "torchao"), ("modelopt", "fbgemm_fp8")),
    "fp8_block": (("deepseek",), ("modelopt", "compressed-tensors", "torchao")),
    "mxfp8": ((*FP8, "comfyui", "torchao"), ()),
    "mxfp4": (("compressed-tensors", "torchao"), ("deepseek",)),
    "nvfp4": ((), ()),
    "x=fp8_row,w=fp8_row,dy=mxfp8": (("modelopt", "compressed-tensors", "fbgemm_fp8", "torchao"), ()),
    "x=fp8_block,w=fp8_block:128x128,dy=mxfp8": (("compressed-tensors", "deepseek"), ("modelopt", "torchao")),
    "x=fp8_tensor:given,w=fp8_tensor,dy=mxfp8": ((*FP8, "autofp8", "comfyui"), ()),
    "x=fp8_tensor:given,w=fp8_row,dy=mxfp8": (("modelopt", "compressed-tensors"), ()),
    "x=nvfp4:global=mul:given,w=nvfp4:global=mul,dy=mxfp8": (("modelopt", "comfyui", "torchao"), ()),
    "x=nvfp4:global=div:given,w=nvfp4:global=div,dy=mxfp8": (("compressed-tensors",), ()),
    "x=nvfp4:given,w=nvfp4:global=mul,dy=mxfp8": ((), ()),
    "x=fp8_tensor:given,w=nvfp4:global=mul,dy=mxfp8": (("modelopt",), ("comfyui", "torchao")),
    "x=nvfp4,w=nvfp4:global=mul,dy=mxfp8": (("comfyui", "torchao"), ("modelopt",)),
    "x=nvfp4:global=mul,w=nvfp4:global=mul,dy=mxfp8": ((), ("modelopt", "comfyui", "torchao")),
    "x=none,w=nvfp4:global=mul": (("modelopt", "comfyui", "torchao"), ()),
    "x=none,w=nvfp4:global=div": (("compressed-tensors",), ()),
    "x=none,w=nvfp4:4over6=mse:256:global=mul": (("modelopt", "comfyui", "torchao"), ()),
    "x=none,w=nvfp4:16x16:global=mul": (("modelopt", "comfyui", "torchao"), ()),
    "x=none,w=nvfp4:row_scaled:global=mul": ((), ()),
    "x=none,w=mxfp8": (("compressed-tensors", "comfyui", "torchao"), ("modelopt", "deepseek")),
    "x=none,w=mxfp8:32x32": (("compressed-tensors", "comfyui", "torchao"), ("modelopt", "deepseek")),
    "x=none,w=mxfp8:e5m2": (("torchao",), ()),
    "x=none,w=mxfp4": (("compressed-tensors", "torchao"), ("deepseek",)),
    "x=fp8_block:pow2,w=mxfp4,dy=mxfp8": (("deepseek",), ("compressed-tensors", "torchao")),
    "x=none,w=fp8_block:128x128": (("modelopt", "compressed-tensors", "torchao"), ("deepseek",)),
    "x=none,w=fp8_block": ((), ()),
    "x=none,w=fp8_row": (("compressed-tensors", "torchao"), ("modelopt", "fbgemm_fp8")),
    "x=none,w=fp8_tensor": (
        ("compressed-tensors", "comfyui", "torchao"),
        ("modelopt", "deepseek", "autofp8", "fbgemm_fp8"),
    ),
}
#: What has a factor where quire has a divisor, or the other way round: exact for scales whose inverse comes back.
INVERTED = {("modelopt", "div"), ("compressed-tensors", "mul"), ("torchao", "div"), ("comfyui", "div")}
PAIRS = list(itertools.product(HOLD, DIALECTS))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(64, 256), nn.Linear(256, 64, bias=False), nn.LayerNorm(64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.down(torch.relu(self.up(x))))


def quantized(recipe: str, model: nn.Module, x: torch.Tensor) -> nn.Module:
    return quire.quantize_model(model, recipe, [x] if ":given" in recipe else None)


def inputs() -> torch.Tensor:
    return torch.randn(9, 64, generator=torch.Generator().manual_seed(3))


def same_values(one: quire.QuantizedTensor, other: quire.QuantizedTensor) -> bool:
    """Bytes of codes and scales, wherever they lie."""
    values = [q.dequantize(torch.float32) for q in (one, other)]
    return torch.equal(*values)


def check_inverted(model: Model, dialect: str, folder: Path) -> None:
    """Codes and scales of blocks stay, and the scale above them is the inverse, which is rounded: values of one and the
    other have at most 2 + 1 + 1 roundings between them, as a value of the table times a block's scale is exact."""
    io.save(model, folder, dialect=dialect, exact=False)
    other = Model()
    io.load(other, folder)
    for name in ("up", "down"):
        one, two = (getattr(m, name).weight.detach() for m in (model, other))
        assert torch.equal(two.rowwise_amax, 1 / one.rowwise_amax)
        one, two = one.dequantize(torch.float32), two.dequantize(torch.float32)
        assert bool(((one - two).abs() <= one.abs() * 2.0**-22).all()) and one.abs().max() > 0.05


@pytest.mark.parametrize(("recipe", "dialect"), PAIRS)
def test_what_a_dialect_holds_is_read_back_and_the_rest_refused(recipe, dialect, tmp_path):
    torch.manual_seed(0)
    model, x = Model().requires_grad_(False), inputs()
    quantized(recipe, model, x)
    exact, weights = HOLD[recipe]
    words = model.up.recipe.weight_spec.split(":")
    if any(dialect == name and f"global={way}" in words and "row_scaled" not in words for name, way in INVERTED):
        check_inverted(model, dialect, tmp_path)
        return
    if dialect not in (*exact, *weights, "quire"):
        with pytest.raises(io.CheckpointError, match=dialect) as caught:
            io.save(model, tmp_path, dialect=dialect)
        weight = model.up.recipe.weight_spec
        assert weight in caught.value.rule and "quire" in caught.value.remedy and not list(tmp_path.iterdir())
        return
    report = io.save(model, tmp_path / "a", dialect=dialect)
    assert report.layers == 2 and not report.losses and bool(report.notes) == (dialect in weights)
    with torch.device("meta"):
        other = Model()
    io.load(other, tmp_path / "a")
    other.to(x.device)  # what has been on the meta device lies on the CPU
    assert all(same_values(getattr(model, name).weight, getattr(other, name).weight) for name in ("up", "down"))
    with torch.no_grad():
        assert torch.equal(other(x), model(x)) == (dialect not in weights)
    io.save(other, tmp_path / "b")
    assert raw(tmp_path / "b") == raw(tmp_path / "a")
    assert io.verify(tmp_path / "a")


#: Recipe, dialect -> what the error says must be done.
REMEDIES = {
    (
        "x=fp8_tensor:given,w=fp8_tensor,dy=mxfp8",
        "torchao",
    ): "without the option given.*'x=fp8_tensor,w=fp8_tensor,dy=mx",
    ("x=fp8_tensor:given,w=fp8_row,dy=mxfp8", "fbgemm_fp8"): "without the option given.*'x=fp8_row,w=fp8_row,dy=mxfp8'",
    (
        "x=fp8_tensor:given,w=mxfp4,dy=mxfp8",
        "deepseek",
    ): "without the option given.*'x=fp8_block:pow2,w=mxfp4,dy=mxfp8'",
    ("x=none,w=mxfp4", "gpt_oss"): "it has w=mxfp4 for stacks of experts only: leave the layer in high precision",
    ("x=none,w=fp8_row", "gpt_oss"): "it has w=mxfp4: quantize the values again",
}


@pytest.mark.parametrize(("recipe", "dialect"), REMEDIES)
def test_the_remedy_is_one_for_the_layer_and_works(recipe, dialect, tmp_path):
    model, x = Model().requires_grad_(False), inputs()
    quantized(recipe, model, x)
    with pytest.raises(io.CheckpointError) as caught:
        io.save(model, tmp_path, dialect=dialect)
    assert re.search(REMEDIES[recipe, dialect], caught.value.remedy), caught.value.remedy
    assert "calibrate" not in caught.value.remedy
    if other := re.search("such as '(.*)'", caught.value.remedy):
        quire.convert(model, other[1], for_inference=True, tokens=None, min_features=1)
        assert io.save(model, tmp_path, dialect=dialect).layers == 2


def test_the_remedy_for_a_stack_in_a_dialect_of_single_layers_says_so(tmp_path):
    model = nn.ModuleDict({"mlp": quire.MoE(64, 96, 4, 2, activation="clamped_swiglu")}).requires_grad_(False)
    io.save(quantized("x=none,w=mxfp4", model, inputs()), tmp_path / "a", dialect="gpt_oss")
    with pytest.raises(io.CheckpointError, match="a stack of mxfp4.*single layers only: make each expert a layer"):
        io.convert(tmp_path / "a", tmp_path / "b", to="compressed-tensors")


@pytest.mark.parametrize("via", ["the layer's recipe", "activations="])
def test_another_dialect_has_inputs_as_the_loaded_layer_has_them(via, tmp_path):
    """The dialect of the file gets back what it had."""
    model = quantized("x=fp8_tensor:given,w=fp8_tensor,dy=mxfp8", Model().requires_grad_(False), inputs())
    io.save(model, tmp_path / "a", dialect="modelopt")
    other = Model()
    io.load(other, tmp_path / "a", activations="checkpoint" if via == "the layer's recipe" else "fp8_tensor")
    if via == "the layer's recipe":
        quire.convert(other, "x=fp8_tensor,w=fp8_tensor,dy=mxfp8", for_inference=True, tokens=None, min_features=1)
    assert not io.save(other, tmp_path / "b", dialect="torchao").notes
    found = Model()
    io.load(found, tmp_path / "b")
    assert found.up.recipe.input_spec == "fp8_tensor"
    io.save(other, tmp_path / "c")
    assert raw(tmp_path / "c") == raw(tmp_path / "a")


def test_a_report_counts_configurations_only_where_there_are_some(tmp_path):
    model = quantized("mxfp8", Model().requires_grad_(False), inputs())
    lines = {
        name: str(io.save(model, tmp_path / name, dialect=name)).splitlines()[0] for name in ("comfyui", "deepseek")
    }
    assert lines["comfyui"].endswith("; 1 file") and [p.name for p in (tmp_path / "comfyui").iterdir()] == [
        "model.safetensors"
    ]
    assert lines["deepseek"].endswith("; 2 files with the configurations")


@pytest.mark.parametrize(
    ("tensor", "value", "text"),
    [
        ("up.input_scale", 0.0, "a static scale must be finite and positive, got 0.0"),
        ("up.input_scale", torch.inf, "a static scale must be finite and positive, got inf"),
        ("up.weight_scale_2", -1.0, "a global scale must be finite and not negative, got -1.0"),
        ("up.weight_scale_2", torch.nan, "a global scale must be finite and not negative, got nan"),
        ("up.weight_scale_2", 0.0, ""),
    ],
)
def test_a_scale_that_is_no_scale_is_refused_by_its_name(tensor, value, text, tmp_path):
    recipe = "x=nvfp4:global=mul:given,w=nvfp4:global=mul,dy=mxfp8"
    io.save(quantized(recipe, Model().requires_grad_(False), inputs()), tmp_path, dialect="modelopt")
    tensors = load_file(tmp_path / "model.safetensors")
    tensors[tensor] = torch.full_like(tensors[tensor], value)
    save_file(tensors, tmp_path / "model.safetensors")
    if not text:
        io.load(Model(), tmp_path)
        return
    with pytest.raises(io.CheckpointError, match=text):
        io.load(Model(), tmp_path)


@pytest.mark.parametrize(("dialect", "way"), [("modelopt", "mul"), ("compressed-tensors", "div")])
def test_an_amax_becomes_a_global_scale_only_when_rounding_is_accepted(dialect, way, tmp_path):
    torch.manual_seed(0)
    model, x = Model().requires_grad_(False), inputs()
    quantized("x=nvfp4:given,w=nvfp4,dy=mxfp8", model, x)
    with pytest.raises(io.CheckpointError, match=f"{dialect} cannot store the layer exactly.*nvfp4:global={way}"):
        io.save(model, tmp_path / "a", dialect=dialect)
    report = io.save(model, tmp_path / "a", dialect=dialect, exact=False)
    assert {loss.tensor for loss in report.losses} == {"up.weight", "down.weight"}
    other = Model()
    io.load(other, tmp_path / "a")
    for name in ("up", "down"):
        one, two = (getattr(m, name).weight.dequantize(torch.float32) for m in (model, other))
        # amax / 2688 or 2688 / amax is rounded, and once each the products with it: times a block's scale and a code.
        assert float((one - two).abs().max() / one.abs().max()) < 2**-22 and one.abs().max() > 0.05
        amax, stored = getattr(model, name).input_scale.cpu(), getattr(other, name).input_scale.cpu()
        exact = amax.double() / 2688 if way == "mul" else 2688 / amax.double()  # PyTorch rounds 2688 / amax twice
        assert torch.equal(stored, exact.float())
    with torch.no_grad(), products_checked(other) as checked:  # with the scales that were compared above
        assert other(x).shape == model(x).shape and checked == {"up", "down"}


class Layers(nn.Module):
    """Every layer of quire, with names that files have for experts."""

    def __init__(self, **options: object) -> None:
        super().__init__()
        self.first = quire.LayerNormLinear(64, 64)
        self.mlp = quire.LayerNormMLP(64, 96, activation="swiglu")
        self.grouped = quire.GroupedLinear(3, 64, 64, **options)
        self.moe = quire.MoE(64, 128, 4, 2, bias=True, expert_bias=True, shared_ffn_hidden_size=128, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.moe(self.grouped(self.mlp(self.first(x)), [4, 0, len(x) - 4]))


@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize(
    ("dialect", "recipe"),
    [
        ("modelopt", "x=nvfp4:global=mul:given,w=nvfp4:global=mul,dy=mxfp8"),
        ("compressed-tensors", "x=fp8_tensor:given,w=fp8_tensor,dy=mxfp8"),
        ("compressed-tensors", "x=none,w=nvfp4:global=div"),
        ("deepseek", "fp8_block"),
        ("deepseek", "mxfp8"),
        ("autofp8", "x=fp8_tensor:given,w=fp8_tensor,dy=mxfp8"),
        ("comfyui", "x=nvfp4:global=mul:given,w=nvfp4:global=mul,dy=mxfp8"),
        ("comfyui", "mxfp8"),
        ("fbgemm_fp8", "x=fp8_row,w=fp8_row,dy=mxfp8"),
        ("quire", "x=fp8_tensor:given,w=nvfp4:row_scaled,dy=mxfp8"),
    ],
)
def test_layers_of_quire_are_found_again_in_every_dialect(dialect, recipe, single, tmp_path):
    torch.manual_seed(1)
    model, x = Layers(single_grouped_weight=single).requires_grad_(False), inputs()
    batches = [x, torch.randn(64, 64)] if ":given" in recipe else None
    quire.quantize_model(model, recipe, batches, missing_input_scale="max")
    report = io.save(model, tmp_path / "a", dialect=dialect)
    assert report.notes == () and report.losses == ()
    expert = "moe.experts.3.up_proj.weight" in io.read(tmp_path / "a").groups
    assert expert == (dialect != "quire")
    other = Layers(single_grouped_weight=single if dialect == "quire" else not single)
    io.load(other, tmp_path / "a")
    with torch.no_grad():
        assert torch.equal(other(x), model(x))
    io.save(other, tmp_path / "b")
    assert raw(tmp_path / "b") == raw(tmp_path / "a")


@pytest.mark.parametrize(
    ("dialect", "recipe", "make"),
    [
        ("modelopt", "mxfp8", lambda: quire.MoE(64, 96, 4, 2, shared_ffn_hidden_size=96)),
        ("gpt_oss", "x=none,w=mxfp4", lambda: quire.MoE(64, 96, 4, 2, bias=True, single_grouped_weight=True)),
        ("deepseek", "mxfp8", lambda: quire.GroupedLinear(3, 64, 96)),
        ("modelopt", "mxfp8", lambda: quire.LayerNormMLP(64, 96)),
    ],
)
def test_the_model_itself_may_be_a_layer(dialect, recipe, make, tmp_path):
    model, other = make().requires_grad_(False), make().requires_grad_(False)
    quire.quantize_model(model, recipe)
    io.save(model, tmp_path, dialect=dialect)
    assert not [name for name in raw(tmp_path) if name.startswith(".")]
    io.load(other, tmp_path)
    for name, value in model.state_dict().items():
        found = other.state_dict()[name]
        same = same_values(value, found) if isinstance(value, quire.QuantizedTensor) else torch.equal(value, found)
        assert same, name


@pytest.mark.parametrize("single", [False, True])
def test_gpt_oss_has_all_experts_in_one_tensor(single, tmp_path):
    def mixture() -> nn.Module:
        moe = quire.MoE(64, 96, 4, 2, activation="clamped_swiglu", bias=True, single_grouped_weight=single)
        return nn.ModuleDict({"mlp": moe}).requires_grad_(False)

    torch.manual_seed(2)
    model, other, x = mixture(), mixture(), inputs()
    quantized("x=none,w=mxfp4", model, x)
    io.save(model, tmp_path / "a", dialect="gpt_oss")
    assert raw(tmp_path / "a")["mlp.experts.gate_up_proj_blocks"][1] == (4, 192, 2, 16)
    io.load(other, tmp_path / "a")
    with torch.no_grad():
        assert torch.equal(other["mlp"](x), model["mlp"](x))
    io.save(other, tmp_path / "b")
    assert raw(tmp_path / "b") == raw(tmp_path / "a")
    # Rows of gate and up alternate in the file.
    gate = model["mlp"].fc1.group_weights("")[1].dequantize()[0]
    assert torch.equal(io.read(tmp_path / "a")["mlp.experts.gate_up_proj"].dequantize()[1, 0], gate)
    assert raw(tmp_path / "a")["mlp.experts.gate_up_proj_bias"][1] == (4, 192)


def test_gpt_oss_takes_no_names_that_its_readers_do_not_look_for(tmp_path):
    layer = quire.GroupedLinear(4, 64, 96, single_grouped_weight=True).requires_grad_(False)
    model = quire.convert(
        nn.ModuleDict({"experts": layer}), "x=none,w=mxfp4", for_inference=True, min_features=1, tokens=None
    )
    with pytest.raises(io.CheckpointError, match=r"end with .gate_up_proj or .down_proj; got 'experts'"):
        io.save(model, tmp_path / "a", dialect="gpt_oss")
    assert not (tmp_path / "a").exists()


class Tied(nn.Module):
    """Whose output layer shares the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens, self.proj = nn.Embedding(48, 64), nn.Linear(64, 64)
        self.lm_head = nn.Linear(64, 48, bias=False)
        self.lm_head.weight = self.embed_tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.proj(self.embed_tokens(tokens)))


LISTS = {"modelopt": "ignore", "compressed-tensors": "ignore", "deepseek": "modules_to_not_convert"}


@pytest.mark.parametrize("dialect", LISTS)
def test_a_layer_that_shares_the_embedding_is_listed_as_not_quantized(dialect, tmp_path):
    """Readers expect scales for every linear layer that is not listed."""
    model = Tied().requires_grad_(False)
    quire.quantize_model(model, "mxfp8", filter=lambda module, name: name == "proj")
    io.save(model, tmp_path / "saved", dialect=dialect)
    assert "lm_head.weight" not in raw(tmp_path / "saved")
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert config["quantization_config"][LISTS[dialect]] == ["embed_tokens", "lm_head"]
    # A conversion knows from the model's configuration that its output layer is not in the file.
    (tmp_path / "saved" / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    for to, key in LISTS.items():
        if to != dialect:
            io.convert(tmp_path / "saved", tmp_path / to, to=to)
            said = json.loads((tmp_path / to / "config.json").read_text())["quantization_config"]
            assert said[key] == ["embed_tokens", "lm_head"]
