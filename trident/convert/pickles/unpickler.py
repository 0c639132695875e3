"""Python's unpickler with an inert replacement for every global that a pickle names.

No global of a pickle is imported: `find_class` returns a replacement for each allowed name and rejects the others. A
pickle becomes plain values, views of tensors in a file, and stubs for other objects. Unpickling passes a state to
`__setstate__`; without this method it would set arbitrary attributes, so every class here defines it.
"""

from __future__ import annotations

import functools
import math
import pickle
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

NAMESPACES = ("argparse.Namespace", "types.SimpleNamespace")
# Bytes per element of the allowed torch types.
ITEM_BYTES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}
_LARGEST_ARRAY_BYTES = 2**20
_MOST_DIMENSIONS = 16
_STRUCT_CODES = {
    "b1": "?", "i1": "b", "i2": "h", "i4": "i", "i8": "q", "u1": "B", "u2": "H", "u4": "I", "u8": "Q",
    "f2": "e", "f4": "f", "f8": "d",
}  # fmt: skip
# Classes whose objects become stubs: name and content without behaviour.
_FOREIGN_PREFIXES = ("megatron.", "deepspeed.", "torch.distributed.checkpoint.", "transformer_engine.")
_FOREIGN_NAMES = frozenset({*NAMESPACES, "signal.Signals", "_io.BytesIO"})
# Names that are only used as values, such as the factory of a defaultdict.
_VALUE_NAMES = frozenset(
    {
        *(f"builtins.{name}" for name in ("dict", "list", "int", "float", "str", "tuple", "bool", "set", "long")),
        "torch.Tensor",
        "torch.nn.parameter.Parameter",
    }
)
_NUMPY_MODULES = ("numpy", "numpy.core.multiarray", "numpy._core.multiarray", "numpy.core.numeric")
_LONGEST_PATH = 2**13
_STORAGE_TYPES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "UntypedStorage": None,
}


class RefusedError(Exception):
    """A pickle uses something that is not allowed."""


class AllowedGlobal(type):
    """Metaclass of the replacements for globals in a pickle; they are classes because unpickling instantiates them."""

    text: str

    def __setattr__(cls, name: str, value: Any) -> None:
        raise RefusedError(f"the file sets an attribute of {cls.text}")

    def __setstate__(cls, state: Any) -> None:
        raise RefusedError(f"the file gives {cls.text} a state")


class _Stateless:
    """An object that rejects a state from a pickle."""

    def __setstate__(self, state: Any) -> None:
        raise RefusedError(f"the file gives {shown(self)} a state")


class InertDict(dict[Any, Any]):
    """A dictionary that ignores a state: an OrderedDict may have attributes."""

    def __setstate__(self, state: Any) -> None:
        if not isinstance(state, dict):
            raise RefusedError(f"the file gives {shown(self)} a state")


class Stub:
    """An object of a foreign class: its arguments and state."""

    def __init__(self, name: str, arguments: tuple[Any, ...]) -> None:
        self.name = name
        self.arguments = arguments
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        if self.name in NAMESPACES and not isinstance(state, dict):
            raise RefusedError(f"a namespace has the state {shown(state)}")
        self.state = state


@dataclass(frozen=True, eq=False)
class StorageBytes(_Stateless):
    """A range of bytes in the file; tensors are views of it.

    Args:
        dtype: name of the element type, without "torch."; None if the tensor has it.
    """

    start_bytes: int
    size_bytes: int
    dtype: str | None


