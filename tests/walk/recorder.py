"""Records which functions one call runs, in order: `python recorder.py HELPER` in a process of its own.

stdin: JSON {"code": a program that calls a layer with x and leaves its result in y, "layer": the name of the layer's
class in quire, "ways": {name: environment}}.
stdout: for each way, in which the program runs with these variables set, a line of JSON
    {"way": name, "walks": {"inference" | "forward" | "backward": [names of one function, ...]}}
"inference" and "forward" reach from the entry of the layer's forward to its return, without and with gradients;
"backward" is that of y. Every function is there once, where it was entered first: ["FILE:LINE:QUALIFIED NAME"] of
Python, what the symbol table calls it in C++, which are several names where the linker sees equal code. The program has
run before, so that what happens once in a process is not there. Functions that the compiler has inlined are not there
either.
"""

import ctypes
import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import torch

import quire

PACKAGE = Path(quire.__file__).parent


def functions() -> dict[int, list[str]]:
    """Address in this process -> what the symbol tables of quire's libraries call the function there."""
    bases = {}
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, _, offset, _, _, *path = line.split(maxsplit=5)
        if path and int(offset, 16) == 0:
            bases.setdefault(path[0], int(addresses.split("-")[0], 16))
    found = defaultdict(list)
    for library in sorted((PACKAGE / "lib").resolve().rglob("*.so")):
        if str(library) not in bases:
            continue
        listing = subprocess.run(["nm", "-C", "--defined-only", library], capture_output=True, text=True, check=True)
        for line in listing.stdout.splitlines():
            address, kind, name = line.split(maxsplit=2)
            if kind in "tTwWi":
                found[bases[str(library)] + int(address, 16)].append(name)
    return found


class Recorder:
    def __init__(self, helper: ctypes.CDLL, functions: dict[int, list[str]], entry: object) -> None:
        self.helper, self.functions, self.entry = helper, functions, entry
        self.addresses = (ctypes.c_size_t * len(functions))(*sorted(functions))
        self.calls: list[tuple[float, list[str]]] = []

    def start(self) -> None:
        self.calls.clear()
        if self.helper.set_breakpoints(self.addresses, len(self.addresses)):
            raise OSError(ctypes.get_errno(), "no breakpoint can be set: the system forbids mprotect to write to code")

    def call(self, code: object) -> None:
        """A function of Python is entered, after those of C++ that have been reached."""
        path = Path(code.co_filename)
        if path.is_relative_to(PACKAGE):
            name = f"{path.relative_to(PACKAGE)}:{code.co_firstlineno}:{code.co_qualname}"
            self.calls.append((self.helper.count_reached() + 0.5, [name]))

    def stop(self) -> list[list[str]]:
        order = (ctypes.c_uint32 * len(self.addresses))()
        self.helper.remove_breakpoints(order)
        reached = [(n, self.functions[a]) for n, a in zip(order, self.addresses, strict=True) if n]
        walk: list[list[str]] = []
        for _, names in sorted(self.calls + reached, key=lambda step: step[0]):
            if names not in walk:
                walk.append(names)
        return walk


def record_forward(recorder: Recorder, program: object) -> tuple[torch.Tensor, list[list[str]]]:
    """Runs the program -> its y, and the walk from the entry of the layer's forward to its return."""
    walk: list[list[str]] = []

    def watch(frame: object, event: str, _: object) -> None:
        if event == "call":
            if frame.f_code is recorder.entry:
                recorder.start()
            recorder.call(frame.f_code)
        elif event == "return" and frame.f_code is recorder.entry:
            walk.extend(recorder.stop())

    scope = inputs()
    sys.setprofile(watch)
    try:
        exec(program, scope)
    finally:
        sys.setprofile(None)
    return scope["y"], walk


def inputs() -> dict[str, object]:
    torch.manual_seed(0)  # which experts have tokens decides what runs
    return {"quire": quire, "x": torch.randn(3, 256, requires_grad=torch.is_grad_enabled())}


def walks(recorder: Recorder, program: object) -> dict[str, list[list[str]]]:
    torch.set_num_threads(1)  # with several, what they do first depends on who is quicker
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            scope = inputs()
            exec(program, scope)
    scope["y"].sum().backward()
    with torch.no_grad():
        _, inference = record_forward(recorder, program)
    y, forward = record_forward(recorder, program)
    dy = torch.ones_like(y)
    recorder.start()
    torch.autograd.backward(y, dy)
    return {"inference": inference, "forward": forward, "backward": recorder.stop()}


def main() -> None:
    asked = json.load(sys.stdin)
    program = compile(asked["code"], "<example>", "exec")
    entry = getattr(quire, asked["layer"]).forward.__code__
    recorder = Recorder(ctypes.CDLL(sys.argv[1], use_errno=True), functions(), entry)
    for way, environment in asked["ways"].items():
        sys.stdout.flush()
        if child := os.fork():  # the environment is read once in a process
            _, status = os.waitpid(child, 0)
            if status:
                sys.exit(f"recorder: {way} with {environment} ended with status {status}")
            continue
        os.environ |= environment
        print(json.dumps({"way": way, "walks": walks(recorder, program)}), flush=True)
        os._exit(0)


if __name__ == "__main__":
    main()
