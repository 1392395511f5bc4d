"""The experts of a mixture sharded over the ranks of a group, and the exchange of rows between them, as values or as
codes."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import distributed

from quire.checks import check_type_or_none
from quire.distributed import check_ranks
from quire.distributed.check_ranks import Fields
from quire.distributed.groups import broadcast, name_of, named_group, the_group
from quire.distributed.pieces import PiecesOfTensor
from quire.functional import chunk_rows, expert_rows, limit_capacity, operand_buffers, permute_rows, unpermute_rows
from quire.loading.deferred import assume_constant_result
from quire.tensor import QuantSpec
from quire.tensor.spec import TILES

#: What happens to a rank's rows that exceed the capacity.
OVERFLOWS = ("raise", "drop")
#: As what rows travel to the ranks of their experts.
DISPATCHES = ("values", "codes")
#: First of the names for groups that nobody has named.
_NAME = "quire:ep"


def check_exchange(what: str, capacity: int | None, overflow: str, dispatch: str, prefix: str = "") -> None:
    """Raises TypeError or ValueError for options of an exchange that there are not. what: who takes them; prefix: how
    it begins their names."""
    check_type_or_none(what, int, **{f"{prefix}capacity": capacity})
    if capacity is not None and capacity < 1:
        raise ValueError(f"{what}: {prefix}capacity must be at least 1, got {capacity}; None is for any number of rows")
    for name, known, given in (("overflow", OVERFLOWS, overflow), ("dispatch", DISPATCHES, dispatch)):
        if given not in known:
            raise ValueError(f"{what}: {prefix}{name} must be {' or '.join(map(repr, known))}, got {given!r}")


@dataclass(frozen=True)
class ExpertGroup:
    """A group of ranks that have equal parts of num_experts experts; the first rank has the first ones.

    name: of the group (quire.distributed.name_group). size: the number of ranks.
    """

    name: str
    size: int
    num_experts: int

    @staticmethod
    def of(what: str, group: "distributed.ProcessGroup | str", num_experts: int) -> "ExpertGroup":
        """Raises ValueError for a name that no group has, and if the ranks cannot have equal parts."""
        name = group if isinstance(group, str) else name_of(group, _NAME)
        known = named_group(name)
        if known is None:
            raise ValueError(
                f"{what}: no process group is named {name!r}; pass the group, or name it with "
                "quire.distributed.name_group(group, name) first"
            )
        if num_experts % known.size():
            raise ValueError(
                f"{what}: the number of experts, {num_experts}, must be a multiple of the {known.size()} ranks of "
                f"{name!r}; choose another number or another group"
            )
        if check_ranks.enabled():
            check_ranks.run_eagerly()
        return ExpertGroup(name, known.size(), num_experts)

    @property
    def each(self) -> int:
        """The number of experts of one process."""
        return self.num_experts // self.size

    def index(self) -> int:
        """Which part this rank has, 0 to size - 1. Raises RuntimeError if no group has the name now."""
        return distributed.get_rank(the_group(self.name))

    def own(self) -> range:
        """The experts of this rank."""
        return range(self.index() * self.each, (self.index() + 1) * self.each)

    def pieces(self, t: torch.Tensor) -> PiecesOfTensor:
        """The tensor of all experts [num_experts, ...] of which t is this rank's shard. It shares t's memory."""
        return PiecesOfTensor.of(t, 0, [(self.index() * self.each, 0, self.each)], self.num_experts)

    def first_rank(self) -> int:
        """The rank in the default group of the rank that has the first experts."""
        return distributed.get_global_rank(the_group(self.name), 0)

    def broadcast(self, t: torch.Tensor, source: int = 0) -> None:
        """Overwrites t, in every rank of the group, by that of one of them."""
        if not t.is_meta:
            broadcast(t, source, the_group(self.name))

    def check_ranks(self, caller: str, fields: Fields) -> None:
        """check_ranks() of the group's ranks."""
        check_ranks.check_ranks(caller, fields, the_group(self.name))

    def agree(
        self,
        module: torch.nn.Module,
        sizes: tuple[object, ...],
        said: Callable[[], tuple[str, Fields]],
        device: torch.device,
    ) -> None:
        """agree() of the group's ranks about a mixture."""
        check_ranks.agree(module, "experts", sizes, said, the_group(self.name), device=device)


