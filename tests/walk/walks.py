"""The walk of one call through the sources, recorded: `python tests/walk/walks.py` prints it with its files and lines.
With the word MoE it is the walk of a mixture, with the name of a recipe that of this recipe.

Only functions that the compiler has not inlined are seen: the release build is what is walked.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

if __name__ == "__main__":  # a script, not a module of the tests
    sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2] / "tools")]

from walk.sources import ROOT, Function, cpp_functions, python_function, qualified

HERE = Path(__file__).parent
KERNELS = (
    *("src/quire/cpu/generic/", "src/quire/cpu/simd/", "src/quire/cpu/target/", "src/quire/cpu/moe/"),
    "src/quire/reference/",
)
#: Where a kernel has come back to.
CALLERS = ("python/", "src/quire_torch/", "src/quire_python/", "src/quire/device/")
#: Which of their members are entered depends on what the compiler inlines, and changes with any caller.
CONTAINERS = ("src/quire/base/shape.h",)

#: A mixture with the calls of docs/follow-one-call.md's example.
MIXTURE = """
with quire.autocast(recipe=quire.recipe.NVFP4BlockScaling()):
    y = quire.MoE(256, 256, num_experts=4, top_k=2)(x)
"""

#: The functions that one entry of a walk may be: several where the linker sees equal code.
Step = tuple[Function, ...]


def build_helper(folder: Path) -> Path:
    library = folder / "breakpoints.so"
    compiler = [os.environ.get("CXX", "g++"), "-std=c++20", "-O1", "-fPIC", "-shared"]
    subprocess.run([*compiler, HERE / "breakpoints.cpp", "-o", library], check=True)
    return library


def record(
    code: str, ways: Mapping[str, Mapping[str, str]], folder: Path, layer: str = "Linear"
) -> dict[str, dict[str, list[Step]]]:
    """Way -> "inference", "forward" and "backward" -> the project's functions in the order in which `code` enters them
    first, where the environment is that of the way (recorder.py)."""
    command = [sys.executable, HERE / "recorder.py", build_helper(folder)]
    asked = json.dumps({"code": code, "layer": layer, "ways": ways})
    done = subprocess.run(command, input=asked, capture_output=True, text=True, env=environment())
    if done.returncode:
        raise RuntimeError(f"the walk was not recorded:\n{done.stderr}")
    found = map(json.loads, done.stdout.splitlines())
    return {one["way"]: {part: list(steps(names)) for part, names in one["walks"].items()} for one in found}


def environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in ("QUIRE_ISA", "QUIRE_KERNEL")}


def steps(walk: list[list[str]]) -> Iterator[Step]:
    for names in walk:
        if re.match(r"\S+\.py:\d+:", names[0]):
            yield (python_function(names[0]),)
        elif found := dict.fromkeys(f for name in names if is_ours(name) for f in cpp_functions(name)):
            yield tuple(found)


def is_ours(symbol: str) -> bool:
    return qualified(symbol)[0] in ("quire", "quire_torch", "quire_python")


def to_the_kernels(walk: list[Step]) -> list[Step]:
    """Without what runs from the entry of a kernel to its return, and without containers."""
    kept, within = [], False
    for step in walk:
        file = step[0].file
        within = file.startswith(KERNELS) or (within and not file.startswith(CALLERS))
        if not within and file not in CONTAINERS:
            kept.append(step)
    return kept


def files(walk: list[Step]) -> dict[str, set[Function]]:
    """File -> its functions, in the order in which it is entered."""
    found: dict[str, set[Function]] = {}
    for step in walk:
        found.setdefault(step[0].file, set()).add(step[0])
    return found


def lines(walk: list[Step]) -> int:
    return sum(function.lines for function in {step[0] for step in walk})


def main() -> None:
    import tempfile

    page = (ROOT / "docs/follow-one-call.md").read_text()
    code = re.search(r"```python\n(.*?)```", page, re.DOTALL)[1]
    layer = "MoE" if "MoE" in sys.argv[1:] else "Linear"
    if layer == "MoE":
        code = MIXTURE
    for option in sys.argv[1:]:
        if option != layer:
            code = code.replace("NVFP4BlockScaling", option)
    with tempfile.TemporaryDirectory() as folder:
        walks = record(code, {"the best instruction set": {}}, Path(folder), layer)
    for part, walk in walks["the best instruction set"].items():
        outer = to_the_kernels(walk)
        cost = [f"{len(files(w))} files, {lines(w)} lines" for w in (walk, outer)]
        print(f"\n{part}: {cost[0]}; to the kernels {cost[1]}")
        last = ""
        for step in walk:
            function = step[0]
            if function.file != last:
                print(f"  {function.file}")
            last = function.file
            print(f"    {'' if step in outer else '. '}{function.name} :{function.line}  {function.lines}")


if __name__ == "__main__":
    main()
