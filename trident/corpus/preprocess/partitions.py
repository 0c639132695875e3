"""Preprocessing in parts: a killed run continues after its last finished part and writes the same bytes.

The inputs are divided into consecutive shares. Each share becomes separate pairs, published when complete in a hidden
folder next to the output; in the end they are merged and the folder is removed. A manifest in the folder records
inputs, tokenizer and options, so that parts of different runs are never mixed. During the merge the disk holds
everything twice.
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
# Command-line names of the entries of a manifest.
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
    """Divides inputs, or one shard of them, into parts of about equal size; fewer if some are empty.

    Args:
        keys: a Parquet input must have a column for each.

    Raises:
        ConfigError: an input is missing, or cannot be divided because its size is unknown.
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
    """Encodes shares of the inputs one by one into persistent parts, and merges them; see `preprocess`.

    The pairs equal the output of `preprocess` for all shares. Finished parts are kept on errors.

    Raises:
        ConfigError: a tokenizer file is missing, or existing parts belong to another run.
        DataError: a bad line (unless skipped) or a damaged file.
        StorageError: the outputs cannot be written.
        WorkerError: a worker process exited unexpectedly.
    """
    wholes = options.prefixes(output_prefix)
    for whole in wholes:
        check_replaceable(whole)
        check_writable(Path(f"{whole}.bin"))
    encoder = BlockEncoder(options)
    folder = Path(wholes[0]).with_name(f".{Path(wholes[0]).name}.parts")
    width = len(str(len(shares)))
    parts = [str(folder / f"part{number:0{width}d}of{len(shares)}") for number in range(1, len(shares) + 1)]
    with _locked(folder):
        description = _description(shares, options, encoder)
        _claim(folder, description)
        done = [_is_finished(part, options) for part in parts]
        if any(done):
            log.info(f"{sum(done)} of {len(parts)} parts were finished by an earlier run ({folder}) and are skipped.")
        try:
            for share, part, is_done in zip(shares, parts, done, strict=True):
                if is_done:
                    progress.skip(total_bytes(share) or 0)
                    continue
                source = blocks(share, block_bytes, options.document_separator, options.keys)
                preprocess_blocks(source, part, options, workers, progress, encoder)
            for whole, *pairs in zip(wholes, *map(options.prefixes, parts), strict=True):
                merge(pairs, whole, is_one_corpus=True)
        except BaseException:
            _keep_finished(folder, sum(_is_finished(part, options) for part in parts), len(parts))
            raise
        _remove(folder)
        return written(wholes)


def _keep_finished(folder: Path, finished: int, count: int) -> None:
    if finished:
        log.info(
            f"{finished} of {count} parts are finished and kept in {folder}; the same command continues from there."
        )
    else:
        _remove(folder)


def _description(shares: Shares, options: EncodeOptions, encoder: BlockEncoder) -> dict[str, Any]:
    """Returns everything that determines the bytes of the parts, as JSON."""
    # Skipping of bad lines is excluded: a part without any is the same either way, see `_is_finished`.
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
    """Returns numbers that change with an input: size and modification time of a file, rows of a table."""
    table = open_table(path) if is_table(path) else None
    rows = [] if table is None else [table.rows]
    file = path if table is None else table.file
    if file is None or not os.path.isfile(file):
        return rows
    state = os.stat(file)
    return [*rows, state.st_size, state.st_mtime_ns]


def _claim(folder: Path, description: Mapping[str, Any]) -> None:
    """Claims a folder for this run, with the finished parts of an earlier run of the same command.

    Raises:
        ConfigError: the folder holds parts of another run.
    """
    visible = [path for path in folder.iterdir() if path.name not in (_LOCK, _MANIFEST) and path.name[0] != "."]
    saved = _read_manifest(folder)
    if visible and not saved:
        raise ConfigError(
            f"{folder} exists and holds {visible[0].name} without a {_MANIFEST}, so this tool did not write it. Remove "
            "it, or use another --output-prefix."
        )
    differing = [name for name in description if saved.get(name) != description[name]]
    has_finished = any(path.suffix == ".idx" for path in visible)
    if has_finished and differing:  # finished parts may be hours of work: a forgotten flag must not discard them
        before, now = (_shown(values.get(differing[0])) for values in (saved, description))
        raise ConfigError(
            f"{folder} holds parts of an unfinished run with other {_NAMES[differing[0]]}: {before} then, {now} now. "
            f"Repeat the command of that run to finish it, or remove the folder (rm -r '{folder}') to start over."
        )
    if not has_finished:
        _remove(folder, keeps_lock=True)
    write_atomically(folder / _MANIFEST, json.dumps(description, indent=1).encode())


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."


def _is_finished(part: str, options: EncodeOptions) -> bool:
    """Returns True if all pairs of a part are complete and without bad lines, unless this run skips those."""
    sidecars = [_sidecar_of(prefix) for prefix in options.prefixes(part)]
    return all(sidecar is not None and (options.skip_bad_lines or not sidecar.skipped) for sidecar in sidecars)


def _sidecar_of(prefix: str) -> Sidecar | None:
    """Returns the matching sidecar of a complete pair; None if either is missing or damaged."""
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
    """Removes the parts, then the manifest, then the folder, so that parts are never left without manifest."""
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
def _locked(folder: Path) -> Iterator[None]:
    """Creates the folder and locks it against other runs; the system releases the lock when this process exits.

    Raises:
        ConfigError: another run is using it.
        StorageError: it cannot be created.
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
                    "use another --output-prefix."
                ) from failure  # any other error: a file system without locks
        yield
