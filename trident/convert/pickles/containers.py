"""The files that hold pickles: torch's zip archives, its older files without zip, and bare pickles.

Source: torch 2.13, `torch/serialization.py` (`_save`, `_legacy_save`). Archives never hold compressed entries.
"""

from __future__ import annotations

import encodings.cp437  # noqa: F401  zip names need it, and by then no file can be opened any more
import io
import itertools
import struct
import zipfile
import zlib
from collections.abc import Callable
from typing import Any

from trident.convert.pickles.unpickler import (
    ITEM_BYTES,
    InertUnpickler,
    RefusedError,
    StorageBytes,
    shown,
    storage_type,
)

_LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
_LARGEST_PICKLE_BYTES = 2**29
_BUFFER_BYTES = 2**17
_LOCAL_HEADER = struct.Struct("<4s22xHH")
_MOST_ENTRIES = 2**20
_CHECKED_BYTES = 2**22


class FileRange(io.RawIOBase):
    """A range of an open file as a file of its own; needs no other file descriptor."""

    def __init__(self, read_at: Callable[[int, int], bytes], begin_bytes: int, end_bytes: int) -> None:
        super().__init__()
        self.read_at = read_at
        self.begin, self.end = begin_bytes, end_bytes
        self._place = 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: self.end - self.begin}[whence]
        if base + offset < 0:
            raise OSError("a place before the beginning of the file")
        self._place = base + offset
        return self._place

    def tell(self) -> int:
        return self._place

    def readinto(self, target: Any) -> int:
        count = max(0, min(len(target), self.end - self.begin - self._place))
        content = self.read_at(self.begin + self._place, count) if count else b""
        target[: len(content)] = content
        self._place += len(content)
        return len(content)


class _PickleFile(io.BufferedReader):
    """A range of a file that refuses to read more than it holds: the memory would be taken first."""

    def __init__(self, file: FileRange) -> None:
        super().__init__(file, _BUFFER_BYTES)
        self._size_bytes = file.end - file.begin

    def read(self, count: int | None = -1) -> bytes:
        if count is not None and count > self._size_bytes - self.tell():
            raise RefusedError(f"the pickle ends within {count} bytes that it announces")
        return super().read(count)


def read_range(file: FileRange) -> Any:
    """The value in a range of a file: an archive of torch, an older file of torch, or a bare pickle.

    Raises:
        RefusedError: it is none of them, is damaged, or asks for something that is not admitted.
    """
    start = file.read_at(file.begin, min(4, file.end - file.begin))
    if start == b"PK\x03\x04":
        return _Archive(file).load()
    if not start or start[0] != 0x80:
        raise RefusedError(f"it begins with the bytes {start.hex() or 'of an empty file'}, neither a zip nor a pickle")
    return _OlderFile(file).load()


