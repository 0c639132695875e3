"""Brings a copy of a run up to date: its complete checkpoints, and the other files.

A checkpoint is sent into a folder with a temporary name, its digests are compared there, and one rename makes it
visible, so the copy never shows half of one. The temporary name is made of the checkpoint's own digest: a copy that was
killed continues with the files that are missing.
"""

from __future__ import annotations

import errno
import hashlib
import io
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from megatron.checkpoint.keeping.listing import steps_in
from megatron.checkpoint.manifest import MANIFEST_NAME, read_manifest
from megatron.checkpoint.publish import HINT_NAME, TEMPORARY_PREFIX
from megatron.checkpoint.storage import Storage
from megatron.errors import CheckpointError, ConfigError, DamagedError, StorageError
from megatron.files.plain import open_plain, read_plain, sha256_of
from megatron.files.replacing import move, sync_file

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
        ConfigError: there is no such folder, or the destination is in it.
        CheckpointError: the place holds another checkpoint of the same step.
        DamagedError: a checkpoint does not match its manifest.
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
        files = list(manifest.files)
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
    wanted = {index.name: index.sha256 for index in manifest.indexes} | {MANIFEST_NAME: digest}
    wanted |= {file.name: file.sha256 for file in files}
    temporary = final.with_name(f"{TEMPORARY_PREFIX}{final.name}-{digest[:16]}")
    arrived = place.digests(temporary, tuple(wanted))
    for name in (name for name, right in wanted.items() if arrived.get(name) != right):
        place.write(temporary / name, folder / name)
    arrived = place.digests(temporary, tuple(wanted))
    wrong = [name for name, right in wanted.items() if arrived.get(name) != right]
    if wrong:
        raise DamagedError(
            f"{wrong[0]} of {folder} does not match its manifest after it was copied to {place}. Check the checkpoint "
            f"(python tools/checkpoints.py verify {folder.parent}), then copy it again."
        )
    place.rename(temporary, final, replaces=False)
    in_files = sum(file.size_bytes for file in files) + sum(index.size_bytes for index in manifest.indexes)
    return in_files + len(text)


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


_REMOTE = re.compile(r"(?P<host>(?:[\w.-]+@)?[\w.-]+|(?:[\w.-]+@)?\[[0-9A-Fa-f:.]+\]):(?P<path>.+)", re.DOTALL)
# Never a prompt: nobody is there to answer during a run.
_SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=20")
_DIGEST_LINE = re.compile(r"\\?([0-9a-f]{64}) [ *](.*)")
_CHUNK_BYTES = 1 << 20
_MOST_SHOWN = 300


