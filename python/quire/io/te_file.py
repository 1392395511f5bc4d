"""Files of torch.save with tensors of TransformerEngine, as a set of named plain tensors, and TransformerEngine's
pickles. Both are read without TransformerEngine, and without running anything that they name.

A pickle names functions and classes that the reader calls. Here a name is looked up in a closed table. The table has
stand-ins, which keep their arguments and do nothing else, and the functions that rebuild tensors. Any other name is an
error. Files of torch.save are read by torch.load(weights_only=True) under the same table.
"""

from __future__ import annotations

import collections
import io
import pickle
import pickletools
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from quire.io.container import CheckpointError, Entry, some

_PACKAGE = "transformer_engine"
_RECIPES = f"{_PACKAGE}.common.recipe"
_TENSORS = f"{_PACKAGE}.pytorch.tensor"
_REMEDY = "quire reads only what TransformerEngine itself writes; make a checkpoint without own classes"
#: What pickles of protocols 2 to 5 consist of. Missing are codes that look names up elsewhere than in find_class
#: (EXT1, EXT2, EXT4, PERSID, BINPERSID) or take buffers from outside (NEXT_BUFFER, READONLY_BUFFER).
_OPCODES = frozenset(
    (
        "PROTO FRAME STOP MARK POP POP_MARK DUP MEMOIZE PUT BINPUT LONG_BINPUT GET BINGET LONG_BINGET "
        "NONE NEWTRUE NEWFALSE INT BININT BININT1 BININT2 LONG LONG1 LONG4 FLOAT BINFLOAT "
        "UNICODE BINUNICODE BINUNICODE8 SHORT_BINUNICODE STRING BINSTRING SHORT_BINSTRING "
        "BINBYTES BINBYTES8 SHORT_BINBYTES BYTEARRAY8 "
        "EMPTY_LIST LIST APPEND APPENDS EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_DICT DICT SETITEM SETITEMS "
        "EMPTY_SET ADDITEMS FROZENSET GLOBAL STACK_GLOBAL REDUCE NEWOBJ NEWOBJ_EX BUILD"
    ).split()
)


class Inert:
    """An object of a class that does not exist here. name: of the class. args: of its constructor. state: its
    attributes."""

    name = ""

    def __new__(cls, *args: object, **kwargs: object) -> Inert:
        self = super().__new__(cls)
        self.args, self.state = (*args, *kwargs.values()), {}
        return self

    def __init__(self, *args: object, **kwargs: object) -> None:
        """Nothing: __new__ has kept the arguments."""

    def __setstate__(self, state: object) -> None:
        # (state, attributes in slots) where a class has slots
        parts = state if isinstance(state, tuple) else (state,)
        self.state = {k: v for part in parts if isinstance(part, dict) for k, v in part.items() if isinstance(k, str)}

    def __repr__(self) -> str:
        return f"{type(self).name}(...)"


def _class(name: str) -> type[Inert]:
    return type(name.rpartition(".")[2], (Inert,), {"name": name})


class _Function:
    """A function of the table. A pickle can call it, but cannot change it by BUILD, which would change a plain
    function."""

    __slots__ = ("_call",)

    def __init__(self, call: Callable[..., object]) -> None:
        object.__setattr__(self, "_call", call)

    def __call__(self, *args: object) -> object:
        return self._call(*args)

    def __setattr__(self, name: str, value: object) -> None:
        raise CheckpointError(f"the pickle sets {name!r} of a function", _REMEDY)

    def __setstate__(self, state: object) -> None:
        raise CheckpointError("the pickle sets the state of a function", _REMEDY)


@dataclass(frozen=True, eq=False)
class Rebuilt:
    """What a reconstructor would have made. kind: "float8", "float8_blockwise", "mxfp8" or "nvfp4"; args: of the
    reconstructor."""

    kind: str
    args: tuple[object, ...]


def _reconstructor(kind: str) -> _Function:
    return _Function(lambda *args: Rebuilt(kind, args))


def _attribute(owner: object, name: object) -> object:
    """getattr as pickles use it: for members of enumerations, and for reconstructors that were methods of a class."""
    path = owner.name if isinstance(owner, type) and issubclass(owner, Inert) else None
    if path in _METHODS and name == "_make_in_reduce_ex":
        return _reconstructor(_METHODS[path])
    if path in _ENUMERATIONS and isinstance(name, str) and name in _ENUMERATIONS[path]:
        return owner(name)
    raise CheckpointError(f"the pickle takes the attribute {name!r} of {path or type(owner).__name__}", _REMEDY)


def _storage(data: object) -> object:
    if not isinstance(data, bytes):
        raise CheckpointError(f"a storage must be bytes, got {type(data).__name__}", _REMEDY)
    return torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")


