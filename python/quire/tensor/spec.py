"""How a tensor is quantized, as a value."""

from dataclasses import dataclass

import torch

from quire.checks import describe
from quire.loading.deferred import assume_constant_result

#: Rows that share scales, or lie in one tile, by option of a spec.
TILES = {"128x128": 128, "32x32": 32, "16x16": 16, "swizzled": 128, "interleaved": 16}


@assume_constant_result  # a function from text to text is a constant while tracing
def _canonical(text: str) -> str:
    try:
        return torch.ops.quire.canonical_spec(text)
    except RuntimeError as error:
        raise ValueError(str(error)) from None


@assume_constant_result
def check_recipe(what: str, text: str) -> None:
    """Raises ValueError if specs do not fit their roles: "x=SPEC,w=SPEC,dy=SPEC" (docs/specs.md)."""
    try:
        torch.ops.quire.canonical_recipe(text)
    except RuntimeError as error:
        raise ValueError(f"{what}: {error}") from None


def check_parallel(what: str, text: str) -> None:
    """Raises ValueError for a text that does not say how a weight is sharded (quire.distributed.Parallel)."""
    try:
        torch.ops.quire.canonical_parallel(text)
    except RuntimeError as error:
        raise ValueError(f"{what}: {error}") from None


@dataclass(frozen=True)
class QuantSpec:
    """How a tensor is quantized, as text such as "nvfp4:rht:sr"; docs/specs.md has the grammar.

    Kept in canonical form, so that equal specs are equal values: QuantSpec("mxfp8") == QuantSpec("mxfp8").

    Args:
        text: the family and its options, such as "nvfp4:rht:sr".

    Raises:
        TypeError: for what is neither a text nor a QuantSpec.
        ValueError: for a wrong text. The error points at the wrong part and lists what is allowed there.
    """

    text: str

    def __post_init__(self) -> None:
        text = self.text.text if isinstance(self.text, QuantSpec) else self.text
        if not isinstance(text, str):
            raise TypeError(f"QuantSpec: {_expected(text)}")
        object.__setattr__(self, "text", _canonical(text))

    @property
    def family(self) -> str:
        """The first word: "fp8_tensor", "fp8_row", "fp8_block", "mxfp8", "mxfp4" or "nvfp4"."""
        return self.text.split(":")[0]

    @property
    def options(self) -> tuple[str, ...]:
        """The other words, in canonical order."""
        return tuple(self.text.split(":")[1:])

    @property
    def stochastic(self) -> bool:
        """Whether elements are rounded stochastically, so that quantizing needs a seed (numerics.md 5.6, 0.11)."""
        return "sr" in self.options

    @property
    def hadamard(self) -> bool:
        """Whether columnwise codes hold the tensor's Hadamard transform (numerics.md 5.3, 0.10)."""
        return any(option.split("=")[0] == "rht" for option in self.options)

    @property
    def scaled_by_amax(self) -> bool:
        """Whether the amax is a factor of values, as in nvfp4 (numerics.md 5.1). Other amaxes only show how scales were
        computed."""
        return self.family == "nvfp4"

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"QuantSpec({self.text!r})"


def as_spec(what: str, spec: QuantSpec | str) -> QuantSpec:
    """The value of an argument `spec`, wherever one is accepted. what: the operation, which errors name. Raises
    TypeError or ValueError as QuantSpec."""
    if isinstance(spec, QuantSpec):
        return spec
    if not isinstance(spec, str):
        raise TypeError(f"{what}: spec: {_expected(spec)}")
    try:
        return QuantSpec(spec)
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from None  # which begins with "spec:"


def _expected(got: object) -> str:
    return (
        f"expected a text such as 'nvfp4:rht:sr', got {describe(got)}; a recipe has one for each operand, such as "
        "recipe.input_spec"
    )
