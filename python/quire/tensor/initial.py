"""The values that a quantized parameter had before it was quantized."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch


class InitialValues:
    """A tensor that may remember values; copies of it do not."""

    def keep_high_precision_init_val(self, values: torch.Tensor) -> None:
        """Keeps a copy of values on the CPU, for get_high_precision_init_val()."""
        self.__dict__["_high_precision_init_val"] = values.detach().to("cpu", copy=True)

    @property
    def get_high_precision_init_val(self) -> Callable[[], torch.Tensor | None]:
        """get_high_precision_init_val(): the values before quantization, on the CPU. Absent where nothing was
        kept (quantized_model_init, preserve_high_precision_init_val)."""
        if "_high_precision_init_val" not in self.__dict__:
            raise AttributeError("get_high_precision_init_val")
        return functools.partial(self.__dict__.get, "_high_precision_init_val")

    @property
    def clear_high_precision_init_val(self) -> Callable[[], None]:
        """clear_high_precision_init_val(): forgets them, and get_high_precision_init_val() returns None."""
        if "_high_precision_init_val" not in self.__dict__:
            raise AttributeError("clear_high_precision_init_val")
        return functools.partial(self.__dict__.__setitem__, "_high_precision_init_val", None)
