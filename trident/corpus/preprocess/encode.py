"""Encodes blocks of lines as token ids: the part of preprocessing that runs in every worker.

A worker sends the lengths to the parent and keeps the ids until it receives their offset in the unfinished file, which
only the parent can compute from the order of the blocks.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron.data.formats.indexed_writer import width_for
from megatron.files.exact import write_at
from megatron.files.failures import storage_error
from megatron.files.replacing import start_write_back
from megatron.tokenizers.encoders.long_text import LongText, encode_long
from megatron.tokenizers.tokenizer import TokenizerChoice, add_special_tokens, build_tokenizer
from trident.corpus.inputs.block import InputBlock, parse_block
from trident.corpus.inputs.lines import BadLine
from trident.corpus.preprocess.sentences import SentenceSplitter
from trident.corpus.workers.pool import BlockWork, Message

_LETTERS_AT_ONCE = 4 << 20


@dataclass(frozen=True)
class EncodeOptions:
    """The options that determine the ids, apart from the tokenizer's files; the same in every worker.

    Args:
        tokenizer: the flags that select it.
        keys: JSON keys whose texts are encoded, each into separate files.
        append_eod: end every non-empty document with the end-of-document id.
        skip_bad_lines: skip bad lines instead of stopping at the first.
        document_separator: ends a document in plain text.
        sentences: make every sentence a sequence instead of every document.
        is_cached: write upstream's older layout, whose ids are always int32.
    """

    tokenizer: TokenizerChoice
    keys: tuple[str, ...] = ("text",)
    append_eod: bool = False
    skip_bad_lines: bool = False
    document_separator: str | None = None
    sentences: SentenceSplitter | None = None
    is_cached: bool = False

    def prefixes(self, output_prefix: str) -> tuple[str, ...]:
        """Returns upstream's names of the pairs for an output prefix, one per key."""
        level = "document" if self.sentences is None else "sentence"
        return tuple(f"{output_prefix}_{key}_{level}" for key in self.keys)


@dataclass(frozen=True)
class EncodedKey:
    """The documents of one key of a block, without documents that gave no ids.

    Shapes:
        ids: [sum of lengths], in the dtype of the output file, or None if a worker holds them;
        lengths: int64 [sequences];
        sequences_per_document: int64 [documents], or None if each document is one sequence.
    """

    ids: npt.NDArray[np.integer] | None
    lengths: npt.NDArray[np.int64]
    sequences_per_document: npt.NDArray[np.int64] | None = None

    @property
    def documents(self) -> int:
        return len(self.lengths if self.sequences_per_document is None else self.sequences_per_document)


@dataclass(frozen=True)
class EncodedBlock:
    """The result of encoding a block.

    Args:
        keys: one entry for each key.
        lines: lines in the block, bad and blank ones included.
        documents: of any one key, also those that gave no ids.
        bad: the first few bad lines; `bad_count` is their total number.
        send_offsets: sends the file and the byte offset for the ids of each key to the worker that holds them.
    """

    keys: tuple[EncodedKey, ...]
    lines: int
    documents: int
    bad: tuple[BadLine, ...]
    bad_count: int
    send_offsets: Callable[[Sequence[tuple[str, int]]], None] | None = None


