"""Options of the tests."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fuzz-seconds", type=float, default=60, help="how long the fuzzer of operators calls them")
    parser.addoption("--fuzz-seed", type=int, default=0, help="which calls it makes")
