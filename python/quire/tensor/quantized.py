"""QuantizedTensor: a torch.Tensor whose values are stored as codes and scales."""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch

from quire.checks import check_dense, check_options, check_type, check_type_or_none, describe, signed64
from quire.loading.devices import HOST, is_known
from quire.tensor.buffers import (
    BUFFER_NAMES,
    CLASSES,
    DTYPES,
    DataTensors,
    Nowhere,
    TensorProto,
    as_matrix,
    at_least_one,
    checked,
    from_list,
    named_buffers,
    other_direction,
    spec_of,
)
from quire.tensor.decoded import ON_DISK, Window, decoded
from quire.tensor.origin import Kept, Origin, Seal
from quire.tensor.spec import QuantSpec

Buffers = dict[str, torch.Tensor | None]
#: Everything that a tensor stores, in the order of pickles.
STORED_NAMES = (*BUFFER_NAMES, "master", "given_scale")
_SAVED = "a saved QuantizedTensor"
_REMEDY = "the file is damaged or was not written by quire; save the tensor again"


class QuantizedTensor(DataTensors, torch.Tensor):
    """A tensor with a logical shape and a floating-point dtype, whose storage consists of codes and scales only.

    PyTorch's operators treat it as follows. quire's own operators accept only buffers (buffer_list()) and raise an
    error for a QuantizedTensor.

    * detach, clone, .to, empty_like, new_empty of the same shape and views of whole rows (view, as_strided, slice,
      split, select, ...) return a QuantizedTensor, and of fp8_tensor also views of other parts (chunk(2, dim=-1),
      [:, 8:24]). A view of a part has only rowwise codes.
    * Other views (.t(), columns, view(-1), ...) return a DecodedView, which is read as values.
    * Operators that write to it (copy_, add_, `_foreach_*`, `_fused_adamw_`, ...) compute on `master` if there is one,
      else on the decoded values in `dtype`, and quantize the result into the same storage. copy_ from a tensor of the
      same spec and shape copies bytes. A write to a view is a write to all of the tensor.
    * Collectives that would write to it (torch.distributed.broadcast, all_reduce, recv, ...) raise TypeError.
      all_gather and gather copy values into a list of them. All read its values.
    * All other operators compute on its values and return plain tensors. Its values are those of `master` in `dtype` if
      there is one, else the decoded values. Matmuls, layers and dequantize() decode the codes in any case.

    The gradient of a leaf is a plain tensor.

    Args:
        spec: a QuantSpec or its text.
        shape: the logical shape.
        dtype: float32, float16 or bfloat16, the default dtype of dequantize() and the dtype of the gradient; .to(dtype)
            changes only this.
        requires_grad: whether the tensor collects a gradient.
        master: None, or float32 master weights of the same shape. In-place operators change the master weights, and the
            codes are then quantized from them.
        given_scale: None, or the scale that quire.quantize received instead of measuring an amax, float32 [1]; in-place
            operators keep using it. NaN if only the device knows that there is none (quantize_ with a noop_flag).
        is_part: whether the buffers are parts of those of a larger tensor.
        strides: None, or the strides of a contiguous tensor, which are the only ones that a tensor can report.
        **buffers: the six buffers by name, None or left out if absent: those of TensorProto.buffers().

    Attributes:
        rowwise_data: the codes, uint8: a plain tensor of the shape in TensorProto.buffers(), None if absent.
        rowwise_scale: the scales of the codes, in the same way: `value = code * scale`.
        rowwise_amax: the amaxes from which the scales were computed, in the same way.
        columnwise_data: as rowwise_data, for matmuls that sum over the rows.
        columnwise_scale: as rowwise_scale, of columnwise_data.
        columnwise_amax: as rowwise_amax, of columnwise_data.

    Raises:
        TypeError: for an unknown name of a buffer, for a buffer, master or given_scale that is no dense tensor, and for
            a spec that is no QuantSpec or text.
        ValueError: for a wrong spec, dtype, shape or stride, and for tensors that do not fit these, or are on several
            devices. The shapes of the buffers of a part are checked by the operators that read them.
    """

    spec: QuantSpec
    spec_text: str  #: of spec; readable also of a tensor that a compiled graph makes, where an object is not
    rowwise_data: torch.Tensor | None
    rowwise_scale: torch.Tensor | None
    rowwise_amax: torch.Tensor | None
    columnwise_data: torch.Tensor | None
    columnwise_scale: torch.Tensor | None
    columnwise_amax: torch.Tensor | None
    master: torch.Tensor | None
    given_scale: torch.Tensor | None
    is_part: bool  #: whether it is a view of some rows, or of other parts, of another one
    window: Window | None  #: of a part: where it lies, so that a write to it is one to the other tensor
    stacked = False  #: whether it is a QuantizedStack
    #: What PyTorch's operators do with tensors of this class; operators.py, which knows the class, puts it here.
    run_operator: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]

    @staticmethod
    def __new__(
        cls,
        spec: QuantSpec | torch.Tensor,
        shape: Sequence[int] = (),
        dtype: torch.dtype = torch.float32,
        *,
        requires_grad: bool = False,
        master: torch.Tensor | None = None,
        given_scale: torch.Tensor | None = None,
        is_part: bool = False,
        strides: Sequence[int] | None = None,
        **buffers: torch.Tensor | None,
    ) -> QuantizedTensor:
        """type(parameter)(tensor, requires_grad=...) makes a parameter of a QuantizedTensor, without a copy: frameworks
        that move parameters call it, such as accelerate. Raises TypeError for a plain tensor."""
        if isinstance(spec, torch.Tensor):
            return cls._parameter(spec, requires_grad)
        what = f"quire.{cls.__name__}"
        check_options(what, BUFFER_NAMES, buffers)
        check_type(what, bool, requires_grad=requires_grad, is_part=is_part)
        kept = {"is_part": is_part, "master": master, "given_scale": given_scale}
        proto = checked(what, buffers, spec, shape, dtype, stacked=cls.stacked, strides=strides, **kept)
        return cls.unchecked(proto.spec, proto.shape, dtype, requires_grad=requires_grad, **kept, **buffers)

    @classmethod
    def unchecked(
        cls,
        spec: QuantSpec,
        shape: Sequence[int],
        dtype: torch.dtype,
        *,
        requires_grad: bool = False,
        is_part: bool = False,
        strides: Sequence[int] | None = None,
        **stored: torch.Tensor | None,
    ) -> QuantizedTensor:
        """As the constructor, of tensors that an operator has made or that are checked: graphs make tensors so in every
        call. stored: by STORED_NAMES."""
        data = next(tensor for tensor in stored.values() if tensor is not None)
        # The one way to make a tensor that has shape, dtype and device but no storage; PyTorch documents it by that
        # name ("Extending PyTorch", subclasses with __torch_dispatch__).
        self = torch.Tensor._make_wrapper_subclass(
            cls, shape, strides=strides, dtype=dtype, device=data.device, requires_grad=requires_grad
        )
        self.spec, self.spec_text, self.is_part, self.window = spec, spec.text, is_part, None
        for name in STORED_NAMES:
            setattr(self, name, stored.get(name))
        return self

    @classmethod
    def _parameter(cls, tensor: torch.Tensor, requires_grad: bool) -> torch.nn.Parameter:
        if type(tensor) is not cls:
            raise TypeError(
                f"{cls.__name__}(tensor): expected a {cls.__name__}, got {describe(tensor)}, which has no codes. If a "
                "checkpoint has high-precision values for a weight that this model has quantized, load it before "
                "quire.convert, or with quire.refit() or load_state_dict(), or quantize them with quire.quantize. "
                f"{ON_DISK}"
            )
        return torch.nn.Parameter(tensor, requires_grad)

    @classmethod
    def from_buffers(
        cls,
        buffers: Mapping[str, torch.Tensor | None],
        spec: QuantSpec | str,
        shape: Sequence[int],
        dtype: torch.dtype = torch.float32,
    ) -> QuantizedTensor:
        """A tensor of the given buffers, without a copy; for the class QuantizedStack a stack of shape [E, N, K].

        Args:
            buffers: name -> tensor, those of TensorProto.buffers().
            spec: a QuantSpec or its text.
            shape: the logical shape.
            dtype: the default dtype of dequantize().

        Raises:
            TypeError: for buffers that are no dict of tensors, and for a spec that is no QuantSpec or text.
            ValueError: unless the buffers are exactly those of TensorProto: names, dtypes, shapes, contiguous, on one
                device; and for a shape, dtype or text of a spec that TensorProto refuses.
        """
        what = f"{cls.__name__}.from_buffers"
        check_type(what, Mapping, buffers=buffers)
        proto = checked(what, buffers, spec, shape, dtype, stacked=cls.stacked)
        return from_list([buffers.get(name) for name in BUFFER_NAMES], proto.spec.text, proto.shape, dtype, cls.stacked)

    @classmethod
    def make_like(
        cls,
        tensor: QuantizedTensor,
        *,
        shape: Sequence[int] | None = None,
        dtype: torch.dtype | None = None,
        requires_grad: bool = False,
    ) -> QuantizedTensor:
        """A tensor of the same buffers, without a copy, optionally with another nominal dtype. Raises TypeError for
        another kind of tensor or dtype, ValueError for a shape that is not the tensor's: use view()."""
        if not isinstance(tensor, QuantizedTensor) or dtype not in (None, *DTYPES):
            raise TypeError(
                "QuantizedTensor.make_like: expected a QuantizedTensor, and a dtype of float32, float16 or bfloat16; "
                f"got {describe(tensor)} and {dtype}"
            )
        check_type("QuantizedTensor.make_like", bool, requires_grad=requires_grad)
        sizes = list(shape) if isinstance(shape, list | tuple) else shape
        if sizes is not None and sizes != list(tensor.shape):
            raise ValueError(
                f"QuantizedTensor.make_like: the shape must be the tensor's, {list(tensor.shape)}, got "
                f"{describe(sizes)}; view() gives other leading sizes"
            )
        return tensor.with_buffers(tensor.named(), dtype=dtype, requires_grad=requires_grad)

    def with_buffers(
        self,
        buffers: Mapping[str, torch.Tensor | None],
        *,
        shape: Sequence[int] | None = None,
        dtype: torch.dtype | None = None,
        spec: QuantSpec | None = None,
        **options: Any,
    ) -> QuantizedTensor:
        """A tensor with other buffers, in the form of named(), and optionally another shape, dtype and spec."""
        options = {"is_part": self.is_part, **options}
        if options["is_part"] and shape is None:
            options.setdefault("strides", self.stride())
        return type(self).unchecked(spec or self.spec, shape or self.shape, dtype or self.dtype, **buffers, **options)

    def lies_like(self, other: QuantizedTensor | None) -> QuantizedTensor:
        """Takes over the window of a tensor with the same memory. Returns self."""
        self.window = None if other is None else other.window
        return self

    def named(self) -> Buffers:
        """All that it stores, by name, None if absent: the six buffers in order, then "master", "given_scale"."""
        return {name: self._stored(name) for name in STORED_NAMES}

    def _stored(self, name: str) -> torch.Tensor | None:
        try:
            return getattr(self, name)
        except RuntimeError:
            # While torch.export traces, attributes of subclasses are nodes, which only its inputs have; the buffers of
            # a tensor made in the program are nodes themselves.
            return self.__dict__[name]

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Any, ...]]:
        names = [name for name, tensor in self.named().items() if tensor is not None]
        # The names are part of it, so that a graph of one direction is not run on a tensor of another.
        return names, (self.spec.text, self.dtype, self.is_part, tuple(names))

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, torch.Tensor], metadata: tuple[Any, ...], size: Sequence[int], stride: Sequence[int]
    ) -> QuantizedTensor:
        text, dtype, is_part, _ = metadata
        return QuantizedTensor.unchecked(spec_of(text), size, dtype, is_part=is_part, strides=stride, **inner)

    def _stable_hash_for_caching(self) -> str:
        """A key for AOTAutograd's cache of graphs: everything but the values. It is the same in every process."""
        names, metadata = self.__tensor_flatten__()
        inner = [self._stored(name) for name in names]
        each = [(t.shape, t.stride(), t.storage_offset(), t.dtype, t.device, t.requires_grad) for t in (self, *inner)]
        return hashlib.blake2b(repr((type(self).__name__, metadata, each)).encode(), digest_size=16).hexdigest()

    @classmethod
    def __torch_dispatch__(
        cls, operator: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return cls.run_operator(operator, args, kwargs or {})

    def buffers(self) -> dict[str, torch.Tensor]:
        """Name -> tensor, without absent buffers. Within a compiled graph use buffer_list(), because Dynamo cannot pass
        a dict."""
        named = zip(BUFFER_NAMES, self.buffer_list(), strict=True)
        return {name: tensor for name, tensor in named if tensor is not None}

    def buffer_list(self) -> list[torch.Tensor | None]:
        """The six buffers in the order of BUFFER_NAMES, None if absent: the form that operators take."""
        listed = [self._stored(name) for name in BUFFER_NAMES]
        if self.is_part:  # codes of some columns, and scales of fp8_block, have strides, which operators do not take
            listed[:2] = [None if tensor is None else tensor.contiguous() for tensor in listed[:2]]
        return listed

    def carrier(self) -> torch.Tensor:
        """A plain tensor with this shape, dtype and device and the memory of one element. It represents this tensor
        where an operator also receives the buffers and does not read values of the tensor."""
        return torch.empty(1, dtype=self.dtype, device=self.device).expand(self.shape)

    @property
    def proto(self) -> TensorProto:
        """The description of this tensor."""
        return TensorProto(
            tuple(self.shape),
            self.dtype,
            self.spec,
            requires_grad=self.requires_grad,
            device=self.device,
            rowwise=self.stores("rowwise"),
            columnwise=self.stores("columnwise"),
            stacked=self.stacked,
        )

    def stores(self, direction: str) -> bool:
        """Whether the "rowwise" or the "columnwise" codes are stored. Raises ValueError for another word."""
        if direction not in ("rowwise", "columnwise"):
            raise ValueError(
                f"QuantizedTensor.stores: direction must be 'rowwise' or 'columnwise', got {describe(direction)}"
            )
        return self._stored(f"{direction}_data") is not None

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers; `master` and `given_scale` are not counted."""
        return sum(t.numel() * t.element_size() for t in self.buffers().values())  # symbolic sizes have no t.nbytes

    @property
    def data(self) -> QuantizedTensor:
        """A tensor of the same buffers without autograd history. Assigning a QuantizedTensor of the same shape and
        device takes over its buffers; assigning plain values in float32, float16 or bfloat16 quantizes them."""
        return self.detach()

    @data.setter
    def data(self, other: torch.Tensor) -> None:
        kind = type(self).__name__
        fits = isinstance(other, torch.Tensor) and other.shape == self.shape and other.device == self.device
        if fits and not isinstance(other, QuantizedTensor) and other.dtype in DTYPES:
            self.detach().copy_(other.detach())
            return
        if type(other) is not type(self) or other.shape != self.shape or other.device != self.device:
            got = describe(other)
            if isinstance(other, torch.Tensor):
                got = f"{got} {list(other.shape)}, {other.dtype}, on {other.device}"
            raise TypeError(
                f"QuantizedTensor.data: expected a {kind} of shape {list(self.shape)} on {self.device}, or values in "
                f"float32, float16 or bfloat16, got {got}; call quire.dequantize_weights(model) before .double() or "
                ".to(float64) of a model, and before FullyShardedDataParallel, which flattens parameters"
            )
        self.spec, self.spec_text, self.is_part = other.spec, other.spec_text, other.is_part
        self.window = other.window
        for name, tensor in other.named().items():
            setattr(self, name, tensor)
        self.remember_like(other, alias=True)

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The decoded tensor [shape] in `dtype` (float32, float16 or bfloat16; None: self.dtype), from rowwise codes if
        there are any, else from columnwise codes (numerics.md 3.4, 4.6, 5.1). In backward the gradient passes through
        unchanged.

        Args:
            dtype: float32, float16 or bfloat16. None: self.dtype.

        Raises:
            TypeError: for what is no dtype.
            RuntimeError: for another dtype.
            ValueError: if only columnwise codes of a Hadamard-transformed tensor are stored.
        """
        check_type_or_none("dequantize", torch.dtype, dtype=dtype)
        dtype = self.dtype if dtype is None else dtype
        if self.requires_grad and torch.is_grad_enabled():
            return decoded(self, self, dtype)
        return self._values(dtype)

    def _values(self, dtype: torch.dtype) -> torch.Tensor:
        if self.stores("rowwise"):
            return self._decode("rowwise", dtype)
        if self.spec.hadamard:
            raise ValueError(
                f"dequantize: only columnwise codes of {self.spec} are stored, and they hold the Hadamard transform of "
                "the tensor; quantize with rowwise=True"
            )
        return self._decode("columnwise", dtype).t().reshape(self.shape)

    def _decode(self, direction: str, dtype: torch.dtype) -> torch.Tensor:
        columnwise = direction == "columnwise"
        data, scale, amax = self.buffer_list()[3 * columnwise :][:3]
        if amax is None:
            amax = torch.empty(0, dtype=torch.float32, device=data.device)
        shape = at_least_one(self.shape)
        values = torch.ops.quire.dequantize(data, scale, amax, self.spec.text, columnwise, shape, dtype)
        return values if self.dim() else values.reshape(())

    def update_usage(
        self,
        rowwise_usage: bool | None = None,
        columnwise_usage: bool | None = None,
        *,
        requantize: bool = False,
    ) -> None:
        """Drops a direction (False), which frees its memory, or adds a missing one (True); None leaves a direction
        unchanged.

        A direction is added without loss if its codes are the codes of the other direction in another order:
        fp8_tensor, and tiles (fp8_block:128x128, mxfp8:32x32, nvfp4:16x16 without 4over6). For other specs it is
        quantized from `master`, or, with requantize=True, from the decoded values, which is a second rounding.

        Args:
            rowwise_usage: False drops the rowwise codes, True adds them, None leaves them.
            columnwise_usage: the same for columnwise codes.
            requantize: whether a direction may be quantized from the decoded values, which is a second rounding.

        Raises:
            ValueError: if neither is possible or if no direction would be left. Nothing has then changed.
        """
        check_type_or_none(
            "QuantizedTensor.update_usage", bool, rowwise_usage=rowwise_usage, columnwise_usage=columnwise_usage
        )
        proto = self.proto.update_usage(rowwise_usage, columnwise_usage)
        asked = {"rowwise": proto.rowwise, "columnwise": proto.columnwise}
        added: Buffers = {}
        with torch.no_grad():
            for direction, wanted in asked.items():
                if wanted and not self.stores(direction):
                    added |= self.missing_direction(direction, requantize=requantize)
        origin = self.origin if proto.rowwise and "rowwise_data" not in added else None  # files have rowwise codes
        for name in BUFFER_NAMES:
            if not asked[name.split("_")[0]]:
                setattr(self, name, None)
        for name, tensor in added.items():
            setattr(self, name, tensor)
        self.remember(origin)

    def missing_direction(self, direction: str, *, requantize: bool) -> Buffers:
        """The three buffers of a direction that is not stored; see update_usage."""
        named, rowwise = self.named(), direction == "rowwise"
        exact = other_direction(self.spec, at_least_one(self.shape), named, direction)
        if exact is not None:
            return exact
        if self.spec.stochastic or not (requantize or self.master is not None):
            raise ValueError(
                f"QuantizedTensor.update_usage: {direction} codes of {self.spec} do not follow from the stored ones; "
                "quantize the original values in both directions"
                + ("" if self.spec.stochastic else ", or pass requantize=True to round the decoded values once more")
            )
        values = self.dequantize() if self.master is None else self.master
        # Both directions have the number that was given (numerics.md 5.9).
        scale = named["columnwise_amax" if rowwise else "rowwise_amax"] if "given" in self.spec.options else None
        results = torch.ops.quire.quantize(as_matrix(values), self.spec.text, rowwise, not rowwise, 0, 0, scale)
        named = named_buffers(results, rowwise, not rowwise)
        return {name: tensor for name, tensor in named.items() if name.startswith(direction)}

    def __setitem__(self, index: Any, value: Any) -> None:
        base = self if self.window is None else self.window.base
        master = base._stored("master")
        values = base.dequantize() if master is None else master
        values = (values if self.window is None else self.window.of(values)).clone()
        values[index] = value
        self.copy_(values)

    def __repr__(self, *, tensor_contents: str | None = None) -> str:
        directions = [d for d in ("rowwise", "columnwise") if self.stores(d)]
        return (
            f"{type(self).__name__}({self.spec.text!r}, shape={list(self.shape)}, dtype={self.dtype}, "
            f"{' + '.join(directions)}, {self.nbytes} bytes, device={str(self.device)!r}"
            f"{', requires_grad=True' if self.requires_grad else ''})"
        )

    # ------------------------------------------------------------ values that go into its storage

    def quantize_(
        self, values: torch.Tensor, *, noop_flag: torch.Tensor | None = None, **options: Any
    ) -> QuantizedTensor:
        """Quantizes other values of the same shape with the same spec into the same storage; returns self.

        `master`, if there is one, becomes the values.

        Args:
            values: real numbers of the same shape, on any device. A QuantizedTensor is decoded, and dtypes other than
                float32, float16 and bfloat16 are converted to float32.
            noop_flag: a real tensor of one element on this tensor's device or on the CPU. If it is not 0, the tensor
                keeps what it stores. The host does not read it, so a captured graph can replay either.
            **options: seed, offset and scale, as for quire.quantize.

        Raises:
            TypeError: with nothing changed, for an unknown option and for values, a scale or a noop_flag that are no
                dense tensors of real numbers.
            ValueError: with nothing changed, for another shape, for a spec that rounds stochastically if there is no
                seed, and for a noop_flag of more elements or on another device.
            RuntimeError: with nothing changed, for a scale that does not fit, as for quire.quantize, and for a part of
                which more than the values is given.
        """
        what = "QuantizedTensor.quantize_"
        check_options(what, ("seed", "offset", "scale"), options)
        check_type(what, torch.Tensor, values=values)
        check_type_or_none(what, torch.Tensor, scale=options.get("scale"))
        check_dense(what, values=values)
        if values.is_complex() or (values.is_meta and not self.is_meta):
            raise TypeError(f"{what}: values must be real numbers, got {values.dtype} on {values.device}")
        if values.shape != self.shape:
            raise ValueError(f"{what}: values must have shape {list(self.shape)}, got {list(values.shape)}")
        if noop_flag is not None:
            return self._quantize_unless(noop_flag, values, options)
        return self._write(values, options, lasts=torch.compiler.is_compiling())

    def _write(self, values: torch.Tensor, options: dict[str, Any], *, lasts: bool) -> QuantizedTensor:
        if self.is_part and self.window is not None and not options:
            return self.copy_(values)
        with torch.no_grad():
            self.store(values.dequantize() if isinstance(values, QuantizedTensor) else values, **options)
            self._keep_scale(options.get("scale"), lasts)
            self.written(self)
        return self

    def _quantize_unless(
        self, noop_flag: torch.Tensor, values: torch.Tensor, options: dict[str, Any]
    ) -> QuantizedTensor:
        what = "QuantizedTensor.quantize_"
        check_type(what, torch.Tensor, noop_flag=noop_flag)
        check_dense(what, noop_flag=noop_flag)
        if noop_flag.is_complex():
            raise TypeError(f"{what}: noop_flag must be a real number, got {noop_flag.dtype}; pass 0 or 1")
        if noop_flag.numel() != 1:
            raise ValueError(f"{what}: noop_flag must have one element, got the shape {list(noop_flag.shape)}")
        if noop_flag.device not in (self.device, HOST):
            raise ValueError(
                f"{what}: noop_flag must be on the device of the tensor, {self.device}, or on the CPU, got "
                f"{noop_flag.device}; move it"
            )
        whole = self if self.window is None else self.window.base  # a write to a part is one to all of it
        before = [(each.detach(), each.detach().clone()) for each in whole._tensors()]
        without = self.given_scale is None
        self._write(values, options, lasts=True)
        with torch.no_grad():
            if without and self.given_scale is not None:
                before.append((self.given_scale, torch.full_like(self.given_scale, math.nan)))
            keeps = noop_flag.to(self.device).reshape(()) != 0
            for stored, old in before:
                stored.copy_(torch.where(keeps, old, stored))
        return self

    def _keep_scale(self, scale: torch.Tensor | None, lasts: bool) -> None:
        """lasts: a given_scale stays one, and becomes NaN if there is no scale."""
        if self.given_scale is not None and scale is not None:
            self.given_scale.copy_(scale.view_as(self.given_scale))
        elif self.given_scale is not None and lasts:
            self.given_scale.fill_(math.nan)
        elif self.given_scale is not scale:
            self.given_scale = None if scale is None else scale.detach().reshape(*self.shape[: self.stacked], 1).clone()

    def store(
        self, values: torch.Tensor, seed: int | None = None, offset: int = 0, scale: torch.Tensor | None = None
    ) -> None:
        """Codes and scales of plain values of this shape, into this tensor's storage. scale: also given_scale itself,
        which can be NaN."""
        self.check_writable(seeded=seed is not None)
        values = values.to(self.device, values.dtype if values.dtype in DTYPES else torch.float32)
        rowwise, columnwise = self.stores("rowwise"), self.stores("columnwise")
        random = (signed64(seed or 0, "seed"), signed64(offset, "offset"))
        arguments = (as_matrix(values), self.spec.text, rowwise, columnwise, *random)
        may_lack = scale is not None and scale is self.given_scale and "given" not in self.spec.options
        if may_lack and is_known(scale) and not torch._C._len_torch_dispatch_stack():
            scale, may_lack = None if scale.isnan().any() else scale, False
        results = torch.ops.quire.quantize(*arguments, scale)
        if may_lack:  # only the device knows
            measured = torch.ops.quire.quantize(*arguments, None)
            results = [torch.where(scale.isnan(), *both) for both in zip(measured, results, strict=True)]
        new = named_buffers(results, rowwise, columnwise)
        master = self._stored("master")
        if master is not None and master is not values:
            master.copy_(values)
        self.forget_origin()
        for name, tensor in self.buffers().items():
            tensor.copy_(new[name])
        self.written()

    def written(self, *others: torch.Tensor) -> None:
        """Bumps the versions of all that is stored, and of others: a matmul saves the buffers for backward, and has to
        know of a write in between. PyTorch bumps none below __torch_dispatch__."""
        if not torch.compiler.is_compiling():
            plain = [t for t in self._tensors() if type(t) is torch.Tensor]
            torch.autograd.graph.increment_version([t for t in (*plain, *others) if not t.is_inference()])

    def check_writable(self, *, seeded: bool = False) -> None:
        """Raises RuntimeError for a part that does not know the tensor which it is a part of, ValueError where rounding
        needs a seed and there is none."""
        if self.is_part:
            raise RuntimeError(
                "QuantizedTensor: a view of some of the rows cannot be written to, since rows share scales, where it "
                "was made in a compiled function or by as_strided of another view, or is quantized anew with a seed or "
                "a scale; write to the whole tensor, or to a clone() of the view"
            )
        if self.spec.stochastic and not seeded:
            raise ValueError(
                f"QuantizedTensor: {self.spec} rounds stochastically and needs a seed; use quantize_(values, seed=)"
            )

    # ------------------------------------------------------------ methods about the memory of a tensor

    # The methods of torch.Tensor would read from an address that does not exist, and end the process.

    def share_memory_(self) -> QuantizedTensor:
        """Moves all that is stored into shared memory; returns self."""
        for tensor in self._tensors():
            tensor.share_memory_()
        return self

    def is_shared(self) -> bool:
        """Whether all that is stored is in shared memory."""
        return all(tensor.is_shared() for tensor in self._tensors())

    def _tensors(self) -> list[torch.Tensor]:
        return [tensor for tensor in self.named().values() if tensor is not None]

    def data_ptr(self) -> int:
        """0, by which PyTorch knows tensors without memory of their own. As keys of a dict the numbers of two tensors
        are equal if they share their first buffer."""
        first = self._tensors()[0]
        return Nowhere(first.data_ptr() if type(first) is torch.Tensor else 0)  # tracers have no addresses

    def numpy(self, *, force: bool = False) -> NoReturn:
        raise TypeError(f"{self._no_values('numpy')}. {ON_DISK}")

    def __dlpack__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise self._no_values("__dlpack__ (from_dlpack)")

    def apply_(self, function: Any) -> NoReturn:
        raise self._no_values("apply_")

    def _no_values(self, what: str) -> TypeError:
        return TypeError(
            f"QuantizedTensor.{what}: it stores codes and scales, and no values that could be read in place; use "
            "dequantize(), or one of buffers()"
        )

    # ------------------------------------------------------------ a parameter's values before it was quantized

    def keep_high_precision_init_val(self, values: torch.Tensor) -> None:
        """Keeps a copy of values on the CPU, for get_high_precision_init_val()."""
        self.__dict__["_high_precision_init_val"] = values.detach().to("cpu", copy=True)

    @property
    def get_high_precision_init_val(self) -> Callable[[], torch.Tensor | None]:
        """A function without arguments that returns the values before quantization, on the CPU. Absent where nothing
        was kept (quantized_model_init, preserve_high_precision_init_val).
        """
        if "_high_precision_init_val" not in self.__dict__:
            raise AttributeError("get_high_precision_init_val")
        return functools.partial(self.__dict__.get, "_high_precision_init_val")

    @property
    def clear_high_precision_init_val(self) -> Callable[[], None]:
        """A function without arguments that forgets them, and get_high_precision_init_val() returns None."""
        if "_high_precision_init_val" not in self.__dict__:
            raise AttributeError("clear_high_precision_init_val")
        return functools.partial(self.__dict__.__setitem__, "_high_precision_init_val", None)

    # ------------------------------------------------------------ where it was read from

    @property
    def origin(self) -> Origin | None:
        """Where the codes and scales were read from (quire.io); None if nowhere, or if something was written to them
        since. Copies of the same bytes (detach, clone, deepcopy, pickle, .to) have it too."""
        seal = self.__dict__.get("_origin")
        return None if seal is None else seal.origin(list(self.buffers().values()))

    def remember(self, origin: Origin | None) -> None:
        """Says where the present codes and scales come from."""
        self.__dict__["_origin"] = None if origin is None else Seal(Kept(origin), self.buffers().values())

    def remember_like(self, other: QuantizedTensor, *, alias: bool = False) -> QuantizedTensor:
        """Takes over the origin of a tensor with the same bytes; alias: with the same memory. Returns self."""
        if (origin := other.origin) is not None:
            kept = other.__dict__["_origin"].kept if alias else Kept(origin)
            self.__dict__["_origin"] = Seal(kept, self.buffers().values())
        else:
            self.__dict__.pop("_origin", None)
        return self

    def forget_origin(self) -> None:
        """Must be called before a write: tensors of inference mode do not count writes."""
        if (seal := self.__dict__.get("_origin")) is not None:
            seal.kept.origin = None

    # ------------------------------------------------------------ copies and pickles

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """As for any tensor, but the copy of a view has only the rows of the view."""
        if self.is_part and self.is_leaf and id(self) not in memo:
            memo[id(self)] = self._apart()
        return super().__deepcopy__(memo)

    def _apart(self) -> torch.Tensor:
        """A copy of a view, with separate memory."""
        copied = self.detach().clone()
        if isinstance(self, torch.nn.Parameter):
            return torch.nn.Parameter(copied, self.requires_grad)
        return copied.requires_grad_(self.requires_grad)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        if self.is_part:
            return self._apart().__reduce_ex__(protocol)
        flags = (type(self), self.requires_grad, isinstance(self, torch.nn.Parameter))
        parts = (flags, self.spec_text, tuple(self.shape), self.dtype, list(self.named().values()))
        return rebuild, parts if self.origin is None else (*parts, self.origin.state())


def rebuild(
    flags: tuple[type[QuantizedTensor], bool, bool],
    text: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    tensors: list[torch.Tensor | None],
    *origin: object,
) -> QuantizedTensor:
    """Makes the tensor that a pickle describes. The pickle can come from anywhere: raises TypeError or ValueError for
    arguments that __reduce_ex__ does not write.

    flags: class, requires_grad, whether it is a parameter. tensors: the values of named(). origin: nothing, or
    Origin.state()."""
    _check_kinds(flags, text, shape, tensors)
    kind, requires_grad, is_parameter = flags
    named = dict(zip(STORED_NAMES, tensors, strict=True))
    try:
        buffers = {name: named[name] for name in BUFFER_NAMES}
        kept = {"master": named["master"], "given_scale": named["given_scale"]}
        proto = checked(_SAVED, buffers, text, shape, dtype, stacked=kind.stacked, **kept)
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"{_SAVED}: {error}; {_REMEDY}") from error
    tensor = kind.unchecked(proto.spec, shape, dtype, requires_grad=requires_grad, **named)
    if origin:
        tensor.remember(Origin.of_state(origin[0]))
    return torch.nn.Parameter(tensor, requires_grad) if is_parameter else tensor


