"""Sizes stay readable: the length of files and functions, positional parameters, macros, file names."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import cpp_functions
import tree

#: Of Python without docstrings.
FILE_LINES = {".py": 600} | dict.fromkeys(tree.CPP, 400)
#: Of Python without signature and docstring.
FUNCTION_LINES = 60
PARAMETERS = 5
BAD_NAMES = {"utils", "util", "common", "misc", "helpers", "helper"}
#: Who may have a std::mutex: the one that forks wait for, and what belongs to one call.
MUTEXES = {f"src/quire/base/{name}" for name in ("process_mutex.h", "process_mutex.cpp", "thread_pool.cpp")}
MUTEX = re.compile(r"\bstd::\w*mutex\b")
#: Target regions; the words of nvcc, which are no C++; kernels, whose names in C no template can make.
MACRO_FILES = ("quire/cpu/region.h", "quire/base/host_device.h", "quire/cuda/kernels/tile_quantize.cuh")
MACRO = re.compile(r"^[ \t]*#[ \t]*define[ \t]+(\w+)", re.MULTILINE)
#: Declare or stand in for functions of others, which have the parameters that they have.
INTERFACES_OF_OTHERS = (
    "src/quire/cuda/cublaslt.h",
    "tests/cuda/cublaslt_stand_in.cpp",
    "tests/device/backend/aten.cpp",
)
CONDITIONAL = re.compile(r"^[ \t]*#[ \t]*if", re.MULTILINE)


def check_cpp(name: str, text: str) -> Iterator[str]:
    for function in (*cpp_functions.scan(text), *cpp_functions.lambdas(text)):
        parameters = 0 if name in INTERFACES_OF_OTHERS else function.parameters
        yield from check_function(f"{name}:{function.line}: {function.name}", function.lines, parameters)
    if name.startswith("src/") and not name.endswith(MACRO_FILES):  # tests name suites, which only macros can
        for macro in MACRO.findall(text):
            yield f"{name}: defines the macro {macro}; only {' and '.join(MACRO_FILES)} may define macros"
    if "/generic/" in name and CONDITIONAL.search(text):
        yield f"{name}: #if in generic code; put the word into each vocabulary of cpu/simd instead"
    if name.startswith("src/") and not name.endswith("base/env.cpp") and "getenv" in text:
        yield f"{name}: reads the environment; only quire/base/env.cpp does"
    if name.startswith("src/") and name not in MUTEXES and MUTEX.search(text):
        yield f"{name}: has a std::mutex, which a forked child may wait for without end; use quire::ProcessMutex"


def check_python(name: str, text: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Lambda):
            count = len(node.args.posonlyargs) + len(node.args.args)
            yield from check_function(f"{name}:{node.lineno}: lambda", 0, count)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body[1:] if documented(node) else node.body
            lines = node.end_lineno - body[0].lineno + 1 if body else 0
            names = [argument.arg for argument in [*node.args.posonlyargs, *node.args.args]]
            own = names[:1] in (["self"], ["cls"])
            # pytest fills the parameters of a test by name.
            count = 0 if node.name.startswith("test_") else len(names) - own
            yield from check_function(f"{name}:{node.lineno}: {node.name}", lines, count)


def documented(node: ast.AST) -> bool:
    """Whether its body begins with a docstring."""
    return ast.get_docstring(node, clean=False) is not None


def code_lines(path: Path, text: str) -> int:
    if path.suffix != ".py":
        return text.count("\n")
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    texts = [node.body[0] for node in ast.walk(ast.parse(text)) if isinstance(node, kinds) and documented(node)]
    return text.count("\n") - sum(each.end_lineno - each.lineno + 1 for each in texts)


def check_function(where: str, lines: int, parameters: int) -> Iterator[str]:
    if lines > FUNCTION_LINES:
        yield f"{where}: {lines} lines, at most {FUNCTION_LINES}"
    if parameters > PARAMETERS:
        yield f"{where}: {parameters} positional parameters, at most {PARAMETERS}; make a struct or keywords of them"


def check(root: Path) -> Iterator[str]:
    for path in tree.files(root, ".py", *tree.CPP):
        name, text = str(path.relative_to(root)), path.read_text()
        if (lines := code_lines(path, text)) > FILE_LINES[path.suffix]:
            yield f"{name}: {lines} lines, at most {FILE_LINES[path.suffix]}"
        if path.name.split(".")[0] in BAD_NAMES:
            yield f"{name}: name the file after what is in it"
        yield from (check_python if path.suffix == ".py" else check_cpp)(name, text)


if __name__ == "__main__":
    tree.main(check)
