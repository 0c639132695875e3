"""A dataset as its name, made ready to train on: a tokenizer, and token files beside it.

For programs that take raw text. All ranks of a run ask for the same folder at once; the first one makes it.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from megatron import log
from megatron.corpus.inputs.demo import LEAST_BYTES, write_demo_corpus
from megatron.corpus.inputs.files import expand_inputs
from megatron.corpus.inputs.sources import check_inputs, total_bytes
from megatron.corpus.preprocess.encode import EncodeOptions
from megatron.corpus.preprocess.run import preprocess, warn_of_no_tokens
from megatron.corpus.vocabulary.learning import byte_level_files, texts_of, train_byte_level
from megatron.corpus.workers.progress import ProgressLine
from megatron.data.formats.atomic_files import storage_error, write_atomically
from megatron.data.order.index_cache import wait_for_lock
from megatron.errors import ConfigError, DataError
from megatron.tokenizers.tokenizer import TokenizerChoice

ROBERTA_TOKENS = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")
_ENTRIES = 8192
_LEARNT_FROM_BYTES = 10_000_000
_RECORD = "dataset.json"
_LINES = "\n"


def prepare_text(dataset: str | None, tokenizer: str | None, folder: Path) -> None:
    """Writes `train_text_document.bin`, `.idx` and, unless a tokenizer is given, `tokenizer.json` into a folder.

    What is there already is kept, for the experiments that were trained on it.

    Args:
        dataset: .txt with a document on each line, jsonl or Parquet with a column `text`, a folder of such files, an
            address that preprocessing knows, or the name of a dataset of the hub; None for the texts of Python itself.
        tokenizer: what --tokenizer-name-or-path takes; None to learn byte-level BPE with RoBERTa's special tokens.

    Raises:
        ConfigError: there is no such dataset or tokenizer, or the folder holds an earlier state of the dataset.
        DataError: the dataset cannot be read, or is too short to learn a tokenizer from.
        StorageError: the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / ".lock").open("ab")
    except OSError as failure:
        raise storage_error(folder, failure) from failure
    with lock:
        wait_for_lock(lock, folder)
        inputs = _inputs(dataset, folder)
        state = {"dataset": dataset, "tokenizer": tokenizer, "files": _states(inputs)}
        record = folder / _RECORD
        if record.is_file():
            if json.loads(record.read_text()) == state:
                return
            raise ConfigError(
                f"--dataset {dataset} has changed since it was prepared in {folder}, which earlier experiments go on "
                f"with. Begin in another --checkpoint_dir, or delete {folder} if none of them is to be continued."
            )
        check_inputs(inputs, ("text",))
        log.info(f"preparing {dataset or 'the texts that come with Python'} in {folder}")
        if tokenizer is None:
            tokenizer = str(folder / "tokenizer.json")
            _learn_tokenizer(inputs, Path(tokenizer))
        options = EncodeOptions(TokenizerChoice("HFTokenizer", None, None, tokenizer), document_separator=_LINES)
        with _progress(inputs) as progress:
            result = preprocess(inputs, str(folder / "train"), options, 1, progress)
        warn_of_no_tokens(result.prefixes, result.tokens_of_key, result.empty, result.skipped)
        _write(record, json.dumps(state, indent=2).encode())


def _inputs(dataset: str | None, folder: Path) -> tuple[str, ...]:
    if dataset is None:
        demo = folder / "python.jsonl"
        if not demo.is_file():
            write_demo_corpus(demo, LEAST_BYTES)
        return (str(demo),)
    if "://" not in dataset and not os.path.exists(dataset):
        if dataset.endswith((".txt", ".jsonl", ".json", ".parquet")) or dataset.startswith((".", "/", "~")):
            raise ConfigError(
                f"--dataset {dataset}: there is no such file or folder here. Check the path, or leave the flag out to "
                "train on the texts that come with Python."
            )
        dataset = f"hf://{dataset}"
    return expand_inputs([dataset], _LINES)


def _states(inputs: tuple[str, ...]) -> list[list[str | int]]:
    """Name, size and time of the last change of every file."""
    found: list[list[str | int]] = []
    for path in inputs:
        if os.path.exists(path):
            facts = os.stat(path)
            found.append([path, facts.st_size, facts.st_mtime_ns])
        else:
            found.append([path])
    return found


def _learn_tokenizer(inputs: tuple[str, ...], path: Path) -> None:
    size = total_bytes(inputs)
    share = min(1.0, _LEARNT_FROM_BYTES / size) if size else 1.0
    texts = texts_of(inputs, ("text",), share, False, None, _LINES)
    try:
        vocabulary, merges = train_byte_level(texts, _ENTRIES, special=ROBERTA_TOKENS)
    except DataError as failure:
        raise DataError(
            f"{', '.join(inputs)}: the text is too short to learn a tokenizer from. Give more of it (--dataset), or a "
            "--tokenizer."
        ) from failure
    _write(path, byte_level_files(vocabulary, merges, ROBERTA_TOKENS)["-tokenizer.json"])


def _write(path: Path, content: bytes) -> None:
    def write(stream: BinaryIO) -> None:
        stream.write(content)

    write_atomically(path, write)


@contextlib.contextmanager
def _progress(inputs: tuple[str, ...]) -> Iterator[ProgressLine]:
    progress = ProgressLine(total_bytes(inputs), 10_000, log.info, log.terminal_writer())
    try:
        yield progress
    except BaseException:
        progress.clear()
        raise
    progress.finish()
