"""Publishes finished checkpoint folders, and cleans up after interrupted saves.

A save writes into a temporary folder that one rename makes visible; a failure before it leaves earlier checkpoints
intact. Object stores have no renames: there the files get their final names at once, and the manifest, without which a
folder is not a checkpoint, is written last and removed first. Links to a checkpoint (--checkpoint-link) are removed
with it.
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
    """The folder into which the save `run` of a step is written; in a store, the final one."""
    return directory / (folder_name(step) if is_address(directory) else f"{TEMPORARY_PREFIX}{folder_name(step)}-{run}")


def open_temporary(temporary: Path, need_bytes: int, storage: Storage, flag: str = "--save") -> None:
    """Creates the folder of a save, after removing leftovers of interrupted saves and deletions from its directory.

    Args:
        flag: the flag that names the directory, for error messages.

    Raises:
        StorageError: the folder cannot be created, or there is not enough free space. Older checkpoints are deleted
            after the save, so their space does not count.
    """
    directory = temporary.parent
    try:
        storage.make_directories(directory)
        sweep(directory, storage)
        free = storage.free_bytes(directory)
        if free is not None and free < need_bytes:
            raise StorageError(
                f"not enough space for a checkpoint in {directory}: it needs {need_bytes} bytes, {free} bytes are "
                f"free, {need_bytes - free} too few. Earlier checkpoints are intact; --keep-last deletes old ones only "
                "after the new one is complete, so it needs space for one more than it keeps. Free some space or use "
                f"another {flag} directory."
            )
        if is_address(temporary) and storage.exists(temporary):
            storage.rename(temporary, temporary.with_name(f"{ASIDE_PREFIX}{temporary.name}-{secrets.token_hex(8)}"))
        storage.make_directory(temporary)
    except OSError as failure:
        raise cannot_write(storage, temporary, need_bytes, failure, flag) from failure


def publish(temporary: Path, final: Path, run: str, storage: Storage) -> None:
    """Renames the folder to its final name; an existing one is moved aside first, and back if the rename fails.

    In a store it has its final name already, and only the checkpoint that it replaces is removed.

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
    """Writes the file that names the newest checkpoint for upstream's tools; a failure is only a warning."""
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
    """Deletes a checkpoint: renames it (in a store, removes its manifest), then deletes its files.

    A later sweep removes links and what a kill leaves.

    Raises:
        OSError: the file system refused; the checkpoint is complete, or in a store no longer a checkpoint.
    """
    if is_address(folder):
        storage.remove_tree(folder)
        return
    trash = folder.with_name(f".trash-{folder.name}-{secrets.token_hex(4)}")
    storage.rename(folder, trash)
    storage.sync_directory(folder.parent)  # before its files are deleted: a crash must not restore it without them
    discard(trash, storage)


def link_checkpoint(folder: Path, name: str, storage: Storage) -> None:
    """Creates or replaces a relative symbolic link to a checkpoint, next to it; a failure is a warning.

    An existing file or folder of that name is left alone, with a warning.
    """
    link, temporary = folder.parent / name, folder.parent / f"{_LINK_PREFIX}{secrets.token_hex(4)}"
    if storage.exists(link) and not storage.is_link(link):
        log.warning(f"{link} exists and is not a link, so it cannot link to {folder.name} (--checkpoint-link)")
        return
    try:
        storage.make_link(temporary, folder.name)
        storage.rename(temporary, link)
        storage.sync_directory(folder.parent)
    except OSError as failure:
        log.warning(f"{folder} is saved, but the link {name} could not be created: {failure}")
        _warn_on_failure(storage.remove_file, temporary)


def is_trash(name: str) -> bool:
    """True for the folder of a deleted checkpoint whose files still exist."""
    return _TRASH.match(name) is not None


def unfinished_in(directory: Path, storage: Storage) -> list[str]:
    """The folders of a store with the name and files of a checkpoint, but no manifest."""
    return [
        name
        for name in (storage.names(directory) if is_address(directory) else ())
        if folder_step(name) is not None and all(map(_FILE.match, storage.names(directory / name)))
    ]


def sweep(directory: Path, storage: Storage) -> None:
    """Removes leftovers of interrupted saves and deletions, and restores a checkpoint that a save had moved aside."""
    for name in unfinished_in(directory, storage):
        log.warning(f"removing {directory / name}, left behind by an interrupted save or deletion")
        discard(directory / name, storage)
    for name in storage.names(directory):
        path = directory / name
        if name.startswith(TEMPORARY_PREFIX + "iter_"):
            log.warning(f"removing {path}, left behind by an interrupted save")
            discard(path, storage)
        elif name.startswith((TEMPORARY_PREFIX + "latest-", _LINK_PREFIX)):
            _warn_on_failure(storage.remove_file, path)
        elif is_trash(name):
            log.warning(f"removing {path}, left behind by an interrupted deletion")
            discard(path, storage)
    _settle_all(directory, storage)
    remove_dead_links(directory, storage)


def sweep_at_start(directory: Path, mesh: ParallelMesh, storage: Storage = DISK) -> None:
    """Sweeps the directory of a starting run, which holds its lock but may have nothing left to save; collective."""

    def work() -> None:
        try:
            sweep(directory, storage)
        except OSError as failure:
            log.warning(f"could not clean up {directory}: {failure}. This is harmless.")

    run_on_first(mesh, work)


def discard(folder: Path, storage: Storage) -> None:
    """Removes a folder that is no longer needed; in a store, restores what it was to replace. Failures are warnings."""
    _warn_on_failure(storage.remove_tree, folder)
    if is_address(folder) and not folder.name.startswith(ASIDE_PREFIX):
        _warn_on_failure(lambda directory: _settle_all(directory, storage), folder.parent)


def remove_dead_links(directory: Path, storage: Storage) -> None:
    """Removes links to deleted checkpoints; other links are left alone.

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
    """Restores a checkpoint that was moved aside, or removes it if its replacement is valid."""
    step = folder_step(aside.name)
    if step is None:
        return
    final = aside.with_name(folder_name(step))
    if not storage.exists(final):
        log.warning(f"moving {aside} back to {final}: a save of the same step was interrupted")
        _warn_on_failure(lambda path: storage.rename(path, final), aside)
        return
    try:
        check_files(final, read_manifest(final, storage), storage)
    except (CheckpointError, StorageError):
        return  # the replacement is damaged: keep both
    discard(aside, storage)


def _warn_on_failure(work: Callable[[Path], None], path: Path) -> None:
    try:
        work(path)
    except OSError as failure:
        log.warning(f"could not clean up {path}: {failure}. This is harmless; remove it by hand if it remains.")
