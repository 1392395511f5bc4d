"""Checkpoints: everything a run needs to go on as if it had never stopped.

That is the model, the optimizer, how many steps are done (which is the position in the data, see `data.Windows`), the
state of PyTorch's random generator, and the state of quire's: stochastic rounding draws numbers that depend on how many
backward passes a layer has made, so a run resumed without them would round differently.
"""

import dataclasses
import pickle
from pathlib import Path

import torch
from settings import ExampleError, Settings

VERSION = 1


def save(path: Path, content: dict) -> None:
    """Write a checkpoint, completely or not at all: an interruption leaves the previous one in place."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished")
    torch.save({"version": VERSION, **content}, unfinished)
    unfinished.replace(path)


def load(path: Path) -> dict:
    """Read a checkpoint; plain data and tensors only, so a file from elsewhere cannot run code."""
    try:
        content = torch.load(path, weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise ExampleError(f"cannot read checkpoint {path}: {str(error).splitlines()[0]}") from error
    if not isinstance(content, dict) or content.get("version") != VERSION:
        raise ExampleError(f"checkpoint {path} is not of version {VERSION}; delete it and train again")
    return content


def check_same_run(path: Path, content: dict, settings: Settings, digest: str) -> None:
    """Refuse to continue a run with other settings or other data: the result would belong to neither."""
    now = {**dataclasses.asdict(settings), "data": digest}
    then = {**content["settings"], "data": content["digest"]}
    changed = [f"{name} was {then.get(name)}, is {now[name]}" for name in now if now[name] != then.get(name)]
    if changed:
        raise ExampleError(
            f"checkpoint {path} belongs to another run ({'; '.join(changed)}); "
            "give the same options as before, or another --out"
        )
