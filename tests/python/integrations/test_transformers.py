"""from_pretrained() and save_pretrained() of Hugging Face transformers, for checkpoints of ModelOpt and quire."""

import copy
import json
import pickle
import sys

import pytest

pytest.importorskip("transformers")
import torch  # noqa: E402
import transformers  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

import quire  # noqa: E402
import quire.io  # noqa: E402
from python.integrations import tiny_language_models as tiny  # noqa: E402
from quire.integrations.transformers import REPLACEABLE, register  # noqa: E402
from steps import products_checked  # noqa: E402

#: The first two quantize inputs as they come, the others with a scale of the file.
ALGORITHMS = ("MXFP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8", "NVFP4")


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    register()


def bytes_of(folder) -> dict[str, tuple]:
    """Name -> dtype, shape and bytes, of the files by safetensors alone."""
    found = {}
    for file in folder.glob("*.safetensors"):
        for name, tensor in load_file(file).items():
            found[name] = str(tensor.dtype), tuple(tensor.shape), tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
    return found


def said_in(folder) -> dict:
    return json.loads((folder / "config.json").read_text())["quantization_config"]


def attributes(model) -> tuple[dict, dict]:
    """Of the model and of its configuration, whose architectures transformers itself sets."""
    own = {name: value for name, value in vars(model).items() if name not in ("_modules", "_parameters", "_buffers")}
    return {name: repr(value) for name, value in own.items() if name != "config"}, {
        name: value for name, value in vars(model.config).items() if name not in ("architectures", "dtype")
    }


def modules(model) -> dict[str, torch.nn.Module]:
    return {name: module for name, module in model.named_modules() if hasattr(module, "weight_names")}


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@torch.no_grad()
def test_a_checkpoint_is_loaded_with_its_codes_and_saved_with_its_bytes(tmp_path, algorithm):
    layers = tiny.write_modelopt(tmp_path / "theirs", "llama", algorithm)
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "theirs", output_loading_info=True)
    caches = {"model.layers.0.self_attn.k_proj.k_scale"} if algorithm in ("FP8", "NVFP4") else set()
    assert not info["missing_keys"] and info["unexpected_keys"] <= caches
    found = modules(model)
    assert set(found) == set(layers)
    for name, layer in layers.items():
        assert type(found[name]) is quire.Linear
        assert torch.equal(found[name].weight.dequantize(torch.float32), tiny.values_of(layer)), name
    ids = tiny.tokens()
    with products_checked(model) as checked:  # inputs are quantized, with the scales of the file or with their own
        y = model(ids).logits
    assert y.dtype == torch.bfloat16 and checked == set(layers)
    model.save_pretrained(tmp_path / "ours")
    assert bytes_of(tmp_path / "ours") == bytes_of(tmp_path / "theirs")
    assert said_in(tmp_path / "ours") == said_in(tmp_path / "theirs")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert torch.equal(again(ids).logits, y)


def dense(layers: dict, family: str) -> torch.nn.Module:
    """The model with the values of the file, in float32."""
    model = tiny.model_of(family)
    state = {name: value.float() for name, value in tiny.plain_of(family).items()}
    state |= {f"{name}.weight": tiny.values_of(layer) for name, layer in layers.items()}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not missing and not unexpected
    return model


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@torch.no_grad()
def test_scales_stay_float32_whatever_the_dtype_of_the_model(tmp_path, dtype):
    layers = tiny.write_modelopt(tmp_path / "theirs", "llama", "FP8_PER_CHANNEL_PER_TOKEN")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "theirs", dtype=dtype)
    for name, module in modules(model).items():
        assert module.weight.dtype == dtype
        assert torch.equal(module.weight.buffers()["rowwise_scale"], layers[name]["weight_scale"])
    model.save_pretrained(tmp_path / "ours")
    assert bytes_of(tmp_path / "ours") == bytes_of(tmp_path / "theirs")


def test_a_plain_checkpoint_is_not_quantized_while_it_is_loaded(tmp_path):
    register()
    tiny.model_of("llama").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"without quantization_config, then call quire\.convert\(model, recipe"):
        AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config={"quant_method": "quire", "recipe": "mxfp8"})


