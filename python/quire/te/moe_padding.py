"""TransformerEngine's modules that pad each expert's rows. quire's products need no padding: these are for scripts that
expect it."""

from collections.abc import Sequence

import torch

from quire.checks import check_type, check_type_or_none
from quire.moe import primitives
from quire.moe.permutation import permute_any
from quire.recipe import Recipe
from quire.te.common.recipe import Recipe as SettableRecipe
from quire.te.global_state import FP8GlobalStateManager

Splits = Sequence[int] | torch.Tensor


def get_align_size_for_quantization(recipe: Recipe | SettableRecipe) -> int:
    """The multiple that TransformerEngine's kernels need each expert's number of rows to be under a recipe. quire's
    products take any number. Of a CustomRecipe it is what its quantization_alignment says.

    Raises TypeError if recipe is no recipe.
    """
    if not isinstance(recipe, Recipe | SettableRecipe):
        raise TypeError(
            "quire.te.get_align_size_for_quantization: recipe must be a recipe, such as MXFP8BlockScaling(), got "
            f"{recipe!r}"
        )
    if recipe.custom():
        return recipe.quantization_alignment
    return 32 if recipe.mxfp8() else 128 if recipe.nvfp4() else 16


class _Padding(torch.nn.Module):
    def __init__(self, num_gemms: int, align_size: int | None = None) -> None:
        super().__init__()
        what = f"quire.{type(self).__name__}"
        check_type(what, int, num_gemms=num_gemms)
        check_type_or_none(what, int, align_size=align_size)
        if align_size is not None and align_size < 1:
            raise ValueError(f"{what}: align_size must be at least 1, or None for that of the recipe, got {align_size}")
        self.num_gemms = num_gemms
        self.given_align_size = align_size

    @property
    def align_size(self) -> int:
        """What the module was given, or what TransformerEngine's kernels need of the active recipe."""
        if self.given_align_size is not None:
            return self.given_align_size
        return get_align_size_for_quantization(FP8GlobalStateManager.get_fp8_recipe())

    def check(self, m_splits: Splits) -> None:
        if len(m_splits) != self.num_gemms:
            raise ValueError(
                f"quire.{type(self).__name__}: m_splits must have num_gemms = {self.num_gemms} sizes, "
                f"got {len(m_splits)}"
            )

    def padded(self, m_splits: Splits) -> Splits:
        align = self.align_size
        if isinstance(m_splits, torch.Tensor):
            return (m_splits + align - 1) // align * align
        return [-(-size // align) * align for size in m_splits]

    def row_map(self, m_splits: Splits, rows: int, device: torch.device) -> torch.Tensor:
        sizes = (
            m_splits if isinstance(m_splits, torch.Tensor) else torch.tensor(m_splits, dtype=torch.int64, device=device)
        )
        return primitives.chunk_rows(sizes, None, self.align_size, rows)

    def extra_repr(self) -> str:
        return f"num_gemms={self.num_gemms}, align_size={self.given_align_size}"


class Fp8Padding(_Padding):
    """Rows of each expert, padded by zeros to a multiple of align_size (by default 32 under MXFP8, 128 under NVFP4 and
    custom recipes, 16 under others)."""

    def forward(self, inp: torch.Tensor, m_splits: Splits) -> tuple[torch.Tensor, Splits]:
        """(padded rows, m_splits with padding) of inp [*, K], whose first m_splits[0] rows are the first expert's.

        m_splits a list: as many rows as the padded splits have. A tensor, which stays on its device: as many as there
        can be, rows + num_gemms * (align_size - 1), those that nothing fills are 0.
        """
        self.check(m_splits)
        inp = inp.reshape(-1, inp.shape[-1]) if inp.dim() != 2 else inp
        padded, rows = self.padded(m_splits), inp.shape[0]
        if isinstance(m_splits, torch.Tensor):
            bound = rows + self.num_gemms * (self.align_size - 1)
        elif list(m_splits) == padded:
            return inp, m_splits
        else:
            bound = sum(padded)
        return permute_any(inp, self.row_map(m_splits, rows, inp.device), bound), padded


class Fp8Unpadding(_Padding):
    """Fp8Padding undone."""

    def forward(self, inp: torch.Tensor, m_splits: Splits, *, num_out_tokens: int | None = None) -> torch.Tensor:
        """The rows that Fp8Padding of the same m_splits (without padding) took, of padded rows [*, K].

        num_out_tokens: how many there were. Needed where m_splits is a tensor, whose sum a graph cannot wait for.
        """
        self.check(m_splits)
        inp = inp.reshape(-1, inp.shape[-1]) if inp.dim() != 2 else inp
        if isinstance(m_splits, torch.Tensor):
            if num_out_tokens is None:
                raise TypeError(
                    "quire.te.Fp8Unpadding: the number of rows is not known where m_splits is a tensor; pass "
                    "num_out_tokens=, the number of rows that were padded"
                )
        elif list(m_splits) == self.padded(m_splits):
            return inp
        else:
            num_out_tokens = sum(m_splits)
        return primitives.unpermute_rows(inp, self.row_map(m_splits, num_out_tokens, inp.device))
