"""Summaries of the checkpoints in a folder, without their tensors; each manifest is read once."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from megatron.checkpoint.manifest import (
    MANIFEST_NAME,
    folder_step,
    read_manifest,
    stored_digest,
)
from megatron.checkpoint.manifests.contents import Manifest
from megatron.checkpoint.publish import ASIDE_PREFIX
from megatron.checkpoint.reader import check_files
from megatron.checkpoint.record import run_id_of
from megatron.checkpoint.storage import Storage, opened, unreadable
from megatron.config.flags.paths import is_address
from megatron.errors import DamagedError


@dataclass(frozen=True)
class ManifestSummary:
    """A checkpoint with a valid manifest and file sizes.

    Attributes:
        digest: of its manifest, which covers all files.
        files: names and sizes in bytes, including index files but not the manifest.
        run_id: the run it belongs to; empty if unknown.
        validation_loss: of the evaluation at its step, in nats per token; None without one.
        layout: axis sizes of the run that saved it, by name; empty if unknown.
    """

    path: Path
    step: int
    digest: str
    files: tuple[tuple[str, int], ...]
    run_id: str
    validation_loss: float | None
    layout: Mapping[str, int]

    @property
    def size_bytes(self) -> int:
        return sum(size for _, size in self.files)

    @classmethod
    def of(cls, path: Path, manifest: Manifest) -> ManifestSummary:
        return cls(
            path,
            manifest.step,
            manifest.digest,
            (
                *((index.name, index.size_bytes) for index in manifest.indexes),
                *((file.name, file.size_bytes) for file in manifest.files),
            ),
            run_id_of(manifest.record),
            _validation_loss(manifest.record),
            _layout(manifest.record),
        )


@final
class ManifestSummaries:
    """A cache of summaries; a manifest is parsed again only if it was replaced."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._known: dict[Path, ManifestSummary] = {}

    def of(self, folder: Path) -> ManifestSummary:
        """The summary of a folder; checks the sizes of its files each time.

        Raises:
            DamagedError: its manifest is missing or damaged, or a file is missing or has another size.
            CheckpointError: it has another format version.
            StorageError: the system refused to read, for a reason unrelated to the checkpoint.
        """
        known = self._known.pop(folder, None)
        if known is not None and stored_digest(folder, self._storage) == known.digest:
            _check_sizes(known, self._storage)
        else:
            manifest = read_manifest(folder, self._storage)
            check_files(folder, manifest, self._storage)
            known = ManifestSummary.of(folder, manifest)
        self._known[folder] = known
        return known

    def forget(self, folder: Path) -> None:
        """Removes a deleted folder from the cache."""
        self._known.pop(folder, None)


def steps_in(directory: Path, storage: Storage) -> dict[int, Path]:
    """The folders with the name of a checkpoint, newest first, by step; without links.

    Raises:
        OSError: the directory cannot be listed.
    """
    folders = {
        step: directory / name
        for name in storage.names(directory)
        if not name.startswith(ASIDE_PREFIX) and (step := folder_step(name)) is not None
    }
    newest_first = sorted(folders.items(), reverse=True)
    return {step: path for step, path in newest_first if is_address(path) or (path.is_dir() and not path.is_symlink())}


def other_files(summary: ManifestSummary, storage: Storage) -> list[str]:
    """The files in a checkpoint's folder that are not part of it, except leftovers of network file systems.

    Raises:
        OSError: the folder cannot be listed.
    """
    expected = {MANIFEST_NAME, *(name for name, _ in summary.files)}
    return [name for name in storage.names(summary.path) if name not in expected and not name.startswith(".nfs")]


def _check_sizes(summary: ManifestSummary, storage: Storage) -> None:
    for name, expected in summary.files:
        path = summary.path / name
        try:
            with opened(storage, path) as (_, size_bytes):
                pass
        except OSError as failure:
            raise unreadable(path, failure) from failure
        if size_bytes != expected:
            raise DamagedError(
                f"{path} has {size_bytes} bytes; its manifest expects {expected}. Use another checkpoint."
            )


def _validation_loss(record: Mapping[str, Any]) -> float | None:
    entry = record.get("validation_loss")
    if not isinstance(entry, int | float) or isinstance(entry, bool) or not math.isfinite(entry):
        return None
    return float(entry)


def _layout(record: Mapping[str, Any]) -> dict[str, int]:
    config = record.get("config")
    section = config.get("parallel") if isinstance(config, Mapping) else None
    if not isinstance(section, Mapping):
        return {}
    return {axis: section[name] for axis, name in _AXES if type(section.get(name)) is int}


_AXES = (
    ("tp", "tensor_model_parallel_size"),
    ("pp", "pipeline_model_parallel_size"),
    ("dp", "data_parallel_size"),
)
