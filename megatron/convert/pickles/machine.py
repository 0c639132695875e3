"""An interpreter of pickles that executes nothing: calls become inert values or are refused.

Source: CPython, `Lib/pickletools.py` (opcodes of protocols 0 to 5).
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

from megatron.convert.pickles.constructors import admitted_name, construct, set_state, shown
from megatron.convert.pickles.values import Members, RefusedError, Table

_MARK = object()
_BUFFER_BYTES = 2**16
_LONGEST_LINE = 2**12
_LARGEST_INTEGER_BYTES = 32


class ByteSource:
    """Reads a range of a file from its beginning.

    Args:
        read_at: gives so many bytes from an offset of the file on.
    """

    def __init__(self, read_at: Callable[[int, int], bytes], begin_bytes: int, end_bytes: int) -> None:
        self._read_at = read_at
        self._end = end_bytes
        self._buffer = b""
        self._place = 0
        self._next = begin_bytes

    @property
    def position(self) -> int:
        """Offset in the file of the byte that is read next."""
        return self._next - len(self._buffer) + self._place

    def take(self, count: int) -> bytes:
        """The next bytes.

        Raises:
            RefusedError: the range ends before.
        """
        if count > self._end - self.position:
            raise RefusedError(f"the pickle ends within {count} bytes that it announces")
        have = self._buffer[self._place : self._place + count]
        if len(have) == count:
            self._place += count
            return have
        parts = [have]
        missing = count - len(have)
        self._buffer, self._place = b"", 0
        while missing > 0:
            block = self._read_at(self._next, min(max(missing, _BUFFER_BYTES), self._end - self._next))
            if not block:
                raise RefusedError("the file ends within the pickle")
            self._next += len(block)
            parts.append(block[:missing])
            self._buffer, self._place = block, min(missing, len(block))
            missing -= len(parts[-1])
        return b"".join(parts)

    def number(self, count: int) -> int:
        """The next bytes as an unsigned little-endian number."""
        return int.from_bytes(self.take(count), "little")

    def line(self) -> str:
        """The text up to the next newline."""
        found = bytearray()
        while (letter := self.take(1)) != b"\n":
            found += letter
            if len(found) > _LONGEST_LINE:
                raise RefusedError(f"a line of the pickle is longer than {_LONGEST_LINE} bytes")
        return _decoded(bytes(found))


class Machine:
    """Interprets one pickle after another.

    Args:
        persistent: gives the value of a persistent id, by which torch refers to tensors' bytes.
    """

    def __init__(self, source: ByteSource, persistent: Callable[[Any], Any]) -> None:
        self._source = source
        self._persistent = persistent
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def load(self) -> Any:
        """The value of the next pickle.

        Raises:
            RefusedError: it asks for something that is not admitted, or is no pickle.
        """
        self._stack, self._memo = [], {}
        while (code := self._source.take(1)[0]) != _STOP:
            operation = _OPERATIONS.get(code)
            if operation is None:
                raise RefusedError(f"the pickle has the operation {code:#04x}, which is not admitted")
            operation(self)
        if len(self._stack) != 1 or self._stack[0] is _MARK:
            raise RefusedError("the pickle does not end with one value")
        return self._stack.pop()

    def push(self, value: Any) -> None:
        """Puts a value on the stack."""
        self._stack.append(value)

    def pop(self) -> Any:
        """Takes the value on top of the stack."""
        if not self._stack or self._stack[-1] is _MARK:
            raise RefusedError("the pickle takes a value from an empty stack")
        return self._stack.pop()

    def pop_to_mark(self) -> list[Any]:
        """Takes all values down to the mark, and the mark."""
        place = len(self._stack) - 1
        while place >= 0 and self._stack[place] is not _MARK:
            place -= 1
        if place < 0:
            raise RefusedError("the pickle has no mark where it needs one")
        values = self._stack[place + 1 :]
        del self._stack[place:]
        return values

    def top(self) -> Any:
        """The value on top of the stack."""
        if not self._stack or self._stack[-1] is _MARK:
            raise RefusedError("the pickle refers to an empty stack")
        return self._stack[-1]

    def integer(self, width: int) -> int:
        """The next unsigned number of the pickle."""
        return self._source.number(width)

    def content(self, width: int) -> bytes:
        """Bytes that are preceded by their number."""
        return self._source.take(self._source.number(width))

    def line(self) -> str:
        """The next line of the pickle."""
        return self._source.line()

    def skip(self, count: int) -> None:
        """Passes over bytes."""
        self._source.take(count)

    def remember(self, place: int) -> None:
        """Keeps the value on top for later references."""
        self._memo[place] = self.top()

    def memoize(self) -> None:
        """Keeps the value on top under the next number."""
        self._memo[len(self._memo)] = self.top()

    def recall(self, place: int) -> None:
        """Puts a value that was kept on the stack again."""
        if place not in self._memo:
            raise RefusedError(f"the pickle refers to value {shown(place)}, which it has not stored")
        self.push(self._memo[place])

    def mark(self) -> None:
        """Marks the stack."""
        self._stack.append(_MARK)

    def refer(self) -> None:
        """Replaces a persistent id by its value."""
        self.push(self._persistent(self.pop()))


def _decoded(content: bytes) -> str:
    try:
        return content.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError as failure:
        raise RefusedError("a text of the pickle is not UTF-8") from failure


def _signed(content: bytes) -> int:
    if len(content) > _LARGEST_INTEGER_BYTES:
        raise RefusedError(f"an integer of {len(content)} bytes is not admitted")
    return int.from_bytes(content, "little", signed=True)


def _integer_line(machine: Machine) -> Any:
    text = machine.line()
    if text in ("00", "01"):
        return text == "01"
    digits = text.removesuffix("L")
    if len(digits) > 2 * _LARGEST_INTEGER_BYTES or not digits.lstrip("-").isdecimal():
        raise RefusedError(f"{shown(text)} is not an integer that is admitted")
    try:
        return int(digits)
    except ValueError as failure:
        raise RefusedError(f"{shown(text)} is not an integer") from failure


def _float_line(machine: Machine) -> float:
    text = machine.line()
    try:
        return float(text)
    except ValueError as failure:
        raise RefusedError(f"{shown(text)} is not a number") from failure


def _pushes(make: Callable[[Machine], Any]) -> Callable[[Machine], None]:
    return lambda machine: machine.push(make(machine))


def _tuple_of(count: int) -> Callable[[Machine], None]:
    def operation(machine: Machine) -> None:
        values = [machine.pop() for _ in range(count)]
        machine.push(tuple(reversed(values)))

    return operation


def _append(machine: Machine, values: list[Any]) -> None:
    target = machine.top()
    if not isinstance(target, list):
        raise RefusedError(f"the pickle appends to {shown(target)}")
    target.extend(values)


def _set_items(machine: Machine, values: list[Any]) -> None:
    target = machine.top()
    if not isinstance(target, Table) or len(values) % 2:
        raise RefusedError(f"the pickle sets items of {shown(target)}")
    target.pairs.extend(zip(values[::2], values[1::2], strict=True))


def _add_items(machine: Machine) -> None:
    values = machine.pop_to_mark()
    target = machine.top()
    if not isinstance(target, Members):
        raise RefusedError(f"the pickle adds members to {shown(target)}")
    target.items.extend(values)


def _set_item(machine: Machine) -> None:
    value = machine.pop()
    key = machine.pop()
    _set_items(machine, [key, value])


def _append_one(machine: Machine) -> None:
    value = machine.pop()
    _append(machine, [value])


def _table(machine: Machine) -> Table:
    values = machine.pop_to_mark()
    if len(values) % 2:
        raise RefusedError("the pickle makes a dictionary of an odd number of values")
    return Table(list(zip(values[::2], values[1::2], strict=True)))


def _call(machine: Machine) -> None:
    arguments = machine.pop()
    machine.push(construct(machine.pop(), arguments))


def _call_with_keywords(machine: Machine) -> None:
    keywords = machine.pop()
    if not isinstance(keywords, Table) or keywords.pairs:
        raise RefusedError("the pickle makes an object with keyword arguments")
    _call(machine)


def _call_named(machine: Machine) -> None:
    name = _name_lines(machine)
    machine.push(construct(name, tuple(machine.pop_to_mark())))


def _call_marked(machine: Machine) -> None:
    values = machine.pop_to_mark()
    if not values:
        raise RefusedError("the pickle makes an object of nothing")
    machine.push(construct(values[0], tuple(values[1:])))


def _build(machine: Machine) -> None:
    state = machine.pop()
    set_state(machine.top(), state)


def _name_lines(machine: Machine) -> Any:
    module = machine.line()
    return admitted_name(module, machine.line())


def _stack_name(machine: Machine) -> Any:
    name, module = machine.pop(), machine.pop()
    if not isinstance(name, str) or not isinstance(module, str):
        raise RefusedError("the pickle names something by values that are no texts")
    return admitted_name(module, name)


def _drop(machine: Machine) -> None:
    machine.pop()


def _drop_to_mark(machine: Machine) -> None:
    machine.pop_to_mark()


def _duplicate(machine: Machine) -> None:
    machine.push(machine.top())


def _protocol(machine: Machine) -> None:
    version = machine.integer(1)
    if version > 5:
        raise RefusedError(f"the pickle has protocol {version}; 0 to 5 are known")


_STOP = ord(".")
_OPERATIONS: dict[int, Callable[[Machine], None]] = {
    ord("("): Machine.mark,
    ord("0"): _drop,
    ord("1"): _drop_to_mark,
    ord("2"): _duplicate,
    ord("F"): _pushes(_float_line),
    ord("I"): _pushes(_integer_line),
    ord("L"): _pushes(_integer_line),
    ord("J"): _pushes(lambda machine: struct.unpack("<i", machine.integer(4).to_bytes(4, "little"))[0]),
    ord("K"): _pushes(lambda machine: machine.integer(1)),
    ord("M"): _pushes(lambda machine: machine.integer(2)),
    ord("N"): _pushes(lambda machine: None),
    ord("Q"): Machine.refer,
    ord("R"): _call,
    ord("T"): _pushes(lambda machine: machine.content(4).decode("latin-1")),
    ord("U"): _pushes(lambda machine: machine.content(1).decode("latin-1")),
    ord("V"): _pushes(lambda machine: machine.line()),
    ord("X"): _pushes(lambda machine: _decoded(machine.content(4))),
    ord("a"): _append_one,
    ord("b"): _build,
    ord("c"): _pushes(_name_lines),
    ord("d"): _pushes(_table),
    ord("}"): _pushes(lambda machine: Table()),
    ord("e"): lambda machine: _append(*_marked(machine)),
    ord("g"): lambda machine: machine.recall(_memo_line(machine)),
    ord("h"): lambda machine: machine.recall(machine.integer(1)),
    ord("i"): _call_named,
    ord("j"): lambda machine: machine.recall(machine.integer(4)),
    ord("l"): _pushes(lambda machine: machine.pop_to_mark()),
    ord("]"): _pushes(lambda machine: []),
    ord("o"): _call_marked,
    ord("p"): lambda machine: machine.remember(_memo_line(machine)),
    ord("q"): lambda machine: machine.remember(machine.integer(1)),
    ord("r"): lambda machine: machine.remember(machine.integer(4)),
    ord("s"): _set_item,
    ord("t"): _pushes(lambda machine: tuple(machine.pop_to_mark())),
    ord(")"): _pushes(lambda machine: ()),
    ord("u"): lambda machine: _set_items(*_marked(machine)),
    ord("G"): _pushes(lambda machine: struct.unpack(">d", machine.integer(8).to_bytes(8, "little"))[0]),
    ord("B"): _pushes(lambda machine: machine.content(4)),
    ord("C"): _pushes(lambda machine: machine.content(1)),
    0x80: _protocol,
    0x81: _call,
    0x85: _tuple_of(1),
    0x86: _tuple_of(2),
    0x87: _tuple_of(3),
    0x88: _pushes(lambda machine: True),
    0x89: _pushes(lambda machine: False),
    0x8A: _pushes(lambda machine: _signed(machine.content(1))),
    0x8B: _pushes(lambda machine: _signed(machine.content(4))),
    0x8C: _pushes(lambda machine: _decoded(machine.content(1))),
    0x8D: _pushes(lambda machine: _decoded(machine.content(8))),
    0x8E: _pushes(lambda machine: machine.content(8)),
    0x8F: _pushes(lambda machine: Members([])),
    0x90: _add_items,
    0x91: _pushes(lambda machine: Members(machine.pop_to_mark())),
    0x92: _call_with_keywords,
    0x93: _pushes(_stack_name),
    0x94: Machine.memoize,
    0x95: lambda machine: machine.skip(8),  # the length of a frame
    0x96: _pushes(lambda machine: machine.content(8)),
}


def _marked(machine: Machine) -> tuple[Machine, list[Any]]:
    return machine, machine.pop_to_mark()


def _memo_line(machine: Machine) -> int:
    text = machine.line()
    if not text.isdecimal() or len(text) > 10:
        raise RefusedError(f"{shown(text)} is not the number of a stored value")
    return int(text)
