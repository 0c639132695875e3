"""A cleaning run: from input files to one cleaned jsonl file and a report."""

from __future__ import annotations

import contextlib
import gzip
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from megatron import log
from megatron.errors import ConfigError
from megatron.files.replacing import check_writable, remove_leftovers, write_atomically
from trident.corpus.cleaning.cleaner import SHOWN_CHARACTERS, CleanedBlock, Cleaner, CleanWork, DroppedDocument
from trident.corpus.cleaning.cleaning_report import CleaningReport
from trident.corpus.cleaning.contamination import EvaluationSets
from trident.corpus.cleaning.documents.clean_options import CleanOptions
from trident.corpus.cleaning.documents.entries import document_of
from trident.corpus.cleaning.duplicates import DuplicateFilter, ExactDuplicates
from trident.corpus.cleaning.filters.rejections import BAD_LINE
from trident.corpus.inputs.block import InputBlock
from trident.corpus.inputs.compressed import zstandard_library
from trident.corpus.inputs.input_blocks import blocks, check_inputs
from trident.corpus.inputs.input_paths import STANDARD_INPUT
from trident.corpus.inputs.lines import BadLine, BadLines
from trident.corpus.workers.pool import choose_workers, run_blocks
from trident.corpus.workers.progress_line import ProgressLine

BLOCK_BYTES = 1 << 20
_GZIP_LEVEL = 6
_ZSTANDARD_ADVICE = "name it .jsonl.gz"
_ZSTANDARD_LEVEL = 3


@dataclass(frozen=True)
class CleanOutputs:
    """The output files of a run.

    Args:
        kept: the cleaned documents.
        dropped: the original dropped documents with their reasons; None to discard them.
        report: counts and examples as JSON; None for no report.
    """

    kept: str
    dropped: str | None = None
    report: str | None = None

    def check(self, inputs: Sequence[str]) -> None:
        """Checks that all files can be written, before any work is done.

        Raises:
            ConfigError: two outputs, or an output and an input, are the same file; a suffix is not supported.
            StorageError: a file cannot be written.
        """
        taken = {str(Path(path).resolve()): f"--input {path}" for path in inputs}
        for flag, path in (("--output", self.kept), ("--dropped", self.dropped), ("--report", self.report)):
            if path is None:
                continue
            absolute = str(Path(path).resolve())
            if absolute in taken:
                raise ConfigError(f"{flag} {path} is the same file as {taken[absolute]}. Use another name.")
            taken[absolute] = f"{flag} {path}"
            check_output(flag, path)
            check_writable(Path(path))


def clean_corpus(
    inputs: Sequence[str],
    outputs: CleanOutputs,
    options: CleanOptions,
    workers: int,
    progress: ProgressLine,
    block_bytes: int = BLOCK_BYTES,
) -> CleaningReport:
    """Cleans inputs into one jsonl file; the bytes do not depend on `workers` or `block_bytes`.

    Args:
        inputs: files, see `expand_inputs`.
        workers: 1 cleans in this process, more in others: at most the usable cores and the blocks.

    Raises:
        ConfigError: an input, a library or a file of texts is missing.
        DataError: a bad line (unless skipped) or a damaged file.
        StorageError: the outputs cannot be written.
        WorkerError: a worker process exited unexpectedly.
    """
    keys = (options.key, *options.kept_columns)
    check_inputs(inputs, keys)
    outputs.check(inputs)
    for path in (outputs.kept, outputs.dropped, outputs.report):
        if path is not None:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            for leftover in remove_leftovers(Path(path)):
                log.info(f"removed {leftover}, left behind by a killed run")
    evaluation = None
    if options.contamination is not None:
        evaluation = EvaluationSets(options.contamination)
        if options.contamination.maximum_occurrences:
            _check_twice_readable(inputs)
            counter = Cleaner(options.only_counting(), evaluation, counts=True)
            source = blocks(inputs, block_bytes, options.document_separator, keys)
            _ignore_frequent_runs(evaluation, counter, source, workers)
    report = CleaningReport(options.maximum_examples)
    source = blocks(inputs, block_bytes, options.document_separator, keys)
    source, workers = choose_workers(source, workers)
    with run_blocks(CleanWork(Cleaner(options, evaluation)), source, workers) as cleaned:
        _write(cleaned, outputs, options, report, progress)
    if outputs.report is not None:
        write_atomically(Path(outputs.report), report.as_json())
    return report


