"""How a finished folder takes its place among the checkpoints of a directory, and what a dead save leaves behind.

Everything is written into a temporary folder and becomes visible by one rename; whatever happens before it leaves every
earlier checkpoint as it was. An object store has no renames: there the files get their final names at once and the
manifest, without which a folder is no checkpoint, comes last and goes first. A checkpoint may have second names, which
are symbolic links next to it; they disappear with it.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable
from pathlib import Path

from megatron import log
from megatron.checkpoint.manifest import folder_name, folder_step, read_manifest
from megatron.checkpoint.reader import check_files
from megatron.checkpoint.storage import DISK, Storage, cannot_write, write_file
from megatron.config.flags.paths import is_address
from megatron.errors import CheckpointError, StorageError
from megatron.parallel.agreement import run_on_first
from megatron.parallel.mesh import ParallelMesh

HINT_NAME = "latest_checkpointed_iteration.txt"
TEMPORARY_PREFIX = ".tmp-"
ASIDE_PREFIX = ".old-"

_LINK_PREFIX = f"{TEMPORARY_PREFIX}link-"
_TRASH = re.compile(r"\.trash-iter_[0-9]{7,18}-[0-9a-f]+\Z")
_FILE = re.compile(r"(?:pieces|index)_[0-9]{5,7}\.(?:safetensors|json)\Z")


def temporary_folder(directory: Path, step: int, run: str) -> Path:
    """Where the save `run` of a step is written before it is published; in a store, its final name."""
    return directory / (folder_name(step) if is_address(directory) else f"{TEMPORARY_PREFIX}{folder_name(step)}-{run}")


def open_temporary(temporary: Path, need_bytes: int, storage: Storage, flag: str = "--save") -> None:
    """Makes the folder of a save, after cleaning up what dead saves and deletions left in its directory.

    Room that the deletion of older checkpoints will make does not count: they are deleted after the save.

    Args:
        flag: what names the directory, for error texts.

    Raises:
        StorageError: the folder cannot be made, or the file system has not enough room.
    """
    directory = temporary.parent
    try:
        storage.make_directories(directory)
        sweep(directory, storage)
        free = storage.free_bytes(directory)
        if free is not None and free < need_bytes:
            raise StorageError(
                f"no room for a checkpoint in {directory}: it needs {need_bytes} bytes, {free} bytes are free there, "
                f"{need_bytes - free} too few. Earlier checkpoints are untouched; --keep-last deletes the older ones "
                "only when the new one is complete, so there must be room for one more than it keeps. Free space "
                f"there or give {flag} another directory."
            )
        if is_address(temporary) and storage.exists(temporary):
            storage.rename(temporary, temporary.with_name(f"{ASIDE_PREFIX}{temporary.name}-{secrets.token_hex(8)}"))
        storage.make_directory(temporary)
    except OSError as failure:
        raise cannot_write(storage, temporary, need_bytes, failure, flag) from failure


def publish(temporary: Path, final: Path, run: str, storage: Storage) -> None:
    """Renames the folder to its final name; one of that name is moved aside first and moved back when that fails.

    In a store it has its name, and only what it replaces is removed.

    Raises:
        OSError: the file system refused.
    """
    if temporary == final:
        _warn_on_failure(lambda directory: _settle_all(directory, storage), final.parent)
        return
    aside: Path | None = None
    if storage.exists(final):
        aside = final.with_name(f"{ASIDE_PREFIX}{final.name}-{run}")
        storage.rename(final, aside)
    try:
        storage.rename(temporary, final)
    except OSError:
        if aside is not None:
            storage.rename(aside, final)
        raise
    storage.sync_directory(final.parent)
    if aside is not None:
        discard(aside, storage)


def write_hint(directory: Path, step: int, run: str, storage: Storage) -> None:
    """Points upstream's tools at the newest checkpoint. Recovery does not need it, so a failure is only a warning."""
    temporary = directory / (HINT_NAME if is_address(directory) else f"{TEMPORARY_PREFIX}latest-{run}")
    try:
        storage.remove_file(temporary)
        write_file(storage, temporary, str(step).encode())
        if temporary.name != HINT_NAME:
            storage.rename(temporary, directory / HINT_NAME)
        storage.sync_directory(directory)
    except OSError as failure:
        log.warning(
            f"the checkpoint is saved, but {HINT_NAME} could not be updated: {failure}. This program does not need it."
        )
        _warn_on_failure(storage.remove_file, temporary)


def remove_checkpoint(folder: Path, storage: Storage) -> None:
    """Deletes a checkpoint: one rename, in a store the removal of its manifest, makes it disappear, then its files go.
    What a kill leaves, and its second names, are swept later.

    Raises:
        OSError: the file system refused that; the checkpoint is whole, or in a store none any more.
    """
    if is_address(folder):
        storage.remove_tree(folder)
        return
    gone = folder.with_name(f".trash-{folder.name}-{secrets.token_hex(4)}")
    storage.rename(folder, gone)
    storage.sync_directory(folder.parent)  # before its files go: a crash must not bring it back without them
    discard(gone, storage)


