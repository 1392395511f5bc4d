"""Training on several ranks of torch.distributed: which shard of the model and of a batch each of them has.

    tp      tensor parallelism: each rank has some of the heads and of the inner features, and all tokens
    sp      the same, and outside of sharded layers each rank has some of the sequences
    fsdp    each rank has some of the sequences, and a shard of every parameter, which is gathered when it is used
    tp+fsdp both: tp in pairs of ranks, and fsdp in groups that have one rank of each pair
    ep      each rank has some of the sequences and some of the experts, to which all ranks send their tokens

`torchrun` starts a process for each rank. The losses are those of one process, apart from the order of sums.
"""

import os
import sys
from collections.abc import Callable

import torch
from model import Gpt, make_loss
from settings import Settings
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

import quire
from quire.distributed import ExpertParallel, Parallel


def launched() -> bool:
    """Whether torchrun has started this process."""
    return "RANK" in os.environ


def rank() -> int:
    return int(os.environ.get("RANK", 0))


def launch(program: str, arguments: list[str], processes: int) -> int:
    """Runs the program in this number of processes, which share the CPU's cores. Returns the exit status."""
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // processes)))
    try:
        run.main(["--standalone", "--nproc-per-node", str(processes), program, *arguments])
    except ChildFailedError:
        return 1
    return 0


def begin() -> None:
    """Joins the process group, before the first run."""
    if launched():
        distributed.init_process_group("gloo")


def end(status: int = 0) -> None:
    """Ends each of several processes by os._exit(status), without the shutdown of Python. Functional collectives of
    PyTorch 2.13 keep threads of gloo alive, and a thread that still runs during the shutdown can abort the process."""
    if distributed.is_initialized():
        distributed.destroy_process_group()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


class Sharding:
    """How the model and the batches of a run are sharded over ranks; with one rank, not at all."""

    def __init__(self, settings: Settings) -> None:
        self.settings, self.size = settings, settings.processes
        self.tensor, self.sequence = settings.tensor_processes > 1, settings.parallel == "sp"
        self.sharded, self.experts = settings.parallel.endswith("fsdp"), settings.parallel == "ep"
        if self.size > 1:
            sizes = (settings.data_processes, settings.tensor_processes)
            self.mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "tp"))

    def make_model(self) -> Gpt:
        """The whole model of the seed, or this rank's shard of it."""
        torch.manual_seed(self.settings.seed)
        model = Gpt(self.settings)
        if self.tensor:
            model = self.sharded_by_tensor(model)
        if self.sharded:
            for block in model.blocks:  # the hooks that gather parameters are no part of a graph
                block.compile(fullgraph=True, dynamic=False, backend=self.settings.backend)
                fully_shard(block, mesh=self.mesh["dp"])
            fully_shard(model, mesh=self.mesh["dp"])
        if self.experts:
            parallelize_module(model, self.mesh["dp"], {"blocks.*.mlp": ExpertParallel()})
        return model

    @torch.no_grad()
    def sharded_by_tensor(self, whole: Gpt) -> Gpt:
        """This rank's heads and inner features of the whole model."""
        group = self.mesh["tp"].get_group()
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
        """make_loss(), compiled as one graph. With fsdp, hooks gather parameters, and each block is a graph."""
        loss = make_loss(model, recipe, self.settings.dtype)
        if self.sharded:
            return loss
        return torch.compile(loss, fullgraph=True, dynamic=False, backend=self.settings.backend)

    def own(self, batch: tuple[torch.Tensor, torch.Tensor]) -> list[torch.Tensor]:
        """This rank's sequences of inputs and targets [batch, seq]."""
        if self.shards_batches:
            name = "tp" if self.sequence else "dp"
            return [t.chunk(self.mesh[name].size())[self.mesh.get_local_rank(name)].contiguous() for t in batch]
        return list(batch)

    def backward(self, loss: torch.Tensor, model: Gpt) -> None:
        """Computes the gradients of the mean loss of all sequences. fully_shard computes means. quire's layers sum the
        gradients of what is sharded. Gradients of this rank's sequences alone are summed here."""
        sums = self.sequence or self.experts
        (loss / self.size if sums else loss).backward()
        for parameter in self.whole_parameters(model) if sums else ():
            distributed.all_reduce(parameter.grad)

    def clip_gradients(self, model: Gpt, limit: float) -> torch.Tensor:
        """Scales all gradients so that their norm, that of the whole model, is at most `limit`. Returns the norm."""
        parameters = list(model.parameters())
        if not (self.tensor or self.experts):
            return whole(nn.utils.clip_grad_norm_(parameters, limit))
        everywhere = {id(parameter) for parameter in self.whole_parameters(model) + self.row_biases(model)}
        of_shards = squared_norm([p for p in parameters if id(p) not in everywhere])
        distributed.all_reduce(of_shards, group=self.mesh["tp" if self.tensor else "dp"].get_group())
        norm = (of_shards + squared_norm([p for p in parameters if id(p) in everywhere])).sqrt()
        factor = (limit / (norm + 1e-6)).clamp(max=1)
        for parameter in parameters:
            local(parameter.grad).mul_(factor)
        return norm

    def mean(self, loss: torch.Tensor) -> torch.Tensor:
        """The mean loss of all ranks."""
        loss = loss.detach().clone()
        if self.shards_batches:
            distributed.all_reduce(loss)
            loss /= self.size
        return loss

    @property
    def shards_batches(self) -> bool:
        """Whether a rank has only some of the sequences."""
        return self.sequence or self.sharded or self.experts

    def whole_parameters(self, model: Gpt) -> list[nn.Parameter]:
        """The parameters of modules that every rank has whole."""
        experts = (quire.GroupedLinear,) if self.experts else ()
        whole = [module for module in model.modules() if not isinstance(module, experts)]
        modules = [module for module in whole if getattr(module, "parallel", None) is None]
        return [parameter for module in modules for parameter in module.parameters(recurse=False)]

    def row_biases(self, model: Gpt) -> list[nn.Parameter]:
        """The only parameters of sharded layers that every rank has whole."""
        sharded = [module for module in model.modules() if getattr(module, "parallel", None) is not None]
        return [module.bias for module in sharded if module.parallel.mode == "row"]


def squared_norm(parameters: list[nn.Parameter]) -> torch.Tensor:
    """Of the gradients of the parameters."""
    return whole(nn.utils.get_total_norm([parameter.grad for parameter in parameters])) ** 2


def whole(t: torch.Tensor) -> torch.Tensor:
    return t.full_tensor() if isinstance(t, DTensor) else t


def local(t: torch.Tensor) -> torch.Tensor:
    return t.to_local() if isinstance(t, DTensor) else t
