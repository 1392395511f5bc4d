"""Training steps on one rank and on two: PyTorch's tensor, sequence and data parallelism beside quire's, in turns.

The model is a stack of residual blocks: LayerNorm, a Linear four times as wide, GELU, a Linear back. Every contender
takes the same step of it (forward, backward, fused AdamW) with the same tokens, sharded over its ranks. Parameters and
activations have one dtype; under a recipe it is bfloat16. Each rank has one thread, and ranks communicate by gloo.
Contenders take turns, those of one rank too, and the best step of each counts.

    tp      the features of layers are sharded; every rank has all tokens
    sp      the same, and outside of the layers each rank has some of the tokens
    ring    the same, and tokens are exchanged in pieces (overlap="ring")
    fsdp    each rank has some of the tokens, and a shard of every parameter (fully_shard), gathered when it is used
    codes   the same, and codes of weights are gathered (quire.distributed.gather_codes)

Efficiency is the speed of two ranks, divided by twice that of one rank with the same formats. Sent bytes are those of
the collectives of one step, each around a ring of all ranks.

"x better" compares with the better one of PyTorch's float32 and bfloat16 on as many ranks, sharded in the same way.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import machine
import quire
from clock import best_seconds
from contenders import RECIPES

sys.path.insert(0, str(Path(__file__).parents[1] / "examples/train"))

from meter import wire_bytes  # noqa: E402
from processes import end, launch, launched, rank  # noqa: E402

PROCESSES = 2
#: That a process waits for another, past which all of them end.
PATIENCE = timedelta(minutes=5)
#: The least efficiency of a recipe with tp, relative to that of PyTorch's quicker one.
TARGET = 0.9


@dataclass(frozen=True)
class Numbers:
    """dtype: of parameters and activations. recipe: of matmuls, or None for PyTorch's layers."""

    dtype: torch.dtype
    recipe: quire.recipe.Recipe | None = None


PEERS = {"torch float32": Numbers(torch.float32), "torch bfloat16": Numbers(torch.bfloat16)}
NUMBERS = PEERS | {
    f"quire {name}": Numbers(torch.bfloat16, RECIPES[name]) for name in ("fp8_current", "mxfp8", "nvfp4")
}


class Block(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(size)
        self.up, self.down = nn.Linear(size, 4 * size), nn.Linear(4 * size, size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x)), approximate="tanh"))


def styles(numbers: Numbers, sequence: bool, overlap: str | None) -> dict[str, ParallelStyle]:
    quires = (quire.distributed.ColumnParallel, quire.distributed.RowParallel)
    column, row = (ColwiseParallel, RowwiseParallel) if numbers.recipe is None else quires
    if not sequence:
        return {"up": column(), "down": row()}
    norm = SequenceParallel(sequence_dim=0, use_local_output=True)
    pieces = {} if overlap is None else {"overlap": overlap}  # PyTorch's styles have no such option
    column, row = column(input_layouts=Shard(0), **pieces), row(output_layouts=Shard(0), **pieces)
    return {"norm": norm, "up": column, "down": row}


def shard_features(
    model: nn.Sequential, numbers: Numbers, mesh: DeviceMesh, sequence: bool = False, overlap: str | None = None
) -> None:
    for block in model:
        parallelize_module(block, mesh, styles(numbers, sequence, overlap))


def shard_features_and_tokens(model: nn.Sequential, numbers: Numbers, mesh: DeviceMesh) -> None:
    shard_features(model, numbers, mesh, sequence=True)


def exchange_in_pieces(model: nn.Sequential, numbers: Numbers, mesh: DeviceMesh) -> None:
    shard_features(model, numbers, mesh, sequence=True, overlap="ring")


def shard(model: nn.Sequential, numbers: Numbers, mesh: DeviceMesh) -> None:
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def shard_codes(model: nn.Sequential, numbers: Numbers, mesh: DeviceMesh) -> None:
    quire.distributed.gather_codes(model, numbers.recipe)
    shard(model, numbers, mesh)


@dataclass(frozen=True)
class Sharding:
    """A way to shard a training. apply(model, numbers, mesh): shards a model, which has quire's layers if there is a
    recipe. own_tokens: each rank has its own tokens. peer: the way of PyTorch to compare with, if PyTorch does not have
    this way.
    """

    apply: Callable[[nn.Sequential, Numbers, DeviceMesh], None]
    own_tokens: bool
    peer: str = ""


#: A new way to shard is a row here.
SHARDINGS = {
    "tp": Sharding(shard_features, own_tokens=False),
    "sp": Sharding(shard_features_and_tokens, own_tokens=True),
    "sp, ring": Sharding(exchange_in_pieces, own_tokens=True, peer="sp"),
    "fsdp": Sharding(shard, own_tokens=True),
    "fsdp, codes": Sharding(shard_codes, own_tokens=True, peer="fsdp"),
}


