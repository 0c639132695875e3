"""Prepares a dataset, given by its name, for training: a tokenizer, and token files next to it.

For programs that take raw text. All ranks of a run request the same folder at once; the first one writes it. A
program's `TextRecipe` defines documents and special tokens.

Plain text is cut into documents, so that a part of it can be held out: a split of token files assigns whole documents
to training and validation, and a book in one file would be a single one. It is cut at the first blank line after
`_DOCUMENT_LETTERS`, long compared with a sample and short compared with a book, and at every line `<|endoftext|>`,
which commonly separates documents in plain text.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from io import TextIOWrapper
from pathlib import Path
from typing import BinaryIO

from megatron import log
from megatron.data.order.index_cache import wait_for_lock
from megatron.errors import ConfigError, DataError
from megatron.files.failures import storage_error
from megatron.files.plain import open_plain, read_plain_json
from megatron.files.replacing import write_atomically
from megatron.tokenizers.tokenizer import TokenizerChoice
from trident.corpus.inputs.demo import LEAST_BYTES, write_demo_corpus
from trident.corpus.inputs.input_blocks import check_inputs, total_bytes
from trident.corpus.inputs.input_paths import expand_inputs
from trident.corpus.preprocess.encode import EncodeOptions
from trident.corpus.preprocess.preprocess_corpus import preprocess, warn_if_no_tokens
from trident.corpus.vocabulary.learning import byte_level_files, texts_of, train_byte_level
from trident.corpus.workers.progress_line import ProgressLine

ROBERTA_TOKENS = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")
_LEARNT_FROM_BYTES = 10_000_000
_RECORD = "dataset.json"
_DOCUMENTS = "pieces.jsonl"
_LINES = "\n"
_END_OF_TEXT = "<|endoftext|>"
_DOCUMENT_LETTERS = 16_384
_LINE_LETTERS = 1 << 20  # a longer line is cut


@dataclass(frozen=True)
class TextRecipe:
    """A program's settings for converting text to tokens.

    Args:
        flag, folder_flag: the flags for the text and its folder, for messages.
        special: special tokens of a trained tokenizer; `<|endoftext|>` is added unless `</s>` is one of them.
        entries: maximum size of a trained tokenizer.
        bytes_per_entry: the size is reduced for text with fewer bytes per entry.
        is_cut: a .txt file is cut at blank lines; otherwise each line is a document.
        append_eod: documents end with the end-of-document token.
    """

    flag: str
    folder_flag: str
    special: tuple[str, ...] = ()
    entries: int = 8192
    bytes_per_entry: int = 1
    is_cut: bool = True
    append_eod: bool = True


MASKED = TextRecipe("--dataset", "--checkpoint_dir", ROBERTA_TOKENS, is_cut=False, append_eod=False)
_LEAST_ENTRIES = 1024


def prepare_text(dataset: str | None, tokenizer: str | None, folder: Path, recipe: TextRecipe = MASKED) -> None:
    """Writes `train_text_document.bin`, `.idx` and, unless a tokenizer is given, `tokenizer.json` into a folder.

    Existing files are kept for the experiments that were trained on them.

    Args:
        dataset: .txt, jsonl or Parquet with a column `text`, a folder of such files, an address supported by
            preprocessing, or the name of a dataset on the Hub; None for the texts of Python itself.
        tokenizer: a value for --tokenizer-name-or-path; None to train byte-level BPE.

    Raises:
        ConfigError: the dataset or tokenizer does not exist, or the folder holds an earlier state of the dataset.
        DataError: the dataset cannot be read, or is too short to train a tokenizer.
        StorageError: the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / ".lock").open("ab")
    except OSError as failure:
        raise storage_error(folder, failure) from failure
    with lock:
        wait_for_lock(lock, folder)
        inputs = _inputs(dataset, folder, recipe)
        state = {"dataset": dataset, "tokenizer": tokenizer, "files": _states(inputs)}
        record = folder / _RECORD
        if record.is_file():
            if read_plain_json(record) == state:
                return
            raise ConfigError(
                f"{recipe.flag} {dataset} changed since it was prepared in {folder}, which earlier experiments use. "
                f"Start in another {recipe.folder_flag}, or delete {folder} if none of them will be continued."
            )
        log.set_activity(f"reading {dataset}")
        check_inputs(inputs, ("text",))
        log.info(f"preparing {dataset or 'the texts that come with Python'} in {folder}")
        inputs = _documents(inputs, folder, recipe)
        if tokenizer is None:
            tokenizer = str(folder / "tokenizer.json")
            log.set_activity("learning a tokenizer from the text")
            _learn_tokenizer(inputs, Path(tokenizer), recipe, dataset or "the text that comes with Python")
        log.set_activity("turning the text into tokens")
        choice = TokenizerChoice("HFTokenizer", None, None, tokenizer)
        options = EncodeOptions(choice, append_eod=recipe.append_eod, document_separator=_LINES)
        with _progress(inputs) as progress:
            result = preprocess(inputs, str(folder / "train"), options, 1, progress)
        warn_if_no_tokens(result.prefixes, result.tokens_of_key, result.empty, result.skipped)
        write_atomically(record, json.dumps(state, indent=2).encode())


