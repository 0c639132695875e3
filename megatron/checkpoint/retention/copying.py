"""Copies a checkpoint to another directory, verifying every byte."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from megatron import log
from megatron.checkpoint.manifest import (
    MANIFEST_NAME,
    folder_name,
    read_manifest,
    stored_digest,
)
from megatron.checkpoint.manifests.contents import Manifest
from megatron.checkpoint.manifests.reading import read_index
from megatron.checkpoint.manifests.texts import read_whole
from megatron.checkpoint.publish import discard, open_temporary, publish, sweep, temporary_folder, write_hint
from megatron.checkpoint.reader import check_files, verified_chunks
from megatron.checkpoint.retention.summaries import steps_in
from megatron.checkpoint.storage import DISK, Storage, append, cannot_write, write_file, writing
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
    storage: Storage = DISK,
    beat: Callable[[], None] = lambda: None,
) -> Path | None:
    """Copies the checkpoint folder `source` into a directory; collective over the whole mesh.

    The files are divided among the ranks. The copy appears once it is complete; see `publish`.

    Args:
        flag: the flag that names the directory, for error messages.
        replaces: replace another checkpoint of the same step.
        beat: called before each part that this rank copies.

    Returns:
        the copy; None if the directory already has the same checkpoint.

    Raises:
        DamagedError: the source does not match its manifest.
        CheckpointError: the directory has another checkpoint of that step.
        StorageError: the file system refused; the directory is unchanged.
    """
    manifest = run_on_all(mesh, lambda: read_manifest(source, storage))
    run = run_on_first(mesh, lambda: secrets.token_hex(8))
    copy = CopyInProgress(source, directory, manifest, run, flag, storage, beat)
    if run_on_first(mesh, lambda: copy.exists(replaces)):
        return None
    run_on_first(mesh, lambda: open_temporary(copy.temporary, copy.size_bytes, storage, flag))
    try:
        count, ranks, rank = len(manifest.files), mesh.control.size, mesh.control.rank
        run_on_all(mesh, lambda: copy.copy_files(range(count * rank // ranks, count * (rank + 1) // ranks)))
        run_on_first(mesh, copy.commit)
        run_on_first(mesh, lambda: point_to_newest(directory, run, storage))
    except Exception:
        if mesh.control.rank == 0:
            discard(copy.temporary, storage)
        raise
    return copy.final


@dataclass(frozen=True)
class CopyInProgress:
    """A copy of a checkpoint, as one rank makes it."""

    source: Path
    directory: Path
    manifest: Manifest
    run: str
    flag: str
    storage: Storage
    beat: Callable[[], None]

    @property
    def final(self) -> Path:
        return self.directory / folder_name(self.manifest.step)

    @property
    def temporary(self) -> Path:
        return temporary_folder(self.directory, self.manifest.step, self.run)

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.manifest.files)

    def exists(self, replaces: bool) -> bool:
        """True if the directory has this checkpoint already; checks sizes and headers of its files, not their data.

        Raises:
            CheckpointError: the directory has another checkpoint of the step, and `replaces` is false.
            StorageError: the directory or the existing copy cannot be read.
        """
        final, storage = self.final, self.storage
        try:
            if storage.exists(final.parent):
                sweep(final.parent, storage)  # may restore another checkpoint of the step
            is_taken = storage.exists(final)
        except OSError as failure:
            raise cannot_write(storage, final, 0, failure, self.flag) from failure
        if not is_taken:
            return False
        if not storage.is_link(final) and stored_digest(final, storage) == self.manifest.digest:
            try:
                check_files(final, self.manifest, storage)
            except DamagedError as damage:
                log.warning(f"copying to {final} again: {damage}")
                return False
            point_to_newest(final.parent, self.run, storage)  # an earlier copy may have been killed before it did this
            return True
        if not replaces:
            raise CheckpointError(
                f"{final} is a different checkpoint of step {self.manifest.step}. Copy to another directory, or remove "
                "the existing checkpoint."
            )
        return False

    def copy_files(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            file, storage = self.manifest.files[number], self.storage
            target = self.temporary / file.name
            try:
                with writing(storage, target, file.size_bytes, self.flag) as handle:
                    for content in verified_chunks(self.source, self.manifest, number, storage):
                        self.beat()
                        append(storage, handle, content)
            except DamagedError as damage:
                raise DamagedError(f"{damage} It was not copied.") from damage

    def commit(self) -> None:
        """Copies the manifest, verifies it, and publishes the copy."""
        target = self.temporary / MANIFEST_NAME
        try:
            for index in self.manifest.indexes:
                write_file(
                    self.storage, self.temporary / index.name, bytes(read_index(self.source, index, self.storage))
                )
            write_file(self.storage, target, self._manifest_text())
            read_manifest(self.temporary, self.storage, self.manifest)
            self.storage.sync_directory(self.temporary)
            publish(self.temporary, self.final, self.run, self.storage)
        except OSError as failure:
            raise cannot_write(self.storage, target, self.size_bytes, failure, self.flag) from failure

    def _manifest_text(self) -> bytes:
        text = read_whole(self.storage, self.source / MANIFEST_NAME)
        if stored_digest(self.source, self.storage) != self.manifest.digest:
            raise DamagedError(f"{self.source / MANIFEST_NAME} changed while it was being copied. Copy it again.")
        return bytes(text)


def point_to_newest(directory: Path, run: str, storage: Storage) -> None:
    """Writes the hint for other programs: the newest checkpoint, which need not be the copy."""
    with contextlib.suppress(OSError):
        for step in list(steps_in(directory, storage))[:1]:
            write_hint(directory, step, run, storage)
