"""Checkpoints in models: every way to hold a layer has the values of the file, runs, trains, and is saved as it was."""

import copy
import functools
import gc

import numpy as np
import pytest
import torch

import quire
from python.io import checkpoint_models
from python.io.checkpoint_files import BF16, F32, Files, configs, e4m3, every_byte, modelopt_config, raw
from python.io.checkpoint_models import INPUT_SCALE, Model, files, reference, tokens, write
from quire import io
from steps import products_checked

SHAPES = [{"fused": fused, "single": single} for fused in (False, True) for single in (False, True)]


def loaded(source, device: str = "cpu", dtype: torch.dtype = torch.float32, **options) -> Model:
    shape = {key: options.pop(key) for key in ("fused", "single", "tied") if key in options}
    with torch.device(device):
        model = Model(**shape).to(dtype)
    io.load(model, source, fuse=shape.get("fused") or None, **options)
    return model


def by_plain_layers(source, **options) -> torch.Tensor:
    """What the model gives with a quire.Linear for each expert and part, each of which gives the product of its codes
    for the inputs that it has."""
    model = Model(dense=True)
    io.load(model, source, **options)
    with torch.no_grad(), products_checked(model) as checked:
        y = model(tokens())
    assert len(checked) == 2 * (4 + 3 * 4)
    return y


def distance(y: torch.Tensor, true: torch.Tensor) -> float:
    return float((y.detach().double() - true).norm() / true.norm())


@functools.cache
def in_two_precisions(static: bool = True) -> tuple[torch.Tensor, float]:
    """What PyTorch's layers give in float64, and how far they are from it in float32."""
    model = reference(files(static=static))
    with torch.no_grad():
        y = model(tokens())
        exact = model.double()(tokens())
    return exact, distance(y, exact)


def is_decoded(y: torch.Tensor, static: bool = True) -> bool:
    """y is computed with decoded weights, and nothing else is quantized: another order of sums in float32 has an error
    like that of PyTorch's layers, which is also how much the model amplifies one."""
    exact, error = in_two_precisions(static)
    return distance(y, exact) < 4 * error


def most_are_alike(y: torch.Tensor, other: torch.Tensor) -> bool:
    """Most tokens differ by sums of float32 alone. In the others a value next to a tie can have another code, or
    another expert."""
    return float(((y - other).norm(dim=-1) / other.norm(dim=-1)).median()) < 4 * in_two_precisions()[1]


@pytest.fixture
def source(tmp_path):
    return write(tmp_path / "source")


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_shape_of_a_model_computes_what_the_values_say(shape, device, source):
    model = loaded(source, device, activations="mxfp8", **shape)
    assert all(not t.is_meta for t in [*model.parameters(), *model.buffers()])
    assert model.lm_head.weight is model.model.embed_tokens.weight
    with torch.no_grad():
        with quire.autocast(enabled=False):
            assert is_decoded(model(tokens()))
        y = model(tokens())
        assert most_are_alike(y, by_plain_layers(source, activations="mxfp8"))
        assert torch.equal(y, loaded(source, activations="mxfp8")(tokens()))  # whichever layers are joined


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_saving_gives_the_bytes_that_were_loaded(shape, source, tmp_path):
    model = loaded(source, dtype=BF16, activations="mxfp8", **shape)
    with torch.no_grad():
        model(tokens())  # running changes nothing
    report = io.save(model, tmp_path / "b", max_shard_size="30kB")
    assert raw(tmp_path / "b") == raw(source) and configs(tmp_path / "b") == configs(source)
    assert len(report.files) > 3
    again = copy.deepcopy(model)
    io.save(again, tmp_path / "c")
    assert raw(tmp_path / "c") == raw(source)
    quire.prepack_weights(again)  # another order in memory
    io.save(again, tmp_path / "d")
    assert raw(tmp_path / "d") == raw(source)


