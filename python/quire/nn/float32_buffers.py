"""Buffers that stay float32 whatever precision a model is converted to: they hold scales, sums of small updates and
frequencies, which a narrower dtype would round without a word."""

from collections.abc import Callable, Iterable

import torch


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
