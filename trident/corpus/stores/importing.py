"""Imports files into a document store: each as a whole or not at all, and skips files that are imported already."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megatron.data.stores.backend import FILTERED_COLUMN, ORIGINAL_COLUMN, PLAIN_COLUMN, ImportRecord
from megatron.errors import ConfigError, DataError
from megatron.files.plain import open_plain
from megatron.secret_text import masked
from trident.corpus.inputs.block import parse_block
from trident.corpus.inputs.input_blocks import blocks, check_documents, total_bytes
from trident.corpus.inputs.input_paths import layout_of
from trident.corpus.inputs.lines import BYTE_ORDER_MARK, BadLines, is_blank
from trident.corpus.stores.writers import StoreWriter
from trident.corpus.workers.progress_line import ProgressLine

_BLOCK_BYTES = 4 << 20
_READ_BYTES = 1 << 20


@dataclass(frozen=True)
class ImportOptions:
    """Options for reading the imported files.

    Args:
        key: of the text, which becomes `filt_text`. None derives it from the first line of each file: `text`, or
            `filt_text` and `form` as written by dsGPT2.
        original_key: of the unfiltered text, which becomes `form`; None to omit it. For pairs, whose questions have
            `key`, the key of the answers.
        skip_bad_lines: skip bad lines instead of stopping at the first.
        document_separator: ends a document in plain text.
        adds_changed: import a file again if its contents changed.
    """

    key: str | None = None
    original_key: str | None = None
    skip_bad_lines: bool = False
    document_separator: str | None = None
    adds_changed: bool = False

    @property
    def keys(self) -> tuple[str, ...]:
        key = self.key or PLAIN_COLUMN
        return (key,) if self.original_key is None else (key, self.original_key)

    def for_lines(self, data: bytes) -> ImportOptions:
        """Returns the options with the keys of the first of these JSON lines."""
        if self.key is not None:
            return self
        with contextlib.suppress(ValueError, RecursionError):
            first = json.loads(data.removeprefix(BYTE_ORDER_MARK).lstrip().partition(b"\n")[0])
            if isinstance(first, dict) and PLAIN_COLUMN not in first and FILTERED_COLUMN in first:
                original = ORIGINAL_COLUMN if isinstance(first.get(ORIGINAL_COLUMN), str) else None
                return replace(self, key=FILTERED_COLUMN, original_key=self.original_key or original)
        return replace(self, key=PLAIN_COLUMN)


@dataclass(frozen=True)
class ImportResult:
    """The import of one file: `record` is None if its contents are in the collection already."""

    source: str
    record: ImportRecord | None
    skipped: int = 0


def import_files(
    paths: Sequence[str], writer: StoreWriter, collection: str, options: ImportOptions, progress: ProgressLine
) -> Iterator[ImportResult]:
    """Adds files to a collection, each as a whole or not at all, and skips files that are in the collection already.

    A file is identified by the hash of its bytes and the key, not by its name. Standard input and databases are
    identified by the hash of their contents, so they are read first.

    Raises:
        ConfigError: a file is missing, or changed since it was imported.
        DataError: a bad line, unless skipped; previous files stay imported.
        StorageError: the store cannot be written.
    """
    check_documents(paths, options.keys)
    for path in paths:
        fingerprint = _file_fingerprint(path)
        resolved = options if fingerprint is None else options.for_lines(_first_line(path))
        first = writer.begin()  # before any lookup: another import may be running
        try:
            if fingerprint is not None:
                if _known(writer, fingerprint, resolved) is not None:
                    progress.skip(total_bytes([path]) or 0)
                    yield ImportResult(masked(path), None)
                    continue
                _refuse_changed(writer, path, fingerprint, resolved)
            yield _import_one(path, fingerprint, first, writer, collection, resolved, progress)
        finally:
            writer.abort()


def _import_one(
    path: str,
    fingerprint: str | None,
    first: int,
    writer: StoreWriter,
    collection: str,
    options: ImportOptions,
    progress: ProgressLine,
) -> ImportResult:
    added = lines = 0
    skipped = BadLines(options.skip_bad_lines, consequence="Nothing of this file was imported. ")
    running = hashlib.blake2b(digest_size=16)
    for block in blocks([path], _BLOCK_BYTES, options.document_separator, options.keys):
        if fingerprint is None:
            data = block.read()
            running.update(data)
            options = options.for_lines(data if block.layout == "jsonl" else b"")
        parsed = parse_block(block, options.keys, options.skip_bad_lines, options.document_separator)
        skipped.take(parsed.bad, parsed.bad_count, block.source, block.start, lines)
        writer.append(parsed.texts[0], parsed.texts[1] if len(parsed.texts) > 1 else None)
        lines += parsed.lines
        added += len(parsed.texts[0])
        progress.advance(len(parsed.texts[0]) + parsed.bad_count, block.size, block.input_bytes)
    if fingerprint is None:
        fingerprint = running.hexdigest()
        if _known(writer, fingerprint, options) is not None:
            return ImportResult(masked(path), None)
    record = ImportRecord(collection, masked(path), fingerprint, "\t".join(options.keys), first, added)
    writer.commit(record)
    return ImportResult(record.source, record, skipped.count)


def _known(writer: StoreWriter, fingerprint: str, options: ImportOptions) -> ImportRecord | None:
    key = "\t".join(options.keys)
    return next((record for record in writer.records() if (record.fingerprint, record.key) == (fingerprint, key)), None)


def _refuse_changed(writer: StoreWriter, path: str, fingerprint: str, options: ImportOptions) -> None:
    key = "\t".join(options.keys)
    former = [record for record in writer.records() if (record.source, record.key) == (path, key)]
    if former and not options.adds_changed:
        raise ConfigError(
            f"{path} was imported before ({former[-1].num_docs} documents from idx {former[-1].first_idx}) and has "
            f"changed since (hash {former[-1].fingerprint[:8]} then, {fingerprint[:8]} now). Use --on-changed-file add "
            "to import all of it again, or import into a new collection."
        )


def _file_fingerprint(path: str) -> str | None:
    """Returns the hash of a file's bytes; None if it is not a regular file."""
    if not Path(path).is_file() or total_bytes([path]) is None:
        return None
    running = hashlib.blake2b(digest_size=16)
    try:
        with open_plain(path, buffering=0) as file:
            while chunk := file.read(_READ_BYTES):
                running.update(chunk)
    except OSError as failure:
        raise DataError(f"{path} cannot be read: {failure.strerror or failure}.") from failure
    return running.hexdigest()


def _first_line(path: str) -> bytes:
    """Returns the first JSON line of a file; empty for other layouts."""
    if layout_of(path) != "jsonl":
        return b""
    return next((line for block in blocks([path], 1) if not is_blank(line := block.read())), b"")
