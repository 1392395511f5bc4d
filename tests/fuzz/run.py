"""Calls operators with arguments that nobody would give, in a process that may end by it.

    python tests/fuzz/run.py [--seconds 60] [--seed 0] [--only NAME] [--first NUMBER]

Prints the calls that ended the process, had PyTorch's internal words, changed something although they were refused, or
left a result unwritten. A call is made again by its seed and number alone: --seed S --first NUMBER --seconds 0.
"""

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
#: A call that has not answered after so many seconds hangs.
PATIENCE = 60.0


def fuzz(seconds: float, seed: int, only: str = "", first: int = 0) -> tuple[int, list[str]]:
    """How many calls were made, and what was wrong with which."""
    end, failures, number = time.monotonic() + seconds, [], first
    with tempfile.TemporaryDirectory() as folder:
        journal = Path(folder) / "journal"
        while True:
            rest = max(0.0, end - time.monotonic())
            code, output = work(journal, [str(rest), str(seed), str(number), only])
            failures += [line for line in output.splitlines() if line.count("\t") >= 2]
            at, _, words = journal.read_text(errors="replace").partition("\t")
            if words == "done":
                return int(at) - first, failures
            if words == "start":
                raise RuntimeError(f"the fuzzer's worker did not start: {output[-2000:]}")
            failures.append(f"{at}\tthe process {ended(code)}\t{words}\n{shortened(output)}")
            number = int(at) + 1
            if seconds == 0 or time.monotonic() > end or len(failures) > 50:
                return number - first, failures


def shortened(output: str) -> str:
    """What a sanitizer has found, of which the first lines matter, or else Python, of which the last do."""
    found = re.search(r"^.*(runtime error|ERROR: AddressSanitizer)", output, re.MULTILINE)
    return output[found.start() :][:3000] if found else output[-3000:]


def ended(code: int | None) -> str:
    if code is None:
        return f"gave no answer within {PATIENCE:.0f} seconds"
    return f"ended with {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"


def work(journal: Path, options: list[str]) -> tuple[int | None, str]:
    """The exit code of a worker, None of one that hung, and its output."""
    journal.write_text("0\tstart")
    paths = [str(HERE.parent), *sys.path]
    tunables = "glibc.malloc.tcache_count=0"  # what is in there is not filled with poison
    environment = os.environ | {"PYTHONPATH": ":".join(paths), "GLIBC_TUNABLES": tunables}
    command = [sys.executable, "-X", "faulthandler", "-m", "fuzz.worker", str(journal), *options]
    with tempfile.TemporaryFile() as file:
        worker = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environment)
        try:
            code = wait(worker, journal)
        finally:
            worker.kill()
            worker.wait()
        file.seek(0)
        return code, file.read().decode(errors="replace")


def wait(worker: subprocess.Popen, journal: Path) -> int | None:
    last, since = "", time.monotonic()
    while True:
        try:
            return worker.wait(timeout=0.2)
        except subprocess.TimeoutExpired:
            now = journal.read_text(errors="replace").partition("\t")[0]
            patience = PATIENCE * (4 if now == "0" else 1)  # the first call waits for PyTorch to load
            if now != last:
                last, since = now, time.monotonic()
            elif time.monotonic() - since > patience:
                return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="operators whose name has this in it")
    parser.add_argument("--first", type=int, default=0, help="the number of the first call")
    arguments = parser.parse_args()
    count, failures = fuzz(arguments.seconds, arguments.seed, arguments.only, arguments.first)
    print("\n".join(failures))
    print(f"{count} calls of seed {arguments.seed}, {len(failures)} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
