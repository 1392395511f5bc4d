"""Training over several processes of torch.distributed: which part of the model and of a batch each of them has.

    tp      tensor parallel: each process has some of the heads and of the inner features, and all tokens
    sp      the same, and outside of divided layers each process has some of the sequences
    fsdp    each process has some of the sequences, and a part of every parameter, which is gathered when it is used
    ep      each process has some of the sequences and some of the experts, to which all processes send their tokens

`torchrun` starts the processes. They must come to the same losses as one process, but for the order of sums.
"""

import os
from collections.abc import Callable

import torch
from model import Gpt, make_loss
from settings import Settings
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module

import quire
from quire.distributed import ExpertParallel, Parallel


def launched() -> bool:
    """Whether torchrun has started this process."""
    return "RANK" in os.environ


def rank() -> int:
    return int(os.environ.get("RANK", 0))


def launch(program: str, arguments: list[str], processes: int) -> int:
    """Runs the program in so many processes, which share the CPU's cores. Returns the exit status."""
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // processes)))
    try:
        run.main(["--standalone", "--nproc-per-node", str(processes), program, *arguments])
    except ChildFailedError:
        return 1
    return 0


def begin() -> None:
    """In each of several processes, before the first run."""
    if launched():
        distributed.init_process_group("gloo")


def end() -> None:
    if distributed.is_initialized():
        distributed.destroy_process_group()


class Division:
    """How the model and the batches of a run are divided; of one process, not at all."""

    def __init__(self, settings: Settings) -> None:
        self.settings, self.size = settings, settings.processes
        self.tensor, self.sequence = settings.parallel in ("tp", "sp"), settings.parallel == "sp"
        self.sharded, self.experts = settings.parallel == "fsdp", settings.parallel == "ep"

    def make_model(self) -> Gpt:
        """The whole model of the seed, or this process's part of it."""
        torch.manual_seed(self.settings.seed)
        whole = Gpt(self.settings)
        if self.sharded:
            for block in whole.blocks:
                block.compile(fullgraph=True, dynamic=False)  # the hooks that gather parameters are no part of a graph
                fully_shard(block)
            fully_shard(whole)
        if self.experts:
            mesh = init_device_mesh("cpu", (self.size,))
            parallelize_module(whole, mesh, {"blocks.*.mlp": ExpertParallel()})
        return self.divided(whole) if self.tensor else whole

    @torch.no_grad()
    def divided(self, whole: Gpt) -> Gpt:
        group = distributed.group.WORLD
        column, row = (Parallel(mode, group, self.sequence) for mode in ("column", "row"))
        torch.manual_seed(self.settings.seed)  # for the streams of stochastic rounding
        model = Gpt(self.settings, column, row)
        for name, module in model.named_modules():
            parallel = getattr(module, "parallel", None)
            for key, own in module.named_parameters(recurse=False):
                value = whole.get_submodule(name).get_parameter(key)
                own.copy_(value if parallel is None else parallel.part_of(value, bias=key == "bias"))
        return model

    def compiled(self, model: Gpt, recipe: object | None) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
        """make_loss(), compiled as one graph; where parameters are gathered by hooks, of graphs for each block."""
        loss = make_loss(model, recipe, self.settings.dtype)
        return loss if self.sharded else torch.compile(loss, fullgraph=True, dynamic=False)

    def own(self, batch: tuple[torch.Tensor, torch.Tensor]) -> list[torch.Tensor]:
        """This process's sequences of inputs and targets [batch, seq]."""
        if self.divides_batches:
            return [t.chunk(self.size)[rank()].contiguous() for t in batch]
        return list(batch)

    def backward(self, loss: torch.Tensor, model: Gpt) -> None:
        """Complete gradients of the mean loss of all sequences. fully_shard takes means itself, and quire's layers sum
        what is divided; what each process has for its own sequences alone is summed here."""
        sums = self.sequence or self.experts
        (loss / self.size if sums else loss).backward()
        for parameter in self.undivided(model) if sums else ():
            distributed.all_reduce(parameter.grad)

    def clip_gradients(self, model: Gpt, limit: float) -> torch.Tensor:
        """Scales all gradients so that their norm, that of the whole model, is at most `limit`. Returns the norm."""
        parameters = list(model.parameters())
        if not (self.tensor or self.experts):
            norm = nn.utils.clip_grad_norm_(parameters, limit)
            return norm.full_tensor() if self.sharded else norm
        whole = {id(parameter) for parameter in self.undivided(model) + self.row_biases(model)}
        squares = [
            nn.utils.get_total_norm([p.grad for p in parameters if (id(p) in whole) is of]) ** 2 for of in (False, True)
        ]
        distributed.all_reduce(squares[0])
        norm = sum(squares).sqrt()
        nn.utils.clip_grads_with_norm_(parameters, limit, norm)
        return norm

    def mean(self, loss: torch.Tensor) -> torch.Tensor:
        """That of the processes."""
        loss = loss.detach().clone()
        if self.divides_batches:
            distributed.all_reduce(loss)
            loss /= self.size
        return loss

    @property
    def divides_batches(self) -> bool:
        """Whether a process has some of the sequences only."""
        return self.sequence or self.sharded or self.experts

    def undivided(self, model: Gpt) -> list[nn.Parameter]:
        """Those of modules that every process has whole."""
        experts = (quire.GroupedLinear,) if self.experts else ()
        whole = [module for module in model.modules() if not isinstance(module, experts)]
        modules = [module for module in whole if getattr(module, "parallel", None) is None]
        return [parameter for module in modules for parameter in module.parameters(recurse=False)]

    def row_biases(self, model: Gpt) -> list[nn.Parameter]:
        """The only parameters of divided layers that every process has."""
        divided = [module for module in model.modules() if getattr(module, "parallel", None) is not None]
        return [module.bias for module in divided if module.parallel.mode == "row"]
