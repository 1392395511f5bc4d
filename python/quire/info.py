"""What is installed and what it can do here: `python -m quire.info`, and whether a device computes the golden vectors:
`python -m quire.info --check [--device DEVICE]`."""

import argparse
import os
import platform
from collections.abc import Callable, Iterator

import torch

from quire import functional, runners
from quire.autocast import autocast
from quire.distributed import check_ranks
from quire.loading import command_line, library
from quire.loading.devices import count, devices
from quire.nn.linear import Linear
from quire.nn.own_context import running
from quire.recipe import Recipe, from_name, names


def why_not(recipe: Recipe | None, device: str | torch.device) -> str:
    """Why a bfloat16 Linear cannot train under that recipe, or without any, on that device: what it raised when tried.
    Empty if it can."""

    def train() -> None:
        layer = Linear(32, 32, device=device, dtype=torch.bfloat16)
        x = torch.ones(32, 32, device=device, dtype=torch.bfloat16, requires_grad=True)
        with autocast(recipe is not None, recipe=recipe), torch.enable_grad():
            torch.autograd.grad(layer(x).sum(), [x, layer.weight])

    return _reason(train, device)


def why_no_spec(spec: str, device: str | torch.device) -> str:
    """Why a tensor cannot be quantized under that spec on that device; empty if it can."""
    return _reason(
        lambda: functional.quantize(
            torch.ones(32, 32, dtype=torch.float32, device=device), spec, columnwise=True, seed=0
        ),
        device,
    )


def _reason(attempt: Callable[[], object], device: str | torch.device) -> str:
    try:
        with running():
            attempt()
    except Exception as error:  # whatever it is, it is the reason
        if "Could not run 'quire::" in str(error):  # the dispatcher's page of text
            return f"quire {library.built()['quire']} has no kernels for {torch.device(device).type}"
        return str(error).splitlines()[0]
    return ""


def _everywhere(why: Callable[[str], str]) -> str:
    return ", ".join(f"{device}: {why(device) or 'yes'}" for device in devices())


def _versions() -> Iterator[str]:
    built = library.built()
    yield f"quire {built['quire']}, built against PyTorch {built['torch']}, in {library.FOLDER.resolve()}"
    yield f"fast path for small calls: {'yes' if functional.DIRECT else 'no, quire was built without Python headers'}"
    yield f"PyTorch {torch.__version__}, Python {platform.python_version()}, {platform.platform()}"


def _threads() -> Iterator[str]:
    yield f"{torch.get_num_threads()} of PyTorch's; this process may use {len(os.sched_getaffinity(0))} CPU cores"


def _settings() -> Iterator[str]:
    for name, what in (("QUIRE_ISA", "the best instruction set"), ("QUIRE_KERNEL", "the first kernel that can")):
        yield f"{name}: {os.environ.get(name) or f'not set: {what} is used'}"
    checks = (
        "are used as they are" if os.environ.get("QUIRE_SELF_CHECK") == "off" else "are compared at their first use"
    )
    yield f"QUIRE_SELF_CHECK: {os.environ.get('QUIRE_SELF_CHECK') or 'not set'}: kernels of a GPU {checks}"
    checks = "compare" if check_ranks.enabled() else "do not compare"
    yield f"{check_ranks.NAME}: {os.environ.get(check_ranks.NAME) or 'not set'}: ranks {checks} their calls"


def _isas() -> list[str]:
    try:
        return torch.ops.quire.isas().splitlines()
    except RuntimeError as error:  # QUIRE_ISA names none
        return str(error).splitlines()[:1]


def _devices() -> Iterator[str]:
    for device in devices():
        missing = why_not(from_name("mxfp8"), device)
        yield f"{device} ({count(device)}): {missing or 'usable'}"
    yield f"kernels for CUDA: {torch.ops.quire.absence_of('cuda') or 'in libquire_cuda.so'}"
    if len(devices()) == 1:
        yield "no accelerator: PyTorch finds none" + (
            "" if torch.backends.cuda.is_built() else ", and is built without CUDA"
        )


def _kernels() -> Iterator[str]:
    for device in devices():
        try:
            yield from (f"{device}: {line}" for line in torch.ops.quire.kernel_tables(device).splitlines())
        except RuntimeError:  # the section of devices says so
            continue


def _recipes() -> Iterator[str]:
    for name in names():
        recipe = from_name(name)
        yield f"{name} ({_everywhere(lambda device, r=recipe: why_not(r, device))}) {recipe.linear_spec()}"


def _formats() -> Iterator[str]:
    for line in torch.ops.quire.spec_families().splitlines():
        family, meaning = line.split(": ", 1)
        yield f"{family} ({_everywhere(lambda device, f=family: why_no_spec(f, device))}) {meaning}"


def _runners() -> Iterator[str]:
    for runner in runners.registered():
        sizes = f"{runner.in_features} -> {runner.out_features}" + (f" x {runner.experts}" if runner.experts else "")
        title = f"{runner.handle} {runner.name!r}" if runner.name else str(runner.handle)
        yield f"{title} ({runner.kind}, {runner.device}) {sizes}: {runner.description}"


def sections() -> dict[str, list[str]]:
    """Title -> lines: versions, instruction sets, threads, environment, devices, kernels, recipes, formats, and the
    runners of this process."""
    return {
        "Versions": list(_versions()),
        "Instruction sets": _isas(),
        "Threads": list(_threads()),
        "Environment": list(_settings()),
        "Devices": list(_devices()),
        "Kernels, in order of preference": list(_kernels()),
        "Recipes": list(_recipes()),
        "Formats": list(_formats()),
        "Runners": list(_runners()) or ["none is registered in this process"],
        "Options of specs": [line.strip("| ") for line in torch.ops.quire.spec_grammar().splitlines()],
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m quire.info", description="What is installed, and what it can do.")
    parser.add_argument("--check", action="store_true", help="compare a device's bytes with the golden vectors instead")
    parser.add_argument("--device", help="for --check: such as cuda:1 [cuda if there is one, else cpu]")
    options = parser.parse_args(argv)
    if options.check:
        from quire.golden import comparison

        return comparison.main(options.device)
    for title, lines in sections().items():
        print(title, *(f"  {line}" for line in lines), "", sep="\n")
    return 0


if __name__ == "__main__":
    command_line.run(main)
