"""Operations on a document store: importing files, auditing document numbers, timing reads, drawing samples.

Source: `fetch_samples` writes what dsGPT2's `vocab_downloader.py` writes.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import multiprocessing
import random
import re
import resource
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

from megatron.corpus.inputs.block import parse_block
from megatron.corpus.inputs.input_blocks import blocks, check_documents, total_bytes
from megatron.corpus.inputs.input_paths import layout_of
from megatron.corpus.inputs.lines import BYTE_ORDER_MARK, BadLines
from megatron.corpus.stores.writers import StoreWriter
from megatron.corpus.workers.progress import ProgressLine
from megatron.data.stores.backend import FILTERED_COLUMN, ORIGINAL_COLUMN, ImportRecord, StoreBackend
from megatron.data.stores.document_store import chosen_collections, open_store
from megatron.errors import ConfigError, DataError, StorageError
from megatron.files.plain import open_plain
from megatron.files.replacing import check_writable, write_atomically
from megatron.secret_text import masked

_TEXT_KEY = "text"
_BLOCK_BYTES = 4 << 20
_READ_BYTES = 1 << 20
_SHOWN_NUMBERS = 20


@dataclass(frozen=True)
class ImportOptions:
    """How texts are found in the files that are imported.

    Args:
        key: of the text, which becomes `filt_text`. With None the first line of each file decides: `text`, or
            `filt_text` and `form` as dsGPT2 writes them.
        original_key: of the text before it was filtered, which becomes `form`; None where it is not kept. For pairs,
            whose questions have `key`, the key of the answers.
        skip_bad_lines: leave bad lines out instead of stopping at the first.
        document_separator: what ends a document in plain text.
        adds_changed: import a file again whose contents are not those that were imported under its name.
    """

    key: str | None = None
    original_key: str | None = None
    skip_bad_lines: bool = False
    document_separator: str | None = None
    adds_changed: bool = False

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys that are read."""
        key = self.key or _TEXT_KEY
        return (key,) if self.original_key is None else (key, self.original_key)

    def for_lines(self, data: bytes) -> ImportOptions:
        """The options with the keys that the first of these lines of JSON has."""
        if self.key is not None:
            return self
        with contextlib.suppress(ValueError, RecursionError):
            first = json.loads(data.removeprefix(BYTE_ORDER_MARK).lstrip().partition(b"\n")[0])
            if isinstance(first, dict) and _TEXT_KEY not in first and FILTERED_COLUMN in first:
                original = ORIGINAL_COLUMN if isinstance(first.get(ORIGINAL_COLUMN), str) else None
                return replace(self, key=FILTERED_COLUMN, original_key=self.original_key or original)
        return replace(self, key=_TEXT_KEY)


@dataclass(frozen=True)
class ImportResult:
    """The import of one file: `record` is None if its contents were in the collection already."""

    source: str
    record: ImportRecord | None
    skipped: int = 0


def import_files(
    paths: Sequence[str], writer: StoreWriter, collection: str, options: ImportOptions, progress: ProgressLine
) -> Iterator[ImportResult]:
    """Adds files to a collection, each as a whole or not at all; what is in the collection already is not added again.

    A file is known by the hash of its bytes and the key, whatever its name. Standard input and databases are known by
    the hash of what they give, so they are read before that is found out.

    Raises:
        ConfigError: a file is missing, or it has changed since it was imported.
        DataError: a bad line, unless they are skipped; files before this one stay imported.
        StorageError: the store cannot be written.
    """
    check_documents(paths, options.keys)
    for path in paths:
        fingerprint = _file_fingerprint(path)
        wanted = options if fingerprint is None else options.for_lines(_first_line(path))
        first = writer.begin()  # before anything is looked up: another import may be under way
        try:
            if fingerprint is not None:
                if _known(writer, fingerprint, wanted) is not None:
                    progress.leave_out(total_bytes([path]) or 0)
                    yield ImportResult(masked(path), None)
                    continue
                _refuse_changed(writer, path, fingerprint, wanted)
            yield _import_one(path, fingerprint, first, writer, collection, wanted, progress)
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
        progress.advance(parsed.lines, block.size, block.input_bytes)
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
            f"other contents now (hash {former[-1].fingerprint[:8]} then, {fingerprint[:8]} now). Give "
            "--on-changed-file add to import all of it again, or import into a new collection."
        )


