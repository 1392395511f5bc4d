"""Quantizers: objects that quantize. Each has a spec and the other arguments of quire.quantize()."""

import enum
from collections.abc import Sequence

import torch

from quire.delayed.forward import keep_largest
from quire.functional import quantize
from quire.tensor import QuantizedActivation, QuantizedTensor, QuantSpec, TensorProto


class DType(enum.IntEnum):
    """Element types by TransformerEngine's numbers (numerics.md 1.1-1.3 says what the formats are)."""

    kByte = 0
    kInt16 = 1
    kInt32 = 2
    kInt64 = 3
    kFloat32 = 4
    kFloat16 = 5
    kBFloat16 = 6
    kFloat8E4M3 = 7
    kFloat8E5M2 = 8
    kFloat8E8M0 = 9
    kFloat4E2M1 = 10


#: Of Format.HYBRID.
FP8, FP8_OF_GRADIENTS = DType.kFloat8E4M3, DType.kFloat8E5M2


_FP8 = {DType.kFloat8E4M3: "", DType.kFloat8E5M2: "e5m2"}


class Quantizer:
    """Quantizes tensors under one spec, in the directions that it was told.

    spec: the QuantSpec. dtype: the DType of its elements. rowwise_usage, columnwise_usage: which codes results store;
    set_usage() changes them. internal, optimize_for_gemm: hints of TransformerEngine to itself, of no effect here.
    A spec that rounds stochastically takes a seed from PyTorch's default generator at each call.
    """

    def __init__(self, spec: QuantSpec | str, *, rowwise: bool = True, columnwise: bool = True) -> None:
        self.spec = QuantSpec(spec)
        self.rowwise_usage = self.columnwise_usage = True
        self.set_usage(rowwise=rowwise, columnwise=columnwise)
        self.internal = self.optimize_for_gemm = False

    @property
    def dtype(self) -> DType:
        if self.spec.family in ("nvfp4", "mxfp4"):
            return DType.kFloat4E2M1
        return DType.kFloat8E5M2 if "e5m2" in self.spec.options else DType.kFloat8E4M3

    def set_usage(self, *, rowwise: bool | None = None, columnwise: bool | None = None) -> None:
        """Which codes results will store; None leaves a direction as it is. Raises ValueError if none is left, and
        TypeError for what is no bool, with nothing changed."""
        usage = {
            "rowwise": self.rowwise_usage if rowwise is None else rowwise,
            "columnwise": self.columnwise_usage if columnwise is None else columnwise,
        }
        for name, value in usage.items():
            if not isinstance(value, bool):
                raise TypeError(f"{type(self).__name__}.set_usage: {name} must be a bool or None, got {value!r}")
        if not any(usage.values()):
            raise ValueError(
                f"{type(self).__name__}.set_usage: rowwise and columnwise would both be False, and results would store "
                "nothing; leave one True"
            )
        self.rowwise_usage, self.columnwise_usage = usage["rowwise"], usage["columnwise"]

    def copy(self) -> "Quantizer":
        """A copy with separate usages and the same tensors, if it has any."""
        other = object.__new__(type(self))
        vars(other).update(vars(self))
        return other

    def __call__(self, tensor: torch.Tensor) -> QuantizedTensor | QuantizedActivation:
        """quantize(tensor)."""
        return self.quantize(tensor)

    def quantize(
        self, tensor: torch.Tensor, *, out: QuantizedTensor | None = None, dtype: torch.dtype | None = None
    ) -> QuantizedTensor | QuantizedActivation:
        """tensor as quire.quantize() takes it -> what that returns; with out, update_quantized(tensor, out).

        dtype: what the result dequantizes to by default; None: tensor's dtype. Raises ValueError for another one where
        the result has a gradient, whose dtype is the tensor's.
        """
        if out is not None:
            return self.update_quantized(tensor, out)
        q = quantize(tensor, self.spec, self.rowwise_usage, self.columnwise_usage, **self._arguments())
        self._collect(q.buffer_list())
        if dtype is None or dtype == q.dtype:
            return q
        if isinstance(q, QuantizedActivation):
            raise ValueError(
                f"{type(self).__name__}.quantize: the result has a gradient, and so the tensor's dtype, {q.dtype}; got "
                f"dtype={dtype}. Leave it None, or detach() the tensor"
            )
        return QuantizedTensor.make_like(q, dtype=dtype)

    def update_quantized(
        self, src: torch.Tensor, dst: QuantizedTensor, *, noop_flag: torch.Tensor | None = None
    ) -> QuantizedTensor:
        """Quantizes src into dst's storage, in the directions that dst stores, and returns dst.

        noop_flag: a tensor of one element; if it is not 0, dst keeps what it stores. Raises TypeError unless dst is a
        QuantizedTensor, ValueError where its spec or shape is another. Nothing has changed then.
        """
        what = f"{type(self).__name__}.update_quantized"
        if not isinstance(dst, QuantizedTensor):
            raise TypeError(f"{what}: dst must be a QuantizedTensor, got {type(dst).__name__}; make_empty() makes one")
        if dst.spec != self.spec:
            raise ValueError(
                f"{what}: dst is quantized as {dst.spec}, and this quantizes as {self.spec}; make_empty() makes one"
            )
        dst.quantize_(src, noop_flag=noop_flag, **self._arguments())
        self._collect(dst.buffer_list())
        return dst

    def make_empty(
        self,
        shape: Sequence[int],
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
        requires_grad: bool = False,
        pin_memory: bool = False,
    ) -> QuantizedTensor:
        """A tensor for update_quantized(); what it decodes to is not defined. device: None is PyTorch's default one."""
        if pin_memory:
            raise NotImplementedError(
                f"{type(self).__name__}.make_empty: pin_memory=True is not available; leave it False"
            )
        device = torch.get_default_device() if device is None else device
        usage = {"rowwise": self.rowwise_usage, "columnwise": self.columnwise_usage}
        return TensorProto(tuple(shape), dtype, self.spec, requires_grad, device, **usage).create_tensor()

    def _arguments(self) -> dict[str, object]:
        """Further arguments for quire.quantize()."""
        if not self.spec.stochastic:
            return {}
        return {"seed": int(torch.randint(2**63 - 1, (), dtype=torch.int64, device="cpu"))}

    def _collect(self, buffers: list[torch.Tensor | None]) -> None:
        """Records data about a tensor that the quantizer has quantized."""

    def __repr__(self) -> str:
        usage = f"rowwise={self.rowwise_usage}, columnwise={self.columnwise_usage}"
        return f"{type(self).__name__}({self.spec.text!r}, {usage})"


