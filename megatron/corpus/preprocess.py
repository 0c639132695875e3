"""The whole way from input files to published `.bin/.idx` pairs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain, islice

from megatron import log
from megatron.corpus.encode import EncodedBlock, EncodeOptions, Encoder
from megatron.corpus.progress import Progress
from megatron.corpus.sources import Block, blocks, check_inputs
from megatron.corpus.workers import WorkerPool, usable_cores
from megatron.data.indexed import IndexedWriter
from megatron.errors import DataError

BLOCK_BYTES = 4 << 20
_SHOWN_BAD_LINES = 5


@dataclass(frozen=True)
class PreprocessResult:
    """What was written.

    Args:
        prefixes: data prefixes, one a key.
        documents: documents written, over all keys.
        empty: documents that gave no ids and were left out.
        skipped: bad lines that were left out.
        tokens: ids written.
        text_bytes: bytes of input, uncompressed.
    """

    prefixes: tuple[str, ...]
    documents: int
    empty: int
    skipped: int
    tokens: int
    text_bytes: int


def preprocess(
    inputs: tuple[str, ...],
    output_prefix: str,
    options: EncodeOptions,
    workers: int,
    progress: Progress,
    block_bytes: int = BLOCK_BYTES,
) -> PreprocessResult:
    """Encodes jsonl inputs into one `.bin/.idx` pair a key; the bytes do not depend on `workers` or `block_bytes`.

    Args:
        workers: 1 encodes in this process, more in others: no more than there are usable cores, or blocks.

    Raises:
        ConfigError: an input or a tokenizer file is missing.
        DataError: a bad line (unless they are skipped) or a damaged file.
        StorageError: the outputs cannot be written.
        WorkerError: a worker process died.
    """
    check_inputs(inputs)
    prefixes = tuple(f"{output_prefix}_{key}_document" for key in options.keys)
    source = blocks(inputs, block_bytes)
    encoder = Encoder(options)
    first = list(islice(source, 2))
    source = chain(first, source)
    workers = min(workers, usable_cores()) if len(first) > 1 else 1
    with ExitStack() as stack:
        writers = [stack.enter_context(IndexedWriter(prefix, encoder.dtype)) for prefix in prefixes]
        if workers > 1:
            encoded = stack.enter_context(WorkerPool(encoder, workers)).encode(source)
        else:
            encoded = _encode_here(encoder, source)
        return _write(encoded, writers, prefixes, options, progress)


def _encode_here(encoder: Encoder, source: Iterable[Block]) -> Iterator[tuple[Block, EncodedBlock]]:
    for block in source:
        yield block, encoder.encode(block)


def _write(
    encoded: Iterable[tuple[Block, EncodedBlock]],
    writers: list[IndexedWriter],
    prefixes: tuple[str, ...],
    options: EncodeOptions,
    progress: Progress,
) -> PreprocessResult:
    empty = skipped = text_bytes = line = 0
    for block, result in encoded:
        line = 0 if block.start == 0 else line
        for bad in result.bad:
            where = f"{block.source}:{line + bad.line + 1}: byte offset {block.start + bad.offset}: {bad.reason}"
            if not options.skip_bad_lines:
                raise DataError(f"{where}. Mend the line, or leave such lines out with --on-bad-line skip.")
            if skipped < _SHOWN_BAD_LINES:
                progress.clear()
                log.warning(f"{where}; skipped")
        places = []
        for writer, key in zip(writers, result.keys, strict=True):
            if key.ids is None:
                places.append(writer.reserve(key.lengths))
            else:
                writer.add_batch(key.ids, key.lengths)
        if result.place is not None:
            result.place(places)
        line += result.lines
        empty += result.empty
        skipped += result.bad_count
        text_bytes += block.size
        progress.advance(result.lines, block.size, block.input_bytes)
    documents = sum(writer.sequences for writer in writers)
    return PreprocessResult(prefixes, documents, empty, skipped, sum(writer.tokens for writer in writers), text_bytes)
