"""docs/follow-one-call.md says what runs, in order: it is compared with recordings of its own example, and what it says
of a mixture with recordings of one (tests/walk)."""

import platform
import re
from dataclasses import dataclass

import pytest
import torch

import quire
import torch_pin
from walk import sources, walks

pytestmark = pytest.mark.slow  # compiles C++

PAGE = "docs/follow-one-call.md"
STOP = re.compile(r"^### (\d+)\. \[(\S+)\]\(\.\./(\S+)\) `(\S+)`(?: on ([\w, ]+))?$", re.MULTILINE)
LINK = re.compile(r"\]\(\.\./(\S+?)\)")
SECTIONS = {"forward": "Forward", "backward": "Backward"}
REFERENCE = "reference"
#: What one call of a layer may cost to the doors of its kernels: files, lines of the functions that are called, without
#: docstrings. To be lowered when the way gets shorter, and never raised. The reference is chosen by QUIRE_KERNEL, whose
#: file is one more.
COST = {
    "Linear": {"inference": (15, 646), "forward": (16, 811), "backward": (15, 604)},
    "MoE": {"inference": (29, 1518), "forward": (30, 1645), "backward": (23, 973)},
}
#: Ways that have been recorded on some machine with the page as it is. What another one contradicts is told without
#: failing, until somebody with such a machine corrects the page and adds it here.
SEEN = {"avx2", "avx2_vnni", "avx512", "avx512_amx", "avx512_bf16", "avx512_vnni", "scalar", REFERENCE}


@dataclass(frozen=True)
class Stop:
    number: int
    file: str
    symbol: str
    kernels: tuple[str, ...]  # none: all

    def is_function(self, function):
        return function.file == self.file and f"::{function.name}".endswith(f"::{self.symbol}")


def stops(text, part):
    section = text.partition(f"\n## {SECTIONS[part]}\n")[2].partition("\n## ")[0]
    found = STOP.findall(section)
    assert len(found) == section.count("\n### "), "a heading is not `### N. [file](../file) `symbol` on KERNELS`"
    assert all(shown == file for _, shown, file, *_ in found)
    return [Stop(int(n), file, symbol, tuple(re.findall(r"\w+", on))) for n, _, file, symbol, on in found]


def kernels(text):
    """Instruction set, or "reference" -> the kernels that run there; and the QUIRE_KERNEL of the reference."""
    rows = dict(re.findall(r"^\| `(\w+)` \| `QUIRE_(?:ISA|KERNEL)` (.+) \|$", text, re.MULTILINE))
    setting = rows.pop(REFERENCE).strip("`")
    return {isa: name for name, isas in rows.items() for isa in re.findall(r"`(\w+)`", isas)}, setting


def misorders(text, kernel, part, walk):
    """What a section says that one walk contradicts."""
    last, before = -1, None
    for stop in stops(text, part):
        if stop.kernels and kernel not in stop.kernels:
            continue
        at = next((i for i, step in enumerate(walk) if any(map(stop.is_function, step))), None)
        if at is None:
            yield f"stop {stop.number}: {stop.symbol} of {stop.file} does not run, or the compiler has inlined it"
        elif at < last:
            yield f"stop {stop.number}: {stop.symbol} runs before {before.symbol} of stop {before.number}"
        else:
            last, before = at, stop


def omissions(text, walk):
    """Files that a walk enters and the page does not name."""
    named = set(LINK.findall(text))
    for step in walk:
        if not named & {function.file for function in step}:
            yield f"{step[0]} runs, and the page does not name its file"


@pytest.fixture(scope="module")
def text():
    return (sources.ROOT / PAGE).read_text()


@pytest.fixture(scope="module")
def example(text):
    return re.search(r"```python\n(.*?)```", text, re.DOTALL)[1]


@pytest.fixture(scope="module")
def ways(text):
    """An instruction set of this machine, or the reference -> the environment in which it runs.

    Only an architecture whose breakpoint tests/walk does not know is skipped. A system that forbids breakpoints fails:
    nobody would see that the page is compared no more.
    """
    if platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip("walks are recorded by x86-64's breakpoint instruction")
    isas = [line.split(":")[0] for line in torch.ops.quire.isas().splitlines() if "lacks" not in line]
    return {isa: {"QUIRE_ISA": isa} for isa in isas} | {REFERENCE: {"QUIRE_KERNEL": kernels(text)[1]}}


@pytest.fixture(scope="module")
def recorded(example, ways, tmp_path_factory):
    """Way -> part -> walk."""
    return walks.record(example, ways, tmp_path_factory.mktemp("walk"))


@pytest.fixture(scope="module")
def mixture(ways, tmp_path_factory):
    """The same of a mixture of experts."""
    return walks.record(walks.MIXTURE, ways, tmp_path_factory.mktemp("walk"), "MoE")


def kernel_of(text, way):
    found = kernels(text)[0] | {REFERENCE: REFERENCE}
    assert way in found, f"the page does not say which kernels run on {way}"
    return found[way]


def judge(findings):
    """findings: way -> what it contradicts."""
    lines = [f"{way}: {finding}" for way, found in findings.items() for finding in found]
    if not any(findings[way] for way in SEEN & findings.keys()) and lines:
        pytest.xfail("first recorded here:\n" + "\n".join(lines))
    assert not lines, "\n".join(lines)


def test_no_stop_is_out_of_order_or_never_reached(text, recorded):
    judge(
        {
            way: [finding for part in SECTIONS for finding in misorders(text, kernel_of(text, way), part, parts[part])]
            for way, parts in recorded.items()
        }
    )


