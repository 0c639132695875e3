"""Samples per second that a rank reads in shuffled order from a token file, Parquet windows and a document store.

    python benchmarks/rows.py

Prints one JSON line per measurement, on the repeated text of examples/quickstart.sh. `ratio_to_token_file` is the rate
relative to that of the token file. `seconds_to_first_sample` includes opening the source and, for windows, reading the
first chunk of the order, which the rate also includes. `grown_by` is the peak memory growth of the process; each source
gets a new one.
"""

from __future__ import annotations

import json
import multiprocessing
import sqlite3
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.figures import print_figure, quickstart_data
from megatron import process_exit
from megatron.config import ConfigSection, DataConfig, flag, parse_flags
from megatron.data.build import build_split_datasets
from megatron.data.formats.indexed import IndexedDataset
from megatron.data.formats.indexed_writer import IndexedWriter
from megatron.data.formats.parquet_windows import WindowFacts, Windows
from megatron.data.sources.source import DataRequest
from megatron.tokenizers.encoders.fast_encoder import resident_bytes
from megatron.tokenizers.tokenizer import TokenizerChoice, build_tokenizer
from trident.corpus.featurize.window_writer import WindowWriter

_PIECE_CHARACTERS = 800


@dataclass(frozen=True)
class RowsFlags(ConfigSection):
    """Flags of this program."""

    seq_length: int = flag(256, "tokens of a sample", at_least=1)
    repeats: int = flag(20, "repetitions of the text", at_least=1)
    samples: int = flag(200_000, "samples to read from each source, at most one epoch", at_least=1)


def main(argv: Sequence[str] | None = None) -> int:
    """Writes the sources, reads each, and prints the measurements."""
    words = sys.argv[1:] if argv is None else argv
    flags = parse_flags(RowsFlags, words, prog="rows.py", description=__doc__ or "")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        demo = quickstart_data(folder)
        files = [str(demo.data / f"demo-{part}") for part in ("vocab.json", "merges.txt")]
        tokens = IndexedDataset(str(demo.data / "demo_text_document"))
        stream = np.concatenate([tokens[number] for number in range(len(tokens))])
        length = flags.seq_length
        sources = {
            "token_file": write_tokens(folder / "tokens", stream, flags.repeats),
            "windows": write_windows(folder / "small.parquet", stream, flags, group_rows=(1 << 19) // length),
            "windows_in_large_groups": write_windows(folder / "large.parquet", stream, flags, group_rows=12_500),
            "store": write_store(folder / "store.db", demo.data / "demo.jsonl", flags.repeats),
        }
        rates = {}
        for kind, prefix in sources.items():
            with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
                tokenizer = TokenizerChoice("GPT2BPETokenizer", *files)
                rates[kind] = process.submit(measure, kind, prefix, flags, tokenizer).result()
    for kind, rate in rates.items():
        print_figure("rows", "ratio_to_token_file", rate / rates["token_file"], "ratio", source=kind)
    return 0


def measure(kind: str, prefix: str, flags: RowsFlags, tokenizer: TokenizerChoice) -> float:
    """Reads the samples of a source in order, in a separate process; returns samples per second."""
    encoder = build_tokenizer(tokenizer)
    before = resident_bytes() or 0
    started_at = time.perf_counter()
    data = DataConfig(seq_length=flags.seq_length, data_path=(prefix,), split="1,0,0")
    datasets, _ = build_split_datasets(DataRequest(data, flags.seq_length, 1, (flags.samples, 0, 0), tokenizer=encoder))
    if datasets.train is None:
        raise RuntimeError(f"{prefix} gives no training samples")
    opened_at = time.perf_counter()
    datasets.train.read(0)
    first_seconds = time.perf_counter() - started_at
    count = min(flags.samples, len(datasets.train))
    for sample in range(1, count):
        datasets.train.read(sample)
    rate = count / (time.perf_counter() - opened_at)
    print_figure("rows", "samples_per_second", rate, "samples/s", source=kind, samples=count)
    print_figure("rows", "seconds_to_first_sample", first_seconds, "s", source=kind)
    print_figure("rows", "grown_by", (peak_bytes() - before) / 1e6, "MB", source=kind)
    return rate


def peak_bytes() -> int:
    """Peak memory of this process in bytes; Linux only."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return 1024 * next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))


def write_tokens(prefix: Path, stream: np.ndarray, repeats: int) -> str:
    """Writes a token file of documents of 1,000 tokens."""
    lengths = [1000] * (len(stream) // 1000)
    with IndexedWriter(prefix, np.uint16) as writer:
        for _ in range(repeats):
            writer.add_batch(stream[: sum(lengths)], lengths)
    return str(prefix)


def write_windows(path: Path, stream: np.ndarray, flags: RowsFlags, group_rows: int) -> str:
    """Writes a Parquet file of windows, with `group_rows` rows per row group."""
    length = flags.seq_length
    facts = WindowFacts(length, 0, length, -100, None, None, 0)
    size = length * group_rows
    every = np.tile(stream, flags.repeats).astype(np.int64)
    with path.open("wb") as file, WindowWriter(file, str(path), facts) as writer:
        for first in range(0, len(every) // length * length, size):
            rows = every[first : first + size]
            ids = rows[: len(rows) // length * length].reshape(-1, length)
            writer.write(Windows(ids, np.ones(ids.shape, np.float32), ids), np.zeros(len(ids), np.int64))
    return str(path)


def write_store(path: Path, corpus: Path, repeats: int) -> str:
    """Writes a SQLite store of the corpus in pieces of a few hundred tokens."""
    texts = [json.loads(line)["text"] for line in corpus.open(encoding="utf-8")]
    pieces = [text[at : at + _PIECE_CHARACTERS] for text in texts for at in range(0, len(text), _PIECE_CHARACTERS)]
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE web (_id INTEGER PRIMARY KEY, idx INTEGER UNIQUE, filt_text TEXT)")
    connection.executemany("INSERT INTO web (idx, filt_text) VALUES (?, ?)", enumerate(pieces * repeats))
    connection.commit()
    connection.close()
    return f"sqlite:///{path}?table=web"


if __name__ == "__main__":
    process_exit.exit_with(main)
