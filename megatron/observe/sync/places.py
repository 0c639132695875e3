"""Where the copy of a run can lie: a directory, or a directory of a machine that `ssh` reaches.

A place stores whole files and renames; paths are relative to it and contain no `..`. What a file has to be is decided
by `run_copy.py`.
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
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from megatron.errors import ConfigError, StorageError
from megatron.files.plain import open_plain
from megatron.files.replacing import move, sync_file

_REMOTE = re.compile(r"(?P<host>(?:[\w.-]+@)?[\w.-]+|(?:[\w.-]+@)?\[[0-9A-Fa-f:.]+\]):(?P<path>.+)", re.DOTALL)
# Never a prompt: nobody is there to answer while a run goes on.
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
        """Whether it is a folder, or lies in it."""
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


def sha256_of(stream: BinaryIO) -> str:
    """The SHA-256 of the rest of a stream."""
    digest = hashlib.sha256()
    while chunk := stream.read(_CHUNK_BYTES):
        digest.update(chunk)
    return digest.hexdigest()
