"""Windows in Parquet files and document stores: undamaged ones, and what reads damaged ones."""

from __future__ import annotations

from pathlib import Path
from random import Random

import numpy as np

from campaigns.fuzzing.target import Broken, check
from campaigns.fuzzing.undamaged_files import VOCAB_SIZE
from megatron.config import DataConfig
from megatron.data.build import build_split_datasets
from megatron.data.formats.parquet_windows import WindowFile
from megatron.data.loader import BatchOptions, MicroBatches
from megatron.data.sources.source import DataRequest
from megatron.data.stores.address import StoreAddress
from megatron.data.stores.document_store import DocumentStore, open_backend
from trident.corpus.featurize.featurize_corpus import WindowOptions, featurize_tokens
from trident.corpus.stores.importing import ImportOptions, import_files
from trident.corpus.stores.inspection import audit
from trident.corpus.stores.writers import open_writer
from trident.corpus.workers.progress_line import ProgressLine

SEQUENCE_LENGTH = 8
SAMPLES = 6
SEED = 1234


def check_ids(ids: np.ndarray, what: str) -> None:
    """Every id must lie in the vocabulary."""
    if len(ids):
        check(int(ids.min()) >= 0 and int(ids.max()) < VOCAB_SIZE, f"{what}: id {ids.min()} or {ids.max()} accepted")


def train(prefix: str, cache: Path, sequence_length: int = 4) -> None:
    """Reads a few batches as training does, and checks their ids."""
    data = DataConfig(seq_length=sequence_length, data_path=(prefix,), split="1,0,0", data_cache_path=str(cache))
    datasets, _ = build_split_datasets(DataRequest(data, sequence_length, SEED, (SAMPLES, 0, 0)))
    options = BatchOptions(eod_id=VOCAB_SIZE - 1, vocab_size=VOCAB_SIZE, segments=True)
    if datasets.train is None:
        raise Broken("no training data")
    batches = MicroBatches(
        datasets.train, first_sample=0, global_batch_size=SAMPLES, micro_batch_size=2, options=options
    )
    for batch in batches:
        check_ids(batch.tokens.ravel(), "batch")
        check(batch.tokens.shape == (2, sequence_length), f"a batch of {batch.tokens.shape}")


def write_windows(undamaged: Path) -> None:
    """Windows of the undamaged pair, in one shard."""
    options = WindowOptions(
        min_sequence_length=2, max_sequence_length=SEQUENCE_LENGTH, num_special_token_reserved=2, stride=4,
        bos_id=1, eos_id=2, pad_id=2, num_shards=1,
    )  # fmt: skip
    featurize_tokens(str(undamaged / "pair"), str(undamaged / "windows"), None, options, 1)
    (shard,) = undamaged.glob("windows-*")
    shard.rename(undamaged / "windows.parquet")


def read_windows(folder: Path, undamaged: Path, draw: Random) -> None:
    """Trains on windows, or reads all of them."""
    path = str(folder / "windows.parquet")
    if draw.random() < 0.5:
        train(path, folder / "cache", SEQUENCE_LENGTH)
        return
    file = WindowFile(path)
    rows = 0
    for windows in file.batches(3, VOCAB_SIZE):
        rows += len(windows.input_ids)
        check_ids(np.asarray(windows.input_ids).ravel(), "window")
    check(rows == file.rows, f"{rows} rows were read of {file.rows}")


def write_store(undamaged: Path) -> None:
    """The undamaged lines as an SQLite store."""
    writer = open_writer(StoreAddress.of(f"sqlite:///{undamaged}/store.db"), "docs")
    try:
        quiet = ProgressLine(None, 1, lambda text: None)
        list(import_files([str(undamaged / "in.jsonl")], writer, "docs", ImportOptions(), quiet))
    finally:
        writer.close()


def read_store(folder: Path, undamaged: Path, draw: Random) -> None:
    """Fetches every document of a store, and looks through it."""
    address = StoreAddress.of(f"sqlite:///{folder}/store.db")
    backend = open_backend(address)
    try:
        store = DocumentStore(backend)
        for document in range(len(store)):
            check(isinstance(store.fetch(document), str), "a document that is not a text")
        if draw.random() < 0.5:
            for found in audit(backend):
                check(isinstance(found.problems, list), "no list of problems")
    finally:
        backend.close()
