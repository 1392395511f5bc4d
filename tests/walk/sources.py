"""Where a function that has run is written: from its name in a trace to its file, line and length."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from cpp_functions import TOKENS, closing, parameters, scan

ROOT = Path(__file__).parents[2]
NAMESPACE = re.compile(r"\bnamespace\b\s*([\w:]*)\s*$")
CLASS = re.compile(r"(?<!enum )\b(?:struct|class|union)\s+(\w+)(?:<[^{}]*>)?(?: final)?(?:\s*:[^:].*)?\s*$", re.DOTALL)
TABLE = re.compile(r"^(?!\s*(?:return|using)\b)[\w:<>&*, ]*?\b(k[A-Z]\w*)\s*(?:\{|=)", re.MULTILINE)
#: The function to which a lambda without captures converts, as g++ and clang++ call it.
LAMBDA_AS_FUNCTION = re.compile(r"::(?:_FUN|__invoke)\(")
#: Fragments are compiled in the namespace of each instruction set.
ANY_ISA = ("quire", "cpu", "*")


@dataclass(frozen=True)
class Function:
    name: str  # qualified, without the namespaces of a file's own
    file: str
    line: int
    lines: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.name}"


# ------------------------------------------------------------ Python


@cache
def python_lengths(file: str) -> dict[int, int]:
    """First line, decorators included, -> number of lines of the functions of a file, without docstrings, as comments
    above functions of C++ are none of theirs."""
    nodes = (n for n in ast.walk(ast.parse((ROOT / file).read_text())) if isinstance(n, ast.FunctionDef | ast.Lambda))
    lengths = {}
    for node in nodes:
        first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
        text = node.body[0] if isinstance(node, ast.FunctionDef) and ast.get_docstring(node) is not None else None
        lengths[first] = node.end_lineno - first + 1 - (text.end_lineno - text.lineno + 1 if text else 0)
    return lengths


def python_function(name: str) -> Function:
    """Of "FILE:LINE:QUALIFIED NAME", the file below the package."""
    path, line, qualified = name.split(":", 2)
    file = f"python/quire/{path}"
    return Function(qualified, file, int(line), python_lengths(file).get(int(line), 1))


# ------------------------------------------------------------ C++


@dataclass(frozen=True)
class Definition:
    scope: tuple[str, ...]
    types: frozenset[str]  # names in the parameters that are written like types
    parameters: int
    function: Function


def scopes(code: str) -> list[tuple[int, int, list[str] | None]]:
    """Where each pair of braces begins and ends, outer ones before inner ones, and the names that it adds to what
    stands in it; None for those of functions and values."""
    opened, found, last = [], [], 0
    for bracket in re.finditer("[{};]", code):
        head = code[last : bracket.start()]
        last = bracket.end()
        if bracket[0] == "{":
            match = NAMESPACE.search(head) or CLASS.search(head)
            opened.append((bracket.start(), [n for n in match[1].split("::") if n] if match else None))
        elif bracket[0] == "}" and opened:
            start, names = opened.pop()
            found.append((start, bracket.start(), names))
    return sorted(found)


def scope_at(braces: list[tuple[int, int, list[str] | None]], at: int) -> list[str] | None:
    """The names around a place, None within a function."""
    around = [names for begin, end, names in braces if begin < at < end]
    return None if None in around else [name for names in around for name in names]


def definitions_in(path: Path) -> Iterator[tuple[str, Definition]]:
    text, file = path.read_text(), str(path.relative_to(ROOT))
    code = TOKENS.sub(lambda match: match["number"] or re.sub(r"[^\n]", " ", match[0]), text)
    braces, lines = scopes(code), [0, *(newline.end() for newline in re.finditer("\n", code)), len(code)]
    outer = ANY_ISA if file.endswith(".inl.h") or "/simd/" in file else ()
    for function in scan(text):
        start, end = lines[function.line - 1], lines[function.line + function.lines - 1]
        start += len(code[start:end]) - len(code[start:end].lstrip())
        own = re.compile(rf"((?:\w+(?:<[^<>]*>)?::)*)(~?{re.escape(function.name)})\s*\(([^{{;]*)").search(
            code, start, end
        )
        scope = scope_at(braces, start)
        if own is None or scope is None or not code[start:end].rstrip().endswith("}"):
            continue
        scope += [n for n in re.sub("<[^<>]*>", "", own[1]).split("::") if n]
        shown = "::".join([*(n for n in scope if n[:1].isupper()), own[2]])
        there = Function(shown, file, function.line, function.lines)
        types = frozenset(re.findall(r"\b[A-Z]\w+", own[3]))
        yield own[2], Definition((*outer, *scope), types, function.parameters, there)
    for table in TABLE.finditer(code):  # whose rows are functions without a name
        if (scope := scope_at(braces, table.start())) is not None:
            there = Function(table[1], file, code.count("\n", 0, table.start()) + 1, 1)
            yield table[1], Definition((*outer, *scope), frozenset(), 0, there)


@cache
def definitions() -> dict[str, list[Definition]]:
    """Name -> the definitions of it in src/."""
    found = defaultdict(list)
    for path in sorted((ROOT / "src").rglob("*")):
        if path.suffix in (".h", ".cpp"):
            for name, definition in definitions_in(path):
                found[name].append(definition)
    return dict(found)


def without_brackets(text: str, opening: str, closing: str) -> str:
    kept, depth = [], 0
    for at, c in enumerate(text):
        depth += c == opening
        if depth == 0:
            kept.append(c)
        depth -= c == closing and text[at - 1] != "-"
    return "".join(kept)


def plain(symbol: str) -> str:
    """Without arguments of templates and anonymous namespaces."""
    return re.sub(r"\[abi:\w+\]", "", without_brackets(symbol.replace("(anonymous namespace)::", ""), "<", ">"))


def qualified(symbol: str) -> tuple[str, ...]:
    """The names in "T ns::(anonymous namespace)::f<A>(B)::{lambda(C)#1}::operator()(C) const": ns, f."""
    return tuple(plain(symbol).partition("(")[0].partition("::{")[0].split(" ")[-1].split("::"))


@cache
def cpp_functions(symbol: str) -> tuple[Function, ...]:
    """The functions of src/ that a name of the symbol table may stand for: one, but for what the compiler has made
    (none) and overloads that differ in nothing but built-in types."""
    if LAMBDA_AS_FUNCTION.search(symbol):  # whose caller is a template, and whose code is the lambda's
        return ()
    *scope, name = qualified(symbol)
    fits = [
        d
        for d in definitions().get(name, [])
        if len(d.scope) == len(scope) and all(a in ("*", b) for a, b in zip(d.scope, scope, strict=True))
    ]
    named, text = set(re.findall(r"\w+", symbol)), plain(symbol)
    at = text.find("(")
    count = parameters(text[at + 1 : closing(text, at)]) if at >= 0 else 0
    # The closest first: names of types may be aliases, which a symbol does not know.
    ranks = [(d.parameters == count, d.types <= named, len(d.types)) for d in fits]
    best = max(ranks, default=None)
    return tuple(d.function for d, rank in zip(fits, ranks, strict=True) if rank == best)
