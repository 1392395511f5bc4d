"""Experts of a checkpoint, one by one or in one tensor, in every layer of quire that holds experts."""

import pytest
import torch

import quire
from python.io.checkpoint_files import (
    BF16,
    E4M3,
    U8,
    Files,
    bytes_of,
    e2m1,
    e4m3,
    every_byte,
    modelopt_config,
    modelopt_nvfp4,
    plain_scales,
    raw,
    spread,
)
from quire import io

pytestmark = pytest.mark.any_device

HIDDEN, FFN, EXPERTS = 32, 48, 4


def one_by_one(*, bias: bool = False, shared: str = "", names: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")):
    torch.manual_seed(0)
    tensors, values = {"mlp.gate.weight": torch.randn(EXPERTS, HIDDEN).to(BF16)}, {}

    def add(stem: str, rows: int, columns: int, scale: float) -> None:
        made, value = modelopt_nvfp4(stem, rows, columns, scale2=scale, scales=plain_scales(rows, columns // 16))
        tensors.update(made)
        values[f"{stem}.weight"] = value
        if bias:
            tensors[f"{stem}.bias"] = torch.randn(rows).to(BF16)

    for stem in [f"mlp.experts.{e}" for e in range(EXPERTS)] + ([f"mlp.{shared}"] if shared else []):
        for number, name in enumerate(names):
            down = number == 2
            add(f"{stem}.{name}", HIDDEN if down else FFN, FFN if down else HIDDEN, 0.001 * (len(values) + 1))
    return Files(tensors, modelopt_config("NVFP4", exclude_modules=[]), values)


def in_one() -> Files:
    torch.manual_seed(0)
    tensors, values = {"mlp.router.weight": torch.randn(EXPERTS, HIDDEN).to(BF16)}, {}
    for name, rows, columns in (("gate_up_proj", 2 * FFN, HIDDEN), ("down_proj", HIDDEN, FFN)):
        stem = f"mlp.experts.{name}"
        data = every_byte(EXPERTS, rows, columns // 2)
        scales = plain_scales(EXPERTS, rows, columns // 16)
        second = torch.rand(EXPERTS) / 100 + 0.001
        tensors[stem] = data.transpose(1, 2).contiguous()
        tensors[f"{stem}_weight_scale"] = scales.view(U8).transpose(1, 2).contiguous().view(E4M3)
        tensors[f"{stem}_weight_scale_2"] = second
        tensors[f"{stem}_input_scale"] = torch.rand(EXPERTS) / 100 + 0.001
        blocks = e4m3(bytes_of(scales)) * second.numpy()[:, None, None]
        values[stem] = e2m1(data.numpy()) * spread(blocks, 16, columns)
    return Files(tensors, modelopt_config("NVFP4", exclude_modules=[]), values)


class Model(torch.nn.Module):
    def __init__(self, **options: object) -> None:
        super().__init__()
        self.mlp = quire.MoE(HIDDEN, FFN, EXPERTS, **options)


def values_of(layer: quire.GroupedLinear) -> torch.Tensor:
    return torch.stack([weight.dequantize(torch.float32).detach() for weight in layer.group_weights("")])


SINGLE = pytest.mark.parametrize("single", [False, True])
DEVICE = pytest.mark.parametrize("device", ["cpu", "meta"])


@pytest.mark.cpu_only
@SINGLE
@DEVICE
@pytest.mark.parametrize("shared", ["", "shared_expert", "shared_experts"])
@pytest.mark.parametrize("names", [("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2")], ids="".join)
def test_experts_one_by_one(single, device, shared, names, tmp_path):
    files = one_by_one(bias=True, shared=shared, names=names)
    source = files.write(tmp_path / "a")
    options = {"shared_ffn_hidden_size": FFN} if shared else {}
    with torch.device(device):
        model = Model(bias=True, single_grouped_weight=single, **options)
    io.load(model, source, activations="mxfp8")
    stems = [f"mlp.experts.{e}" for e in range(EXPERTS)]
    fc1 = torch.stack(
        [torch.cat([torch.from_numpy(files.values[f"{s}.{n}.weight"]) for n in names[:2]]) for s in stems]
    )
    assert torch.equal(values_of(model.mlp.fc1), fc1)
    assert torch.equal(values_of(model.mlp.fc2)[2], torch.from_numpy(files.values[f"{stems[2]}.{names[2]}.weight"]))
    bias = model.mlp.fc1.bias[3] if single else model.mlp.fc1.bias3
    assert torch.equal(bias.to(BF16), torch.cat([files.tensors[f"{stems[3]}.{n}.bias"] for n in names[:2]]))
    if shared:
        expected = torch.from_numpy(files.values[f"mlp.{shared}.{names[2]}.weight"])
        assert torch.equal(model.mlp.shared_fc2.weight.dequantize(torch.float32), expected)
    with torch.no_grad():
        assert bool(torch.isfinite(model.mlp(torch.randn(9, HIDDEN))).all())
    io.save(model, tmp_path / "b")
    assert raw(tmp_path / "b") == raw(source)


@pytest.mark.cpu_only
@SINGLE
@DEVICE
def test_experts_in_one_tensor(single, device, tmp_path):
    files = in_one()
    source = files.write(tmp_path / "a")
    with torch.device(device):
        model = Model(single_grouped_weight=single)
    io.load(model, source, activations="mxfp8")
    assert torch.equal(values_of(model.mlp.fc1), torch.from_numpy(files.values["mlp.experts.gate_up_proj"]))
    assert torch.equal(values_of(model.mlp.fc2), torch.from_numpy(files.values["mlp.experts.down_proj"]))
    io.save(model, tmp_path / "b")
    assert raw(tmp_path / "b") == raw(source)


@SINGLE
@pytest.mark.parametrize("path", ["experts", "experts.up_proj"])
def test_a_grouped_linear_by_itself(single, path, tmp_path):
    tensors, values = {}, []
    for e in range(3):
        stem = f"experts.{e}" + path.removeprefix("experts")
        made, value = modelopt_nvfp4(stem, FFN, HIDDEN, scale2=0.01 * (e + 1), scales=plain_scales(FFN, HIDDEN // 16))
        tensors |= made
        values.append(torch.from_numpy(value))
    source = Files(tensors, modelopt_config("NVFP4", exclude_modules=[])).write(tmp_path / "a")
    layer = quire.GroupedLinear(3, HIDDEN, FFN, bias=False, single_grouped_weight=single)
    inner = layer if path == "experts" else torch.nn.ModuleDict({"up_proj": layer})
    model = torch.nn.ModuleDict({"experts": inner})
    io.load(model, source, activations="mxfp8")
    assert torch.equal(values_of(layer), torch.stack(values))
    io.save(model, tmp_path / "b")
    assert raw(tmp_path / "b") == raw(source)
    with pytest.raises(io.CheckpointError, match="names of model and checkpoint differ.*rename="):
        io.load(model, source, activations="mxfp8", experts="none")


def test_each_matrix_of_an_entry_keeps_its_scale_of_the_input(tmp_path):
    scales = torch.tensor([0.1, 0.2, 0.3])

    def stack():
        return torch.nn.ModuleDict({"up": quire.GroupedLinear(3, HIDDEN, FFN, bias=False, single_grouped_weight=True)})

    model, loaded = stack(), stack()
    quire.convert(model, "x=fp8_tensor:given,w=fp8_tensor,dy=mxfp8", for_inference=True, min_features=16, tokens=None)
    model["up"].input_scale.copy_(scales)
    io.save(model, tmp_path, dialect="quire")
    io.load(loaded, tmp_path)
    assert torch.equal(loaded["up"].input_scale, scales)


def test_experts_that_are_missing_are_named(tmp_path):
    files = one_by_one()
    for name in [name for name in files.tensors if name.startswith("mlp.experts.2.up_proj")]:
        del files.tensors[name]
    with pytest.raises(io.CheckpointError, match="mlp.fc1.weight2") as caught:
        io.load(Model(), files.write(tmp_path), activations="mxfp8")
    assert "mlp.experts.2.gate_proj.weight" in caught.value.rule


def test_a_trained_expert_is_saved_under_its_name(tmp_path):
    source = one_by_one().write(tmp_path / "a")
    model = Model()
    io.load(model, source, activations="mxfp8")
    with torch.no_grad():
        model.mlp.fc2.weight1.mul_(2.0)
    io.save(model, tmp_path / "b")
    old, new = raw(source), raw(tmp_path / "b")
    changed = {name for name in old if old[name] != new[name]}
    assert changed and all(name.startswith("mlp.experts.1.down_proj.") for name in changed)
    stored = io.read(tmp_path / "b")["mlp.experts.1.down_proj.weight"]
    assert torch.equal(stored.dequantize(torch.float32), model.mlp.fc2.weight1.dequantize(torch.float32))


def test_a_trained_weight_that_was_joined_is_refused_if_its_rows_lost_their_scale(tmp_path):
    source = one_by_one().write(tmp_path / "a")
    model = Model()
    io.load(model, source, activations="mxfp8")
    with torch.no_grad():
        model.mlp.fc1.weight1.mul_(2.0)  # each row gets a scale of its own
    with pytest.raises(io.CheckpointError, match="no common scale any more.*nvfp4:global=mul.*without fuse="):
        io.save(model, tmp_path / "b")
    assert not list((tmp_path / "b").glob("*"))
    io.save(model, tmp_path / "c", dialect="quire")


@pytest.mark.parametrize("algorithm", ["NVFP4", "FP8"])
def test_a_trained_weight_that_was_joined_is_saved_as_its_parts(algorithm, tmp_path):
    """NVFP4 whose rows have one largest value in each part; FP8 by rows, which ModelOpt has too."""
    tensors = {}
    for number, name in enumerate(("q_proj", "k_proj"), start=1):
        if algorithm == "NVFP4":
            scales = plain_scales(FFN, HIDDEN // 16)
            tensors |= modelopt_nvfp4(name, FFN, HIDDEN, scale2=0.001 * number, scales=scales)[0]
        else:
            codes = every_byte(FFN, HIDDEN) & 0x7E
            tensors |= {f"{name}.weight": codes.view(E4M3), f"{name}.weight_scale": torch.tensor(0.01 * number)}
    config = modelopt_config(algorithm, exclude_modules=[])
    source = Files(tensors, config).write(tmp_path / "a")
    model = torch.nn.ModuleDict({"qk_proj": torch.nn.Linear(HIDDEN, 2 * FFN, bias=False)})
    options = {"activations": "mxfp8", "missing_input_scale": "dynamic", "fuse": {"qk_proj": ["q_proj", "k_proj"]}}
    io.load(model, source, **options)
    values = torch.randn(2 * FFN, HIDDEN).clamp(-1, 1)
    if algorithm == "NVFP4":
        values[:FFN, 0], values[FFN:, 0] = 1.5, 3.0
    with torch.no_grad():
        model["qk_proj"].weight.copy_(values)
    io.save(model, tmp_path / "b")
    found = io.read(tmp_path / "b", missing_input_scale="dynamic")
    wanted = model["qk_proj"].weight.dequantize(torch.float32).detach().split(FFN)
    for name, part in zip(("q_proj", "k_proj"), wanted, strict=True):
        assert torch.equal(found[f"{name}.weight"].dequantize(torch.float32), part)
    again = torch.nn.ModuleDict({"qk_proj": torch.nn.Linear(HIDDEN, 2 * FFN, bias=False)})
    io.load(again, tmp_path / "b", **options)
    assert torch.equal(again["qk_proj"].weight.dequantize(torch.float32), torch.cat(wanted))
