"""Lists a folder of checkpoints: complete and damaged ones, and leftovers of interrupted saves and deletions."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.checkpoint.manifest import MANIFEST_NAME, folder_step
from megatron.checkpoint.publish import unfinished_in
from megatron.checkpoint.retention.summaries import ManifestSummaries, ManifestSummary
from megatron.checkpoint.storage import Storage
from megatron.errors import CheckpointError, DamagedError, StorageError

COMPLETE, DAMAGED, UNREADABLE, LINK = "complete", "damaged", "unreadable", "link"
UNFINISHED, DELETED, ASIDE = "unfinished", "deleted", "aside"

_LEFTOVER = re.compile(r"\.(tmp|trash|old)-iter_([0-9]{7,18})-[0-9a-f]+\Z")
_LEFTOVER_STATES = {"tmp": UNFINISHED, "trash": DELETED, "old": ASIDE}


@dataclass(frozen=True)
class ListedCheckpoint:
    """A folder that is, was or should have become a checkpoint.

    Attributes:
        state: complete: manifest, sizes and headers are valid; tensors were not read. damaged: they are invalid.
            unreadable: this user or this version cannot read it. link: a symbolic link, which is not followed.
            unfinished, deleted: left by an interrupted save or deletion. aside: an interrupted save was replacing it.
        size_bytes: from its manifest if valid, else its size on disk; None if it cannot be read.
        summary: None unless manifest and files are valid.
        problem: why it is invalid, or empty.
    """

    path: Path
    step: int
    state: str
    size_bytes: int | None
    summary: ManifestSummary | None = None
    problem: str = ""

    @property
    def is_leftover(self) -> bool:
        return self.state in _LEFTOVER_STATES.values()

    def to_json(self) -> dict[str, Any]:
        """A JSON object; what is unknown is null."""
        known = self.summary
        return {
            "path": str(self.path),
            "step": self.step,
            "state": self.state,
            "size_bytes": self.size_bytes,
            "layout": None if known is None else dict(known.layout),
            "validation_loss": None if known is None else known.validation_loss,
            "run_id": (known.run_id or None) if known is not None else None,
            "problem": self.problem or None,
        }


def entries_in(directory: Path, storage: Storage) -> list[ListedCheckpoint]:
    """The checkpoints and leftovers in a folder, newest first; no tensor is read.

    A folder that is a checkpoint itself is the only entry.

    Raises:
        StorageError: the folder cannot be listed.
    """
    try:
        names, unfinished = storage.names(directory), unfinished_in(directory, storage)
    except OSError as failure:
        raise StorageError(
            f"cannot list {directory}: {failure.strerror or failure}. Give a folder of checkpoints that this user can "
            "read."
        ) from failure
    summaries = ManifestSummaries(storage)
    if MANIFEST_NAME in names:
        return [_entry(directory, folder_step(directory.name) or 0, None, summaries, storage)]
    entries = []
    for name in names:
        leftover = _LEFTOVER.match(name)
        step = int(leftover.group(2)) if leftover else folder_step(name)
        if step is not None:
            state = UNFINISHED if name in unfinished else _LEFTOVER_STATES[leftover.group(1)] if leftover else None
            entries.append(_entry(directory / name, step, state, summaries, storage))
    return sorted(entries, key=lambda entry: (-entry.step, entry.is_leftover, entry.path.name))


def _entry(
    path: Path, step: int, state: str | None, summaries: ManifestSummaries, storage: Storage
) -> ListedCheckpoint:
    if storage.is_link(path):
        return ListedCheckpoint(path, step, LINK, None, problem="symbolic links are not followed")
    if state in (UNFINISHED, DELETED):
        return ListedCheckpoint(path, step, state, _taken_bytes(path, storage))
    try:
        summary = summaries.of(path)
    except (CheckpointError, StorageError) as failure:
        problem_state = DAMAGED if isinstance(failure, DamagedError) else UNREADABLE
        return ListedCheckpoint(path, step, state or problem_state, _taken_bytes(path, storage), problem=str(failure))
    # A checkpoint that was moved aside may be complete.
    return ListedCheckpoint(path, summary.step, state or COMPLETE, summary.size_bytes, summary)


def _taken_bytes(path: Path, storage: Storage) -> int | None:
    try:
        return storage.taken_bytes(path)
    except OSError:
        return None
