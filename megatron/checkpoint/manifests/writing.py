"""Writes the manifest of a checkpoint: a root with one row per run of pieces, and index files if there are many files.

Entries of the root, `manifest.json`, in order:
    format, format_version, step, run: the name of the format, 2, the step, a random name of the save.
    record: the caller's JSON object.
    chunk_bytes: files are hashed in chunks of this size; the last chunk may be shorter.
    tensors: rows of global name, global shape. kinds, types: the strings that pieces refer to by index.
    pieces: rows of tensor, kind and element type (indices into these tables), box start, box stop, flat range in the
        box (first, last), file, and for a range with several parts: step, length. Part i has `length` elements starting
        at `first + i * length` (the last part may be shorter) and is in file `file + i * step`. The parts in a file are
        contiguous, in the order of these rows, up to its end. Values are little-endian and row-major.
    files: rows of name, size in bytes, SHA-256, list of the chunks' SHA-256; the row index is the file number.
    indexes: rows of name, size in bytes, SHA-256 and number of files of the index files that contain the rows of files
        instead, in order: JSON objects with format, run and files. They are opened when one of their files is read.
    digest: SHA-256 of everything before this entry.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megatron.checkpoint.catalogue import ITEM_BYTES, KINDS, StoredRun
from megatron.checkpoint.manifests.contents import StoredFile
from megatron.checkpoint.manifests.texts import sealed
from megatron.errors import CheckpointError

FORMAT = "megatron-pieces"
FORMAT_VERSION = 2

INDEX_FORMAT = "megatron-pieces-index"
_MOST_ROOT_BYTES = 2**20  # of the rows of files; more go into index files
_MOST_INDEX_BYTES = 4 * 2**20
_MOST_INDEX_FILES = 1024


def manifest_texts(
    step: int,
    run: str,
    record: Mapping[str, Any],
    chunk_bytes: int,
    files: Sequence[StoredFile],
    runs: Sequence[StoredRun],
) -> tuple[bytes, dict[str, bytes]]:
    """The text of a manifest, and the texts of its index files by name.

    Raises:
        CheckpointError: the record is not JSON.
    """
    rows = [_compact([file.name, file.size_bytes, file.sha256, file.chunks]) for file in files]
    indexes: dict[str, bytes] = {}
    index_rows: list[list[Any]] = []
    if sum(map(len, rows)) > _MOST_ROOT_BYTES:
        head = f'{{"format": {json.dumps(INDEX_FORMAT)},\n"run": {json.dumps(run)},\n"files": '
        for part in _portions(rows):
            name, text = f"index_{len(indexes):05d}.json", f"{head}[{','.join(part)}]\n}}\n".encode()
            index_rows.append([name, len(text), hashlib.sha256(text).hexdigest(), len(part)])
            indexes[name] = text
        rows = []
    tensors: dict[tuple[str, tuple[int, ...]], int] = {}
    pieces = [_row(stored, tensors) for stored in runs]
    head_lines = {"format": FORMAT, "format_version": FORMAT_VERSION, "step": step, "run": run}
    lines = [f"{json.dumps(name)}: {_compact(value)}" for name, value in head_lines.items()]
    lines.append(f'"record": {record_text(record)}')
    tables = {"tensors": list(tensors), "kinds": KINDS, "types": list(ITEM_BYTES), "pieces": pieces}
    lines += [
        f"{json.dumps(name)}: {_compact(value)}" for name, value in {"chunk_bytes": chunk_bytes, **tables}.items()
    ]
    lines += [f'"files": [{",".join(rows)}]', f'"indexes": {_compact(index_rows)}']
    return sealed(("{\n" + ",\n".join(lines) + ",\n").encode()), indexes


def record_text(record: Mapping[str, Any]) -> str:
    """The caller's record as JSON.

    Raises:
        CheckpointError: it is not JSON-serializable (NaN and infinities included).
    """
    try:
        text = json.dumps(record, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as failure:
        raise CheckpointError(
            f"the record of the checkpoint is not JSON: {failure}. It may contain finite numbers, strings, booleans, "
            "null, lists and objects with string keys."
        ) from failure
    return text


def _compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def _portions(rows: Sequence[str]) -> Iterator[list[str]]:
    """Splits the rows into consecutive portions, one for each index file."""
    portion: list[str] = []
    size = 0
    for row in rows:
        if portion and (len(portion) == _MOST_INDEX_FILES or size + len(row) > _MOST_INDEX_BYTES):
            yield portion
            portion, size = [], 0
        portion.append(row)
        size += len(row)
    yield portion


def _row(stored: StoredRun, tensors: dict[tuple[str, tuple[int, ...]], int]) -> list[Any]:
    key = stored.key
    tensor = tensors.setdefault((key.name, key.shape), len(tensors))
    kind, dtype = KINDS.index(key.kind), list(ITEM_BYTES).index(stored.dtype)
    row = [tensor, kind, dtype, key.start, key.stop, key.first, key.last, stored.file]
    return [*row, stored.step, stored.length] if stored.parts > 1 else row