@dataclass(frozen=True, eq=False)
class TensorView(_Stateless):
    """A tensor as a view of a storage; `offset` and `strides` count elements."""

    storage: StorageBytes
    dtype: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class NumberType:
    """A numpy element type, such as f8; its state contains the byte order."""

    def __init__(self, code: Any, *_: Any) -> None:
        if not isinstance(code, str) or code not in _STRUCT_CODES:
            raise RefusedError(f"numpy type {shown(code)} is not allowed")
        self.code = code
        self._is_little_endian = True

    def __setstate__(self, state: Any) -> None:
        order = state[1] if isinstance(state, tuple) and len(state) >= 2 else None
        if order not in ("<", "|", "=", ">"):
            raise RefusedError(f"a numpy type has the state {shown(state)}")
        self._is_little_endian = order != ">"

    def numbers(self, content: bytes, count: int) -> tuple[float, ...]:
        """Decodes numbers.

        Raises:
            RefusedError: the number of bytes is wrong or too large.
        """
        if count * int(self.code[1:]) != len(content) or len(content) > _LARGEST_ARRAY_BYTES:
            raise RefusedError(f"{count} numpy numbers of type {self.code} are stored in {len(content)} bytes")
        return struct.unpack(f"{'<' if self._is_little_endian else '>'}{count}{_STRUCT_CODES[self.code]}", content)


class NumberArray:
    """A numpy array, filled by its state."""

    def __init__(self) -> None:
        self.shape: tuple[int, ...] = ()
        self.code = ""
        self.numbers: Sequence[float] = ()

    def __setstate__(self, state: Any) -> None:
        if not isinstance(state, tuple) or len(state) != 5 or not isinstance(state[2], NumberType):
            raise RefusedError(f"a numpy array has the state {shown(state)}")
        _, shape, number_type, is_fortran, content = state
        sizes = whole_numbers(shape, "the shape of a numpy array")
        if is_fortran not in (False, 0) or not isinstance(content, bytes):
            raise RefusedError("a numpy array is not stored as rows of bytes")
        self.shape, self.code = sizes, number_type.code
        self.numbers = number_type.numbers(content, math.prod(sizes))


def whole_numbers(values: Any, what: str) -> tuple[int, ...]:
    """Checks and returns a tuple or list of up to 16 integers >= 0.

    Raises:
        RefusedError: it is something else.
    """
    if not isinstance(values, tuple | list) or len(values) > _MOST_DIMENSIONS:
        raise RefusedError(f"{what} is {shown(values)}, not a short list of numbers")
    for value in values:
        if type(value) is not int or not 0 <= value < 2**62:
            raise RefusedError(f"{what} has the entry {shown(value)}, which is not a number in range")
    return tuple(values)


def shown(value: Any) -> str:
    """A short text of a value, for error messages."""
    if isinstance(value, AllowedGlobal):
        value = value.text
    if isinstance(value, bool | float | str) or value is None or (isinstance(value, int) and abs(value) < 2**64):
        text = value if isinstance(value, str) else repr(value)
        return "".join(letter if letter.isprintable() else "?" for letter in text[:80])
    return f"a value of type {type(value).__name__}"


class InertUnpickler(pickle.Unpickler):
    """Unpickles one value of a file.

    Args:
        persistent: resolves a persistent id, which refers to the bytes of a tensor in torch's formats.
    """

    def __init__(self, file: BinaryIO, persistent: Callable[[Any], Any]) -> None:
        super().__init__(file, encoding="latin-1")
        self._persistent = persistent

    def find_class(self, module: str, name: str) -> AllowedGlobal:
        return _global_class(_allowed_name(module, name))

    def persistent_load(self, identity: Any) -> Any:
        return self._persistent(identity)


@functools.cache
def _global_class(text: str) -> AllowedGlobal:
    return AllowedGlobal("AllowedGlobal", (), {"text": text, "__new__": _construct})


def storage_type(name: Any) -> str | None:
    """The element type of a storage class; None for an untyped storage.

    Raises:
        RefusedError: it is not a storage class.
    """
    if isinstance(name, AllowedGlobal):
        module, _, last = name.text.rpartition(".")
        if module in ("torch", "torch.storage", "torch.cuda") and last in _STORAGE_TYPES:
            return _STORAGE_TYPES[last]
    raise RefusedError(f"{shown(name)} is not a known kind of tensor storage")


