"""A format stays cheap to add: few files name an element format, and none of them is a kernel; above the kernels, few
files name a family of specs."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import tree

#: Beside the table.
FILES = 8
TABLE = "src/quire/format/format.h"
#: Files of other tools and golden vectors name what they hold, and a GPU's headers have types of these names: a new
#: element of quire's changes none of them.
NAMED_BY_OTHERS = ("python/quire/golden/", "python/quire/io/", "src/quire/cuda/")
#: Above the kernels, those that choose by the name of a family instead of asking its row. A limit that only falls.
FAMILY_FILES = 40
FAMILY_TABLE = "src/quire/spec/quant_spec.h"
#: Kernels; recipes, which are named after families; and names that other tools and vectors have.
NOT_ABOVE_KERNELS = ("src/quire/cpu/", "src/quire/cuda/", "python/quire/recipe/", "python/quire/te/")
FAMILY_ROW = re.compile(r'^\s*\{"(\w+)", Format::', re.MULTILINE)
#: A row of the table, of numbers with a sign: those of scales alone have none.
ROW = re.compile(r'^\s*\{"(\w+)",.*\btrue\},$', re.MULTILINE)
COMMENT_OR_TEXT = re.compile(r'//[^\n]*|/\*.*?\*/|("(?:\\.|[^"\\\n])*")', re.DOTALL)
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def cpp_code(text: str) -> str:
    return COMMENT_OR_TEXT.sub(lambda match: match[1] or " ", text)


def python_code(text: str) -> str:
    """Without comments and docstrings."""
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, DOCUMENTED) and ast.get_docstring(node)]
    documentation = {(node.body[0].lineno, node.body[0].col_offset) for node in nodes}
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return " ".join(t.string for t in tokens if t.type != tokenize.COMMENT and t.start not in documentation)


def code_of_files(root: Path) -> Iterator[tuple[str, str]]:
    """Names and code, without comments, of all files of the libraries but those that name what others have named."""
    for folder in ("src", "python"):
        for path in tree.files(root / folder, ".py", *tree.CPP):
            name = str(path.relative_to(root))
            if not name.startswith(NAMED_BY_OTHERS):
                yield name, (python_code if path.suffix == ".py" else cpp_code)(path.read_text())


def naming(root: Path) -> Iterator[str]:
    """The files whose code has an identifier or a text with the name of an element format, in any case of letters."""
    names = re.compile("|".join(ROW.findall((root / TABLE).read_text())), re.IGNORECASE)
    return (name for name, code in code_of_files(root) if name != TABLE and names.search(code))


def naming_families(root: Path) -> Iterator[str]:
    """The files above the kernels whose code names a family of specs."""
    families = FAMILY_ROW.findall((root / FAMILY_TABLE).read_text()) + ["two_level"]
    names = re.compile(rf"(?<![a-z0-9])({'|'.join(families)})(?![a-z0-9])", re.IGNORECASE)
    for name, code in code_of_files(root):
        if name != FAMILY_TABLE and not name.startswith(NOT_ABOVE_KERNELS) and names.search(code):
            yield name


def check(root: Path) -> Iterator[str]:
    found = list(naming(root))
    if len(found) > FILES:
        yield (
            f"{len(found)} files name an element format, at most {FILES}: {', '.join(found)}; ask the format's row "
            "(quire/format/format.h), or take the spec's element as a constant (with_element, with_kinds)"
        )
    if not FAMILY_ROW.search((root / FAMILY_TABLE).read_text()):
        yield f"{FAMILY_TABLE}: no row of a family was found; tools/check_formats.py looks for {FAMILY_ROW.pattern}"
    found = list(naming_families(root))
    if len(found) > FAMILY_FILES:
        yield (
            f"{len(found)} files above the kernels name a family of specs, at most {FAMILY_FILES}: {', '.join(found)}; "
            "ask the family's row (quire/spec/quant_spec.h), or a property of QuantSpec"
        )


if __name__ == "__main__":
    tree.main(check)
