"""Every check of ./dev check is shown trees that break its rule, and trees that only look like it."""

import re

import pytest
from torch.utils._device import _device_constructors

import check_budgets
import check_duplicates
import check_factories
import check_formats
import check_layers
import check_words
import cpp_functions


@pytest.fixture
def tree(tmp_path):
    """tree({"src/a.h": text}) writes the files and returns the root."""
    (tmp_path / "src").mkdir()
    (tmp_path / "python").mkdir()

    def write(files):
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return tmp_path

    return write


@pytest.mark.parametrize(
    ("name", "include", "complaint"),
    [
        ("quire/base/check.h", '"quire/spec/problem.h"', "quire/base may include quire/base; got quire/spec/problem.h"),
        ("quire/spec/scale.h", '"quire/cpu/isa.h"', "got quire/cpu/isa.h"),
        ("quire/operations/gemm.cpp", '"quire/cpu/kernels.h"', "got quire/cpu/kernels.h"),
        ("quire/cpu/generic/amax.inl.h", '"quire/gemm/gemm.h"', "got quire/gemm/gemm.h"),
        ("quire/format/half.h", "<c10/util/Half.h>", "the core includes no PyTorch; got c10/util/Half.h"),
        ("quire_torch/op/op.h", '"quire/spec/problem.h"', "got quire/spec/problem.h"),
        ("quire_torch/bridge/tensor.h", '"quire_torch/ops/linear.h"', "got quire_torch/ops/linear.h"),
        ("quire_torch/ops/linear.cpp", '"quire/cpu/isa.h"', "got quire/cpu/isa.h"),
        ("quire/operations/gemm.cpp", '"gemm.h"', "includes start at src/"),
        ("quire/cuda/gemm.cu", '"quire/cpu/isa.h"', "got quire/cpu/isa.h"),
        ("quire/cuda/gemm.cuh", '"quire/gemm/gemm.h"', "got quire/gemm/gemm.h"),
        ("quire/cuda/gemm.cu", "<ATen/core/Tensor.h>", "the core includes no PyTorch; got ATen/core/Tensor.h"),
        ("quire/cuda/gemm.cu", '"gemm.cuh"', "includes start at src/"),
        ("quire/operations/gemm.cpp", '"quire/cuda/device.h"', "got quire/cuda/device.h"),
        ("quire_torch/bridge/context.cpp", '"quire/cuda/device.h"', "got quire/cuda/device.h"),
        ("quire/attention/softmax.h", '"quire/base/check.h"', "not in the table"),
    ],
)
def test_an_include_from_above_is_found(tree, name, include, complaint):
    (finding,) = check_layers.check(tree({f"src/{name}": f"#pragma once\n  #  include {include}\n"}))
    assert finding.startswith(f"src/{name}: ") and finding.endswith(complaint) or complaint in finding


def test_includes_from_below_and_kernel_tables_pass(tree):
    allowed = {
        "src/quire/device/device.cpp": '#include <span>\n#include "quire/cpu/isa.h"\n#include "quire/spec/problem.h"\n'
        '#include "quire/cuda/device.h"\n',
        "src/quire/cuda/gemm.cu": '#include <cuda_fp8.h>\n\n#include "quire/cuda/tile.cuh"\n'
        '#include "quire/spec/problem.h"\n#include "quire/device/device.h"\n',
        "src/quire_torch/library.cpp": '#include <torch/library.h>\n\n#include "quire_torch/ops/linear.h"\n',
    }
    assert list(check_layers.check(tree(allowed))) == []


def test_operators_called_outside_the_files_for_it_are_found(tree):
    call = "import torch\n\ny = torch.ops.quire.linear(1)\n"
    mention = '"""Not a call: torch.ops.quire."""\n'
    files = {"python/quire/functional.py": call, "python/quire/recipe.py": mention, "python/quire/testing.py": call}
    (finding,) = check_layers.check(tree(files))
    assert finding.startswith("python/quire/testing.py: torch.ops.quire")


KNOWS = "TransformerEngine is known to python/quire/te only"
IMPORTS = "quire.te is imported by nothing outside of it"
SECRET = "if TYPE_CHECKING:\n    import quire.nn.norm\n"


