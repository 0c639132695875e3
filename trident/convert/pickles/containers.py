"""Files that contain pickles: torch's zip archives, its legacy files without zip, and bare pickles.

Source: torch 2.13, `torch/serialization.py` (`_save`, `_legacy_save`). Archives never have compressed entries.
"""

from __future__ import annotations

import encodings.cp437  # noqa: F401  required by zip names; later no file can be opened
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
    """A range of an open file as a file object; requires no other file descriptor."""

    def __init__(self, read_at: Callable[[int, int], bytes], start_bytes: int, end_bytes: int) -> None:
        super().__init__()
        self.read_at = read_at
        self.start, self.end = start_bytes, end_bytes
        self._offset = 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._offset, io.SEEK_END: self.end - self.start}[whence]
        if base + offset < 0:
            raise OSError("an offset before the start of the file")
        self._offset = base + offset
        return self._offset

    def tell(self) -> int:
        return self._offset

    def readinto(self, target: Any) -> int:
        count = max(0, min(len(target), self.end - self.start - self._offset))
        content = self.read_at(self.start + self._offset, count) if count else b""
        target[: len(content)] = content
        self._offset += len(content)
        return len(content)


class _PickleFile(io.BufferedReader):
    """A range of a file that rejects reads beyond its end, before their memory is allocated."""

    def __init__(self, file: FileRange) -> None:
        super().__init__(file, _BUFFER_BYTES)
        self._size_bytes = file.end - file.start

    def read(self, count: int | None = -1) -> bytes:
        if count is not None and count > self._size_bytes - self.tell():
            raise RefusedError(f"the pickle ends within {count} bytes that it announces")
        return super().read(count)


def read_range(file: FileRange) -> Any:
    """Reads the value in a range of a file: an archive of torch, a legacy file of torch, or a bare pickle.

    Raises:
        RefusedError: its format is unknown, it is damaged, or it uses something that is not allowed.
    """
    magic = file.read_at(file.start, min(4, file.end - file.start))
    if magic == b"PK\x03\x04":
        return _Archive(file).load()
    if not magic or magic[0] != 0x80:
        raise RefusedError(f"it starts with the bytes {magic.hex() or 'of an empty file'}, neither a zip nor a pickle")
    return _LegacyFile(file).load()


class _Archive:
    """A zip file of torch.save: `NAME/data.pkl`, and the bytes of each storage as `NAME/data/KEY`."""

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
            raise RefusedError("its zip directory has two entries with one name")
        for entry in entries:
            self._check(entry)
        self._check_overlaps(entries)

    def load(self) -> Any:
        pickles = [name for name in self._entries if name.count("/") == 1 and name.endswith("/data.pkl")]
        if len(pickles) != 1:
            raise RefusedError(f"the zip file has {len(pickles)} entries NAME/data.pkl; torch.save writes one")
        self._folder = pickles[0].removesuffix("data.pkl")
        order = self._entries.get(self._folder + "byteorder")
        if order is not None and self._file.read_at(self._start(order), min(order.file_size, 16)) != b"little":
            raise RefusedError("its tensors are not stored little-endian")
        entry = self._entries[pickles[0]]
        if entry.file_size > _LARGEST_PICKLE_BYTES:
            raise RefusedError(f"its pickle has {entry.file_size} bytes")
        start = self._checked_start(entry)
        content = _PickleFile(FileRange(self._file.read_at, start, start + entry.file_size))
        return InertUnpickler(content, self._storage).load()

    def _check(self, entry: zipfile.ZipInfo) -> None:
        name = entry.filename
        if name.startswith("/") or ".." in name.split("/") or "\\" in name or "\0" in name:
            raise RefusedError(f"its zip directory has the entry {shown(name)}, which is outside the archive")
        if entry.compress_type != zipfile.ZIP_STORED or entry.file_size != entry.compress_size:
            raise RefusedError(f"entry {shown(name)} of the zip file is compressed, which torch.save never does")
        if entry.flag_bits & 0x1:
            raise RefusedError(f"entry {shown(name)} of the zip file is encrypted")
        if entry.header_offset < 0 or entry.header_offset + entry.file_size > self._file.end - self._file.start:
            raise RefusedError(f"entry {shown(name)} of the zip file extends beyond its end")

    def _check_overlaps(self, entries: list[zipfile.ZipInfo]) -> None:
        ordered = sorted(entries, key=lambda entry: entry.header_offset)
        for entry, following in itertools.pairwise(ordered):
            if entry.header_offset + _LOCAL_HEADER.size + entry.file_size > following.header_offset:
                raise RefusedError(
                    f"entries {shown(entry.filename)} and {shown(following.filename)} of the zip file overlap"
                )

    def _start(self, entry: zipfile.ZipInfo) -> int:
        """Offset of an entry's first byte in the file, after a header of variable length."""
        header_start = self._file.start + entry.header_offset
        header = self._file.read_at(header_start, _LOCAL_HEADER.size)
        if len(header) < _LOCAL_HEADER.size:
            raise RefusedError(f"entry {shown(entry.filename)} of the zip file is truncated")
        magic, name_bytes, extra_bytes = _LOCAL_HEADER.unpack(header)
        name = self._file.read_at(header_start + _LOCAL_HEADER.size, name_bytes)
        start = header_start + _LOCAL_HEADER.size + name_bytes + extra_bytes
        if magic != b"PK\x03\x04" or name != entry.orig_filename.encode():
            raise RefusedError(f"entry {shown(entry.filename)} of the zip file is not at the offset of its directory")
        if start + entry.file_size > self._file.end:
            raise RefusedError(f"entry {shown(entry.filename)} of the zip file extends beyond its end")
        return start

    def _checked_start(self, entry: zipfile.ZipInfo) -> int:
        """Offset of an entry's first byte, after its checksum was verified; 0 in the directory means no checksum."""
        start, checksum = self._start(entry), 0
        for offset in range(start, start + entry.file_size, _CHECKED_BYTES):
            count = min(_CHECKED_BYTES, start + entry.file_size - offset)
            checksum = zlib.crc32(self._file.read_at(offset, count), checksum)
        if entry.CRC not in (0, checksum):
            raise RefusedError(
                f"entry {shown(entry.filename)} of the zip file is damaged: its checksum is {checksum:08x}, expected "
                f"{entry.CRC:08x}"
            )
        return start

    def _storage(self, identity: Any) -> StorageBytes:
        dtype, key, _, numel = _storage_identity(identity, 5)
        known = self._storages.get(key)
        entry = self._entries.get(f"{self._folder}data/{key}")
        if entry is None:
            raise RefusedError(f"the pickle refers to storage {shown(key)}, which the zip file does not contain")
        width = ITEM_BYTES[dtype] if dtype else 1
        if numel * width != entry.file_size:
            raise RefusedError(
                f"storage {shown(key)} has {entry.file_size} bytes, but the pickle expects {numel} elements of {width}"
            )
        if known is None or known.dtype != dtype:
            known = self._storages[key] = StorageBytes(self._checked_start(entry), entry.file_size, dtype)
        return known


