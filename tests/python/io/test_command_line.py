"""python -m quire.io."""

import json
import os
import sys

import pytest
import torch

from python.io.checkpoint_files import Files, modelopt_config, modelopt_nvfp4, plain_scales, raw
from python.io.checkpoint_kinds import KINDS
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
    assert "q_proj.weight_scale: 1 scales are NaN" in out and "q_proj.input_scale: 1 scales are zero" in out
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
    for arguments in ([], ["inspect"], ["convert", "a", "b", "--to", "nothing"], ["unknown"]):
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