def _check_kinds(flags: object, text: object, shape: object, tensors: object) -> None:
    kind = flags[0] if isinstance(flags, tuple) and len(flags) == 3 else None
    rules = {
        "flags must be a class of QuantizedTensor and two bools": isinstance(kind, type)
        and issubclass(kind, QuantizedTensor)
        and all([isinstance(flag, bool) for flag in flags[1:]]),
        "spec must be a text": isinstance(text, str),
        "shape must be a tuple of sizes": isinstance(shape, tuple)
        and all([type(size) is int and 0 <= size < 2**63 for size in shape]),
        f"tensors must be {len(STORED_NAMES)}, plain ones or None": isinstance(tensors, list)
        and len(tensors) == len(STORED_NAMES)
        and all([isinstance(t, torch.Tensor | None) and not isinstance(t, QuantizedTensor) for t in tensors]),
    }
    for rule, holds in rules.items():
        if not holds:
            got = ", ".join(describe(value) for value in (flags, text, shape, tensors))
            raise TypeError(f"{_SAVED}: {rule}, got ({got}); {_REMEDY}")
    check_dense(_SAVED, **{name: t for name, t in zip(STORED_NAMES, tensors, strict=True) if t is not None})


CLASSES[False] = QuantizedTensor
torch.serialization.add_safe_globals([QuantizedTensor, rebuild])