class Sender(NamedTuple):
    """Sends rows between the ranks of a group. caller: the layer, for errors of eager calls."""

    group: ExpertGroup
    caller: str

    def start(self, rows: torch.Tensor, receive: list[int], send: list[int]) -> torch.Tensor:
        """Begins to send the first send[0] rows to the first rank, the next send[1] to the second, and so on.
        finish() gives what comes from them: receive[0] rows from the first, and so on. Differentiable."""
        if torch.compiler.is_compiling() and _torch_differentiates():
            return torch.ops._c10d_functional.all_to_all_single(rows, receive, send, self.group.name)
        return _Start.apply(rows, receive, send, self)

    def finish(self, started: torch.Tensor) -> torch.Tensor:
        """The rows of start(), when they are there."""
        if torch.compiler.is_compiling() and _torch_differentiates():
            return torch.ops._c10d_functional.wait_tensor(started)
        return _Finish.apply(started, self)

    def exchange(self, rows: torch.Tensor, receive: list[int], send: list[int]) -> torch.Tensor:
        """start() and finish()."""
        return self.finish(self.start(rows, receive, send))

    def stand_in(self, rows: torch.Tensor, trip: "Trip") -> torch.Tensor:
        """A tensor over one element in place of what trip.by_expert() of rows would be. Its gradient travels back to
        rows. For rows that were sent in another form."""
        if not (rows.requires_grad and torch.is_grad_enabled()):
            return rows.new_empty(1).expand(sum(trip.receive), rows.shape[1])
        return _StandIn.apply(rows, trip.arrived, (trip.receive, trip.send), self)

    @contextlib.contextmanager
    def named(self) -> Iterator[None]:
        """Errors of collectives name the layer."""
        try:
            yield
        except RuntimeError as error:
            text = str(error).partition("\n")[0].partition(". This is typically")[0]
            raise distributed.DistBackendError(
                f"{self.caller}: all_to_all over the {self.group.size} ranks of {self.group.name!r} failed: "
                f"{text}. Another rank ended or hangs, or its call has other shapes or another recipe; run all "
                "ranks with QUIRE_CHECK_RANKS=1 to see which"
            ) from error


# PyTorch 2.13 has gradients of these operators. But an error in its backward pass would not name the layer.
class _Start(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        rows: torch.Tensor,
        receive: list[int],
        send: list[int],
        sender: Sender,
    ) -> torch.Tensor:
        ctx.receive, ctx.send, ctx.sender = receive, send, sender
        return _start(rows, receive, send, sender)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        started = _start(grad.contiguous(), ctx.send, ctx.receive, ctx.sender)
        return _finish(started, ctx.sender), None, None, None


class _Finish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, started: torch.Tensor, sender: Sender) -> torch.Tensor:
        return _finish(started, sender)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return grad, None


class _StandIn(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        rows: torch.Tensor,
        arrived: torch.Tensor,
        sizes: tuple[list[int], list[int]],
        sender: Sender,
    ) -> torch.Tensor:
        ctx.save_for_backward(arrived)
        ctx.sizes, ctx.sender = sizes, sender
        return rows.new_empty(1).expand(sum(sizes[0]), rows.shape[1])

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad, (receive, send) = unpermute_rows(grad, *ctx.saved_tensors), ctx.sizes
        return _finish(_start(grad, send, receive, ctx.sender), ctx.sender), None, None, None


def _start(rows: torch.Tensor, receive: list[int], send: list[int], sender: Sender) -> torch.Tensor:
    if torch.compiler.is_compiling():
        return torch.ops._c10d_functional.all_to_all_single(rows, receive, send, sender.group.name)
    with sender.named():
        return torch.ops._c10d_functional.all_to_all_single(rows, receive, send, sender.group.name)


