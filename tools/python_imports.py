"""Who imports whom among the modules of a Python package."""

import ast
from collections.abc import Iterator, Mapping, Set
from pathlib import Path

import tree


def modules(folder: Path) -> dict[str, Path]:
    """Dotted name -> file, of every module and package in and below a package's folder."""
    found = {}
    for source in tree.files(folder, ".py"):
        parts = (folder.name, *source.relative_to(folder).with_suffix("").parts)
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = source
    return found


def imported(source: Path, known: Set[str]) -> set[str]:
    """The known modules that a file imports, wherever in it: in functions and under TYPE_CHECKING too. A name of a
    package that is no module counts as the package."""
    found = set()
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in known else node.module for name in names}
    return found & known


def graph(folder: Path) -> dict[str, set[str]]:
    """Module -> those that it makes run: what it imports, and the packages around that. (A package that is around the
    module itself runs before it in any case.)"""
    sources, edges = modules(folder), {}
    for name, source in sources.items():
        edges[name] = set()
        for target in imported(source, sources.keys()):
            parts = target.split(".")
            around = {".".join(parts[:count]) for count in range(1, len(parts))}
            edges[name] |= {target} | {
                package for package in around if package in sources and not f"{name}.".startswith(f"{package}.")
            }
    return edges


def rooms(edges: Mapping[str, Set[str]]) -> dict[str, set[str]]:
    """The same among the modules and packages of the root: what is in a package counts as the package."""
    found: dict[str, set[str]] = {}
    for name, targets in edges.items():
        own = ".".join(name.split(".")[:2])
        found.setdefault(own, set()).update(".".join(target.split(".")[:2]) for target in targets)
    return {own: targets - {own} for own, targets in found.items()}


def cycles(edges: Mapping[str, Set[str]]) -> Iterator[list[str]]:
    """One way around for each group of modules that import each other."""
    reached = {name: _reached(edges, name) for name in edges}
    seen: set[str] = set()
    for name in sorted(edges):
        if name in reached[name] and name not in seen:
            seen |= {other for other in reached[name] if name in reached[other]}
            yield _way_around(edges, name)


def _reached(edges: Mapping[str, Set[str]], start: str) -> set[str]:
    found: set[str] = set()
    waiting = [start]
    while waiting:
        new = edges[waiting.pop()] - found
        found |= new
        waiting.extend(new)
    return found


def _way_around(edges: Mapping[str, Set[str]], start: str) -> list[str]:
    """The shortest."""
    ways = [[start]]
    while True:
        ways = [[*way, target] for way in ways for target in sorted(edges[way[-1]]) if target not in way[1:]]
        for way in ways:
            if way[-1] == start:
                return way