def test_saving_like_a_checkpoint_copies_what_the_model_lacks(source, tmp_path):
    model = loaded(source, activations="mxfp8")
    del model.__dict__["_quire_checkpoint"]
    with pytest.raises(io.CheckpointError, match="dialect="):
        io.save(model, tmp_path / "b")
    dense = Model(dense=True).to(BF16)
    io.load(dense, source, activations="mxfp8")
    io.save(dense, tmp_path / "c", like=source)
    assert raw(tmp_path / "c") == raw(source) and configs(tmp_path / "c") == configs(source)


def test_a_float32_model_of_bfloat16_tensors_is_saved_in_bfloat16(source, tmp_path):
    io.save(loaded(source, activations="mxfp8"), tmp_path / "b")
    assert raw(tmp_path / "b") == raw(source)


def test_what_is_trained_is_saved_and_the_rest_stays(source, tmp_path):
    model = loaded(source, activations="mxfp8")
    layer = model.model.layers[0].self_attn.o_proj
    before = layer.weight.dequantize().clone()
    for parameter in model.parameters():
        parameter.requires_grad_(parameter is layer.weight)
    optimizer = torch.optim.SGD([layer.weight], lr=0.5)
    model(tokens()).square().mean().backward()
    optimizer.step()
    assert layer.weight.origin is None and not torch.equal(layer.weight.dequantize(), before)
    io.save(model, tmp_path / "b")
    old, new = raw(source), raw(tmp_path / "b")
    changed = {name for name in old if old[name] != new[name]}
    stem = "model.layers.0.self_attn.o_proj"
    assert f"{stem}.weight" in changed and changed <= {
        f"{stem}.weight",
        f"{stem}.weight_scale",
        f"{stem}.weight_scale_2",
    }
    found = io.read(tmp_path / "b")[f"{stem}.weight"].dequantize(torch.float32)
    assert torch.equal(found, layer.weight.dequantize(torch.float32))


@pytest.mark.parametrize("activations", ["checkpoint", "none", "mxfp8"])
def test_all_of_it_trains(activations, source):
    model = loaded(source, activations=activations, single=True).requires_grad_(True)
    optimizer = torch.optim.SGD([p for p in model.parameters() if not isinstance(p, quire.QuantizedTensor)], lr=0.05)
    losses = []
    for _ in range(8):
        loss = torch.nn.functional.cross_entropy(model(tokens()), tokens().flip(0))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    assert len(grads) == len(list(model.parameters())) and all(bool(torch.isfinite(g).all()) for g in grads)
    assert losses[-1] < losses[0]  # by how much, depends on roundings


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_inputs_have_the_scales_of_the_file(shape, device, source, tmp_path):
    model = loaded(source, device, **shape)
    attention = model.model.layers[0].self_attn
    first = attention.qkv_proj if shape["fused"] else attention.q_proj
    assert first.recipe.input_spec == "nvfp4:global=mul:given"
    assert torch.equal(first.input_scale, torch.tensor([INPUT_SCALE]))
    assert torch.equal(model.model.layers[1].mlp.fc1.input_scale, torch.full((4,), INPUT_SCALE))
    with torch.no_grad():
        y = model(tokens())
        assert most_are_alike(y, by_plain_layers(source))
        assert torch.equal(y, loaded(source)(tokens()))
    # A scale that is calibrated anew is saved; of joined layers, those of the file stay.
    with torch.no_grad():
        model.model.layers[0].mlp.fc2.input_scale[2] = 0.25
        attention.o_proj.input_scale.fill_(0.125)
    io.save(model, tmp_path / "b")
    old, new = raw(source), raw(tmp_path / "b")
    changed = sorted(name for name in old if old[name] != new[name])
    outer = "model.layers.0"
    assert changed == [f"{outer}.mlp.experts.2.down_proj.input_scale", f"{outer}.self_attn.o_proj.input_scale"]
    assert new[changed[0]][2] == np.float32(0.25).tobytes()


