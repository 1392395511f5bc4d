"""The parameter that fully_shard shards where codes of weights are gathered, not weights."""

import functools
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils._pytree import tree_map

from quire.distributed import check_ranks
from quire.distributed.code_payload import alike, pack, unpack, why_not
from quire.distributed.gathering import BOTH, COLUMNWISE, ROWWISE, Amaxes, Directions, Found, reduced_amaxes
from quire.functional import quantize
from quire.loading.devices import runs_later
from quire.tensor import DTYPES, QuantizedTensor, QuantSpec, TensorProto
from quire.tensor.buffers import other_direction

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

aten = torch.ops.aten
#: Families whose scales depend on more than blocks.
_WITH_AMAXES = ("fp8_tensor", "fp8_row", "nvfp4")
#: Operators whose results are parameters too. All others compute on the values and return plain tensors.
_SAME_KIND = {
    aten._pin_memory.default,
    aten._to_copy.default,
    aten.alias.default,
    aten.as_strided.default,
    aten.clone.default,
    aten.detach.default,
    aten.empty_like.default,
    aten.slice.Tensor,
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.view.default,
}


class Options(NamedTuple):
    """How a weight is gathered. layer: its class, for messages. name: of the parameter. spec: a text. from_codes:
    backward decodes the rowwise codes of forward. recompute: forward runs again in backward. exact: values are
    quantized as they are, whatever dtype fully_shard gathers in. delayed: (matmul, slot) of the state whose forward
    scale is used, or None."""

    layer: str
    name: str
    spec: str
    from_codes: bool
    recompute: bool
    exact: bool
    delayed: tuple[str, int] | None


class Gathered(NamedTuple):
    """What fsdp_pre_all_gather() says to fsdp_post_all_gather(). shared: buffers that no rank sends, because all
    have them."""

    layer: torch.nn.Module
    name: str
    sent: Directions
    wanted: Directions
    parts: int
    shape: torch.Size
    shared: dict[str, torch.Tensor]


