"""python -m quire.io."""

import json
import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

import quire
from python.io.checkpoint_files import Files, modelopt_config, modelopt_nvfp4, plain_scales, raw
from python.io.checkpoint_kinds import KINDS
from quire import io
from quire.io import inspection
from quire.io.__main__ import main


@pytest.fixture
def source(tmp_path):
    tensors = {"model.norm.weight": torch.ones(64)}
    for layer in range(60):
        for part in ("self_attn.q_proj", "mlp.down_proj"):
            stem = f"model.layers.{layer}.{part}"
            tensors |= modelopt_nvfp4(stem, 32, 64, scale2=0.5, scales=plain_scales(32, 4))[0]
            tensors[f"{stem}.input_scale"] = torch.tensor(0.5)
        tensors[f"model.layers.{layer}.self_attn.k_proj.k_scale"] = torch.tensor(1.0)
    return Files(tensors, modelopt_config("NVFP4")).write(tmp_path / "source")


def test_a_model_of_60_layers_fits_a_screen(source, capsys):
    assert main(["inspect", str(source)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) < 24 and max(map(len, lines[1:])) < 160
    assert "modelopt" in lines[1] and "120 quantized layers" in lines[1] and "60 scales of caches" in lines[1]
    assert any("model.layers.*.mlp.down_proj.weight" in line and " 60 " in line for line in lines)


def test_json_says_the_same(source, capsys):
    assert main(["inspect", str(source), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["dialect"] == "modelopt" and len(found["layers"]) == 120 and found["problems"] == []
    assert found["layers"][0]["shape"] == [32, 64]


def test_findings_give_code_1(source, capsys, tmp_path):
    assert main(["verify", str(source)]) == 0
    assert main(["diff", str(source), str(source)]) == 0
    files = KINDS["modelopt FP8"]()
    files.tensors["model.layers.0.self_attn.q_proj.weight_scale"] = torch.tensor(float("nan"))
    files.tensors["model.layers.0.self_attn.q_proj.input_scale"] = torch.tensor(0.0)
    broken = files.write(tmp_path / "broken")
    capsys.readouterr()
    assert main(["verify", str(broken)]) == 1
    out = capsys.readouterr().out
    assert "q_proj.weight_scale: 1 scale is NaN" in out and "q_proj.input_scale: 1 scale is zero" in out
    assert main(["diff", str(source), str(broken)]) == 1
    del files.tensors["model.layers.0.self_attn.q_proj.weight_scale"]
    missing = files.write(tmp_path / "missing")
    capsys.readouterr()
    assert main(["inspect", str(missing)]) == 1
    assert "problem:" in capsys.readouterr().out
    os.truncate(missing / "model.safetensors", 1000)
    assert main(["inspect", str(missing)]) == 1
    assert "no complete safetensors file" in capsys.readouterr().err
    assert main(["inspect", str(missing), "--json"]) == 1
    assert "no complete safetensors file" in json.loads(capsys.readouterr().out)["error"]


def test_all_faults_of_a_file_are_listed_with_what_was_not_checked(tmp_path, capsys):
    tensors, stems = {}, [f"model.layers.{i}.mlp.down_proj" for i in range(14)]
    for stem in stems:
        tensors |= modelopt_nvfp4(stem, 32, 64, scale2=0.5, scales=plain_scales(32, 4))[0]
        tensors[f"{stem}.input_scale"] = torch.tensor(0.5)
    files = Files(tensors, modelopt_config("NVFP4"))
    assert main(["verify", str(files.write(tmp_path / "whole"))]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith(": 14 layers checked, 0 problems") and len(lines) == 13
    assert lines[1] == "the 10 of 14 layers with the most saturated codes:" and "SQNR" not in lines[2]
    del tensors[f"{stems[1]}.weight_scale"]
    tensors[f"{stems[4]}.weight_scale_2"] = torch.tensor([[1.0, 2.0]])
    tensors[f"{stems[6]}.weight_scale_2"] = torch.tensor(float("nan"))
    del tensors[f"{stems[8]}.input_scale"]
    broken = files.write(tmp_path / "broken")
    assert main(["verify", str(broken)]) == 1
    said = capsys.readouterr().out
    assert "12 layers checked, 5 problems" in said
    problems = [line for line in said.splitlines() if line.startswith("problem: ")]
    for problem, stem, what in [
        (problems[0], stems[1], "missing"),
        (problems[1], stems[4], "[1, 2]"),
        (problems[2], stems[8], "static scale of an input is missing"),
        (problems[3], stems[6], "1 scale is NaN"),
        (problems[4], stems[6], "2048 values are NaN"),
    ]:
        assert stem in problem and what in problem
    (left,) = [line for line in said.splitlines() if line.startswith("not checked")]
    assert f"{stems[1]}.weight" in left and " and 2 more" in left
    assert main(["verify", str(broken), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert {name.rpartition(".")[0] for name in found["left_out"]} == {stems[1], stems[4]}
    assert main(["inspect", str(broken)]) == 1
    out = capsys.readouterr().out
    assert out.count("problem: ") == 3
    faulty = [line for line in out.splitlines() if "of a layer that breaks a rule" in line]
    assert len(faulty) == 5
    rows = [line for line in out.splitlines() if line.startswith("model.layers.*.mlp.down_proj.weight ")]
    assert len(rows) == 3 and sum("nvfp4" in row for row in rows) == 2  # with a static scale of inputs, and without


def test_other_layers_of_the_dialect_quire_are_checked_too(tmp_path):
    model = quire.convert(torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(3)]), "mxfp8", min_features=1)
    quire.convert(model, "mxfp8", for_inference=True, tokens=None, min_features=1)
    quire.io.save(model, tmp_path, dialect="quire")
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    scales = sorted(name for name in tensors if name.endswith("scale"))
    tensors[scales[0]].view(torch.uint8)[0, 0] = 255
    del tensors[scales[1]]
    save_file(tensors, file)
    found = quire.io.verify(tmp_path)
    missing, *faults = found.problems
    assert "1.weight" in missing and "missing" in missing and all("0.weight" in fault for fault in faults) and faults
    assert {layer.name for layer in found.layers} == {"0.weight", "2.weight"}


def test_one_thing_is_not_said_in_the_plural(tmp_path, capsys):
    stem = "model.layers.0.mlp.down_proj"
    tensors = modelopt_nvfp4(stem, 32, 64, scale2=0.5, scales=plain_scales(32, 4))[0]
    tensors[f"{stem}.input_scale"] = torch.tensor(float("nan"))
    folder = str(Files(tensors, modelopt_config("NVFP4")).write(tmp_path / "a"))
    said = []
    tensors[f"{stem}.input_scale"] = torch.tensor(0.5)
    whole = str(Files(tensors, modelopt_config("NVFP4")).write(tmp_path / "b"))
    for command, path in (("inspect", folder), ("verify", folder), ("run", whole)):
        main([command, path])
        said.append(capsys.readouterr().out)
    assert "modelopt, 1 file, " in said[0] and "1 quantized layer of" in said[0] and "0 plain tensors" in said[0]
    assert "1 layer checked, 1 problem\n" in said[1] and "1 scale is NaN" in said[1] and "1 layer ran" in said[2]


def test_what_is_not_finite_or_far_away_is_not_measured(tmp_path):
    def stored(name, values):
        io.write(tmp_path / name, {"w": torch.tensor(values), "other": torch.ones(1)}, dialect=None)
        return tmp_path / name

    one = stored("one", [1.0, 2.0, float("nan"), 4.0])
    near = torch.nextafter(torch.tensor(1.0), torch.tensor(2.0)).item()
    for name, values, how in (
        ("next", [near, 2.0, float("nan"), 4.0], "1 of 4 values differs, at most 1 ulp of float32"),
        ("far", [-1.0, 2.0, float("nan"), 4.0], "1 of 4 values differs, other values"),
        ("nan", [1.0, 2.0, 3.0, float("nan")], "2 of 4 values differ, 2 in NaN"),
        ("both", [near, 2.0, 3.0, 4.0], "2 of 4 values differ, 1 in NaN, at most 1 ulp of float32"),
    ):
        assert io.diff(one, stored(name, values)).different == {"w": f"torch.float32 and torch.float32: {how}"}
    run = inspection.Run("a", (inspection.LayerRun("w", "x", float("nan"), False),))
    assert "not finite" in str(run) and "nan" not in str(run)


@pytest.mark.parametrize("program", ["quire.io", "quire.info"])
def test_a_reader_that_ends_early_ends_the_program_quietly(program, source):
    command = [sys.executable, "-m", program, *(["inspect", str(source)] if program == "quire.io" else [])]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    running.stdout.close()
    _, said = running.communicate()
    assert said == b"" and running.returncode != 0


def test_converting_there_and_back(source, tmp_path, capsys):
    there, back = str(tmp_path / "there"), str(tmp_path / "back")
    assert main(["convert", str(source), there, "--to", "compressed-tensors", "--max-shard-size", "50kB"]) == 0
    assert main(["convert", there, back, "--to", "modelopt", "--json"]) == 0
    assert raw(tmp_path / "back") == raw(source)
    assert main(["convert", str(source), there, "--to", "modelopt"]) == 1  # there is one already
    assert "overwrite" in capsys.readouterr().err
    assert main(["convert", str(source), there, "--to", "modelopt", "--overwrite", "--filter", "model.layers.3.*"]) == 0
    assert len(raw(tmp_path / "there")) == 9


def test_wrong_arguments_give_code_2():
    for arguments in (
        [],
        ["inspect"],
        ["convert", "a", "b", "--to", "nothing"],
        ["convert", "a", "b", "--to", "te"],
        ["unknown"],
    ):
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 2


def test_a_prompt_without_transformers_says_what_to_install(source, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert main(["run", str(source), "--prompt", "Once"]) == 1
    said = capsys.readouterr().err
    assert "python -m quire.io run --prompt needs the package transformers" in said and "pip install 'transform" in said
    assert main(["run", str(source), "--prompt", "Once", "--new-tokens", "0"]) == 1
    assert "new_tokens must be at least 1, got 0" in capsys.readouterr().err
