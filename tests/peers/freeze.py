"""Writes tests/golden/io: checkpoints of other tools, and their own dequantized values.

Run by the Python of ./dev test --peers (build/peers). Each case is made in a process of its own, since ModelOpt
changes classes of transformers. `freeze.py` makes all cases, `freeze.py CASE...` some; --list names them.
"""

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent.parent / "python")]

import torch  # noqa: E402

from python.io.stored_golden import FOLDER, summary  # noqa: E402


def save(
    folder: Path,
    tensors: Mapping[str, torch.Tensor],
    values: Mapping[str, torch.Tensor],
    configs: Mapping[str, Any],
    metadata: Mapping[str, str] | None = None,
    *,
    signed_zeros: bool = True,
) -> None:
    """A case of safetensors. values: name of a weight -> its values as the other tool dequantizes them."""
    from safetensors.torch import save_file

    tensors = {name: tensor.detach().contiguous().clone() for name, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt", **(metadata or {})})
    for file, content in configs.items():
        (folder / file).write_text(json.dumps(content, indent=1) + "\n")
    expect(folder, values, signed_zeros=signed_zeros)


def expect(folder: Path, values: Mapping[str, torch.Tensor], *, signed_zeros: bool = True) -> None:
    found = {name: summary(value, signed_zeros) for name, value in values.items()}
    (folder / "expected.json").write_text(json.dumps(found, indent=1) + "\n")


def cases() -> dict[str, Any]:
    import of_compressed_tensors
    import of_gguf
    import of_modelopt
    import of_torchao
    import of_transformers

    modules = (of_modelopt, of_compressed_tensors, of_torchao, of_gguf, of_transformers)
    return {name: case for module in modules for name, case in module.CASES.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("case", nargs="*")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--one", action="store_true", help="in this process")
    parser.add_argument("--out", type=Path, default=FOLDER)
    arguments = parser.parse_args()
    known = cases()
    if arguments.list:
        print("\n".join(known))
        return 0
    wanted = arguments.case or list(known)
    if arguments.one:
        torch.manual_seed(0)
        folder = arguments.out / wanted[0]
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        known[wanted[0]](folder)
        return 0
    for name in wanted:
        subprocess.run([sys.executable, __file__, "--one", "--out", str(arguments.out), name], check=True)
        size = sum(file.stat().st_size for file in (arguments.out / name).iterdir())
        print(f"{name}: {size} bytes", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