class _Archive:
    """A zip file as torch.save writes it: `NAME/data.pkl`, and the bytes of each storage as `NAME/data/KEY`."""

    def __init__(self, file: FileRange) -> None:
        self._file = file
        self._storages: dict[str, StorageBytes] = {}
        try:
            with zipfile.ZipFile(io.BufferedReader(file)) as archive:
                entries = archive.infolist()
        except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError, struct.error) as failure:
            raise RefusedError(f"it is a damaged zip file ({shown(str(failure))})") from failure
        if len(entries) > _MOST_ENTRIES:
            raise RefusedError(f"its zip directory has {len(entries)} entries")
        self._entries = {entry.filename: entry for entry in entries}
        if len(self._entries) != len(entries):
            raise RefusedError("its zip directory has two entries of one name")
        for entry in entries:
            self._check(entry)
        self._check_overlaps(entries)

    def load(self) -> Any:
        pickles = [name for name in self._entries if name.count("/") == 1 and name.endswith("/data.pkl")]
        if len(pickles) != 1:
            raise RefusedError(f"the zip file has {len(pickles)} entries NAME/data.pkl; torch.save writes one")
        self._folder = pickles[0].removesuffix("data.pkl")
        order = self._entries.get(self._folder + "byteorder")
        if order is not None and self._file.read_at(self._begin(order), min(order.file_size, 16)) != b"little":
            raise RefusedError("its tensors are not stored little-endian")
        entry = self._entries[pickles[0]]
        if entry.file_size > _LARGEST_PICKLE_BYTES:
            raise RefusedError(f"its pickle has {entry.file_size} bytes")
        begin = self._checked_begin(entry)
        content = _PickleFile(FileRange(self._file.read_at, begin, begin + entry.file_size))
        return InertUnpickler(content, self._storage).load()

    def _check(self, entry: zipfile.ZipInfo) -> None:
        name = entry.filename
        if name.startswith("/") or ".." in name.split("/") or "\\" in name or "\0" in name:
            raise RefusedError(f"its zip directory has the entry {shown(name)}, which leads out of the archive")
        if entry.compress_type != zipfile.ZIP_STORED or entry.file_size != entry.compress_size:
            raise RefusedError(f"entry {shown(name)} of the zip file is compressed, which torch.save never does")
        if entry.flag_bits & 0x1:
            raise RefusedError(f"entry {shown(name)} of the zip file is encrypted")
        if entry.header_offset < 0 or entry.header_offset + entry.file_size > self._file.end - self._file.begin:
            raise RefusedError(f"entry {shown(name)} of the zip file reaches beyond its end")

    def _check_overlaps(self, entries: list[zipfile.ZipInfo]) -> None:
        placed = sorted(entries, key=lambda entry: entry.header_offset)
        for entry, following in itertools.pairwise(placed):
            if entry.header_offset + _LOCAL_HEADER.size + entry.file_size > following.header_offset:
                raise RefusedError(
                    f"entries {shown(entry.filename)} and {shown(following.filename)} of the zip file overlap"
                )

    def _begin(self, entry: zipfile.ZipInfo) -> int:
        """Offset in the file of an entry's first byte; the header in front of it has a length of its own."""
        start = self._file.begin + entry.header_offset
        header = self._file.read_at(start, _LOCAL_HEADER.size)
        if len(header) < _LOCAL_HEADER.size:
            raise RefusedError(f"entry {shown(entry.filename)} of the zip file is cut off")
        mark, name_bytes, extra_bytes = _LOCAL_HEADER.unpack(header)
        name = self._file.read_at(start + _LOCAL_HEADER.size, name_bytes)
        begin = start + _LOCAL_HEADER.size + name_bytes + extra_bytes
        if mark != b"PK\x03\x04" or name != entry.orig_filename.encode():
            raise RefusedError(f"entry {shown(entry.filename)} of the zip file is not where its directory says")
        if begin + entry.file_size > self._file.end:
            raise RefusedError(f"entry {shown(entry.filename)} of the zip file reaches beyond its end")
        return begin

    def _checked_begin(self, entry: zipfile.ZipInfo) -> int:
        """The same, where the entry's bytes have the checksum of the directory; 0 stands for none computed."""
        begin, checksum = self._begin(entry), 0
        for place in range(begin, begin + entry.file_size, _CHECKED_BYTES):
            count = min(_CHECKED_BYTES, begin + entry.file_size - place)
            checksum = zlib.crc32(self._file.read_at(place, count), checksum)
        if entry.CRC not in (0, checksum):
            raise RefusedError(
                f"entry {shown(entry.filename)} of the zip file is damaged: its checksum is {checksum:08x}, and the "
                f"directory says {entry.CRC:08x}"
            )
        return begin

    def _storage(self, identity: Any) -> StorageBytes:
        dtype, key, _, numel = _storage_identity(identity, 5)
        known = self._storages.get(key)
        entry = self._entries.get(f"{self._folder}data/{key}")
        if entry is None:
            raise RefusedError(f"the pickle refers to storage {shown(key)}, which the zip file does not hold")
        width = ITEM_BYTES[dtype] if dtype else 1
        if numel * width != entry.file_size:
            raise RefusedError(
                f"storage {shown(key)} has {entry.file_size} bytes, but the pickle says {numel} elements of {width}"
            )
        if known is None or known.dtype != dtype:
            known = self._storages[key] = StorageBytes(self._checked_begin(entry), entry.file_size, dtype)
        return known