def _inputs(dataset: str | None, folder: Path, recipe: TextRecipe) -> tuple[str, ...]:
    if dataset is None:
        demo = folder / "python.jsonl"
        if not demo.is_file():
            write_demo_corpus(demo, LEAST_BYTES)
        return (str(demo),)
    if "://" not in dataset and not os.path.exists(dataset):
        if dataset.endswith((".txt", ".jsonl", ".json", ".parquet")) or dataset.startswith((".", "/", "~")):
            raise ConfigError(f"{recipe.flag} {dataset}: no such file or folder. Check the path.")
        dataset = f"hf://{dataset}"
    return expand_inputs([dataset], _LINES)


def _documents(inputs: tuple[str, ...], folder: Path, recipe: TextRecipe) -> tuple[str, ...]:
    """Returns the inputs, with plain text replaced by a file of documents in the folder."""
    plain = [path for path in inputs if path.endswith(".txt")] if recipe.is_cut else []
    if not plain:
        return inputs
    documents = folder / _DOCUMENTS
    write_documents(plain, documents)
    return (*(path for path in inputs if path not in plain), str(documents))


def _states(inputs: tuple[str, ...]) -> list[list[str | int]]:
    """Returns name, size and modification time of every file."""
    states: list[list[str | int]] = []
    for path in inputs:
        if os.path.exists(path):
            facts = os.stat(path)
            states.append([path, facts.st_size, facts.st_mtime_ns])
        else:
            states.append([path])
    return states


def _learn_tokenizer(inputs: tuple[str, ...], path: Path, recipe: TextRecipe, source: str) -> None:
    size = total_bytes(inputs)
    entries = min(recipe.entries, max(_LEAST_ENTRIES, size // recipe.bytes_per_entry)) if size else recipe.entries
    share = min(1.0, _LEARNT_FROM_BYTES / size) if size else 1.0
    texts = texts_of(inputs, ("text",), share, False, None, _LINES)
    try:
        vocabulary, merges = train_byte_level(texts, entries, special=recipe.special)
    except DataError as failure:
        raise DataError(
            f"{source}: the text is too short to train a tokenizer. Use more text ({recipe.flag}), or a --tokenizer."
        ) from failure
    write_atomically(path, byte_level_files(vocabulary, merges, recipe.special)["-tokenizer.json"])


@contextlib.contextmanager
def _progress(inputs: tuple[str, ...]) -> Iterator[ProgressLine]:
    progress = ProgressLine(total_bytes(inputs), 10_000, log.info, log.status_line())
    try:
        yield progress
    except BaseException:
        progress.clear()
        raise
    progress.finish()


def split_documents(lines: Iterable[str]) -> Iterator[str]:
    """Yields the documents of plain text, given its lines with line ends."""
    held: list[str] = []
    letters = 0
    for line in lines:
        is_end = line.strip() == _END_OF_TEXT
        if not is_end:
            held.append(line)
            letters += len(line)
        if held and (is_end or (letters >= _DOCUMENT_LETTERS and not line.strip()) or letters >= _LINE_LETTERS):
            yield "".join(held)
            held, letters = [], 0
    if held:
        yield "".join(held)


def write_documents(paths: Iterable[str], output: Path) -> None:
    """Writes the documents of UTF-8 files as jsonl."""
    write_atomically(output, lambda stream: _write_texts(paths, stream))


def _write_texts(paths: Iterable[str], stream: BinaryIO) -> None:
    for path in paths:
        for text in split_documents(_lines(path)):
            if text.strip():
                stream.write(json.dumps({"text": text}, ensure_ascii=False).encode() + b"\n")


def _lines(path: str) -> Iterator[str]:
    try:
        with TextIOWrapper(open_plain(path), encoding="utf-8-sig", newline="") as file:
            while line := file.readline(_LINE_LETTERS):
                yield line
    except UnicodeDecodeError as failure:
        raise DataError(
            f"{path}: byte {failure.start} of a block is not UTF-8 ({failure.reason}). Convert the file first: "
            f"iconv -f WINDOWS-1252 -t UTF-8 {path} (or whatever its encoding is)."
        ) from failure
    except OSError as failure:
        raise storage_error(Path(path), failure) from failure