def _finish(started: torch.Tensor, sender: Sender) -> torch.Tensor:
    if torch.compiler.is_compiling():
        return torch.ops._c10d_functional.wait_tensor(started)
    with sender.named():
        return torch.ops._c10d_functional.wait_tensor(started)


@assume_constant_result
def _torch_differentiates() -> bool:
    """Whether PyTorch's own operators have gradients, as since 2.13. A graph with them can be cached; one with
    functions of Python cannot."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return all(has(f"_c10d_functional::{name}", "Autograd") for name in ("all_to_all_single", "wait_tensor"))


class Trip(NamedTuple):
    """Where the rows of one call go.

    ids int32 [T, k]: as given, -1 for entries that were dropped. row_map int32 [T, k]: the row of each entry among
    those that leave, -1 for none. send, receive: numbers of rows to and from each rank. arrived int32 [received, 1]:
    the place, sorted by expert, of each row that arrives. ends int64 [experts of this rank]: where each expert's
    rows end.
    """

    ids: torch.Tensor
    row_map: torch.Tensor
    send: list[int]
    receive: list[int]
    arrived: torch.Tensor
    ends: torch.Tensor

    def by_expert(self, rows: torch.Tensor) -> torch.Tensor:
        """The rows that arrived, sorted by expert, those of each expert in the order of all ranks' tokens."""
        return permute_rows(rows, self.arrived, sum(self.receive))

    def by_process(self, rows: torch.Tensor) -> torch.Tensor:
        """The inverse."""
        return unpermute_rows(rows, self.arrived)


def plan(
    sender: Sender,
    ids: torch.Tensor,
    capacity: int | None,
    overflow: str,
    agree: Callable[[torch.Tensor], None] = lambda sent: None,
) -> Trip:
    """ids int32 [T, k]: the experts of each token. Sends the numbers of rows.

    capacity: the number of rows that a rank sends to each rank. Rows without an entry are 0, and no size depends
        on values. None: the host reads the numbers of rows, and exactly these are sent.
    overflow: of OVERFLOWS, what becomes of further entries, in the order of tokens: all ranks raise RuntimeError,
        or the entries are dropped.
    agree: is called with the numbers of rows before they are sent.
    """
    group, over = sender.group, None
    if capacity is not None:
        process = torch.div(ids, group.each, rounding_mode="floor")
        within = limit_capacity(process, group.size, capacity)
        over = (within != process).any()
        ids = torch.where(within >= 0, ids, -1)
    row_map, ends = expert_rows(ids, group.num_experts)
    leaving = ends.diff(prepend=ends.new_zeros(1)).view(group.size, group.each)
    agree(leaving)
    one_each = [1] * group.size
    if capacity is None:
        arriving = sender.exchange(leaving, one_each, one_each)
        numbers = _read(torch.cat([leaving.sum(1), arriving.sum(1)]))
        send, receive = numbers[: group.size], numbers[group.size :]
        return Trip(ids, row_map, send, receive, *_sorted(arriving, arriving, sum(receive)))
    if overflow == "raise":  # every rank tells every other one whether it must
        arriving = sender.exchange(torch.cat([leaving, over.expand(group.size, 1)], 1), one_each, one_each)
        arriving, others_over = arriving.split([group.each, 1], 1)
        torch._assert_async(
            others_over.sum() == 0,
            f"quire.MoE: a rank has more than ep_capacity={capacity} rows for one of the {group.size} ranks of "
            f"{group.name!r}; choose a larger ep_capacity, or ep_overflow='drop'",
        )
    else:
        arriving = sender.exchange(leaving, one_each, one_each)
    # The rows for each rank begin at a multiple of the capacity.
    begin = torch.arange(0, group.size * capacity, capacity, dtype=torch.int32, device=ids.device)
    shift = begin - (leaving.sum(1).cumsum(0) - leaving.sum(1)).int()
    of_process = torch.div(ids, group.each, rounding_mode="floor").clamp(min=0).long()
    row_map = torch.where(row_map >= 0, row_map + shift[of_process], -1)
    chunks = torch.cat([arriving, capacity - arriving.sum(1, keepdim=True, dtype=torch.int32)], 1)
    sizes = [capacity] * group.size
    return Trip(ids, row_map, sizes, sizes, *_sorted(chunks, arriving, group.size * capacity))


