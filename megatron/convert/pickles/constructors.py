"""The calls that a pickle may ask for, each made by a function here from inert values; every other name is refused."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping
from typing import Any

from megatron.convert.pickles.values import (
    ITEM_BYTES,
    Members,
    Name,
    NumberArray,
    NumberType,
    RefusedError,
    StandIn,
    Storage,
    Table,
    TensorPlace,
)

# Classes whose objects are kept as stand-ins: name and content, no behaviour.
_FOREIGN_PREFIXES = ("megatron.", "deepspeed.", "torch.distributed.checkpoint.", "transformer_engine.")
NAMESPACES = ("argparse.Namespace", "types.SimpleNamespace")
_FOREIGN_NAMES = frozenset({*NAMESPACES, "signal.Signals", "_io.BytesIO"})
# Names that appear as values only, such as the factory of a defaultdict.
_VALUE_NAMES = frozenset(
    {
        *(f"builtins.{name}" for name in ("dict", "list", "int", "float", "str", "tuple", "bool", "set", "long")),
        "torch.Tensor",
        "torch.nn.parameter.Parameter",
    }
)
_NUMPY_MODULES = ("numpy", "numpy.core.multiarray", "numpy._core.multiarray", "numpy.core.numeric")
_LARGEST_ARRAY_BYTES = 2**20
_MOST_DIMENSIONS = 16
_LONGEST_PATH = 2**13
_STRUCT_CODES = {
    "b1": "?", "i1": "b", "i2": "h", "i4": "i", "i8": "q", "u1": "B", "u2": "H", "u4": "I", "u8": "Q",
    "f2": "e", "f4": "f", "f8": "d",
}  # fmt: skip
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


def storage_type(name: Any) -> str | None:
    """The element type of a storage class; None for one without a type.

    Raises:
        RefusedError: it is no storage class.
    """
    if isinstance(name, Name):
        module, _, last = name.text.rpartition(".")
        if module in ("torch", "torch.storage", "torch.cuda") and last in _STORAGE_TYPES:
            return _STORAGE_TYPES[last]
    raise RefusedError(f"{shown(name)} is not a known kind of tensor storage")


def admitted_name(module: str, name: str) -> Any:
    """The value of a name that a pickle mentions.

    Raises:
        RefusedError: the name is not admitted.
    """
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
        raise RefusedError(f"the file names {shown(text)}, which is not admitted")
    return Name(text)


def construct(called: Any, arguments: Any) -> Any:
    """The inert value of a call.

    Raises:
        RefusedError: what is called or how it is called is not admitted.
    """
    if not isinstance(called, Name):
        raise RefusedError(f"the file calls {shown(called)}, which is no name")
    if not isinstance(arguments, tuple):
        raise RefusedError(f"the file calls {called.text} with {shown(arguments)} in place of arguments")
    made = _CONSTRUCTORS.get(called.text)
    if made is None:
        if called.text in _FOREIGN_NAMES or called.text.startswith(_FOREIGN_PREFIXES):
            return StandIn(called.text, arguments)
        raise RefusedError(f"the file calls {called.text}, which is not admitted")
    try:
        return made(*arguments)
    except TypeError as failure:  # another number of arguments
        raise RefusedError(f"the file calls {called.text} with {len(arguments)} arguments") from failure


def set_state(target: Any, state: Any) -> None:
    """Gives a value its state, as unpickling would; values that have none ignore a dictionary of attributes.

    Raises:
        RefusedError: the target takes no such state.
    """
    if isinstance(target, StandIn):
        if target.name in NAMESPACES and not isinstance(state, Table):
            raise RefusedError(f"a namespace has the state {shown(state)}")
        target.state = state
    elif isinstance(target, NumberType):
        order = state[1] if isinstance(state, tuple) and len(state) >= 2 else None
        if order not in ("<", "|", "=", ">"):
            raise RefusedError(f"a numpy type has the state {shown(state)}")
        target.little_endian = order != ">"
    elif isinstance(target, NumberArray):
        _fill(target, state)
    elif not (isinstance(target, Table) and isinstance(state, Table)):  # an OrderedDict's attributes say nothing
        raise RefusedError(f"the file gives {shown(target)} a state")


def shown(value: Any) -> str:
    """A value as it stands in an error text, short whatever it holds."""
    if isinstance(value, Name):
        value = value.text
    if isinstance(value, bool | float | str) or value is None or (isinstance(value, int) and abs(value) < 2**64):
        text = value if isinstance(value, str) else repr(value)
        return "".join(letter if letter.isprintable() else "?" for letter in text[:80])
    return f"a value of type {type(value).__name__}"


def whole_numbers(values: Any, what: str) -> tuple[int, ...]:
    """A tuple or list of whole numbers >= 0, at most 16 of them.

    Raises:
        RefusedError: it is something else.
    """
    if not isinstance(values, tuple | list) or len(values) > _MOST_DIMENSIONS:
        raise RefusedError(f"{what} is {shown(values)}, not a short list of numbers")
    for value in values:
        if type(value) is not int or not 0 <= value < 2**62:
            raise RefusedError(f"{what} has the entry {shown(value)}, which is no number in range")
    return tuple(values)


def _tensor(storage: Any, offset: Any, shape: Any, strides: Any, *_: Any) -> TensorPlace:
    if not isinstance(storage, Storage) or storage.dtype is None:
        raise RefusedError(f"a tensor is made of {shown(storage)}, not of a typed storage")
    return _view(storage, storage.dtype, offset, shape, strides)


def _typed_tensor(
    storage: Any, offset: Any, shape: Any, strides: Any, _grad: Any, _hooks: Any, dtype: Any, *_: Any
) -> TensorPlace:
    name = dtype.text.removeprefix("torch.") if isinstance(dtype, Name) else ""
    if not isinstance(storage, Storage) or name not in ITEM_BYTES:
        raise RefusedError(f"a tensor is made of {shown(storage)} with the element type {shown(dtype)}")
    return _view(storage, name, offset, shape, strides)


def _view(storage: Storage, dtype: str, offset: Any, shape: Any, strides: Any) -> TensorPlace:
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
    return TensorPlace(storage, dtype, first, sizes, steps)


def _subclass(function: Any, kind: Any, arguments: Any, *_: Any) -> TensorPlace:
    """A tensor with attributes of its own, which are left out."""
    if not isinstance(function, Name) or function.text not in _TENSOR_CALLS or not isinstance(kind, Name):
        raise RefusedError(f"a tensor is rebuilt by {shown(function)}")
    made = construct(function, arguments)
    return _parameter(made)


def _parameter(data: Any, *_: Any) -> TensorPlace:
    if not isinstance(data, TensorPlace):
        raise RefusedError(f"a parameter is made of {shown(data)}, not of a tensor")
    return data


def _size(values: Any = ()) -> tuple[int, ...]:
    return whole_numbers(values, "a torch.Size")


def _table(*values: Any) -> Table:
    if any(not isinstance(value, Name | list | tuple) for value in values):
        raise RefusedError(f"a dictionary is made of {shown(values[0])}")
    table = Table()
    for value in values:
        for pair in () if isinstance(value, Name) else value:
            if not isinstance(pair, tuple | list) or len(pair) != 2:
                raise RefusedError(f"a dictionary is made of {shown(pair)} in place of a pair")
            table.pairs.append((pair[0], pair[1]))
    return table


def _members(values: Any = ()) -> Members:
    if not isinstance(values, list | tuple):
        raise RefusedError(f"a set is made of {shown(values)}")
    return Members(list(values))


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


def _member_of(owner: Any, name: Any) -> StandIn:
    """The member of an enumeration that is pickled by name."""
    is_foreign = isinstance(owner, Name) and owner.text.startswith(_FOREIGN_PREFIXES)
    if not is_foreign or not isinstance(name, str):
        raise RefusedError(f"the file calls builtins.getattr on {shown(owner)}")
    return StandIn(owner.text, (name,))


def _layout(name: Any) -> str:
    return _text(name)


def _number_type(code: Any, *_: Any) -> NumberType:
    if not isinstance(code, str) or code not in _STRUCT_CODES:
        raise RefusedError(f"numpy type {shown(code)} is not admitted")
    return NumberType(code)


def _number(kind: Any, content: Any) -> float:
    if not isinstance(kind, NumberType) or not isinstance(content, bytes):
        raise RefusedError("a numpy number is not made of a type and bytes")
    numbers = _unpacked(kind, content, 1)
    return numbers[0]


def _empty_array(owner: Any, *_: Any) -> NumberArray:
    if not isinstance(owner, Name) or owner.text != "numpy.ndarray":
        raise RefusedError(f"a numpy array is made of {shown(owner)}")
    return NumberArray()


def _fill(array: NumberArray, state: Any) -> None:
    if not isinstance(state, tuple) or len(state) != 5 or not isinstance(state[2], NumberType):
        raise RefusedError(f"a numpy array has the state {shown(state)}")
    _, shape, kind, is_fortran, content = state
    sizes = whole_numbers(shape, "the shape of a numpy array")
    if is_fortran not in (False, 0) or not isinstance(content, bytes):
        raise RefusedError("a numpy array is not stored as rows of bytes")
    array.shape, array.code = sizes, kind.code
    array.numbers = _unpacked(kind, content, math.prod(sizes))


def _unpacked(kind: NumberType, content: bytes, count: int) -> tuple[float, ...]:
    width = int(kind.code[1:])
    if count * width != len(content) or len(content) > _LARGEST_ARRAY_BYTES:
        raise RefusedError(f"{count} numpy numbers of type {kind.code} are stored in {len(content)} bytes")
    return struct.unpack(f"{'<' if kind.little_endian else '>'}{count}{_STRUCT_CODES[kind.code]}", content)


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
    "torch.serialization._get_layout": _layout,
    "collections.OrderedDict": _table,
    "collections.defaultdict": _table,
    "builtins.set": _members,
    "builtins.frozenset": _members,
    "builtins.getattr": _member_of,
    "pathlib.PosixPath": _text,
    "pathlib.PurePosixPath": _text,
    "pathlib.WindowsPath": _text,
    "pathlib.Path": _text,
    "pathlib._local.PosixPath": _text,
    "_codecs.encode": _encoded,
    "numpy.dtype": _number_type,
    "numpy.scalar": _number,
    "numpy._reconstruct": _empty_array,
}
