"""Brings a copy of a run up to date: its complete checkpoints, and the other files.

A checkpoint is sent into a folder with a temporary name, its digests are compared there, and one rename makes it
visible, so the copy never shows half of one. The temporary name is made of the checkpoint's own digest: a copy that was
killed continues with the files that are missing.
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
    """A copy of a run's folder in the folder of the same name in a place, and what was sent of it.

    Attributes:
        say: called for each checkpoint that was sent.
        checkpoints: folders that were sent, relative to the run.
        files: the other files that were sent.
        size_bytes: of both.
    """

    run: Path
    place: CopyPlace
    say: Callable[[str], None] = lambda text: None
    checkpoints: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    size_bytes: int = 0

    def update(self) -> None:
        """Sends what is new.

        Raises:
            ConfigError: there is no such folder, or the destination is in it.
            CheckpointError: the place holds another run's checkpoint of the same step.
            DamagedError: a checkpoint does not match its manifest; everything else was sent.
            StorageError: the place cannot be read or written, or what arrived is not what was sent.
        """
        run = self.run = self.run.resolve()
        if not run.is_dir():
            raise ConfigError(f"{run} is not a folder. Give the folder of a run, such as logs/NAME.")
        if self.place.is_inside(run):
            raise ConfigError(f"{self.place} is inside {run}, the folder to copy. Give a directory outside of it.")
        plain = list(_plain_files(run))
        for path in [path for path in plain if path.name != HINT_NAME]:
            self._send_file(path)
        damaged: list[DamagedError] = []
        for folder in sorted(_checkpoints(run), key=lambda path: path.name):
            try:
                self._send_checkpoint(folder)
            except DamagedError as damage:  # is no reason to leave out later ones
                damaged.append(damage)
        for path in [path for path in plain if path.name == HINT_NAME]:
            self._send_file(path)
        if damaged:
            raise damaged[0]
        self.place.sweep(PurePosixPath(run.name))

    def _send_checkpoint(self, folder: Path) -> None:
        """Sends a checkpoint, unless it is there already or is none.

        That the right manifest is there under the final name says so: it got the name when all files had been compared.
        """
        place, name = self.place, folder.relative_to(self.run).as_posix()
        try:
            manifest = read_manifest(folder, Storage())
            text = read_plain(folder / MANIFEST_NAME)
        except (DamagedError, FileNotFoundError) as failure:
            if folder.exists():  # otherwise the run has deleted it meanwhile
                self.say(f"left out {folder}: {failure}")
            return
        final = PurePosixPath(self.run.name, name)
        digest = hashlib.sha256(text).hexdigest()
        there = place.digests(final, (MANIFEST_NAME,)).get(MANIFEST_NAME)
        if there == digest:
            return
        if there is not None:
            _check_same_run(place, final, folder, manifest)
        wanted = {index.name: index.sha256 for index in manifest.indexes}
        wanted |= {file.name: file.sha256 for file in manifest.files} | {MANIFEST_NAME: digest}
        temporary = final.with_name(f"{TEMPORARY_PREFIX}{final.name}-{digest}")
        arrived = place.digests(temporary, tuple(wanted))
        sent_bytes = 0
        for part, right in wanted.items():
            try:
                with open_plain(folder / part, buffering=0) as source:
                    size_bytes = os.fstat(source.fileno()).st_size
                    if arrived.get(part) == right or place.write(temporary / part, source, size_bytes) == right:
                        sent_bytes += size_bytes
                        continue
                problem = f"{part} of {folder} does not match its manifest after it was copied to {place}"
            except OSError as failure:
                problem = f"{folder / part} cannot be read: {failure.strerror}"
            if stored_digest(folder, Storage()) != manifest.digest:
                self.say(f"left out {folder}: the run has deleted or replaced it meanwhile")
                return
            raise DamagedError(
                f"{problem}. Check the checkpoint (python tools/checkpoints.py verify {folder.parent}), then copy it "
                "again."
            )
        place.rename(temporary, final, replaces=there is not None)
        self.checkpoints.append(name)
        self.size_bytes += sent_bytes
        self.say(f"copied {name} ({sent_bytes} bytes)")

    def _send_file(self, path: Path) -> None:
        """Sends a file as it is now, unless the same is there."""
        place, name = self.place, path.relative_to(self.run).as_posix()
        final = PurePosixPath(self.run.name, name)
        temporary = final.with_name(f".{final.name}{_PARTIAL}")
        try:
            with open_plain(path, buffering=0) as source:
                digest, size_bytes = sha256_of(source), source.tell()
                if place.digests(final.parent, (final.name,)).get(final.name) == digest:
                    return
                source.seek(0)
                if place.write(temporary, source, size_bytes) != digest:  # what is appended meanwhile is not sent
                    raise StorageError(f"{path} is not the same after it was copied to {place}. Copy it again.")
        except FileNotFoundError:  # the run has removed it
            return
        except OSError as failure:
            raise StorageError(
                f"{path} cannot be read: {failure.strerror}. Give this user the right to read it."
            ) from failure
        place.rename(temporary, final, replaces=True)
        self.files.append(name)
        self.size_bytes += size_bytes


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


def _check_same_run(place: CopyPlace, final: PurePosixPath, folder: Path, manifest: Manifest) -> None:
    """Checks that a step was saved again by the run whose checkpoint of this step is there.

    Raises:
        CheckpointError: it is of another run.
    """
    try:
        run_id = run_id_of(parse_json(place.read(final / MANIFEST_NAME))["record"])
    except (ValueError, LookupError, TypeError, AttributeError):
        run_id = ""
    if not run_id or run_id != run_id_of(manifest.record):
        raise CheckpointError(
            f"{place} holds another run's checkpoint {final} than {folder}. Copy the run to another place, or remove "
            "the one that is there."
        )


_PARTIAL = ".partial"
# What a copy that was killed has left; a save's temporary folder has a shorter number. As arguments of `find`.
_LEFT = " -o ".join(
    f"-name '{name}'"
    for name in (f"{TEMPORARY_PREFIX}iter_*-{'?' * 64}", f"{ASIDE_PREFIX}iter_*-{'?' * 64}", f".*{_PARTIAL}")
)
_REMOTE = re.compile(r"(?P<host>(?:[\w.-]+@)?[\w.-]+|(?:[\w.-]+@)?\[[0-9A-Fa-f:.]+\]):(?P<path>.+)", re.DOTALL)
# Never a prompt: nobody is there to answer during a run.
_SSH = ("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=20", "--")
_DIGEST_LINE = re.compile(r"\\?([0-9a-f]{64}) [ *](.*)")
_MOST_SHOWN = 300


@dataclass(frozen=True)
class CopyPlace:
    """A directory of this machine, or of one that `ssh` reaches without a question.

    Every operation is one command line for a POSIX shell there, with `sha256sum`; each name in it is quoted.

    Attributes:
        host: as `ssh` takes it; None for this machine.
    """

    root: PurePosixPath
    host: str | None = None

    def __str__(self) -> str:
        return str(self.root) if self.host is None else f"{self.host}:{self.root}"

    def is_inside(self, folder: Path) -> bool:
        """Whether it is a folder of this machine, or is in it."""
        return self.host is None and Path(self.root).resolve().is_relative_to(folder.resolve())

    def digests(self, folder: PurePosixPath, names: Sequence[str]) -> dict[str, str]:
        """The SHA-256 of the named files that exist, computed there."""
        shown = " ".join(shlex.quote(f"./{name}") for name in names)
        # A missing file is no failure; that nothing can be computed is one.
        text = self._run(
            f"command -v sha256sum >&2 && if cd -- {self._at(folder)} 2>/dev/null; "
            f"then sha256sum -- {shown} 2>/dev/null; true; fi"
        )
        matches = [_DIGEST_LINE.fullmatch(line) for line in text.splitlines()]
        digests = {match.group(2).removeprefix("./"): match.group(1) for match in matches if match}
        return {name: digest for name, digest in digests.items() if name in names}

    def read(self, path: PurePosixPath) -> str:
        return self._run(f"cat -- {self._at(path)}")

    def write(self, path: PurePosixPath, source: BinaryIO, size_bytes: int) -> str:
        """Sends the next bytes of a file; returns the SHA-256 of what is on the disk there."""
        folder, file = self._at(path.parent), self._at(path)
        return self._run(
            f"mkdir -p -- {folder} && head -c {size_bytes} > {file} && {_synced(file)} && sha256sum < {file}", source
        )[:64]

    def rename(self, source: PurePosixPath, target: PurePosixPath, *, replaces: bool) -> None:
        """Gives a file or folder its final name.

        Args:
            replaces: whether one of that name may be there; a folder is moved aside first and removed last.
        """
        old, new, above = self._at(source), self._at(target), self._at(target.parent)
        aside = self._at(target.with_name(source.name.replace(TEMPORARY_PREFIX, ASIDE_PREFIX, 1)))
        free = f"{{ [ ! -d {new} ] || mv -- {new} {aside}; }}" if replaces else f"[ ! -e {new} ]"
        self._run(f"{free} && mv -f -- {old} {new} && {_synced(above)} && rm -rf -- {aside}")

    def sweep(self, folder: PurePosixPath) -> None:
        """Removes what copies that were killed have left."""
        self._run(
            f"if cd -- {self._at(folder)} 2>/dev/null; then find . \\( {_LEFT} \\) -prune -exec rm -rf {{}} +; fi"
        )

    def _at(self, path: PurePosixPath) -> str:
        return shlex.quote(str(self.root / path))

    def _run(self, command: str, source: BinaryIO | int = subprocess.DEVNULL) -> str:
        words = ["sh", "-c", command] if self.host is None else [*_SSH, self.host, command]
        try:
            done = subprocess.run(words, stdin=source, capture_output=True, check=False)
        except OSError as failure:
            raise StorageError(
                f"{failure.filename} cannot be used: {failure.strerror}. The copy in {self} (--to) needs it."
            ) from failure
        if done.returncode != 0:
            said = done.stderr.decode(errors="replace").strip()[-_MOST_SHOWN:]
            way_out = "" if self.host is None else f"`ssh {self.host}` works without a password and that "
            raise StorageError(
                f"the copy in {self} (--to) cannot be made: {words[0]} ended with {done.returncode}"
                f"{f' ({said})' if said else ''}. Check that {way_out}the directory can be written and has enough "
                "room; run the same command again, it continues where it stopped."
            )
        return done.stdout.decode(errors="replace")


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
        return CopyPlace(PurePosixPath(text))
    host = remote.group("host")
    if host.startswith("-"):
        raise ConfigError(f"--to {text}: {host} would be an option of ssh, not a host. Give user@host:path.")
    return CopyPlace(PurePosixPath(remote.group("path")), host)
