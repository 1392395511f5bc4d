"""Changes to an argument of an operator: wrong kinds, ranks, strides, sizes of up to 2^63, texts with faults."""

import math
import random

import torch

NUMBERS = (0, 1, -1, 2, 3, 7, 2**16, 2**31 - 1, 2**31, 2**32, 2**32 + 3, 2**60, 2**62, 2**63 - 1, -(2**62), -(2**63))
NUMBERS += ((2**64 + 2) // 3, 2**58 + 1)  # which wrap to small ones when they are multiplied by 3, and by 64
#: Which wrap to 0 when they are multiplied by the bytes of an element: a result without elements may have such a size.
WRAPPING = (2**60, 2**61, 2**62, -(2**62))
FLOATS = (0.0, -1.0, 1e-45, 1e308, math.inf, -math.inf, math.nan)
DTYPES = (
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float64,
    torch.uint8,
    torch.int8,
    torch.int32,
    torch.int64,
)
DTYPES += (torch.bool, torch.complex64, torch.float8_e4m3fn, torch.bits8, torch.uint16)
#: Numbers where a dtype stands: of no dtype, and of one if only their last byte counted.
NO_DTYPES = (-1, -2, -128, 44, 46, 47, 100, 127, 128, 255, 256, 262, 2**31, 2**32 + 6, 2**62, -(2**63))
LETTERS = ":=,.;\0 \n\t09azé∞-+"


def argument(kind: str, value: object, others: list[object], source: random.Random) -> object:
    """Another value of a schema's type; `others`: what else stands there in calls that are known."""
    if others and source.random() < 0.15:
        return source.choice(others)
    if source.random() < 0.02:
        return source.choice([None, "text", 3, 0.5, [], [None], torch.ones(2), torch.float32])
    if kind == "Tensor":
        return tensor(value, source) if isinstance(value, torch.Tensor) else torch.ones(2, 32)
    if kind == "Tensor?":
        return tensor(value, source) if value is not None and source.random() < 0.7 else source.choice([None, *PLAIN])
    if kind.startswith("Tensor"):
        return items(value, source, lambda v: tensor(v, source) if v is not None else source.choice(PLAIN))
    if kind == "SymInt[]":
        return items(value, source, lambda v: source.choice(NUMBERS) if source.random() < 0.7 or v is None else v + 1)
    if kind == "str":
        return text(value, source)
    if kind == "bool":
        return value is not True
    if kind == "float":
        return source.choice(FLOATS)
    if kind == "ScalarType":
        return source.choice(DTYPES if source.random() < 0.5 else NO_DTYPES)
    near = [value + 1, value - 1, 2 * value] if isinstance(value, int) and abs(value) < 2**60 else [0]
    return source.choice([*NUMBERS, *near])


PLAIN = (torch.ones(1), torch.ones(2), torch.zeros(0), torch.zeros(2, dtype=torch.int64), torch.ones(4, 32))


def items(value: object, source: random.Random, other) -> list[object]:
    new = list(value) if isinstance(value, list | tuple) else []  # it may have been changed before
    way = source.randrange(5)
    if way == 0 or not new:
        return [] if new else [source.choice(PLAIN)]
    at = source.randrange(len(new))
    if way == 1:
        del new[at]
    elif way == 2:
        new.insert(at, new[at])
    else:
        new[at] = other(new[at])
    return new


def text(value: object, source: random.Random) -> str:
    letters = list(value) if isinstance(value, str) else []
    for _ in range(source.choice((1, 1, 1, 2, 5))):
        at = source.randrange(len(letters) + 1)
        way = source.randrange(5)
        if way == 0 and at < len(letters):
            del letters[at]
        elif way == 1:
            letters.insert(at, source.choice(LETTERS))
        elif way == 2 and at < len(letters):
            letters[at] = source.choice(LETTERS)
        elif way == 3:
            letters[at:at] = letters[: source.randrange(len(letters) + 1)]
        else:
            letters[at:] = str(source.choice(NUMBERS)) if source.random() < 0.5 else []
    return "".join(letters) * (1000 if source.random() < 0.02 else 1)


def resized(t: torch.Tensor, source: random.Random) -> torch.Tensor:
    """Of the same values, repeated, one size another."""
    if t.dim() == 0:
        return t.reshape(1)
    at, size = source.randrange(t.dim()), source.choice((0, 1, 2, 3, 16, 33))
    new = list(t.shape)
    new[at] = source.choice((size, new[at] + 1, max(0, new[at] - 1)))
    out = torch.zeros(new, dtype=t.dtype, device=t.device)
    return out if t.numel() == 0 or out.is_meta else out.view(-1).copy_(repeated(t, out.numel())).view(new)


def repeated(t: torch.Tensor, count: int) -> torch.Tensor:
    return t.reshape(-1).repeat(count // t.numel() + 1)[:count]


def huge(t: torch.Tensor, source: random.Random) -> torch.Tensor:
    """Of sizes that do not fit into memory: without elements, or on the meta device."""
    sizes = [source.choice((2**20, 2**31, 2**32, 2**62, 2**63 - 1)) for _ in range(max(t.dim(), 1))]
    if source.random() < 0.7:
        sizes[source.randrange(len(sizes))] = 0
        return torch.empty(1, dtype=t.dtype).as_strided(sizes, [0] * len(sizes))
    return torch.empty(1, dtype=t.dtype, device="meta").as_strided(sizes, [0] * len(sizes))


def is_plain(t: torch.Tensor) -> bool:
    """Whether its values lie in memory as its strides say."""
    kinds = t.layout != torch.strided or t.is_nested or t.is_quantized or t._is_zerotensor()
    return not (kinds or t.is_neg() or t.is_conj())


def huge_number(value: object, source: random.Random) -> object:
    """A number, or one of a list of numbers, that wraps."""
    if not isinstance(value, list | tuple) or not value:
        return source.choice(WRAPPING)
    new = list(value)
    new[source.randrange(len(new))] = source.choice(WRAPPING)
    return new


def freed(t: torch.Tensor, source: random.Random) -> torch.Tensor:
    """Of a storage that has been freed, as FSDP does with parameters that are gathered, or in part."""
    new = t.detach().clone()
    if not new.is_meta:
        new.untyped_storage().resize_(0 if source.random() < 0.7 else new.untyped_storage().nbytes() // 2)
    return new


def is_freed(t: torch.Tensor) -> bool:
    """Whether its storage does not hold all of it."""
    if t.is_meta or not is_plain(t) or t.numel() == 0:
        return False
    last = t.storage_offset() + sum((n - 1) * stride for n, stride in zip(t.shape, t.stride(), strict=True))
    return (last + 1) * t.element_size() > t.untyped_storage().nbytes()


def hollow(arguments: list[object], source: random.Random) -> list[object]:
    """The same call with one of its sizes 0 wherever it stands, in tensors and among the numbers."""
    sizes = sorted({n for t in tensors_of(arguments) if t.layout == torch.strided for n in t.shape})
    gone = source.choice(sizes) if sizes else 0

    def without(value: object) -> object:
        if isinstance(value, list | tuple):
            return [without(one) for one in value]
        if isinstance(value, torch.Tensor) and value.layout == torch.strided:
            return value.new_empty([0 if n == gone else n for n in value.shape]) if gone in value.shape else value
        return 0 if type(value) is int and value == gone else value

    return [without(value) for value in arguments]


def tensors_of(value: object) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [t for one in value for t in tensors_of(one)] if isinstance(value, list | tuple) else []


def strided(t: torch.Tensor, source: random.Random) -> torch.Tensor:
    """The same values in another way."""
    if t.dim() == 0:
        return t
    way = source.randrange(5)
    if way == 0:
        return t.transpose(0, -1).contiguous().transpose(0, -1)
    if way == 1:
        return torch.stack([t, t], -1)[..., 0]
    if way == 2:
        return t[:1].expand(t.shape[0], *t.shape[1:]) if t.shape[0] else t
    if way == 3:
        return torch.cat([t.reshape(-1)[:1], t.reshape(-1)])[1:].view(t.shape) if t.numel() else t  # not aligned
    return t.transpose(0, -1)


def values(t: torch.Tensor, source: random.Random) -> torch.Tensor:
    """One or all values others."""
    new, number = t.clone(), source.choice(NUMBERS)
    if new.numel() == 0 or new.is_meta:
        return new
    flat = new.view(-1) if source.random() < 0.3 else new.view(-1)[source.randrange(new.numel())]
    if t.is_floating_point():
        return flat.copy_(torch.tensor(source.choice(FLOATS))) is not None and new
    limits = (0, 1) if t.dtype == torch.bool else (torch.iinfo(t.dtype).min, torch.iinfo(t.dtype).max)
    flat.fill_(min(max(number, limits[0]), limits[1]))
    return new


def wrapped(t: torch.Tensor, source: random.Random) -> torch.Tensor:
    """A tensor that is not plain memory."""
    way = source.randrange(9)
    if way < 2:
        return t.to("meta")
    if way == 2:
        return t.to_sparse()
    if way == 3:
        return t.to_sparse_csr()
    if way == 4:
        return torch.nested.nested_tensor([t])
    if way == 5:
        return torch._efficientzerotensor(t.shape, dtype=t.dtype)
    if way == 6:
        return torch._neg_view(t)
    if way == 7:
        return t.to(torch.complex64).conj()
    return torch.quantize_per_tensor(t.float(), 0.1, 0, torch.qint8)


def tensor(t: object, source: random.Random) -> torch.Tensor:
    if not isinstance(t, torch.Tensor) or is_freed(t):
        return source.choice(PLAIN)
    way = source.randrange(20)
    try:
        if way < 4:
            return t.to(source.choice(DTYPES)) if source.random() < 0.6 else t.view(source.choice(DTYPES))
        if way < 8:
            return resized(t, source)
        if way < 11:
            return strided(t, source)
        if way < 14:
            return values(t, source)
        if way < 16:
            return wrapped(t, source)
        if way == 16:
            return huge(t, source)
        if way == 17:
            return t.unsqueeze(source.randrange(t.dim() + 1)) if source.random() < 0.5 else t.reshape(-1)
        if way == 18:
            return t.clone().requires_grad_() if source.random() < 0.5 else freed(t, source)
        return torch.empty(0, dtype=t.dtype) if source.random() < 0.5 else t.new_zeros(()) + 1
    except (RuntimeError, TypeError, ValueError, IndexError):
        return source.choice(PLAIN)  # PyTorch has not that tensor