@pytest.mark.parametrize(
    ("files", "complaint"),
    [
        (
            {"one.py": "from quire import other", "other.py": "import quire.one"},
            ": quire.one -> quire.other -> quire.one",
        ),
        (
            {"nn/linear.py": "def f():\n    import quire.nn.norm", "nn/norm.py": "from quire.nn import linear"},
            "modules",
        ),
        (
            {"nn/linear.py": SECRET, "nn/norm.py": "from quire.nn.linear import f"},
            "modules import each other: quire.nn.",
        ),
        ({"__init__.py": "from quire import info", "info.py": "import quire"}, "quire -> quire.info -> quire"),
        ({"nn/a.py": "import quire.te", "te/__init__.py": ""}, f"python/quire/nn/a.py: {IMPORTS}"),
        ({"__init__.py": "from quire.te import *\n", "te/__init__.py": ""}, f"python/quire/__init__.py: {IMPORTS}"),
        ({"a.py": "# as transformer_engine does"}, f"python/quire/a.py: {KNOWS}"),
        ({"nn/norm.py": "", "norms.py": ""}, "python/quire/nn/norm.py and python/quire/norms.py: the names of modules"),
        ({"nn/norm.py": "", "moe/norm.py": ""}, "the names of modules differ by more than a letter"),
        ({f"{'x' * i}{'y' * 11}.py": "" for i in range(0, 18, 2)}, "9 modules, at most 8"),
    ],
)
def test_a_module_in_the_wrong_place_is_found(tree, files, complaint):
    (finding,) = check_layers.check(tree({f"python/quire/{name}": text for name, text in files.items()}))
    assert complaint in finding


def test_rooms_that_import_each_other_are_found(tree):
    files = {
        "nn/linear.py": "import quire.moe.rows",
        "moe/rows.py": "",
        "moe/layer.py": "import quire.nn.norm",
        "nn/norm.py": "",
    }
    (finding,) = check_layers.check(tree({f"python/quire/{name}": text for name, text in files.items()}))
    assert finding == "python/quire: rooms import each other: quire.moe -> quire.nn -> quire.moe"


def test_modules_in_their_places_pass(tree):
    files = {
        "__init__.py": "from quire.nn import Linear\n",
        "nn/__init__.py": "from quire.nn.linear import Linear\n",
        "nn/linear.py": "from quire.checks import check\n",
        "checks.py": "import torch\n",
        "te/__init__.py": "from quire.te import names\nfrom quire.nn import Linear\n",
        "te/names.py": "from quire.nn.linear import Linear  # TransformerEngine's\n",
    }
    assert list(check_layers.check(tree({f"python/quire/{name}": text for name, text in files.items()}))) == []


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("tests/python/nn/test_a.py", "from quire import moe, te\n"),
        ("tests/python/nn/test_a.py", "def f():\n    import quire.te.ops as ops\n"),
        ("tests/python/nn/test_a.py", "def test_a():\n    quire.te.Linear(4, 4)\n"),
        ("tests/every_feature.py", "from python.te.te_features import LAYERS\n"),
        ("tests/python/io/test_a.py", "NAME = 'transformer_engine.pytorch'\n"),
    ],
)
def test_a_test_that_needs_transformer_engines_names_and_does_not_lie_with_them_is_found(tree, name, text):
    (finding,) = check_layers.check(tree({name: text}))
    assert finding.startswith(f"{name}: ") and "is tested in tests/python/te" in finding


def test_tests_of_transformer_engines_names_and_checkpoints_pass(tree):
    names = ("python/te/test_a.py", "python/io/test_te_a.py", "python/io/te_a.py", "docs/test_a.py", "tools/test_a.py")
    files = {f"tests/{name}": "from quire import te\nNAME = 'transformer_engine'\n" for name in names}
    assert (
        list(
            check_layers.check(
                tree(files | {"tests/python/test_a.py": "te = quire.Linear  # not TransformerEngine's\n"})
            )
        )
        == []
    )


