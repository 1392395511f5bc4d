"""How much processor time `import quire` takes beyond `import torch`: both in one new process, of several the best.

Processor time, user and system, counts the work of the process alone, so that other programs disturb little. The table
of modules is of one further process (python -X importtime): wall time without that of the modules that it imports.
"""

import argparse
import re
import subprocess
import sys

#: The most seconds beyond PyTorch's own that are accepted.
TARGET = 0.25
TIMED = """
from time import process_time as now
before = now()
import torch
between = now()
import quire
print(between - before, now() - between)
"""
TRACED = "import sys, torch; print('quire alone', file=sys.stderr); import quire"


def cpu_seconds() -> tuple[float, float]:
    """Of `import torch` and then of `import quire`, in a new Python."""
    said = subprocess.run([sys.executable, "-c", TIMED], stdout=subprocess.PIPE, text=True, check=True).stdout
    of_torch, of_quire = map(float, said.split())
    return of_torch, of_quire


def own_modules() -> list[tuple[float, str]]:
    """Milliseconds and name of each module that quire loads beyond PyTorch's, the slowest first."""
    command = [sys.executable, "-X", "importtime", "-c", TRACED]
    said = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=True).stderr.partition("\nquire alone\n")[2]
    rows = re.findall(r"import time: +(\d+) \| +\d+ \| *(\S+)", said)
    return sorted(((int(own) / 1000, name) for own, name in rows), reverse=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="./dev bench import", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10, help="processes [10]")
    rounds = parser.parse_args().rounds
    cpu_seconds()  # writes bytecode
    of_torch, of_quire = map(min, zip(*(cpu_seconds() for _ in range(rounds)), strict=True))
    print(f"import torch {of_torch:.3f} s")
    print(f"import quire {of_quire:.3f} s of at most {TARGET} s: {'met' if of_quire <= TARGET else 'MISSED'}")
    modules = own_modules()
    print(f"\n{len(modules)} modules, ms of each without those that it imports:")
    for own, name in modules[:12]:
        print(f"{own:7.1f} {name}")
    return 0 if of_quire <= TARGET else 1


if __name__ == "__main__":
    sys.exit(main())
