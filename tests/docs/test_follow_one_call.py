"""docs/follow-one-call.md names files and symbols that exist."""

import ast
import re
from pathlib import Path

PAGE = "docs/follow-one-call.md"
STOP = re.compile(r"^### (\d+)\. \[(\S+)\]\((\S+)\) `(\S+)`$", re.MULTILINE)


def defined_in_python(path: Path, symbol: str) -> bool:
    nodes: list[ast.AST] = [ast.parse(path.read_text())]
    for name in symbol.split("."):
        children = [child for node in nodes for child in ast.iter_child_nodes(node)]
        nodes = [child for child in children if getattr(child, "name", None) == name]
    return bool(nodes)


def defined_in_cpp(path: Path, symbol: str) -> bool:
    """A definition or declaration: `type name(`, `struct name {`, `type name{` or `type name =`."""
    text = path.read_text()
    *outer, name = symbol.split("::")

    def defines(name: str) -> bool:
        # A call has `=`, `return` or another expression before it, a definition only types.
        start = r"^(?![ \t]*(?:return|throw)\b)[ \t]*[\w:<>&*,\[\] ]*?[\w>&*\]] \**&?"
        return re.search(rf"{start}{re.escape(name)}\b(?: final)?(?:\s*[({{]| : | =)", text, re.MULTILINE) is not None

    return defines(symbol) or (bool(outer) and defines(outer[-1]) and defines(name))


def test_every_stop_names_a_file_and_a_symbol_in_it(page, root):
    stops = STOP.findall(page(PAGE).text)
    assert [int(number) for number, *_ in stops] == list(range(1, len(stops) + 1)) and len(stops) >= 10
    assert len(stops) == page(PAGE).text.count("\n### "), "a stop's heading is not `### N. [file](../file) `symbol``"
    for number, file, link, symbol in stops:
        path = root / file
        assert link == f"../{file}"
        assert path.is_file(), f"stop {number}: there is no {file}"
        defined = defined_in_python if path.suffix == ".py" else defined_in_cpp
        assert defined(path, symbol), f"stop {number}: {file} does not define {symbol}"


SOURCE = """
int one(int x) {
  return two(x);
}
struct A {
  void f();
};
void B::g() {}
const int k{three(1)};
"""


def test_the_check_sees_definitions_and_not_calls(tmp_path):
    source = tmp_path / "a.cpp"
    source.write_text(SOURCE)
    defined, called = ("one", "A", "A::f", "B::g", "k"), ("two", "A::g", "three", "B::f")
    assert [name for name in (*defined, *called) if defined_in_cpp(source, name)] == list(defined)


def test_the_call_that_is_followed_runs(page):
    import torch

    import quire

    code = re.search(r"```python\n(.*?)```", page(PAGE).text, re.DOTALL)[1]
    scope = {"quire": quire, "x": torch.randn(3, 256)}
    exec(code, scope)
    assert scope["y"].shape == (3, 1024)
    recipe = quire.recipe.NVFP4BlockScaling().linear_spec()
    assert f"`{recipe}`" in page(PAGE).text
