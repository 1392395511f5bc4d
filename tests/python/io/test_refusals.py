"""A checkpoint that breaks a rule raises an error that names file, tensor, rule and remedy."""

import itertools
import json
import os
import pickle
import re
import struct

import pytest
import torch
from safetensors.torch import save_file

import quire
from python.io import checkpoint_files
from python.io.checkpoint_files import BF16, E4M3, Files, compressed_config, modelopt_config, modelopt_nvfp4
from python.io.checkpoint_kinds import KINDS
from quire import io

pytestmark = pytest.mark.any_device

SCALES = ("_scale", "_scale_2", "_scale_inv", ".scale_weight")


def scales_of(kind: str) -> list[str]:
    return [n for n in KINDS[kind]().tensors if n.endswith(SCALES) and not n.endswith(("k_scale", "v_scale"))]


#: Kinds whose layers may lack the scale of their input.
OPTIONAL = ("unused", "comfyui")
WITHOUT = [
    (kind, name)
    for kind in KINDS
    for name in scales_of(kind)
    if "input" not in name or not any(word in kind for word in OPTIONAL)
]


def refused(tmp_path, files: Files, **options) -> io.CheckpointError:
    with pytest.raises(io.CheckpointError) as caught:
        io.read(files.write(tmp_path / "x"), **options)
    error = caught.value
    assert error.rule and error.remedy and error.rule in str(error) and error.remedy in str(error)
    return error


@pytest.mark.parametrize(("kind", "name"), WITHOUT)
def test_each_scale_that_is_missing_is_named(kind, name, tmp_path):
    files = KINDS[kind]()
    del files.tensors[name]
    error = refused(tmp_path, files)
    assert error.tensor == name
    assert error.file.endswith("model.safetensors")
    assert "missing" in error.rule


@pytest.mark.parametrize(("kind", "name"), [pair for pair in WITHOUT if "input" in pair[1]])
def test_a_missing_scale_of_inputs_can_be_accepted_and_stays_missing(kind, name, tmp_path):
    files = KINDS[kind]()
    del files.tensors[name]
    checkpoint = io.read(files.write(tmp_path / "a"), missing_input_scale="dynamic")
    io.write(tmp_path / "b", checkpoint, dialect=kind.split()[0])
    assert checkpoint_files.raw(tmp_path / "b") == checkpoint_files.raw(tmp_path / "a")


@pytest.mark.parametrize("kind", KINDS)
def test_each_weight_that_is_missing_leaves_scales_that_nobody_reads(kind, tmp_path):
    files = KINDS[kind]()
    name = next(iter(files.values))
    data = [n for n in (name, name + "_packed") if n in files.tensors][0]
    del files.tensors[data]
    error = refused(tmp_path, files)
    # Where the file says that there is a layer, perhaps without the prefix of its name, the weight is missing.
    assert "belongs to no quantized layer" in error.rule or (data.endswith(error.tensor) and "missing" in error.rule)


@pytest.mark.parametrize("kind", KINDS)
def test_wrong_dtypes_and_shapes_are_refused(kind, tmp_path):
    for number, name in enumerate(scales_of(kind)):
        files = KINDS[kind]()
        whole = files.tensors[name]
        files.tensors[name] = whole.to(torch.float64) if whole.dtype.itemsize > 1 else whole.float()
        assert refused(tmp_path / f"dtype{number}", files).tensor == name
        files.tensors[name] = (
            torch.cat([whole.reshape(-1).view(torch.uint8)] * 3).view(whole.dtype).reshape(1, 1, -1, 1, 1)
        )
        assert refused(tmp_path / f"shape{number}", files).tensor == name


def sharded(tmp_path):
    return KINDS["modelopt NVFP4"]().write(tmp_path / "a", 3)


def test_a_truncated_shard(tmp_path):
    folder = sharded(tmp_path)
    file = folder / "model-00002-of-00003.safetensors"
    os.truncate(file, file.stat().st_size - 1)
    with pytest.raises(io.CheckpointError, match="no complete safetensors file") as caught:
        io.read(folder)
    assert caught.value.file == str(file)


