"""FP4 with two levels of scales."""

from dataclasses import dataclass

from quire.recipe.base import Format, Recipe, check_shared_fields, one_of, operand_params, recipe_class, spec
from quire.recipe.linear_spec import LinearSpec


@recipe_class
@dataclass(frozen=True)
class NVFP4BlockScaling(Recipe):
    """FP4 with an E4M3 scale byte per 16 values, and one float32 amax per tensor (numerics.md 5).

    Args:
        disable_rht: no Hadamard transform of the operands of the weight gradient.
        disable_stochastic_rounding: round gradients to nearest.
        disable_2d_quantization: weights get one scale per 1 x 16 instead of 16 x 16 values.
        row_scaled_activation: x has one amax per row; needs disable_rht.
        nvfp4_4over6: 'none', 'weights', 'activations' or 'all': these operands use the better of two scales in each
            block. 'activations' and 'all' need disable_rht. Gradients never use it.
        nvfp4_4over6_e4m3_use_256: which of these operands have scale bytes up to 256 instead of 448.
        nvfp4_4over6_err_mode: 'MAE' or 'MSE', the error that selects the better scale.
        fp4_format: must be E2M1.
        fp8_format: must be E4M3, the format of the scale bytes.
        fp8_dpa: as for Float8CurrentScaling.
        fp8_mha: as for Float8CurrentScaling.
        backward_override: as for Float8CurrentScaling.

    Raises:
        TypeError: for an unknown field.
        ValueError: for a value that a field does not take, and if row_scaled_activation or 4over6 of activations
            is without disable_rht.
        NotImplementedError: if fp8_dpa or fp8_mha is True.
    """

    disable_rht: bool = False
    disable_stochastic_rounding: bool = False
    disable_2d_quantization: bool = False
    row_scaled_activation: bool = False
    nvfp4_4over6: str = "none"
    nvfp4_4over6_e4m3_use_256: str = "all"
    nvfp4_4over6_err_mode: str = "MAE"
    fp4_format: Format = Format.E2M1
    fp8_format: Format = Format.E4M3
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None

    fp4_quant_fwd_inp = operand_params("x")
    fp4_quant_fwd_weight = operand_params("w")
    fp4_quant_bwd_grad = operand_params("dy")

    def _check(self) -> None:
        for name in ("disable_rht", "disable_stochastic_rounding", "disable_2d_quantization", "row_scaled_activation"):
            one_of(self, name, False, True)
        for name in ("nvfp4_4over6", "nvfp4_4over6_e4m3_use_256"):
            one_of(self, name, "none", "weights", "activations", "all")
        one_of(self, "nvfp4_4over6_err_mode", "MAE", "MSE")
        one_of(self, "fp4_format", Format.E2M1)
        one_of(self, "fp8_format", Format.E4M3)
        check_shared_fields(self)
        four_over_six = self.nvfp4_4over6 in ("activations", "all")
        if self.row_scaled_activation and not self.disable_rht:
            raise ValueError(
                "NVFP4BlockScaling: row_scaled_activation=True needs disable_rht=True: the amaxes of rows are those of "
                "the untransformed tensor. Set disable_rht=True"
            )
        if four_over_six and not self.disable_rht:
            raise ValueError(
                f"NVFP4BlockScaling: nvfp4_4over6={self.nvfp4_4over6!r} needs disable_rht=True: 4over6 is not defined "
                "on transformed activations. Set disable_rht=True, or nvfp4_4over6='weights'"
            )

    def _four_over_six(self, operand: str) -> tuple[str, str]:
        if self.nvfp4_4over6 not in (operand, "all"):
            return "", ""
        return f"4over6={self.nvfp4_4over6_err_mode.lower()}", (
            "256" if self.nvfp4_4over6_e4m3_use_256 in (operand, "all") else ""
        )

    def _specs(self) -> LinearSpec:
        rht = "" if self.disable_rht else "rht"
        row_scaled = "row_scaled" if self.row_scaled_activation else ""
        x = spec("nvfp4", row_scaled, rht, *self._four_over_six("activations"))
        w = spec("nvfp4", "" if self.disable_2d_quantization else "16x16", *self._four_over_six("weights"))
        dy = spec("nvfp4", rht, "" if self.disable_stochastic_rounding else "sr")
        return LinearSpec(x, w, dy)

    @classmethod
    def nvfp4(cls) -> bool:
        return True
