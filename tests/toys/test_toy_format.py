"""An element format is a row and an option: formats that the tree does not have, made of its own sources."""

import platform
import subprocess

import pytest

from toys.changed_tree import HERE, change, compile_all, compiler_output, digest, source

pytestmark = pytest.mark.slow

X86 = platform.machine() == "x86_64"
#: All that quantizes, decodes and multiplies.
PARTS = ["cpu/target/scalar", *(["cpu/target/avx2"] if X86 else []), "reference/gemm", "reference/quantize"]
PARTS += [f"base/{name}" for name in ("env", "parallel", "process_mutex", "thread_memory", "thread_pool")]
PARTS += [f"spec/{name}" for name in ("activation", "problem", "quant_spec")]

FORMATS, SPECS = "quire/format/format.h", "quire/spec/quant_spec.h"
FP8 = "Family::fp8_tensor, Family::fp8_row, Family::fp8_block, Family::mxfp8"
E3M4 = '{"e3m4", 3, 4, 3, Specials::ieee, true}'


def options(*names: str, families: str = FP8) -> tuple[str, str]:
    rows = [f'    {{Format::{name}, "elements are {name.upper()}", family_bits({{{families}}})}},\n' for name in names]
    return '    {Format::e5m2, "elements are', "".join(rows)


def add_row(folder, name: str, row: str) -> None:
    change(
        folder,
        FORMATS,
        (" };\n\n/// Which codes", f", {name}"),
        ("});\n\n/// The FormatRow of a format.", f"    {row},\n"),
    )


def test_a_format_computes_right_once_it_has_a_row_and_an_option(tmp_path, request):
    key, now = "toys/format", digest("*format*")
    if request.config.cache.get(key, None) == now:
        return
    add_row(tmp_path, "e3m4", E3M4)
    change(tmp_path, SPECS, options("e3m4", "e3m2", "e2m3"))
    sources = [source(tmp_path, f"quire/{name}.cpp") for name in PARTS]
    objects = compile_all(tmp_path, [HERE / "toy_format.cpp", *sources])
    if X86:
        bf16 = source(tmp_path, "quire/cpu/target/avx512_bf16.cpp")
        assert compiler_output(tmp_path, "-fsyntax-only", bf16) == ""
    assert compiler_output(tmp_path, *objects, "-pthread", "-o", tmp_path / "toy") == ""
    done = subprocess.run([tmp_path / "toy"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("right\n")
    request.config.cache.set(key, now)


@pytest.mark.parametrize(
    ("name", "row", "families", "refusal"),
    [
        ("e1m2", '{"e1m2", 1, 2, 0, Specials::none, true}', "Family::mxfp4", "of one format of 4 bits"),
        ("e2m1", "", "Family::fp8_block", "expect a scale of a byte for each block"),
        ("e5m2", "", "Family::nvfp4", "two-level scales are defined for one element format"),
        ("e8m0", "", "Family::mxfp8", "elements are signed and have at most 8 bits"),
        ("e5m3", '{"e5m3", 5, 3, 15, Specials::ieee, true}', "Family::mxfp8", "have at most 8 bits"),
    ],
)
def test_a_format_that_kernels_would_compute_wrongly_does_not_compile(tmp_path, name, row, families, refusal):
    if row:
        add_row(tmp_path, name, row)
    change(tmp_path, SPECS, options(name, families=families))
    said = compiler_output(tmp_path, "-fsyntax-only", "-include", "quire/spec/kinds.h", "-x", "c++", "/dev/null")
    assert refusal in said and said.count("error:") == 1, said


def test_an_option_for_a_format_without_a_row_does_not_compile(tmp_path):
    change(tmp_path, SPECS, options("e3m4"))
    said = compiler_output(tmp_path, "-fsyntax-only", "-include", SPECS, "-x", "c++", "/dev/null")
    assert "'e3m4' is not a member of 'quire::Format'" in said
