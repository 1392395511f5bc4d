"""FP8 with one scale per tensor, from the tensor itself or from earlier steps."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from quire.recipe.base import (
    Format,
    MMParams,
    Recipe,
    check_fp8_format,
    check_products,
    check_shared_fields,
    fast,
    gradient_element,
    one_of,
    operand_params,
    recipe_class,
    spec,
    split,
    whole_number,
)
from quire.recipe.linear_spec import LinearSpec


@recipe_class
@dataclass(frozen=True)
class Float8CurrentScaling(Recipe):
    """FP8 with one float32 scale per tensor, from the tensor's own amax (numerics.md 2).

    Args:
        use_power_2_scales: truncate scales to powers of two, for all three operands.
        fp8_format: HYBRID (gradients E5M2) or E4M3.
        fp8_gemm_fprop: the precision of sums (MMParams), without an effect.
        fp8_gemm_dgrad: as fp8_gemm_fprop.
        fp8_gemm_wgrad: as fp8_gemm_fprop.
        fp8_dpa: must be False: quire does not quantize attention.
        fp8_mha: must be False: quire does not quantize attention.
        backward_override: how backward multiplies: None: with codes. "dequantized": with the decoded operands of the
            forward pass. "high_precision": with the operands before they were quantized.

    Raises:
        TypeError: for an unknown field, and for a value of fp8_gemm_* that is no MMParams.
        ValueError: for a value that a field does not take.
        NotImplementedError: if fp8_dpa or fp8_mha is True.
    """

    use_power_2_scales: bool = False
    fp8_format: Format = Format.HYBRID
    fp8_gemm_fprop: MMParams = field(default_factory=fast)
    fp8_gemm_dgrad: MMParams = field(default_factory=split)
    fp8_gemm_wgrad: MMParams = field(default_factory=split)
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None

    fp8_quant_fwd_inp = operand_params("x")
    fp8_quant_fwd_weight = operand_params("w")
    fp8_quant_bwd_grad = operand_params("dy")

    def _check(self) -> None:
        one_of(self, "use_power_2_scales", False, True)
        check_fp8_format(self)
        check_products(self, split=False)
        check_shared_fields(self)

    def _specs(self) -> LinearSpec:
        pow2 = "pow2" if self.use_power_2_scales else ""
        forward = spec("fp8_tensor", pow2)
        return LinearSpec(forward, forward, spec("fp8_tensor", gradient_element(self), pow2))

    @classmethod
    def float8_current_scaling(cls) -> bool:
        return True

    @classmethod
    def float8_per_tensor_scaling(cls) -> bool:
        return True


@recipe_class
@dataclass(frozen=True)
class DelayedScaling(Recipe):
    """FP8 with one float32 scale per tensor, from the amaxes of earlier steps (numerics.md 1.4-1.7).

    Args:
        margin: the scale leaves a factor of 2^margin between the amax and the largest value of the format. From -255 to
            255, unless the largest value times 2^-margin is 0 in float32, as it is from 159 on. Under a large one,
            a tensor whose amax is above about 2^(136 - margin) becomes NaN, since the reciprocal of its scale leaves
            float32.
        fp8_format: HYBRID (gradients E5M2) or E4M3.
        amax_history_len: the number of steps in the history. When it changes, a layer's history is cut or padded.
        amax_compute_algo: "max" of the history, "most_recent" step, or a function: history [length, slots] -> amax
            [slots].
        scaling_factor_compute_algo: None, or a function (amax, old scale, largest value, recipe) -> scale. If either is
            a function, states change by the formula that numerics.md 1.6 has for functions.
        reduce_amax: with torch.distributed, all ranks use the largest amax of all ranks; amax_reduction_group of
            autocast restricts this to a process group.
        fp8_dpa: as for Float8CurrentScaling.
        fp8_mha: as for Float8CurrentScaling.
        backward_override: must be None.

    Raises:
        TypeError: for an unknown field, and for a scaling_factor_compute_algo that is no function.
        ValueError: for a value that a field does not take.
        NotImplementedError: if fp8_dpa or fp8_mha is True.
    """

    #: A subclass may have fewer.
    delayed_operands: ClassVar[tuple[str, ...]] = ("x", "w", "dy")

    margin: int = 0
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: str | Callable[[torch.Tensor], torch.Tensor] = "max"
    scaling_factor_compute_algo: Callable[..., torch.Tensor] | None = None
    reduce_amax: bool = True
    fp8_dpa: bool = False
    fp8_mha: bool = False
    backward_override: str | None = None

    def _check(self) -> None:
        check_fp8_format(self)
        whole_number(self, "margin", -255, 255)
        whole_number(self, "amax_history_len", 1, 2**31 - 1)
        if not callable(self.amax_compute_algo):
            one_of(self, "amax_compute_algo", "max", "most_recent")
        if self.scaling_factor_compute_algo is not None and not callable(self.scaling_factor_compute_algo):
            raise TypeError(
                "DelayedScaling: scaling_factor_compute_algo must be None or a function (amax, scale, largest, recipe) "
                f"-> scale; got {self.scaling_factor_compute_algo!r}"
            )
        one_of(self, "reduce_amax", False, True)
        check_shared_fields(self)
        largest = self.fp8_format.value.max_fwd
        # What is at most half of the least float32 above 0 is rounded to 0. Functions can compute in another way.
        if not self.unfused and largest * 2.0**-self.margin <= 2.0**-150:
            raise ValueError(
                f"DelayedScaling: margin={self.margin} makes every scale 0 and every result NaN: {largest:g} times "
                "2^-margin is 0 in float32. Pass a smaller one, such as 0"
            )

    def _specs(self) -> LinearSpec:
        forward = spec("fp8_tensor")
        return LinearSpec(forward, forward, spec("fp8_tensor", gradient_element(self)))

    @classmethod
    def delayed(cls) -> bool:
        return True

    @classmethod
    def float8_per_tensor_scaling(cls) -> bool:
        return True

    @property
    def unfused(self) -> bool:
        """Whether the update uses a user function."""
        return callable(self.amax_compute_algo) or self.scaling_factor_compute_algo is not None

    def rule(self) -> str:
        """The parameters of the update as text: recipes with equal text share the state of a layer."""
        algorithms = [_function_name(f) for f in (self.amax_compute_algo, self.scaling_factor_compute_algo)]
        fields = (self.margin, self.fp8_format.name, self.amax_history_len, *algorithms, self.reduce_amax)
        return ",".join([str(value) for value in fields])


def _function_name(value: object) -> str:
    if not callable(value):
        return str(value)
    return f"{value.__module__}.{value.__qualname__}" if hasattr(value, "__qualname__") else repr(value)
