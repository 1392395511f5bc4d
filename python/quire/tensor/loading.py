"""State dicts with quantized weights that are loaded into models whose weights are plain."""

import sys
import threading
import warnings

#: Arguments of quire.convert that select the layers which have codes in a state dict.
SAME_LAYERS = (
    "min_features=1, filter=lambda layer, name: any(isinstance(state_dict.get(f'{name}.{own}'.lstrip('.')), "
    "quire.QuantizedTensor) for own, _ in layer.named_parameters())"
)
#: Whether it was told.
TOLD = threading.Event()


def tell_decoding(spec: str) -> None:
    """Warns, once, where PyTorch loads codes under that spec into a plain tensor by copy_."""
    level = 0 if TOLD.is_set() else _level_of_caller()
    if level:
        TOLD.set()
        warnings.warn(
            f"load_state_dict: a weight that is quantized as {spec} is decoded, because the weight of the model is "
            "plain: the model has the errors of the codes and needs the memory of high precision. To load the codes, "
            "give the model the layers of the saved one first: quire.convert(model, recipe, for_inference=True, "
            f"tokens=None, {SAME_LAYERS}), and then load with assign=True",
            stacklevel=level,
        )


def _level_of_caller() -> int:
    """The stacklevel of the code that called PyTorch to load a state; 0 if PyTorch is not loading one."""
    level, loading, frame = 1, False, sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        loading = loading or frame.f_code.co_name == "_load_from_state_dict"
        loading = loading or module.startswith("torch.distributed.checkpoint.")
        if loading and not module.startswith(("torch.", "quire.")):
            return level
        level, frame = level + 1, frame.f_back
    return level - 1 if loading else 0
