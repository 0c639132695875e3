"""A preprocessing run: from input files to published `.bin/.idx` pairs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from megatron import log
from megatron.data.formats.indexed_writer import IndexedWriter, publish_pairs
from megatron.data.formats.sidecar import check_replaceable, read_sidecar
from megatron.files.plain import open_plain
from megatron.tokenizers.record import TokenizerRecord
from trident.corpus.inputs.block import InputBlock
from trident.corpus.inputs.input_blocks import blocks, check_documents
from trident.corpus.inputs.input_paths import InputPart
from trident.corpus.inputs.lines import BadLines
from trident.corpus.preprocess.encode import BlockEncoder, EncodedBlock, EncodeOptions, EncodeWork
from trident.corpus.preprocess.provenance import SourceLog, versions
from trident.corpus.workers.pool import choose_workers, run_blocks
from trident.corpus.workers.progress_line import ProgressLine

BLOCK_BYTES = 4 << 20


@dataclass(frozen=True)
class PreprocessResult:
    """The outcome of preprocessing.

    Args:
        prefixes: data prefixes, one per key.
        documents: documents written, over all keys.
        empty_of_key: skipped documents of each key that gave no ids.
        skipped: skipped bad lines.
        tokens_of_key: ids written for each key.
    """

    prefixes: tuple[str, ...]
    documents: int
    empty_of_key: tuple[int, ...]
    skipped: int
    tokens_of_key: tuple[int, ...]

    @property
    def empty(self) -> int:
        """Documents that gave no ids, over all keys."""
        return sum(self.empty_of_key)

    @property
    def tokens(self) -> int:
        """Ids written, over all keys."""
        return sum(self.tokens_of_key)


def preprocess(
    inputs: Sequence[str | InputPart],
    output_prefix: str,
    options: EncodeOptions,
    workers: int,
    progress: ProgressLine,
    block_bytes: int = BLOCK_BYTES,
) -> PreprocessResult:
    """Encodes inputs into one `.bin/.idx` pair per key; the bytes do not depend on `workers` or `block_bytes`.

    Args:
        inputs: files (see `expand_inputs`), or parts of them (see `share_of`).
        workers: 1 encodes in this process, more in others: at most the usable cores and the blocks.

    Raises:
        ConfigError: an input or a tokenizer file is missing.
        DataError: a bad line (unless skipped) or a damaged file.
        StorageError: the outputs cannot be written.
        WorkerError: a worker process exited unexpectedly.
    """
    check_documents([entry.path if isinstance(entry, InputPart) else entry for entry in inputs], options.keys)
    source = blocks(inputs, block_bytes, options.document_separator, options.keys)
    return preprocess_blocks(source, output_prefix, options, workers, progress)


def written(prefixes: tuple[str, ...]) -> PreprocessResult:
    """Returns the result of preprocessing according to the sidecars."""
    sidecars = [sidecar for prefix in prefixes if (sidecar := read_sidecar(prefix)) is not None]
    return PreprocessResult(
        prefixes,
        documents=sum(sidecar.documents for sidecar in sidecars),
        empty_of_key=tuple(sidecar.empty for sidecar in sidecars),
        skipped=max(sidecar.skipped for sidecar in sidecars),
        tokens_of_key=tuple(sidecar.tokens for sidecar in sidecars),
    )


def warn_if_no_tokens(prefixes: Sequence[str], tokens: Sequence[int], empty: int, skipped: int) -> None:
    """Warns of all data prefixes without tokens: they are valid files, but useless for training.

    `preprocess` does not call this, since the share of one rank may be empty.
    """
    bare = [prefix for prefix, count in zip(prefixes, tokens, strict=True) if count == 0]
    if bare:
        log.warning(
            f"{', '.join(bare)} (.bin, .idx): 0 tokens were written ({empty} empty documents and {skipped} bad lines "
            "skipped), so there is no training data. Check --input and the JSON keys."
        )


def preprocess_blocks(
    source: Iterator[InputBlock],
    output_prefix: str,
    options: EncodeOptions,
    workers: int,
    progress: ProgressLine,
    encoder: BlockEncoder | None = None,
) -> PreprocessResult:
    """Encodes blocks of lines, in their order, into one `.bin/.idx` pair per key with its sidecar; see `preprocess`.

    Args:
        encoder: for these options, if it exists already.
    """
    prefixes = options.prefixes(output_prefix)
    for prefix in prefixes:
        check_replaceable(prefix)
    encoder = encoder or BlockEncoder(options)
    sources = SourceLog()
    source, workers = choose_workers(sources.watch(source), workers)
    with ExitStack() as stack:
        writers = [
            stack.enter_context(IndexedWriter(prefix, encoder.dtype, is_cached=options.is_cached))
            for prefix in prefixes
        ]
        encoded = stack.enter_context(run_blocks(EncodeWork(encoder), source, workers))
        result = _write(encoded, writers, prefixes, options, progress)
        described = (TokenizerRecord.of(encoder.tokenizer), versions(), sources.records())
        for writer, empty in zip(writers, result.empty_of_key, strict=True):
            writer.describe(*described, append_eod=options.append_eod, empty=empty, skipped=result.skipped)
        publish_pairs(writers)
        return result


def _write(
    encoded: Iterable[tuple[InputBlock, EncodedBlock]],
    writers: list[IndexedWriter],
    prefixes: tuple[str, ...],
    options: EncodeOptions,
    progress: ProgressLine,
) -> PreprocessResult:
    good = line = bytes_before = 0
    path = ""
    skipped = BadLines(options.skip_bad_lines)
    for block, result in encoded:
        if block.start == 0 or block.source != path:  # a source begins, or this job's part of it
            path, line, bytes_before = block.source, block.first_line, block.start
        if result.bad:
            lines_before = _newlines(path, bytes_before) + line
            skipped.take(result.bad, result.bad_count, path, block.start, lines_before)
        offsets = []
        for writer, key in zip(writers, result.keys, strict=True):
            if key.ids is None:
                offsets.append(writer.reserve(key.lengths, key.sequences_per_document))
            else:
                writer.add_batch(key.ids, key.lengths, key.sequences_per_document)
        if result.send_offsets is not None:
            result.send_offsets(offsets)
        line += result.lines
        good += result.documents
        progress.advance(result.documents + result.bad_count, block.size, block.input_bytes)
    documents = sum(writer.document_count for writer in writers)
    empty = tuple(good - writer.document_count for writer in writers)
    tokens = tuple(writer.tokens for writer in writers)
    return PreprocessResult(prefixes, documents, empty, skipped.count, tokens)


def _newlines(path: str, size: int) -> int:
    """Counts newlines in the first bytes of a file; needed only if a line is bad and the work began after them."""
    count = 0
    if size:
        with open_plain(path, buffering=0) as file:
            while size and (chunk := file.read(min(size, BLOCK_BYTES))):
                count += chunk.count(b"\n")
                size -= len(chunk)
    return count
