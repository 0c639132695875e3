"""Updates the copy of a run: its complete checkpoints, and the other files.

A checkpoint is sent into a folder with a temporary name, its digests are compared there, and a rename publishes it, so
the copy never shows an incomplete one. The temporary name contains the digest of the checkpoint: after an interruption
the copy continues with the missing files.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from megatron.checkpoint.manifest import MANIFEST_NAME, read_manifest, stored_digest
from megatron.checkpoint.manifests.contents import Manifest
from megatron.checkpoint.publish import ASIDE_PREFIX, HINT_NAME, TEMPORARY_PREFIX
from megatron.checkpoint.record import run_id_of
from megatron.checkpoint.retention.summaries import steps_in
from megatron.checkpoint.storage import Storage
from megatron.errors import CheckpointError, ConfigError, DamagedError, StorageError
from megatron.files.plain import open_plain, parse_json, read_plain, sha256_of

_CHECKPOINT = "iter_"


@dataclass
class RunCopy:
    """A copy of a run's folder below a target directory, and the files sent so far.

    Attributes:
        report: called with a message for each checkpoint that was sent or skipped.
        checkpoints: folders that were sent, relative to the run.
        files: the other files that were sent.
        size_bytes: of both.
    """

    run: Path
    target: CopyTarget
    report: Callable[[str], None] = lambda text: None
    checkpoints: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    size_bytes: int = 0

    def update(self) -> None:
        """Sends new and changed files.

        Raises:
            ConfigError: the run is not a folder, or contains the target.
            CheckpointError: the target holds another run's checkpoint of the same step.
            DamagedError: a checkpoint does not match its manifest; everything else was sent.
            StorageError: the target cannot be read or written, or received other bytes.
        """
        run = self.run = self.run.resolve()
        if not run.is_dir():
            raise ConfigError(f"{run} is not a folder. Give the folder of a run, such as logs/NAME.")
        if self.target.is_inside(run):
            raise ConfigError(f"{self.target} is inside {run}, the folder to copy. Give a directory outside of it.")
        plain = list(_plain_files(run))
        for path in [path for path in plain if path.name != HINT_NAME]:
            self._send_file(path)
        damaged: list[DamagedError] = []
        for folder in sorted(_checkpoints(run), key=lambda path: path.name):
            try:
                self._send_checkpoint(folder)
            except DamagedError as damage:  # later checkpoints are still sent
                damaged.append(damage)
        for path in [path for path in plain if path.name == HINT_NAME]:
            self._send_file(path)
        if damaged:
            raise damaged[0]
        self.target.sweep(PurePosixPath(run.name))

    def _send_checkpoint(self, folder: Path) -> None:
        """Sends a checkpoint, unless it is incomplete or already there."""
        target, name = self.target, folder.relative_to(self.run).as_posix()
        try:
            manifest = read_manifest(folder, Storage())
            text = read_plain(folder / MANIFEST_NAME)
        except (DamagedError, FileNotFoundError) as failure:
            if folder.exists():  # otherwise the run has deleted it meanwhile
                self.report(f"skipped {folder}: {failure}")
            return
        final = PurePosixPath(self.run.name, name)
        digest = hashlib.sha256(text).hexdigest()
        # A folder gets its final name after all files were compared: its manifest stands for the whole checkpoint.
        present = target.digests(final, (MANIFEST_NAME,)).get(MANIFEST_NAME)
        if present == digest:
            return
        if present is not None:
            _check_same_run(target, final, folder, manifest)
        expected = {index.name: index.sha256 for index in manifest.indexes}
        expected |= {file.name: file.sha256 for file in manifest.files} | {MANIFEST_NAME: digest}
        temporary = final.with_name(f"{TEMPORARY_PREFIX}{final.name}-{digest}")
        received = target.digests(temporary, tuple(expected))
        sent_bytes = 0
        for file, right in expected.items():
            try:
                with open_plain(folder / file, buffering=0) as source:
                    size_bytes = os.fstat(source.fileno()).st_size
                    if received.get(file) == right or target.write(temporary / file, source, size_bytes) == right:
                        sent_bytes += size_bytes
                        continue
                problem = f"{file} of {folder} does not match its manifest after it was copied to {target}"
            except OSError as failure:
                problem = f"{folder / file} cannot be read: {failure.strerror}"
            if stored_digest(folder, Storage()) != manifest.digest:
                self.report(f"skipped {folder}: the run has deleted or replaced it meanwhile")
                return
            raise DamagedError(
                f"{problem}. Check the checkpoint (python tools/checkpoints.py verify {folder.parent}), then copy it "
                "again."
            )
        target.rename(temporary, final, replaces=present is not None)
        self.checkpoints.append(name)
        self.size_bytes += sent_bytes
        self.report(f"copied {name} ({sent_bytes} bytes)")

    def _send_file(self, path: Path) -> None:
        """Sends a file in its present state, unless the target has it."""
        target, name = self.target, path.relative_to(self.run).as_posix()
        final = PurePosixPath(self.run.name, name)
        temporary = final.with_name(f".{final.name}{_PARTIAL}")
        try:
            with open_plain(path, buffering=0) as source:
                digest, size_bytes = sha256_of(source), source.tell()
                if target.digests(final.parent, (final.name,)).get(final.name) == digest:
                    return
                source.seek(0)
                if target.write(temporary, source, size_bytes) != digest:  # later appends are not sent
                    raise StorageError(f"{path} is not the same after it was copied to {target}. Copy it again.")
        except FileNotFoundError:  # the run has removed it
            return
        except OSError as failure:
            raise StorageError(
                f"{path} cannot be read: {failure.strerror}. Give this user the right to read it."
            ) from failure
        target.rename(temporary, final, replaces=True)
        self.files.append(name)
        self.size_bytes += size_bytes


def _checkpoints(run: Path) -> Iterator[Path]:
    """The complete checkpoints in the folder and its direct subfolders."""
    for directory in [run, *(path for path in run.iterdir() if path.is_dir() and not path.is_symlink())]:
        if not directory.name.startswith(_CHECKPOINT):
            yield from steps_in(directory, Storage()).values()


def _plain_files(run: Path) -> Iterator[Path]:
    """The files outside checkpoints; hidden files are locks or unpublished."""
    for path in sorted(run.rglob("*")):
        parts = path.relative_to(run).parts
        is_hidden = any(part.startswith(".") for part in parts)
        is_of_checkpoint = any(part.startswith(_CHECKPOINT) for part in parts[:-1])
        if path.is_file() and not (path.is_symlink() or is_hidden or is_of_checkpoint):
            yield path


def _check_same_run(target: CopyTarget, final: PurePosixPath, folder: Path, manifest: Manifest) -> None:
    """Checks that the target's checkpoint of a step is from the same run.

    Raises:
        CheckpointError: it is from another run.
    """
    try:
        run_id = run_id_of(parse_json(target.read(final / MANIFEST_NAME))["record"])
    except (ValueError, LookupError, TypeError, AttributeError):
        run_id = ""
    if not run_id or run_id != run_id_of(manifest.record):
        raise CheckpointError(
            f"{target} holds {final} of a different run than {folder}. Copy the run to another directory, or remove "
            "that checkpoint."
        )


_PARTIAL = ".partial"
# Leftovers of killed copies, as arguments of `find`; the temporary folder of a save has a shorter number.
_LEFTOVERS = " -o ".join(
    f"-name '{name}'"
    for name in (f"{TEMPORARY_PREFIX}iter_*-{'?' * 64}", f"{ASIDE_PREFIX}iter_*-{'?' * 64}", f".*{_PARTIAL}")
)
_REMOTE = re.compile(r"(?P<host>(?:[\w.-]+@)?[\w.-]+|(?:[\w.-]+@)?\[[0-9A-Fa-f:.]+\]):(?P<path>.+)", re.DOTALL)
# BatchMode: no prompts during a run.
_SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=20", "--")
_DIGEST_LINE = re.compile(r"\\?([0-9a-f]{64}) [ *](.*)")
_MOST_SHOWN = 300


@dataclass(frozen=True)
class CopyTarget:
    """A directory on this machine, or on one that `ssh` reaches without a prompt.

    Every operation is a command of a POSIX shell there, with `sha256sum`; each name in it is quoted.

    Attributes:
        host: argument of `ssh`; None for this machine.
    """

    root: PurePosixPath
    host: str | None = None

    def __str__(self) -> str:
        return str(self.root) if self.host is None else f"{self.host}:{self.root}"

    def is_inside(self, folder: Path) -> bool:
        """True if the target is a local folder or lies in it."""
        return self.host is None and Path(self.root).resolve().is_relative_to(folder.resolve())

    def digests(self, folder: PurePosixPath, names: Sequence[str]) -> dict[str, str]:
        """The SHA-256 of the named files that exist, computed there."""
        quoted = " ".join(shlex.quote(f"./{name}") for name in names)
        # Missing files are not a failure; a missing sha256sum is.
        text = self._run(
            f"command -v sha256sum >&2 && if cd -- {self._quoted(folder)} 2>/dev/null; "
            f"then sha256sum -- {quoted} 2>/dev/null; true; fi"
        )
        matches = [_DIGEST_LINE.fullmatch(line) for line in text.splitlines()]
        digests = {match.group(2).removeprefix("./"): match.group(1) for match in matches if match}
        return {name: digest for name, digest in digests.items() if name in names}

    def read(self, path: PurePosixPath) -> str:
        return self._run(f"cat -- {self._quoted(path)}")

    def write(self, path: PurePosixPath, source: BinaryIO, size_bytes: int) -> str:
        """Sends the next bytes of a file; returns the SHA-256 of the bytes on the disk there."""
        folder, file = self._quoted(path.parent), self._quoted(path)
        return self._run(
            f"mkdir -p -- {folder} && head -c {size_bytes} > {file} && {_synced(file)} && sha256sum < {file}", source
        )[:64]

    def rename(self, source: PurePosixPath, target: PurePosixPath, *, replaces: bool) -> None:
        """Gives a file or folder its final name.

        Args:
            replaces: an entry of that name may exist; a folder is moved aside first and removed last.
        """
        old, new, parent = self._quoted(source), self._quoted(target), self._quoted(target.parent)
        aside = self._quoted(target.with_name(source.name.replace(TEMPORARY_PREFIX, ASIDE_PREFIX, 1)))
        free = f"{{ [ ! -d {new} ] || mv -- {new} {aside}; }}" if replaces else f"[ ! -e {new} ]"
        self._run(f"{free} && mv -f -- {old} {new} && {_synced(parent)} && rm -rf -- {aside}")

    def sweep(self, folder: PurePosixPath) -> None:
        """Removes leftovers of killed copies."""
        find = f"find . \\( {_LEFTOVERS} \\) -prune -exec rm -rf {{}} +"
        self._run(f"if cd -- {self._quoted(folder)} 2>/dev/null; then {find}; fi")

    def _quoted(self, path: PurePosixPath) -> str:
        return shlex.quote(str(self.root / path))

    def _run(self, command: str, source: BinaryIO | int = subprocess.DEVNULL) -> str:
        arguments = ["sh", "-c", command] if self.host is None else [*_SSH, self.host, command]
        try:
            done = subprocess.run(arguments, stdin=source, capture_output=True, check=False)
        except OSError as failure:
            raise StorageError(
                f"{failure.filename} cannot be used: {failure.strerror}. The copy in {self} (--to) needs it."
            ) from failure
        if done.returncode != 0:
            message = done.stderr.decode(errors="replace").strip()[-_MOST_SHOWN:]
            condition = "" if self.host is None else f"`ssh {self.host}` works without a password and that "
            raise StorageError(
                f"copying to {self} (--to) failed: {arguments[0]} exited with code {done.returncode}"
                f"{f' ({message})' if message else ''}. Check that {condition}the directory can be written and has "
                "enough space; run the same command again, it continues where it stopped."
            )
        return done.stdout.decode(errors="replace")


def _synced(path: str) -> str:
    # An old `sync` takes no name and syncs everything.
    return f"{{ sync -- {path} 2>/dev/null || sync; }}"


def parse_target(text: str) -> CopyTarget:
    """Parses the value of `--to`: a directory, or `user@host:path` as in `scp`.

    Raises:
        ConfigError: it is neither.
    """
    if "://" in text:
        raise ConfigError(f"--to {text} is a URL. Give a directory, or user@host:path.")
    remote = _REMOTE.fullmatch(text)
    if remote is None and text.startswith("-"):
        raise ConfigError(f"--to {text} starts like an option. Give user@host:path, or a directory as ./{text}.")
    if remote is None:
        return CopyTarget(PurePosixPath(text))
    host = remote.group("host")
    if host.startswith("-"):
        raise ConfigError(f"--to {text}: {host} would be an option of ssh, not a host. Give user@host:path.")
    return CopyTarget(PurePosixPath(remote.group("path")), host)