@pytest.mark.cpu_only
def test_overlapping_offsets(tmp_path):
    header = {n: {"dtype": "U8", "shape": [4], "data_offsets": [o, o + 4]} for n, o in (("a", 0), ("b", 2))}
    text = json.dumps(header).encode()
    file = tmp_path / "model.safetensors"
    file.write_bytes(struct.pack("<Q", len(text)) + text + bytes(6))
    with pytest.raises(io.CheckpointError, match="no complete safetensors file"):
        io.read(tmp_path)


def test_names_in_two_shards_and_indexes_that_do_not_fit(tmp_path):
    folder = sharded(tmp_path)
    index = folder / "model.safetensors.index.json"
    good = json.loads(index.read_text())
    one, other = (folder / f"model-0000{n}-of-00003.safetensors" for n in (1, 2))
    name = next(n for n, file in good["weight_map"].items() if file == other.name)

    def expect(weight_map: dict, rule: str, tensor: str | None) -> None:
        index.write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(io.CheckpointError, match=rule) as caught:
            io.read(folder)
        assert caught.value.tensor == tensor

    weight_map = good["weight_map"]
    expect(weight_map | {"no.such": one.name}, "which does not have it", "no.such")
    expect(weight_map | {name: one.name}, "which does not have it", name)
    expect({n: f for n, f in weight_map.items() if n != name}, "does not list", name)
    expect(weight_map | {name: "absent.safetensors"}, "absent.safetensors", None)
    expect(weight_map | {name: "../b.safetensors"}, "same folder", None)
    index.write_text("[1]")
    with pytest.raises(io.CheckpointError, match="JSON object"):
        io.read(folder)
    index.write_text(json.dumps(good))
    tensors = {name: torch.zeros(2)} | {n: torch.zeros(1) for n, file in weight_map.items() if file == one.name}
    save_file(tensors, one)
    with pytest.raises(io.CheckpointError, match="a name belongs to one shard") as caught:
        io.read(folder)
    assert caught.value.tensor == name
    index.unlink()
    with pytest.raises(io.CheckpointError, match="no index"):
        io.read(folder)
    with pytest.raises(io.CheckpointError, match="no such file"):
        io.read(tmp_path / "nowhere")


def nvfp4(**config: object) -> Files:
    tensors, _ = modelopt_nvfp4("m.mlp.gate_proj", 32, 64)
    return Files(tensors | {"m.mlp.gate.weight": torch.randn(4, 64).to(BF16)}, modelopt_config("NVFP4", **config))


def test_skip_lists_decide_nothing_against_dtypes(tmp_path):
    # As globs these name other layers; a rule of parts of names would skip gate_proj for mlp.gate.
    for number, patterns in enumerate((["m.mlp.gate"], ["*mlp.gate"], ["lm_head", "model.language_model.*"])):
        checkpoint = io.read(nvfp4(exclude_modules=patterns).write(tmp_path / str(number)))
        assert list(checkpoint.groups) == ["m.mlp.gate_proj.weight"]
    for number, patterns in enumerate((["m.mlp.gate_proj"], ["*gate_proj"], ["m.mlp"], ["m*"])):
        error = refused(tmp_path / f"x{number}", nvfp4(exclude_modules=patterns))
        assert error.tensor == "m.mlp.gate_proj.weight" and "excludes the layer" in error.rule


def test_a_configuration_of_another_algorithm_is_refused(tmp_path):
    for number, algorithm in enumerate(("FP8", "MXFP8", "fp8_pb_wo")):
        files = nvfp4()
        files.configs = modelopt_config(algorithm)
        assert "contradict" in refused(tmp_path / str(number), files).remedy
    files = nvfp4()
    files.configs["config.json"]["quantization_config"] = {"quant_method": "modelopt", "quant_algo": "FP8"}
    assert "config.json says quant_algo FP8" in refused(tmp_path / "two", files).rule


@pytest.mark.parametrize(
    ("suffix", "method"), [("pre_quant_scale", "AWQ"), ("svdquant_lora_a", "SVDQuant")], ids=["awq", "svd"]
)
def test_methods_that_transform_inputs_are_refused_by_name(suffix, method, tmp_path):
    files = nvfp4()
    files.tensors[f"m.mlp.gate_proj.{suffix}"] = torch.ones(64)
    assert method in refused(tmp_path, files).rule


