"""Who may include or import whom (docs/design.md 2); reads #include lines in src/, and imports in python/."""

import ast
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Set
from pathlib import Path

import python_imports
import tree

VALUES = {"quire/base", "quire/format", "quire/spec"}
CORE = {
    "quire/base": set(),
    "quire/format": {"quire/base"},
    "quire/spec": {"quire/base", "quire/format"},
    "quire/reference": VALUES,
    "quire/device": VALUES,
    "quire/cpu": VALUES | {"quire/reference", "quire/device"},
    "quire/cuda": VALUES | {"quire/device"},
    "quire/operations": VALUES | {"quire/device", "quire/reference"},
    "quire/runner": VALUES | {"quire/operations", "quire/device"},
    "quire/info": VALUES | {"quire/operations", "quire/device", "quire/cpu"},
}
#: Folders that compute.
DEVICES = {"quire/cpu", "quire/cuda"}
PUBLIC_CORE = CORE.keys() - DEVICES
ALLOWED = CORE | {
    "quire_torch/op": {"quire/base"},
    "quire_torch/bridge": PUBLIC_CORE | {"quire_torch/op"},
    "quire_torch/ops": PUBLIC_CORE | {"quire_torch/op", "quire_torch/bridge"},
    "quire_torch": {"quire/device", "quire/info", "quire/runner"}
    | {"quire_torch", "quire_torch/op", "quire_torch/bridge", "quire_torch/ops"},
    "quire_debug": {"quire/format", "quire/spec", "quire_debug", "quire_torch/op", "quire_torch/ops"},
    "quire_python": {"quire/base", "quire_torch/op", "quire_torch/ops"},
}
# The table of devices: the only file outside their folders that knows one.
DEVICE_TABLES = {"quire/device/device.cpp"}
TORCH = re.compile(r"(torch|ATen|c10|caffe2)/")
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^">]+)[">]', re.MULTILINE)
# Files and folders.
CALLS_OPERATORS = {
    "functional.py",
    "tensor",
    "debug.py",
    "delayed",
    "explain.py",
    "info.py",
    "data_parallel.py",
    "runners.py",
    "transforms.py",
}
#: The room of TransformerEngine's names. No other knows them, but for one import of the package itself.
TE, ITS_NAME = "quire.te", re.compile("transformer.?engine", re.IGNORECASE)
#: Tests of its names, of checkpoints that it wrote, and of pages, examples and tools about it. Without python/quire/te
#: all others pass.
TE_TESTS = ("tests/docs/", "tests/examples/", "tests/python/io/te_", "tests/python/io/test_te_", "tests/python/te/")
TE_TESTS += ("tests/tools/",)
USES_TE = re.compile(r"\b(quire|python)\.te\b|\btransformer_engine\b|^\s*from quire import .*\bte\b", re.MULTILINE)
#: In the package's root, __init__ included.
ROOT_MODULES = 8


def check_includes(source: Path, name: str) -> Iterator[str]:
    folder = str(Path(name).parent)
    while folder not in ALLOWED and "/" in folder:
        folder = str(Path(folder).parent)
    if folder not in ALLOWED:
        yield f"src/{name}: its folder is not in the table of tools/check_layers.py"
        return
    allowed = ALLOWED[folder] | {folder} | (DEVICES if name in DEVICE_TABLES else set())
    for quote, path in INCLUDE.findall(source.read_text()):
        if TORCH.match(path):
            if folder in CORE:
                yield f"src/{name}: the core includes no PyTorch; got {path}"
        elif quote == '"' and not path.startswith(("quire/", "quire_torch/", "quire_debug/", "quire_python/")):
            yield f'src/{name}: includes start at src/, as in "quire/operations/operations.h"; got {path}'
        elif quote == '"' and not any(is_in(path, layer) for layer in allowed):
            yield f"src/{name}: {folder} may include {', '.join(sorted(allowed))}; got {path}"