@pytest.mark.parametrize("algorithm", ["MXFP8", "NVFP4"])
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
@torch.no_grad()
def test_experts_of_a_checkpoint_are_loaded_and_saved_under_their_names(tmp_path, family, algorithm):
    layers = tiny.write_modelopt(tmp_path / "theirs", family, algorithm)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "theirs")
    experts = model.model.layers[1].mlp.experts
    names = list(layers)
    own = [layers[name] for name in names if ".layers.1." in name and ".experts." in name]
    for e in range(4):
        gate, up, down = map(tiny.values_of, own[3 * e : 3 * e + 3])
        assert torch.equal(experts.gate_up_proj[e].dequantize(torch.float32), torch.cat([gate, up]))
        assert torch.equal(experts.down_proj[e].dequantize(torch.float32), down)
    y = model(tiny.tokens()).logits
    assert y.isfinite().all()
    model.save_pretrained(tmp_path / "ours")
    assert bytes_of(tmp_path / "ours") == bytes_of(tmp_path / "theirs")
    assert said_in(tmp_path / "ours") == said_in(tmp_path / "theirs")


@pytest.mark.parametrize("family", sorted(tiny.FAMILIES))
@torch.no_grad()
def test_a_converted_model_is_saved_by_quire_and_loaded_by_transformers(tmp_path, family):
    model = tiny.model_of(family, dtype=torch.bfloat16)
    convert = {"filter": lambda module, name: "lm_head" not in name, "min_features": 1, "tokens": None}
    quire.convert(model, "mxfp8", for_inference=True, **convert)
    quire.io.save(model, tmp_path / "first", dialect="quire")
    config = json.loads(tiny.config_of(family).to_json_string(use_diff=False))
    said = json.loads((tmp_path / "first" / "config.json").read_text())
    (tmp_path / "first" / "config.json").write_text(json.dumps(config | said))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "first")
    ids = tiny.tokens()
    assert torch.equal(loaded(ids).logits, model(ids).logits)
    loaded.save_pretrained(tmp_path / "second")
    assert bytes_of(tmp_path / "second") == bytes_of(tmp_path / "first")
    assert said_in(tmp_path / "second") == said_in(tmp_path / "first")


@pytest.mark.parametrize("family", sorted(tiny.FAMILIES))
@torch.no_grad()
def test_save_pretrained_of_a_converted_model_writes_what_quire_writes(tmp_path, family):
    tiny.model_of(family, dtype=torch.bfloat16).save_pretrained(tmp_path / "plain")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
    assert model.hf_quantizer is None
    convert = {"filter": lambda module, name: "lm_head" not in name, "min_features": 1, "tokens": None}
    quire.convert(model, "mxfp8", for_inference=True, **convert)
    quire.io.save(model, tmp_path / "ours", dialect="quire")
    before = attributes(model)
    for folder in ("first", "second"):  # a second time, as the first one
        model.save_pretrained(tmp_path / folder)
        found, codes = bytes_of(tmp_path / folder), bytes_of(tmp_path / "ours")
        quantized = [name for name in codes if name.endswith(("_data", "_scale"))]
        assert quantized and all(found[name] == codes[name] for name in quantized)
        assert said_in(tmp_path / folder) == said_in(tmp_path / "ours")
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / folder)
        assert torch.equal(loaded(tiny.tokens()).logits, model(tiny.tokens()).logits)
    assert attributes(model) == before
    names = {name for name, p in model.named_parameters() if isinstance(p, quire.QuantizedTensor)}
    plain = model.dequantize()
    assert not any(isinstance(p, quire.QuantizedTensor) for p in plain.parameters())
    decoded = [p for name, p in plain.named_parameters() if name in names]
    assert len(decoded) == len(names) > 0 and all(p.requires_grad for p in decoded)  # as docs/integrations.md says


#: Dialects whose quant_method transformers has a quantizer for: recipe, filter's end of names, family.
REPLACED = {
    "gpt_oss": ("x=none,w=mxfp4", ("experts",), "gpt_oss"),
    "deepseek": ("fp8_block", ("proj", "experts"), "qwen3_moe"),
    "compressed-tensors": ("mxfp8", ("proj",), "llama"),
    "fbgemm_fp8": ("x=fp8_row,w=fp8_row,dy=mxfp8", ("proj",), "llama"),
}


def written(folder, dialect) -> torch.nn.Module:
    """A model that quire has quantized and saved in the dialect, with its configuration."""
    recipe, ends, family = REPLACED[dialect]
    model = tiny.model_of(family, dtype=torch.bfloat16)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):  # which are 0
            parameter.normal_(std=0.1)
    quire.quantize_model(model, recipe, filter=lambda module, name: name.endswith(ends))
    quire.io.save(model, folder, dialect=dialect)
    said = json.loads((folder / "config.json").read_text())
    config = json.loads(tiny.config_of(family).to_json_string(use_diff=False))
    (folder / "config.json").write_text(json.dumps(config | {"architectures": [type(model).__name__]} | said))
    return model


