"""Plants each bug of tests/planted/bugs.py, runs the tests that have to notice it, and says whether they do. By hand:

    .venv/bin/python tools/planted_bugs.py [--match WORD] [--jobs 2] [--list]

The libraries are those of the last build. No file of the tree is changed.
"""

import argparse
import concurrent.futures
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from workspace import ROOT

sys.path.insert(0, str(ROOT / "tests"))

from planted.bugs import BUGS  # noqa: E402  (needs the path)
from planted.plant import VARIABLE, Bug  # noqa: E402

#: Longer than the tests of any bug take, also where ranks wait for one that failed.
SECONDS = 600
CAUGHT = "caught"


def verdict(status: int, output: str) -> str:
    """What pytest's exit status and output say. An error outside of a test does not say that a test noticed."""
    if status == 0:
        return "NOT CAUGHT"
    ends = [line for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))]
    if status != 1 or not ends or not ends[0].startswith("FAILED"):
        return f"CANNOT TELL (pytest ended with {status})"
    return CAUGHT


def run(bug: Bug, folder: Path) -> tuple[str, str]:
    """The verdict, and a line about it."""
    environment = os.environ | {
        VARIABLE: bug.name,
        "PYTHONPATH": str(ROOT / "tests/planted"),
        "PYTHONDONTWRITEBYTECODE": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(folder),
    }
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *bug.arguments()]
    started = time.monotonic()
    try:
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=SECONDS)
        said, output = verdict(done.returncode, done.stdout), done.stdout
    except subprocess.TimeoutExpired:
        said, output = f"CANNOT TELL (no end within {SECONDS} seconds)", ""
    first = next((line.split(" - ")[0] for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))), "")
    detail = first if said == CAUGHT else output[-2000:]
    return said, f"{said:<10}  {bug.name} ({bug.contract})  [{time.monotonic() - started:.0f} s] {detail}"


def main() -> int:
    parser = argparse.ArgumentParser(description="Says which planted bugs the tests catch.")
    parser.add_argument("--match", default="", help="only bugs with this in their name, contract or tests")
    parser.add_argument("--jobs", type=int, default=2, help="how many run at a time")
    parser.add_argument("--list", action="store_true", help="list the bugs, and run nothing")
    options = parser.parse_args()
    chosen = [bug for bug in BUGS if options.match in f"{bug.name} {bug.contract} {bug.tests}"]
    if options.list:
        print(*(f"{bug.name} ({bug.contract})" for bug in chosen), sep="\n")
        return 0
    caught = 0
    with tempfile.TemporaryDirectory(prefix="planted") as folder:
        with concurrent.futures.ThreadPoolExecutor(options.jobs) as threads:
            for said, line in threads.map(lambda bug: run(bug, Path(folder)), chosen):
                caught += said == CAUGHT
                print(line, flush=True)
    print(f"{caught} of {len(chosen)} caught")
    return 0 if chosen and caught == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