def _file_fingerprint(path: str) -> str | None:
    """Hash of a file's bytes on disk; None for what is not a regular file."""
    if not Path(path).is_file() or total_bytes([path]) is None:
        return None
    running = hashlib.blake2b(digest_size=16)
    try:
        with open_plain(path, buffering=0) as file:
            while piece := file.read(_READ_BYTES):
                running.update(piece)
    except OSError as failure:
        raise DataError(f"{path} cannot be read: {failure.strerror or failure}.") from failure
    return running.hexdigest()


@dataclass
class Audit:
    """What is wrong with the numbers of a collection.

    Args:
        counted: documents according to `meta_info`, None where it says nothing.
        found: documents there are.
        holes: the first stretches of missing numbers, both ends included; `hole_count` counts the numbers of all.
        duplicates: the first numbers that are there more than once; `duplicate_count` counts the surplus documents.
        unnumbered: documents without an idx.
    """

    name: str
    counted: int | None
    found: int = 0
    size: int = 0
    holes: list[tuple[int, int]] = field(default_factory=list)
    hole_count: int = 0
    duplicates: list[int] = field(default_factory=list)
    duplicate_count: int = 0
    unnumbered: int = 0

    @property
    def problems(self) -> list[str]:
        """One sentence for each kind of fault."""
        problems = []
        if self.hole_count:
            numbers = [str(first) if first == last else f"{first}-{last}" for first, last in self.holes]
            problems.append(f"{self.hole_count} missing: idx {_listed(numbers, self.hole_count)}")
        if self.duplicate_count:
            numbers = [str(number) for number in self.duplicates]
            problems.append(f"{self.duplicate_count} duplicates: idx {_listed(numbers, self.duplicate_count)}")
        if self.unnumbered:
            problems.append(f"{self.unnumbered} documents without an idx")
        if self.counted is not None and self.counted < self.size:
            problems.append(
                f"{self.size - self.counted} numbers beyond the {self.counted} documents that meta_info counts (an "
                "import that is running or was killed; the next import removes them)"
            )
        return problems


def audit(backend: StoreBackend, names: Sequence[str] = ()) -> list[Audit]:
    """Audits the document numbers of collections (all, if none is named) in constant memory.

    Raises:
        DataError: a collection is missing.
        StorageError: the database cannot be reached, or is locked.
    """
    return [_audit_one(backend, name) for name in chosen_collections(backend, names)]


def _audit_one(backend: StoreBackend, name: str) -> Audit:
    facts = backend.facts(name)
    outcome = Audit(name, facts.counted)
    if not facts.is_numbered:
        outcome.found = outcome.unnumbered = backend.count(name)
        return outcome
    expected = 0
    for idx in backend.indices(name):
        outcome.found += 1
        if idx is None:
            outcome.unnumbered += 1
        elif idx < expected:
            outcome.duplicate_count += 1
            if len(outcome.duplicates) < _SHOWN_NUMBERS and idx not in outcome.duplicates:
                outcome.duplicates.append(idx)
        else:
            if idx > expected:
                _note_hole(outcome, expected, idx - 1)
            expected = idx + 1
    outcome.size = expected
    if facts.counted is not None and facts.counted > expected:
        _note_hole(outcome, expected, facts.counted - 1)
    return outcome


def _note_hole(outcome: Audit, first: int, last: int) -> None:
    outcome.hole_count += last - first + 1
    if len(outcome.holes) < _SHOWN_NUMBERS:
        outcome.holes.append((first, last))


def _listed(numbers: Sequence[str], count: int) -> str:
    return ", ".join(numbers) + (", ..." if count > len(numbers) >= _SHOWN_NUMBERS else "")


