"""A dataset, given by its name, made ready to train on: a tokenizer, and token files next to it.

For programs that take raw text. All ranks of a run ask for the same folder at once; the first one makes it. A program's
`TextRecipe` says what a document is and what the tokenizer knows.

Running text is cut into documents, so that a part of it can be held out: a split of token files gives whole documents
to training and validation, and a book in one file would be one. A cut is made at the first blank line after
`_PIECE_LETTERS`, long compared with a sample and short compared with a book, and wherever a line says `<|endoftext|>`,
which is how corpora in plain text separate their documents.
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
from trident.corpus.preprocess.preprocess_corpus import preprocess, warn_of_no_tokens
from trident.corpus.vocabulary.learning import byte_level_files, texts_of, train_byte_level
from trident.corpus.workers.progress_line import ProgressLine

ROBERTA_TOKENS = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")
_LEARNT_FROM_BYTES = 10_000_000
_RECORD = "dataset.json"
_PIECES = "pieces.jsonl"
_LINES = "\n"
_END_OF_TEXT = "<|endoftext|>"
_PIECE_LETTERS = 16_384
_LINE_LETTERS = 1 << 20  # a longer line is cut


@dataclass(frozen=True)
class TextRecipe:
    """How a program's text becomes tokens.

    Args:
        flag, place: what the user gives the text and its folder with, for messages.
        special: the tokenizer's special tokens, where one is learnt; `<|endoftext|>` joins them unless there is `</s>`.
        entries: the most entries of a learnt tokenizer.
        bytes_per_entry: fewer entries are learnt from text that has not this many bytes for each.
        is_cut: a .txt file is running text, cut at blank lines; otherwise a document is a line of it.
        append_eod: documents end with the end-of-document token.
    """

    flag: str
    place: str
    special: tuple[str, ...] = ()
    entries: int = 8192
    bytes_per_entry: int = 1
    is_cut: bool = True
    append_eod: bool = True


MASKED = TextRecipe("--dataset", "--checkpoint_dir", ROBERTA_TOKENS, is_cut=False, append_eod=False)
_LEAST_ENTRIES = 1024


def prepare_text(dataset: str | None, tokenizer: str | None, folder: Path, recipe: TextRecipe = MASKED) -> None:
    """Writes `train_text_document.bin`, `.idx` and, unless a tokenizer is given, `tokenizer.json` into a folder.

    What is there already is kept, for the experiments that were trained on it.

    Args:
        dataset: .txt, jsonl or Parquet with a column `text`, a folder of such files, an address that preprocessing
            knows, or the name of a dataset of the hub; None for the texts of Python itself.
        tokenizer: what --tokenizer-name-or-path takes; None to learn byte-level BPE.

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
        inputs = _inputs(dataset, folder, recipe)
        state = {"dataset": dataset, "tokenizer": tokenizer, "files": _states(inputs)}
        record = folder / _RECORD
        if record.is_file():
            if read_plain_json(record) == state:
                return
            raise ConfigError(
                f"{recipe.flag} {dataset} has changed since it was prepared in {folder}, which earlier experiments go "
                f"on with. Begin in another {recipe.place}, or delete {folder} if none of them will be continued."
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
        warn_of_no_tokens(result.prefixes, result.tokens_of_key, result.empty, result.skipped)
        write_atomically(record, json.dumps(state, indent=2).encode())


def _inputs(dataset: str | None, folder: Path, recipe: TextRecipe) -> tuple[str, ...]:
    if dataset is None:
        demo = folder / "python.jsonl"
        if not demo.is_file():
            write_demo_corpus(demo, LEAST_BYTES)
        return (str(demo),)
    if "://" not in dataset and not os.path.exists(dataset):
        if dataset.endswith((".txt", ".jsonl", ".json", ".parquet")) or dataset.startswith((".", "/", "~")):
            raise ConfigError(f"{recipe.flag} {dataset}: there is no such file or folder here. Check the path.")
        dataset = f"hf://{dataset}"
    return expand_inputs([dataset], _LINES)


def _documents(inputs: tuple[str, ...], folder: Path, recipe: TextRecipe) -> tuple[str, ...]:
    """The inputs, with a file of pieces in the folder in the place of running text."""
    running = [path for path in inputs if path.endswith(".txt")] if recipe.is_cut else []
    if not running:
        return inputs
    pieces = folder / _PIECES
    write_pieces(running, pieces)
    return (*(path for path in inputs if path not in running), str(pieces))


def _states(inputs: tuple[str, ...]) -> list[list[str | int]]:
    """Name, size and time of the last change of every file."""
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
            f"{source}: the text is too short to learn a tokenizer from. Give more of it "
            f"({recipe.flag}), or a --tokenizer."
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


def pieces(lines: Iterable[str]) -> Iterator[str]:
    """The documents of running text, given line by line with its line ends."""
    held: list[str] = []
    letters = 0
    for line in lines:
        is_end = line.strip() == _END_OF_TEXT
        if not is_end:
            held.append(line)
            letters += len(line)
        if held and (is_end or (letters >= _PIECE_LETTERS and not line.strip()) or letters >= _LINE_LETTERS):
            yield "".join(held)
            held, letters = [], 0
    if held:
        yield "".join(held)


def write_pieces(paths: Iterable[str], output: Path) -> None:
    """Writes the documents of UTF-8 files as jsonl."""
    write_atomically(output, lambda stream: _write_texts(paths, stream))


def _write_texts(paths: Iterable[str], stream: BinaryIO) -> None:
    for path in paths:
        for text in pieces(_lines(path)):
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