def test_weights_only_leave_inputs_as_they_are(tmp_path):
    source = write(tmp_path / "a", static=False)
    model = loaded(source)
    assert model.model.layers[0].self_attn.q_proj.recipe.weight_only
    with torch.no_grad():
        assert is_decoded(model(tokens()), static=False)
    io.save(model, tmp_path / "b")
    assert raw(tmp_path / "b") == raw(source)
    other = loaded(write(tmp_path / "c"), activations="none")
    with torch.no_grad():
        assert is_decoded(other(tokens()))


@pytest.mark.slow
@pytest.mark.parametrize("activations", ["checkpoint", "none", "mxfp8"])
@pytest.mark.parametrize("shape", SHAPES[::3], ids=str)
def test_it_is_captured_whole(shape, activations, source):
    model = loaded(source, activations=activations, **shape)
    with torch.no_grad():
        y = model(tokens())
        torch._dynamo.reset()
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(tokens()), y)
        program = torch.export.export(model, (tokens(),), strict=False)
        assert torch.equal(program.module()(tokens()), y)


def unchanged(model: Model, state: dict) -> bool:
    now = model.state_dict()
    types = all(type(m) is not quire.Linear for n, m in model.named_modules() if n.endswith(("_proj", "lm_head")))
    return types and now.keys() == state.keys() and all(torch.equal(now[name], state[name]) for name in state)


def broken(name: str) -> Files:
    found = files()
    tensors = found.tensors
    stem = "model.layers.1.mlp.experts.2.down_proj"
    if name == "a missing layer":
        for key in [key for key in tensors if key.startswith(stem)]:
            del tensors[key]
    elif name == "one too many":
        tensors["model.more.weight"] = torch.zeros(3)
    elif name == "another shape":
        tensors["model.norm.weight"] = torch.zeros(65)
    elif name == "NaN":
        tensors[f"{stem}.weight_scale_2"] = torch.tensor(float("nan"))
    elif name == "infinite":
        tensors[f"{stem}.weight_scale_2"] = torch.tensor(float("inf"))
    elif name == "an input scale of 0":
        tensors[f"{stem}.input_scale"] = torch.tensor(0.0)
    elif name == "a bias too many":
        tensors["model.layers.0.self_attn.o_proj.bias"] = torch.zeros(64)
    return found