class MasterShard(torch.Tensor):
    """Values of a weight in high precision, or of some of its rows, which fully_shard gathers as codes.

    Optimizers and checkpoints see `values`, a plain tensor.
    """

    values: torch.Tensor
    options: Options

    @staticmethod
    def __new__(cls, values: torch.Tensor, options: Options) -> "MasterShard":
        self = torch.Tensor._make_wrapper_subclass(
            cls, values.size(), values.stride(), values.storage_offset(), dtype=values.dtype, device=values.device
        )
        self.values, self.options = values, Options(*options)  # a tuple from a file
        return self

    def __tensor_flatten__(self) -> tuple[list[str], Options]:
        return ["values"], self.options

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, torch.Tensor], metadata: Options, size: Any, stride: Any
    ) -> "MasterShard":
        return MasterShard(inner["values"], metadata)

    def __repr__(self, *, tensor_contents: str | None = None) -> str:
        return f"MasterShard({self.options.spec!r}, {self.values!r})"

    def __reduce_ex__(self, protocol: int) -> tuple[Any, ...]:
        return MasterShard, (self.values, tuple(self.options))

    @classmethod
    def __torch_dispatch__(cls, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        masters: dict[int, MasterShard] = {}

        def values_of(value: Any) -> Any:
            if not isinstance(value, MasterShard):
                return value
            masters[id(value.values)] = value
            return value.values

        result = operator(*tree_map(values_of, args), **tree_map(values_of, kwargs or {}))
        first = args[0] if args and isinstance(args[0], MasterShard) else None
        if operator is aten.new_zeros.default:
            return first._part(result) if first is not None else result

        def kind_of(value: Any) -> Any:
            if id(value) in masters:  # an operator that writes in place
                return masters[id(value)]
            wrapped = first is not None and operator in _SAME_KIND and isinstance(value, torch.Tensor)
            return MasterShard(value, first.options) if wrapped and value.dtype in DTYPES else value

        return tree_map(kind_of, result)

    def _part(self, zeros: torch.Tensor) -> torch.Tensor:
        """Memory for some of the rows, which fully_shard asks for: a plain tensor where codes of the parts are not
        those of the whole. All ranks ask for the same size."""
        if zeros.shape == self.shape and len(zeros) > 1:  # one row may be the part of one of many ranks
            return MasterShard(zeros, self.options)
        if zeros.dim() != 2 or self.dim() != 2 or zeros.shape[1] != self.shape[1]:
            return zeros
        rows, whole = zeros.shape[0], self.shape[0]
        reason = why_not(QuantSpec(self.options.spec), rows)
        if not reason and rows > 0 and whole % rows == 0 and whole > 1:
            return MasterShard(zeros, self.options)
        warnings.warn(
            f"gather_codes: {self._named()} {list(self.shape)} is sharded into parts of {rows} rows, and "
            f"{reason or 'codes need equal parts'}; its values are gathered instead, in their own dtype or that of the "
            "MixedPrecisionPolicy, and quantized afterwards",
            stacklevel=2,
        )
        return zeros

    # ------------------------------------------------------------ what fully_shard calls

    def fsdp_pre_all_gather(
        self, mesh: "DeviceMesh", outer_size: torch.Size, outer_stride: Any, module: torch.nn.Module, mp_policy: Any
    ) -> tuple[tuple[torch.Tensor], Gathered]:
        """This rank's bytes for the gather."""
        name = self.options.name
        self._check(mesh, outer_size)
        found = module.gathering.find(module, name)
        wanted = self._wanted(found)
        sent = ROWWISE if wanted == BOTH and _columnwise_follows(self.options.spec) else wanted
        part = self._quantized(sent, mesh, module, found, mp_policy)
        payload = pack(part)

        def said() -> tuple[str, check_ranks.Fields]:
            fields = {"weight": name, "recipe w": str(self.options.spec), "shape": str(list(outer_size))}
            fields |= {"sent": str(sent), "bytes": payload.numel()}
            return f"quire.distributed.gather_codes, {type(module).__name__}.{name}", fields

        check_ranks.agree(module, f"{name} {sent}", (payload.numel(),), said, mesh.get_group(), device=payload.device)
        if found is not None:
            found.expect(payload.numel())
        return (payload,), Gathered(module, name, sent, wanted, mesh.size(), outer_size, alike(part))

    def fsdp_post_all_gather(
        self,
        outputs: Sequence[torch.Tensor],
        metadata: Gathered,
        param_dtype: torch.dtype,
        *,
        out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]] | None:
        """The whole weight, quantized. Buffers of a direction that was not gathered are there, and have scales that
        decode to NaN."""
        first = out is None
        if first:
            proto = TensorProto(
                metadata.shape, param_dtype, self.options.spec, columnwise=True, device=outputs[0].device
            )
            out = proto.create_tensor()
        buffers = out.buffers()
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(tuple(buffers.values())):
            _fill(out, outputs[0], metadata)
        metadata.layer.gathering.directions[metadata.name] = metadata.wanted
        outputs[0].untyped_storage().resize_(0)  # the codes are in the buffers now
        return (out, tuple(buffers.values())) if first else None

    def to_quantize(self, mp_policy: Any) -> torch.Tensor:
        """What is quantized: the values as fully_shard would gather them."""
        dtype = mp_policy.param_dtype
        return self.values if dtype is None or self.options.exact else self.values.to(dtype)

    def _named(self) -> str:
        return f"{self.options.layer}.{self.options.name}"

    def _check(self, mesh: "DeviceMesh", outer_size: torch.Size) -> None:
        """Raises RuntimeError, on all ranks alike."""
        if self.shape[0] * mesh.size() != outer_size[0]:
            raise RuntimeError(
                f"gather_codes: {self._named()} {list(outer_size)} is not sharded into equal parts by "
                f"{mesh.size()} ranks; leave its layer out of gather_codes, or use another number of ranks"
            )

    def _wanted(self, found: Found | None) -> Directions:
        alone = None if found is None else found.alone
        if alone is None or (self.options.recompute and alone == COLUMNWISE):
            return ROWWISE if self.options.from_codes else BOTH
        return ROWWISE if self.options.from_codes else alone

    def _quantized(
        self, sent: Directions, mesh: "DeviceMesh", layer: torch.nn.Module, found: Found | None, mp_policy: Any
    ) -> QuantizedTensor:
        """This rank's rows, with the bytes that they have in the whole weight."""
        values, spec = self.to_quantize(mp_policy), self.options.spec
        amaxes = self._amaxes(mesh, layer, found, mp_policy) if self.has_amaxes() else None
        if self.options.delayed is None:
            return quantize(values, spec, *sent, amax=amaxes)
        scales, name = layer.gathering.scales, self.options.name
        if found is None or not found.in_backward or name not in scales:
            product, slot = self.options.delayed
            scales[name] = layer.of(product, "delayed").fwd_scale[slot : slot + 1].clone()
        part = quantize(values, spec, *sent, scale=scales[name])
        for direction, amax in zip(("rowwise", "columnwise"), amaxes, strict=True):
            if (scale := part.named()[f"{direction}_scale"]) is not None:
                scale.copy_(torch.where(amax.isinf(), torch.nan, scale))
                part.named()[f"{direction}_amax"].copy_(amax)
        return part

    def _amaxes(self, mesh: "DeviceMesh", layer: torch.nn.Module, found: Found | None, mp_policy: Any) -> Amaxes:
        """Those of the whole weight. Forward reduces them, for all weights that are gathered together; a gather in
        backward takes those of forward."""
        name = self.options.name
        kept = layer.gathering.take(name, found is not None and found.in_backward)
        if kept is not None:
            return kept
        together = [(layer, name, self)] if found is None else list(found.siblings())
        own = [each for each in together if isinstance(each[2], MasterShard) and each[2].has_amaxes()]
        values = [master.to_quantize(mp_policy) for *_, master in own]
        whole = reduced_amaxes(values, [master.options.spec for *_, master in own], mesh.get_group())
        for (other, other_name, _), both in zip(own, whole, strict=True):
            other.gathering.offer(other_name, both)
        return layer.gathering.take(name, False)

    def has_amaxes(self) -> bool:
        """Whether codes follow from amaxes of the whole weight."""
        return QuantSpec(self.options.spec).family in _WITH_AMAXES


