"""The text: the source files of Python's own standard library, which every machine that runs this example has.

A token is one byte, so there is no tokenizer and the vocabulary has 256 entries. Whole files go either to training or
to validation: a model cannot score well by remembering the other half of a file it has seen.
"""

import dataclasses
import hashlib
import os
import sysconfig
import zlib
from pathlib import Path

import torch
from settings import ExampleError

VOCABULARY = 256
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__"}
ONE_FILE_IN = 16  # this share of the files is kept for validation


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Training and validation bytes (uint8, one dimension), how many files they came from, and a hash of both."""

    train: torch.Tensor
    validation: torch.Tensor
    train_files: int
    validation_files: int
    digest: str

    def __str__(self) -> str:
        return (
            f"{self.train.numel() / 1e6:.1f} MB of training text ({self.train_files} files), "
            f"{self.validation.numel() / 1e6:.1f} MB of validation text ({self.validation_files} files), "
            f"sha256 {self.digest[:16]}"
        )


def standard_library_files(root: Path) -> list[Path]:
    """All Python files under `root` but installed packages, by relative path: an order that every system shares."""
    files = []
    for folder, folders, names in os.walk(root):
        folders[:] = set(folders) - SKIPPED_FOLDERS  # not entered: installed packages may be many
        files += [(Path(folder) / name).relative_to(root) for name in names if name.endswith(".py")]
    return sorted(files, key=lambda path: path.as_posix())


def is_validation_file(path: Path) -> bool:
    """The split depends on the file's name alone, so adding or removing other files does not move it."""
    return zlib.crc32(path.as_posix().encode()) % ONE_FILE_IN == 0


def load_corpus(root: Path | None = None) -> Corpus:
    """Read the standard library's sources under `root` (by default of the running Python) and split them by file."""
    root = root or Path(sysconfig.get_paths()["stdlib"])
    files = standard_library_files(root)
    train = [path for path in files if not is_validation_file(path)]
    validation = [path for path in files if is_validation_file(path)]
    if not train or not validation:
        raise ExampleError(
            f"no Python source files to train on under {root}; run a Python that ships its library as files"
        )
    texts = [b"\n".join((root / path).read_bytes() for path in part) for part in (train, validation)]
    tensors = [torch.frombuffer(bytearray(text), dtype=torch.uint8) for text in texts]
    digest = hashlib.sha256(texts[0] + b"\0" + texts[1]).hexdigest()
    return Corpus(*tensors, len(train), len(validation), digest)


@dataclasses.dataclass(frozen=True)
class Windows:
    """Cuts of `seq + 1` bytes from a text: `seq` inputs and, shifted by one, the `seq` bytes to predict.

    `order` lists where the windows start. The batch of a step is a function of the step's number and nothing else, so
    the step's number is the whole position in the data, and all recipes see the same batches.
    """

    text: torch.Tensor
    order: torch.Tensor
    seq: int
    batch: int

    def __getitem__(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets of one step, int64 [batch, seq] each; the order starts again when it is used up."""
        rows = torch.arange(step * self.batch, (step + 1) * self.batch) % len(self.order)
        cut = self.text[self.order[rows, None] + torch.arange(self.seq + 1)].long()
        return cut[:, :-1].contiguous(), cut[:, 1:].contiguous()


def training_windows(text: torch.Tensor, seq: int, batch: int, seed: int) -> Windows:
    """Windows that cover `text` once without overlap, in an order shuffled by `seed`."""
    count = window_count(text, seq)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed)) * seq
    return Windows(text, order, seq, batch)


def validation_windows(text: torch.Tensor, seq: int, batch: int, batches: int) -> Windows:
    """`batches` batches of windows spread evenly over the whole of `text`, whatever the seed."""
    count = window_count(text, seq)
    order = torch.linspace(0, (count - 1) * seq, batch * batches, dtype=torch.float64).long()
    return Windows(text, order, seq, batch)


def window_count(text: torch.Tensor, seq: int) -> int:
    """How many windows of `seq` inputs and their targets fit without overlap."""
    count = (text.numel() - 1) // seq
    if count < 1:
        raise ExampleError(f"--seq {seq} is longer than the text of {text.numel()} bytes")
    return count