def _read(numbers: torch.Tensor) -> list[int]:
    """The sizes in a vector, unbacked ones in a graph."""
    if not torch.compiler.is_compiling():
        return numbers.tolist()
    read = [number.item() for number in numbers.unbind()]  # PyTorch caches no graph with tolist()
    for number in read:
        torch._check(number >= 0)
    return read


def _sorted(chunks: torch.Tensor, arriving: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(arrived, ends) of a Trip. chunks [ranks, chunks of each]: sizes, in the order in which rows arrive."""
    order = torch.arange(chunks.numel(), dtype=torch.int64, device=chunks.device).view(chunks.shape).t().flatten()
    arrived = chunk_rows(chunks.flatten(), order, 1, rows)
    return arrived, arriving.sum(0).cumsum(0)


# --- rows that are sent as codes: one row of bytes has the codes and the scales of a row


class Field(NamedTuple):
    """A buffer of a quantized tensor in the bytes of a row."""

    bytes: int
    dtype: torch.dtype


def why_not(spec: str) -> str:
    """Why rows under a spec cannot be quantized where they come from; "" if they can."""
    parsed = QuantSpec(spec)
    if parsed.family == "fp8_tensor" or (parsed.family == "nvfp4" and "row_scaled" not in parsed.options):
        return "has a scale of all rows of an expert"
    if any(option in TILES for option in parsed.options):
        return "has scales that rows share"
    return "rounds stochastically" if parsed.stochastic else ""


def pack(rows: torch.Tensor, spec: str) -> tuple[torch.Tensor, tuple[Field, ...]]:
    """uint8 [rows, bytes] of rows [rows, K], and what the bytes are."""
    data, scale, amax, *_ = operand_buffers(rows, spec, columnwise=False)
    parsed = QuantSpec(spec)
    if parsed.family == "fp8_block":  # whose blocks come first
        scale = scale.t()
    parts = [data, scale if scale.dim() == 2 else scale[:, None]]
    if "row_scaled" in parsed.options:
        parts.append(amax[:, None])
    parts = [_viewed(part, torch.uint8) for part in parts]
    dtypes = (data.dtype, scale.dtype, amax.dtype)
    fields = tuple([Field(part.shape[1], dtype) for part, dtype in zip(parts, dtypes, strict=False)])
    return torch.cat(parts, 1), fields


def unpack(
    payload: torch.Tensor, fields: tuple[Field, ...], spec: str, ends: torch.Tensor
) -> tuple[torch.Tensor | None, ...]:
    """The six buffers of rows that are sorted into groups, as grouped_linear() takes them. ends: of groups."""
    parts = payload.split([field.bytes for field in fields], 1)
    data, scale, *amax = [_viewed(part, field.dtype) for part, field in zip(parts, fields, strict=True)]
    if QuantSpec(spec).family == "fp8_block":
        scale = _blocks_first(scale, ends)
    return (data, scale, amax[0].flatten() if amax else None, None, None, None)


def _viewed(t: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """t.view(dtype), of memory of its own: a row of bytes may begin anywhere, and a column have any stride."""
    return t.contiguous() if t.dtype == dtype else t.clone(memory_format=torch.contiguous_format).view(dtype)


def _blocks_first(scale: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Scales [rows, blocks] as flat memory in which each group has [blocks, rows of the group]."""
    rows, blocks = scale.shape
    begins = torch.cat([ends.new_zeros(1), ends])
    sizes = torch.cat([ends, ends.new_full((1,), rows)]) - begins
    row = torch.arange(rows, dtype=torch.int64, device=ends.device)
    group = torch.searchsorted(ends, row, right=True)  # the last one has what is behind all groups
    first = begins[group]
    block = torch.arange(blocks, dtype=torch.int64, device=ends.device)
    place = (first * blocks + row - first)[:, None] + sizes[group][:, None] * block
    return torch.empty_like(scale.flatten()).scatter_(0, place.flatten(), scale.flatten())