@pytest.mark.parametrize("dialect", REPLACED)
@torch.no_grad()
def test_quire_loads_what_transformers_has_a_quantizer_for(tmp_path, dialect, monkeypatch):
    from transformers.quantizers import auto

    for table in (auto.AUTO_QUANTIZER_MAPPING, auto.AUTO_QUANTIZATION_CONFIG_MAPPING):
        for name in REPLACEABLE.values():
            monkeypatch.setitem(table, name, table[name])  # to be put back
    model = written(tmp_path / "theirs", dialect)
    register(replace=[REPLACEABLE[dialect]])
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "theirs")
    assert torch.equal(loaded(tiny.tokens()).logits, model(tiny.tokens()).logits)
    loaded.save_pretrained(tmp_path / "ours")
    assert bytes_of(tmp_path / "ours") == bytes_of(tmp_path / "theirs")
    assert said_in(tmp_path / "ours") == said_in(tmp_path / "theirs")


@torch.no_grad()
def test_transformers_itself_reads_experts_of_gpt_oss_that_quire_saves(tmp_path):
    """Rows of gate and up, and of their bias, are in turn in its model, and in the file."""
    pytest.importorskip("accelerate")
    model = written(tmp_path, "gpt_oss")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path)
    for one, other in zip(model.model.layers, theirs.model.layers, strict=True):
        for name in ("gate_up_proj", "down_proj"):
            found, wanted = getattr(other.mlp.experts, name), getattr(one.mlp.experts, name)
            assert torch.equal(found, wanted.dequantize(torch.bfloat16).transpose(1, 2)), name
            assert torch.equal(*(getattr(layer.mlp.experts, f"{name}_bias") for layer in (one, other))), name


def test_a_quantizer_that_cannot_be_replaced_is_named():
    with pytest.raises(ValueError, match=r"replace must be of .*mxfp4, got \['gptq'\]"):
        register(replace=["mxfp4", "gptq"])


@torch.no_grad()
def test_save_pretrained_of_a_model_that_quire_io_has_loaded(tmp_path):
    tiny.write_modelopt(tmp_path / "theirs", "llama", "MXFP8")
    model = tiny.model_of("llama", dtype=torch.bfloat16)
    quire.io.load(model, tmp_path / "theirs")
    model.save_pretrained(tmp_path / "ours")
    assert bytes_of(tmp_path / "ours") == bytes_of(tmp_path / "theirs")
    assert not hasattr(model.config, "quantization_config")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert torch.equal(loaded(tiny.tokens()).logits, model(tiny.tokens()).logits)


def test_after_training_the_model_is_saved_in_the_dialect_of_quire(tmp_path):
    tiny.write_modelopt(tmp_path / "theirs", "llama", "MXFP8")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "theirs")
    weight = model.model.layers[0].mlp.up_proj.weight
    assert not weight.requires_grad
    weight.requires_grad_(True)
    before = weight.detach().dequantize(torch.float32).clone()
    model(tiny.tokens()).logits.float().square().mean().backward()
    torch.optim.SGD([weight], lr=1e3 / weight.grad.float().abs().max().item()).step()
    assert not torch.equal(weight.detach().dequantize(torch.float32), before)
    before = attributes(model)
    model.save_pretrained(tmp_path / "ours")
    assert attributes(model) == before
    assert said_in(tmp_path / "ours")["quant_method"] == "quire"
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    with torch.no_grad():
        assert torch.equal(again(tiny.tokens()).logits, model(tiny.tokens()).logits)


@pytest.mark.parametrize("family", ["llama", "mixtral"])
@torch.no_grad()
def test_a_model_without_head_is_saved_under_the_names_of_the_file(tmp_path, family):
    tiny.write_modelopt(tmp_path / "theirs", family, "MXFP8")
    model = transformers.AutoModel.from_pretrained(tmp_path / "theirs")
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "theirs").model
    assert torch.equal(model(tiny.tokens()).last_hidden_state, whole(tiny.tokens()).last_hidden_state)
    model.save_pretrained(tmp_path / "ours")
    theirs = bytes_of(tmp_path / "theirs")
    del theirs["lm_head.weight"]
    assert bytes_of(tmp_path / "ours") == theirs