class _OlderFile:
    """Either a bare pickle, or what torch wrote before 1.6: pickles in a row, then the storages."""

    def __init__(self, file: FileRange) -> None:
        self._file = file
        self._asked: dict[str, tuple[str | None, int]] = {}
        self._made: dict[str, StorageBytes] | None = None

    def load(self) -> Any:
        content = _PickleFile(FileRange(self._file.read_at, self._file.begin, self._file.end))
        first = InertUnpickler(content, _no_storages).load()
        if first != _LEGACY_MAGIC or type(first) is not int:
            return first
        version = InertUnpickler(content, _no_storages).load()
        if version != 1001:
            raise RefusedError(f"the file has torch's older format in version {shown(version)}; 1001 is known")
        InertUnpickler(content, _no_storages).load()  # byte order and sizes of the machine that wrote it
        start = content.tell()
        InertUnpickler(content, self._announce).load()
        keys = InertUnpickler(content, _no_storages).load()
        self._made = self._placed(keys, self._file.begin + content.tell())
        content.seek(start)
        return InertUnpickler(content, self._storage).load()

    def _announce(self, identity: Any) -> StorageBytes:
        """Notes a storage on the first reading, when it is not known yet where it is."""
        dtype, key, view, numel = _storage_identity(identity, 6)
        if view is not None:
            raise RefusedError("the pickle refers to a part of a storage, which is not admitted")
        width = ITEM_BYTES[dtype] if dtype else 1
        self._asked[key] = (dtype, numel * width)
        return StorageBytes(0, numel * width, dtype)

    def _placed(self, keys: Any, position: int) -> dict[str, StorageBytes]:
        if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
            raise RefusedError(f"the list of storages is {shown(keys)}")
        made = {}
        for key in keys:
            if key not in self._asked or key in made:
                raise RefusedError(f"the file holds storage {shown(key)}, which the pickle does not ask for once")
            dtype, size_bytes = self._asked[key]
            count = int.from_bytes(self._file.read_at(position, 8), "little")
            if count * (ITEM_BYTES[dtype] if dtype else 1) != size_bytes or position + 8 + size_bytes > self._file.end:
                raise RefusedError(f"storage {shown(key)} should have {size_bytes} bytes, but the file says otherwise")
            made[key] = StorageBytes(position + 8, size_bytes, dtype)
            position += 8 + size_bytes
        return made

    def _storage(self, identity: Any) -> StorageBytes:
        _, key, _, _ = _storage_identity(identity, 6)
        storage = (self._made or {}).get(key)
        if storage is None:
            raise RefusedError(f"the pickle refers to storage {shown(key)}, which the file does not hold")
        return storage


def _storage_identity(identity: Any, length: int) -> tuple[str | None, str, Any, int]:
    """Element type, key, view and number of elements of a persistent id."""
    if not isinstance(identity, tuple) or len(identity) != length or identity[0] != "storage":
        raise RefusedError(f"the pickle refers to something outside of it by {shown(identity)}")
    _, name, key, _, numel = identity[:5]
    if not isinstance(key, str) or type(numel) is not int or not 0 <= numel < 2**60:
        raise RefusedError(f"the pickle refers to storage {shown(key)} of {shown(numel)} elements")
    return storage_type(name), key, identity[5] if length == 6 else None, numel


def _no_storages(identity: Any) -> Any:
    raise RefusedError(f"the pickle refers to {shown(identity)} outside of it, where nothing can be")