def _allowed_name(module: str, name: str) -> str:
    module = "builtins" if module == "__builtin__" else module  # its name in protocol 2
    text = f"{module}.{name}"
    if text in ("numpy._core.multiarray.scalar", "numpy.core.multiarray.scalar"):
        text = "numpy.scalar"
    elif module in _NUMPY_MODULES and name in ("_reconstruct", "ndarray", "dtype"):
        text = f"numpy.{name}"
    elif module == "numpy.dtypes" and name.endswith("DType"):
        text = f"numpy.dtypes.{name}"
    is_known = (
        text in _CONSTRUCTORS
        or text in _VALUE_NAMES
        or text in _FOREIGN_NAMES
        or text.startswith(_FOREIGN_PREFIXES)
        or text == "numpy.ndarray"
        or (module == "torch" and (name in ITEM_BYTES or name == "strided"))
        or (module in ("torch", "torch.storage", "torch.cuda") and name in _STORAGE_TYPES)
    )
    if not is_known:
        raise RefusedError(f"the file names {shown(text)}, which is not allowed")
    return text


def _construct(called: AllowedGlobal, *arguments: Any, **keywords: Any) -> Any:
    """Returns the inert result of a call."""
    if keywords:
        raise RefusedError("the pickle creates an object with keyword arguments")
    make = _CONSTRUCTORS.get(called.text)
    if make is None:
        if called.text in _FOREIGN_NAMES or called.text.startswith(_FOREIGN_PREFIXES):
            return Stub(called.text, arguments)
        raise RefusedError(f"the file calls {called.text}, which is not allowed")
    try:
        return make(*arguments)
    except TypeError as failure:  # wrong number of arguments
        raise RefusedError(f"the file calls {called.text} with {len(arguments)} arguments") from failure


def _tensor(storage: Any, offset: Any, shape: Any, strides: Any, *_: Any) -> TensorView:
    if not isinstance(storage, StorageBytes) or storage.dtype is None:
        raise RefusedError(f"a tensor is made of {shown(storage)}, not of a typed storage")
    return _view(storage, storage.dtype, offset, shape, strides)


def _typed_tensor(
    storage: Any, offset: Any, shape: Any, strides: Any, _grad: Any, _hooks: Any, dtype: Any, *_: Any
) -> TensorView:
    name = dtype.text.removeprefix("torch.") if isinstance(dtype, AllowedGlobal) else ""
    if not isinstance(storage, StorageBytes) or name not in ITEM_BYTES:
        raise RefusedError(f"a tensor is made of {shown(storage)} with the element type {shown(dtype)}")
    return _view(storage, name, offset, shape, strides)


def _view(storage: StorageBytes, dtype: str, offset: Any, shape: Any, strides: Any) -> TensorView:
    sizes, steps = whole_numbers(shape, "the shape of a tensor"), whole_numbers(strides, "the strides of a tensor")
    (first,) = whole_numbers((offset,), "the offset of a tensor")
    if len(sizes) != len(steps):
        raise RefusedError(f"a tensor has {len(sizes)} dimensions and {len(steps)} strides")
    width = ITEM_BYTES[dtype]
    numel = math.prod(sizes)
    last = first + sum((size - 1) * step for size, step in zip(sizes, steps, strict=True)) if numel else first - 1
    if (last + 1) * width > storage.size_bytes or numel * width > storage.size_bytes:
        raise RefusedError(
            f"a tensor of {numel} elements from element {first} on needs more than the {storage.size_bytes} bytes of "
            "its storage"
        )
    return TensorView(storage, dtype, first, sizes, steps)


def _subclass(function: Any, owner: Any, arguments: Any, *_: Any) -> TensorView:
    """A tensor with attributes, which are dropped."""
    if (
        not isinstance(function, AllowedGlobal)
        or function.text not in _TENSOR_CALLS
        or not isinstance(owner, AllowedGlobal)
    ):
        raise RefusedError(f"a tensor is rebuilt by {shown(function)}")
    if not isinstance(arguments, tuple):
        raise RefusedError(f"the file calls {function.text} with {shown(arguments)} in place of arguments")
    return _parameter(_construct(function, *arguments))


def _parameter(data: Any, *_: Any) -> TensorView:
    if not isinstance(data, TensorView):
        raise RefusedError(f"a parameter is made of {shown(data)}, not of a tensor")
    return data


