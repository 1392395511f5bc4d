"""Options of the tests, and which of them are the quick ones."""

import gc
import zlib

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fuzz-seconds", type=float, default=60, help="how long the fuzzer of operators calls them")
    parser.addoption("--fuzz-seed", type=int, default=0, help="which calls it makes")
    parser.addoption("--quick", action="store_true", help="of each test one case that is cheap")


def compiles(item: pytest.Item) -> bool:
    """Whether a test asks for the compiler, unless this case of it runs in eager mode."""
    ways = item.callspec.params if hasattr(item, "callspec") else {}
    eager = ways.get("compiled") is False or ways.get("forward") == "eager"
    return "compiler" in item.fixturenames and not eager


def cheap(item: pytest.Item) -> bool:
    if item.get_closest_marker("quick"):
        return True
    return not (item.get_closest_marker("slow") or compiles(item))


def one_of(cases: list[pytest.Item]) -> list[pytest.Item]:
    """Always the same, and of different tests different ones, so that all recipes are seen."""
    return [cases[zlib.crc32(cases[0].nodeid.encode()) % len(cases)]] if cases else []


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--quick"):
        return
    tests = {}
    for item in items:
        tests.setdefault(item.nodeid.partition("[")[0], []).extend([item] if cheap(item) else [])
    chosen = [item for cases in tests.values() for item in one_of(cases)]
    kept = set(chosen)
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = chosen


def pytest_collection_finish() -> None:
    gc.freeze()  # no collection looks at what imports have made, which is most of what there is