WORDS = "more words\n" * 600
LONG_BODY = "  f();\n" * 60
KERNEL = "template <int N>\n__global__ void __launch_bounds__(256) f(const float* x) {{\n{}}}\n"
CONSTRUCTOR = "struct S {{\n  S() : a_{{1}}, b_(2) {{\n{}  }}\n  int a_, b_;\n}};\n"


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        ("src/a.cpp", "int x;\n" * 401, "src/a.cpp: 401 lines, at most 400"),
        ("src/a.cpp", f"void f() {{\n{LONG_BODY}}}\n", "src/a.cpp:1: f: 62 lines, at most 60"),
        ("src/a.cpp", CONSTRUCTOR.format(LONG_BODY), "src/a.cpp:2: S: 62 lines, at most 60"),
        ("src/a.h", "int f(int, int, int,\n int, int, int);\n", "a.h:1: f: 6 positional parameters, at most 5"),
        ("src/a.h", "struct S { bool f(M<a, b> x, int = 1, int = 2, int, int, int) const; };", "f: 6 positional"),
        ("src/a.cpp", "auto f = [](int, int, int, int, int, int) { return 1; };", "6 positional parameters"),
        ("src/a.h", "#pragma once\n#define SIX 6\n", "src/a.h: defines the macro SIX"),
        ("src/quire/cpu/generic/a.inl.h", "#if defined(__AVX2__)\n#endif\n", "#if in generic code"),
        ("src/a.cpp", 'auto* x = std::getenv("HOME");', "src/a.cpp: reads the environment"),
        ("src/a.cpp", "static std::shared_mutex m;", "src/a.cpp: has a std::mutex"),
        ("src/quire/utils.h", "", "src/quire/utils.h: name the file after what is in it"),
        ("src/quire/cuda/a.cu", "int x;\n" * 401, "src/quire/cuda/a.cu: 401 lines, at most 400"),
        ("src/quire/cuda/a.cu", KERNEL.format(LONG_BODY), "src/quire/cuda/a.cu:1: f: 63 lines, at most 60"),
        ("src/quire/cuda/a.cuh", "__device__ int f(int, int, int, int, int, int);\n", "f: 6 positional parameters"),
        ("src/quire/cuda/a.cuh", "#pragma once\n#define SIX 6\n", "a.cuh: defines the macro SIX"),
        ("src/quire/cuda/a.cu", 'auto* x = std::getenv("HOME");', "a.cu: reads the environment"),
        ("src/quire/cuda/a.cu", "static std::mutex m;", "a.cu: has a std::mutex"),
        ("src/quire/cuda/helpers.cuh", "", "helpers.cuh: name the file after what is in it"),
        ("python/a.py", "def f():\n" + "    g()\n" * 61, "python/a.py:1: f: 61 lines, at most 60"),
        ("python/a.py", f'"""Of\n{WORDS}"""\n' + "x = 1\n" * 601, "python/a.py: 601 lines, at most 600"),
        ("python/a.py", "class A:\n    def f(self, a, b, c, d, e, f): ...\n", "a.py:2: f: 6 positional parameters"),
        ("python/misc.py", "", "python/misc.py: name the file after what is in it"),
    ],
)
def test_a_broken_budget_is_found(tree, name, text, complaint):
    (finding,) = check_budgets.check(tree({name: text}))
    assert complaint in finding


def test_words_and_signatures_do_not_count(tree):
    function = f'def f(\n    x=1,\n    *,\n    y=2,\n):\n    """Does\n{WORDS}"""\n' + "    g()\n" * 60
    assert list(check_budgets.check(tree({"python/a.py": f'"""Of\n{WORDS}"""\n{function}'}))) == []


FINE = """
// void f(int, int, int, int, int, int) { in a comment
#define QUIRE_SEVEN(a, b, c, d, e, f, g) f(a, b, c, d, e, f, g)
constexpr int kNumbers[] = {1, 2, 3, 4, 5, 1'000'000};
const char* text = R"(void f(int, int, int, int, int, int) {)";
const Row kRows[] = {{"a", [](const P& p) -> R { return run(p, 2, 3, 4, 5, 6); }}, {"b", [] { g(1, 2, 3, 4, 5, 6); }}};
const char* quote = "\\"{ ( {"; char brace = '{';
static_assert(five(1, 2, 3, 4, 5, 6), "six arguments are no parameters");
template <class A, class B, class C, class D, class E, class F> void g(M<A, B, C, D, E, F> m, int x = h(1, 2)) {}
template <int N = 4> requires (N == 4) bool has_default(int x) { call(1, 2, 3, 4, 5, 6); return x == N; }
std::function<void(int, int, int, int, int, int)> callback;
struct S { S(int a, int b) : a_{a, 1, 2, 3, 4, 5}, b_(b) { call(a, b, 1, 2, 3, 4); } bool operator()(int x) const; };
"""


def test_what_only_looks_like_a_function_passes(tree):
    for name in check_budgets.MACRO_FILES:
        assert list(check_budgets.check(tree({f"src/{name}": FINE}))) == []


FINE_KERNEL = """
template <QuantSpec kSpec>
__global__ void __launch_bounds__(256, 2) scale(const float* x, float* y, int n) {
  extern __shared__ float tile[];
}
void launch(const Problem& p, cudaStream_t stream) { scale<kSpec><<<dim3(1, 2, 3), 256, 0, stream>>>(p.x, p.y, p.n); }
__constant__ float table[6] = {1, 2, 3, 4, 5, 6};
"""