@torch.no_grad()
def test_tied_embeddings_are_saved_once(tmp_path):
    tiny.write_modelopt(tmp_path / "theirs", "llama", "MXFP8")
    file, config = tmp_path / "theirs" / "model.safetensors", tmp_path / "theirs" / "config.json"
    tensors = load_file(file)
    del tensors["lm_head.weight"]
    save_file(tensors, file, {"format": "pt"})
    config.write_text(json.dumps(json.loads(config.read_text()) | {"tie_word_embeddings": True}))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "theirs")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    model.save_pretrained(tmp_path / "ours")
    assert bytes_of(tmp_path / "ours") == bytes_of(tmp_path / "theirs")


def tied_model():
    model = tiny.model_of("llama", tie_word_embeddings=True)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    return model


def saved_by_io(model, path):
    tied_model().save_pretrained(path.parent / "dense")
    quire.io.save(model, path, dialect="quire", like=path.parent / "dense")


def saved_after_io_load(model, path):
    saved_by_io(model, path.parent / "first")
    other = tied_model()
    quire.io.load(other, path.parent / "first")
    other.save_pretrained(path)


def converted_by_io(model, path):
    """A file with an output layer of its own, whose configuration ties it all the same."""
    saved_by_io(model, path.parent / "first")
    set_tied(path.parent / "first", tied=True)
    entries = dict(quire.io.read(path.parent / "first"))
    configs = {"config.json": json.loads((path.parent / "first" / "config.json").read_text())}
    quire.io.write(path, entries, dialect="quire", config=configs["config.json"])


def set_tied(folder, *, tied: bool) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": tied}))


def is_tied(folder) -> bool:
    return json.loads((folder / "config.json").read_text())["tie_word_embeddings"]


@pytest.mark.parametrize(
    "save",
    [lambda model, path: model.save_pretrained(path), saved_by_io, saved_after_io_load, converted_by_io],
    ids=["save_pretrained", "io.save", "io.load", "io.write"],
)
@torch.no_grad()
def test_an_output_layer_that_quantization_has_untied_is_loaded_from_what_was_saved(tmp_path, save):
    model, ids = tied_model(), tiny.tokens()
    with pytest.warns(UserWarning, match="shared memory"):
        quire.convert(model, "mxfp8", for_inference=True, min_features=1, tokens=None)
    before, y = attributes(model), model(ids).logits
    save(model, tmp_path / "saved")
    assert attributes(model) == before and model.config.tie_word_embeddings is True
    assert is_tied(tmp_path / "saved") is False
    again, info = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert torch.equal(again(ids).logits, y)


@torch.no_grad()
def test_an_output_layer_that_stays_tied_is_saved_as_tied(tmp_path):
    model, ids = tied_model(), tiny.tokens()
    keep = {"filter": lambda module, name: name != "lm_head"}
    quire.convert(model, "mxfp8", for_inference=True, min_features=1, tokens=None, **keep)
    model.save_pretrained(tmp_path / "saved")
    assert is_tied(tmp_path / "saved") is True
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert again.lm_head.weight is again.model.embed_tokens.weight and torch.equal(again(ids).logits, model(ids).logits)


@torch.no_grad()
def test_a_quantized_output_layer_that_the_configuration_ties_is_refused(tmp_path):
    model, ids = tied_model(), tiny.tokens()
    with pytest.warns(UserWarning, match="shared memory"):
        quire.convert(model, "mxfp8", for_inference=True, min_features=1, tokens=None)
    model.save_pretrained(tmp_path)
    set_tied(tmp_path, tied=True)
    with pytest.raises(quire.io.CheckpointError, match="lm_head.weight.*ties to another") as caught:
        AutoModelForCausalLM.from_pretrained(tmp_path)
    assert "tie_word_embeddings=False" in caught.value.remedy
    again = AutoModelForCausalLM.from_pretrained(tmp_path, tie_word_embeddings=False)
    assert torch.equal(again(ids).logits, model(ids).logits)