def time_fetches(address: str, fetches: int, seed: int) -> dict[str, Any]:
    """Times the fetch of documents drawn at random; the first ones pay for what is not cached yet.

    Raises:
        ConfigError: the store is empty.
    """
    store = open_store(address)
    if not len(store):
        raise ConfigError(f"{store.shown} holds no document to fetch. Import some first.")
    drawn = random.Random(seed)
    nanoseconds = []
    characters = 0
    for _ in range(fetches):
        number = drawn.randrange(len(store))
        begin = time.perf_counter_ns()
        text = store.fetch(number)
        nanoseconds.append(time.perf_counter_ns() - begin)
        characters += len(text)
    nanoseconds.sort()
    return {
        "store": store.shown,
        "documents": len(store),
        "fetches": fetches,
        "mean_characters": round(characters / fetches, 1),
        "p50_ms": _milliseconds(nanoseconds, 0.50),
        "p99_ms": _milliseconds(nanoseconds, 0.99),
        "max_ms": _milliseconds(nanoseconds, 1.0),
        "peak_rss_mb": round(_peak_memory_bytes() / 1e6, 1),
    }


def _milliseconds(nanoseconds: Sequence[int], share: float) -> float:
    return round(nanoseconds[min(int(share * len(nanoseconds)), len(nanoseconds) - 1)] / 1e6, 5)


def _peak_memory_bytes() -> int:
    """Most memory that this program held.

    On Linux, `ru_maxrss` is at least the parent process's, so the figure of the address space is taken.
    """
    with contextlib.suppress(OSError):
        peak = re.search(r"^VmHWM:\s+(\d+) kB$", Path("/proc/self/status").read_text(), flags=re.MULTILINE)
        if peak:
            return int(peak.group(1)) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _first_line(path: str) -> bytes:
    """The first line of JSON of a file; nothing of a file that has no such lines."""
    if layout_of(path) != "jsonl":
        return b""
    block = next(blocks([path], 1), None)
    return b"" if block is None else block.read()


def stream_samples(address: str, samples: int, seed: int, stream: BinaryIO) -> None:
    """Writes documents drawn at random, each at most once, as lines of JSON with the key `text`, in their order.

    Raises:
        ConfigError: there are fewer documents than samples.
    """
    store = open_store(address)
    for number in sorted(_drawn(len(store), samples, seed)):
        stream.write(json.dumps({_TEXT_KEY: store.fetch(number)}).encode() + b"\n")
    stream.flush()


def _drawn(size: int, samples: int, seed: int) -> list[int]:
    if samples > size:
        raise ConfigError(f"--nsample {samples} is more than the {size} documents of the store. Ask for fewer.")
    return random.Random(seed).sample(range(size), samples)


def fetch_samples(
    address: str, samples: int, processes: int, output_prefix: str, separator: str, seed: int
) -> list[tuple[str, int]]:
    """Writes documents drawn at random, each at most once, to `<prefix><i>.txt`, one file per process.

    Returns:
        the files and how many documents each holds.

    Raises:
        ConfigError: there are fewer documents than samples.
        StorageError: a file cannot be written, or a process was killed.
    """
    drawn = _drawn(len(open_store(address)), samples, seed)
    shares = [sorted(drawn[first::processes]) for first in range(processes)]
    paths = [Path(f"{output_prefix}{number}.txt") for number in range(processes)]
    for path in paths:
        check_writable(path)
    if processes == 1:
        _write_texts(address, shares[0], paths[0], separator)
    else:
        context = multiprocessing.get_context("spawn")
        try:
            with ProcessPoolExecutor(processes, context) as pool:
                work = [
                    pool.submit(_write_texts, address, *share, separator) for share in zip(shares, paths, strict=True)
                ]
                for future in work:
                    future.result()
        except BrokenProcessPool as failure:
            raise StorageError(
                f"A process that wrote {output_prefix}<i>.txt was killed (out of memory?). Run it again with fewer "
                f"processes than --num-process {processes}."
            ) from failure
    return [(str(path), len(share)) for path, share in zip(paths, shares, strict=True)]


def _write_texts(address: str, numbers: Sequence[int], path: Path, separator: str) -> None:
    store = open_store(address)

    def write(stream: BinaryIO) -> None:
        for number in numbers:
            stream.write((store.fetch(number) + separator).encode("utf-8", "surrogatepass"))

    write_atomically(path, write)
