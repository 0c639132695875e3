"""Merges `.bin/.idx` pairs into one, byte for byte as if preprocessed at once.

Memory does not grow with the data: tables and token ids are copied in chunks. All numbers are Python integers or int64,
so there is no limit at 2^31 tokens or bytes. Several ranks may share the copying; each writes its ranges of the same
two files.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from megatron import log
from megatron.data.formats.index_layout import IndexLayout
from megatron.data.formats.indexed import IndexedDataset, read_token_index
from megatron.data.formats.indexed_writer import clear_leftovers
from megatron.data.formats.sidecar import (
    Sidecar,
    SourceRecord,
    check_replaceable,
    is_sidecar,
    read_sidecar,
    remove_sidecar,
    sidecar_path,
    write_temporary_sidecar,
)
from megatron.errors import ConfigError, DataError, StorageError
from megatron.files.exact import write_at
from megatron.files.failures import storage_error
from megatron.files.plain import open_plain
from megatron.files.replacing import discard, publish_together, sync_file, temporary_name
from trident.corpus.workers.ranks import JobRanks

_CHUNK_ENTRIES = 1 << 20
_COPIED_BYTES = 1 << 22
_PROBE_BYTES = 1 << 12


@dataclass(frozen=True)
class MergePart:
    """The properties of one pair before anything is copied.

    Args:
        documents: entries of its document table, without the leading 0.
    """

    prefix: str
    dtype: str
    sequences: int
    documents: int
    tokens: int
    has_modes: bool
    is_cached: bool


@dataclass(frozen=True)
class MergePlan:
    """The pairs to merge and the output."""

    output_prefix: str
    parts: tuple[MergePart, ...]

    @cached_property
    def index(self) -> IndexLayout:
        """The layout of the `.idx` file: cached if all parts are, with NVIDIA's table of modes if one has it."""
        sequences, documents, tokens = self.starts[-1]
        has_modes = any(part.has_modes for part in self.parts)
        is_cached = all(part.is_cached for part in self.parts)
        return IndexLayout(is_cached, sequences, documents, np.dtype(self.parts[0].dtype), tokens, has_modes)

    @cached_property
    def starts(self) -> list[list[int]]:
        """Sequences, documents and tokens before each part, then in total."""
        counts = [(part.sequences, part.documents, part.tokens) for part in self.parts]
        return np.cumsum([(0, 0, 0), *counts], axis=0, dtype=np.int64).tolist()  # type: ignore[no-any-return]


def merge(
    prefixes: Sequence[str], output_prefix: str, ranks: JobRanks | None = None, *, is_one_corpus: bool = False
) -> MergePlan:
    """Merges pairs, in the given order, and their sidecars if all have one.

    Args:
        ranks: the ranks that share the work; all call this with the same arguments on the same files.
        is_one_corpus: the pairs are shares of the same sources, so a recurring source is recorded once.

    Raises:
        ConfigError: the output is one of the inputs.
        DataError: an input is missing or damaged, the element types or the tokenizers differ, or an input changed
            while being copied.
        StorageError: the outputs cannot be written; no files are left behind.
    """
    ranks = ranks or JobRanks.single()
    assigned = range(ranks.rank, len(prefixes), ranks.size)
    surveys = ranks.run_on_all(lambda: [[index, _survey(prefixes[index])] for index in assigned])
    surveyed = sorted(entry for survey in surveys for entry in survey)
    plan = MergePlan(output_prefix, tuple(MergePart(*values) for _, values in surveyed))
    sidecar = _checked(plan)
    if sidecar is not None and is_one_corpus:
        sidecar = replace(sidecar, sources=_joined_sources(sidecar.sources))
    with _temporaries(plan, ranks) as (bin_path, idx_path):
        ranks.run_on_all(lambda: _copy(plan, assigned, Path(bin_path), Path(idx_path)))
        ranks.run_on_first(lambda: _publish(plan, sidecar, Path(bin_path), Path(idx_path)))
    return plan


def remove_pair(prefix: str) -> None:
    """Removes a pair and its sidecar, if they exist."""
    for suffix in ("idx", "bin"):
        Path(f"{prefix}.{suffix}").unlink(missing_ok=True)
    remove_sidecar(prefix)


def _joined_sources(sources: Sequence[SourceRecord]) -> tuple[SourceRecord, ...]:
    """Returns one record per path; the hash of a source in several shares is unknown."""
    joined: dict[str, SourceRecord] = {}
    for source in sources:
        known = joined.get(source.path)
        size = source.text_bytes + (known.text_bytes if known else 0)
        joined[source.path] = SourceRecord(source.path, size, None if known else source.xxh3_64)
    return tuple(joined.values())


def _survey(prefix: str) -> list[Any]:
    return list(astuple(_facts(IndexedDataset(prefix))))


