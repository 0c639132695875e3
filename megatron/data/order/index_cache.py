"""Index arrays on disk, built once and shared by every process that needs them.

The name is a hash of everything that determines the content, so a stale file is never mistaken for a fresh one. The
arrays are written first and a description with their checksums last, each by temporary file and rename, so an index
with a description is complete. Nothing is synced to disk: an index damaged by a machine crash fails its checksum and is
rebuilt.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import json
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

import numpy as np

from megatron import log
from megatron.errors import StorageError, TooManyFilesError
from megatron.files.failures import storage_error, too_many_files
from megatron.files.plain import open_plain, read_plain_json
from megatron.files.replacing import write_atomically

try:
    import fcntl
except ImportError:  # not POSIX: builds are not serialised, which only costs time
    fcntl = None  # type: ignore[assignment]

FORMAT_VERSION = 1
INDEX_CACHE_FOLDER = "index-cache"
"""Default folder of the arrays, next to the data."""

_READ_BYTES = 1 << 24
_MAPPED_ABOVE_BYTES = 1 << 20
_POLL_SECONDS = 0.2
_REPORT_AFTER_SECONDS = 15.0

Arrays = dict[str, np.ndarray]


def description_sha256(description: Mapping[str, object]) -> str:
    """Returns a hash of everything that the content of rows depends on."""
    return hashlib.sha256(repr(sorted(description.items())).encode()).hexdigest()


class IndexCache:
    """A folder of index arrays.

    The lock only saves two jobs from doing the same work: the system releases it when its owner exits, and without
    locks on the file system both jobs write the same bytes.

    Args:
        directory: folder of the arrays.
        build: write missing arrays to disk. Other processes load arrays, or compute missing ones in memory.
        required: raise an error if the folder cannot be written (the user named it), instead of a warning.
    """

    def __init__(self, directory: Path, build: bool = True, required: bool = False) -> None:
        self.directory = directory
        self.build = build
        self.required = required

    def arrays(self, kind: str, description: Mapping[str, object], make: Callable[[], Arrays]) -> Arrays:
        """Returns the arrays that `description` determines: from disk (mapped, verified) or made by `make`.

        Args:
            kind: first part of the file names, for readers.
            description: everything the content depends on, JSON-serialisable.

        Raises:
            StorageError: the folder was named by the user and cannot be written.
        """
        record = {"format": FORMAT_VERSION, "kind": kind, **description}
        text = json.dumps(record, sort_keys=True)
        stem = f"{kind}-{hashlib.sha256(text.encode()).hexdigest()[:24]}"
        arrays = self._load(stem, record)
        if arrays is not None:
            return arrays
        if not self.build:
            log.warning(
                f"no index {stem} in {self.directory}: is this folder shared with the process that built it? The index "
                "is computed in memory instead; the order of samples is the same."
            )
            return make()
        return self._build(stem, record, make)

    def _build(self, stem: str, record: dict[str, object], make: Callable[[], Arrays]) -> Arrays:
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            with self._lock():
                existing = self._load(stem, record)
                if existing is not None:
                    return existing
                arrays = make()
                self._store(stem, record, arrays)
                return {name: _load_array(self._array_path(stem, name)) for name in arrays}
        except (OSError, StorageError) as failure:
            if isinstance(failure, OSError):
                failure = storage_error(self.directory, failure)
            if isinstance(failure, TooManyFilesError):
                raise failure
            text = f"The index cache {self.directory} cannot be written: {failure} Set --data-cache-path."
            if self.required:
                raise StorageError(text) from failure
            log.warning(f"{text} Until then each process computes the order of samples in memory.")
            return make()

    def _store(self, stem: str, record: dict[str, object], arrays: Arrays) -> None:
        files: dict[str, dict[str, object]] = {}
        for name, array in arrays.items():
            facts: dict[str, object] = {}
            write = functools.partial(_save_array, array, facts)
            write_atomically(self._array_path(stem, name), write, array.nbytes, durable=False)
            files[name] = facts
        stored = {"description": record, "files": files}
        text = json.dumps({**stored, "crc32": _crc32_of(stored)}, indent=1, sort_keys=True)
        write_atomically(self._description_path(stem), text.encode(), durable=False)

    def _load(self, stem: str, record: dict[str, object]) -> Arrays | None:
        """Maps and verifies stored arrays; None if they are missing or damaged (which is logged)."""
        path = self._description_path(stem)
        try:
            stored = read_plain_json(path)
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as failure:
            _raise_if_too_many_files(path, failure)
            log.warning(f"the index {path} cannot be read ({failure}) and is rebuilt.")
            return None
        try:
            problem = self._problem(stem, stored, record)
            arrays = {} if problem else {name: _load_array(self._array_path(stem, name)) for name in stored["files"]}
        except Exception as failure:  # NumPy reports a bad header in many ways
            _raise_if_too_many_files(path, failure)
            problem = f"{type(failure).__name__}: {failure}"
        if problem:
            log.warning(f"the index {path} is damaged ({problem[:300]}) and is rebuilt.")
            return None
        return arrays

    def _problem(self, stem: str, stored: object, record: dict[str, object]) -> str | None:
        if not isinstance(stored, dict) or not isinstance(stored.get("files"), dict) or not stored["files"]:
            return "it lists no files"
        if stored.get("crc32") != _crc32_of({name: stored.get(name) for name in ("description", "files")}):
            return "its checksum does not match its content"
        if stored.get("description") != json.loads(json.dumps(record)):
            return "it describes another index"
        for name, facts in stored["files"].items():
            path = self._array_path(stem, name)
            try:
                size, checksum = path.stat().st_size, _crc32(path)
            except OSError as failure:
                _raise_if_too_many_files(path, failure)
                return f"{path.name}: {failure.strerror}"
            if not isinstance(facts, dict) or size != facts.get("bytes") or checksum != facts.get("crc32"):
                return f"{path.name} has {size} bytes and checksum {checksum:#010x}, expected {facts}"
        return None

    def _array_path(self, stem: str, name: str) -> Path:
        return self.directory / f"{stem}-{Path(name).name}.npy"

    def _description_path(self, stem: str) -> Path:
        return self.directory / f"{stem}.json"

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        with (self.directory / ".lock").open("ab") as stream:
            wait_for_lock(stream, self.directory)
            yield


def wait_for_lock(stream: BinaryIO, directory: Path) -> None:
    """Takes the exclusive lock of an open file; closing the file releases it, also when its owner is killed."""
    if fcntl is None:
        return
    started_at = time.monotonic()
    reported = False
    while True:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if not reported and time.monotonic() - started_at > _REPORT_AFTER_SECONDS:
                log.info(f"waiting for another process that builds an index in {directory}")
                reported = True
            time.sleep(_POLL_SECONDS)
        except OSError:  # no locks on this file system: both processes build the same index
            return


def _raise_if_too_many_files(path: Path, failure: Exception) -> None:
    # This failure is not the file's fault; rebuilding the index would fail, too.
    if isinstance(failure, TooManyFilesError):
        raise failure
    if isinstance(failure, OSError) and failure.errno in (errno.EMFILE, errno.ENFILE):
        raise too_many_files(path, failure) from failure


def _load_array(path: Path) -> np.ndarray:
    """Maps an array; a small one is read, since a map holds its file open and hundreds of sources add up.

    Raises:
        ValueError: the array does not hold integers.
    """
    is_small = path.stat().st_size <= _MAPPED_ABOVE_BYTES
    array = np.asarray(np.load(path, mmap_mode=None if is_small else "r", allow_pickle=False))
    if array.dtype.kind not in "iu":
        raise ValueError(f"{path.name} holds {array.dtype.name}, expected integers")
    return array


def _save_array(array: np.ndarray, facts: dict[str, object], stream: BinaryIO) -> None:
    """Writes an array and stores the file's size and checksum in `facts`."""
    counted = _CountedWriter(stream)
    np.save(counted, array, allow_pickle=False)
    facts.update(bytes=counted.size, crc32=counted.checksum)


class _CountedWriter:
    """A writer that tracks the size and checksum of its output."""

    def __init__(self, stream: BinaryIO) -> None:
        self.size = 0
        self.checksum = 0
        self._stream = stream

    def write(self, data: bytes) -> int:
        self.size += len(data)
        self.checksum = zlib.crc32(data, self.checksum)
        return self._stream.write(data)


def _crc32_of(value: object) -> int:
    return zlib.crc32(json.dumps(value, sort_keys=True).encode())


def _crc32(path: Path) -> int:
    checksum = 0
    with open_plain(path) as stream:
        while chunk := stream.read(_READ_BYTES):
            checksum = zlib.crc32(chunk, checksum)
    return checksum
