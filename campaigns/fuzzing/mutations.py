"""Ways to damage files: of any kind, of token indices, of JSON, and of lines of JSON.

A mutation takes a source of randomness and the files of a case (name to bytes) and returns the damaged files. The same
randomness gives the same damage, so that a case can be played again from its number.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from random import Random
from typing import Any

Files = dict[str, bytes]
Mutation = Callable[[Random, Files], Files]

NUMBERS = (
    0, 1, 2, 3, 7, 9, 127, 128, 255, 256, 32767, 32768, 65499, 65500, 65535, 65536,
    2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**61, 2**62, 2**63 - 1, 2**63, 2**64 - 1, 2**64 - 8, 2**64 - 2**31,
)  # fmt: skip
HOSTILE_JSON = (
    "null", "true", "-1", "0", "1.5", "-0.0", "1e999", "-1e999", "NaN", "Infinity", "9" * 400, "-" + "9" * 400,
    "9" * 5000, "2147483648", "18446744073709551616", '""', '"x"', '"\\u0000"', '"\\ud800"', '"\\udc00\\ud800"',
    '"' + "x" * 70000 + '"', "[]", "{}", "[[]]", '[1, "a", null]', '{"a": {"b": []}}', "[" * 100000,
    "[" * 100000 + "]" * 100000, '{"a":' * 100000 + "1" + "}" * 100000, '{"a": 1, "a": 2}', "", "nul", "\x00",
)  # fmt: skip


def flip_bits(draw: Random, files: Files) -> Files:
    """One to eight bits of one file, near each other or anywhere."""
    name, data = _pick(draw, files)
    near = draw.randrange(len(data))
    for _ in range(draw.choice((1, 1, 1, 2, 8))):
        at = min(near + draw.randrange(16), len(data) - 1) if draw.random() < 0.5 else draw.randrange(len(data))
        data[at] ^= 1 << draw.randrange(8)
    return {**files, name: bytes(data)}


def cut(draw: Random, files: Files) -> Files:
    """The end of one file is missing."""
    name, data = _pick(draw, files)
    del data[draw.choice((draw.randrange(len(data)), len(data) - draw.randint(1, min(9, len(data))))) :]
    return {**files, name: bytes(data)}


def extend(draw: Random, files: Files) -> Files:
    """Something follows the end of one file: zeros, noise, or the file again."""
    name, data = _pick(draw, files)
    count = draw.choice((1, 2, 4, 8, 512, 4096))
    tail = draw.choice((bytes(count), draw.randbytes(count), bytes(data), bytes(data[-count:]), b"\n", b"\xff" * count))
    return {**files, name: bytes(data) + tail}


def empty(draw: Random, files: Files) -> Files:
    """One file has no bytes."""
    return {**files, draw.choice(sorted(files)): b""}


def lose(draw: Random, files: Files) -> Files:
    """One file is not there."""
    name = draw.choice(sorted(files))
    return {other: data for other, data in files.items() if other != name}


def overwrite(draw: Random, files: Files) -> Files:
    """A stretch of one file reads as zeros, ones, noise, or as another stretch of it."""
    name, data = _pick(draw, files)
    start = draw.randrange(len(data))
    size = min(draw.choice((1, 4, 8, 64, 512)), len(data) - start)
    other = draw.randrange(len(data) - size + 1)
    data[start : start + size] = draw.choice(
        (bytes(size), b"\xff" * size, draw.randbytes(size), bytes(data[other : other + size]))
    )
    return {**files, name: bytes(data)}


def insert_or_remove(draw: Random, files: Files) -> Files:
    """A range of one file is duplicated or removed, so that everything after it is shifted."""
    name, data = _pick(draw, files)
    start = draw.randrange(len(data))
    stretch = data[start : start + draw.choice((1, 2, 3, 4, 8, 100))]
    if draw.random() < 0.5:
        data[start:start] = stretch
    else:
        del data[start : start + len(stretch)]
    return {**files, name: bytes(data)}


def swap(draw: Random, files: Files) -> Files:
    """Two files have exchanged names; the halves of a single file are exchanged."""
    names = sorted(files)
    if len(names) == 1:
        middle = len(files[names[0]]) // 2
        return {names[0]: files[names[0]][middle:] + files[names[0]][:middle]}
    one, other = draw.sample(names, 2)
    return {**files, one: files[other], other: files[one]}


def number(draw: Random, files: Files) -> Files:
    """A huge, small or negative number is written somewhere in one file, aligned or not."""
    name, data = _pick(draw, files)
    value, width = draw.choice(NUMBERS), draw.choice((2, 4, 8))
    written = (value % (1 << (8 * width))).to_bytes(width, draw.choice(("little", "little", "big")))
    start = draw.randrange(len(data))
    data[start : start + width] = written
    return {**files, name: bytes(data)}


ANY_FILE: Mapping[str, Mutation] = {
    "bit flips": flip_bits,
    "truncation": cut,
    "extension": extend,
    "zero length": empty,
    "missing file": lose,
    "stretch overwritten": overwrite,
    "stretch inserted or removed": insert_or_remove,
    "swapped files": swap,
    "number anywhere": number,
}


# --- token indices --------------------------------------------------------------------------------


class IndexLayout:
    """The offsets of the fields of an undamaged `.idx` file.

    Args:
        header: (name, offset, struct format) of each header field.
        tables: name to (offset, struct format, entries).
    """

    def __init__(self, data: bytes) -> None:
        if data.startswith(b"MMIDIDX"):
            sequences, entries = struct.unpack_from("<QQ", data, 18)
            self.header = (("version", 9, "<Q"), ("dtype", 17, "<B"), ("count", 18, "<Q"), ("count", 26, "<Q"))
            self.tables = {
                "length": (34, "<i", sequences),
                "pointer": (34 + 4 * sequences, "<q", sequences),
                "document": (34 + 12 * sequences, "<q", entries),
            }
        else:
            sequences, sizes, entries = struct.unpack_from("<QQQ", data, 32)
            fields = ("version", "dtype", "width", "count", "count", "count")
            self.header = tuple((field, 8 + 8 * place, "<Q") for place, field in enumerate(fields))
            self.tables = {
                "dimension": (56, "<q", sequences + 1),
                "pointer": (56 + 8 * (sequences + 1), "<q", sequences + 1),
                "length": (56 + 16 * (sequences + 1), "<q", sizes),
                "document": (56 + 16 * (sequences + 1) + 8 * sizes, "<q", entries),
            }


def header_number(draw: Random, files: Files) -> Files:
    """A header field of an index holds a huge, small or negative number."""
    return _header(draw, files, ("version", "dtype", "width", "count"), NUMBERS)


def dtype_code(draw: Random, files: Files) -> Files:
    """The index declares another element type."""
    return _header(draw, files, ("dtype",), tuple(range(12)))


def count_and_size(draw: Random, files: Files) -> Files:
    """A count of the header and the size of the index change together, so that they still agree."""
    name, data, layout = _index(draw, files)
    _, offset, form = draw.choice([field for field in layout.header if field[0] == "count"])
    (count,) = struct.unpack_from(form, data, offset)
    more = draw.choice((1, 2, -1, -count, 1000))
    struct.pack_into(form, data, offset, max(0, count + more))
    for width in draw.sample((4, 8, 12, 16), draw.randint(1, 2)):
        data = data + bytes(width * more) if more > 0 else data[: max(0, len(data) + width * more)]
    return {**files, name: bytes(data)}


def pointer_misaligned(draw: Random, files: Files) -> Files:
    """A pointer, or every pointer from one on, is off by a few bytes."""
    name, data, layout = _index(draw, files)
    offset, form, entries = layout.tables["pointer"]
    first = draw.randrange(entries)
    shift = draw.choice((1, -1, 2, 3, 4, 8, -8))
    for place in range(first, entries if draw.random() < 0.5 else first + 1):
        _add(data, form, offset + 8 * place, shift)
    return {**files, name: bytes(data)}


def pointer_overlapping(draw: Random, files: Files) -> Files:
    """A pointer gets the value of another one."""
    name, data, layout = _index(draw, files)
    offset, form, entries = layout.tables["pointer"]
    one, other = draw.randrange(entries), draw.randrange(entries)
    struct.pack_into(form, data, offset + 8 * one, struct.unpack_from(form, data, offset + 8 * other)[0])
    return {**files, name: bytes(data)}


def table_number(draw: Random, files: Files) -> Files:
    """An entry of a table holds a huge, small or negative number."""
    name, data, layout = _index(draw, files)
    offset, form, entries = layout.tables[draw.choice(sorted(layout.tables))]
    width = struct.calcsize(form)
    value = draw.choice(NUMBERS) % (1 << (8 * width))
    at = offset + width * draw.randrange(entries)
    data[at : at + width] = value.to_bytes(width, "little")
    return {**files, name: bytes(data)}


def lengths_that_wrap(draw: Random, files: Files) -> Files:
    """Two lengths grow and shrink so that their sum stays, or wraps around, and the sizes still agree."""
    name, data, layout = _index(draw, files)
    offset, form, entries = layout.tables["length"]
    width = struct.calcsize(form)
    one, other = draw.sample(range(entries), 2)
    amount = draw.choice((1, 7, 2**30, 2**31 - 1, 2**31, 2**62))
    _add(data, form, offset + width * one, amount)
    _add(data, form, offset + width * other, -amount)
    return {**files, name: bytes(data)}


def documents_unsorted(draw: Random, files: Files) -> Files:
    """Two entries of the document table change places."""
    name, data, layout = _index(draw, files)
    offset, form, entries = layout.tables["document"]
    one, other = (offset + 8 * place for place in draw.sample(range(entries), 2))
    first, second = struct.unpack_from(form, data, one)[0], struct.unpack_from(form, data, other)[0]
    struct.pack_into(form, data, one, second)
    struct.pack_into(form, data, other, first)
    return {**files, name: bytes(data)}


def foreign_ids(draw: Random, files: Files) -> Files:
    """Some ids of the `.bin` file are outside the vocabulary."""
    name = next(name for name in sorted(files) if name.endswith(".bin"))
    data = bytearray(files[name])
    for _ in range(draw.choice((1, 3))):
        at = 2 * draw.randrange(len(data) // 2)
        data[at : at + 2] = draw.choice((b"\xff\xff", b"\x00\x80", b"\xdc\xff", draw.randbytes(2)))
    return {**files, name: bytes(data)}


INDEX: Mapping[str, Mutation] = {
    "header number": header_number,
    "other dtype code": dtype_code,
    "count and size agree": count_and_size,
    "misaligned pointers": pointer_misaligned,
    "overlapping pointers": pointer_overlapping,
    "table number": table_number,
    "lengths that wrap": lengths_that_wrap,
    "unsorted documents": documents_unsorted,
    "ids of no vocabulary": foreign_ids,
}


# --- JSON -----------------------------------------------------------------------------------------


def json_value(draw: Random, files: Files) -> Files:
    """A value somewhere in a JSON file is replaced by a malicious one."""
    name, tree = _json_file(draw, files)
    holder, key = draw.choice(_places(tree))
    holder[key] = _MARK
    text = json.dumps(tree, ensure_ascii=draw.random() < 0.5)
    return {**files, name: text.replace(f'"{_MARK}"', draw.choice(HOSTILE_JSON)).encode("utf-8", "surrogatepass")}


def json_key(draw: Random, files: Files) -> Files:
    """A key of a JSON file is missing, renamed or duplicated, or an entry of a list is missing."""
    name, tree = _json_file(draw, files)
    holder, key = draw.choice(_places(tree))
    if isinstance(holder, list) or draw.random() < 0.4:
        del holder[key]
    elif draw.random() < 0.5:
        holder[draw.choice(("", "x", key.upper(), key + " ", "\x00", "__class__"))] = holder.pop(key)
    else:
        holder[_MARK] = draw.choice((None, 1, "x", [], holder[key]))
        return {**files, name: json.dumps(tree).replace(f'"{_MARK}"', json.dumps(key)).encode()}
    return {**files, name: json.dumps(tree).encode()}


def json_whole(draw: Random, files: Files) -> Files:
    """A JSON file holds one hostile value and nothing else, or its text is in another encoding."""
    name = draw.choice([name for name in sorted(files) if name.endswith(".json")])
    data = files[name]
    encodings = (b"\xef\xbb\xbf" + data, data.decode().encode("utf-16"), data.decode().encode("utf-32"), data + data)
    return {**files, name: draw.choice((*(text.encode() for text in HOSTILE_JSON), *encodings))}


JSON: Mapping[str, Mutation] = {"JSON value": json_value, "JSON key": json_key, "JSON as a whole": json_whole}

_MARK = "here stands the hostile value"


def _pick(draw: Random, files: Files) -> tuple[str, bytearray]:
    """One of the files that are not empty, and its bytes."""
    names = [name for name in sorted(files) if files[name]]
    name = draw.choice(names) if names else sorted(files)[0]
    return name, bytearray(files[name] or b"\x00")


def _index(draw: Random, files: Files) -> tuple[str, bytearray, IndexLayout]:
    name = draw.choice([name for name in sorted(files) if name.endswith(".idx")])
    return name, bytearray(files[name]), IndexLayout(files[name])


def _header(draw: Random, files: Files, fields: tuple[str, ...], values: tuple[int, ...]) -> Files:
    name, data, layout = _index(draw, files)
    _, offset, form = draw.choice([field for field in layout.header if field[0] in fields])
    width = struct.calcsize(form)
    data[offset : offset + width] = (draw.choice(values) % (1 << (8 * width))).to_bytes(width, "little")
    return {**files, name: bytes(data)}


def _add(data: bytearray, form: str, offset: int, amount: int) -> None:
    """Adds to a number of a file, wrapping around as the machine's arithmetic would."""
    bits = 8 * struct.calcsize(form)
    value = (struct.unpack_from(form, data, offset)[0] + amount) % (1 << bits)
    data[offset : offset + bits // 8] = value.to_bytes(bits // 8, "little")


def _json_file(draw: Random, files: Files) -> tuple[str, Any]:
    name = draw.choice([name for name in sorted(files) if name.endswith(".json")])
    return name, json.loads(files[name])


def _places(tree: Any) -> list[tuple[Any, Any]]:
    """Every (holder, key) below a value, none where it is no tree.

    Small levels are repeated, so that each is about as likely as the one below it, however many entries it has.
    """
    levels: list[list[tuple[Any, Any]]] = []
    reached = [tree] if isinstance(tree, (dict, list)) else []
    while reached:
        entries = [
            (holder, key) for holder in reached for key in (holder if isinstance(holder, dict) else range(len(holder)))
        ]
        if entries:
            levels.append(entries)
        reached = [holder[key] for holder, key in entries if isinstance(holder[key], (dict, list))]
    most = max(map(len, levels), default=0)
    return [entry for level in levels for entry in level * max(1, min(50, most // len(level)))]
