"""Preprocessing in parts that are kept: a killed run continues after its last finished part and gives the same bytes.

The inputs are divided into shares in their order. Each share becomes pairs of its own, which are published as soon as
they are complete, in a hidden folder next to the output; in the end they are merged and the folder is removed. The
folder holds a manifest of what the parts were made from, so that parts of other inputs, another tokenizer or other
options are never mixed in. While the parts are merged the disk holds everything twice.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, astuple
from pathlib import Path
from typing import Any

from megatron import log
from megatron.data.formats.indexed import IndexedDataset
from megatron.data.formats.sidecar import Sidecar, check_replaceable, read_sidecar
from megatron.errors import ConfigError, DataError
from megatron.files.failures import storage_error
from megatron.files.plain import read_plain_json
from megatron.files.replacing import check_writable, write_atomically
from megatron.secret_text import masked
from megatron.tokenizers.record import TokenizerRecord
from trident.corpus.inputs.input_blocks import blocks, check_documents, total_bytes
from trident.corpus.inputs.input_paths import InputPart, Shard, share_of
from trident.corpus.inputs.tables import is_table, open_table
from trident.corpus.preprocess.encode import BlockEncoder, EncodeOptions
from trident.corpus.preprocess.merge import merge
from trident.corpus.preprocess.preprocess_corpus import BLOCK_BYTES, PreprocessResult, preprocess_blocks, written
from trident.corpus.preprocess.provenance import versions
from trident.corpus.workers.progress_line import ProgressLine

_MANIFEST = "manifest.json"
_LOCK = "lock"
_LONGEST_SHOWN = 60
# What the entries of a manifest are called on the command line.
_NAMES = {
    "inputs": "--input (files, their sizes and times of change)",
    "shares": "--partitions or --shard",
    "keys": "--json-keys",
    "append_eod": "--append-eod",
    "document_separator": "--document-separator",
    "sentences": "--split-sentences, --keep-newlines, --lang or the version of sentencex",
    "is_cached": "--dataset-impl",
    "tokenizer": "the tokenizer",
}

Shares = tuple[tuple[InputPart, ...], ...]


def divide(
    paths: Sequence[str], partitions: int, shard: Shard | None, separator: str | None, keys: Sequence[str]
) -> Shares:
    """Divides inputs, or one shard's share of them, into a number of parts of about equal size; fewer if some are
    empty.

    Args:
        keys: a Parquet input must have a column for each.

    Raises:
        ConfigError: an input is missing, or has no size, so that it cannot be divided.
    """
    check_documents(paths, keys)
    outer = shard or Shard(1, 1)
    first, count = (outer.number - 1) * partitions, outer.count * partitions
    shares = [share_of(paths, Shard(first + number, count), separator) for number in range(1, partitions + 1)]
    return tuple(share for share in shares if share) or ((),)


def preprocess_in_parts(
    shares: Shares,
    output_prefix: str,
    options: EncodeOptions,
    workers: int,
    progress: ProgressLine,
    block_bytes: int = BLOCK_BYTES,
) -> PreprocessResult:
    """Encodes shares of the inputs one by one into parts that outlive this process, and merges them; see `preprocess`.

    The pairs are the same as `preprocess` writes for all shares.

    Raises:
        ConfigError: a tokenizer file is missing, or the parts there belong to another run.
        DataError: a bad line (unless they are skipped) or a damaged file; finished parts stay.
        StorageError: the outputs cannot be written; finished parts stay.
        WorkerError: a worker process died; finished parts stay.
    """
    wholes = options.prefixes(output_prefix)
    for whole in wholes:
        check_replaceable(whole)
        check_writable(Path(f"{whole}.bin"))
    encoder = BlockEncoder(options)
    folder = Path(wholes[0]).with_name(f".{Path(wholes[0]).name}.parts")
    width = len(str(len(shares)))
    parts = [str(folder / f"part{number:0{width}d}of{len(shares)}") for number in range(1, len(shares) + 1)]
    with _held(folder):
        description = _description(shares, options, encoder)
        _take_over(folder, description)
        done = [_is_finished(part, options) for part in parts]
        if any(done):
            log.info(f"{sum(done)} of {len(parts)} parts were finished by an earlier run ({folder}) and are skipped.")
        try:
            for share, part, is_done in zip(shares, parts, done, strict=True):
                if is_done:
                    progress.leave_out(total_bytes(share) or 0)
                    continue
                source = blocks(share, block_bytes, options.document_separator, options.keys)
                preprocess_blocks(source, part, options, workers, progress, encoder)
            for whole, *pairs in zip(wholes, *map(options.prefixes, parts), strict=True):
                merge(pairs, whole, is_one_corpus=True)
        except BaseException:
            _say_what_stays(folder, sum(_is_finished(part, options) for part in parts), len(parts))
            raise
        _remove(folder)
        return written(wholes)


def _say_what_stays(folder: Path, finished: int, count: int) -> None:
    if finished:
        log.info(
            f"{finished} of {count} parts are finished and stay in {folder}; the same command continues from there."
        )
    else:
        _remove(folder)


def _description(shares: Shares, options: EncodeOptions, encoder: BlockEncoder) -> dict[str, Any]:
    """All that decides the bytes of the parts, as JSON gives it back.

    Bad lines are not among it: a part without any is the same whether they are skipped or not, see `_is_finished`.
    """
    paths = dict.fromkeys(entry.path for share in shares for entry in share)
    sentences = options.sentences
    description = {
        "inputs": [[masked(path), *_state(path)] for path in paths],
        "shares": [[[masked(part.path), part.start, part.stop] for part in share] for share in shares],
        "keys": options.keys,
        "append_eod": options.append_eod,
        "document_separator": options.document_separator,
        "sentences": sentences and [*astuple(sentences), versions().get("sentencex")],
        "is_cached": options.is_cached,
        "tokenizer": asdict(TokenizerRecord.of(encoder.tokenizer)),
    }
    copied: dict[str, Any] = json.loads(json.dumps(description))
    return copied


def _state(path: str) -> list[int]:
    """What changes when an input does: size and time of change of a file, rows of a table."""
    table = open_table(path) if is_table(path) else None
    rows = [] if table is None else [table.rows]
    file = path if table is None else table.file
    if file is None or not os.path.isfile(file):
        return rows
    state = os.stat(file)
    return [*rows, state.st_size, state.st_mtime_ns]


def _take_over(folder: Path, description: Mapping[str, Any]) -> None:
    """Claims a folder for this run, with the finished parts of an earlier run of the same command.

    Raises:
        ConfigError: the folder holds parts of another run; finished parts may be hours of work, so that they are not
            thrown away for a forgotten flag.
    """
    visible = [path for path in folder.iterdir() if path.name not in (_LOCK, _MANIFEST) and path.name[0] != "."]
    saved = _read_manifest(folder)
    if visible and not saved:
        raise ConfigError(
            f"{folder} exists and holds {visible[0].name} without a {_MANIFEST}: this tool did not write it. Remove "
            f"it, or "
            "choose another --output-prefix."
        )
    differing = [name for name in description if saved.get(name) != description[name]]
    has_finished = any(path.suffix == ".idx" for path in visible)
    if has_finished and differing:
        then, now = (_shown(values.get(differing[0])) for values in (saved, description))
        raise ConfigError(
            f"{folder} holds parts of a run that did not finish, with other {_NAMES[differing[0]]}: {then} then, {now} "
            "now. Give the command of that run again to finish it, or remove the folder (rm -r "
            f"'{folder}') to start over."
        )
    if not has_finished:
        _remove(folder, keeps_lock=True)
    write_atomically(folder / _MANIFEST, json.dumps(description, indent=1).encode())


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."


def _is_finished(part: str, options: EncodeOptions) -> bool:
    """Whether all pairs of a part are there, whole, and without bad lines that this run is not to skip."""
    sidecars = [_sidecar_of(prefix) for prefix in options.prefixes(part)]
    return all(sidecar is not None and (options.skip_bad_lines or not sidecar.skipped) for sidecar in sidecars)


def _sidecar_of(prefix: str) -> Sidecar | None:
    """The sidecar of a pair that is whole and belongs to it; None where one is missing or damaged."""
    try:
        dataset, sidecar = IndexedDataset(prefix), read_sidecar(prefix)
    except DataError:
        return None
    return sidecar if sidecar is not None and sidecar.counts == dataset.counts else None


def _read_manifest(folder: Path) -> dict[str, Any]:
    try:
        content = read_plain_json(folder / _MANIFEST)
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _remove(folder: Path, *, keeps_lock: bool = False) -> None:
    """Removes the parts, then the manifest, then the folder: parts are never left without their manifest."""
    last = {_MANIFEST: 1, _LOCK: 2}
    try:
        for path in sorted(folder.iterdir(), key=lambda path: last.get(path.name, 0)):
            if not (keeps_lock and path.name == _LOCK):
                path.unlink()
        if not keeps_lock:
            folder.rmdir()
    except OSError as failure:
        raise storage_error(folder, failure) from failure


@contextmanager
def _held(folder: Path) -> Iterator[None]:
    """Makes the folder and locks it against other runs; the system releases the lock however this process ends.

    Raises:
        ConfigError: another run is using it.
        StorageError: it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / _LOCK).open("wb")
    except OSError as failure:
        raise storage_error(folder, failure) from failure
    with lock:
        try:
            import fcntl

            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except ImportError:  # not available on this system
            pass
        except OSError as failure:
            if failure.errno in (errno.EACCES, errno.EAGAIN):
                raise ConfigError(
                    f"Another run writes its parts to {folder}, for the same output. Wait until it has finished, or "
                    "choose another --output-prefix."
                ) from failure  # any other: a file system without locks
        yield