def link_checkpoint(folder: Path, name: str, storage: Storage) -> None:
    """Gives a checkpoint a second name: a relative symbolic link next to it, which replaces an earlier one.

    A failure is a warning, and so is a file or folder of that name, which is left alone.
    """
    link, temporary = folder.parent / name, folder.parent / f"{_LINK_PREFIX}{secrets.token_hex(4)}"
    if storage.exists(link) and not storage.is_link(link):
        log.warning(f"{link} exists and is not a link, so {folder.name} does not get this name (--checkpoint-link)")
        return
    try:
        storage.make_link(temporary, folder.name)
        storage.rename(temporary, link)
        storage.sync_directory(folder.parent)
    except OSError as failure:
        log.warning(f"{folder} is saved, but the link {name} could not be made: {failure}")
        _warn_on_failure(storage.remove_file, temporary)


def is_trash(name: str) -> bool:
    """Whether a folder's name marks a deleted checkpoint whose files are still there."""
    return _TRASH.match(name) is not None


def unfinished_in(directory: Path, storage: Storage) -> list[str]:
    """The folders of a store that have the name of a checkpoint and hold files of one, but no manifest."""
    return [
        name
        for name in (storage.names(directory) if is_address(directory) else ())
        if folder_step(name) is not None and all(map(_FILE.match, storage.names(directory / name)))
    ]


def sweep(directory: Path, storage: Storage) -> None:
    """Removes what dead saves and deletions left behind, and puts back a checkpoint that a save had moved aside."""
    for name in unfinished_in(directory, storage):
        log.warning(f"removing {directory / name}, which an unfinished save or deletion left behind")
        discard(directory / name, storage)
    for name in storage.names(directory):
        path = directory / name
        if name.startswith(TEMPORARY_PREFIX + "iter_"):
            log.warning(f"removing {path}, which an unfinished save left behind")
            discard(path, storage)
        elif name.startswith((TEMPORARY_PREFIX + "latest-", _LINK_PREFIX)):
            _warn_on_failure(storage.remove_file, path)
        elif is_trash(name):
            log.warning(f"removing {path}, which an unfinished deletion left behind")
            discard(path, storage)
    _settle_all(directory, storage)
    remove_dead_links(directory, storage)


def sweep_at_start(directory: Path, mesh: ParallelMesh, storage: Storage = DISK) -> None:
    """Sweeps the directory of a run that starts and holds its lock; collective.

    Each save sweeps too, but a run that has nothing left to save would leave what its predecessor left.
    """

    def work() -> None:
        try:
            sweep(directory, storage)
        except OSError as failure:
            log.warning(f"could not clean up {directory}: {failure}. It does no harm.")

    run_on_first(mesh, work)


def discard(folder: Path, storage: Storage) -> None:
    """Removes a folder that is not needed any more; in a store, what it was to replace comes back.

    A failure is only a warning.
    """
    _warn_on_failure(storage.remove_tree, folder)
    if is_address(folder) and not folder.name.startswith(ASIDE_PREFIX):
        _warn_on_failure(lambda directory: _settle_all(directory, storage), folder.parent)


def remove_dead_links(directory: Path, storage: Storage) -> None:
    """Removes the second names of checkpoints that are not there any more; other links are left alone.

    Raises:
        OSError: the directory cannot be listed.
    """
    for name in storage.names(directory):
        path = directory / name
        if not storage.is_link(path):
            continue
        target = storage.link_target(path)
        if folder_step(target) is not None and not storage.exists(directory / target):
            _warn_on_failure(storage.remove_file, path)


def _settle_all(directory: Path, storage: Storage) -> None:
    for name in storage.names(directory):
        if name.startswith(ASIDE_PREFIX + "iter_"):
            _settle(directory / name, storage)


def _settle(aside: Path, storage: Storage) -> None:
    """Moves a checkpoint that was moved aside back, or removes it if the one in its place is good."""
    step = folder_step(aside.name)
    if step is None:
        return
    final = aside.with_name(folder_name(step))
    if not storage.exists(final):
        log.warning(f"moving {aside} back to {final}: a save of the same step died while it replaced it")
        _warn_on_failure(lambda path: storage.rename(path, final), aside)
        return
    try:
        check_files(final, read_manifest(final, storage), storage)
    except (CheckpointError, StorageError):
        return  # the one in its place is not good: keep both
    discard(aside, storage)


def _warn_on_failure(work: Callable[[Path], None], path: Path) -> None:
    try:
        work(path)
    except OSError as failure:
        log.warning(f"could not clean up {path}: {failure}. It does no harm; remove it by hand if it stays.")
