"""Copies a checkpoint to another directory; every byte is compared with its digest on the way."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable
from pathlib import Path

from megatron import log
from megatron.checkpoint.keeping.summaries import steps_in
from megatron.checkpoint.manifest import (
    MANIFEST_NAME,
    Manifest,
    folder_name,
    read_manifest,
    read_whole,
    stored_digest,
)
from megatron.checkpoint.publish import discard, open_temporary, publish, sweep, temporary_folder, write_hint
from megatron.checkpoint.reader import check_files, verified_chunks
from megatron.checkpoint.storage import Storage, append, cannot_write, write_file
from megatron.errors import CheckpointError, DamagedError
from megatron.parallel.agreement import run_on_all, run_on_first
from megatron.parallel.mesh import ParallelMesh


def copy_checkpoint(
    source: Path,
    directory: Path,
    mesh: ParallelMesh,
    *,
    flag: str,
    replaces: bool = False,
    storage: Storage | None = None,
    beat: Callable[[], None] = lambda: None,
) -> Path | None:
    """Copies the checkpoint folder `source` into a directory; collective over the whole mesh.

    The ranks share the files. The copy appears by one rename when all of it is on the disk.

    Args:
        flag: what names the directory, for error texts.
        replaces: whether another checkpoint of the same step there is replaced.
        beat: called before each part that this rank copies.

    Returns:
        the copy, or None if the directory holds the same checkpoint already.

    Raises:
        DamagedError: the source is not what its manifest says.
        CheckpointError: another checkpoint of that step is there.
        StorageError: the file system refused; what was in the directory is untouched.
    """
    storage = storage or Storage()
    manifest = run_on_all(mesh, lambda: read_manifest(source, storage))
    final = directory / folder_name(manifest.step)
    if run_on_first(mesh, lambda: _is_there(final, manifest, replaces, flag, storage)):
        return None
    run = run_on_first(mesh, lambda: secrets.token_hex(8))
    temporary = temporary_folder(directory, manifest.step, run)
    need_bytes = sum(file.size_bytes for file in manifest.files)
    run_on_first(mesh, lambda: open_temporary(temporary, need_bytes, storage, flag))

    def copy_own() -> None:
        for number in range(mesh.control.rank, len(manifest.files), mesh.control.size):
            _copy_file(source, temporary, manifest, number, flag, storage, beat)

    def commit() -> None:
        target = temporary / MANIFEST_NAME
        try:
            _copy_manifest(source, target, manifest, storage)
            storage.sync_directory(temporary)
            publish(temporary, final, run, storage)
        except OSError as failure:
            raise cannot_write(storage, target, need_bytes, failure, flag) from failure
        _point_to_newest(directory, run, storage)

    try:
        run_on_all(mesh, copy_own)
        run_on_first(mesh, commit)
    except Exception:
        if mesh.control.rank == 0:
            discard(temporary, storage)
        raise
    return final


def _is_there(final: Path, manifest: Manifest, replaces: bool, flag: str, storage: Storage) -> bool:
    """Whether the checkpoint was copied before; looks at the sizes and headers of its files, not at their data.

    Raises:
        CheckpointError: there is another one, which is not to be replaced.
        StorageError: the directory, or the copy that is there, cannot be read.
    """
    try:
        if storage.exists(final.parent):
            sweep(final.parent, storage)  # may put another checkpoint of the step back in its place
    except OSError as failure:
        raise cannot_write(storage, final, 0, failure, flag) from failure
    if not storage.exists(final):
        return False
    is_same = not storage.is_link(final) and stored_digest(final, storage) == manifest.digest
    if is_same:
        try:
            check_files(final, manifest, storage)
        except DamagedError as damage:
            log.warning(f"copying to {final} again: {damage}")
            return False
        return True
    if not replaces:
        raise CheckpointError(
            f"{final} is another checkpoint of step {manifest.step} than the one to be copied. Copy it to another "
            "directory, or remove the one that is there."
        )
    return False


def _copy_file(
    source: Path,
    temporary: Path,
    manifest: Manifest,
    number: int,
    flag: str,
    storage: Storage,
    beat: Callable[[], None],
) -> None:
    file = manifest.files[number]
    target = temporary / file.name
    try:
        handle = storage.create(target)
        try:
            for content in verified_chunks(source, manifest, number, storage):
                beat()
                append(storage, handle, content)
            storage.sync(handle)
        finally:
            storage.close(handle)
    except DamagedError as damage:
        raise DamagedError(f"{damage} It was not copied.") from damage
    except OSError as failure:
        raise cannot_write(storage, target, file.size_bytes, failure, flag) from failure


def _point_to_newest(directory: Path, run: str, storage: Storage) -> None:
    """Writes the hint for other programs, which need not be for the copy: it may be of an older checkpoint."""
    with contextlib.suppress(OSError):
        for step in list(steps_in(directory, storage))[:1]:
            write_hint(directory, step, run, storage)


def _copy_manifest(source: Path, target: Path, manifest: Manifest, storage: Storage) -> None:
    """Copies the manifest that was read before; what was written is compared with its digest."""
    write_file(storage, target, _manifest_text(source, manifest, storage))
    read_manifest(target.parent, storage, manifest)


def _manifest_text(source: Path, manifest: Manifest, storage: Storage) -> bytes:
    """The text of the manifest that was read before."""
    text = read_whole(storage, source / MANIFEST_NAME)
    if stored_digest(source, storage) != manifest.digest:
        raise DamagedError(f"{source / MANIFEST_NAME} changed while it was being copied. Copy it again.")
    return bytes(text)