@pytest.mark.parametrize("algorithm", ["W4A16_AWQ", "INT4_AWQ", "NVFP4_AWQ", "W8A8_SQ_PER_CHANNEL"])
def test_unknown_algorithms_are_refused_by_name(algorithm, tmp_path):
    files = nvfp4()
    files.configs = modelopt_config(algorithm)
    assert algorithm in refused(tmp_path, files).rule


@pytest.mark.parametrize("kind", ["pack-quantized", "mxfp6-pack-quantized", "int-quantized", "marlin-24"])
def test_other_formats_of_compressed_tensors_are_refused_by_name(kind, tmp_path):
    files = KINDS["compressed-tensors nvfp4"]()
    files.configs["config.json"]["quantization_config"]["format"] = kind
    assert kind in refused(tmp_path, files).rule


def test_transforms_and_sparsity_are_refused(tmp_path):
    for number, (key, value, word) in enumerate(
        (
            ("transform_config", {"config_groups": {"u": {}}}, "transform_config"),
            ("sparsity_config", {"format": "sparse-24-bitmask"}, "sparse-24-bitmask"),
        )
    ):
        files = KINDS["compressed-tensors nvfp4"]()
        files.configs["config.json"]["quantization_config"][key] = value
        assert word in refused(tmp_path / str(number), files).rule


ZERO_POINTS = [kind for kind in KINDS if "zero points" in kind]


@pytest.mark.parametrize("end", ["weight_zero_point", "input_zero_point"])
@pytest.mark.parametrize("kind", ZERO_POINTS)
def test_zero_points_that_are_not_zero_are_refused(kind, end, tmp_path):
    files = KINDS[kind]()
    name = next(iter(files.values)).removesuffix("weight") + end
    zeros = files.tensors[name]
    wrong = zeros.clone()
    wrong.reshape(-1).view(torch.uint8)[-1] = 1  # the smallest number that is not 0
    files.tensors[name] = wrong
    error = refused(tmp_path / "a", files)
    assert error.tensor == name and "1 of" in error.rule and "not zero" in error.rule
    assert name in " ".join(io.inspect(tmp_path / "a/x").problems)
    files.tensors[name] = zeros.to(torch.float64)
    assert refused(tmp_path / "b", files).tensor == name


def test_asymmetric_weights_need_their_zero_points(tmp_path):
    files = KINDS["compressed-tensors zero points"]()
    files.tensors = {name: t for name, t in files.tensors.items() if not name.endswith("weight_zero_point")}
    assert "without zero points" in refused(tmp_path, files).rule


