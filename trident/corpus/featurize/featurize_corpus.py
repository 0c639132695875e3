"""Converts text, or a `.bin/.idx` pair, to windows of equal length in Parquet shards: the options, and the run.

Text is first encoded into a pair next to the shards, as by `tools/preprocess_data.py`; then the windows are counted and
divided among the shards. The pair takes 2 or 4 bytes per token and is removed at the end.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron import log
from megatron.data.formats.indexed import IndexedDataset
from megatron.data.formats.parquet_windows import LARGEST_ID, WindowFacts
from megatron.data.formats.sidecar import read_sidecar
from megatron.data.formats.window_names import shard_name
from megatron.errors import ConfigError
from megatron.files.failures import storage_error
from megatron.files.replacing import check_writable, temporary_name
from megatron.tokenizers.record import TokenizerRecord
from megatron.tokenizers.tokenizer import build_tokenizer
from trident.corpus.featurize.shards import WindowPlan, check_integers, prepare_folder, write_shards
from trident.corpus.featurize.window_cutting import Cutting, Tally
from trident.corpus.inputs.block import InputBlock
from trident.corpus.inputs.input_blocks import blocks, check_inputs
from trident.corpus.preprocess.encode import EncodeOptions
from trident.corpus.preprocess.preprocess_corpus import BLOCK_BYTES, PreprocessResult, preprocess_blocks
from trident.corpus.workers.processes import usable_cores
from trident.corpus.workers.progress_line import ProgressLine

ROWS_PER_SHARD = 1 << 16


@dataclass(frozen=True)
class WindowOptions:
    """The options of windows; see the flags of `tools/corpus/featurize.py`.

    Args:
        stride: tokens between the starts of two windows; None for windows without overlap.
        bos_id: None for the id that the tokenizer adds before every text, or else its end-of-document id.
        eos_id: None for the tokenizer's end-of-document id.
        pad_id: None for `eos_id`, or 0 without one.
        num_shards: None to derive it from `rows_per_shard`.
    """

    min_sequence_length: int = 128
    max_sequence_length: int = 256
    num_special_token_reserved: int = 2
    ignore_label: int = -100
    stride: int | None = 128
    mask_overlap: bool = False
    drop_short: bool = False
    bos_id: int | None = None
    eos_id: int | None = None
    pad_id: int | None = None
    num_shards: int | None = None
    rows_per_shard: int = ROWS_PER_SHARD

    @property
    def tokens_per_window(self) -> int:
        """Maximum number of document tokens in a window."""
        return self.max_sequence_length - self.num_special_token_reserved

    def problems(self) -> Iterator[str]:
        """Yields a message for each contradiction."""
        longest, reserved = self.max_sequence_length, self.num_special_token_reserved
        if self.tokens_per_window < 1:
            yield (
                f"--max-sequence-length {longest} leaves no room for a token besides {reserved} special ones "
                "(--num-special-token-reserved). Use longer windows."
            )
        elif self.stride is not None and self.stride > self.tokens_per_window:
            yield (
                f"--stride {self.stride} would skip tokens: a window holds {self.tokens_per_window} "
                f"(--max-sequence-length {longest} minus {reserved} special ones). Use at most that as stride."
            )
        if self.min_sequence_length > longest:
            yield f"--min-sequence-length {self.min_sequence_length} is above --max-sequence-length {longest}."
        if self.ignore_label >= 0:
            yield f"--ignore-label {self.ignore_label} is a token id. Use a negative number, usually -100."

    def cutting(
        self, tokenizer: TokenizerRecord | None, document_end: int | None = None, document_begin: int | None = None
    ) -> Cutting:
        """Returns the cutting parameters for the ids of a tokenizer.

        Args:
            tokenizer: None if unknown.
            document_end: the id at the end of every document of the source, if any. It is removed if windows end with
                the same id.
            document_begin: likewise; also the default begin id of windows.

        Raises:
            ConfigError: listing all contradictions.
        """
        problems = list(self.problems())
        reserved = self.num_special_token_reserved
        known = None if tokenizer is None else tokenizer.eod_id
        eos_id = known if self.eos_id is None else self.eos_id
        begin = known if document_begin is None else document_begin
        bos_id = begin if self.bos_id is None else self.bos_id
        needed = [("--eos-id", eos_id, reserved >= 1), ("--bos-id", bos_id, reserved == 2)]
        problems += [
            f"{flag} is unknown: the tokenizer has no end-of-document token. Set {flag}, or "
            "--num-special-token-reserved 0 for windows without special tokens."
            for flag, value, is_needed in needed
            if is_needed and value is None
        ]
        last = LARGEST_ID if tokenizer is None else tokenizer.vocab_size - 1
        given = (("--bos-id", self.bos_id), ("--eos-id", self.eos_id), ("--pad-id", self.pad_id))
        problems += [
            f"{flag} {value} is not in the vocabulary, whose ids are 0 to {last}."
            for flag, value in given
            if value is not None and not 0 <= value <= last
        ]
        if problems:
            raise ConfigError(problems)
        facts = WindowFacts(
            sequence_length=self.max_sequence_length,
            special_tokens=reserved,
            stride=self.tokens_per_window if self.stride is None else self.stride,
            ignore_label=self.ignore_label,
            bos_id=bos_id if reserved == 2 else None,
            eos_id=eos_id if reserved else None,
            pad_id=next((value for value in (self.pad_id, eos_id) if value is not None), 0),
            mask_overlap=self.mask_overlap,
            document_begin=document_begin if reserved == 2 and document_begin == bos_id else None,
            document_end=document_end if reserved and document_end == eos_id else None,
            tokenizer=tokenizer,
        )
        return Cutting(facts, self.min_sequence_length, self.drop_short)

    def shards_for(self, rows: int) -> int:
        """Returns the number of shards for a number of windows."""
        return self.num_shards or max(1, math.ceil(rows / self.rows_per_shard))


@dataclass(frozen=True)
class FeaturizeResult:
    """The outcome of featurizing.

    Args:
        empty: documents without tokens, which yield no window.
        skipped: skipped bad lines.
    """

    shards: tuple[str, ...]
    tally: Tally
    empty: int
    skipped: int

    def report(self, sequence_length: int) -> Iterator[str]:
        """Yields the counts as lines."""
        tally = self.tally
        yield (
            f"Read {tally.documents} documents with {tally.tokens} tokens; {self.empty} empty documents and "
            f"{self.skipped} bad lines skipped."
        )
        yield (
            f"Wrote {tally.windows} windows of {sequence_length} positions: {tally.kept} tokens, {tally.repeated} of "
            f"them a second time (overlap), {tally.special} beginnings and ends, {tally.padded} padding."
        )
        short = f"{tally.dropped_windows} dropped (--drop-short)" if tally.dropped_windows else "all kept and padded"
        yield f"Dropped {tally.dropped} tokens; {tally.short} windows were below --min-sequence-length, {short}."
        first, last = self.shards[0], self.shards[-1]
        yield f"Shards: {first}{f' to {last}' if first != last else ''}."


def featurize(
    inputs: Sequence[str],
    output_path: str,
    encoding: EncodeOptions,
    options: WindowOptions,
    workers: int,
    progress: ProgressLine,
    block_bytes: int = BLOCK_BYTES,
) -> FeaturizeResult:
    """Converts texts to windows; the shards do not depend on `workers` or `block_bytes`.

    Args:
        inputs: files, see `expand_inputs`.

    Raises:
        ConfigError: the options contradict, or an input or a tokenizer file is missing.
        DataError: a bad line (unless skipped) or a damaged file.
        StorageError: the outputs cannot be written.
        WorkerError: a worker process exited unexpectedly.
    """
    check_inputs(inputs, encoding.keys)
    source = blocks(inputs, block_bytes, encoding.document_separator, encoding.keys)
    cutting = cutting_for_text(encoding, options)
    check_writable(Path(shard_name(output_path, 0, 1)))
    prepare_folder(output_path)
    scratch = temporary_name(Path(output_path))
    try:
        read = _encode(source, scratch, encoding, workers, progress)
        plan = WindowPlan(IndexedDataset(read.prefixes[0]), cutting)
        shards = write_shards(plan, output_path, options.shards_for(plan.rows), min(workers, usable_cores()))
        empty = read.empty + read.documents - plan.tally.documents
        return FeaturizeResult(shards, plan.tally, empty, read.skipped)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def featurize_tokens(
    prefix: str, output_path: str, tokenizer: TokenizerRecord | None, options: WindowOptions, workers: int
) -> FeaturizeResult:
    """Converts the documents of a `.bin/.idx` pair to windows.

    An end-of-document id added by `--append-eod` is removed if the windows have an end id; converting back restores it.

    Args:
        tokenizer: of the pair, if its description does not record it; None if unknown.

    Raises:
        ConfigError: the options contradict.
        DataError: the pair is damaged.
        StorageError: the outputs cannot be written.
        WorkerError: a worker process exited unexpectedly.
    """
    dataset = IndexedDataset(prefix)
    sidecar = read_sidecar(prefix)
    record = sidecar.tokenizer if sidecar is not None else tokenizer
    ends = record.eod_id if sidecar is not None and sidecar.append_eod and record is not None else None
    cutting = options.cutting(record, ends)
    check_integers(dataset)
    plan = WindowPlan(dataset, cutting)
    shards = write_shards(plan, output_path, options.shards_for(plan.rows), min(workers, usable_cores()))
    return FeaturizeResult(shards, plan.tally, len(dataset.documents) - 1 - plan.tally.documents, 0)


def cutting_for_text(encoding: EncodeOptions, options: WindowOptions) -> Cutting:
    """Returns the cutting parameters for texts; loads the tokenizer for the begin and end ids, before any work.

    Raises:
        ConfigError: the options contradict, or a tokenizer file is missing.
    """
    tokenizer = build_tokenizer(encoding.tokenizer)
    begin, end = (ids[0] if len(ids) == 1 else None for ids in tokenizer.added)
    cutting = options.cutting(TokenizerRecord.of(tokenizer), end, begin)
    taken_off = (cutting.facts.document_begin, cutting.facts.document_end)
    stay = [ids for ids, taken in zip(tokenizer.added, taken_off, strict=True) if ids and taken is None]
    if stay and options.num_special_token_reserved:
        log.warning(
            f"the tokenizer {tokenizer.name} adds the ids {' and '.join(map(str, stay))} around every document, "
            "which stay in addition to the ids of the windows. With --num-special-token-reserved 0 windows have none."
        )
    return cutting


def _encode(
    source: Iterator[InputBlock], scratch: Path, encoding: EncodeOptions, workers: int, progress: ProgressLine
) -> PreprocessResult:
    try:
        scratch.mkdir()
    except OSError as failure:
        raise storage_error(scratch, failure) from failure
    result = preprocess_blocks(source, str(scratch / "tokens"), encoding, workers, progress)
    progress.finish()
    return result
