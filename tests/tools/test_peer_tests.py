"""tools/peer_tests.py on an invented folder of tests: every class of ends, the limit of cases and the names."""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).parents[2] / "tools"

INVENTED = """
import time
import pytest
import torch
import transformer_engine.pytorch as te
import transformer_engine_torch as tex
from transformer_engine.common.recipe import DelayedScaling
from transformer_engine.pytorch import no_such_layer, onnx_export

@pytest.mark.parametrize("n", range(7))
def test_passes(n):
    assert torch.zeros(2, device="cuda").cuda().device.type == "cpu" and DelayedScaling() is not None
    assert te.Linear(16, 16, device="cuda").weight.device.type == "cpu"

def test_internal():
    tex.quantize(1)

def test_documented():
    onnx_export(True)

def test_missing():
    no_such_layer(1)

def test_wrong():
    torch.testing.assert_close(torch.zeros(1), torch.ones(1))

def test_skipped():
    pytest.skip("here")

def test_slow():
    while True:
        time.process_time()

def test_too_late():
    pass
"""

ROWS = """
test_passes 3 0 0 0 0 0 0 0
test_internal 0 0 1 0 0 0 0 0
test_documented 0 0 0 1 0 0 0 0
test_missing 0 0 0 0 1 0 0 0
test_wrong 0 0 0 0 0 1 0 0
test_skipped 0 1 0 0 0 0 0 0
test_slow 0 0 0 0 0 0 1 0
test_too_late 0 0 0 0 0 0 0 1
"""


def test_each_end_of_a_case_is_counted_in_its_column(tmp_path):
    folder = tmp_path / "te/tests/pytorch"
    folder.mkdir(parents=True)
    (folder / "test_invented.py").write_text(INVENTED)
    command = [sys.executable, TOOLS / "peer_tests.py", "--te", tmp_path / "te", "--only", "test_invented"]
    command += ["--cases", "3", "--seconds", "6", "--minutes", "0.09", "--out", tmp_path / "out"]
    command += ["--write", tmp_path / "found.json", tmp_path / "found.md"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    for row in ROWS.strip().splitlines():
        name, *counts = row.split()
        assert f"| test_invented.py::{name} | {' | '.join(counts)} |" in printed
    assert "| all | 3 | 1 | 1 | 1 | 1 | 1 | 1 | 1 |" in printed
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["counts"]["test_invented.py::test_passes"] == {"passed": 3} and found["commit"] == "unknown"
    assert "| test_invented.py | 3 | 1 | 1 | 1 | 1 | 1 | 1 | 1 |" in (tmp_path / "found.md").read_text()
    records = [json.loads(line) for line in (tmp_path / "out/test_invented.jsonl").read_text().splitlines()]
    (wrong,) = [record for record in records if record["kind"] == "wrong"]
    assert "Mismatched elements: 1 / 1" in wrong["text"] and "test_invented.py" in wrong["text"]

    (folder / "test_invented.py").unlink()  # a second run reads what the first has written, and classifies it anew
    for record in records:
        record["kind"] = "unknown" if record["kind"] in ("wrong", "missing") else record["kind"]
    (tmp_path / "out/test_invented.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == printed


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        ("peer_names.InternalName: x", "internals"),
        ("NotImplementedError: quire.Linear: ub_name='a' is not available in this version", "documented"),
        ("NotImplementedError: quire.Linear: no_such_option='a' is not available in this version", "unknown"),
        ("NotImplementedError: something", "unknown"),
        ("AttributeError: quire.onnx_export is not available: ONNX has no operators. Use torch.export", "documented"),
        ("RuntimeError: quire.Linear: device 'cuda' is not available: there is none", "unknown"),
        ("TypeError: f() got an unexpected keyword argument 'x'", "missing"),
        ("AttributeError: 'QuantizedTensor' object has no attribute '_data'", "internals"),
        ("AttributeError: 'QuantizedTensor' object has no attribute 'data_'", "missing"),
        ("AttributeError: 'CppFunction' object has no attribute 'tensor_objects'", "internals"),
        ("AttributeError: '_AddedInPlaceBackward' object has no attribute 'tensor_objects'", "internals"),
        ("RuntimeError: Backward context does not expose required attributes: backward_override, fp8.", "internals"),
        ("RuntimeError: Tried to instantiate dummy base class CUDAGraph", "internals"),
        ("AttributeError: 'Linear' object has no attribute 'fp8_meta'", "missing"),
        ("AttributeError: 'Linear' object has no attribute 'quantizers'", "documented"),
        ("AttributeError: 'BasicLinear' object has no attribute 'get_quantizer'", "internals"),
        ("AssertionError: assert 'global_fp8_buffer_pos_fwd_recompute' in {}", "internals"),
        ("AttributeError: 'Linear' object has no attribute 'fp8_meta_tensors_initialized'", "internals"),
        ("AttributeError: 'QuantizedTensor' object has no attribute 'rowwise_data'", "missing"),
        ("AttributeError: 'Parameter' object has no attribute 'rowwise_data'", "documented"),
        ("AttributeError: 'GroupedLinear' object has no attribute 'make_grouped_weights'", "documented"),
        (
            "TypeError: No comparison pair was able to handle inputs of type <class 'a.QuantizedActivation'>",
            "documented",
        ),
        ("AssertionError: assert isinstance(QuantizedActivation(), QuantizedTensor)", "documented"),
        ("AttributeError: 'QuantizedActivation' object has no attribute 'data_ptr'", "missing"),
        ("TypeError: QuantizedActivation: its decoded values are not in memory", "documented"),
        ("AssertionError: QuantizedActivation('mxfp8', shape=[2]) != tensor([1.0, 2.0])", "wrong"),
        ("RuntimeError: QuantizedActivation: its parts are a carrier", "unknown"),
        ("AssertionError: Tensor-likes are not close!", "wrong"),
        ("UnboundLocalError: cannot access local variable 'msg' where it is not associated with a value", "wrong"),
        ("assert None == 128\n +  where None = Fp8Padding().align_size", "wrong"),
        ("RuntimeError: other", "unknown"),
    ],
)
def test_a_failure_is_classified_by_its_error(error, kind, monkeypatch):
    monkeypatch.syspath_prepend(str(TOOLS))
    import peer_tests

    assert peer_tests.classify(error) == kind