def test_targets_choose_by_name_then_pattern_then_class(tmp_path):
    four, _ = checkpoint_files.compressed_nvfp4("m.a", 32, 64)
    eight, _ = checkpoint_files.mx("m.b", 32, 64, four_bits=False)
    config = compressed_config("mixed-precision", {}, None)
    groups = {
        "group_0": {
            "targets": ["Linear"],
            "format": "nvfp4-pack-quantized",
            "weights": {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
            "input_activations": {"num_bits": 4, "strategy": "tensor_group", "dynamic": "local"},
        },
        "group_1": {
            "targets": ["re:.*b"],
            "format": "mxfp8-quantized",
            "weights": {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32},
        },
    }
    config["config.json"]["quantization_config"]["config_groups"] = groups
    found = io.read(Files(four | eight, config).write(tmp_path / "a")).groups
    assert [found[f"m.{n}.weight"].layout.name for n in "ab"] == [
        "nvfp4-pack-quantized:tensor_group:local",
        "mxfp8-quantized:group:none",
    ]
    groups["group_0"]["targets"] = ["LinearOfAnotherLibrary"]
    assert len(io.read(Files(four | eight, config).write(tmp_path / "class")).groups) == 2
    groups["group_0"]["targets"] = ["Linear"]
    groups["group_1"]["targets"] = ["re:b"]  # which is matched from the start
    assert refused(tmp_path / "b", Files(four | eight, config)).tensor.startswith("m.b.weight")
    groups["group_1"]["targets"] = ["m.b"]
    groups["group_2"] = {**groups["group_0"], "targets": ["re:.*"]}  # all groups overlap
    assert len(io.read(Files(four | eight, config).write(tmp_path / "c")).groups) == 2
    # Where the tensors fit several groups, the name decides over the pattern, and that over the class.
    measured = {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32, "dynamic": True}
    groups["group_2"] = {**groups["group_1"], "targets": ["re:m"], "input_activations": measured}
    for targets, inputs in ((["m.b"], "none"), (["Linear"], "group")):
        groups["group_1"]["targets"] = targets
        found = io.read(Files(four | eight, config).write(tmp_path / inputs)).groups
        assert found["m.b.weight"].layout.name == f"mxfp8-quantized:group:{inputs}"
    config["config.json"]["quantization_config"]["ignore"] = ["re:.*a$"]
    assert "`ignore`" in refused(tmp_path / "d", Files(four | eight, config)).rule


def _fp8_group(inputs):
    weights = {"num_bits": 8, "type": "float", "strategy": "channel"}
    return {"format": "float-quantized", "weights": weights, "input_activations": inputs}


def _fp8_layer(stem: str, static: bool) -> dict[str, torch.Tensor]:
    tensors = {f"{stem}.weight": torch.ones(32, 64).to(E4M3), f"{stem}.weight_scale": torch.ones(32, 1)}
    return tensors | ({f"{stem}.input_scale": torch.ones(1)} if static else {})


def _nvfp4_group(inputs):
    weights = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
    return {"format": "nvfp4-pack-quantized", "weights": weights, "input_activations": inputs}


def _nvfp4_layer(stem: str, static: bool) -> dict[str, torch.Tensor]:
    return checkpoint_files.compressed_nvfp4(stem, static=static)[0]


_TENSOR, _DYNAMIC = {"num_bits": 8, "strategy": "tensor", "dynamic": False}, {"strategy": "token", "dynamic": True}
#: How a layer is stored, a group, and its inputs with and without a stored scale, and what layouts these are.
_OVERLAPPING = {
    "fp8": (_fp8_layer, _fp8_group, (_TENSOR, "static"), (_DYNAMIC, "token")),
    "fp8 without inputs": (_fp8_layer, _fp8_group, (_TENSOR, "static"), (None, "none")),
    "nvfp4": (_nvfp4_layer, _nvfp4_group, ({"num_bits": 4, "dynamic": "local"}, "local"), (None, "none")),
}


@pytest.mark.parametrize("broad_first", [True, False])
@pytest.mark.parametrize("narrow_is_static", [True, False])
@pytest.mark.parametrize("kind", _OVERLAPPING)
def test_of_two_patterns_that_match_a_layer_the_one_holds_whose_tensors_the_layer_has(
    kind, narrow_is_static, broad_first, tmp_path
):
    layer, group, static, dynamic = _OVERLAPPING[kind]
    broad, narrow = (dynamic, static) if narrow_is_static else (static, dynamic)
    groups = {
        "broad": {"targets": ["re:m"], **group(broad[0])},
        "narrow": {"targets": ["re:.*down"], **group(narrow[0])},
    }
    config = compressed_config("mixed-precision", {}, None)
    order = groups if broad_first else dict(reversed(groups.items()))
    config["config.json"]["quantization_config"]["config_groups"] = order
    tensors = layer("m.up", not narrow_is_static) | layer("m.down", narrow_is_static)
    found = io.read(Files(tensors, config).write(tmp_path / "a")).groups
    kinds = {name: found[f"m.{name}.weight"].layout.name.split(":")[-1] for name in ("up", "down")}
    assert kinds == {"up": broad[1], "down": narrow[1]}


def test_writing_into_a_folder_with_a_checkpoint_needs_to_be_asked_for(tmp_path):
    source = KINDS["modelopt FP8"]().write(tmp_path / "a")
    target = KINDS["modelopt NVFP4"]().write(tmp_path / "b", 3)
    before = {file.name: file.read_bytes() for file in target.iterdir()}
    with pytest.raises(io.CheckpointError, match="overwrite"):
        io.write(target, io.read(source), dialect="modelopt")
    assert {file.name: file.read_bytes() for file in target.iterdir()} == before
    io.write(target, io.read(source), dialect="modelopt", overwrite=True)
    assert checkpoint_files.raw(target) == checkpoint_files.raw(source)
    assert not (target / "model.safetensors.index.json").exists()


def test_a_failed_write_leaves_nothing(tmp_path):
    checkpoint = io.read(KINDS["modelopt NVFP4"]().write(tmp_path / "a"))
    stored = dict(checkpoint)

    class Breaks(dict):
        reads = 0

        def __getitem__(self, name):
            self.reads += 1
            if self.reads > len(stored) + 2:
                raise OSError("the disk is gone")
            return super().__getitem__(name)

    with pytest.raises(OSError, match="the disk is gone"):
        io.write(tmp_path / "b", Breaks(stored), dialect="modelopt")
    assert list((tmp_path / "b").iterdir()) == []


META, SPARSE, COMPLEX = torch.ones(2, device="meta"), torch.eye(2).to_sparse(), torch.zeros(2, dtype=torch.complex128)


def _write(tensors: object, **options: object):
    """A call that writes tensors, or what read() gives of the source."""
    options = {"dialect": None} | options
    return lambda source, to: io.write(to, io.read(source) if tensors is None else tensors, **options)


def _stored_on_meta(source, to):
    checkpoint = io.read(source)
    return io.write(to, {"w": checkpoint.outline(next(iter(checkpoint.groups)))}, dialect="modelopt")


def _save(module: torch.nn.Module, **options: object):
    return lambda source, to: io.save(module, to, **options)


def _convert(**options: object):
    return lambda source, to: io.convert(source, to, **{"to": "quire"} | options)


LINEAR = torch.nn.Linear(4, 4)
#: What is called with a checkpoint and a folder that does not exist, its error, and words of that.
WRONG = {
    "read from no path": (lambda source, to: io.read(3), TypeError, "quire.io.read: path must be a path, got 3"),
    "inspect no path": (
        lambda source, to: io.inspect(None),
        TypeError,
        "quire.io.inspect: path must be a path, got None",
    ),
    "verify no path": (lambda source, to: io.verify(None), TypeError, "quire.io.verify: path must be a path, got None"),
    "verify like no path": (lambda source, to: io.verify(source, 3), TypeError, "quire.io.verify: like must be a path"),
    "diff with no path": (
        lambda source, to: io.diff(source, None),
        TypeError,
        "quire.io.diff: b must be a path, got N",
    ),
    "run no path": (lambda source, to: io.run(None), TypeError, "quire.io.run: path must be a path, got None"),
    "run no rows": (lambda source, to: io.run(source, 0), ValueError, "quire.io.run: tokens must be at least 1, got 0"),
    "run parts of rows": (lambda source, to: io.run(source, 1.5), TypeError, "quire.io.run: tokens must be an int"),
    "run a flag": (lambda source, to: io.run(source, True), TypeError, "quire.io.run: tokens must be an int, got True"),
    "a missing scale of another kind": (
        lambda source, to: io.read(source, missing_input_scale="zero"),
        ValueError,
        "quire.io.read: missing_input_scale must be one of",
    ),
    "a size in words": (
        _write(None, dialect="modelopt", max_shard_size="five"),
        ValueError,
        "quire.io.write: max_shard_size must be a number of bytes or a text such as '5GB', got 'five'",
    ),
    "less than a byte": (_save(LINEAR, max_shard_size="0.2B"), ValueError, "quire.io.save: max_shard_size must be"),
    "no such dialect": (_write(None, dialect="x"), io.CheckpointError, "there is no dialect 'x'"),
    "a dialect by another name": (
        _write(None, dialect="model-opt"),
        io.CheckpointError,
        "reads gguf and te and does not write.*did you mean 'modelopt'",
    ),
    "a number for a dialect": (_write(None, dialect=1), TypeError, "quire.io.write: dialect must be a str, got 1"),
    "save as a number": (_save(LINEAR, dialect=1), TypeError, "quire.io.save: dialect must be a str, got 1"),
    "no tensor": (_write({"a": 3}), TypeError, "StoredWeight or a plain tensor"),
    "quantized without a dialect": (_write(None), io.CheckpointError, "no dialect says how"),
    "write to no path": (
        lambda source, to: io.write(None, {}, dialect=None),
        TypeError,
        "quire.io.write: path must be",
    ),
    "a number for a name": (_write({1: torch.ones(1)}), TypeError, "quire.io.write: a key of tensors must be a str, g"),
    "a name of the header": (_write({"__metadata__": torch.ones(1)}), io.CheckpointError, "__metadata__: .*; rename t"),
    "a tensor without values": (_write({"a": META}), io.CheckpointError, "a: the tensor is on the meta device and has"),
    "a layer without values": (_stored_on_meta, io.CheckpointError, "w: the weight is on the meta device and has no v"),
    "a sparse tensor": (
        _write({"a": SPARSE}),
        TypeError,
        r"quire.io.write: a: tensor must be a dense .*\.to_dense\(\)",
    ),
    "a dtype that files lack": (_write({"a": COMPLEX}), io.CheckpointError, "a: files have no torch.complex128, but"),
    "a model without values": (
        _save(torch.nn.Linear(4, 4, device="meta")),
        io.CheckpointError,
        "weight: the model has no values for it, as on the meta device .*; load the values first",
    ),
    "a layer that has not run": (
        _save(torch.nn.LazyLinear(4)),
        io.CheckpointError,
        "weight: the model has no values f",
    ),
    "a number for a configuration": (_write({}, config=1), TypeError, "quire.io.write: config must be a dict, got 1"),
    "a number for a key": (
        _write({}, config={1: 2}),
        TypeError,
        "quire.io.write: a key of config must be a str, got 1",
    ),
    "no JSON": (_write({}, config={"a": {1}}), TypeError, "quire.io.write: config must have a form in JSON: Object of"),
    "a file elsewhere": (
        _write({}, config={"../a.json": {}}),
        ValueError,
        "quire.io.write: a file of config must be in the folder itself.*got '../a.json'",
    ),
    "the index": (
        _write({}, config={"model.safetensors.index.json": {}}),
        ValueError,
        "and not be the index, wh",
    ),
    "a configuration that nobody reads": (
        _write({}, config={"config.json": 1}),
        TypeError,
        "quire.io.write: config.json must be a dict, got 1",
    ),
    "convert from no path": (
        lambda source, to: io.convert(None, to, to="quire"),
        TypeError,
        "quire.io.convert: src must be a path, got None",
    ),
    "convert to no path": (
        lambda source, to: io.convert(source, None, to="quire"),
        TypeError,
        "quire.io.convert: dst must be a path, got None",
    ),
    "a number for a filter": (_convert(filter=1), TypeError, "quire.io.convert: filter must be a function, got 1"),
    "codes of a given scale": (
        _convert(requantize="nvfp4:given"),
        ValueError,
        "quire.io.convert: requantize='nvfp4:given' needs a scale from somebody.*leave the option 'given' out",
    ),
    "codes of random numbers": (
        _convert(requantize="nvfp4:sr"),
        ValueError,
        "quire.io.convert: requantize='nvfp4:sr' needs a seed, and there is none; leave the option 'sr' out",
    ),
    "codes of no format": (
        _convert(requantize="fp9"),
        ValueError,
        "quire.io.convert: requantize: spec: unknown family in '>>fp9<<'",
    ),
    "a number for a spec": (
        _convert(requantize=9),
        TypeError,
        "quire.io.convert: requantize must be a str or a QuantSpec",
    ),
}
for name in ("exact", "overwrite"):
    for call, made in (("save", _save(LINEAR, **{name: "no"})), ("convert", _convert(**{name: "no"}))):
        WRONG[f"{call}, {name} in words"] = made, TypeError, f"quire.io.{call}: {name} must be a bool, got 'no'"
    WRONG[f"write, {name} in words"] = (
        _write({}, **{name: 0}),
        TypeError,
        f"quire.io.write: {name} must be a bool, got 0",
    )


@pytest.mark.parametrize("end", [".safetensors", ".gguf", ".pt", ".pth", ".bin", ".SAFETENSORS"])
def test_a_folder_with_the_name_of_a_file_is_refused(end, tmp_path):
    source = KINDS["modelopt NVFP4"]().write(tmp_path / "a")
    calls = {
        "save": lambda to: io.save(LINEAR, to),
        "write": lambda to: io.write(str(to), io.read(source), dialect="modelopt", overwrite=True),
        "convert": lambda to: io.convert(source, to, to="quire"),
    }
    for name, call in calls.items():
        target = tmp_path / f"{name}.5{end}"
        text = rf"quire.io.{name}: the checkpoint is written into a folder, and '.*\.5{end}' .*such as '(.*\.5)', which"
        with pytest.raises(ValueError, match=text) as caught:
            call(target)
        assert not target.exists()
        call(re.search(text, str(caught.value))[1])  # the remedy
    target.mkdir()
    with pytest.raises(ValueError, match="is the name of a file"):
        io.save(LINEAR, target)
    assert not list(target.iterdir())


@pytest.mark.parametrize("what", WRONG)
def test_wrong_arguments_are_refused_and_nothing_is_written(what, tmp_path):
    call, error, text = WRONG[what]
    source = KINDS["modelopt NVFP4"]().write(tmp_path / "a")
    with pytest.raises(error, match=text):
        call(source, tmp_path / "b")
    assert [file.name for file in tmp_path.iterdir()] == ["a"]


def test_plain_tensors_are_no_checkpoint_of_a_dialect(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(64, 64))
    dense = io.read(Files({"a.weight": torch.randn(64, 64)}, {}).write(tmp_path / "a"))
    writing = (
        lambda dialect: io.save(model, tmp_path / "b", dialect=dialect),
        lambda dialect: io.write(tmp_path / "b", dense, dialect=dialect),
        lambda dialect: io.convert(tmp_path / "a", tmp_path / "b", to=dialect),
    )
    for write, dialect in itertools.product(writing, ("modelopt", "compressed-tensors", "quire")):
        with pytest.raises(io.CheckpointError, match=f"{dialect} is a dialect of quantized layers.*quire.convert"):
            write(dialect)
        assert not (tmp_path / "b").exists()
    assert io.write(tmp_path / "b", model.state_dict(), dialect=None).layers == 0
    with pytest.raises(io.CheckpointError, match="quire reads te and does not write it"):
        io.save(
            quire.convert(model, "mxfp8", for_inference=True, tokens=None, min_features=1), tmp_path / "c", dialect="te"
        )


def test_a_recipe_that_a_save_changes_is_named_first_and_losses_alike_share_a_line(tmp_path):
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(64, 64, bias=False) for _ in range(12)])
    quire.convert(model, "nvfp4", for_inference=True, tokens=None, min_features=1)
    report = io.save(model, tmp_path / "a", dialect="modelopt", exact=False)
    first, second, *others = str(report).splitlines()
    assert first.startswith("12 quantized layers, 0 plain tensors; in all 36 tensors, ") and first.endswith(
        "configurations"
    )
    assert second.startswith(
        "the recipe changes: inputs are not quantized, before as nvfp4 (w=nvfp4:nan -> modelopt W4A16"
    )
    assert len(report.losses) == 12 and len(others) == 1
    assert others[0].startswith("0.weight ... 11.weight, 12 tensors: the global scale")
    named = torch.nn.ModuleDict({"q": torch.nn.Linear(64, 64), "k": torch.nn.Linear(64, 64)})
    quire.convert(named, "nvfp4", for_inference=True, tokens=None, min_features=1)
    *_, last = str(io.save(named, tmp_path / "b", dialect="modelopt", exact=False)).splitlines()
    assert last.startswith("q.weight, k.weight, 2 tensors: the global scale")


@pytest.mark.cpu_only
def test_errors_survive_pickling():
    error = io.CheckpointError("a rule", "a remedy", file="f", tensor="t")
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.file, again.tensor) == (str(error), "f", "t")


@pytest.mark.cpu_only
def test_a_byte_type_without_counterpart_is_refused(tmp_path):
    text = json.dumps({"a": {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [0, 3]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(3))
    with pytest.raises(io.CheckpointError):
        io.read(tmp_path)
    assert E4M3.itemsize == 1