def element(what: str, dtype: DType | int) -> str:
    """The option of a spec for an FP8 format."""
    if dtype not in _FP8:
        raise ValueError(f"{what}: fp8_dtype must be DType.kFloat8E4M3 or DType.kFloat8E5M2, got {dtype!r}")
    return _FP8[dtype]


def spec_text(family: str, *options: str) -> str:
    return ":".join([family, *filter(None, options)])


def _refuse(what: str, remedy: str, **options: object) -> None:
    """Raises NotImplementedError for an option that is neither None nor False."""
    for name, value in options.items():
        if value is not None and value is not False:
            raise NotImplementedError(f"{what}: {name}={value!r} is not available; {remedy}")


class Float8Quantizer(Quantizer):
    """FP8 under a scale that the caller passes (delayed scaling, numerics.md 1.5).

    scale: float32 of one element, multiplies before the cast, read at each call. amax: of one element too, which
    becomes the maximum of itself and of what was quantized.
    """

    def __init__(
        self,
        scale: torch.Tensor,
        amax: torch.Tensor,
        fp8_dtype: DType,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
    ) -> None:
        super().__init__(
            spec_text("fp8_tensor", element("Float8Quantizer", fp8_dtype)), rowwise=rowwise, columnwise=columnwise
        )
        for name, tensor in (("scale", scale), ("amax", amax)):
            one = isinstance(tensor, torch.Tensor) and tensor.numel() == 1
            if not one or tensor.dtype != torch.float32:
                got = f"{tensor.dtype} {[*tensor.shape]}" if isinstance(tensor, torch.Tensor) else repr(tensor)
                raise ValueError(f"Float8Quantizer: {name} must be a float32 tensor of one element, got {got}")
        self.scale, self.amax = scale, amax

    def _arguments(self) -> dict[str, object]:
        return {"scale": self.scale.reshape(1)}

    def _collect(self, buffers: list[torch.Tensor | None]) -> None:
        amax = buffers[2] if buffers[2] is not None else buffers[5]
        keep_largest(self.amax.detach().reshape(1), amax.reshape(1))


class Float8CurrentScalingQuantizer(Quantizer):
    """FP8 under a scale from the tensor's own amax (numerics.md 2).

    device: not used; results are where the tensors are. force_pow_2_scales: scales are truncated to powers of two.
    amax_epsilon: the amax is at least that. Reductions over a group and amaxes that are given raise
    NotImplementedError.
    """

    def __init__(
        self,
        fp8_dtype: DType,
        device: torch.device | str | None = None,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
        use_existing_amax: bool = False,
        with_amax_reduction: bool = False,
        amax_reduction_group: object = None,
        force_pow_2_scales: bool = False,
        amax_epsilon: float = 0.0,
        scale: torch.Tensor | None = None,
        amax: torch.Tensor | None = None,
    ) -> None:
        what = "Float8CurrentScalingQuantizer"
        given = {"use_existing_amax": use_existing_amax, "scale": scale, "amax": amax}
        _refuse(what, "Float8Quantizer takes a scale", **given)
        reduced = {"with_amax_reduction": with_amax_reduction, "amax_reduction_group": amax_reduction_group}
        _refuse(what, "reduce the amax yourself, and give Float8Quantizer the scale", **reduced)
        options = ("pow2" if force_pow_2_scales else "", _epsilon(amax_epsilon))
        super().__init__(
            spec_text("fp8_tensor", element(what, fp8_dtype), *options), rowwise=rowwise, columnwise=columnwise
        )