BROKEN = {
    "a missing layer": "model.layers.1.mlp.fc2.weight2",
    "one too many": "model.more.weight",
    "another shape": "model.norm.weight",
    "NaN": "model.layers.1.mlp.experts.2.down_proj.weight_scale_2",
    "infinite": "model.layers.1.mlp.experts.2.down_proj.weight_scale_2",
    "an input scale of 0": "model.layers.1.mlp.experts.2.down_proj.input_scale",
    "a bias too many": "model.layers.0.self_attn.o_proj.bias",
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_model_is_not_touched_by_a_checkpoint_that_does_not_fit(name, tmp_path):
    source = broken(name).write(tmp_path)
    model = Model()
    state = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(io.CheckpointError) as caught:
        io.load(model, source, activations="mxfp8")
    assert caught.value.tensor == BROKEN[name]
    assert unchanged(model, state)


def test_names_that_differ_are_reported_if_that_is_accepted(tmp_path):
    model = Model()
    report = io.load(model, broken("one too many").write(tmp_path / "a"), activations="mxfp8", strict=False)
    assert report.unused == ("model.more.weight",) and report.missing == ()
    model.extra = torch.nn.Linear(3, 3)
    report = io.load(model, files().write(tmp_path / "b"), activations="mxfp8", strict=False)
    assert report.missing == ("extra.weight", "extra.bias") and "missing: extra.weight" in str(report)


class WithTables(Model):
    """With buffers that no file has."""

    def __init__(self) -> None:
        super().__init__()
        self.model.register_buffer("inv_freq", torch.ones(4), persistent=False)
        self.register_buffer("table", torch.ones(4))


def test_what_stays_on_the_meta_device_is_reported(source):
    with torch.device("meta"):
        model = WithTables()
    report = io.load(model, source, strict=False)
    assert report.on_meta == ("table", "model.inv_freq") and report.missing == ("table",)
    assert "without values: table, model.inv_freq; make the model on the CPU" in str(report)
    model = WithTables()
    report = io.load(model, source, strict=False)
    assert (
        report.on_meta == ()
        and "without values" not in str(report)
        and torch.equal(model.model.inv_freq, torch.ones(4))
    )


def test_states_of_layers_without_codes_leave_the_meta_device(tmp_path):
    tensors, _ = checkpoint_models.modelopt_nvfp4("0", 32, 64, scales=checkpoint_models.plain_scales(32, 4))
    tensors["1.weight"] = torch.ones(8, 32)
    source = Files(tensors, modelopt_config("NVFP4", exclude_modules=["1"])).write(tmp_path)
    with torch.device("meta"):
        model = torch.nn.Sequential(torch.nn.Linear(64, 32, bias=False), quire.Linear(32, 8, bias=False))
    assert io.load(model, source, activations="mxfp8").on_meta == ()
    assert not any(t.is_meta for t in (*model.parameters(), *model.buffers()))


def test_loaded_codes_do_not_require_gradients(source):
    model = loaded(source, activations="mxfp8", single=True)
    weights = dict(model.named_parameters())
    codes = {name for name, weight in weights.items() if isinstance(weight, quire.QuantizedTensor)}
    assert len(codes) == 2 * (4 + 2)
    assert {name for name, weight in weights.items() if not weight.requires_grad} == codes
    trained = model.model.layers[0].self_attn.o_proj.weight.requires_grad_(True)
    io.load(model, source, activations="mxfp8")  # codes in the place of codes
    weights = dict(model.named_parameters())
    assert {name for name in codes if weights[name].requires_grad} == {"model.layers.0.self_attn.o_proj.weight"}
    assert weights["model.layers.0.self_attn.o_proj.weight"] is not trained


def test_layers_are_joined_only_when_asked(source):
    with pytest.raises(io.CheckpointError, match="qkv_proj"):
        io.load(Model(fused=True), source, activations="mxfp8")
    report = io.load(Model(fused=True), source, activations="mxfp8", fuse={"qkv_proj": ["q_proj", "k_proj", "v_proj"]})
    assert "w=nvfp4:row_scaled:global=mul" in report.quantized["model.layers.0.self_attn.qkv_proj.weight"]


@pytest.mark.parametrize("fuse", [True, {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}])
def test_a_layer_that_lacks_a_part_says_which(fuse, tmp_path):
    tensors = {f"{name}_proj.weight": torch.ones(32, 64, dtype=torch.bfloat16) for name in "qk"}
    model = torch.nn.ModuleDict({"qkv_proj": torch.nn.Linear(64, 96, bias=False)})
    with pytest.raises(io.CheckpointError) as error:
        io.load(model, Files(tensors, {}).write(tmp_path), fuse=fuse)
    words = "qkv_proj is joined only of all of q_proj, k_proj, v_proj, and the checkpoint has no v_proj.weight"
    assert words in str(error.value) and "another fuse= for joined layers" in str(error.value)
    assert str(error.value).count("is joined only") == 1


class Pair(torch.nn.Module):
    def __init__(self, *rows: int, columns: int = 64) -> None:
        super().__init__()
        self.gate_up_proj = torch.nn.Linear(columns, sum(rows), bias=False)


def fp8(kind: str, rows: tuple[int, int], scales: tuple) -> Files:
    data = [every_byte(count, 64, seed=count).view(torch.float8_e4m3fn) for count in rows]
    data = [torch.where(d.float().isnan(), torch.zeros(()), d.float()).to(torch.float8_e4m3fn) for d in data]
    names = [f"{name}_proj" for name in ("gate", "up")]
    tensors = {f"{name}.weight": one for name, one in zip(names, data, strict=True)}
    tensors |= {f"{name}.weight_scale": scale for name, scale in zip(names, scales, strict=True)}
    return Files(tensors, modelopt_config(kind))


def test_scales_of_tensors_become_scales_of_rows(tmp_path):
    made = fp8("FP8", (48, 32), (torch.tensor(0.25), torch.tensor(0.37)))
    source, model = made.write(tmp_path / "a"), Pair(48, 32)
    io.load(model, source, fuse=True, activations="mxfp8", missing_input_scale="dynamic")
    assert model.gate_up_proj.weight.spec.text == "fp8_row"
    each = [made.tensors[f"{n}_proj.weight"].view(torch.uint8).numpy() for n in ("gate", "up")]
    true = np.concatenate([e4m3(each[0]) * np.float32(0.25), e4m3(each[1]) * np.float32(0.37)])
    assert np.array_equal(model.gate_up_proj.weight.dequantize(torch.float32).detach().numpy(), true)
    io.save(model, tmp_path / "b")
    assert raw(tmp_path / "b") == raw(source)
    same = fp8("FP8", (48, 32), (torch.tensor(0.25), torch.tensor(0.25)))
    model = Pair(48, 32)
    io.load(model, same.write(tmp_path / "c"), fuse=True, activations="mxfp8", missing_input_scale="dynamic")
    assert model.gate_up_proj.weight.spec.text == "fp8_tensor"


def test_tiles_are_joined_only_where_a_part_ends_with_one(tmp_path):
    def tiles(rows: int) -> torch.Tensor:
        return torch.rand(-(-rows // 128), 1, 1, 1) + 0.1

    for first, fits in ((256, True), (192, False)):
        source = fp8("FP8_PB_WO", (first, 96), (tiles(first), tiles(96).reshape(()))).write(tmp_path / str(first))
        model = Pair(first, 96)
        if fits:
            io.load(model, source, fuse=True, activations="mxfp8")
            parts = [io.read(source)[f"{n}_proj.weight"].dequantize(torch.float32) for n in ("gate", "up")]
            assert torch.equal(model.gate_up_proj.weight.dequantize(torch.float32), torch.cat(parts))
        else:
            with pytest.raises(io.CheckpointError, match="tiles of 128 rows"):
                io.load(model, source, fuse=True, activations="mxfp8")


def test_ties_hold_end_or_are_refused_by_what_the_file_says(tmp_path):
    made = files()
    made.tensors["lm_head.weight"] = made.tensors["model.embed_tokens.weight"].clone()
    model = loaded(made.write(tmp_path / "same"), activations="mxfp8")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    made.tensors["lm_head.weight"][0, 0] += 1
    with pytest.raises(io.CheckpointError, match="the model ties") as caught:
        io.load(Model(), made.write(tmp_path / "other"), activations="mxfp8")
    assert caught.value.tensor == "lm_head.weight"
    quantized = checkpoint_models.modelopt_nvfp4("lm_head", 50, 64, scales=checkpoint_models.plain_scales(50, 4))[0]
    made.tensors |= quantized
    made.configs["hf_quant_config.json"]["quantization"]["exclude_modules"] = []
    model = Model()
    report = io.load(model, made.write(tmp_path / "quantized"), activations="mxfp8")
    assert isinstance(model.lm_head.weight, quire.QuantizedTensor)
    assert type(model.model.embed_tokens.weight.data) is torch.Tensor
    assert any("lm_head.weight" in note and "tied" in note for note in report.notes)


@pytest.mark.parametrize("way", ["dynamic", "max"])
def test_experts_without_a_scale_of_inputs_need_a_decision(way, tmp_path):
    made = files()
    name = "model.layers.0.mlp.experts.1.down_proj.input_scale"
    del made.tensors[name]
    source = made.write(tmp_path)
    with pytest.raises(io.CheckpointError, match="static scale") as caught:
        io.load(Model(), source, activations="mxfp8")
    assert caught.value.tensor == name
    report = io.load(Model(), source, activations="mxfp8", missing_input_scale=way)
    assert any("mlp.fc2" in note for note in report.notes) == (way == "max")


def test_the_largest_scale_needs_another_one(tmp_path):
    tensors, _ = checkpoint_models.modelopt_nvfp4("0", 32, 64, scales=checkpoint_models.plain_scales(32, 4))
    del tensors["0.input_scale"]
    source = Files(tensors, modelopt_config("NVFP4")).write(tmp_path)
    model = torch.nn.Sequential(torch.nn.Linear(64, 32, bias=False))
    with pytest.raises(io.CheckpointError, match='for an expert, "max" to use the largest scale of the other experts'):
        io.load(model, source)
    with pytest.raises(io.CheckpointError, match="nothing of the layer has a static scale of its input"):
        io.load(model, source, missing_input_scale="max")


def test_a_state_dict_carries_weights_into_another_model(source, tmp_path):
    model = loaded(source, activations="mxfp8")
    other = loaded(source, activations="mxfp8")
    with torch.no_grad():
        other.model.layers[0].self_attn.q_proj.weight.zero_()
    other.load_state_dict(model.state_dict())
    io.save(other, tmp_path / "b")
    assert raw(tmp_path / "b") == raw(source)


FUSE = "quire.io.load: fuse must be a bool or a dict from the name of a layer of the model to the names of layers of"


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"activations": "fp8_tensor:e9"}, ValueError, "quire.io.load: activations: spec: unknown option in"),
        ({"activations": "nvfp4:given"}, ValueError, "activations='nvfp4:given' has a scale that somebody gives"),
        ({"missing_input_scale": "1"}, ValueError, "quire.io.load: missing_input_scale must be one of"),
        ({"experts": "some"}, ValueError, "quire.io.load: experts must be 'auto' or 'none', got 'some'"),
        ({"strict": "no"}, TypeError, "quire.io.load: strict must be a bool, got 'no'"),
        ({"rename": 1}, TypeError, "quire.io.load: rename must be a function, got 1"),
        ({"rename": len}, TypeError, "quire.io.load: rename must return a str, got [0-9]+ for 'model"),
        ({"path": None}, TypeError, "quire.io.load: path must be a path, got None"),
        ({"model": {}}, TypeError, "quire.io.load: model must be a torch.nn.Module, got {}"),
        *(({"fuse": fuse}, TypeError, FUSE) for fuse in (1, "qkv", ["qkv"], {"0": "ab"}, {1: ["a"]}, {"a": [1]})),
    ],
)
def test_wrong_arguments_are_refused(source, options, error, text):
    model = Model()
    state = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(error, match=text):
        io.load(**{"model": model, "path": source} | options)
    assert unchanged(model, state)