class BlockEncoder:
    """Encodes blocks; created once, or once in each spawned worker.

    Args:
        known_library: see `build_tokenizer`.

    Raises:
        ConfigError: the tokenizer's flags are wrong, or it lacks the required end-of-document token.
        DataError: the tokenizer's files are damaged.
    """

    def __init__(self, options: EncodeOptions, known_library: str | None = None) -> None:
        self.options = options
        self.tokenizer = build_tokenizer(options.tokenizer, known_library)
        self.dtype = width_for(self.tokenizer.vocab_size, is_cached=options.is_cached)
        self._suffix = [self.tokenizer.eod_id] if options.append_eod else []

    def encode(self, block: InputBlock) -> EncodedBlock:
        """Parses and encodes the lines of a block.

        Raises:
            DataError: the block cannot be read.
        """
        options = self.options
        parsed = parse_block(block, options.keys, options.skip_bad_lines, options.document_separator, hold_long=True)
        if parsed.bad and not self.options.skip_bad_lines:
            return EncodedBlock((), parsed.lines, 0, tuple(parsed.bad), parsed.bad_count)
        documents = len(parsed.texts[0])
        keys = tuple(self._encode_texts(texts) for texts in parsed.texts)
        return EncodedBlock(keys, parsed.lines, documents, tuple(parsed.bad), parsed.bad_count)

    def _encode_texts(self, texts: list[str | LongText]) -> EncodedKey:
        """Encodes texts and frees them as early as possible."""
        if self.options.sentences is not None:
            return self._encode_sentences(texts, self.options.sentences)
        ids, lengths = self._encode_flat(texts)
        texts.clear()
        if len(lengths) and not lengths.all():
            lengths = lengths[lengths > 0]
        if self._suffix:
            return EncodedKey(*add_special_tokens(ids, lengths, [], self._suffix, self.dtype))
        return EncodedKey(ids.astype(self.dtype, copy=False), lengths)

    def _encode_sentences(self, texts: list[str | LongText], splitter: SentenceSplitter) -> EncodedKey:
        """Encodes texts sentence by sentence; the end-of-document id follows the last sentence of each text."""
        rows: list[npt.NDArray[np.integer]] = []
        lengths: list[npt.NDArray[np.int64]] = []
        counts = np.zeros(len(texts), np.int64)
        held: list[str] = []
        owners: list[int] = []

        def encode_held() -> None:
            ids, token_counts = self.tokenizer.encode_flat(held)
            has_ids = token_counts > 0
            rows.append(ids.astype(self.dtype))
            lengths.append(token_counts[has_ids])
            np.add.at(counts, np.array(owners, np.int64)[has_ids], 1)
            held.clear()
            owners.clear()

        letters = 0
        texts.reverse()
        for number in range(len(texts)):
            text = texts.pop()
            for batch in splitter.batches(text if isinstance(text, str) else text.whole()):
                held += batch
                owners += [number] * len(batch)
                letters += sum(map(len, batch))
                if letters >= _LETTERS_AT_ONCE:
                    encode_held()
                    letters = 0
        encode_held()
        return self._ended(np.concatenate(rows), np.concatenate(lengths), counts[counts > 0])

    def _ended(
        self, ids: npt.NDArray[np.integer], lengths: npt.NDArray[np.int64], counts: npt.NDArray[np.int64]
    ) -> EncodedKey:
        """Adds the end-of-document id after the last sentence of each document."""
        if self._suffix and len(counts):
            last = np.cumsum(counts) - 1
            ids = np.insert(ids, np.cumsum(lengths)[last], self._suffix[0])
            lengths[last] += len(self._suffix)
        return EncodedKey(ids, lengths, counts)

    def _encode_flat(self, texts: list[str | LongText]) -> tuple[npt.NDArray[np.integer], npt.NDArray[np.int64]]:
        """Returns the concatenated ids of all texts, and the number of ids of each."""
        short = [text for text in texts if isinstance(text, str)]
        if len(short) == len(texts):
            return self.tokenizer.encode_flat(short)
        rows = [
            encode_long(self.tokenizer, text, self.dtype)
            if isinstance(text, LongText)
            else self.tokenizer.encode_flat([text])[0].astype(self.dtype)
            for text in texts
        ]
        lengths = np.array([len(row) for row in rows], np.int64)
        return (rows[0] if len(rows) == 1 else np.concatenate(rows)), lengths


class EncodeWork(BlockWork[EncodedBlock]):
    """Encodes blocks; a spawned worker reloads the tokenizer, but skips the check of its fast encoder."""

    title = "preprocessing"
    is_finished_by_reply = True

    def __init__(self, encoder: BlockEncoder) -> None:
        self.encoder = encoder

    def recipe(self) -> tuple[Callable[..., EncodeWork], tuple[Any, ...]]:
        return _rebuilt, (self.encoder.options, self.encoder.tokenizer.library)

    def run(self, block: InputBlock) -> EncodedBlock:
        return self.encoder.encode(block)

    def pack(self, result: EncodedBlock) -> Message:
        tables = [(key.lengths, key.sequences_per_document) for key in result.keys]
        facts = {
            "has_documents": [documents is not None for _, documents in tables],
            "lines": result.lines,
            "documents": result.documents,
            "bad": [[bad.line, bad.offset, bad.reason] for bad in result.bad],
            "bad_count": result.bad_count,
        }
        return Message(facts, [table for pair in tables for table in pair if table is not None])

    def unpack(self, facts: dict[str, Any], buffers: list[bytearray], reply: Callable[[Any], None]) -> EncodedBlock:
        """Returns the block without its ids; its `send_offsets` replies to the worker."""
        rest = iter(buffers)

        def table() -> npt.NDArray[np.int64]:
            return np.frombuffer(next(rest), np.int64)

        keys = tuple(EncodedKey(None, table(), table() if has else None) for has in facts["has_documents"])
        bad = tuple(BadLine(*entry) for entry in facts["bad"])
        return EncodedBlock(keys, facts["lines"], facts["documents"], bad, facts["bad_count"], reply)

    def finish(self, result: EncodedBlock, reply: Sequence[tuple[str, int]]) -> None:
        """Writes the ids of each key at (path, byte offset) of the unfinished `.bin` file.

        Raises:
            StorageError: they cannot be written.
        """
        for key, (path, offset) in zip(result.keys, reply, strict=True):
            if key.ids is None or not key.ids.size:
                continue
            try:
                descriptor = os.open(path, os.O_WRONLY)
                try:
                    write_at(descriptor, key.ids.view(np.uint8).data, offset)
                    start_write_back(descriptor, offset, key.ids.nbytes)
                finally:
                    os.close(descriptor)
            except OSError as failure:
                raise storage_error(Path(path), failure) from failure


def _rebuilt(options: EncodeOptions, known_library: str) -> EncodeWork:
    return EncodeWork(BlockEncoder(options, known_library))
