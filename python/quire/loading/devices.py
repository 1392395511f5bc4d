"""All questions about devices that quire asks."""

import torch

#: The device of numbers that Python reads, whichever device computes.
HOST = torch.device("cpu")
_META = "meta"
_CUDA = "cuda"


def devices() -> list[str]:
    """The kinds of device that PyTorch can use here: the host, and an accelerator if there is one."""
    found = [HOST.type]
    if torch.accelerator.is_available():
        found.append(torch.accelerator.current_accelerator().type)
    return found


def count(kind: str) -> int:
    """How many devices of a kind of devices() there are."""
    return 1 if kind == HOST.type else torch.accelerator.device_count()


def fastest() -> torch.device:
    """A CUDA device if there is one, otherwise the host."""
    return torch.device(_CUDA) if torch.cuda.is_available() else HOST


def has_values(device: torch.device) -> bool:
    """Whether tensors of the device have values: those of the meta device have none."""
    return device.type != _META


def with_values(device: torch.device) -> torch.device:
    """The device; the host for the meta device."""
    return device if has_values(device) else HOST


def runs_later(device: torch.device) -> bool:
    """Whether a call may return before the device has computed its result."""
    return device.type not in (HOST.type, _META)


def is_known(t: torch.Tensor) -> bool:
    """Whether Python can read a tensor's values without waiting: on the host, in eager mode."""
    return not torch.compiler.is_compiling() and t.device.type == HOST.type


def generator_state(device: torch.device) -> bytes:
    """The state of the generator that fills tensors on an accelerator. Empty elsewhere and for fake tensors, which may
    be on devices that this machine lacks."""
    if not runs_later(device) or makes_fake_tensors():
        return b""
    return bytes(torch.get_device_module(device).get_rng_state(device).tolist())


def makes_fake_tensors() -> bool:
    """Whether a FakeTensorMode is active, whose tensors have no values."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def check_device(what: str, device: torch.device | str | int | None) -> None:
    """Raises RuntimeError for a device that this PyTorch or this machine does not have, TypeError for what names no
    device. Tensors of a FakeTensorMode have no memory, so they may be on any device, as in torch.nn's layers."""
    if device is None:
        return
    try:
        given = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise type(error)(f"{what}: device {device!r} is none that PyTorch can take here: {error}") from None
    if not runs_later(given):
        return
    if makes_fake_tensors():
        return
    module = getattr(torch, given.type, None)
    if hasattr(module, "is_available") and not module.is_available():
        raise RuntimeError(
            f"{what}: device {str(device)!r} is not available: PyTorch {torch.__version__} finds no {given.type} "
            f"device on this machine; pass device={HOST.type!r}, or leave device None for torch's default"
        )


def reads_interleaved(device: torch.device) -> bool:
    """Whether matmuls of few tokens on a device read interleaved weights fastest. Kernels of a GPU that multiply by
    tensor cores read lines of codes, and refuse the other order."""
    return device.type != _CUDA
