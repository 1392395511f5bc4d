"""What every layer of quire has: its name in print(model) and in errors, initial values, the dtypes of its arguments,
and buffers that stay float32."""

import math
import sys
from collections.abc import Callable, Iterable, Iterator

import torch

from quire.checks import describe
from quire.distributed import check_ranks
from quire.distributed.parallel import Parallel
from quire.distributed.placements import is_dtensor, part_for
from quire.loading.deferred import assume_constant_result
from quire.loading.devices import check_device
from quire.tensor import QuantizedActivation

# A graph has a guard for each step of torch._C._is_any_autocast_enabled.
is_any_autocast_enabled = torch._C._is_any_autocast_enabled
_INPUTS = (torch.Tensor, QuantizedActivation)


# ------------------------------------------------------------ names


class ShownName(torch.nn.Module):
    """Shows quire's classes as "quire.Linear", so that they differ from those of torch.nn with the same name.

    A class that a program or another library derives from one of them keeps its own name. Nothing is found by this
    name.
    """

    #: The package that users import the class from.
    shown_in = "quire"

    def _get_name(self) -> str:
        cls = type(self)
        return f"{self.shown_in}.{cls.__name__}" if cls.__module__.startswith("quire.") else cls.__name__


def name_layer(error: Exception, layer: torch.nn.Module) -> None:
    """Adds a note to an error that left layer.forward: the layer, and its path in the outermost module that is being
    called. Costs nothing where there is no error. While a function is compiled it does nothing: Dynamo says itself
    which line of the model it is at."""
    # torch.utils.checkpoint raises an exception of its own to leave a recomputation, which is no error.
    leaves = type(error).__name__ == "_StopRecomputationError"
    if leaves or torch.compiler.is_compiling() or any(note.startswith("In the layer") for note in _notes(error)):
        return
    where = ""
    for module in _callers(layer):
        path = next((name for name, child in module.named_modules() if child is layer), None)
        if path is not None:
            where = f"{path!r} of {type(module).__name__}: "
    with torch.no_grad():  # it may compute parametrized weights, of which a checkpoint must see nothing
        shown = layer.extra_repr()
    error.add_note(f"In the layer {where}{layer._get_name()}({shown}).")
    if any(parameter.is_meta for parameter in layer.parameters()):
        error.add_note(
            "Its parameters are on the meta device and have no values: call to_empty(device=...) on the model, then "
            "load_state_dict() or reset_parameters()."
        )
    elif "static scale" in str(error) and "quire.calibrate" not in str(error):
        error.add_note(
            "The static scale of its inputs comes from sample data: quire.calibrate(model, batches, "
            "recipe).apply(model), or quire.quantize_model."
        )
    elif torch.jit.is_tracing():
        error.add_note("torch.jit cannot record all operators of quire: take torch.export.export.")


def path_of(layer: torch.nn.Module) -> str:
    """The path of a ProductModule in the outermost module that is being called, as it was in the first call of the
    layer. To be called within its forward. All of that module's layers get their path_in_model at once."""
    if layer.path_in_model is None:
        layer.path_in_model = ""
        *_, outermost = layer, *_callers(layer)
        for path, child in outermost.named_modules():
            if child is layer or getattr(child, "path_in_model", "") is None:
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


# ------------------------------------------------------------ construction


def check_factory(what: str, device: torch.device | str | int | None, **dtypes: object) -> None:
    """Raises TypeError unless each dtype of parameters is one or None, and for a device that is a dtype, ValueError for
    a dtype whose values cannot be initialised; else as check_device()."""
    wrong = [(name, value) for name, value in dtypes.items() if not isinstance(value, torch.dtype | None)]
    if isinstance(device, torch.dtype):
        wrong.append(("device", device))
    for name, value in wrong[:1]:
        kind = "a device" if name == "device" else "a torch.dtype"
        raise TypeError(
            f"{what}: {name} must be {kind} or None, got {describe(value)}; params_dtype comes before device, unlike "
            "in torch.nn; pass both by keyword"
        )
    check_device(what, device)
    initialised = not torch.empty(0, dtype=torch.uint8, device=device).is_meta
    for name, dtype in dtypes.items():
        if (
            initialised
            and dtype is not None
            and (dtype.itemsize < 2 or not (dtype.is_floating_point or dtype.is_complex))
        ):
            raise ValueError(
                f"{what}: {name} must be a dtype of floating-point numbers of 16 bits or more, got {dtype}; to store "
                "weights in fewer bits, make the layer within quire.quantized_model_init"
            )


def initialise(
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    init_method: Callable[[torch.Tensor], object] | None,
    parallel: Parallel | None = None,
) -> None:
    """Initialises as torch.nn.Linear; with an init_method, weight by that method and bias with 0. parallel: draws the
    whole weight and keeps a part, so that ranks together have what one process has after the same seed."""
    if is_dtensor(weight):
        _initialise_parts(weight, bias, init_method)
        return
    if parallel is not None and not parallel.group and not weight.is_meta:
        _initialise_alone(weight, bias, init_method, parallel)
        return
    if parallel is not None and not weight.is_meta:
        out, inner = weight.shape
        column = parallel.mode == "column"
        whole = weight.new_empty((out * parallel.size, inner) if column else (out, inner * parallel.size))
        whole_bias = None if bias is None else bias.new_empty(whole.shape[0])
        initialise(whole, whole_bias, init_method)
        with torch.no_grad():
            weight.copy_(parallel.part_of(whole))
            if bias is not None:
                bias.copy_(parallel.part_of(whole_bias, bias=True))
        check_ranks.note_drawn(weight, whole)
        return
    if init_method is not None:
        with torch.no_grad():
            init_method(weight)
        if bias is not None:
            torch.nn.init.zeros_(bias)
        return
    torch.nn.init.kaiming_uniform_(weight, a=math.sqrt(5))
    if bias is not None:
        bound = 1 / math.sqrt(weight.shape[1]) if weight.shape[1] > 0 else 0
        torch.nn.init.uniform_(bias, -bound, bound)


