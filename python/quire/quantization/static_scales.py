"""Static scales of inputs in layers: what a layer's recipe wants of the largest magnitude that was measured."""

from collections.abc import Mapping

import torch

from quire.functional import quantize
from quire.loading.float_mode import subnormals_kept
from quire.nn.own_context import own_context
from quire.nn.product_module import ProductModule
from quire.quantization.inputs import Matmul, matmuls, measured, uncompiled
from quire.tensor import QuantizedTensor, QuantSpec

MISSING = ("raise", "max")


def amax_of_one(spec: QuantSpec) -> int:
    """The amax that a static scale of 1 stands for: the largest code times the largest block scale."""
    q = quantize(torch.ones(1, 1, dtype=torch.float32, device="cpu"), spec, columnwise=False)
    if q.rowwise_scale.dtype == torch.float32:
        return round(1 / float(q.rowwise_scale))
    # Under an amax of 1: the value of a code for 1, whose index is 2, in a block with a scale of 1, whose byte is 0x38.
    buffers = q.buffers() | {"rowwise_data": torch.full_like(q.rowwise_data, 2)}
    buffers["rowwise_scale"] = torch.full_like(q.rowwise_scale, 0x38)
    return round(1 / float(QuantizedTensor.from_buffers(buffers, spec, (1, 1)).dequantize()))


@own_context()
@subnormals_kept()
def static_scale(amax: float, spec: str) -> torch.Tensor:
    """float32 [1], the scale that a layer with an input under `spec`, which has the option `given`, has for an amax."""
    largest, words = amax_of_one(QuantSpec(measured(spec))), spec.split(":")
    value = torch.tensor([amax], dtype=torch.float32, device="cpu")
    if "global=div" in words:
        return torch.full_like(value, largest) / value  # PyTorch would round a number's quotient twice
    return value / largest if "global=mul" in words or words[0] == "fp8_tensor" else value


def apply_amaxes(what: str, model: torch.nn.Module, amaxes: Mapping[str, float], missing: str) -> None:
    """CalibrationReport.apply(). amaxes: by the names of calibrate()'s report."""
    names: dict[torch.nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, ProductModule) and module.recipe is not None and module.recipe.static_input:
            names.setdefault(module, []).append(uncompiled(name))
    if not names:
        raise ValueError(
            f"{what}: no layer of {type(model).__name__} has a recipe with a static scale of x; give it one, such as "
            "quire.quantize_model(model, 'x=fp8_tensor:given,w=fp8_row,dy=mxfp8')"
        )
    specs = {layer: layer.recipe.input_spec for layer in names}
    scales = scales_of(what, names, specs, amaxes, missing)
    if any(buffer(matmul).is_meta for matmul in scales):
        raise ValueError(f"{what}: the model is on the meta device and keeps no values; load its weights first")
    give(scales)


def scales_of(
    what: str,
    names: Mapping[torch.nn.Module, list[str]],
    specs: Mapping[torch.nn.Module, str],
    amaxes: Mapping[str, float],
    missing: str,
) -> dict[Matmul, torch.Tensor]:
    """The static scales [groups] of each matmul of layers. names, specs: of each layer all names in the model, and the
    spec of its inputs. amaxes: by the labels of groups. Raises ValueError if one is missing."""
    check_missing(what, missing)
    found = {matmul: _of_groups(matmul, its, amaxes) for layer, its in names.items() for matmul in matmuls(layer)}
    if absent := _fill(found, missing):
        remedy = "" if missing == "max" else ", or with missing_input_scale='max' use the largest of the other groups"
        raise ValueError(
            f"{what}: no amax was measured for {', '.join(absent)}; calibrate with batches that reach them, keep these "
            f"layers out of the recipe by filter={remedy}"
        )
    return {
        matmul: torch.cat([static_scale(amax, specs[matmul.layer]) for amax in each.values()])
        for matmul, each in found.items()
    }


def check_missing(what: str, missing: str) -> None:
    """Raises ValueError for an unknown value of missing_input_scale."""
    if missing not in MISSING:
        raise ValueError(f"{what}: missing_input_scale must be one of {', '.join(MISSING)}; got {missing!r}")


@own_context()
def give(scales: Mapping[Matmul, torch.Tensor]) -> None:
    """Writes the scales into layers whose recipe has them."""
    for matmul, scale in scales.items():
        buffer(matmul).copy_(scale)


def buffer(matmul: Matmul) -> torch.Tensor:
    """The static scales of a matmul, [groups], of a layer whose recipe has them."""
    return getattr(matmul.layer, matmul.layer.scale_name(matmul.weight_names()[0]))


def _of_groups(matmul: Matmul, names: list[str], amaxes: Mapping[str, float]) -> dict[str, float | None]:
    """Label of each group -> its amax, under that of the layer's names which was measured."""
    each = [{label: amaxes.get(label) for label in matmul.labels(name)} for name in names]
    return next((one for one in each if any(one.values())), each[0])


def _fill(found: Mapping[Matmul, dict[str, float | None]], missing: str) -> list[str]:
    """With "max", gives groups without an amax the largest of their layer. Returns the labels that have none."""
    for each in found.values() if missing == "max" else ():
        there = [amax for amax in each.values() if amax is not None]
        each |= {label: max(there) for label, amax in each.items() if amax is None and there}
    return [label for each in found.values() for label, amax in each.items() if amax is None]
