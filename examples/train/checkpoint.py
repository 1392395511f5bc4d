"""Checkpoints: everything a run needs to go on as if it had never stopped.

That is the model, the optimizer, how many steps are done (which is the position in the data, see `data.Windows`), the
state of PyTorch's random generator, and the state of quire's: stochastic rounding draws numbers that depend on how many
backward passes a layer has made, so a run resumed without them would round differently; and delayed scaling takes its
scales from the amaxes of earlier steps.
"""

import dataclasses
import hashlib
import io
from pathlib import Path

import torch
from settings import ExampleError, Settings

VERSION = 4
#: What a file ends with: this and the checksum of all before it, in hexadecimal. torch.load reads past it.
SEAL = b"\nquire demo, sha256 "


def save(path: Path, content: dict) -> None:
    """Write a checkpoint, completely or not at all: an interruption leaves the previous one in place."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished")
    file = io.BytesIO()
    torch.save({"version": VERSION, **content}, file)
    unfinished.write_bytes(file.getvalue() + SEAL + checksum(file.getvalue()))
    unfinished.replace(path)


def checksum(data: bytes) -> bytes:
    return hashlib.sha256(data).hexdigest().encode()


def load(path: Path) -> dict:
    """Read a checkpoint; plain data and tensors only, so a file from elsewhere cannot run code. Raises ExampleError if
    the bytes are not those that save() wrote: a run that continues from damaged bytes gives wrong results."""
    try:
        data, seal, found = path.read_bytes().rpartition(SEAL)
    except OSError as error:
        raise ExampleError(f"cannot read checkpoint {path}: {error.strerror}") from error
    if not seal:
        raise ExampleError(
            f"checkpoint {path} does not end with a checksum: it is cut short, or not of version {VERSION}; delete it "
            "and train again"
        )
    if found != checksum(data):
        raise ExampleError(
            f"checkpoint {path} is damaged: its checksum is {found.decode(errors='replace')[:12]}, that of its content "
            f"{checksum(data).decode()[:12]}; delete it and train again"
        )
    try:
        content = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:  # of a file that somebody made by hand: anything
        raise ExampleError(f"checkpoint {path} holds no checkpoint ({type(error).__name__}); delete it") from error
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