def _initialise_parts(
    weight: torch.Tensor, bias: torch.Tensor | None, init_method: Callable[[torch.Tensor], object] | None
) -> None:
    """initialise() of DTensors: draws whole tensors, and keeps this rank's shards."""
    if weight.is_meta:
        return
    own = [t for t in (weight, bias) if t is not None]
    whole = [torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in own]
    initialise(whole[0], whole[1] if len(whole) > 1 else None, init_method)
    with torch.no_grad():
        for t, values in zip(own, whole, strict=True):
            t.copy_(part_for(t, values) if is_dtensor(t) else values)


def _initialise_alone(
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    init_method: Callable[[torch.Tensor], object] | None,
    parallel: Parallel,
) -> None:
    """initialise() of a part whose number is not known: it alone is drawn, and biases are 0, because a "row" layer's is
    the same in all ranks."""
    bound = 1 / math.sqrt(max(weight.shape[1] * (parallel.size if parallel.mode == "row" else 1), 1))
    with torch.no_grad():
        (init_method or (lambda t: t.uniform_(-bound, bound)))(weight)
    if bias is not None:
        torch.nn.init.zeros_(bias)


# ------------------------------------------------------------ torch.autocast (numerics.md 6.7)


def uses_torch_autocast(x: torch.Tensor | QuantizedActivation) -> bool:
    """Whether torch.autocast is enabled for x's device."""
    if not isinstance(x, _INPUTS):
        raise TypeError(f"quire: the input of a layer must be a tensor, got {describe(x)}; {_remedy(x)}")
    if not is_any_autocast_enabled():  # of one device or another; a fifth of the time of what follows
        return False
    device = x.device.type
    return _knows_autocast(device) and torch.is_autocast_enabled(device)


def _remedy(x: object) -> str:
    if isinstance(x, torch.fx.Proxy):
        return "torch.fx cannot trace it: take torch.export, or a Tracer whose is_leaf_module() is true for the layer"
    return "torch.as_tensor() makes one"


@assume_constant_result  # Dynamo of PyTorch 2.11 cannot look inside
def _knows_autocast(device_type: str) -> bool:
    return torch.amp.is_autocast_available(device_type)


def activation_dtype(x: torch.Tensor | QuantizedActivation) -> torch.dtype:
    """The dtype of torch.autocast if it is enabled for x's device, else the dtype of x."""
    return torch.get_autocast_dtype(x.device.type) if uses_torch_autocast(x) else x.dtype


# ------------------------------------------------------------ buffers that stay float32 whatever precision a model is
# converted to: scales, sums of small updates and frequencies, which a narrower dtype would round without a word


class Float32Buffers(torch.nn.Module):
    """A module that names buffers in float32_buffers(). Module.to() and its like move them and keep their dtype, and
    load_state_dict() gives them the values in float32, with assign=True too."""

    def float32_buffers(self) -> Iterable[str]:
        """Names of those that there are."""
        raise NotImplementedError

    def fill_new(self, name: str, buffer: torch.Tensor) -> None:
        """Writes the values that a buffer has before any are loaded."""
        raise NotImplementedError

    def add_float32_buffer(self, name: str, size: int, device: torch.device | str | None) -> None:
        buffer = torch.empty(size, dtype=torch.float32, device=device)
        self.fill_new(name, buffer)
        self.register_buffer(name, buffer)

    def check_float32(self, what: str, name: str) -> None:
        """Raises TypeError for a buffer that was replaced without this module's methods."""
        found = self._buffers[name]
        if found.dtype != torch.float32:
            raise TypeError(
                f"{what}: {name} must be float32, got {found.dtype}, to which something other than Module.to has "
                "converted it. Load it again as float32; FSDP's MixedPrecision takes buffer_dtype=torch.float32, and "
                "accelerate's set_module_tensor_to_device takes dtype=torch.float32"
            )

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> "Float32Buffers":
        before = {name: self._buffers[name] for name in self.float32_buffers()}
        try:
            super()._apply(fn, recurse)
        finally:
            for name, old in before.items():
                self._keep(name, old, self._buffers[name])
        return self

    def _keep(self, name: str, old: torch.Tensor, new: torch.Tensor) -> None:
        """Of what has become of a buffer, takes the device only."""
        if new is old:
            return
        if old.is_meta and not new.is_meta:  # to_empty
            self._buffers[name] = torch.empty_like(old, device=new.device)
            self.fill_new(name, self._buffers[name])
        else:
            self._buffers[name] = old.to(new.device)

    def _load_from_state_dict(self, state_dict: dict[str, object], prefix: str, *options: object) -> None:
        super()._load_from_state_dict(state_dict, prefix, *options)
        for name in self.float32_buffers():
            self._buffers[name] = self._buffers[name].to(torch.float32)
