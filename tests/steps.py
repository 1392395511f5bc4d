"""Steps of training, and how their results are compared: bit for bit, and a layer with the product of its codes; and
a model of torch.nn.Linear layers to convert."""

import contextlib
import functools
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch

import quire

#: Half the step of E4M3 relative to a value. Below the normal numbers half a step is 2^-10 times the scale of the
#: block, which is at most 2 amax / 448 (a power of two): less than 2^-17 amax.
HALF_STEP_OF_E4M3 = 2.0**-4 + 2.0**-17
#: NVFP4: half the widest step of E2M1 is 1 scale of the block. This scale is amax / 6, rounded to E4M3.
HALF_STEP_OF_NVFP4 = (1 + 2.0**-4) / 6
#: How many elements along a line share a scale.
BLOCKS = {"nvfp4": 16, "mxfp8": 32, "fp8_block": 128}


@dataclass(frozen=True)
class Same:
    """What same() says; pytest shows it where an assertion of it fails."""

    difference: str

    def __bool__(self) -> bool:
        return not self.difference

    def __repr__(self) -> str:
        return self.difference or "the same bits"


def same(found: object, expected: object) -> Same:
    """Whether both have the same bits, wherever they lie: tensors, of quantized ones all codes and scales, None, other
    values, and lists and mappings of these. Unlike torch.equal, it tells -0 from 0, and NaN is the same as itself."""
    return Same(_difference(found, expected, ""))


def _difference(found: object, expected: object, where: str) -> str:
    if isinstance(expected, quire.QuantizedTensor | quire.QuantizedActivation):
        kinds = quire.QuantizedTensor | quire.QuantizedActivation
        if not isinstance(found, kinds) or (found.spec, found.shape) != (expected.spec, expected.shape):
            return f"{where} is {found!r}, not {expected!r}"
        names = quire.tensor.BUFFER_NAMES
        return _difference(*({name: getattr(t, name) for name in names} for t in (found, expected)), where)
    if isinstance(expected, torch.Tensor):
        return _difference_of_tensors(found, expected, where)
    if isinstance(expected, Mapping):
        if found.keys() != expected.keys():
            return f"{where} has {sorted(map(str, found.keys() ^ expected.keys()))} on one side only"
        return next(filter(None, (_difference(found[key], expected[key], f"{where}[{key!r}]") for key in expected)), "")
    if isinstance(expected, Iterable) and not isinstance(expected, str | bytes):
        found, expected = list(found), list(expected)
        if len(found) != len(expected):
            return f"{where} has {len(found)} parts, not {len(expected)}"
        parts = (_difference(*both, f"{where}[{i}]") for i, both in enumerate(zip(found, expected, strict=True)))
        return next(filter(None, parts), "")
    return "" if found is expected or found == expected else f"{where} is {found!r}, not {expected!r}"


def _difference_of_tensors(found: object, expected: torch.Tensor, where: str) -> str:
    if not isinstance(found, torch.Tensor):
        return f"{where} is {found!r}, not a tensor"
    if (found.dtype, found.shape) != (expected.dtype, expected.shape):
        return f"{where} is {found.dtype} {[*found.shape]}, not {expected.dtype} {[*expected.shape]}"
    bits = [_bytes(t) for t in (found, expected)]
    count = int((bits[0] != bits[1]).any(1).sum())
    return f"{where} differs in {count} of {expected.numel()} elements" if count else ""


def _bytes(t: torch.Tensor) -> torch.Tensor:
    """[elements, bytes of each]."""
    flat = t.detach().cpu().reshape(-1).clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8).view(flat.numel(), flat.itemsize)


def assert_rounded(found: torch.Tensor, exact: torch.Tensor, magnitude: torch.Tensor | float, roundings: float) -> None:
    """Asserts that found differs from the value in float64 by no more than what rounding explains.

    Args:
        exact: float64, of the same inputs.
        magnitude: what the same formula gives in float64 with the absolute value of each term: the sum of |x * w| for
            a sum of x * w. Each rounding on the way to a result is one of a part of it, so at most 2^-24 times this.
        roundings: to float32, how many are on the longest way from an input to the result: for a sum of n products in
            any order n, and one more for each factor or addend. At the end found is rounded once to its own dtype.
    """
    unit = torch.finfo(found.dtype).eps / 2 if found.dtype != torch.float32 else 0.0
    exact, magnitude = (torch.as_tensor(t).detach().cpu() for t in (exact, magnitude))
    error = (found.detach().cpu().double() - exact).abs()
    bound = roundings * 2.0**-24 * (1 + unit) * magnitude + unit * exact.abs()
    worst = float((error - bound).max()) if error.numel() else 0.0
    assert error.shape == exact.shape and worst <= 0, (
        f"an error is {worst} beyond its bound; the largest: {error.max()}"
    )


