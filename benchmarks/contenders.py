"""Who is compared: Linear layers without bias, of quire and of others, with quantization of activations included.

A contender makes calls. `inference(x)` and `training(x)` take x [M, K] float32, and return a function that computes one
forward, or one forward and backward pass, with weights that are cold; None where it cannot.
"""

import importlib.util
import itertools
import logging
from collections.abc import Callable, Iterator

import torch

import ggml
import quire
from clock import cold, copies

RECIPES = {
    "fp8_current": quire.recipe.Float8CurrentScaling(),
    "fp8_block": quire.recipe.Float8BlockScaling(),
    "mxfp8": quire.recipe.MXFP8BlockScaling(),
    "nvfp4": quire.recipe.NVFP4BlockScaling(),
}
Calls = Callable[[], object] | None


class Contender:
    """name: in the table. weight_bytes: of one layer's weight, as inference reads it. dtype: of activations.
    arithmetic: the quickest that its formats allow. kernels(x, backward): which rows of quire's tables a call runs."""

    name: str
    weight_bytes: int
    dtype = torch.bfloat16
    arithmetic = "bfloat16"

    def inference(self, x: torch.Tensor) -> Calls:
        return None

    def training(self, x: torch.Tensor) -> Calls:
        return None

    def kernels(self, x: torch.Tensor, backward: bool) -> str:
        return ""


def training_call(layers: Iterator[torch.nn.Module], x: torch.Tensor) -> Callable[[], object]:
    x = x.clone().requires_grad_()
    dy = torch.randn_like(x[:, :1]).expand(len(x), next(layers).out_features).contiguous()

    def call() -> object:
        layer = next(layers)
        return torch.autograd.grad(layer(x), (x, layer.weight), dy)

    return call


def layer_of(weight: torch.Tensor, recipe: quire.recipe.Recipe | None = None) -> torch.nn.Linear:
    """A layer with that weight [N, K]; with a recipe, quire's."""
    n, k = weight.shape
    layer = torch.nn.Linear(k, n, bias=False, device="meta")
    if recipe is not None:
        layer = quire.convert(layer, recipe, min_features=0)
    layer.weight = torch.nn.Parameter(weight)
    return layer


def quantized(weight: torch.Tensor, recipe: quire.recipe.Recipe) -> quire.QuantizedTensor:
    """As inference reads it."""
    with torch.no_grad():
        return quire.quantize(weight, recipe.weight_spec)


class Torch(Contender):
    def __init__(self, weight: torch.Tensor, dtype: torch.dtype):
        self.arithmetic, self.dtype = str(dtype).removeprefix("torch."), dtype
        self.name = f"torch {self.arithmetic}"
        layer = layer_of(weight.to(dtype))
        self.weight_bytes = layer.weight.nbytes
        self._layers = cold(layer, self.weight_bytes)

    def inference(self, x: torch.Tensor) -> Calls:
        x = x.to(self.dtype)
        return torch.no_grad()(lambda: next(self._layers)(x))

    def training(self, x: torch.Tensor) -> Calls:
        return training_call(self._layers, x.to(self.dtype))


class Quire(Contender):
    """weights: in inference, "quantized" parameters, or "kept" codes beside the weight, which every call compares with
    it (quire.quantize_weights). Training quantizes the weight in every step."""

    def __init__(self, weight: torch.Tensor, recipe: quire.recipe.Recipe, *, name: str, weights: str):
        self.name = f"quire {name}"
        if recipe.nvfp4():
            self.arithmetic = "int8"
        weight = weight.to(self.dtype)
        self._training = cold(layer_of(weight, recipe), weight.nbytes)
        codes = quantized(weight, recipe)
        self.weight_bytes = sum(buffer.nbytes for buffer in codes.buffer_list() if buffer is not None)
        fast = layer_of(codes if weights == "quantized" else weight, recipe)
        quire.quantize_weights(fast) if weights == "kept" else quire.prepack_weights(fast)
        self._inference = cold(fast, self.weight_bytes)

    def inference(self, x: torch.Tensor) -> Calls:
        x = x.to(self.dtype)
        return torch.no_grad()(lambda: next(self._inference)(x))

    def training(self, x: torch.Tensor) -> Calls:
        return training_call(self._training, x.to(self.dtype))

    def kernels(self, x: torch.Tensor, backward: bool) -> str:
        with torch.set_grad_enabled(backward):
            found = quire.explain(next(self._training if backward else self._inference), x.to(self.dtype))
        return ", ".join(dict.fromkeys(str(step.kernel) for step in found.products))


