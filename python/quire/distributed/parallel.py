"""How the weight of a layer is sharded over the ranks of a group."""

import dataclasses
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import distributed

from quire.checks import check_type, describe
from quire.distributed import check_ranks
from quire.distributed.check_ranks import Fields
from quire.distributed.groups import broadcast, name_of, named_group, the_group
from quire.distributed.pieces import PiecesOfTensor
from quire.loading.devices import HOST, with_values
from quire.tensor.spec import check_parallel

MODES = ("column", "row")


@dataclass(frozen=True)
class Parallel:
    """How the weight [out_features, in_features] of a layer is sharded over the ranks of a group.

    A quantized operand has the same codes and scales as in one process: amaxes are reduced over the group, and each
    element uses the random bits of its place in the whole tensor.

    Args:
        mode: "column" shards the outputs. A rank has weight [out_features / size, in_features], bias [out_features /
            size] and y `[*, out_features / size]`. The gradient of x is summed over the group. "row" shards the inputs.
            A rank has weight [out_features, in_features / size], x `[*, in_features / size]` and the whole bias
            [out_features]. y is summed over the group; then bias is added.
        group: a process group or its name (quire.distributed.name_group). A group without a name gets one: quire:tp,
            and quire:tp1, ... for further groups, in the order in which they are first used. This order must be the
            same on all ranks. None: the layer is made for `size` ranks, and set_tensor_parallel_group() must give it a
            group before it is called.
        sequence: True shards the tokens along the first dimension, in x of a "column" layer and in y of a "row" layer.
            The layer gathers codes of x and of the gradient of y. It reduces and scatters y and the gradient of x. All
            ranks must have the same number of tokens.
        size: the number of ranks. With a group it follows from the group.
        parts: for "column", if the weight consists of several matrices: the outputs of each, such as (1024, 256, 256)
            for q, k and v. Each matrix is sharded by itself. Each number must be a multiple of size.
        reduce: how y of a "row" layer and the gradient of x of a "column" layer are summed over ranks. "": by the
            collective, in the dtype of the result. "float32": in float32, in the order of ranks, rounded once, so that
            every backend gives the same bits. A spec such as "mxfp8": the same, but ranks send codes of their results.
            Without a recipe, the results of ranks have the dtype of x before they are added.
        reduce_gradients: with sequence=True, whether the layer sums the gradients of its whole parameters (a norm, the
            bias of a "row" layer) over the group. False is for frameworks that sum them, such as Megatron. Each rank
            then has the gradients of its own tokens.
        overlap: with sequence=True, "ring" cuts each exchange into as many pieces as there are ranks. One piece travels
            while another one is multiplied (docs/distributed-reference.md). None: each exchange is one collective.

    Raises:
        TypeError: for a value of another type.
        ValueError: for another mode, for an unknown name, for a size that is not that of the group, for parts that are
            not multiples of size, for a reduce that is no such spec, and for overlap="ring" without sequence=True.
    """

    mode: str
    group: "distributed.ProcessGroup | str | None"
    sequence: bool = False
    size: int = 0
    parts: tuple[int, ...] = ()
    reduce: str = ""
    reduce_gradients: bool = True
    overlap: str | None = None
    #: What operators are given; the same on every rank.
    text: str = field(init=False, default="", repr=False)
    _other: "Parallel | None" = field(init=False, default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_type("Parallel", bool, sequence=self.sequence, reduce_gradients=self.reduce_gradients)
        check_type("Parallel", int, size=self.size)
        check_reduce("Parallel", self.reduce)
        if self.mode not in MODES:
            raise ValueError(f"Parallel: mode must be 'column' or 'row', got {self.mode!r}")
        _check_parts(self.parts, self.mode)
        _check_overlap(self.overlap, self.sequence)
        name = (self.group or "") if isinstance(self.group, str | None) else name_of(self.group)
        group = named_group(name) if name else None
        if self.size < 0 or not (name or self.size):
            raise ValueError(
                f"Parallel: size must be the number of ranks, and may be left out if there is a group; got {self.size} "
                f"{'with' if name else 'without'} one; pass a group, or the number of its ranks as size="
            )
        if group is None and not self.size:
            raise ValueError(
                f"Parallel: no process group is named {name!r}; pass the group, or name it with "
                "quire.distributed.name_group(group, name) first"
            )
        size = self.size or group.size()
        if group is not None and size != group.size():
            raise ValueError(f"Parallel: the group {name!r} has {group.size()} ranks, got size={size}")
        if any(part % size for part in self.parts):
            raise ValueError(
                f"Parallel: each of the parts {self.parts} of the outputs must be a multiple of the {size} ranks of "
                f"{name!r}; choose other sizes or another group"
            )
        text = f"{self.mode},group={name},size={size}"
        options = (f",reduce={self.reduce}" if self.reduce else "") + ",own_gradients" * (not self.reduce_gradients)
        self._set(group=name, size=size, parts=tuple(self.parts), text=text + options)
        # Made here, because compiled functions cannot make one.
        other = object.__new__(Parallel)
        fields = {one.name: getattr(self, one.name) for one in dataclasses.fields(self)}
        other._set(**fields | {"sequence": not self.sequence, "_other": self})
        self._set(_other=other)
        with_tokens = self if self.sequence else other
        ring = "" if self.overlap is None else f",overlap={self.overlap}"
        with_tokens._set(text=f"{text},sequence{ring}{options}")
        if check_ranks.enabled():
            check_ranks.run_eagerly()

    def _set(self, **values: object) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def for_tokens(self, sequence: bool | None) -> "Parallel":
        """This Parallel with another value of `sequence`. None: this Parallel itself."""
        return self if sequence is None or sequence is self.sequence else self._other

    def index(self) -> int:
        """Which part this rank has, 0 to size - 1; 0 before there is a group. Raises RuntimeError if no group has
        the name now."""
        return distributed.get_rank(self._group()) if self.group else 0

    def of_group(self, group: "distributed.ProcessGroup") -> "Parallel":
        """This Parallel with another group. Raises ValueError if the group has another number of ranks."""
        return dataclasses.replace(self, group=group)

    def first_rank(self) -> int:
        """The rank in the default group of the rank that has part 0."""
        return distributed.get_global_rank(self._group(), 0)

    def part_of(self, t: torch.Tensor, bias: bool = False) -> torch.Tensor:
        """The part of a whole weight [out_features, in_features], or of a bias, that this rank has."""
        if self.mode == "row":
            return t if bias else t.chunk(self.size, 1)[self.index()]
        return torch.cat([part.chunk(self.size)[self.index()] for part in t.split(self.parts or len(t))])

    def pieces(self, t: torch.Tensor) -> PiecesOfTensor:
        """The whole tensor of which t, a weight, a stack of weights or a sharded bias, is this rank's shard, or a
        DTensor of that part. It shares t's memory."""
        self.check_group()  # without one the place is not known
        along = max(0, t.dim() - 2) if self.mode == "column" else t.dim() - 1
        sizes = [part // self.size for part in self.parts] or [t.shape[along]]
        ends = itertools.accumulate(sizes)
        places = [
            ((end - size) * self.size + self.index() * size, end - size, size)
            for size, end in zip(sizes, ends, strict=True)
        ]
        return PiecesOfTensor.of(t, along, places, t.shape[along] * self.size)

    def of_parts(self, *parts: int) -> "Parallel":
        """This Parallel with these parts. Raises ValueError if it has other parts, and if they are not multiples of
        size."""
        if self.parts not in ((), parts):
            raise ValueError(f"Parallel: the outputs of this layer are the parts {parts}, got parts={self.parts}")
        return dataclasses.replace(self, parts=parts)

    def of_one_part(self) -> "Parallel":
        """This Parallel without parts."""
        return dataclasses.replace(self, parts=())

    def then(self) -> "Parallel":
        """How a layer is sharded whose inputs are the outputs of a "column" layer."""
        return dataclasses.replace(self, mode="row", parts=())

    def sizes(self, what: str, in_features: int, out_features: int) -> tuple[int, int]:
        """in_features and out_features of one process. Raises ValueError if they are not multiples of size, or parts
        are not those of out_features."""
        if self.parts and sum(self.parts) != out_features:
            raise ValueError(f"{what}: parallel.parts must make up out_features={out_features}, got {self.parts}")
        whole = out_features if self.mode == "column" else in_features
        name = "out_features" if self.mode == "column" else "in_features"
        if whole % self.size:
            raise ValueError(
                f"{what}: {name}={whole} must be a multiple of the {self.size} ranks of {self.group!r}; choose "
                "another size or another group"
            )
        part = whole // self.size
        return (in_features, part) if self.mode == "column" else (part, out_features)

    def place(self, device: torch.device = HOST) -> torch.Tensor:
        """int64 {index, size, cuts}: which part of a gradient this rank rounds stochastically (numerics.md 0.11).
        cuts: where all but the last of this rank's pieces of `parts` end. device: that of the layer, which may be the
        meta device."""
        cuts = itertools.accumulate(part // self.size for part in self.parts[:-1])
        return torch.tensor([self.index(), self.size, *cuts], dtype=torch.int64, device=with_values(device))

    def share_first(self, state: torch.Tensor) -> None:
        """Overwrites a tensor, of every rank of the group, by that of the rank with part 0."""
        if not state.is_meta:
            broadcast(state, 0, self._group())

    def caller(self, layer: str) -> str:
        """Who calls a collective, for errors. layer: its class and its path."""
        return f"{layer}, {self.mode}, rank {self.index()} of {self.size}"

    def check_ranks(self, caller: str, fields: Fields) -> None:
        """check_ranks() of the group's ranks."""
        check_ranks.check_ranks(caller, fields, self._group())

    def agree(
        self,
        module: torch.nn.Module,
        part: str,
        operands: tuple[torch.Tensor, torch.Tensor, str],
        said: Callable[[], tuple[str, Fields]],
    ) -> None:
        """agree() of the group's ranks about a matmul of x, weight and recipe: about the number of tokens as soon as it
        changes in the group, about the rest as soon as it changes in the layer."""
        (x, weight, recipe), group = operands, self._group()
        sizes = (x.dtype, x.shape[-1], weight.dtype, weight.shape, recipe, self.text)
        check_ranks.agree(module, part, sizes, said, group, device=x.device)
        # Of all ranks, which a column and a row layer have in common.
        tokens = x.shape[:-1].numel() * (self.size if self.sequence and self.mode == "column" else 1)
        check_ranks.agree(group, "tokens", (tokens,), said, group, device=x.device)

    def reduced(self, amax: torch.Tensor) -> torch.Tensor:
        """The largest of each amax over the group."""
        largest = torch.ops._c10d_functional.all_reduce(amax, "max", self.group)
        return torch.ops._c10d_functional.wait_tensor(largest)

    def check_group(self) -> None:
        """Raises RuntimeError if the group is not there."""
        self._group()

    def _group(self) -> "distributed.ProcessGroup":
        if not self.group:
            raise RuntimeError(
                f"quire: a layer was made for {self.size} ranks without their group; call "
                "set_tensor_parallel_group(group) on it in all of them"
            )
        return the_group(self.group)


def check_reduce(what: str, reduce: str) -> None:
    """Raises TypeError or ValueError for a Parallel.reduce that is not available. what: who takes it."""
    check_type(what, str, reduce=reduce)
    if not reduce:
        return
    rule = f"{what}: reduce must be '', 'float32' or a spec such as 'mxfp8', got {reduce!r}"
    check_parallel(rule, f"row,group=any,size=1,reduce={reduce}")
    if "," in reduce:  # the text of another option followed it
        raise ValueError(f"{rule}: a spec has no comma; pass other options to Parallel by their names")
    if "given" in reduce.split(":"):
        raise ValueError(f"{rule}: nobody gives the scale of a sum; remove 'given'")


def _check_parts(parts: tuple[int, ...], mode: str) -> None:
    if not isinstance(parts, tuple | list) or not all(isinstance(part, int) for part in parts):
        raise TypeError(f"Parallel: parts must be a tuple of ints, such as (1024, 256); got {describe(parts)}")
    if any(part < 0 for part in parts):
        raise ValueError(f"Parallel: parts must not be negative, got {parts}; pass the outputs of each matrix")
    if parts and mode == "row":
        raise ValueError(f"Parallel: parts are of the outputs, which mode 'row' does not shard; got {parts}")


def _check_overlap(overlap: str | None, sequence: bool) -> None:
    if overlap not in (None, "ring"):
        raise ValueError(f"Parallel: overlap must be None or 'ring', got {overlap!r}")
    if overlap is not None and not sequence:
        raise ValueError(
            "Parallel: overlap='ring' exchanges tokens in pieces, and goes with sequence=True, where each rank has "
            "some of them; leave overlap out, or shard the tokens"
        )


def sharded_dims(mode: str) -> dict[str, int | None]:
    """Parameter of a Linear -> the dimension along which it is sharded; None: not at all."""
    return {"weight": 0, "bias": 0} if mode == "column" else {"weight": 1, "bias": None}


def refuse_quantized(what: str, how: str) -> None:
    """Raises NotImplementedError for a weight that is stored quantized. how: how it is sharded."""
    raise NotImplementedError(
        f"{what}, {how}: a weight that is sharded over ranks must be a plain parameter, because its scales may "
        "follow from all parts; make the layer outside of quire.quantized_model_init, or keep codes with "
        "quire.quantize_weights"
    )
