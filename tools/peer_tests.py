"""Runs TransformerEngine's own tests (a checkout of its repository) against quire and counts how each case ends.

    python tools/peer_tests.py --te PATH [--only FILE ...] [--cases 15] [--seconds 20] [--out FOLDER]

One process of pytest at a time runs a file, with a plugin of this module and the stand-ins of peer_names.py. Results
lie in --out as one file of JSON lines per test file; a file that is there is not run again.
"""

import argparse
import collections
import json
import os
import pathlib
import re
import signal
import subprocess
import sys

import pytest

FILES = """
    test_sanity test_numerics test_recipe test_quantized_tensor test_permutation test_fused_router test_grouped_linear
    test_grouped_mlp test_grouped_tensor test_custom_recipe test_backward_override test_checkpoint test_deferred_init
""".split()
COLUMNS = ("passed", "skipped", "internals", "documented", "missing", "wrong", "unknown")

#: What a failure's last lines say -> its class. The first row that matches counts.
RULES = (
    (r"InternalName|transformer_engine_torch", "internals"),
    (r"has no attribute '_|'cpu' == 'cuda'", "internals"),
    (r"Could not find checkpoint file", "internals"),  # files that TransformerEngine itself has to write first
    (r"on CUDA device|torch\.cuda|Torch not compiled with CUDA|No CUDA GPUs|Found no NVIDIA driver", "internals"),
    (r"DocumentedName|NotImplementedError", "documented"),
    (r"is not available: ", "documented"),
    (r"MissingName|unexpected keyword argument|has no attribute|ImportError|ModuleNotFoundError", "missing"),
    (r"AssertionError|not close", "wrong"),
)


def classify(text: str) -> str:
    """The class of a failure whose error is `text`; 'unknown' says that a person must look at it."""
    return next((kind for pattern, kind in RULES if re.search(pattern, text)), "unknown")


class CaseTimeout(Exception):
    """A case ran for longer than --seconds."""


class Plugin:
    """Keeps `cases` cases of a function, spread evenly, and writes one line of JSON per case."""

    def __init__(self, cases: int, seconds: int, out: pathlib.Path):
        self.cases, self.seconds, self.out = cases, seconds, out

    def write(self, case: str, kind: str, error: str) -> None:
        with self.out.open("a") as file:
            file.write(json.dumps({"case": case, "kind": kind, "error": error[-500:]}) + "\n")

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        functions = collections.defaultdict(list)
        for item in items:
            functions[item.nodeid.partition("[")[0]].append(item)
        kept = []
        for group in functions.values():
            count = min(self.cases, len(group))
            kept += [group[index * len(group) // count] for index in range(count)]
        items[:] = kept

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item):  # noqa: ANN201 - a generator of pluggy
        def stop(signum: int, frame: object) -> None:
            raise CaseTimeout(f"over {self.seconds} s")

        signal.signal(signal.SIGALRM, stop)
        signal.alarm(self.seconds)
        try:
            return (yield)
        finally:
            signal.alarm(0)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            error = report.longrepr.reprcrash.message if hasattr(report.longrepr, "reprcrash") else str(report.longrepr)
            self.write(report.nodeid, classify(error), error)
        elif report.skipped:
            self.write(report.nodeid, "skipped", str(report.longrepr))
        elif report.when == "call":
            self.write(report.nodeid, "passed", "")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            error = str(report.longrepr)
            last = error.strip().splitlines()[-1]
            self.write(f"{report.nodeid}::(import)", classify(last), last)


def table(records: list[dict[str, str]]) -> str:
    """A Markdown table: a row for each function, a column for each class."""
    counts = collections.defaultdict(collections.Counter)
    for record in records:
        file, _, name = record["case"].partition("[")[0].rpartition("::")
        counts[f"{pathlib.Path(file).name}::{name}"][record["kind"]] += 1
    counts["all"] = sum(list(counts.values()), collections.Counter())
    lines = [" | ".join(("| test", *COLUMNS)) + " |", "|---" * (len(COLUMNS) + 1) + "|"]
    lines += [" | ".join((f"| {name}", *(str(row[kind]) for kind in COLUMNS))) + " |" for name, row in counts.items()]
    return "\n".join(lines)


def run_file(path: pathlib.Path, options: argparse.Namespace, out: pathlib.Path) -> int:
    """What the child process does: all kept cases of one file."""
    import peer_names

    peer_names.install()
    sys.path.insert(0, str(options.te / "tests/pytorch"))
    plugin = Plugin(options.cases, options.seconds, out)
    return pytest.main(
        ["-q", "-p", "no:cacheprovider", "--rootdir", str(options.te), "--tb=short", str(path)], [plugin]
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--te", type=pathlib.Path, required=True, help="a checkout of TransformerEngine")
    parser.add_argument("--only", nargs="+", default=FILES, help="names of test files below tests/pytorch")
    parser.add_argument("--cases", type=int, default=15, help="cases per test function, at most")
    parser.add_argument("--seconds", type=int, default=20, help="time limit of a case")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("build/peer_tests"))
    parser.add_argument("--child", type=pathlib.Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.te = options.te.resolve()
    if options.child:
        path = options.te / "tests/pytorch" / options.only[0]
        return run_file(path.with_suffix(".py"), options, options.child)
    options.out.mkdir(parents=True, exist_ok=True)
    records = []
    for name in options.only:
        result = options.out / f"{name.replace('/', '.').removesuffix('.py')}.jsonl"
        if not result.exists():
            part = result.with_suffix(".part").resolve()
            part.write_text("")
            same = ["--te", str(options.te), "--cases", str(options.cases), "--seconds", str(options.seconds)]
            command = [sys.executable, __file__, *same, "--only", name, "--child", str(part)]
            code = subprocess.run(
                command, stdout=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"}
            ).returncode
            if code not in (0, 1, 2, 5):  # pytest's: passed, failed, files not importable, no cases
                raise SystemExit(f"peer_tests: the process for {name} ended with {code}; its results so far are {part}")
            part.rename(result)
        records += [json.loads(line) for line in result.read_text().splitlines()]
    print(table(records))
    return 0


if __name__ == "__main__":
    sys.exit(main())
