"""python -m quire.info: versions, instruction sets, devices, kernels, recipes; what is missing, with the reason."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import quire
from quire import functional, info
from quire.recipe import from_name, names


def report(**environment):
    done = subprocess.run(
        [sys.executable, "-m", "quire.info"],
        env=os.environ | environment,
        capture_output=True,
        text=True,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.fixture(scope="module")
def text():
    status, out, errors = report(QUIRE_ISA="", QUIRE_KERNEL="")
    assert status == 0 and errors == ""
    return out


def test_it_says_versions_threads_and_devices(text):
    assert f"quire {quire.__version__}, built against PyTorch " in text
    assert f"PyTorch {torch.__version__}" in text
    assert f"fast path for small calls: {'yes' if functional.DIRECT else 'no, '}" in text
    assert "  cpu (1): usable\n" in text
    library = Path(quire.__file__).with_name("lib") / "libquire_cuda.so"
    missing = "this build has no libquire_cuda.so, which needs nvcc"
    assert f"  kernels for CUDA: {'in libquire_cuda.so' if library.exists() else missing}\n" in text
    if not torch.accelerator.is_available():
        assert "no accelerator: PyTorch finds none" in text


def test_it_lists_every_kernel_row_recipe_and_format(text):
    for table in ("quantize", "dequantize", "column_sum", "norm", "activation"):
        assert f"  cpu: {table}: generic, reference\n" in text
    assert "  cpu: gemm: amx_nvfp4, int8, amx, bf16, generic, reference\n" in text
    for table in ("amax", "reorder", "route", "permute", "fingerprint", "delayed_update", "matmul"):
        assert f"  cpu: {table}: " in text
    for name in names():
        assert f"  {name} (cpu: " in text
    for name in ("nvfp4", "mxfp8", "fp8_current", "fp8_block"):
        assert f"  {name} (cpu: yes) {from_name(name).linear_spec()}\n" in text
    assert "  mxfp8 (cpu: yes) elements e4m3, an E8M0 scale for 32 elements\n" in text
    assert "  nvfp4 (cpu: yes) elements e2m1, an E4M3 scale for 16 elements under a float32 amax\n" in text


def test_every_instruction_set_is_in_use_or_says_why_not(text):
    """Compared with what the kernel says of this CPU."""
    with open("/proc/cpuinfo") as file:
        flags = set(next(line for line in file if line.startswith("flags")).split())
    avx2 = ["avx2", "fma", "f16c"]
    avx512 = ["avx512f", "avx512bw", "avx512vl", "avx512dq", *avx2]
    needs = {
        "avx512_amx": ["amx_int8", "amx_tile", "amx_bf16", "avx512_bf16", "avx512vbmi", "avx512_vnni", *avx512],
        "avx512_bf16": ["avx512_bf16", "avx512vbmi", "avx512_vnni", *avx512],
        "avx512_vnni": ["avx512_vnni", *avx512],
        "avx512": avx512,
        "avx2_vnni": ["avx_vnni", *avx2],
        "avx2": avx2,
        "scalar": [],
    }
    used = None
    for name, features in needs.items():
        missing = [feature for feature in features if feature not in flags]
        reason = "this machine lacks " + ", ".join(missing) if missing else f"{used} comes first" if used else "in use"
        used = used or (name if reason == "in use" else None)
        assert f"  {name}: {reason}\n" in text


@pytest.mark.slow
def test_forced_choices_are_visible():
    status, out, _ = report(QUIRE_ISA="scalar", QUIRE_KERNEL="gemm:reference")
    assert status == 0
    assert "  scalar: in use\n" in out and "in use" not in out.replace("scalar: in use", "")
    assert "  QUIRE_ISA: scalar\n" in out and "  QUIRE_KERNEL: gemm:reference\n" in out


@pytest.mark.slow
def test_a_wrong_setting_is_reported_not_raised():
    status, out, _ = report(QUIRE_ISA="mmx")
    assert status == 0
    allowed = "avx512_amx, avx512_bf16, avx512_vnni, avx512, avx2_vnni, avx2, scalar"
    assert out.count(f"cpu: QUIRE_ISA=mmx is not an instruction set; use one of {allowed}") > 3


def test_what_is_not_available_says_why(monkeypatch):
    assert info.why_not(from_name("mxfp8"), "cpu") == "" == info.why_no_spec("nvfp4:rht:sr", "cpu")
    assert "mxfp8 takes: e5m2" in info.why_no_spec("mxfp8:rht", "cpu")
    assert "nonsense" in info.why_not(from_name("mxfp8"), "nonsense")

    def dispatcher(*args, **kwargs):
        raise NotImplementedError("Could not run 'quire::quantize' with arguments from the 'CUDA' backend")

    monkeypatch.setattr(functional, "quantize", dispatcher)
    assert info.why_no_spec("mxfp8", "cpu") == f"quire {quire.__version__} has no kernels for cpu"


def test_asking_draws_no_random_numbers():
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    info.sections()
    assert torch.equal(torch.rand(1), expected)