def test_differences_are_those_that_the_page_says(monkeypatch):
    monkeypatch.syspath_prepend(str(TOOLS))
    import peer_tests

    page = " ".join(peer_tests.PAGE.read_text().split())
    assert [name for name, words in peer_tests.DIFFERENCES.items() if words not in page] == []
    name = next(iter(peer_tests.DIFFERENCES))
    assert peer_tests.classify("assert 1 == 2", f"a/test_file.py::Class::{name}[x-y]") == "documented"
    assert peer_tests.classify("assert 1 == 2", f"a/test_file.py::{name}_too") == "wrong"
    monkeypatch.setattr(peer_tests, "DIFFERENCES", {"test_some[first-": ""})
    kinds = [peer_tests.classify("assert 1 == 2", f"a.py::test_some[{case}]") for case in ("first-2", "second-2")]
    assert kinds == ["documented", "wrong"]
    monkeypatch.setattr(peer_tests, "DIFFERENCES", {"test_some[*-b": ""})
    kinds = [peer_tests.classify("assert 1 == 2", f"a.py::test_some[{case}]") for case in ("a.1-b-c", "a-c-b", "a-a-b")]
    assert kinds == ["documented", "wrong", "wrong"]


def test_a_seed_draws_the_same_cases_again_and_others_than_another_seed(tmp_path):
    folder = tmp_path / "te/tests/pytorch"
    folder.mkdir(parents=True)
    (folder / "test_many.py").write_text(
        "import pytest\n\n@pytest.mark.parametrize('n', range(90))\ndef test_many(n):\n    pass\n"
    )
    drawn = []
    for index, seed in enumerate((1, 1, 2)):
        out = tmp_path / f"out{index}"
        command = [sys.executable, TOOLS / "peer_tests.py", "--te", tmp_path / "te", "--only", "test_many"]
        command += ["--cases", "5", "--seed", str(seed), "--out", out]
        assert "| test_many.py::test_many | 5 |" in subprocess.run(command, capture_output=True, text=True).stdout
        drawn.append([json.loads(line)["case"] for line in (out / "test_many.jsonl").read_text().splitlines()])
    assert drawn[0] == drawn[1] != drawn[2] and len(set(drawn[0])) == 5


def test_the_parts_of_a_file_run_every_case_once(tmp_path):
    folder = tmp_path / "te/tests/pytorch"
    folder.mkdir(parents=True)
    (folder / "test_many.py").write_text(
        "import pytest\n\n@pytest.mark.parametrize('n', range(20))\ndef test_many(n):\n    pass\n\n"
        "def test_one():\n    pass\n"
    )
    command = [sys.executable, TOOLS / "peer_tests.py", "--te", tmp_path / "te", "--only", "test_many"]
    command += ["--out", tmp_path / "out", "--write", tmp_path / "found.json", "--part"]
    drawn = []
    for number in (2, 1):
        printed = subprocess.run([*command, f"{number}/2"], capture_output=True, text=True, check=True).stdout
        lines = (tmp_path / f"out/test_many.{number}-of-2.jsonl").read_text().splitlines()
        drawn.append([json.loads(line)["case"].rpartition("::")[2] for line in lines])
        if number == 2:
            assert "What ran: of the 2 parts of all cases these: test_many 2" in printed
    assert sorted(map(len, drawn)) == [10, 11]
    assert sorted(sum(drawn, [])) == sorted([*(f"test_many[{n}]" for n in range(20)), "test_one"])
    assert any(part != sorted(part) for part in drawn)
    assert "| test_many.py::test_many | 20 | 0 |" in printed and "| all | 21 | 0 |" in printed
    assert json.loads((tmp_path / "found.json").read_text())["ran"].endswith("test_many 1, 2")

    # A run that was stopped goes on.
    record = {"case": "tests/pytorch/test_many.py::test_one", "kind": "skipped", "error": "", "text": ""}
    (tmp_path / "out/test_many.1-of-1.part").write_text(json.dumps(record) + "\n")
    printed = subprocess.run([*command, "1/1"], capture_output=True, text=True, check=True).stdout
    assert "| test_many.py::test_many | 20 | 0 |" in printed and "| test_many.py::test_one | 0 | 1 |" in printed


def test_a_part_that_is_none_is_refused(monkeypatch):
    monkeypatch.syspath_prepend(str(TOOLS))
    import peer_tests

    for text in ("0/3", "4/3", "1", "1/", "-1/3", "1/3/4", "a/b"):
        with pytest.raises(argparse.ArgumentTypeError, match=f"takes I/N with I from 1 to N, such as 1/40, got {text}"):
            peer_tests.Part.parse(text)
    assert peer_tests.Part.parse("3/3") == peer_tests.Part(3, 3)