def test_a_quantized_weight_of_an_embedding_is_refused(tmp_path):
    model = torch.nn.Sequential(torch.nn.Embedding(32, 64))
    tensors, _ = checkpoint_models.modelopt_nvfp4("0", 32, 64, scales=checkpoint_models.plain_scales(32, 4))
    folder = Files(tensors, modelopt_config("NVFP4")).write(tmp_path)
    text = "weight of Embedding, and only .*; write what .*dequantize.*filter="
    with pytest.raises(io.CheckpointError, match=text):
        io.load(model, folder, activations="mxfp8")
    entries = {name: entry.dequantize() for name, entry in io.read(folder).items()}
    io.write(tmp_path / "decoded", entries, dialect=None)
    io.load(model, tmp_path / "decoded")
    assert torch.equal(model[0].weight, entries["0.weight"].to(model[0].weight))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float8_e4m3fn, torch.complex64], ids=str)
def test_a_layer_of_a_dtype_that_codes_do_not_have_is_refused_before_others_change(source, dtype):
    model = Model()
    layer = model.model.layers[1].self_attn.o_proj
    layer.weight.data = layer.weight.data.to(dtype)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(io.CheckpointError, match=rf"{str(dtype)[6:]}, .*call model.float\(\)") as caught:
        io.load(model, source)
    assert caught.value.tensor == "model.layers.1.self_attn.o_proj.weight" and unchanged(model, state)


def test_models_are_freed(source):
    model = loaded(source, activations="mxfp8")
    count = sum(type(o) is quire.Linear for o in gc.get_objects())
    del model
    gc.collect()
    assert sum(type(o) is quire.Linear for o in gc.get_objects()) < count
    assert F32.itemsize == 4
