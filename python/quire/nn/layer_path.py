"""Where a layer is in a model, for errors."""

import sys
from collections.abc import Iterator

import torch

from quire.nn.product_module import ProductModule


def name_layer(error: Exception, layer: torch.nn.Module) -> None:
    """Adds a note to an error that left layer.forward: the layer, and its path in the outermost module that is being
    called. Costs nothing where there is no error. While a function is compiled it does nothing: Dynamo says itself
    which line of the model it is at."""
    if torch.compiler.is_compiling() or any(note.startswith("In the layer") for note in _notes(error)):
        return
    where = ""
    for module in _callers(layer):
        path = next((name for name, child in module.named_modules() if child is layer), None)
        if path is not None:
            where = f"{path!r} of {type(module).__name__}: "
    error.add_note(f"In the layer {where}{layer._get_name()}({layer.extra_repr()}).")
    if any(parameter.is_meta for parameter in layer.parameters()):
        error.add_note(
            "Its parameters are on the meta device and have no values: call to_empty(device=...) on the model, then "
            "load_state_dict() or reset_parameters()."
        )
    elif "static scale" in str(error) and "quire.calibrate" not in str(error):
        error.add_note(
            "The static scale of its inputs comes from sample data: quire.calibrate(model, batches).apply(model), or "
            "quire.quantize_model."
        )


def path_of(layer: ProductModule) -> str:
    """The path of a layer in the outermost module that is being called, as it was in the first call of the layer. To
    be called within its forward. All layers of that module get their path_in_model at once."""
    if layer.path_in_model is None:
        layer.path_in_model = ""
        *_, outermost = layer, *_callers(layer)
        for path, child in outermost.named_modules():
            if child is layer or (isinstance(child, ProductModule) and child.path_in_model is None):
                names = [name for name in path.split(".") if name != "_orig_mod"]  # torch.compile's wrapper
                child.path_in_model = ".".join(names)
    return layer.path_in_model


def _notes(error: Exception) -> list[str]:
    return getattr(error, "__notes__", [])


def _callers(layer: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """The modules whose methods are being called, the innermost first."""
    frame = sys._getframe(1)
    while frame is not None:
        module = frame.f_locals.get("self")
        if isinstance(module, torch.nn.Module) and module is not layer:
            yield module
        frame = frame.f_back