class Float8BlockQuantizer(Quantizer):
    """FP8 under a scale for each 1 x 128 (block_scaling_dim=1) or 128 x 128 values (2) (numerics.md 3)."""

    def __init__(
        self,
        fp8_dtype: DType,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
        amax_epsilon: float = 0.0,
        force_pow_2_scales: bool = True,
        block_scaling_dim: int = 2,
    ) -> None:
        what = "Float8BlockQuantizer"
        if block_scaling_dim not in (1, 2):
            raise ValueError(f"{what}: block_scaling_dim must be 1 or 2, got {block_scaling_dim!r}")
        tile, pow2 = "128x128" if block_scaling_dim == 2 else "", "pow2" if force_pow_2_scales else ""
        spec = spec_text("fp8_block", element(what, fp8_dtype), tile, pow2, _epsilon(amax_epsilon))
        super().__init__(spec, rowwise=rowwise, columnwise=columnwise)


class MXFP8Quantizer(Quantizer):
    """FP8 under a power-of-two scale byte for each 32 values, or 32 x 32 (with_2d_quantization) (numerics.md 4)."""

    def __init__(
        self,
        fp8_dtype: DType,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
        with_2d_quantization: bool = False,
    ) -> None:
        spec = spec_text("mxfp8", element("MXFP8Quantizer", fp8_dtype), "32x32" if with_2d_quantization else "")
        super().__init__(spec, rowwise=rowwise, columnwise=columnwise)


class NVFP4Quantizer(Quantizer):
    """FP4 with two levels of scales (numerics.md 5).

    with_rht: columnwise codes hold the Hadamard transform, with_random_sign_mask under random signs; columnwise amaxes
    are then amaxes of the transform, so with_post_rht_amax must be True too. with_2d_quantization: scales of 16 x 16
    values. row_scaled_nvfp4, nvfp4_use_4over6, nvfp4_e4m3_max (448 or 256), nvfp4_4over6_err_mode: as the options
    row_scaled, 4over6 and 256 of docs/specs.md. Combinations that a spec refuses raise ValueError; a reduction over a
    group, NotImplementedError.
    """

    def __init__(
        self,
        fp4_dtype: DType = DType.kFloat4E2M1,
        rowwise: bool = True,
        columnwise: bool = True,
        with_amax_reduction: bool = False,
        amax_reduction_group: object = None,
        *,
        with_rht: bool = False,
        with_post_rht_amax: bool = False,
        with_2d_quantization: bool = False,
        stochastic_rounding: bool = False,
        row_scaled_nvfp4: bool = False,
        nvfp4_use_4over6: bool = False,
        nvfp4_e4m3_max: int = 448,
        nvfp4_4over6_err_mode: str = "MAE",
        with_random_sign_mask: bool = True,
    ) -> None:
        what = "NVFP4Quantizer"
        if fp4_dtype != DType.kFloat4E2M1:
            raise ValueError(f"{what}: fp4_dtype must be DType.kFloat4E2M1, got {fp4_dtype!r}")
        reduced = {"with_amax_reduction": with_amax_reduction, "amax_reduction_group": amax_reduction_group}
        _refuse(what, "amaxes are those of the tensor", **reduced)
        if with_rht != with_post_rht_amax:
            raise ValueError(
                f"{what}: with_rht and with_post_rht_amax must be alike: amaxes are measured on what is quantized; got "
                f"{with_rht!r} and {with_post_rht_amax!r}"
            )
        if nvfp4_e4m3_max not in (448, 256):
            raise ValueError(f"{what}: nvfp4_e4m3_max must be 448 or 256, got {nvfp4_e4m3_max!r}")
        spec = spec_text(
            "nvfp4",
            "16x16" if with_2d_quantization else "",
            "row_scaled" if row_scaled_nvfp4 else "",
            ("rht" if with_random_sign_mask else "rht=unsigned") if with_rht else "",
            "sr" if stochastic_rounding else "",
            f"4over6={str(nvfp4_4over6_err_mode).lower()}" if nvfp4_use_4over6 else "",
            "256" if nvfp4_e4m3_max == 256 else "",
        )
        super().__init__(spec, rowwise=rowwise, columnwise=columnwise)


def _epsilon(amax_epsilon: float) -> str:
    return f"eps={float(amax_epsilon)!r}" if amax_epsilon else ""


_OF_FAMILIES: dict[str, type[Quantizer]] = {
    "fp8_tensor": Float8CurrentScalingQuantizer,
    "fp8_block": Float8BlockQuantizer,
    "mxfp8": MXFP8Quantizer,
    "nvfp4": NVFP4Quantizer,
}


def quantizer_of(tensor: QuantizedTensor | QuantizedActivation) -> Quantizer:
    """A quantizer of the tensor's spec, for the directions that it stores: a new one each time, whose changes do not
    reach the tensor. With one scale for a tensor that is the scale of the tensor's own amax."""
    made = object.__new__(_OF_FAMILIES.get(tensor.spec.family, Quantizer))
    stored = {"rowwise": tensor.rowwise_data is not None, "columnwise": tensor.columnwise_data is not None}
    Quantizer.__init__(made, tensor.spec, **stored)
    return made