class Training:
    """Steps of one contender. sharding: None for one rank."""

    def __init__(self, numbers: Numbers, sharding: Sharding | None, options: argparse.Namespace) -> None:
        torch.manual_seed(0)
        self.numbers = numbers
        self.model = nn.Sequential(*(Block(options.size) for _ in range(options.blocks))).to(numbers.dtype)
        x = torch.randn(options.tokens, options.size, dtype=numbers.dtype)
        if numbers.recipe is not None:
            quire.convert(self.model, min_features=0)
        if options.compile:
            for block in self.model:
                block.compile(fullgraph=True, dynamic=False)  # hooks that gather parameters are no part of a graph
        if sharding is not None:
            sharding.apply(self.model, numbers, init_device_mesh("cpu", (PROCESSES,), mesh_dim_names=("all",)))
        self.x = x.chunk(PROCESSES)[rank()] if sharding is not None and sharding.own_tokens else x
        kinds: dict[type, list[nn.Parameter]] = {}  # the fused step takes no DTensors beside plain ones
        for parameter in self.model.parameters():
            kinds.setdefault(type(parameter.data), []).append(parameter)
        groups = [{"params": parameters} for parameters in kinds.values()]
        self.optimizer = torch.optim.AdamW(groups, lr=1e-4, fused=True)

    def step(self) -> None:
        recipe = self.numbers.recipe
        with quire.autocast(enabled=recipe is not None, recipe=recipe):
            y = self.model(self.x)
        y.float().square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


class Together:
    """Steps of contenders of several processes, which all of them take when rank 0 does."""

    def __init__(self, trainings: dict[tuple[str, str], Training]) -> None:
        self.trainings = list(trainings.values())
        self.calls = {name: lambda i=i: self.lead(i) for i, name in enumerate(trainings)}

    def lead(self, index: int) -> None:
        distributed.broadcast(torch.tensor(index), 0)
        if index >= 0:
            self.trainings[index].step()
            distributed.barrier()

    def follow(self) -> None:
        """In ranks other than 0, until lead(-1)."""
        index = torch.tensor(0)
        while True:
            distributed.broadcast(index, 0)
            if index < 0:
                return
            self.trainings[index].step()
            distributed.barrier()


def rows(best: dict[tuple[str, str], float], sent: dict[tuple[str, str], int], tokens: int) -> list[dict]:
    """best: (sharding, or "" for one process; numbers) -> seconds of a step."""
    found = []
    for (sharding, numbers), took in best.items():
        peer = sharding and (SHARDINGS[sharding].peer or sharding)
        row = {"sharding": sharding, "numbers": numbers, "tokens_per_second": tokens / took}
        row["x_better"] = min(best[peer, name] for name in PEERS) / took
        row["efficiency"] = best["", numbers] / took / PROCESSES if sharding else None
        row["sent_bytes"] = sent[sharding, numbers] if sharding else 0
        found.append(row)
    return found


def show(found: list[dict]) -> None:
    print(f"{'processes':<16}{'numbers':<20}{'tokens/s':>10}{'x better':>10}{'efficiency':>12}{'MB sent':>10}")
    for row in found:
        processes = f"{PROCESSES}, {row['sharding']}" if row["sharding"] else "1"
        efficiency = "" if row["efficiency"] is None else f"{row['efficiency']:.2f}"
        line = f"{processes:<16}{row['numbers']:<20}{row['tokens_per_second']:>10.0f}{row['x_better']:>10.2f}"
        print(f"{line}{efficiency:>12}{row['sent_bytes'] / 1e6:>10.2f}")
    tp = {row["numbers"]: row for row in found if row["sharding"] == "tp"}
    peer = max((tp[name] for name in PEERS), key=lambda row: row["tokens_per_second"])
    ratios = (f"{name} {tp[name]['efficiency'] / peer['efficiency']:.2f}" for name in tp if name not in PEERS)
    print(f"\nefficiency with tp over that of {peer['numbers']}: {', '.join(ratios)}   target {TARGET}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="./dev bench distributed", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", type=int, default=1024, help="features outside of a block; four times inside [1024]")
    parser.add_argument("--tokens", type=int, default=512, help="in a step, of all processes together [512]")
    parser.add_argument("--blocks", type=int, default=2)
    parser.add_argument("--compile", action="store_true", help="torch.compile for each block")
    parser.add_argument("--seconds", type=float, default=180, help="in all, compiling aside [180]")
    parser.add_argument("--out", type=Path, default=Path("build/bench"))
    return parser.parse_args()


def main() -> None:
    options = parse()
    if not launched():
        os.environ["OMP_NUM_THREADS"] = "1"
        sys.exit(launch(__file__, sys.argv[1:], PROCESSES))
    torch.set_num_threads(1)
    torch._dynamo.config.recompile_limit = 2 * len(NUMBERS) * (1 + len(SHARDINGS))  # one Block, many contenders
    distributed.init_process_group("gloo", timeout=PATIENCE)
    sharded = {
        (name, numbers): Training(NUMBERS[numbers], sharding, options)
        for name, sharding in SHARDINGS.items()
        for numbers in NUMBERS
        if not (sharding.peer and numbers in PEERS)
    }
    sent = {}
    for name, training in sharded.items():
        training.step()  # compiles
        with torch.compiler.set_stance("force_eager"):
            sent[name] = wire_bytes(training.step)
    together = Together(sharded)
    if rank():
        together.follow()
    else:
        options.out.mkdir(parents=True, exist_ok=True)
        print(machine.describe())
        alone = {("", name): Training(numbers, None, options) for name, numbers in NUMBERS.items()}
        for training in alone.values():
            training.step()  # compiles
        calls = {name: training.step for name, training in alone.items()} | together.calls
        best = best_seconds(calls, options.seconds, most=10000)
        together.lead(-1)
        found = rows(best, sent, options.tokens)
        show(found)
        record = {"machine": machine.describe(), "options": vars(options) | {"out": str(options.out)}, "rows": found}
        (options.out / "distributed.json").write_text(json.dumps(record, indent=1))
        print(f"\nwritten to {options.out}: distributed.json")
    end()


if __name__ == "__main__":
    main()