class DirectoryPlace:
    """A directory of this machine. What the file system refuses is a `StorageError` in every method."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def __str__(self) -> str:
        return str(self.root)

    def is_inside(self, folder: Path) -> bool:
        """Whether it is a folder, or is in it."""
        return self.root.resolve().is_relative_to(folder.resolve())

    def digests(self, folder: PurePosixPath, names: Sequence[str]) -> dict[str, str]:
        """The SHA-256 of the named files that exist."""
        digests = {}
        for name in names:
            path = self.root / folder / name
            try:
                if path.is_file():
                    with open_plain(path) as stream:
                        digests[name] = sha256_of(stream)
            except OSError as failure:
                raise self._failure(failure) from failure
        return digests

    def write(self, path: PurePosixPath, content: bytes | Path) -> None:
        """Writes a file and waits until it is on the disk, making the folders above it.

        Args:
            content: what it is to hold, or the file to copy.
        """
        target = self.root / path
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with target.open("wb") as stream, _opened(content) as source:
                shutil.copyfileobj(source, stream, _CHUNK_BYTES)
                stream.flush()
                sync_file(stream.fileno())
        except OSError as failure:
            raise self._failure(failure) from failure

    def rename(self, source: PurePosixPath, target: PurePosixPath, *, replaces: bool) -> None:
        """Gives a file or folder its final name in one step.

        Args:
            replaces: whether a file of that name may be there; a folder may not.
        """
        final = self.root / target
        try:
            if not replaces and final.exists():
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(final))
            move(self.root / source, final)
        except OSError as failure:
            raise self._failure(failure) from failure

    def _failure(self, failure: OSError) -> StorageError:
        return StorageError(
            f"the copy in {self.root} (--to) cannot be made: {failure.strerror} ({failure.filename}). Give a writable "
            "directory with enough room."
        )


class RemotePlace:
    """The same on a machine that `ssh` reaches without a question, with the POSIX tools and `sha256sum`.

    Every command is a list of words for `ssh`; what the other machine's shell reads of it is quoted.
    """

    def __init__(self, host: str, root: str) -> None:
        self.host = host
        self.root = PurePosixPath(root)

    def __str__(self) -> str:
        return f"{self.host}:{self.root}"

    def is_inside(self, folder: Path) -> bool:
        """No: it is on another machine."""
        return False

    def digests(self, folder: PurePosixPath, names: Sequence[str]) -> dict[str, str]:
        """The SHA-256 of the files that are there, computed there."""
        shown = " ".join(shlex.quote(f"./{name}") for name in names)
        place = shlex.quote(str(self.root / folder))
        # A missing file is no failure; that nothing can be computed is one.
        text = self._run(
            f"command -v sha256sum >&2 && if cd {place} 2>/dev/null; then sha256sum -- {shown} 2>/dev/null; true; fi"
        )
        matches = [_DIGEST_LINE.fullmatch(line) for line in text.splitlines()]
        digests = {match.group(2).removeprefix("./"): match.group(1) for match in matches if match}
        return {name: digest for name, digest in digests.items() if name in names}

    def write(self, path: PurePosixPath, content: bytes | Path) -> None:
        """Sends a file; it is on the disk there when this returns."""
        target = self.root / path
        folder, file = shlex.quote(str(target.parent)), shlex.quote(str(target))
        self._run(f"mkdir -p -- {folder} && cat > {file} && {_synced(file)}", content)

    def rename(self, source: PurePosixPath, target: PurePosixPath, *, replaces: bool) -> None:
        """Renames there."""
        old, new = (shlex.quote(str(self.root / path)) for path in (source, target))
        guard = "" if replaces else f"[ ! -e {new} ] && "
        self._run(f"{guard}mv -f -- {old} {new} && {_synced(shlex.quote(str(self.root / target.parent)))}")

    def _run(self, command: str, content: bytes | Path = b"") -> str:
        words = [*_SSH, "--", self.host, command]
        try:
            if isinstance(content, bytes):
                done = subprocess.run(words, input=content, capture_output=True, check=False)
            else:
                with open_plain(content) as stream:
                    done = subprocess.run(words, stdin=stream, capture_output=True, check=False)
        except OSError as failure:
            raise StorageError(
                f"{failure.filename} cannot be used: {failure.strerror}. The copy in {self} (--to) needs it."
            ) from failure
        if done.returncode != 0:
            said = done.stderr.decode(errors="replace").strip()[-_MOST_SHOWN:]
            raise StorageError(
                f"the copy in {self} (--to) cannot be made: ssh ended with {done.returncode}"
                f"{f' ({said})' if said else ''}. Check that `ssh {self.host}` works without a password and that the "
                "directory can be written; run the same command again, it continues where it stopped."
            )
        return done.stdout.decode(errors="replace")


CopyPlace = DirectoryPlace | RemotePlace


def _opened(content: bytes | Path) -> BinaryIO:
    return io.BytesIO(content) if isinstance(content, bytes) else open_plain(content)


def _synced(path: str) -> str:
    """The command that waits until a file or folder is on the disk; an old `sync` takes no name and syncs all."""
    return f"{{ sync -- {path} 2>/dev/null || sync; }}"


def place_of(text: str) -> CopyPlace:
    """The place that `--to` names: a directory, or `user@host:path`, as `scp` writes it.

    Raises:
        ConfigError: it is neither.
    """
    if "://" in text:
        raise ConfigError(f"--to {text} is an address of another kind. Give a directory, or user@host:path.")
    remote = _REMOTE.fullmatch(text)
    if remote is None and text.startswith("-"):
        raise ConfigError(f"--to {text} begins like an option. Give user@host:path, or a directory as ./{text}.")
    if remote is None:
        return DirectoryPlace(Path(text))
    host = remote.group("host")
    if host.startswith("-"):
        raise ConfigError(f"--to {text}: {host} would be an option of ssh, not a host. Give user@host:path.")
    return RemotePlace(host, remote.group("path"))
