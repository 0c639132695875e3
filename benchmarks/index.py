"""Time and memory from opening a large corpus to its first batch, and of index building relative to a NumPy cumsum.

    python benchmarks/index.py --documents 10000000

Prints one JSON line per measurement. The corpus is synthetic: a valid `.idx` of documents of 1 to 1999 tokens, and a
sparse `.bin` of the right size. Every start is measured in a new process: the first one finds no index cache, the
second one does. `peak_own_memory` is the memory that the process allocated; `peak_resident_memory` also counts the
pages of mapped files.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

from benchmarks.figures import print_figure
from megatron import process_exit
from megatron.config import ConfigSection, DataConfig, flag, parse_flags
from megatron.data.build import build_split_datasets
from megatron.data.formats.index_layout import MMAP_HEADER, MMAP_MAGIC
from megatron.data.formats.indexed import IndexedDataset
from megatron.data.loader import BatchLoader
from megatron.data.order.index_map import build_indices
from megatron.data.sources.source import DataRequest

_CHUNK_DOCUMENTS = 1 << 22
_LONGEST_TOKENS = 1999
_SAMPLE_SECONDS = 0.01
_SEED = 1234


@dataclass(frozen=True)
class IndexFlags(ConfigSection):
    """Flags of this program."""

    documents: int = flag(10_000_000, "documents of the synthetic corpus, of 1000 tokens on average", at_least=100)
    seq_length: int = flag(2048, "tokens of a sample", at_least=1)
    epochs: float = flag(1.0, "epochs over the corpus", above=0)
    repeats: int = flag(3, "repetitions of the in-memory build and the cumsum; the fastest counts", at_least=1)
    folder: str | None = flag(None, "folder for temporary files; by default the system's")
    start: str | None = flag(None, "internal: measure one start on this corpus")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark and prints its figures."""
    words = sys.argv[1:] if argv is None else argv
    flags = parse_flags(IndexFlags, words, prog="index.py", description=__doc__ or "")
    if flags.start is not None:
        print(json.dumps(measured_start(flags.start, flags)))
        return 0
    with tempfile.TemporaryDirectory(dir=flags.folder) as name:
        prefix = str(Path(name) / "corpus")
        tokens = fabricate(prefix, flags.documents)
        os.sync()  # in a real run, the corpus is already on disk
        index_bytes = Path(prefix + ".idx").stat().st_size
        common = {"documents": flags.documents, "tokens": tokens, "index_file_megabytes": round(index_bytes / 1e6, 1)}
        for state in ("cold", "warm"):
            found = started(prefix, flags)
            print_figure("index", f"seconds_to_first_batch_{state}_cache", found["seconds"], "s", **common)
            for what in ("own", "resident"):
                size = found[f"{what}_bytes"]
                ratio = round(size / index_bytes, 3)
                print_figure(
                    "index", f"peak_{what}_memory_{state}_cache", size / 1e6, "MB", to_index_file=ratio, **common
                )
        cache_bytes = sum(path.stat().st_size for path in Path(name).glob("index-cache/*"))
        ratio = round(cache_bytes / index_bytes, 3)
        print_figure("index", "cache_on_disk", cache_bytes / 1e6, "MB", to_index_file=ratio, **common)
        build, cumsum = build_seconds(prefix, flags)
        print_figure("index", "build_in_memory", build, "core-s", **common)
        print_figure("index", "build_to_cumsum", build / cumsum, "ratio", cumsum_seconds=round(cumsum, 4), **common)
    return 0


def fabricate(prefix: str, documents: int) -> int:
    """Writes the two files in chunks; returns their number of tokens."""
    drawn = np.random.default_rng(0)
    lengths = drawn.integers(1, _LONGEST_TOKENS + 1, documents, dtype=np.int32)
    tokens = 0
    with open(prefix + ".idx", "wb") as stream:
        stream.write(MMAP_HEADER.pack(MMAP_MAGIC, 1, 8, documents, documents + 1))
        stream.write(lengths.data)
        for start in range(0, documents, _CHUNK_DOCUMENTS):
            part = lengths[start : start + _CHUNK_DOCUMENTS]
            ends = np.cumsum(part, dtype=np.int64) + tokens
            stream.write(((ends - part) * 2).data)
            tokens = int(ends[-1])
        for start in range(0, documents + 1, _CHUNK_DOCUMENTS):
            stream.write(np.arange(start, min(start + _CHUNK_DOCUMENTS, documents + 1), dtype=np.int64).data)
    with open(prefix + ".bin", "wb") as stream:
        stream.truncate(2 * tokens)
    return tokens


def started(prefix: str, flags: IndexFlags) -> dict[str, float]:
    """Time of a process from its start to its first batch, and its memory."""
    words = [sys.executable, __file__, "--start", prefix, "--seq-length", flags.seq_length, "--epochs", flags.epochs]
    began = time.perf_counter()
    text = subprocess.run([str(word) for word in words], check=True, stdout=subprocess.PIPE).stdout
    return {**json.loads(text), "seconds": time.perf_counter() - began}


def measured_start(prefix: str, flags: IndexFlags) -> dict[str, float]:
    """Opens the corpus, reads the first batch, and returns the peak memory."""
    watch = _OwnMemory()
    samples = int(flags.epochs * (Path(prefix + ".bin").stat().st_size // 2 - 1) // flags.seq_length)
    datasets, _ = build_split_datasets(
        DataRequest(
            DataConfig(seq_length=flags.seq_length, data_path=(prefix,), split="1,0,0"),
            flags.seq_length,
            _SEED,
            (samples, 0, 0),
        )
    )
    with BatchLoader(datasets.train, micro_batch_size=8) as loader:
        loader.micro_batches(0, 8)
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"own_bytes": watch.stop(), "resident_bytes": resident}


def build_seconds(prefix: str, flags: IndexFlags) -> tuple[float, float]:
    """CPU seconds of building the three index arrays in memory, and of a cumsum over the same lengths.

    Both use one core; CPU time is not affected by other load on the machine.
    """
    indexed = IndexedDataset(prefix)
    lengths, documents = np.array(indexed.lengths), np.arange(len(indexed), dtype=np.int32)
    samples = int(flags.epochs * (indexed.tokens - 1) // flags.seq_length)
    builds, sums = [], []
    for _ in range(flags.repeats):
        began = time.process_time()
        build_indices(lengths, documents, flags.seq_length, samples, _SEED, tokens=indexed.tokens)
        builds.append(time.process_time() - began)
        began = time.process_time()
        np.cumsum(lengths, dtype=np.int64)
        sums.append(time.process_time() - began)
    return min(builds), min(sums)


class _OwnMemory:
    """Tracks the memory that this process allocated, without mapped files, on systems with /proc."""

    def __init__(self) -> None:
        self._most = 0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def stop(self) -> int:
        """Stops and returns the peak in bytes."""
        self._stopped.set()
        self._thread.join()
        return self._most

    def _watch(self) -> None:
        while True:
            self._most = max(self._most, _own_bytes())
            if self._stopped.wait(_SAMPLE_SECONDS):
                return


def _own_bytes() -> int:
    try:
        _, resident, shared, *_ = Path("/proc/self/statm").read_text().split()
    except OSError:
        return 0
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    process_exit.exit_with(main)
