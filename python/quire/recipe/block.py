"""FP8 and FP4 with one scale per block."""

from dataclasses import dataclass, field

from quire.recipe.base import (
    Format,
    MMParams,
    Recipe,
    check_fp8_format,
    check_products,
    check_shared_fields,
    gradient_element,
    one_of,
    operand_params,
    recipe_class,
    spec,
    split,
)
from quire.recipe.linear_spec import LinearSpec


@recipe_class
@dataclass(frozen=True)
class Float8BlockScaling(Recipe):
    """FP8 with one scale per 1 x 128 or 128 x 128 values (numerics.md 3).

    Args:
        use_f32_scales: keep scales in float32 instead of truncating them to powers of two.
        fp8_format: E4M3, or HYBRID for E5M2 gradients.
        x_block_scaling_dim: 1: a scale for 1 x 128 values of x. 2: for 128 x 128. The operands of one matmul cannot
            both have 2.
        w_block_scaling_dim: the same for w.
        grad_block_scaling_dim: the same for dy.
        fp8_gemm_fprop: as for Float8CurrentScaling.
        fp8_gemm_dgrad: as fp8_gemm_fprop.
        fp8_gemm_wgrad: as fp8_gemm_fprop.
        fp8_dpa: as for Float8CurrentScaling.
        fp8_mha: as for Float8CurrentScaling.
        backward_override: as for Float8CurrentScaling.

    Raises:
        TypeError: for an unknown field, and for a value of fp8_gemm_* that is no MMParams.
        ValueError: for a value that a field does not take, if two operands have 128 x 128 blocks, and if a
            value of fp8_gemm_* has use_split_accumulator=False.
        NotImplementedError: if fp8_dpa or fp8_mha is True.
    """

    use_f32_scales: bool = False
    fp8_format: Format = Format.E4M3
    x_block_scaling_dim: int = 1
    w_block_scaling_dim: int = 2
    grad_block_scaling_dim: int = 1
    fp8_gemm_fprop: MMParams = field(default_factory=split)
    fp8_gemm_dgrad: MMParams = field(default_factory=split)
    fp8_gemm_wgrad: MMParams = field(default_factory=split)
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None

    fp8_quant_fwd_inp = operand_params("x")
    fp8_quant_fwd_weight = operand_params("w")
    fp8_quant_bwd_grad = operand_params("dy")

    def _check(self) -> None:
        one_of(self, "use_f32_scales", False, True)
        check_fp8_format(self)
        dims = ("x_block_scaling_dim", "w_block_scaling_dim", "grad_block_scaling_dim")
        for name in dims:
            one_of(self, name, 1, 2)
        if [getattr(self, name) for name in dims].count(2) > 1:
            raise ValueError(
                "Float8BlockScaling: the two operands of a product may not both have 128 x 128 blocks; got "
                + ", ".join(f"{name}={getattr(self, name)}" for name in dims)
                + ". Set all but one to 1"
            )
        check_products(self, split=True)
        check_shared_fields(self)

    def _specs(self) -> LinearSpec:
        pow2 = "" if self.use_f32_scales else "pow2"
        tile = {1: "", 2: "128x128"}
        x = spec("fp8_block", tile[self.x_block_scaling_dim], pow2)
        w = spec("fp8_block", tile[self.w_block_scaling_dim], pow2)
        dy = spec("fp8_block", gradient_element(self), tile[self.grad_block_scaling_dim], pow2)
        return LinearSpec(x, w, dy)

    @classmethod
    def float8_block_scaling(cls) -> bool:
        return True


@recipe_class
@dataclass(frozen=True)
class MXFP8BlockScaling(Recipe):
    """FP8 with a power-of-two scale byte per 32 values (numerics.md 4).

    Args:
        margin: must be 0.
        fp8_format: E4M3, or HYBRID for E5M2 gradients.
        fp8_dpa: as for Float8CurrentScaling.
        fp8_mha: as for Float8CurrentScaling.
        backward_override: as for Float8CurrentScaling.
        enable_2d_quantization: weights get one scale per 32 x 32 values, the same in both directions.

    Raises:
        TypeError: for an unknown field.
        ValueError: for a value that a field does not take.
        NotImplementedError: if fp8_dpa or fp8_mha is True.
    """

    margin: int = 0
    fp8_format: Format = Format.E4M3
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None
    enable_2d_quantization: bool = False

    def _check(self) -> None:
        if self.margin != 0:
            raise ValueError(
                f"MXFP8BlockScaling: margin belongs to delayed scaling and has no meaning here; got {self.margin!r}. "
                "Leave it 0"
            )
        check_fp8_format(self)
        one_of(self, "enable_2d_quantization", False, True)
        check_shared_fields(self)

    def _specs(self) -> LinearSpec:
        w = spec("mxfp8", "32x32" if self.enable_2d_quantization else "")
        return LinearSpec(spec("mxfp8"), w, spec("mxfp8", gradient_element(self)))

    @classmethod
    def mxfp8(cls) -> bool:
        return True


@recipe_class
@dataclass(frozen=True)
class MXFP4BlockScaling(Recipe):
    """FP4 with a power-of-two scale byte per 32 values (numerics.md 4); gradients are MXFP8.

    Gradients keep 8 bits: 4-bit gradients need stochastic rounding, which this format does not have. NVFP4BlockScaling
    has 4-bit gradients.

    Args:
        activation_format: E2M1, or E4M3 for MXFP8 activations; with E4M3 only weights have 4 bits.
        fp8_format: E4M3, or HYBRID for E5M2 gradients.
        fp8_dpa: as for Float8CurrentScaling.
        fp8_mha: as for Float8CurrentScaling.
        backward_override: as for Float8CurrentScaling.

    Raises:
        TypeError: for an unknown field.
        ValueError: for a value that a field does not take.
        NotImplementedError: if fp8_dpa or fp8_mha is True.
    """

    activation_format: Format = Format.E2M1
    fp8_format: Format = Format.E4M3
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None

    def _check(self) -> None:
        one_of(self, "activation_format", Format.E2M1, Format.E4M3)
        check_fp8_format(self)
        check_shared_fields(self)

    def _specs(self) -> LinearSpec:
        x = spec("mxfp4" if self.activation_format == Format.E2M1 else "mxfp8")
        return LinearSpec(x, spec("mxfp4"), spec("mxfp8", gradient_element(self)))

    @classmethod
    def mxfp4(cls) -> bool:
        return True