def test_no_file_is_entered_that_the_page_does_not_name(text, recorded, mixture):
    for ways in (recorded, mixture):
        judge(
            {
                way: sorted({finding for walk in parts.values() for finding in omissions(text, walk)})
                for way, parts in ways.items()
            }
        )


def test_stops_are_numbered_and_no_stop_names_a_function_that_does_not_exist(text):
    found = [stop for part in SECTIONS for stop in stops(text, part)]
    assert [stop.number for stop in found] == list(range(1, len(found) + 1)) and len(found) >= 10
    known = [d.function for same in sources.definitions().values() for d in same]
    for stop in found:
        if stop.file.endswith(".py"):
            continue  # runs everywhere
        assert any(map(stop.is_function, known)), f"stop {stop.number}: {stop.file} has no {stop.symbol}"
        assert set(stop.kernels) <= {*kernels(text)[0].values(), REFERENCE}, f"stop {stop.number}"


def test_no_link_of_the_page_is_dead(text, root):
    assert not [link for link in LINK.findall(text) if not (root / link).is_file()]


@pytest.mark.skipif(
    torch_pin.minor(torch.__version__) != torch_pin.minor(torch_pin.DEFAULT),
    reason=f"lines are counted with PyTorch {torch_pin.DEFAULT}",
)
@pytest.mark.parametrize("part", COST["MoE"])
@pytest.mark.parametrize("layer", COST)
def test_the_way_to_the_kernels_does_not_get_longer(layer, part, recorded, mixture):
    findings = {}
    for way, parts in (recorded if layer == "Linear" else mixture).items():
        outer = walks.to_the_kernels(parts[part])
        files, lines, most = len(walks.files(outer)) - (way == REFERENCE), walks.lines(outer), COST[layer][part]
        longer = f"{files} files and {lines} lines to the kernels, more than {most}; tests/walk/walks.py prints them"
        findings[way] = [longer] if files > most[0] or lines > most[1] else []
    judge(findings)


def test_instruction_sets_run_kernels_of_their_own(recorded):
    """What is forced is what is recorded: otherwise all comparisons would be the same one."""
    for way, parts in recorded.items():
        entered = walks.files(parts["forward"])
        assert any(file.startswith("src/quire/reference/") for file in entered) == (way == REFERENCE)
        assert any(file.startswith("src/quire/cpu/generic/") for file in entered) == (way != REFERENCE)


def swapped(text, one, other):
    """Two stops have changed places, numbers apart."""
    headings = [f"[{stop.file}](../{stop.file}) `{stop.symbol}`" for stop in (one, other)]
    text = text.replace(headings[0], "<one>").replace(headings[1], headings[0])
    return text.replace("<one>", headings[1])


def test_the_comparison_sees_every_two_neighbours_that_change_places(text, recorded):
    for part in SECTIONS:
        walk = recorded[REFERENCE][part]
        found = list(misorders(text, REFERENCE, part, walk))
        everywhere = [stop for stop in stops(text, part) if not stop.kernels]
        for one, other in zip(everywhere, everywhere[1:], strict=False):
            assert list(misorders(swapped(text, one, other), REFERENCE, part, walk)) != found, (one, other)


def test_the_comparison_sees_a_function_that_does_not_run(text, recorded):
    altered = text.replace("`LinearFwd::run`", "`LinearFwd::walk`")
    found = " ".join(misorders(altered, REFERENCE, "forward", recorded[REFERENCE]["forward"]))
    assert "LinearFwd::walk of src/quire_torch/ops/linear_fwd.cpp does not run" in found


def test_the_comparison_sees_each_file_that_is_left_out(text, recorded):
    walk = recorded[REFERENCE]["forward"]
    for file in walks.files(walk):
        assert any(file in finding for finding in omissions(text.replace(f"(../{file})", "()"), walk))


def test_a_function_is_found_by_the_name_that_the_compiler_gives_it():
    names = {
        "quire::fingerprint(quire::Matrix const&)": "src/quire/operations/operations.cpp fingerprint",
        "void quire::run_checked<quire::GemmProblem>(quire::GemmProblem const&, quire::Context const&)": (
            "src/quire/device/dispatch.h run_checked"
        ),
        "quire::check_problem(quire::GemmProblem const&)": "src/quire/spec/check_problem.cpp check_problem",
        "quire::cpu::avx2::(anonymous namespace)::Tiles<quire::cpu::avx2::(anonymous namespace)::F32MicroKernel>::"
        "all_unit_scales() const::{lambda(int)#1}::operator()(int) const": (
            "src/quire/cpu/generic/gemm/gemm.inl.h Tiles::all_unit_scales"
        ),
        "quire_torch::LinearFwd::Args::~Args()": "",
        "quire::FunctionRef<void (long)>::FunctionRef<quire::cpu::avx2::(anonymous namespace)::tensor_amax()::"
        "{lambda(long)#1}>(quire::cpu::avx2::(anonymous namespace)::tensor_amax()::{lambda(long)#1}&&)::"
        "{lambda(void*, long)#1}::_FUN(void*, long)": "",
    }
    for symbol, place in names.items():
        assert [f"{f.file} {f.name}" for f in sources.cpp_functions(symbol)] == ([place] if place else [])


def test_the_call_that_is_followed_runs(text, example):
    scope = {"quire": quire, "x": torch.randn(3, 256)}
    exec(example, scope)
    assert scope["y"].shape == (3, 1024)
    assert f"`{quire.recipe.NVFP4BlockScaling().linear_spec()}`" in text