class _LegacyFile:
    """A bare pickle, or torch's format before 1.6: several pickles, then the storages."""

    def __init__(self, file: FileRange) -> None:
        self._file = file
        self._referenced: dict[str, tuple[str | None, int]] = {}
        self._storages: dict[str, StorageBytes] = {}

    def load(self) -> Any:
        content = _PickleFile(FileRange(self._file.read_at, self._file.start, self._file.end))
        first = InertUnpickler(content, _no_storages).load()
        if first != _LEGACY_MAGIC or type(first) is not int:
            return first
        version = InertUnpickler(content, _no_storages).load()
        if version != 1001:
            raise RefusedError(f"the file has torch's legacy format in unknown version {shown(version)}; 1001 is known")
        InertUnpickler(content, _no_storages).load()  # byte order and type sizes of the machine that wrote it
        start = content.tell()
        InertUnpickler(content, self._reference).load()
        keys = InertUnpickler(content, _no_storages).load()
        self._storages = self._located(keys, self._file.start + content.tell())
        content.seek(start)
        return InertUnpickler(content, self._storage).load()

    def _reference(self, identity: Any) -> StorageBytes:
        """Registers a storage in the first pass, before its offset is known."""
        dtype, key, view, numel = _storage_identity(identity, 6)
        if view is not None:
            raise RefusedError("the pickle refers to a part of a storage, which is not allowed")
        width = ITEM_BYTES[dtype] if dtype else 1
        self._referenced[key] = (dtype, numel * width)
        return StorageBytes(0, numel * width, dtype)

    def _located(self, keys: Any, offset: int) -> dict[str, StorageBytes]:
        if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
            raise RefusedError(f"the list of storages is {shown(keys)}")
        storages = {}
        for key in keys:
            if key not in self._referenced or key in storages:
                raise RefusedError(f"the file has storage {shown(key)}, which the pickle does not use exactly once")
            dtype, size_bytes = self._referenced[key]
            count = int.from_bytes(self._file.read_at(offset, 8), "little")
            if count * (ITEM_BYTES[dtype] if dtype else 1) != size_bytes or offset + 8 + size_bytes > self._file.end:
                raise RefusedError(f"storage {shown(key)} must have {size_bytes} bytes, but has another size")
            storages[key] = StorageBytes(offset + 8, size_bytes, dtype)
            offset += 8 + size_bytes
        return storages

    def _storage(self, identity: Any) -> StorageBytes:
        _, key, _, _ = _storage_identity(identity, 6)
        if key not in self._storages:
            raise RefusedError(f"the pickle refers to storage {shown(key)}, which the file does not contain")
        return self._storages[key]


def _storage_identity(identity: Any, length: int) -> tuple[str | None, str, Any, int]:
    """Element type, key, view and number of elements of a persistent id."""
    if not isinstance(identity, tuple) or len(identity) != length or identity[0] != "storage":
        raise RefusedError(f"the pickle has the invalid persistent id {shown(identity)}")
    _, name, key, _, numel = identity[:5]
    if not isinstance(key, str) or type(numel) is not int or not 0 <= numel < 2**60:
        raise RefusedError(f"the pickle refers to storage {shown(key)} of {shown(numel)} elements")
    return storage_type(name), key, identity[5] if length == 6 else None, numel


def _no_storages(identity: Any) -> Any:
    raise RefusedError(f"the pickle has the persistent id {shown(identity)}, but no storages")
