"""Rounding of single values to the elements of a format, and codes in the buffers of a quantized tensor.

Elements are what quire decodes from each code. They are counted in units of the smallest one above 0, of which all are
whole multiples. A scale is the value of the code for 1 unit under the stored bytes, as quire decodes it.
"""

import functools
from dataclasses import dataclass

import torch

from quire.functional import quantize
from quire.tensor import QuantizedTensor, QuantSpec


@dataclass(frozen=True)
class ByteScales:
    """Scale bytes that belong to values of one row. count: of these values. steps: by how much to move a byte to get
    others that may fit better. largest: the byte of the largest finite scale."""

    count: int
    steps: tuple[int, ...]
    largest: int


#: A step changes an NVFP4 scale by about a tenth, four steps by about a half; an MX scale by a factor of 2.
_BYTES = {
    "nvfp4": ByteScales(16, (-2, -1, 0, 1, 2, 4), 0x7E),
    "mxfp4": ByteScales(32, (-1, 0), 254),
    "mxfp8": ByteScales(32, (-1, 0), 254),
}
_TILES = {"16x16", "32x32"}


class Grid:
    """The elements of a spec, and where its scales are. bytes: None if scales span rows, or are float32."""

    def __init__(self, spec: QuantSpec) -> None:
        self.spec = spec
        self.bytes = None if _TILES.intersection(spec.options) else _BYTES.get(spec.family)
        self.packed, codes, elements = _elements(spec.text)
        self._codes = torch.tensor(codes, dtype=torch.uint8, device="cpu")
        self._elements = torch.tensor(elements, dtype=torch.float32, device="cpu")
        self._unit = codes[elements.index(1.0)]
        between = (self._elements[1:] + self._elements[:-1]) / 2
        # A tie goes to the even code: where that is the lower one, the upper one begins above the tie.
        upper_is_even = self._codes[1:] % 2 == 0
        self._ends = torch.where(upper_is_even, between, torch.nextafter(between, torch.full_like(between, torch.inf)))

    def rounded(self, u: torch.Tensor) -> torch.Tensor:
        """The element nearest to each value of u, ties to even, saturated."""
        return self._elements.to(u.device)[self._index(u)]

    def codes(self, u: torch.Tensor) -> torch.Tensor:
        """uint8 data of elements [N, K], packed as the format packs them."""
        codes = self._codes.to(u.device)[self._index(u)]
        if not self.packed:
            return codes
        if codes.shape[-1] % 2:
            codes = torch.nn.functional.pad(codes, (0, 1))
        return codes[..., ::2] | (codes[..., 1::2] << 4)

    def _index(self, u: torch.Tensor) -> torch.Tensor:
        return torch.bucketize(u.contiguous(), self._ends.to(u.device), right=True)

    def scales(self, q: QuantizedTensor) -> torch.Tensor:
        """float32 [N, K], the value of 1 unit at each place of q."""
        unit = self._unit | self._unit << 4 if self.packed else self._unit
        data = torch.full_like(q.rowwise_data, unit)
        if self.packed and q.shape[-1] % 2:
            data[..., -1] = self._unit
        buffers = q.buffers() | {"rowwise_data": data}
        return QuantizedTensor.from_buffers(buffers, q.spec, q.shape).dequantize()

    def block_bytes(self, block: torch.Tensor, amax: torch.Tensor | None) -> torch.Tensor:
        """uint8 [candidates, N]: the scale byte that the format gives each row of a block [N, up to bytes.count], and
        bytes near it."""
        given = None if amax is None else (amax, None)
        base = quantize(block, self.spec, amax=given).rowwise_scale.reshape(-1).to(torch.int16)
        steps = torch.tensor(self.bytes.steps, dtype=torch.int16, device=block.device)
        return (base + steps[:, None]).clamp(0, self.bytes.largest).to(torch.uint8)

    def scale_of_bytes(self, scale: torch.Tensor, amax: torch.Tensor | None) -> torch.Tensor:
        """float32, the value of 1 unit under each scale byte [candidates, N]."""
        count = scale.numel()
        data = torch.full((count, 1), self._unit, dtype=torch.uint8, device=scale.device)
        buffers = {"rowwise_data": data, "rowwise_scale": scale.reshape(count, 1)}
        if amax is not None:
            buffers["rowwise_amax"] = amax if amax.numel() == 1 else amax.repeat(count // amax.numel())
        return QuantizedTensor.from_buffers(buffers, self.spec, (count, 1)).dequantize().view(scale.shape)


@functools.cache
def _elements(spec: str) -> tuple[bool, list[int], list[float]]:
    """Whether two codes share a byte; the codes in ascending order of their elements, each element once; and the
    elements."""
    count = 256
    q = quantize(torch.ones(1, count, dtype=torch.float32, device="cpu"), spec, columnwise=False)
    packed = q.rowwise_data.shape[-1] < count
    codes = torch.arange(count, dtype=torch.uint8, device="cpu")
    data = codes[: count // 2] % 16 if packed else codes
    decoded = QuantizedTensor.from_buffers(q.buffers() | {"rowwise_data": data[None]}, spec, q.shape).dequantize()[0]
    values = decoded[::2][:16] if packed else decoded
    # -0 comes after +0, and is left out.
    of_value = {value: code for code, value in reversed(list(enumerate(values.tolist()))) if abs(value) < torch.inf}
    unit = min(value for value in of_value if value > 0)
    ordered = sorted(of_value)
    return packed, [of_value[value] for value in ordered], [round(value / unit) * 1.0 for value in ordered]