class Block(torch.nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.up = torch.nn.Linear(256, 512, **options)
        self.down = torch.nn.Linear(512, 256, bias=False, **options)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


def blocks(count=2, **options):
    torch.manual_seed(3)
    return torch.nn.Sequential(*(Block(**options) for _ in range(count)))


def call(layer, x, **options):
    """y of x [*, 64]; of groups the first has one row and the last the rest."""
    if not isinstance(layer, quire.GroupedLinear):
        return layer(x, **options)
    rows = x.shape[0]
    return layer(x, [1, *[0] * (layer.num_gemms - 2), rows - 1], **options)


def _dy(y):
    return torch.randn(y.shape, generator=torch.Generator().manual_seed(5)).to(y)


def step(
    layer, x, recipe, *, function=None, dy=_dy, dx=True, backward=contextlib.nullcontext, backward_dw=True, **options
):
    """One step of training: y, the gradient of x unless dx is False, and that of every parameter.

    function: what is called, if not the layer. dy(y): the gradient of y. backward(): what the backward pass runs
    within. backward_dw: whether layers that delay the gradients of their weights compute them too. options: of the
    call.
    """
    layer.zero_grad()
    x = x.detach().requires_grad_(dx)
    with quire.autocast(recipe is not None, recipe=recipe):
        y = (layer if function is None else function)(x, **options)
    with backward():
        y.backward(dy(y))
    for module in layer.modules():
        if backward_dw and getattr(module, "delay_wgrad_compute", False):
            module.backward_dw()
    return [y.detach(), x.grad, *(parameter.grad for parameter in layer.parameters())]


def train(layer, recipe, steps=3, function=call):
    """The results of some steps, with inputs [24, 64] that grow. function: called with the layer and x."""
    results = []
    for index in range(steps):
        generator = torch.Generator().manual_seed(index)
        x = torch.randn(24, 64, generator=generator) * 4.0**index
        results += step(
            layer,
            x,
            recipe,
            function=functools.partial(function, layer),
            dy=lambda y, generator=generator: torch.randn(y.shape, generator=generator),
        )
    return results


def decoded(t: torch.Tensor, spec: object, scale: torch.Tensor | None = None) -> torch.Tensor:
    """The values of t under spec, or of the codes that it has, in float64."""
    t = t.detach()
    if not isinstance(t, quire.QuantizedTensor):
        if str(spec) == "none":
            return t.double()
        t = quire.quantize(t, spec, scale=scale)
    return t.dequantize(torch.float32).double()


def assert_of_codes(y: torch.Tensor, layer: torch.nn.Module, x: torch.Tensor, recipe=None) -> None:
    """y [*, N] is x w^T + bias of the operands' decoded values within the bound of numerics.md 7.5, whatever the order
    of the sums. recipe: if it is not the layer's own."""
    recipe = layer.recipe if recipe is None else recipe
    x_spec, w_spec = ("none", "none") if recipe is None else (recipe.input_spec, recipe.weight_spec)
    scale = layer.input_scale if ":given" in str(x_spec) else None
    a, b = decoded(x, x_spec, scale), decoded(layer.weight, w_spec)
    if str(x_spec) == "none":  # then the product is PyTorch's, of weights decoded in the dtype of x
        b = b.to(x.dtype).double()
    bias = torch.zeros(len(b), dtype=torch.float64) if layer.bias is None else layer.bias.detach().double()
    exact = a @ b.T + bias
    bound = (b.shape[1] + 12) * 2.0**-24 * (a.abs() @ b.abs().T + bias.abs())
    bound += torch.finfo(y.dtype).eps / 2 * (exact.abs() + bound)
    error = (y.detach().double() - exact).abs()
    assert bool((error <= bound).all()), f"{float((error / bound).max())} times the bound"


@contextlib.contextmanager
def products_checked(model: torch.nn.Module) -> Iterator[set[str]]:
    """Each quire.Linear that runs here must give the product of its codes (assert_of_codes), for the inputs that it has
    within the model. Yields a set that gets the layers' names. A bound for the outputs of a whole model would be a
    guess: every layer amplifies the rounding of the layers before it."""
    checked: set[str] = set()

    def check(name: str):
        def hook(layer, arguments, y):
            assert_of_codes(y, layer, arguments[0])
            checked.add(name)

        return hook

    layers = [(name, layer) for name, layer in model.named_modules() if type(layer) is quire.Linear]
    hooks = [layer.register_forward_hook(check(name)) for name, layer in layers]
    try:
        yield checked
    finally:
        for hook in hooks:
            hook.remove()


def assert_nearest(found: quire.QuantizedTensor, values: torch.Tensor) -> None:
    """The codes of a matrix that was rounded to nearest stand for values by at most half a step of their format from
    `values` [N, K]."""
    size, square = BLOCKS[found.spec.family], re.search(r":\d+x\d+", found.spec.text) is not None
    lines = size if square else 1
    values, decoded_values = values.double(), decoded(found, found.spec)
    padded = torch.nn.functional.pad(values.abs(), (0, -values.shape[1] % size, 0, -len(values) % lines))
    amax = padded.unflatten(0, (-1, lines)).unflatten(-1, (-1, size)).amax(dim=(1, 3))
    amax = amax.repeat_interleave(lines, 0).repeat_interleave(size, 1)[: len(values), : values.shape[1]]
    if found.spec.family == "nvfp4":  # a scale below the normal numbers of E4M3 is off by 2^-10 of the tensor's unit
        bound = HALF_STEP_OF_NVFP4 * amax + 2.0**-10 * values.abs().max() / 448
    else:
        bound = HALF_STEP_OF_E4M3 * amax
    assert bool(((decoded_values - values).abs() <= bound * (1 + 2.0**-20)).all())