def _bytes(text: object, encoding: object) -> bytes:
    """_codecs.encode, with which pickles of protocol 2 make bytes."""
    if not isinstance(text, str) or encoding != "latin1":
        raise CheckpointError(f"bytes must be text in latin1, got {type(text).__name__} in {encoding!r}", _REMEDY)
    return text.encode("latin1")


def _tensor(storage: object, offset: object, size: object, stride: object, *_: object) -> torch.Tensor:
    """torch._utils._rebuild_tensor_v2, without hooks and attributes, and with its arguments checked."""
    sizes = [value for value in (size, stride) if isinstance(value, tuple)]
    numbers = [offset, *(n for value in sizes for n in value)]
    if not isinstance(storage, torch.TypedStorage) or len(sizes) != 2 or not all(type(n) is int for n in numbers):
        raise CheckpointError("the pickle has a tensor without storage, sizes or strides", _REMEDY)
    untyped = storage.untyped()
    return torch.empty(0, dtype=storage.dtype, device=untyped.device).set_(untyped, offset, size, stride).clone()


_ENUMERATIONS = {
    f"{_RECIPES}.Format": ("E2M1", "E4M3", "E5M2", "HYBRID"),
    f"{_PACKAGE}.pytorch.constants.DType": ("kByte", "kFloat8E4M3", "kFloat8E5M2", "kFloat4E2M1"),
    "transformer_engine_torch.DType": ("kByte", "kFloat8E4M3", "kFloat8E5M2", "kFloat4E2M1"),
}
_RECIPE_CLASSES = (
    "DelayedScaling Float8CurrentScaling Float8BlockScaling MXFP8BlockScaling NVFP4BlockScaling CustomRecipe Recipe "
    "MMParams QParams _FormatHelper"
).split()
#: Of the module of tensors: kind -> (module, class of the tensor, classes of its quantizers).
_KINDS = {
    "float8": ("float8_tensor", "Float8Tensor", ("Float8Quantizer", "Float8CurrentScalingQuantizer")),
    "float8_blockwise": ("float8_blockwise_tensor", "Float8BlockwiseQTensor", ("Float8BlockQuantizer",)),
    "mxfp8": ("mxfp8_tensor", "MXFP8Tensor", ("MXFP8Quantizer",)),
    "nvfp4": ("nvfp4_tensor", "NVFP4Tensor", ("NVFP4Quantizer",)),
}
_METHODS = {f"{_TENSORS}.{module}.{tensor}": kind for kind, (module, tensor, _) in _KINDS.items()}
_CLASSES: dict[str, type[Inert]] = {
    name: _class(name)
    for name in (
        *_ENUMERATIONS,
        *_METHODS,
        *(f"{_RECIPES}.{name}" for name in _RECIPE_CLASSES),
        *(f"{_TENSORS}.{module}.{name}" for module, _, quantizers in _KINDS.values() for name in quantizers),
    )
}
#: Full name -> its replacement. Older versions call reconstructors as methods, through getattr.
_TABLE: dict[str, Callable[..., object]] = {
    **_CLASSES,
    **{
        f"{_TENSORS}.{module}._make_{kind}_tensor_in_reduce_ex": _reconstructor(kind)
        for kind, (module, _, _) in _KINDS.items()
    },
    "builtins.getattr": _Function(_attribute),
}
#: Further names in plain pickles of tensors; torch.load accepts these itself.
_OF_TORCH: dict[str, Callable[..., object]] = {
    "collections.OrderedDict": collections.OrderedDict,
    "_codecs.encode": _Function(_bytes),
    "torch.Size": torch.Size,
    "torch._utils._rebuild_tensor_v2": _Function(_tensor),
    "torch.storage._load_from_bytes": _Function(_storage),
    **{f"torch.{name}": getattr(torch, name) for name in ("float32", "float16", "bfloat16", "uint8")},
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        path = f"{module}.{name}"
        found = _TABLE.get(path) or _OF_TORCH.get(path)
        if found is None:
            raise CheckpointError(f"the pickle names {path}, which is not on the list of what may be read", _REMEDY)
        return found


def loads(data: bytes) -> object:
    """The content of a pickle of TransformerEngine: dicts, lists, numbers, tensors, Inert and Rebuilt.

    Raises CheckpointError if it names anything else, and for bytes that are no pickle. Nothing that it names is
    imported or called.
    """
    try:
        for opcode, _, position in pickletools.genops(data):
            if opcode.name not in _OPCODES:
                raise CheckpointError(f"the pickle has the operation {opcode.name} at byte {position}", _REMEDY)
        return _Unpickler(io.BytesIO(data)).load()
    except CheckpointError:
        raise
    except Exception as error:  # a damaged pickle raises nearly anything
        raise CheckpointError(f"is no pickle that can be read: {error}", _REMEDY) from error


#: Held while the table is torch's: what torch.load may call is a list of the process.
_LOADING = threading.Lock()


def load_file(file: Any) -> object:
    """The object in a file of torch.save, read as loads() reads one. file: a path or a binary file. Tensors are on the
    CPU."""
    ours = [(value, name) for name, value in _TABLE.items()]
    with _LOADING:
        others = torch.serialization.get_safe_globals()
        # Where TransformerEngine itself is loaded it has put its classes on the list, under the same names.
        conflicts = any(_name(one) in _TABLE for one in others)
        if conflicts:
            torch.serialization.clear_safe_globals()
        try:
            with torch.serialization.safe_globals(ours):
                return torch.load(file, weights_only=True, map_location="cpu")
        except CheckpointError:
            raise
        except Exception as error:  # the common class of torch's and zipfile's errors
            name = str(file) if isinstance(file, str) or hasattr(file, "__fspath__") else None
            raise CheckpointError(f"torch.load refuses the file: {error}", _REMEDY, file=name) from error
        finally:
            if conflicts:
                torch.serialization.add_safe_globals(others)


def _name(entry: Any) -> str:
    return entry[1] if isinstance(entry, tuple) else f"{entry.__module__}.{entry.__qualname__}"


# --- files of torch.save


#: The key in `descriptions` of the fields of quantized tensors that are no buffers: name -> kind, shape, dtype...
KEY = "te"
#: Fields of the reconstructors' arguments, in order. Later versions appended fields at the end.
_FIELDS = {
    "float8": "rowwise_data element rowwise_scale dtype shape columnwise_data",
    "float8_blockwise": (
        "shape rowwise_data rowwise_scale columnwise_data columnwise_scale element dtype quantizer tiles format"
    ),
    "mxfp8": ("rowwise_data rowwise_scale columnwise_data columnwise_scale element dtype shape quantizer swizzled"),
    "nvfp4": (
        "shape rowwise_data rowwise_scale columnwise_data columnwise_scale rowwise_amax columnwise_amax element dtype "
        "quantizer swizzled row_scaled four_over_six largest_scale"
    ),
}
#: How many of these fields every version has.
_LEAST = {"float8": 5, "float8_blockwise": 9, "mxfp8": 7, "nvfp4": 10}
#: Keys under which training scripts put the state dict of the model.
_NESTED = ("model", "module", "state_dict", "model_state_dict")
_NO_STATE = "save model.state_dict() with torch.save"


class TeFile:
    """The tensors of a file of torch.save. A tensor that TransformerEngine quantized is several tensors,
    NAME#rowwise_data and so on; descriptions["te"] has its other fields under NAME. As quire.io.container.Container;
    all tensors are in memory.

    Raises CheckpointError for a file that names other code than TransformerEngine's tensors.
    """

    index = None

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.folder = self.path.parent
        self.metadata: dict[str, str] = {}
        self._tensors: dict[str, torch.Tensor] = {}
        described = {}
        for name, value in _state_dict(load_file(self.path), self.path).items():
            if isinstance(value, Rebuilt):
                described[name] = self._add(name, value)
            elif isinstance(value, torch.Tensor):
                self._tensors[name] = value.detach()
        self.configs: dict[str, Any] = {}
        self.descriptions: dict[str, Any] = {KEY: described}
        self.header = {
            name: Entry(name, self.path, tensor.dtype, tuple(tensor.shape)) for name, tensor in self._tensors.items()
        }

    def _add(self, name: str, value: Rebuilt) -> dict[str, object]:
        fields = _FIELDS[value.kind].split()
        if not _LEAST[value.kind] <= len(value.args) <= len(fields):
            raise CheckpointError(
                f"a tensor of kind {value.kind} has {len(value.args)} fields, expected {_LEAST[value.kind]} to "
                f"{len(fields)}",
                "the file is of a version that quire does not know",
                file=self.path,
                tensor=name,
            )
        rest: dict[str, object] = {"kind": value.kind}
        for field, one in zip(fields, value.args, strict=False):
            if isinstance(one, torch.Tensor):
                self._tensors[f"{name}#{field}"] = one.detach()
            elif field == "quantizer":
                rest |= dict(one.state) if isinstance(one, Inert) else {}
            else:
                rest[field] = one
        return rest

    def tensor(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.header)


def _state_dict(value: object, file: Path) -> Mapping[str, object]:
    for key in _NESTED:
        if isinstance(value, Mapping) and isinstance(value.get(key), Mapping):
            value = value[key]
            break
    tensors = isinstance(value, Mapping) and any(isinstance(one, torch.Tensor | Rebuilt) for one in value.values())
    if not tensors or not all(isinstance(key, str) for key in value):
        found = some([str(key) for key in value]) if isinstance(value, Mapping) else type(value).__name__
        raise CheckpointError(f"expected a dict from names to tensors, got {found}", _NO_STATE, file=file)
    return value
