"""The context of code that computes for its own purpose, such as calibration: not that of whoever calls it."""

import contextlib
import threading
from collections.abc import Iterator

import torch

from quire.autocast import Outside


class _Callers(threading.local):
    """The defaults outside of the outermost own_context() of this thread; None outside of all."""

    defaults: "_Defaults | None" = None


_CALLERS = _Callers()


class _Defaults:
    """PyTorch's default dtype and device, and whether only deterministic algorithms may run."""

    def __init__(self, dtype: torch.dtype, device: torch.device, deterministic: tuple[bool, bool]) -> None:
        self.dtype, self.device, self.deterministic = dtype, device, deterministic

    @classmethod
    def now(cls) -> "_Defaults":
        deterministic = torch.are_deterministic_algorithms_enabled()
        only_warns = torch.is_deterministic_algorithms_warn_only_enabled()
        return cls(torch.get_default_dtype(), torch.get_default_device(), (deterministic, only_warns))

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        before = _Defaults.now()
        # A mode of PyTorch's functions, which slows down every call: only where it is needed.
        with self.device if before.device != self.device else contextlib.nullcontext():
            self._set(before)
            try:
                yield
            finally:
                before._set(self)

    def _set(self, other: "_Defaults") -> None:
        torch.set_default_dtype(self.dtype)
        if self.deterministic != other.deterministic:  # which imports PyTorch's compiler
            enabled, only_warns = self.deterministic
            torch.use_deterministic_algorithms(enabled, warn_only=only_warns)


_OWN = _Defaults(torch.float32, torch.device("cpu"), (False, False))


@contextlib.contextmanager
def own_context() -> Iterator[None]:
    """What is computed within does not depend on what the caller has set: quire's autocast (none is active within, so
    layers run under their own recipes), gradients and inference mode (both off), the default dtype and device, and
    deterministic algorithms. Afterwards all of them are as before.

    torch.autocast and random states are the caller's; running() sets these too.
    """
    before = _CALLERS.defaults
    if before is None:
        _CALLERS.defaults = _Defaults.now()
    try:
        with Outside(), torch.inference_mode(False), torch.no_grad(), _OWN.active():
            yield
    finally:
        _CALLERS.defaults = before


@contextlib.contextmanager
def running(*models: torch.nn.Module, torch_autocast: bool = False) -> Iterator[None]:
    """own_context() for code that runs layers. Random numbers also come from a generator with a seed of 0, and the
    caller's is afterwards as before.

    models: are in eval mode within, and each of their modules is afterwards in the mode that it was in.
    torch_autocast: whether torch.autocast is the caller's; otherwise it is disabled.
    """
    training = [module for model in models for module in model.modules() if module.training]
    with own_context(), _own_random_numbers(), contextlib.ExitStack() as stack:
        for device in () if torch_autocast else _device_types():
            stack.enter_context(torch.autocast(device, enabled=False))
        for model in models:
            model.eval()
        try:
            yield
        finally:
            for module in training:
                module.training = True


def callers_defaults() -> contextlib.AbstractContextManager[None]:
    """Within own_context(): a context with the caller's default dtype, default device and choice of algorithms, for
    calls of the caller's model, whose forward may be written for them."""
    return contextlib.nullcontext() if _CALLERS.defaults is None else _CALLERS.defaults.active()


def _device_types() -> set[str]:
    found = {"cpu"}
    if torch.accelerator.is_available():
        found.add(torch.accelerator.current_accelerator().type)
    return {device for device in found if torch.amp.is_autocast_available(device)}


@contextlib.contextmanager
def _own_random_numbers() -> Iterator[None]:
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(devices):
        torch.manual_seed(0)
        yield