def _facts(dataset: IndexedDataset) -> MergePart:
    if dataset.dtype.kind not in "iu":
        raise DataError(f"{dataset.prefix} holds {dataset.dtype.name}, not token ids; such data cannot be merged.")
    return MergePart(dataset.prefix, dataset.dtype.str, *dataset.counts, dataset.modes is not None, dataset.is_cached)


def _checked(plan: MergePlan) -> Sidecar | None:
    """Checks that the parts are compatible; returns the merged sidecar."""
    names = {os.path.realpath(part.prefix) for part in plan.parts}
    if os.path.realpath(plan.output_prefix) in names:
        raise ConfigError(
            f"--output-prefix {plan.output_prefix} is also one of --datasets and would be overwritten while being "
            "read. Use another output."
        )
    first = plan.parts[0]
    for part in plan.parts[1:]:
        if part.dtype != first.dtype:
            raise DataError(
                f"{first.prefix} holds {np.dtype(first.dtype).name} and {part.prefix} holds "
                f"{np.dtype(part.dtype).name}: pairs of different widths cannot be merged. Preprocess one of them "
                "again with the tokenizer, and the --dataset-impl, of the other (cached and lazy always hold int32)."
            )
    filled = [part for part in plan.parts if part.sequences]
    for part in filled:
        if part.has_modes != filled[0].has_modes:
            with_modes, without = (part, filled[0]) if part.has_modes else (filled[0], part)
            raise DataError(
                f"{with_modes.prefix} has a table of modes (multimodal data) and {without.prefix} has none. Merge "
                "multimodal data with multimodal data only."
            )
    check_replaceable(plan.output_prefix)
    return _merged_sidecar(plan)


def _merged_sidecar(plan: MergePlan) -> Sidecar | None:
    sidecars = [read_sidecar(part.prefix) for part in plan.parts]
    described = [(part, sidecar) for part, sidecar in zip(plan.parts, sidecars, strict=True) if sidecar is not None]
    for part, sidecar in described:
        if (sidecar.sequences, sidecar.tokens) != (part.sequences, part.tokens):
            raise DataError(
                f"{part.prefix}.json lists {sidecar.sequences} sequences and {sidecar.tokens} tokens, but the pair "
                f"has {part.sequences} and {part.tokens}: they do not match. Remove or restore the .json."
            )
        ours, theirs = described[0][1].tokenizer, sidecar.tokenizer
        if not ours.is_of(theirs):
            differing = ours.differences(theirs)
            raise DataError(
                f"{described[0][0].prefix} was made with the tokenizer {ours.name} (fingerprint "
                f"{str(ours.fingerprint)[:12]}) and {part.prefix} with {theirs.name} "
                f"({str(theirs.fingerprint)[:12]}): {f'{differing}, so ' if differing else ''}their ids mean different "
                "text. Preprocess one of them again with the tokenizer of the other."
            )
    if not described:
        return None
    if len(described) < len(plan.parts):
        lacking = next(part.prefix for part, sidecar in zip(plan.parts, sidecars, strict=True) if sidecar is None)
        log.warning(f"{lacking} has no sidecar (.json), so {plan.output_prefix} gets none.")
        return None
    merged = [sidecar for _, sidecar in described]
    return replace(
        merged[0],
        documents=sum(sidecar.documents for sidecar in merged),
        empty=sum(sidecar.empty for sidecar in merged),
        skipped=sum(sidecar.skipped for sidecar in merged),
        sequences=sum(sidecar.sequences for sidecar in merged),
        tokens=sum(sidecar.tokens for sidecar in merged),
        append_eod=all(sidecar.append_eod for sidecar in merged),
        sources=tuple(source for sidecar in merged for source in sidecar.sources),
    )


@contextmanager
def _temporaries(plan: MergePlan, ranks: JobRanks) -> Iterator[tuple[str, str]]:
    """Creates the two output files under temporary names, filled with zeros; removes leftovers at the end."""
    paths = [temporary_name(Path(f"{plan.output_prefix}.{suffix}")) for suffix in ("bin", "idx")]
    try:
        names = ranks.run_on_first(lambda: _create(plan, *paths))
        yield names[0], names[1]
    finally:
        for path in paths:
            discard(path)


def _create(plan: MergePlan, bin_path: Path, idx_path: Path) -> list[str]:
    clear_leftovers(plan.output_prefix)
    try:
        bin_path.parent.mkdir(parents=True, exist_ok=True)
        for path, size in ((bin_path, plan.index.bin_bytes), (idx_path, plan.index.size_bytes)):
            with path.open("xb") as stream:
                stream.truncate(size)
    except OSError as failure:
        raise _refused(plan, failure) from failure
    return [str(bin_path), str(idx_path)]


