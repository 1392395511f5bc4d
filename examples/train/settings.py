"""What a training run is made of: the numbers that a user may change, in one place.

This file imports nothing outside the standard library, so that the command line can be read, and its mistakes reported,
before anything large is loaded.
"""

import dataclasses
from pathlib import Path

BASELINE = "baseline"
RECIPES = (BASELINE, "fp8_current", "fp8_delayed", "fp8_block", "mxfp8", "nvfp4")


#: Of torch.compile: "aot_eager" captures the same graphs and generates no code, which is quicker for a short run.
BACKENDS = ("inductor", "aot_eager")
#: Ways to share the work among processes, each of which is a rank (processes.py).
PARALLEL = ("tp", "sp", "fsdp", "tp+fsdp", "ep")


class ExampleError(Exception):
    """Something the user can put right. Its text is the whole message; no traceback is printed."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """Everything that decides the numbers of a run: two runs with equal settings and equal data are equal bit for bit.

    Sizes are in tokens, and a token is one byte of text. `dtype` is the precision of the baseline and of all
    activations outside the quantized products: "bf16" or "fp32".
    """

    layers: int
    width: int
    seq: int
    batch: int
    steps: int
    lr: float
    seed: int
    dtype: str
    validation_batches: int
    processes: int = 1
    parallel: str = ""  #: how several processes share the work: one of PARALLEL
    moe: int = 0  #: experts of each block's network, of which a token takes two; 0: one network for all tokens
    backend: str = "inductor"  #: of torch.compile: one of BACKENDS
    device: str = "cpu"  #: where the model and its batches are, as PyTorch calls it

    @property
    def heads(self) -> int:
        """Attention heads of 64 channels, the usual size; one head where the model is narrower than that."""
        return max(1, self.width // 64)

    @property
    def tokens_per_step(self) -> int:
        return self.batch * self.seq

    @property
    def tensor_processes(self) -> int:
        """Over how many ranks each layer is sharded."""
        return {"tp": self.processes, "sp": self.processes, "tp+fsdp": 2}.get(self.parallel, 1)

    @property
    def data_processes(self) -> int:
        """How many times there is the whole model, or shards of it, each for some of the sequences."""
        return self.processes // self.tensor_processes

    def check(self) -> None:
        """Raise ExampleError for a value that no run can have, naming the option and the remedy."""
        for name in ("layers", "width", "seq", "batch", "steps", "validation_batches"):
            value = getattr(self, name)
            if value < 1:
                raise ExampleError(f"--{name.replace('_', '-')} must be at least 1; got {value}")
        if self.moe < 0 or self.moe == 1:
            raise ExampleError(f"--moe must be 0 or at least 2, the experts that a token takes; got {self.moe}")
        self.check_processes()
        if self.lr <= 0:
            raise ExampleError(f"--lr must be positive; got {self.lr}")
        if self.width % (2 * self.heads):
            rule = f"--width must divide into {self.heads} heads of an even number of channels"
            raise ExampleError(f"{rule}; got {self.width}, use a multiple of 64")

    def check_processes(self) -> None:
        if self.processes < 1:
            raise ExampleError(f"--processes must be at least 1; got {self.processes}")
        if self.processes > 1 and self.device != "cpu":
            raise ExampleError(
                f"--processes {self.processes} share the CPU; got --device {self.device}, leave it out or train with "
                "one process"
            )
        if (self.processes > 1) != (self.parallel in PARALLEL):
            raise ExampleError(
                f"--parallel {' or '.join(PARALLEL)} says how --processes 2 or more share the work; got "
                f"--processes {self.processes} and --parallel {self.parallel or 'nothing'}"
            )
        if self.parallel == "tp+fsdp" and (self.processes < 4 or self.processes % 2):
            raise ExampleError(
                f"--parallel tp+fsdp shards layers over two ranks, so --processes must be 4, 6, ...; got "
                f"{self.processes}"
            )
        shares = self.processes if self.parallel == "sp" else self.data_processes
        if self.batch % shares:
            raise ExampleError(f"--batch must be a multiple of the {shares} processes that share it; got {self.batch}")
        size = self.tensor_processes
        if self.heads % size:
            raise ExampleError(
                f"--parallel {self.parallel} gives each process as many heads of 64 channels, and --width {self.width} "
                f"makes {self.heads} for {size} processes; use a multiple of {64 * size}"
            )
        if size > 1 and self.moe:
            raise ExampleError(f"--moe does not go with --parallel {self.parallel}; use --parallel ep or fsdp")
        if self.parallel == "ep" and (not self.moe or self.moe % self.processes):
            raise ExampleError(
                f"--parallel ep gives each process as many experts, and --moe {self.moe} are no multiple of "
                f"{self.processes} processes; use --moe {4 * self.processes}"
            )


@dataclasses.dataclass(frozen=True)
class Session:
    """How this call of the program behaves; nothing here changes a number that a run computes."""

    out: Path
    resume: bool
    checkpoint_every: int
    stop_after: int | None
    rank: int | None = None  #: of several processes, each of which has checkpoints of its own

    def check(self) -> None:
        """Raise ExampleError for a value that makes no sense, naming the option."""
        if self.checkpoint_every < 1:
            raise ExampleError(f"--checkpoint-every must be at least 1; got {self.checkpoint_every}")
        if self.stop_after is not None and self.stop_after < 1:
            raise ExampleError(f"--stop-after must be at least 1; got {self.stop_after}")

    def checkpoint(self, recipe: str) -> Path:
        """Where the checkpoint of one recipe lies."""
        return self.out / f"{recipe}{'' if self.rank is None else f'.rank{self.rank}'}.pt"