def _check_twice_readable(inputs: Sequence[str]) -> None:
    pipes = [path for path in inputs if path == STANDARD_INPUT or (Path(path).exists() and not Path(path).is_file())]
    if pipes:
        raise ConfigError(
            f"--decontaminate reads the input twice, first to count common phrases (--ngram-occurrences), but "
            f"{pipes[0]} can be read only once. Use a file, or --ngram-occurrences 0."
        )


def _ignore_frequent_runs(
    evaluation: EvaluationSets, counter: Cleaner, source: Iterator[InputBlock], workers: int
) -> None:
    log.info(f"Counting {len(evaluation):,} word runs of the evaluation texts in the input")
    occurrences = np.zeros(len(evaluation), np.int64)
    copies = ExactDuplicates() if counter.options.exact_duplicates else None
    source, workers = choose_workers(source, workers)
    with run_blocks(CleanWork(counter), source, workers) as counted:
        for _, result in counted:
            runs = result.runs
            if copies is not None:
                is_first = np.array([rejection is None for rejection in copies.rejections(result)], np.bool_)
                runs = runs[is_first[result.run_texts]]
            np.add.at(occurrences, runs, 1)
    frequent = evaluation.ignore(occurrences)
    log.info(f"{int(np.count_nonzero(occurrences)):,} occur; {frequent:,} of them are ignored as too frequent")


def _write(
    cleaned: Iterable[tuple[InputBlock, CleanedBlock]],
    outputs: CleanOutputs,
    options: CleanOptions,
    report: CleaningReport,
    progress: ProgressLine,
) -> None:
    """Writes kept and, if requested, dropped documents; both files appear at the end."""

    def write_kept(kept: Any) -> None:
        if outputs.dropped is None:
            _Writer(options, report, progress, kept, None).write(cleaned)
        else:
            write_lines(outputs.dropped, lambda rest: _Writer(options, report, progress, kept, rest).write(cleaned))

    write_lines(outputs.kept, write_kept)


