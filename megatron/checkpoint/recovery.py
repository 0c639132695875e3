"""Finds and loads the checkpoint to resume from: the newest valid one; a run never restarts from scratch silently.

Each rank reads what it needs, and all ranks verify it before any tensor is modified. `OpenCheckpoint` is for
single-process programs that read individual tensors.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from megatron import log
from megatron.checkpoint.catalogue import CheckpointTensor
from megatron.checkpoint.manifest import MANIFEST_NAME, folder_step, read_manifest
from megatron.checkpoint.manifests.contents import Manifest
from megatron.checkpoint.publish import ASIDE_PREFIX, HINT_NAME, TEMPORARY_PREFIX, unfinished_in
from megatron.checkpoint.reader import CheckpointReader, PieceRequests, check_files, read_pieces
from megatron.checkpoint.record import Record, run_id_of
from megatron.checkpoint.storage import DISK, Storage, read_head
from megatron.errors import CheckpointError, DamagedError, StorageError, printable
from megatron.parallel.agreement import is_same_on_all, run_on_all, run_on_first
from megatron.parallel.mesh import ParallelMesh
from megatron.parallel.messages import all_reduce_max
from megatron.parallel.pieces import PieceKey

# Files that Megatron, DeepSpeed, torch, Hugging Face and older versions of this program write to such a directory.
_CHECKPOINT_LIKE = re.compile(
    r"iter_.*|\.old-iter_.*|global_step.*|step[-_]?\d+.*|checkpoint.*|epoch.*|release|mp_rank_.*|zero_pp_rank_.*|layer_\d+.*|"
    r"latest.*|\.metadata|metadata\.json|common\.pt|model_optim_rng.*|model_states.*|optim_states.*|pytorch_model.*|"
    r".*\.(pt|pth|bin|ckpt|distcp|safetensors|nemo|npz|msgpack|zarr)",
    re.IGNORECASE | re.DOTALL,
)

_LONGEST_HINT_BYTES = 40
IDENTITY_NAME = "run.json"  # identifies the run that a folder belongs to
_LARGEST_IDENTITY_BYTES = 64 * 1024

Check = Callable[[Path, Mapping[str, Any]], None]
Announce = Callable[[str], None]


@dataclass(frozen=True)
class Candidate:
    """A folder that may be a checkpoint; not verified."""

    path: Path
    step: int


@dataclass(frozen=True)
class LoadedCheckpoint:
    """A checkpoint that was loaded, or whose record was read.

    Args:
        record: the record as JSON.
        manifest: set by `newest_record`, for `load_newest`; else None.
    """

    record: dict[str, Any]
    path: Path
    manifest: Manifest | None = field(default=None, compare=False, repr=False)


def find(directory: Path, *, storage: Storage = DISK) -> list[Candidate]:
    """The checkpoint folders in a directory, newest first; empty if the directory is missing or has none.

    A directory that is itself a checkpoint folder is the only candidate. `latest_checkpointed_iteration.txt` is not
    used. Symbolic links are skipped with a warning, since their targets may be replaced during the run.

    Raises:
        CheckpointError: there is no checkpoint folder, but links to some, or a checkpoint of another program.
        StorageError: the directory cannot be listed.
    """
    directory = Path(directory)
    try:
        names, unfinished = storage.names(directory), unfinished_in(directory, storage)
    except FileNotFoundError:
        return []
    except OSError as failure:
        raise StorageError(
            f"cannot list {directory}: {failure.strerror or failure}. Use a --load directory that this user can read."
        ) from failure
    if MANIFEST_NAME in names:
        return [Candidate(directory, folder_step(directory.name) or 0)]
    names = [name for name in names if name not in unfinished]
    folders = [
        (step, not name.startswith(ASIDE_PREFIX), name) for name in names if (step := folder_step(name)) is not None
    ]
    links = [name for _, _, name in folders if storage.is_link(directory / name)]
    if links:
        log.warning(f"{directory} has symbolic links ({', '.join(links[:5])}), which are not followed")
    if len(folders) > len(links):
        folders = [entry for entry in folders if entry[2] not in links]
        return [Candidate(directory / name, step) for step, _, name in sorted(folders, reverse=True)]
    if links:
        raise CheckpointError(
            f"{directory} has no checkpoint, only symbolic links ({', '.join(links[:5])}), which are not followed. "
            "Use the target of a link as --load, or copy it here."
        )
    foreign = [name for name in names if _CHECKPOINT_LIKE.fullmatch(name)]
    if foreign:
        shown = ", ".join(map(printable, foreign[:5]))
        raise CheckpointError(
            f"{directory} has no checkpoint of this program, but files that look like another's: {shown}. "
            "Convert it first (tools/convert/import_megatron.py, tools/convert/import_hf.py), or use an empty --load "
            "directory to start from scratch."
        )
    if unfinished or any(name.startswith(TEMPORARY_PREFIX) for name in names):
        log.warning(f"{directory} has only an interrupted first save: there is no checkpoint to resume from")
    return []


def folder_of_step(directory: Path, step: int, *, storage: Storage = DISK) -> Path:
    """The folder of the checkpoint of one step.

    Raises:
        CheckpointError: the directory has no checkpoint of this step.
        StorageError: the directory cannot be listed.
    """
    candidates = find(directory, storage=storage)
    for candidate in candidates:
        if candidate.step == step:
            return candidate.path
    steps = ", ".join(str(candidate.step) for candidate in candidates) or "none"
    raise CheckpointError(
        f"{directory} has no checkpoint of step {step} (--ckpt-step {step}). It has these steps: {steps}."
    )


def load(
    path: Path,
    requests: PieceRequests,
    mesh: ParallelMesh,
    *,
    known: Manifest | None = None,
    check: Check | None = None,
    storage: Storage = DISK,
    announce: Announce = log.line,
) -> dict[str, Any]:
    """Loads this rank's requested pieces from a checkpoint folder and returns its record; collective over the mesh.

    Each rank reads only the chunks that it needs. No `accept` is called on any rank before all ranks have verified all
    bytes they need.

    Args:
        known: a manifest parsed earlier by this rank; reused if the file has the same digest.
        check: called with the folder and its record before anything else is read; may raise to abort.
        announce: prints what was loaded.

    Raises:
        DamagedError: some rank found damage (raised on every rank); try an older checkpoint.
        CheckpointError: a requested piece is not in the checkpoint; an older one would not help.
        StorageError: the system refused to read, for a reason unrelated to the checkpoint.
    """
    prepared = run_on_all(mesh, lambda: _prepare(path, requests, known, check, mesh, storage))
    manifest = _same_on_all(mesh, path, prepared.manifest)
    _warn_of_unused(path, manifest, prepared.requested, mesh)
    run_on_all(mesh, prepared.reader.deliver)
    announce(f"successfully loaded checkpoint from {path.parent} at iteration {manifest.step}")
    return manifest.record


def load_newest(
    directory: Path,
    requests: Callable[[], PieceRequests],
    mesh: ParallelMesh,
    *,
    known: LoadedCheckpoint | None = None,
    check: Check | None = None,
    also: Sequence[Path] = (),
    storage: Storage = DISK,
    announce: Announce = log.line,
) -> LoadedCheckpoint | None:
    """Loads the newest checkpoint that verifies on every rank; collective over the whole mesh.

    Damaged checkpoints are skipped with a warning. Returns None if there is no checkpoint at all.

    Args:
        requests: called for each attempt; must return all pieces every time.
        known: the result of `newest_record` for this directory, to avoid parsing its manifest again.
        check: called with each folder and its record; the folder is skipped if it raises DamagedError.
        also: other directories to search; of two checkpoints of one step, the one in `directory` is loaded.

    Raises:
        CheckpointError: all checkpoints are damaged, or the newest valid one does not match the run.
        StorageError: the system refused to read, for a reason unrelated to the checkpoints.
    """
    parsed = None if known is None else known.manifest

    def attempt(path: Path) -> LoadedCheckpoint:
        return LoadedCheckpoint(
            load(path, requests(), mesh, known=parsed, check=check, storage=storage, announce=announce), path
        )

    return _newest((Path(directory), *also), attempt, mesh, storage, known=known)


def newest_record(
    directory: Path,
    mesh: ParallelMesh,
    *,
    check: Check | None = None,
    also: Sequence[Path] = (),
    storage: Storage = DISK,
) -> LoadedCheckpoint | None:
    """The newest checkpoint with a valid manifest and file sizes; reads no tensors; collective over the whole mesh.

    Args:
        check: see `load_newest`; by default, checkpoints of runs other than the directory's are skipped.
        also: see `load_newest`.

    Raises:
        CheckpointError: all checkpoints are damaged.
    """

    if check is None:
        check = only_of_run(run_on_first(mesh, lambda: _run_of(Path(directory), storage)), Path(directory))

    def look(path: Path) -> LoadedCheckpoint:
        def examine() -> Manifest:
            manifest = read_manifest(path, storage)
            check(path, manifest.record)
            check_files(path, manifest, storage, mesh.control.rank, mesh.control.size)
            return manifest

        manifest = _same_on_all(mesh, path, run_on_all(mesh, examine))
        return LoadedCheckpoint(manifest.record, path, manifest)

    return _newest((Path(directory), *also), look, mesh, storage)


def only_of_run(run_id: str, directory: Path) -> Check:
    """A check that raises DamagedError for checkpoints of another run, so that they are skipped.

    Args:
        run_id: the run that `directory` belongs to; empty to accept every checkpoint.
    """

    def check(path: Path, record: Mapping[str, Any]) -> None:
        other = run_id_of(record)
        if run_id and other and other != run_id:
            raise DamagedError(
                f"it belongs to run {other}, but {directory} to run {run_id}. To resume from it anyway, use "
                f"--load {path} and another --save directory."
            )

    return check


def read_run_file(directory: Path, storage: Storage = DISK) -> Any:
    """The JSON that identifies the run a directory belongs to.

    Raises:
        OSError, ValueError, RecursionError: the file is missing or cannot be read.
    """
    return json.loads(read_head(storage, directory / IDENTITY_NAME, _LARGEST_IDENTITY_BYTES))


def _run_of(directory: Path, storage: Storage) -> str:
    with contextlib.suppress(OSError, ValueError, RecursionError):
        value = read_run_file(directory, storage)
        return run_id_of(value) if isinstance(value, Mapping) else ""
    return ""


@dataclass(frozen=True)
class _Prepared:
    """A verified checkpoint that `reader` can deliver, and the names of the tensors requested by this rank."""

    manifest: Manifest
    reader: CheckpointReader
    requested: frozenset[str]


def _prepare(
    path: Path,
    requests: PieceRequests,
    known: Manifest | None,
    check: Check | None,
    mesh: ParallelMesh,
    storage: Storage,
) -> _Prepared:
    manifest = read_manifest(path, storage, known)
    if check is not None:
        check(path, manifest.record)
    check_files(path, manifest, storage, mesh.control.rank, mesh.control.size)
    listed = list(requests)
    reader = CheckpointReader(path, manifest, listed, storage)
    reader.verify()
    return _Prepared(manifest, reader, frozenset(key.name for key, _ in listed))


def _same_on_all(mesh: ParallelMesh, path: Path, manifest: Manifest) -> Manifest:
    if not is_same_on_all(mesh, bytes.fromhex(manifest.digest)):
        raise CheckpointError(f"ranks read different checkpoints at {path}. The directory must be shared by all nodes.")
    return manifest


def _warn_of_unused(path: Path, manifest: Manifest, requested: frozenset[str], mesh: ParallelMesh) -> None:
    """Warns of stored tensors that no rank requested: the model may be smaller than the saved one by mistake."""
    names = manifest.catalogue.names()
    flags = torch.tensor([int(name in requested) for name in names], dtype=torch.int32)
    unused = [name for name, flag in zip(names, all_reduce_max(flags, mesh.control).tolist(), strict=True) if not flag]
    if unused and mesh.control.rank == 0:
        more = f" and {len(unused) - 5} more" if len(unused) > 5 else ""
        log.warning(f"{path} has tensors that this run's model does not have: {', '.join(unused[:5])}{more}")


def _newest(
    directories: Sequence[Path],
    attempt: Callable[[Path], LoadedCheckpoint],
    mesh: ParallelMesh,
    storage: Storage,
    known: LoadedCheckpoint | None = None,
) -> LoadedCheckpoint | None:
    """Tries the candidates in some directories, listed by rank 0, and returns the first that succeeds.

    Args:
        known: the newest checkpoint found earlier; those skipped at that time are skipped silently.
    """
    names = run_on_first(mesh, lambda: _candidates(directories, storage))
    if known is not None and str(known.path) in names:
        names = names[names.index(str(known.path)) :]
    skipped: list[str] = []
    for path in map(Path, names):
        try:
            newest = attempt(path)
        except DamagedError as damage:
            if mesh.control.rank == 0:
                log.warning(f"skipping checkpoint {path}: {damage}")
            skipped.append(f"{path.name}: {damage}")
            continue
        if mesh.control.rank == 0 and (known is None or skipped):
            _compare_with_hint(path.parent, path, skipped, storage)
        return newest
    if skipped:
        raise CheckpointError(
            f"none of the {len(skipped)} checkpoints in {' and '.join(map(str, directories))} can be used:\n"
            + "\n".join(skipped)
            + "\n"
            "Restore one from a copy, or use an empty --load directory to start from scratch."
        )
    return None


def _candidates(directories: Sequence[Path], storage: Storage) -> list[str]:
    """The checkpoint folders in some directories, newest first; those of one step in the order of the directories.

    An unreadable directory other than the first is a warning, unless no checkpoint was found before it.
    """
    candidates = find(directories[0], storage=storage)
    for directory in directories[1:]:
        try:
            candidates += find(directory, storage=storage)
        except (CheckpointError, StorageError) as failure:
            if not candidates and isinstance(failure, StorageError):
                raise
            log.warning(f"searching for checkpoints elsewhere only: {failure}")
    return [str(candidate.path) for candidate in sorted(candidates, key=lambda candidate: -candidate.step)]


def _compare_with_hint(directory: Path, path: Path, skipped: list[str], storage: Storage) -> None:
    if skipped:
        log.warning(f"resuming from {path}, which is older than {len(skipped)} skipped checkpoint(s)")
    hint = _read_hint(directory / HINT_NAME, storage)
    if hint is None:
        return
    if hint != str(folder_step(path.name)) and not skipped:
        log.warning(f"ignoring {directory / HINT_NAME} ({printable(hint)}): the newest valid checkpoint is {path.name}")


def _read_hint(path: Path, storage: Storage) -> str | None:
    """The first characters of the hint file; None if there is no regular file."""
    try:
        return read_head(storage, path, _LONGEST_HINT_BYTES).decode(errors="replace").strip()
    except OSError:
        return None


@dataclass(frozen=True)
class OpenCheckpoint:
    """A checkpoint folder with a valid manifest and file sizes; its tensors are verified when they are read."""

    folder: Path
    manifest: Manifest
    record: Record

    @classmethod
    def newest(cls, path: Path) -> OpenCheckpoint:
        """Opens the newest checkpoint in a folder, or the folder itself if it is a checkpoint.

        Raises:
            CheckpointError: there is none, or all are damaged.
        """
        newest = newest_record(path, ParallelMesh.single())
        if newest is None or newest.manifest is None:
            raise CheckpointError(f"no checkpoint in {path}. Use the folder of a run's checkpoints.")
        return cls(newest.path, newest.manifest, Record.from_json(newest.record, newest.path))

    def tensors(self) -> dict[str, CheckpointTensor]:
        return self.manifest.catalogue.tensors()

    def read(self, keys: Sequence[PieceKey]) -> list[torch.Tensor]:
        """Reads pieces, verified but not necessarily finite; see `read_pieces`."""
        return read_pieces(self.folder, self.manifest, keys, finite=False)