class ScaledMM(Contender):
    """torch._scaled_mm with one scale a tensor; PyTorch quantizes x in three passes of its own."""

    name = "torch _scaled_mm"

    def __init__(self, weight: torch.Tensor):
        self._scale = weight.abs().max() / 448
        codes = (weight / self._scale).to(torch.float8_e4m3fn)
        self.weight_bytes = codes.nbytes
        self._codes = cold(codes, self.weight_bytes)

    def inference(self, x: torch.Tensor) -> Calls:
        x = x.to(self.dtype)

        @torch.no_grad()
        def call() -> object:
            scale = x.abs().max().float() / 448
            codes = (x / scale).to(torch.float8_e4m3fn)
            return torch._scaled_mm(codes, next(self._codes).t(), scale, self._scale, out_dtype=self.dtype)

        return call


class TorchAO(Contender):
    """torchao's MXFP8, which on CPUs multiplies what it has decoded, and its float8 training layer."""

    name = "torchao"

    def __init__(self, weight: torch.Tensor):
        logging.disable(logging.WARNING)  # of libraries for devices that are not here
        from torchao.float8 import convert_to_float8_training
        from torchao.prototype.mx_formats import MXDynamicActivationMXWeightConfig
        from torchao.quantization import quantize_
        from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

        logging.disable(logging.NOTSET)
        weight = weight.to(self.dtype)
        self.weight_bytes = weight.numel() * 33 // 32
        mx = torch.nn.Sequential(layer_of(weight))
        quantize_(mx, MXDynamicActivationMXWeightConfig(kernel_preference=KernelPreference.EMULATED))
        self._inference = itertools.cycle([mx])  # far from the memory's speed
        self._training = itertools.cycle([convert_to_float8_training(layer_of(weight))])

    def inference(self, x: torch.Tensor) -> Calls:
        x = x.to(self.dtype)
        return torch.no_grad()(lambda: next(self._inference)(x))

    def training(self, x: torch.Tensor) -> Calls:
        return training_call(self._training, x.to(self.dtype))


class Ggml(Contender):
    """ggml's 4-bit weights, times activations of 8 bits, which it quantizes in the call. Up to 128 rows: its kernels
    are dot products, and their time grows with M."""

    dtype = torch.float32
    arithmetic = "int8"

    def __init__(self, weight: torch.Tensor, kind: str):
        self.name = f"ggml {kind}"
        self._weights = ggml.Weights(weight, kind, torch.get_num_threads())
        self.weight_bytes = self._weights.nbytes
        self._copies = copies(self.weight_bytes)

    def inference(self, x: torch.Tensor) -> Calls:
        if len(x) > 128:
            return None
        products = itertools.cycle(self._weights.products(x, self._copies))
        return lambda: next(products)()


#: Peer -> what its sizes are multiples of.
MULTIPLES = {"torch _scaled_mm": 16, "torchao": 32, "ggml": 64}


def peers_that_lack(n: int, k: int) -> dict[str, str]:
    """Peer -> why it is not here, for weights [n, k]."""
    lack = {
        peer: f"its sizes are multiples of {multiple}, not {n} and {k}"
        for peer, multiple in MULTIPLES.items()
        if n % multiple or k % multiple
    }
    if importlib.util.find_spec("torchao") is None:
        lack["torchao"] = "not installed"
    if not ggml.library_folder():
        lack["ggml"] = "not built; ./dev bench ggml fetches and builds it"
    return lack


def make(weight: torch.Tensor, weights: str) -> list[Contender]:
    """All that are here, for a weight [N, K] float32; PyTorch's two first."""
    found: list[Contender] = [Torch(weight, torch.float32), Torch(weight, torch.bfloat16)]
    found += [Quire(weight, recipe, name=name, weights=weights) for name, recipe in RECIPES.items()]
    lack = peers_that_lack(*weight.shape)
    if "torch _scaled_mm" not in lack:
        found.append(ScaledMM(weight))
    if "torchao" not in lack:
        found.append(TorchAO(weight))
    if "ggml" not in lack:
        found += [Ggml(weight, kind) for kind in ggml.KINDS]
    return found
