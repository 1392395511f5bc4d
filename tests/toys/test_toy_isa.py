"""An instruction set is two files and two lines that name them: one that the tree lacks, chosen by QUIRE_ISA."""

import os
import re
import subprocess

import pytest

from quire.loading import library
from toys.changed_tree import HERE, SOURCES, change, compile_all, compiler_output, digest

pytestmark = pytest.mark.slow


def files_of_toy(folder) -> None:
    """Its words are those of plain C++, with another shape of the product's tiles."""
    for name, old, new in (
        ("simd/{}.h", "constexpr int kTileRows = 2;", "constexpr int kTileRows = 3;"),
        ("target/{}.cpp", "scalar", "toy"),
    ):
        text = (SOURCES / "quire/cpu" / name.format("scalar")).read_text()
        path = folder / "quire/cpu" / name.format("toy")
        assert old in text
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.replace(old, new))


def test_an_instruction_set_computes_right_once_it_has_two_files_and_two_lines(tmp_path, request):
    key, now = "toys/isa", digest("*isa*")
    if request.config.cache.get(key, None) == now:
        return
    files_of_toy(tmp_path)
    change(
        tmp_path, "quire/cpu/kernels.h", ("namespace scalar {", "namespace toy { extern const Kernels kKernels; }\n")
    )
    change(
        tmp_path,
        "quire/cpu/isa.cpp",
        ('    Isa{"scalar", {}, &scalar::kKernels},\n};', '    Isa{"toy", {}, &toy::kKernels},\n'),
    )
    sources = [HERE / "toy_isa.cpp", tmp_path / "quire/cpu/isa.cpp", tmp_path / "quire/cpu/target/toy.cpp"]
    objects = compile_all(tmp_path, sources)
    libraries = library.FOLDER.resolve()
    link = [f"-L{libraries}", "-lquire", f"-Wl,-rpath,{libraries}", "-rdynamic", "-pthread"]
    assert compiler_output(tmp_path, *objects, *link, "-o", tmp_path / "toy") == ""
    for isa in ("toy", "scalar"):
        done = subprocess.run([tmp_path / "toy"], capture_output=True, text=True, env=os.environ | {"QUIRE_ISA": isa})
        assert done.stdout.splitlines() == [isa, "right"], done.stdout + done.stderr
    request.config.cache.set(key, now)


@pytest.mark.parametrize(
    "word, message",
    [
        ("multiply_add", "static assertion failed: the vocabulary lacks a word of float32"),
        ("load_f16", "static assertion failed: the vocabulary lacks a word of float16 or bfloat16"),
        ("largest_lane", "static assertion failed: the vocabulary lacks a word of integers"),
        ("store_bytes_of_words", "static assertion failed: the vocabulary lacks a word of bytes"),
        ("has_quick_subnormals", "'has_quick_subnormals' was not declared"),
        ("finish_streams", "'finish_streams' was not declared"),
        ("load_bytes_as_f16", "'load_bytes_as_f16' was not declared"),
    ],
)
def test_an_instruction_set_without_a_word_is_refused_by_the_list_of_words(tmp_path, word, message):
    path = tmp_path / "quire/cpu/simd/scalar.h"
    path.parent.mkdir(parents=True)
    path.write_text(re.sub(rf"\b{word}\b", f"other_{word}", (SOURCES / "quire/cpu/simd/scalar.h").read_text()))
    said = compiler_output(tmp_path, "-fsyntax-only", SOURCES / "quire/cpu/target/scalar.cpp")
    first = next(line for line in said.splitlines() if "error:" in line)
    assert "generic/vocabulary.inl.h" in first and message in first
    assert re.search(rf"note: the required expression .*\b{word}\(|error: '{word}'", said)