@functools.cache
def _columnwise_follows(spec_text: str) -> bool:
    """Whether columnwise codes are the rowwise ones in another order."""
    spec = QuantSpec(spec_text)
    q = quantize(torch.zeros(1, 1, dtype=torch.float32, device="cpu"), spec)
    return other_direction(spec, (1, 1), q.named(), "columnwise") is not None


def _fill(q: QuantizedTensor, payload: torch.Tensor, metadata: Gathered) -> None:
    """Writes gathered codes into the buffers of the whole weight."""
    buffers = q.buffers()
    for direction, sent in zip(("rowwise", "columnwise"), metadata.sent, strict=True):
        if not sent:
            buffers[f"{direction}_scale"].view(torch.uint8).fill_(255)  # in each format of scales a NaN
    got = {name: t for name, t in buffers.items() if metadata.sent[name.startswith("columnwise")]}
    unpack(payload, metadata.parts, q.spec_text, got)
    for name, tensor in metadata.shared.items():
        buffers[name].copy_(tensor)
        if runs_later(tensor.device):  # made on fully_shard's own stream, whose next gather would overwrite it
            tensor.record_stream(torch.accelerator.current_stream(tensor.device))
    if metadata.wanted == BOTH and metadata.sent != BOTH:
        named = dict.fromkeys(q.named()) | got
        for name, tensor in other_direction(q.spec, q.shape, named, "columnwise").items():
            if tensor is not None:
                buffers[name].copy_(tensor)