@torch.no_grad()
def test_a_layer_may_have_its_scale_in_another_shard(tmp_path):
    layers = tiny.write_modelopt(tmp_path / "theirs", "llama", "MXFP8")
    whole = bytes_of(tmp_path / "theirs")
    file = tmp_path / "theirs" / "model.safetensors"
    tensors, shards = load_file(file), ({}, {})
    file.unlink()
    for name, tensor in tensors.items():
        shards[name.endswith("_scale")][name] = tensor
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    for name, shard in zip(names, shards, strict=True):
        save_file(shard, tmp_path / "theirs" / name, {"format": "pt"})
    weight_map = {entry: name for name, shard in zip(names, shards, strict=True) for entry in shard}
    index = {"metadata": {}, "weight_map": weight_map}
    (tmp_path / "theirs" / "model.safetensors.index.json").write_text(json.dumps(index))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "theirs")
    for name, module in modules(model).items():
        assert torch.equal(module.weight.dequantize(torch.float32), tiny.values_of(layers[name]))
    model.save_pretrained(tmp_path / "ours", max_shard_size="20KB")
    assert len(list((tmp_path / "ours").glob("*.safetensors"))) > 1
    assert bytes_of(tmp_path / "ours") == whole
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert torch.equal(again(tiny.tokens()).logits, model(tiny.tokens()).logits)


@torch.no_grad()
def test_copies_and_pickles_of_a_model_are_saved_with_the_same_bytes(tmp_path):
    tiny.write_modelopt(tmp_path / "theirs", "llama", "MXFP8")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "theirs")
    for number, other in enumerate((copy.deepcopy(model), pickle.loads(pickle.dumps(model)))):
        other.save_pretrained(tmp_path / str(number))
        assert bytes_of(tmp_path / str(number)) == bytes_of(tmp_path / "theirs")


@torch.no_grad()
def test_dequantize_gives_a_model_of_plain_weights(tmp_path):
    layers = tiny.write_modelopt(tmp_path / "theirs", "llama", "MXFP8")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "theirs", dtype=torch.float32).dequantize()
    ids = tiny.tokens()
    torch.testing.assert_close(model(ids).logits, dense(layers, "llama")(ids).logits)
    model.save_pretrained(tmp_path / "plain")
    assert "quantization_config" not in json.loads((tmp_path / "plain" / "config.json").read_text())
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "plain")
    assert torch.equal(again(ids).logits, model(ids).logits)


def test_a_missing_scale_is_an_error_and_no_random_weight(tmp_path):
    tiny.write_modelopt(tmp_path / "theirs", "llama", "MXFP8")
    file = tmp_path / "theirs" / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.1.mlp.up_proj.weight_scale"]
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(quire.io.CheckpointError, match=r"layers\.1\.mlp\.up_proj"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "theirs")


def test_a_layer_that_the_model_lacks_is_an_error(tmp_path):
    tiny.write_modelopt(tmp_path / "theirs", "llama", "MXFP8")
    config = tmp_path / "theirs" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"num_hidden_layers": 1}))
    with pytest.raises(quire.io.CheckpointError, match=r"the model lacks model\.layers\.1"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "theirs")


def test_a_model_sharded_over_devices_is_refused(tmp_path):
    tiny.write_modelopt(tmp_path / "theirs", "llama", "MXFP8")
    with pytest.raises(NotImplementedError, match="one device"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "theirs", device_map={"model": "cpu", "lm_head": "disk"})


@torch.no_grad()
def test_one_device_is_accepted(tmp_path):
    tiny.write_modelopt(tmp_path / "theirs", "llama", "MXFP8")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "theirs", device_map="cpu")
    assert model(tiny.tokens()).logits.isfinite().all()


def test_a_plain_model_is_not_quantized_by_a_configuration(tmp_path):
    from quire.integrations.pretrained import StoredConfig

    tiny.model_of("llama").save_pretrained(tmp_path / "plain")
    with pytest.raises(ValueError, match="pre-quantized"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "plain", quantization_config=StoredConfig("quire"))


def test_registering_twice_does_nothing(monkeypatch):
    from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING

    before = dict(AUTO_QUANTIZER_MAPPING)
    register()
    assert before == AUTO_QUANTIZER_MAPPING


def test_a_name_that_another_package_has_is_an_error(monkeypatch):
    from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING

    monkeypatch.setitem(AUTO_QUANTIZER_MAPPING, "modelopt", object)
    with pytest.raises(RuntimeError, match="quantizer 'modelopt' is .*object.* already"):
        register()


def test_a_version_with_other_hooks_is_an_error(monkeypatch):
    monkeypatch.delattr(transformers.quantizers.HfQuantizer, "get_state_dict_and_metadata")
    with pytest.raises(ImportError, match=r"transformers .* has no HfQuantizer\.get_state_dict_and_metadata.*5\.23\.0"):
        register()


def test_without_transformers_the_error_says_what_to_install(monkeypatch):
    for name in list(sys.modules):
        if name.partition(".")[0] == "transformers":
            monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=r"needs the package transformers.*pip install 'transformers==5\.23\.0'"):
        register()
