"""Who may include whom (docs/design.md); reads #include lines in src/ and the uses of torch.ops.quire in python/."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import tree

VALUES = {"quire/base", "quire/format", "quire/spec"}
OPERATIONS = {"quire/quantize", "quire/gemm", "quire/pointwise", "quire/moe", "quire/state"}
CORE = {
    "quire/base": set(),
    "quire/format": {"quire/base"},
    "quire/spec": {"quire/base", "quire/format"},
    "quire/reference": VALUES,
    "quire/device": VALUES,
    "quire/cpu": VALUES | {"quire/reference", "quire/device"},
    "quire/quantize": VALUES | {"quire/device", "quire/reference"},
    "quire/gemm": VALUES | {"quire/device"},
    "quire/pointwise": VALUES | {"quire/device"},
    "quire/moe": VALUES | {"quire/device"},
    "quire/state": VALUES | {"quire/device"},
    "quire/runner": VALUES | OPERATIONS,
    "quire/info": VALUES | OPERATIONS | {"quire/device", "quire/cpu"},
}
PUBLIC_CORE = CORE.keys() - {"quire/cpu"}
ALLOWED = CORE | {
    "quire_torch/op": {"quire/base"},
    "quire_torch/bridge": PUBLIC_CORE | {"quire_torch/op"},
    "quire_torch/ops": PUBLIC_CORE | {"quire_torch/op", "quire_torch/bridge"},
    "quire_torch": {"quire/info", "quire/runner"}
    | {"quire_torch", "quire_torch/op", "quire_torch/bridge", "quire_torch/ops"},
    "quire_python": {"quire_torch/op", "quire_torch/ops"},
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
    "runners.py",
    "_transforms.py",
}


def check_includes(source: Path, name: str) -> Iterator[str]:
    folder = str(Path(name).parent)
    while folder not in ALLOWED and "/" in folder:
        folder = str(Path(folder).parent)
    if folder not in ALLOWED:
        yield f"src/{name}: its folder is not in the table of tools/check_layers.py"
        return
    allowed = ALLOWED[folder] | {folder} | ({"quire/cpu"} if name in DEVICE_TABLES else set())
    for quote, path in INCLUDE.findall(source.read_text()):
        if TORCH.match(path):
            if folder in CORE:
                yield f"src/{name}: the core includes no PyTorch; got {path}"
        elif quote == '"' and not path.startswith(("quire/", "quire_torch/", "quire_python/")):
            yield f'src/{name}: includes start at src/, as in "quire/gemm/gemm.h"; got {path}'
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


if __name__ == "__main__":
    tree.main(check)
