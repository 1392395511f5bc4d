"""The specs of a Linear's three matmuls, as a value."""

from dataclasses import dataclass, field

from torch.compiler import is_dynamo_compiling

#: The text of a recipe that quantizes nothing, for kernels that give a row the bits that it has alone.
BATCH_INVARIANT = "kernels=batch_invariant"


def high_precision(batch_invariant: bool) -> str:
    """The text of a recipe that quantizes nothing."""
    return BATCH_INVARIANT if batch_invariant else ""


@dataclass(frozen=True)
class LinearSpec:
    """How the operands of a Linear's matmuls are quantized (numerics.md 6.1, 6.8, 6.9).

    x, w, dy: texts of specs. dx: the spec to which the gradient of x is rounded, or "". backward: "" if backward
    multiplies codes of forward's operands, "requantized" if it quantizes the saved x itself, "dequantized" if it
    multiplies decoded values, "high_precision" if it multiplies x and w themselves. kernels: "batch_invariant" if only
    kernels may be taken that give a token the bits that it has alone, or "".
    saves_x: whether backward starts from x itself, so that codes of x alone are not enough.
    text: "x=SPEC,w=SPEC,dy=SPEC[,dx=SPEC][,backward=...][,kernels=...]", the argument `recipe` of the operators.
    """

    x: str
    w: str
    dy: str
    dx: str = ""
    backward: str = ""
    kernels: str = ""
    saves_x: bool = field(init=False, compare=False, repr=False)
    text: str = field(init=False, compare=False)
    #: Results of of_w(), because layers with kept codes ask for one in each call.
    _of_w: "dict[str, LinearSpec]" = field(init=False, compare=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        dx = f",dx={self.dx}" if self.dx else ""
        backward = f",backward={self.backward}" if self.backward else ""
        kernels = f",kernels={self.kernels}" if self.kernels else ""
        object.__setattr__(self, "saves_x", self.backward in ("requantized", "high_precision"))
        object.__setattr__(self, "text", f"x={self.x},w={self.w},dy={self.dy}{dx}{backward}{kernels}")

    @classmethod
    def parse(cls, text: str) -> "LinearSpec":
        """The value of a text that is known to be one."""
        return cls(**dict([part.split("=", 1) for part in text.split(",")]))

    def of_x(self, x: str) -> "LinearSpec":
        """The same for an x that is quantized under another spec."""
        return self if x == self.x else LinearSpec(x, self.w, self.dy, self.dx, self.backward, self.kernels)

    def of_w(self, w: str) -> "LinearSpec":
        """The same for a weight whose codes are stored under the spec `w`: the own one, or its interleaved form."""
        if w == self.w:
            return self
        if is_dynamo_compiling():  # a graph would guard on what the dict holds
            return LinearSpec(self.x, w, self.dy, self.dx, self.backward, self.kernels)
        if w not in self._of_w:
            self._of_w[w] = LinearSpec(self.x, w, self.dy, self.dx, self.backward, self.kernels)
        return self._of_w[w]


def specs_of_text(text: str) -> LinearSpec | None:
    """The specs of the argument `recipe` of an operator; None for one of high_precision()."""
    return None if text in (high_precision(False), high_precision(True)) else LinearSpec.parse(text)
