"""Values that go into a quantized tensor's storage."""

from __future__ import annotations

from typing import Any

import torch

from quire.checks import check_dense, check_type, signed64
from quire.tensor.buffers import DTYPES, as_matrix, named_buffers


class Written:
    """A quantized tensor that is quantized anew in place."""

    def quantize_(self, values: torch.Tensor, *, noop_flag: torch.Tensor | None = None, **options: Any) -> Written:
        """Quantizes other values of the same shape with the same spec into the same storage; returns self.

        noop_flag: a tensor of one element. If it is not 0, the tensor keeps what it stores. The host does not read it,
            so a captured graph can replay either.
        options: seed, offset, scale as for quire.quantize. `master`, if there is one, becomes the values. Raises
        ValueError, with nothing changed, for another shape and for a spec that rounds stochastically if there is no
        seed.
        """
        if noop_flag is not None:
            return self._quantize_unless(noop_flag, values, options)
        check_type("QuantizedTensor.quantize_", torch.Tensor, values=values)
        check_dense("QuantizedTensor.quantize_", values=values)
        if values.is_complex() or (values.is_meta and not self.is_meta):
            raise TypeError(
                f"QuantizedTensor.quantize_: values must be real numbers, got {values.dtype} on {values.device}"
            )
        if values.shape != self.shape:
            raise ValueError(
                f"QuantizedTensor.quantize_: values must have shape {list(self.shape)}, got {list(values.shape)}"
            )
        if self.is_part and self.window is not None and not options:
            return self.copy_(values)
        with torch.no_grad():
            self.store(values.dequantize() if isinstance(values, Written) else values, **options)
            self._keep_scale(options.get("scale"))
        return self

    def _quantize_unless(self, noop_flag: torch.Tensor, values: torch.Tensor, options: dict[str, Any]) -> Written:
        check_type("QuantizedTensor.quantize_", torch.Tensor, noop_flag=noop_flag)
        if noop_flag.numel() != 1:
            raise ValueError(
                f"QuantizedTensor.quantize_: noop_flag must have one element, got the shape {list(noop_flag.shape)}"
            )
        written = [each.detach() for each in (*self.buffer_list(), self.master, self.given_scale) if each is not None]
        before = [(buffer, buffer.clone()) for buffer in written]
        self.quantize_(values, **options)
        with torch.no_grad():
            keeps = noop_flag.to(self.device).reshape(()) != 0
            for buffer, old in before:
                buffer.copy_(torch.where(keeps, old, buffer))
        return self

    def _keep_scale(self, scale: torch.Tensor | None) -> None:
        if self.given_scale is not None and scale is not None:
            self.given_scale.copy_(scale.view_as(self.given_scale))
        elif self.given_scale is not scale:
            self.given_scale = None if scale is None else scale.detach().reshape(*self.shape[: self.stacked], 1).clone()

    def store(
        self, values: torch.Tensor, seed: int | None = None, offset: int = 0, scale: torch.Tensor | None = None
    ) -> None:
        """Codes and scales of plain values of this shape, into this tensor's storage."""
        self.check_writable(seeded=seed is not None)
        values = values.to(self.device, values.dtype if values.dtype in DTYPES else torch.float32)
        rowwise, columnwise = self.stores("rowwise"), self.stores("columnwise")
        random = (signed64(seed or 0, "seed"), signed64(offset, "offset"))
        results = torch.ops.quire.quantize(as_matrix(values), self.spec.text, rowwise, columnwise, *random, scale)
        new = named_buffers(results, rowwise, columnwise)
        master = self._stored("master")
        if master is not None and master is not values:
            master.copy_(values)
        self.forget_origin()
        for name, tensor in self.buffers().items():
            tensor.copy_(new[name])

    def check_writable(self, *, seeded: bool = False) -> None:
        """Raises RuntimeError for a part that does not know the tensor which it is a part of, ValueError where rounding
        needs a seed and there is none."""
        if self.is_part:
            raise RuntimeError(
                "QuantizedTensor: a view of some of the rows cannot be written to, since rows share scales, where it "
                "was made in a compiled function or by as_strided of another view, or is quantized anew with a seed or "
                "a scale; write to the whole tensor, or to a clone() of the view"
            )
        if self.spec.stochastic and not seeded:
            raise ValueError(
                f"QuantizedTensor: {self.spec} rounds stochastically and needs a seed; use quantize_(values, seed=)"
            )