def test_a_kernel_and_its_launch_are_read_as_functions(tree):
    assert list(check_budgets.check(tree({"src/quire/cuda/scale.cu": FINE_KERNEL}))) == []
    assert [f.name for f in cpp_functions.scan(FINE_KERNEL)] == ["scale", "launch"]


def test_keywords_and_the_fixtures_of_a_test_are_no_positional_parameters(tree):
    files = {
        "python/a.py": "def f(a, b, c, d, e, *, f, g): ...\n",
        "tests/test_a.py": "def test_a(a, b, c, d, e, f): ...\n",
    }
    assert list(check_budgets.check(tree(files))) == []


@pytest.mark.parametrize(
    "name, text",
    [
        ("src/a.cpp", "void f() {\n  g([&](int a, int b, int c, int d, int e, auto f) { return a; });\n}\n"),
        (
            "src/a.cpp",
            "void f() {\n  auto h = []<class T>(T a, int b, int c, int d, int e, int f) mutable -> T {};\n}\n",
        ),
        ("python/a.py", "def f():\n    return lambda a, b, c, d, e, f: a\n"),
    ],
)
def test_lambdas_have_as_few_parameters_as_functions(tree, name, text):
    (finding,) = check_budgets.check(tree({name: text}))
    assert finding.startswith(f"{name}:2: lambda: 6 positional parameters, at most 5")
    assert list(check_budgets.check(tree({name: re.sub(r"(int )?e, ", "", text)}))) == []


def test_an_index_and_an_attribute_are_no_lambdas(tree):
    text = "void f() {\n  t[i](a, b, c, d, e, g) + 1;\n  [[maybe_unused]] (x)(a, b, c, d, e, g);\n}\n"
    assert list(check_budgets.check(tree({"src/a.cpp": text}))) == []


@pytest.mark.parametrize("word", check_words.FORBIDDEN)
def test_a_word_of_one_machine_is_found(tree, word):
    (finding,) = check_words.check(tree({"docs/a.md": f"fine\nsee {word}x\n", "build/a.md": word}))
    assert finding == f"docs/a.md:2: says {word}"


FORMATS = """constexpr auto kFormats = std::to_array<FormatRow>({
    {"e4m3", 4, 3, 7, Specials::nan_only, true},
    {"e2m1", 2, 1, 1, Specials::none, true},
    {"e8m0", 8, 0, 127, Specials::nan_only, false},
});
"""
FAMILY = '{"fp8_row", Format::x},\n'
FAMILIES = """inline constexpr std::array<FamilyRow, 2> kFamilies{{
    {"fp8_row", Format::e4m3, ScaleKind::f32, Scope::row, 0, true, false},
    {"nvfp4", Format::e2m1, ScaleKind::two_level, Scope::block, 16, true, true},
}};
"""


@pytest.mark.parametrize(
    ("call", "missing"),
    [
        ("torch.zeros(3)", "dtype= and device="),
        ("torch.full((), 2.0, device=x.device)", "dtype="),
        ("torch.tensor([1, 2], dtype=torch.int32)", "device="),
        ("f(lambda: torch.as_tensor(1.5))", "dtype= and device="),
    ],
)
def test_a_tensor_whose_dtype_or_device_the_caller_decides_is_found(tree, call, missing):
    (finding,) = check_factories.check(tree({"python/quire/a.py": f"import torch\n\nx = {call}\n"}))
    assert finding.startswith("python/quire/a.py:3: torch.") and f"without {missing}, which" in finding


def test_a_factory_that_is_imported_by_its_name_is_found(tree):
    (finding,) = check_factories.check(tree({"python/quire/a.py": "from torch import Tensor, zeros\n"}))
    assert finding == "python/quire/a.py:1: imports zeros from torch, which hides its calls; write torch.zeros"


def test_tensors_that_say_both_or_take_both_from_another_pass(tree):
    calls = [
        "torch.zeros(3, dtype=torch.int64, device=d)",
        "torch.empty(3, dtype=None, device=None)",
        "torch.empty(3, **options)",
        "x.new_zeros(3)",
        "torch.zeros_like(x)",
        "self.full(3)",
    ]
    assert (
        list(check_factories.check(tree({"python/quire/a.py": "\n".join(calls), "tests/a.py": "torch.ones(1)"}))) == []
    )


def test_every_function_that_follows_the_default_device_is_checked():
    assert {function.__name__ for function in _device_constructors()} <= check_factories.FACTORIES