@dataclass
class _Writer:
    """Deduplicates, writes and counts the documents of each block."""

    options: CleanOptions
    report: CleaningReport
    progress: ProgressLine
    kept: Any
    dropped: Any | None

    def write(self, cleaned: Iterable[tuple[InputBlock, CleanedBlock]]) -> None:
        duplicates = DuplicateFilter(self.options)
        path, line, skipped = "", 0, BadLines(self.options.skip_bad_lines)
        for block, result in cleaned:
            if block.start == 0 or block.source != path:
                path, line = block.source, 0
            bad = [
                BadLine(entry.number, entry.offset, entry.detail)
                for entry in result.dropped
                if entry.reason == BAD_LINE
            ]
            skipped.take(bad, len(bad), block.source, block.start, line)
            self._write_block(result, duplicates, path, line)
            line += result.lines
            self.report.text_bytes += block.size
            self.progress.advance(len(result.passed) + len(result.dropped), block.size, block.input_bytes)

    def _write_block(self, result: CleanedBlock, duplicates: DuplicateFilter, path: str, line: int) -> None:
        report = self.report
        rejections = duplicates.rejections(result, path, line)
        ends = np.cumsum(result.sizes)
        dropped = list(result.dropped)
        stays = np.array([rejection is None for rejection in rejections], np.bool_)
        for index in np.flatnonzero(~stays).tolist():
            rejection = rejections[index]
            if rejection is not None:
                shown = ""
                if report.wants_example(rejection.reason) or self.dropped is not None:
                    text = result.output[ends[index] - result.sizes[index] : ends[index]]
                    shown = document_of(text.split(b"\n", 1)[0], self.options.key)[:SHOWN_CHARACTERS]
                dropped.append(DroppedDocument(int(result.passed[index]), rejection.reason, rejection.detail, shown))
        dropped.sort()
        for start, stop in _runs(stays):
            offset = int(ends[start] - result.sizes[start])
            self.kept.write(memoryview(result.output)[offset : int(ends[stop - 1])])
        for entry in dropped:
            report.drop(entry.reason, f"{path}:{line + entry.number + 1}", entry.shown, entry.detail)
        gone = {entry.number for entry in dropped}
        changed = [change for change in result.changed if change.number not in gone]
        report.changed_documents += len({change.number for change in changed})
        for change in changed:
            report.change(change.what, f"{path}:{line + change.number + 1}", change.before, change.after)
        report.read += int(np.count_nonzero(stays)) + len(dropped)
        report.kept += int(np.count_nonzero(stays))
        report.written += int(result.pieces[stays].sum())
        report.output_bytes += int(result.sizes[stays].sum())
        if self.dropped is not None:
            self._write_dropped(result, dropped, path, line)

    def _write_dropped(self, result: CleanedBlock, dropped: Sequence[DroppedDocument], path: str, line: int) -> None:
        """Writes one line each: reason, detail, source, line, and the original document (`raw` if it is not JSON)."""
        ends = np.cumsum(result.original_sizes)
        lines = []
        for entry in dropped:
            stop = int(ends[entry.number])
            original = result.originals[stop - int(result.original_sizes[entry.number]) : stop]
            facts = {"reason": entry.reason, "detail": entry.detail, "source": path, "line": line + entry.number + 1}
            head = json.dumps(facts, ensure_ascii=False).encode("utf-8", "backslashreplace")[:-1]
            if entry.reason == BAD_LINE:
                raw = json.dumps(original.decode("utf-8", "replace"), ensure_ascii=False).encode("utf-8")
                lines.append(head + b', "raw": ' + raw + b"}\n")
            else:
                lines.append(head + b', "document": ' + original.strip() + b"}\n")
        if self.dropped is not None:
            self.dropped.write(b"".join(lines))


def _runs(stays: npt.NDArray[np.bool_]) -> Iterator[tuple[int, int]]:
    """Yields half-open ranges of consecutive kept documents."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], stays, [False])).astype(np.int8)))
    yield from zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)


def check_output(flag: str, path: str) -> None:
    """Checks that the format of a file's suffix is supported.

    Raises:
        ConfigError: the compression is not supported, or its library is missing.
    """
    suffix = Path(path).suffix.lower()
    if suffix in (".bz2", ".xz", ".parquet"):
        raise ConfigError(f"{flag} {path}: {suffix} is not supported. Use .jsonl, .jsonl.gz or .jsonl.zst.")
    if suffix == ".zst":
        zstandard_library(path, flag, _ZSTANDARD_ADVICE)


def write_lines(path: str, write: Callable[[Any], None]) -> None:
    """Writes a file through `write`, compressed if the suffix is .gz or .zst; it appears when it is complete.

    The bytes depend only on the lines: a .gz file contains neither name nor time.

    Raises:
        StorageError: writing failed; no file is left behind.
    """

    def packed(stream: BinaryIO) -> None:
        with _compressed(path, stream) as lines:
            write(lines)

    write_atomically(Path(path), packed)


@contextlib.contextmanager
def _compressed(path: str, stream: BinaryIO) -> Iterator[Any]:
    suffix = Path(path).suffix.lower()
    if suffix == ".gz":
        with gzip.GzipFile("", "wb", _GZIP_LEVEL, stream, mtime=0) as lines:
            yield lines
    elif suffix == ".zst":
        compressor = zstandard_library(path, "--output", _ZSTANDARD_ADVICE).ZstdCompressor(level=_ZSTANDARD_LEVEL)
        with compressor.stream_writer(stream, closefd=False) as lines:
            yield lines
    else:
        yield stream
