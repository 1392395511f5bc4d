"""The context of code that computes for its own purpose, such as calibration: not that of whoever calls it."""

import contextlib
import threading
from collections.abc import Iterator

import torch

from quire.autocast import Outside
from quire.loading.devices import HOST, devices


class _Callers(threading.local):
    """The default device outside of the outermost own_context() of this thread; None outside of all."""

    def __init__(self) -> None:
        self.device: torch.device | None = None


_CALLERS = _Callers()


def _default_device(device: torch.device) -> contextlib.AbstractContextManager[object]:
    # A mode of PyTorch's functions, which slows down every call: only where it is needed.
    return contextlib.nullcontext() if device == torch.get_default_device() else device


@contextlib.contextmanager
def own_context() -> Iterator[None]:
    """What is computed within does not depend on what the caller has set: quire's autocast (none is active within, so
    layers run under their own recipes), batch_invariant, gradients and inference mode (all off), and the default
    device. Afterwards all of them are as before.

    The default dtype and the choice of deterministic algorithms belong to the process, so other threads would see a
    change of them: they stay, and quire's code depends on neither (tools/check_factories.py). torch.autocast and random
    states are the caller's; running() sets these too.
    """
    before = _CALLERS.device
    if before is None:
        _CALLERS.device = torch.get_default_device()
    try:
        with Outside(), torch.inference_mode(False), torch.no_grad(), _default_device(HOST):
            yield
    finally:
        _CALLERS.device = before


@contextlib.contextmanager
def running(*models: torch.nn.Module, torch_autocast: bool = False) -> Iterator[None]:
    """own_context() for code that runs layers. Random numbers also come from a generator with a seed of 0, and the
    caller's is afterwards as before.

    models: are in eval mode within, and each of their modules is afterwards in the mode that it was in.
    torch_autocast: whether torch.autocast is the caller's; otherwise it is disabled.
    """
    training = [module for model in models for module in model.modules() if module.training]
    with own_context(), _own_random_numbers(), contextlib.ExitStack() as stack:
        for device in () if torch_autocast else filter(torch.amp.is_autocast_available, devices()):
            stack.enter_context(torch.autocast(device, enabled=False))
        for model in models:
            model.eval()
        try:
            yield
        finally:
            for module in training:
                module.training = True


class _Eager:
    """Who wants compiled functions to run in eager mode, of all threads: the stance is the process's."""

    lock = threading.Lock()
    users = 0
    stance: contextlib.AbstractContextManager[object] | None = None


@contextlib.contextmanager
def in_eager_mode() -> Iterator[None]:
    """Functions that torch.compile has compiled run in eager mode, in all threads, until the last of them leaves this
    context; then the stance is again what it was before the first one came. Raises RuntimeError within a compiled
    function."""
    with _Eager.lock:
        if _Eager.users == 0:
            try:
                _Eager.stance = torch.compiler.set_stance("force_eager")
            except RuntimeError as error:  # after a graph break, where torch.compiler.is_compiling() is False
                raise RuntimeError(
                    "quire: explain, statistics of a model and calibration run compiled functions in eager mode, and "
                    "cannot begin within one; call them outside of the compiled function, or in a function that "
                    "torch.compiler.disable decorates"
                ) from error
        _Eager.users += 1
    try:
        yield
    finally:
        with _Eager.lock:
            _Eager.users -= 1
            if _Eager.users == 0:
                _Eager.stance.__exit__(None, None, None)


def callers_device() -> contextlib.AbstractContextManager[object]:
    """Within own_context(): a context with the caller's default device, for calls of the caller's model, whose forward
    may be written for it."""
    return contextlib.nullcontext() if _CALLERS.device is None else _default_device(_CALLERS.device)


@contextlib.contextmanager
def _own_random_numbers() -> Iterator[None]:
    """Generators of the CPU and of CUDA devices that are in use begin at a seed of 0. (torch.manual_seed would also
    seed devices whose state cannot be put back.)"""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(devices):
        for generator in (torch.default_generator, *(torch.cuda.default_generators[device] for device in devices)):
            generator.manual_seed(0)
        yield
