"""An operator with a kernel is six files: three of its own, and three tables that name it."""

import hashlib
import os
import shutil
from pathlib import Path

import pytest
import torch

from quire.loading import library
from toys.changed_tree import HERE, change, compile_all, compiler_output, digest, source

pytestmark = pytest.mark.slow

#: The problem with its rules, the kernel, the operator.
OWN = HERE / "operator"
#: The problems that are asked of devices, and the host's kernels. The third table is that of operators (library.cpp).
TABLES = {
    "quire/device/device.h": [
        ('#include "quire/spec/state_problem.h"', '#include "quire/spec/halve_problem.h"\n'),
        ("PermuteProblem, UnpermuteProblem, PermutedDotProblem, ExpertRows", "HalveProblem, "),
    ],
    "quire/cpu/device.cpp": [
        ('#include "quire/cpu/isa.h"', '#include "quire/cpu/halve.h"\n'),
        ("kPortable<PermuteProblem, permute>", "kPortable<HalveProblem, halve>, "),
    ],
}
#: What knows these tables; all else is the installed libraries'.
PARTS = [
    "quire/device/device.cpp",
    "quire/device/dispatch.cpp",
    "quire/cpu/device.cpp",
    "quire_torch/bridge/context.cpp",
]


def build(folder: Path, to: Path) -> None:
    shutil.copytree(OWN, folder, dirs_exist_ok=True)
    for name, insertions in TABLES.items():
        change(folder, name, *insertions)
    installed, libraries = Path(torch.__file__).parent, library.folder().resolve()
    include = [f"-isystem{installed}/include{sub}" for sub in ("", "/torch/csrc/api/include")]
    # The tables of quire's own libraries stay theirs.
    files = [HERE / "toy_operator.cpp", *(source(folder, name) for name in PARTS)]
    objects = compile_all(folder, files, "-fvisibility=hidden", *include)
    link = [
        f"-L{libraries.parent}",
        "-lquire",
        f"-L{libraries}",
        "-lquire_torch",
        f"-L{installed}/lib",
        "-ltorch_cpu",
        "-lc10",
    ]
    assert compiler_output(folder, "-shared", *objects, *link, "-o", to) == ""


@pytest.fixture(scope="module")
def halve(request, tmp_path_factory):
    now = hashlib.sha256(
        f"{torch.__version__} {digest('*', 'quire_torch/op', 'quire_torch/bridge')}".encode()
    ).hexdigest()
    found = request.config.cache.mkdir("toys") / f"halve-{now[:16]}.so"
    if not found.exists():
        folder = tmp_path_factory.mktemp("operator")
        build(folder, folder / "toys.so")
        shutil.copy(folder / "toys.so", unfinished := found.with_suffix(f".{os.getpid()}"))
        unfinished.rename(found)
    torch.ops.load_library(found)
    return torch.ops.toys.halve


def test_an_operator_with_a_kernel_is_six_files():
    files = [path for path in OWN.rglob("*") if path.is_file()]
    assert len(files) + len([*TABLES, "quire_torch/library.cpp"]) == 6


def test_an_operator_made_of_six_files_runs_traces_and_refuses(halve):
    x = torch.randn(300, 70)
    assert torch.equal(halve(x), x / 2)
    assert torch.equal(halve(x.t()), x.t() / 2)
    assert str(halve.default._schema) == "toys::halve(Tensor x) -> Tensor y"
    torch.library.opcheck(halve.default, (x,))
    with pytest.raises(RuntimeError, match=r"halve: x must be float32, got Double; convert it with \.float\(\)"):
        halve(x.double())
    assert torch.equal(torch.compile(lambda t: halve(t) + 1, fullgraph=True, backend="aot_eager")(x), x / 2 + 1)
