"""Inspection of a document store: audit of indices, histogram of lengths, timing of reads, and samples.

Source: `fetch_samples` equals dsGPT2's `vocab_downloader.py`; the lengths are as in its `statistics.py`, with bins of
ten tokens up to 130.
"""

from __future__ import annotations

import contextlib
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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from megatron.data.stores.backend import PLAIN_COLUMN, StoreBackend
from megatron.data.stores.document_store import DocumentStore, open_store, select_collections
from megatron.errors import ConfigError, DataError, StorageError
from megatron.files.replacing import check_writable, write_atomically
from megatron.tokenizers.tokenizer import Tokenizer

_SHOWN_NUMBERS = 20
_DOCUMENTS_AT_ONCE = 1024


@dataclass
class Audit:
    """Problems with the indices of a collection.

    Args:
        counted: documents according to `meta_info`, None without an entry.
        holes: the first ranges of missing indices, both ends included; `hole_count` is the number of missing indices.
        duplicates: the first duplicate indices; `duplicate_count` is the number of surplus documents.
        unnumbered: documents without an idx.
    """

    name: str
    counted: int | None
    size: int = 0
    holes: list[tuple[int, int]] = field(default_factory=list)
    hole_count: int = 0
    duplicates: list[int] = field(default_factory=list)
    duplicate_count: int = 0
    unnumbered: int = 0

    @property
    def problems(self) -> list[str]:
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
                f"{self.size - self.counted} indices beyond the {self.counted} documents that meta_info counts (an "
                "import is running or was killed; the next import removes them)"
            )
        return problems


def audit(backend: StoreBackend, names: Sequence[str] = ()) -> list[Audit]:
    """Audits the indices of collections (all by default) in constant memory.

    Raises:
        DataError: a collection is missing.
        StorageError: the database cannot be reached, or is locked.
    """
    return [_audit_one(backend, name) for name in select_collections(backend, names)]


def _audit_one(backend: StoreBackend, name: str) -> Audit:
    facts = backend.facts(name)
    outcome = Audit(name, facts.counted)
    if not facts.is_numbered:
        outcome.unnumbered = backend.count(name)
        return outcome
    expected = 0
    for idx in backend.indices(name):
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
    """Times the fetch of random documents; the first ones include cache misses.

    Raises:
        ConfigError: the store is empty.
    """
    store = open_store(address)
    if not len(store):
        raise ConfigError(f"{store.shown} holds no documents. Import some first.")
    drawn = random.Random(seed)
    nanoseconds = []
    characters = 0
    for _ in range(fetches):
        number = drawn.randrange(len(store))
        started_at = time.perf_counter_ns()
        text = store.fetch(number)
        nanoseconds.append(time.perf_counter_ns() - started_at)
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
    """Returns the peak resident memory of this process."""
    # On Linux, `ru_maxrss` is at least the parent's, so VmHWM is preferred.
    with contextlib.suppress(OSError):
        peak = re.search(r"^VmHWM:\s+(\d+) kB$", Path("/proc/self/status").read_text(), flags=re.MULTILINE)
        if peak:
            return int(peak.group(1)) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


@dataclass(frozen=True)
class LengthHistogram:
    """Histogram of documents by number of tokens, without the end-of-document token.

    Attributes:
        width: tokens per bin.
        counts: documents per bin; the last bin is open.
        tokens: total of all documents.
        longest: tokens of the longest document.
    """

    width: int
    counts: tuple[int, ...]
    tokens: int
    longest: int

    @property
    def documents(self) -> int:
        return sum(self.counts)

    def lines(self) -> Iterator[str]:
        """Yields a line for each bin, then the mean and the longest."""
        last = len(self.counts) - 1
        for number, count in enumerate(self.counts):
            first = number * self.width
            tokens = f"{first} and more" if number == last else f"{first} to {first + self.width - 1}"
            yield f"{tokens:>12} tokens: {count:10d} documents ({count / self.documents:6.2%})"
        yield (
            f"{self.documents} documents, {self.tokens} tokens, {self.tokens / self.documents:.1f} in the mean, "
            f"{self.longest} in the longest"
        )


def length_histogram(store: DocumentStore, tokenizer: Tokenizer, width: int, most: int) -> LengthHistogram:
    """Counts all documents in constant memory.

    Args:
        width: tokens per bin.
        most: documents of at least this many tokens share the last bin.

    Raises:
        DataError: the store is empty.
    """
    if not len(store):
        raise DataError(f"{store.shown} holds no documents to count. Import some with tools/corpus/corpus_store.py.")
    counts = np.zeros(-(-most // width) + 1, np.int64)
    tokens = longest = 0
    for first in range(0, len(store), _DOCUMENTS_AT_ONCE):
        texts = store.fetch_many(range(first, min(first + _DOCUMENTS_AT_ONCE, len(store))))
        lengths = np.asarray(tokenizer.encode_flat(texts)[1], np.int64)
        counts += np.bincount(np.minimum(lengths // width, len(counts) - 1), minlength=len(counts))
        tokens += int(lengths.sum())
        longest = max(longest, int(lengths.max()))
    return LengthHistogram(width, tuple(counts.tolist()), tokens, longest)


def stream_samples(address: str, samples: int, seed: int, stream: BinaryIO) -> None:
    """Writes random documents without repetition, as JSON lines with the key `text`, in order.

    Raises:
        ConfigError: fewer documents than samples.
    """
    store = open_store(address)
    for number in sorted(_drawn(len(store), samples, seed)):
        stream.write(json.dumps({PLAIN_COLUMN: store.fetch(number)}).encode() + b"\n")
    stream.flush()


def _drawn(size: int, samples: int, seed: int) -> list[int]:
    if samples > size:
        raise ConfigError(f"--nsample {samples} exceeds the {size} documents of the store. Use a smaller number.")
    return random.Random(seed).sample(range(size), samples)


def fetch_samples(
    address: str, samples: int, processes: int, output_prefix: str, separator: str, seed: int
) -> list[tuple[str, int]]:
    """Writes random documents without repetition to `<prefix><i>.txt`, one file per process.

    Returns:
        the files and the number of documents in each.

    Raises:
        ConfigError: fewer documents than samples.
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