def is_in(path: str, layer: str) -> bool:
    """quire_torch/library.h is in quire_torch; quire_torch/op/op.h is in quire_torch/op only."""
    return path.startswith(layer + "/") and ("/" in layer or "/" not in path.removeprefix(layer + "/"))


def calls_operators(source: Path) -> bool:
    nodes = (node for node in ast.walk(ast.parse(source.read_text())) if isinstance(node, ast.Attribute))
    return any(ast.unparse(node) == "torch.ops.quire" for node in nodes)


def check(root: Path) -> Iterator[str]:
    for source in tree.files(root / "src", *tree.CPP):
        yield from check_includes(source, str(source.relative_to(root / "src")))
    for source in tree.files(root / "python", ".py"):
        if CALLS_OPERATORS.isdisjoint((source.name, source.parent.name)) and calls_operators(source):
            allowed = ", ".join(sorted(CALLS_OPERATORS))
            yield f"{source.relative_to(root)}: torch.ops.quire is called in {allowed} only"
    yield from check_rooms(root)
    yield from check_tests(root)


def check_tests(root: Path) -> Iterator[str]:
    for source in tree.files(root / "tests", ".py") if (root / "tests").is_dir() else ():
        name = str(source.relative_to(root))
        if not name.startswith(TE_TESTS) and (used := USES_TE.search(source.read_text())):
            yield f"{name}: {used[0].strip()!r}; what needs {TE} is tested in tests/python/te"


def check_rooms(root: Path) -> Iterator[str]:
    """The modules of python/quire."""
    package = root / "python/quire"
    if not package.is_dir():
        return
    modules = python_imports.modules(package)
    in_root = [source for source in modules.values() if source.parent == package]
    if len(in_root) > ROOT_MODULES:
        yield f"python/quire: {len(in_root)} modules, at most {ROOT_MODULES}; put what has one purpose into a room"
    imports = python_imports.graph(package)
    of_modules = [f"modules import each other: {' -> '.join(way)}" for way in python_imports.cycles(imports)]
    of_rooms = python_imports.cycles(python_imports.rooms(imports))
    for finding in of_modules or (f"rooms import each other: {' -> '.join(way)}" for way in of_rooms):
        yield f"python/quire: {finding}"
    yield from check_te(root, modules)
    yield from check_names(root, [source for source in modules.values() if source.name != "__init__.py"])


def check_te(root: Path, modules: Mapping[str, Path]) -> Iterator[str]:
    of_te = {name for name in modules if f"{name}.".startswith(f"{TE}.")}
    for name in modules.keys() - of_te:
        source = modules[name]
        text, where = source.read_text(), modules[name].relative_to(root)
        if any(imports_any(node, of_te) for node in ast.walk(ast.parse(text))):
            yield f"{where}: {TE} is imported by nothing outside of it"
        # Its checkpoints are read without it.
        if not source.stem.startswith("te_") and ITS_NAME.search(text):
            yield f"{where}: TransformerEngine is known to python/quire/te only, and to te_*.py for its checkpoints"


def imports_any(node: ast.AST, names: Set[str]) -> bool:
    if isinstance(node, ast.Import):
        return any(alias.name in names for alias in node.names)
    if not isinstance(node, ast.ImportFrom):
        return False
    return node.module in names or any(f"{node.module}.{alias.name}" in names for alias in node.names)


def check_names(root: Path, sources: Iterable[Path]) -> Iterator[str]:
    """Two modules that a reader would take for each other."""
    for one, other in itertools.combinations(sorted(sources), 2):
        if within_a_letter(one.stem, other.stem):
            names = f"{one.relative_to(root)} and {other.relative_to(root)}"
            yield f"{names}: the names of modules differ by more than a letter; say what each is for"


def within_a_letter(a: str, b: str) -> bool:
    """Whether a word becomes the other by at most one letter added, removed or changed."""
    if len(a) < len(b):
        a, b = b, a
    same = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), len(b))
    return a[same + 1 :] == b[same + (len(a) == len(b)) :]


if __name__ == "__main__":
    tree.main(check)