def _size(values: Any = ()) -> tuple[int, ...]:
    return whole_numbers(values, "a torch.Size")


def _table(*values: Any) -> InertDict:
    if any(not isinstance(value, AllowedGlobal | list | tuple) for value in values):
        raise RefusedError(f"a dictionary is made of {shown(values[0])}")
    table = InertDict()
    for value in values:
        for pair in () if isinstance(value, AllowedGlobal) else value:
            if not isinstance(pair, tuple | list) or len(pair) != 2:
                raise RefusedError(f"a dictionary is made of {shown(pair)} in place of a pair")
            table[pair[0]] = pair[1]
    return table


def _set_of(container: Callable[[Any], Any]) -> Callable[..., Any]:
    def make(values: Any = ()) -> Any:
        if not isinstance(values, list | tuple):
            raise RefusedError(f"a set is made of {shown(values)}")
        return container(values)

    return make


def _text(*parts: Any) -> str:
    if not parts or not all(isinstance(part, str) for part in parts):
        raise RefusedError("a path or device is not made of texts")
    if sum(map(len, parts)) > _LONGEST_PATH:  # joined texts could double with every call
        raise RefusedError(f"a path or device is longer than {_LONGEST_PATH} letters")
    return "/".join(parts)


def _device(kind: Any, index: Any = None) -> str:
    return _text(kind) if index is None else f"{_text(kind)}:{whole_numbers((index,), 'a device')[0]}"


def _encoded(text: Any, encoding: Any) -> bytes:
    if not isinstance(text, str) or encoding not in ("latin1", "latin-1"):
        raise RefusedError(f"bytes are made of {shown(text)} in the encoding {shown(encoding)}")
    try:
        return text.encode("latin-1")
    except UnicodeEncodeError as failure:
        raise RefusedError("bytes are made of a text that is not latin-1") from failure


def _member_of(owner: Any, name: Any) -> Stub:
    """The member of an enumeration, pickled by name."""
    is_foreign = isinstance(owner, AllowedGlobal) and owner.text.startswith(_FOREIGN_PREFIXES)
    if not is_foreign or not isinstance(name, str):
        raise RefusedError(f"the file calls builtins.getattr on {shown(owner)}")
    return Stub(owner.text, (name,))


def _number(number_type: Any, content: Any) -> float:
    if not isinstance(number_type, NumberType) or not isinstance(content, bytes):
        raise RefusedError("a numpy number is not made of a type and bytes")
    return number_type.numbers(content, 1)[0]


def _empty_array(owner: Any, *_: Any) -> NumberArray:
    if not isinstance(owner, AllowedGlobal) or owner.text != "numpy.ndarray":
        raise RefusedError(f"a numpy array is made of {shown(owner)}")
    return NumberArray()


_TENSOR_CALLS = (
    "torch._utils._rebuild_tensor_v2",
    "torch._utils._rebuild_tensor_v3",
    "torch._utils._rebuild_parameter",
)
_CONSTRUCTORS: Mapping[str, Callable[..., Any]] = {
    "torch._tensor._rebuild_from_type_v2": _subclass,
    "torch._utils._rebuild_tensor": _tensor,
    "torch._utils._rebuild_tensor_v2": _tensor,
    "torch._utils._rebuild_tensor_v3": _typed_tensor,
    "torch._utils._rebuild_parameter": _parameter,
    "torch.Size": _size,
    "torch.device": _device,
    "torch.serialization._get_layout": _text,
    "collections.OrderedDict": _table,
    "collections.defaultdict": _table,
    "builtins.set": _set_of(set),
    "builtins.frozenset": _set_of(frozenset),
    "builtins.getattr": _member_of,
    "pathlib.PosixPath": _text,
    "pathlib.PurePosixPath": _text,
    "pathlib.WindowsPath": _text,
    "pathlib.Path": _text,
    "pathlib._local.PosixPath": _text,
    "_codecs.encode": _encoded,
    "numpy.dtype": NumberType,
    "numpy.scalar": _number,
    "numpy._reconstruct": _empty_array,
}