def _copy(plan: MergePlan, assigned: Sequence[int], bin_path: Path, idx_path: Path) -> None:
    """Copies this rank's parts to their offsets, and the header on the rank of the first part."""
    try:
        with bin_path.open("r+b", buffering=0) as target, idx_path.open("r+b", buffering=0) as index:
            if 0 in assigned:
                for offset, data in plan.index.frame():
                    write_at(index.fileno(), data, offset)
            for number in assigned:
                _copy_part(plan, plan.parts[number], plan.starts[number], target.fileno(), index.fileno())
            sync_file(target.fileno())
            sync_file(index.fileno())
    except OSError as failure:
        raise _refused(plan, failure) from failure


def _refused(plan: MergePlan, failure: OSError) -> StorageError:
    return storage_error(Path(f"{plan.output_prefix}.bin"), failure, plan.index.bin_bytes + plan.index.size_bytes)


def _copy_part(plan: MergePlan, part: MergePart, before: Sequence[int], target: int, index: int) -> None:
    dataset = IndexedDataset(part.prefix)
    if _facts(dataset) != part:
        raise DataError(
            f"{part.prefix} was rewritten while it was being merged. Start again when nothing writes to it."
        )
    sequences, documents, tokens = before
    itemsize = plan.index.dtype.itemsize
    size = part.tokens * itemsize
    with open_plain(dataset.bin_path, buffering=0) as source:
        copied = _copy_bytes(source.fileno(), target, size, tokens * itemsize)
    if copied != size:
        raise DataError(
            f"{dataset.bin_path} ended at byte offset {copied} instead of {size} while being copied. Start again when "
            "nothing writes to it."
        )
    for start in range(0, part.sequences, _CHUNK_ENTRIES):
        stop = start + _CHUNK_ENTRIES
        lengths, first_token = dataset.lengths[start:stop], int(dataset.pointers[start]) // itemsize + tokens
        for offset, data in plan.index.of_sequences(sequences + start, lengths, first_token):
            write_at(index, data, offset)
        if dataset.modes is not None:
            offset, data = plan.index.of_modes(sequences + start, dataset.modes[start:stop])
            write_at(index, data, offset)
    for start in range(0, part.documents, _CHUNK_ENTRIES):
        ends = dataset.documents[start + 1 : min(start + _CHUNK_ENTRIES, part.documents) + 1].astype("<i8") + sequences
        offset, data = plan.index.of_documents(documents + start, ends)
        write_at(index, data, offset)


def _copy_bytes(source: int, target: int, size: int, offset: int) -> int:
    """Copies the first `size` bytes of a file to an offset of another; returns the number of copied bytes."""
    done = 0
    while done < size and (data := os.pread(source, min(size - done, _COPIED_BYTES), done)):
        write_at(target, data, offset + done)
        done += len(data)
    return done


def _publish(plan: MergePlan, sidecar: Sidecar | None, bin_path: Path, idx_path: Path) -> None:
    """Checks the finished files and gives them their names, `.idx` last."""
    _verify(plan, bin_path, idx_path)
    final_bin, final_idx = (Path(f"{plan.output_prefix}.{suffix}") for suffix in ("bin", "idx"))
    files, described = [(bin_path, final_bin), (idx_path, final_idx)], sidecar_path(plan.output_prefix)
    if sidecar is None:
        publish_together(files, [described] if is_sidecar(described) else [])
        return
    temporary = write_temporary_sidecar(plan.output_prefix, sidecar)
    try:
        publish_together([files[0], (temporary, described), files[1]])
    finally:
        discard(temporary)


def _verify(plan: MergePlan, bin_path: Path, idx_path: Path) -> None:
    """Checks sizes, all tables, and the first and last bytes of each part.

    Raises:
        DataError: the output is wrong; the disk or its file system lost bytes.
    """
    table, index = read_token_index(idx_path, bin_path, bin_path.stat().st_size), plan.index
    actual = (len(table.lengths), len(table.documents) - 1, table.tokens)
    expected = (index.sequences, index.documents, index.tokens)
    if (*actual, table.dtype, idx_path.stat().st_size) != (*expected, index.dtype, index.size_bytes):
        raise DataError(
            "The merged index holds {} sequences, {} documents and {} tokens; the parts have {}, {} and {}. The disk "
            "lost bytes: nothing was published.".format(*actual, *expected)
        )
    start = 0
    with open_plain(bin_path, buffering=0) as merged:
        for part in plan.parts:
            size = part.tokens * index.dtype.itemsize
            with open_plain(f"{part.prefix}.bin", buffering=0) as source:
                for offset in (0, max(0, size - _PROBE_BYTES)):
                    count = min(_PROBE_BYTES, size)
                    ours = os.pread(merged.fileno(), count, start + offset)
                    if ours != os.pread(source.fileno(), count, offset):
                        raise DataError(
                            f"{count} bytes at offset {start + offset} of the merged file differ from offset {offset} "
                            f"of {part.prefix}.bin. The disk lost bytes or the input changed: nothing was published."
                        )
            start += size