def test_more_files_than_eight_that_name_an_element_format_are_found(tree):
    cpp = [
        "constexpr int kE4m3 = 1;",
        "f(Format::e2m1);",
        'const char* s = "an E4M3";',
        "E2M1Codes c;",
        "int e4m3_max;",
    ]
    python = ["Format.E4M3", "s = 'mxfp8:e4m3'", "kFloat8E4M3 = 7", "def f():\n    return 'E2M1'"]
    files = {f"src/quire/a{i}.{'cu' if i == 4 else 'h'}": text for i, text in enumerate(cpp)}
    files |= {f"python/quire/a{i}.py": f"{text}\n" for i, text in enumerate(python)}
    root = tree({check_formats.TABLE: FORMATS, check_formats.FAMILY_TABLE: FAMILY, **files})
    (finding,) = check_formats.check(root)
    assert finding.startswith("9 files name an element format, at most 8: src/quire/a0.h, ")
    assert sorted(check_formats.naming(root)) == sorted(files)
    (root / "python/quire/a0.py").unlink()
    assert list(check_formats.check(root)) == []
    (root / check_formats.FAMILY_TABLE).write_text("")
    (finding,) = check_formats.check(root)
    assert finding.startswith(f"{check_formats.FAMILY_TABLE}: no row of a family was found")


def test_files_above_the_kernels_that_name_a_family_are_counted(tree, monkeypatch):
    named = {
        "src/quire/spec/a.cpp": 'if (name == "nvfp4") return;\n',
        "src/quire_torch/a.h": "case ScaleKind::two_level: return;\n",
        "python/quire/a.py": "rows = spec == 'fp8_row:nan'\n",
        "python/quire/b.py": "def nvfp4_linear(): ...\n",
    }
    others = {
        "src/quire/cpu/a.h": "int nvfp4;\n",
        "src/quire/a.cpp": "// of nvfp4\nint x;\n",
        "python/quire/recipe/a.py": "name = 'nvfp4'\n",
        "python/quire/c.py": "mynvfp4x = 1\n",
    }
    root = tree({check_formats.TABLE: FORMATS, check_formats.FAMILY_TABLE: FAMILIES, **named, **others})
    assert sorted(check_formats.naming_families(root)) == sorted(named)
    monkeypatch.setattr(check_formats, "FAMILY_FILES", 3)
    (finding,) = check_formats.check(root)
    assert finding.startswith("4 files above the kernels name a family of specs, at most 3: ")


def test_comments_docstrings_and_formats_of_scales_name_no_element_format(tree):
    cpp = '// of E4M3\n/* e2m1\n */\nint x = 1; // e4m3\nFormat f = Format::e8m0;\nconst char* s = "//";\n'
    python = (
        '"""Of E4M3."""\n\n\nclass C:\n    """E2M1."""\n    #: E4M3\n    def f(self):\n        """E4M3."""  # e2m1\n'
    )
    files = {"src/quire/a.h": cpp, "src/quire/a.cu": cpp, "python/quire/a.py": python}
    root = tree({check_formats.TABLE: FORMATS, **files})
    assert list(check_formats.naming(root)) == []


def test_a_gpu_names_the_types_of_its_headers(tree):
    names = "__nv_fp8_e4m3 x;"
    files = {f"src/quire/{folder}/a.{suffix}": names for folder in ("cuda", "cpu") for suffix in ("h", "cu", "cuh")}
    named = check_formats.naming(tree({check_formats.TABLE: FORMATS, **files}))
    assert list(named) == ["src/quire/cpu/a.cu", "src/quire/cpu/a.cuh", "src/quire/cpu/a.h"]


@pytest.mark.parametrize("suffix, line", [(".py", "a{} = {}"), (".h", "int a{} = {};"), (".cu", "int a{} = {};")])
def test_lines_that_stand_in_many_places_are_found(tree, suffix, line):
    def written(length):
        places = check_duplicates.PAIRS + 1
        texts = ["\n".join(line.format(i, pair) for i in range(length)) for pair in range(places)]
        return tree({f"src/{side}{pair}{suffix}": f"{texts[pair]}\n" for pair in range(places) for side in "ab"})

    first, *pairs = check_duplicates.check(written(check_duplicates.LINES + 1))
    assert first.startswith("6 pairs of places share 8 lines or more, at most 5")
    assert len(pairs) == 6 and all("9 lines: src/a" in pair for pair in pairs)
    assert list(check_duplicates.check(written(check_duplicates.LINES - 1))) == []
