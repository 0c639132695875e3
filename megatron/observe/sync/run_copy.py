"""Brings a copy of a run up to date: its complete checkpoints, and the other files.

A checkpoint is sent into a folder with a temporary name, its digests are compared there, and one rename makes it
visible, so the copy never shows half of one. The temporary name is made of the checkpoint's own digest: a copy that was
killed goes on with the files that are missing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from megatron.checkpoint.keeping.listing import steps_in
from megatron.checkpoint.manifest import MANIFEST_NAME, read_manifest
from megatron.checkpoint.publish import HINT_NAME, TEMPORARY_PREFIX
from megatron.checkpoint.storage import Storage
from megatron.errors import CheckpointError, ConfigError, DamagedError, StorageError
from megatron.files.plain import open_plain, read_plain
from megatron.observe.sync.places import CopyPlace

_CHECKPOINT = "iter_"
_WRITTEN_LAST = (HINT_NAME,)


@dataclass(frozen=True)
class Copied:
    """What a copy has sent.

    Attributes:
        checkpoints: folders that were sent, relative to the run.
        files: the other files that were sent.
        size_bytes: of both.
    """

    checkpoints: tuple[str, ...]
    files: tuple[str, ...]
    size_bytes: int


def copy_run(run: Path, place: CopyPlace, say: Callable[[str], None] = lambda text: None) -> Copied:
    """Sends what is new in a run's folder to the folder of the same name in a place.

    Args:
        say: called for each checkpoint that was sent.

    Raises:
        ConfigError: there is no such folder, or the place lies in it.
        CheckpointError: the place holds another checkpoint of the same step.
        DamagedError: a checkpoint is not what its manifest says.
        StorageError: the place cannot be read or written, or what arrived is not what was sent.
    """
    run = run.resolve()
    if not run.is_dir():
        raise ConfigError(f"{run} is not a folder. Give the folder of a run, such as logs/NAME.")
    if place.is_inside(run):
        raise ConfigError(f"{place} is inside {run}, the folder to copy. Give a directory outside of it.")
    target = PurePosixPath(run.name)
    checkpoints: list[str] = []
    files: list[str] = []
    sent_bytes = 0
    plain = list(_plain_files(run))
    for path in [path for path in plain if path.name not in _WRITTEN_LAST]:
        sent_bytes += _copy_file(run, path, place, target, files)
    for folder in sorted(_checkpoints(run), key=lambda path: path.name):
        size = _copy_checkpoint(run, folder, place, target, say)
        if size is not None:
            checkpoints.append(folder.relative_to(run).as_posix())
            say(f"copied {checkpoints[-1]} ({size} bytes)")
            sent_bytes += size
    for path in [path for path in plain if path.name in _WRITTEN_LAST]:
        sent_bytes += _copy_file(run, path, place, target, files)
    return Copied(tuple(checkpoints), tuple(files), sent_bytes)


def _checkpoints(run: Path) -> Iterator[Path]:
    """The complete checkpoints in the folder and in those directly in it."""
    for directory in [run, *(path for path in run.iterdir() if path.is_dir() and not path.is_symlink())]:
        if not directory.name.startswith(_CHECKPOINT):
            yield from steps_in(directory, Storage()).values()


def _plain_files(run: Path) -> Iterator[Path]:
    """The files that belong to no checkpoint; hidden ones are locks and what has not been published."""
    for path in sorted(run.rglob("*")):
        parts = path.relative_to(run).parts
        is_hidden = any(part.startswith(".") for part in parts)
        is_of_checkpoint = any(part.startswith(_CHECKPOINT) for part in parts[:-1])
        if path.is_file() and not (path.is_symlink() or is_hidden or is_of_checkpoint):
            yield path


def _copy_checkpoint(
    run: Path, folder: Path, place: CopyPlace, target: PurePosixPath, say: Callable[[str], None]
) -> int | None:
    """Sends a checkpoint; None if it is there already, or is none.

    That the right manifest is there under the final name says so: it got the name when all files had been compared.
    """
    try:
        manifest = read_manifest(folder, Storage())
        text = read_plain(folder / MANIFEST_NAME)
    except (DamagedError, FileNotFoundError) as failure:
        if folder.exists():  # otherwise the run has deleted it meanwhile
            say(f"left out {folder}: {failure}")
        return None
    final = target / folder.relative_to(run).as_posix()
    digest = hashlib.sha256(text).hexdigest()
    there = place.digests(final, (MANIFEST_NAME,))
    if there.get(MANIFEST_NAME) == digest:
        return None
    if there:
        raise CheckpointError(
            f"{place} holds another checkpoint {final} than {folder}. Copy the run to another place, or remove the one "
            "that is there."
        )
    wanted = {file.name: file.sha256 for file in manifest.files} | {MANIFEST_NAME: digest}
    temporary = final.with_name(f"{TEMPORARY_PREFIX}{final.name}-{digest[:16]}")
    arrived = place.digests(temporary, tuple(wanted))
    for name in (name for name, right in wanted.items() if arrived.get(name) != right):
        place.write(temporary / name, folder / name)
    arrived = place.digests(temporary, tuple(wanted))
    wrong = [name for name, right in wanted.items() if arrived.get(name) != right]
    if wrong:
        raise DamagedError(
            f"{wrong[0]} of {folder} is not what its manifest says after it was copied to {place}. Check the "
            f"checkpoint (python tools/checkpoints.py verify {folder.parent}), then copy it again."
        )
    place.rename(temporary, final, replaces=False)
    return sum(file.size_bytes for file in manifest.files) + len(text)


def _content(path: Path) -> bytes:
    with open_plain(path) as stream:
        return stream.read()


def _copy_file(run: Path, path: Path, place: CopyPlace, target: PurePosixPath, files: list[str]) -> int:
    """Sends a file as it is now, and adds it to those that were sent, unless the same is there; its size in bytes."""
    content = _content(path)
    digest = hashlib.sha256(content).hexdigest()
    final = target / path.relative_to(run).as_posix()
    if place.digests(final.parent, (final.name,)).get(final.name) == digest:
        return 0
    temporary = final.with_name(f".{final.name}.partial")
    place.write(temporary, content)
    if place.digests(temporary.parent, (temporary.name,)).get(temporary.name) != digest:
        raise StorageError(f"{path} is not the same after it was copied to {place}. Copy it again.")
    place.rename(temporary, final, replaces=True)
    files.append(path.relative_to(run).as_posix())
    return len(content)
