"""Finds the checkpoint to continue from and loads it: the newest that verifies, never a silent fresh start.

Every rank reads what it needs, and all have verified it before a tensor changes on any. `OpenCheckpoint` is for
programs of one process that read tensors one by one.
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
from megatron.checkpoint.reader import CheckpointReader, Wanted, check_files, read_pieces
from megatron.checkpoint.record import Record, run_id_of
from megatron.checkpoint.storage import DISK, Storage, read_head
from megatron.errors import CheckpointError, DamagedError, StorageError, printable
from megatron.parallel.agreement import is_same_on_all, run_on_all, run_on_first
from megatron.parallel.mesh import ParallelMesh
from megatron.parallel.messages import all_reduce_max
from megatron.parallel.pieces import PieceKey

# What Megatron, DeepSpeed, torch, Hugging Face and this program's own older forms leave in a checkpoint directory.
_CHECKPOINT_LIKE = re.compile(
    r"iter_.*|\.old-iter_.*|global_step.*|step[-_]?\d+.*|checkpoint.*|epoch.*|release|mp_rank_.*|zero_pp_rank_.*|layer_\d+.*|"
    r"latest.*|\.metadata|metadata\.json|common\.pt|model_optim_rng.*|model_states.*|optim_states.*|pytorch_model.*|"
    r".*\.(pt|pth|bin|ckpt|distcp|safetensors|nemo|npz|msgpack|zarr)",
    re.IGNORECASE | re.DOTALL,
)

_LONGEST_HINT_BYTES = 40
IDENTITY_NAME = "run.json"  # in it a run names the folder as its own
_LARGEST_IDENTITY_BYTES = 64 * 1024

Check = Callable[[Path, Mapping[str, Any]], None]
Announce = Callable[[str], None]


@dataclass(frozen=True)
class Candidate:
    """A folder that may be a checkpoint; nothing of it has been verified."""

    path: Path
    step: int


@dataclass(frozen=True)
class LoadedCheckpoint:
    """A checkpoint that is good as far as it was checked.

    Args:
        record: the JSON object that was saved with it.
        manifest: of `newest_record` the parsed manifest, for `load_newest`; else None.
    """

    record: dict[str, Any]
    path: Path
    manifest: Manifest | None = field(default=None, compare=False, repr=False)


def find(directory: Path, *, storage: Storage = DISK) -> list[Candidate]:
    """The checkpoint folders in a directory, newest first; none when it is absent or holds nothing of the kind.

    A directory that is a checkpoint folder itself is its own only candidate. The file
    `latest_checkpointed_iteration.txt` is not consulted. A symbolic link in the directory is no checkpoint, since what
    it leads to can be replaced behind the run's back; it is passed over with a warning.

    Raises:
        CheckpointError: there is no checkpoint folder, but links to some, or something that looks like another
            program's checkpoint.
        StorageError: the directory cannot be listed.
    """
    directory = Path(directory)
    try:
        names, unfinished = storage.names(directory), unfinished_in(directory, storage)
    except FileNotFoundError:
        return []
    except OSError as failure:
        raise StorageError(
            f"cannot list {directory}: {failure.strerror or failure}. Give --load a directory that this user can read."
        ) from failure
    if MANIFEST_NAME in names:
        return [Candidate(directory, folder_step(directory.name) or 0)]
    names = [name for name in names if name not in unfinished]
    folders = [
        (step, not name.startswith(ASIDE_PREFIX), name) for name in names if (step := folder_step(name)) is not None
    ]
    links = [name for _, _, name in folders if storage.is_link(directory / name)]
    if links:
        log.warning(f"{directory} holds symbolic links ({', '.join(links[:5])}), which are not followed")
    if len(folders) > len(links):
        folders = [entry for entry in folders if entry[2] not in links]
        return [Candidate(directory / name, step) for step, _, name in sorted(folders, reverse=True)]
    if links:
        raise CheckpointError(
            f"{directory} holds no checkpoint but symbolic links ({', '.join(links[:5])}), which are not followed. "
            "Give --load the folder that a link leads to, or copy it here."
        )
    foreign = [name for name in names if _CHECKPOINT_LIKE.fullmatch(name)]
    if foreign:
        shown = ", ".join(map(printable, foreign[:5]))
        raise CheckpointError(
            f"{directory} holds no checkpoint of this program, but something like one: {shown}. "
            "Convert it first (tools/convert/import_megatron.py, tools/convert/import_hf.py), or give --load a "
            "directory that is empty to start from scratch."
        )
    if unfinished or any(name.startswith(TEMPORARY_PREFIX) for name in names):
        log.warning(
            f"{directory} holds an unfinished first save and nothing else: there is no checkpoint to continue from"
        )
    return []


def folder_of_step(directory: Path, step: int, *, storage: Storage = DISK) -> Path:
    """The folder of the checkpoint of one step.

    Raises:
        CheckpointError: the directory holds none of this step.
        StorageError: the directory cannot be listed.
    """
    candidates = find(directory, storage=storage)
    for candidate in candidates:
        if candidate.step == step:
            return candidate.path
    steps = ", ".join(str(candidate.step) for candidate in candidates) or "none"
    raise CheckpointError(
        f"{directory} holds no checkpoint of step {step} (--ckpt-step {step}). It holds these steps: {steps}."
    )


def load(
    path: Path,
    wanted: Wanted,
    mesh: ParallelMesh,
    *,
    known: Manifest | None = None,
    check: Check | None = None,
    storage: Storage = DISK,
    announce: Announce = log.line,
) -> dict[str, Any]:
    """Reads this rank's wanted pieces from one checkpoint folder and returns its record; collective over the mesh.

    Every rank reads only the chunks that it needs. No `accept` is called on any rank before all ranks have verified all
    bytes they need.

    Args:
        known: a manifest that this rank has parsed before; it is used again if the one on the disk has its digest.
        check: called with the folder and its record before anything else is read; what it raises ends the attempt.
        announce: says what was loaded: on standard output, unless that is for something else.

    Raises:
        DamagedError: some rank found damage (on every rank); an older checkpoint may do.
        CheckpointError: the checkpoint does not hold what is wanted; an older one would not help.
        StorageError: the system refused for a reason that has nothing to do with the checkpoint.
    """
    prepared = run_on_all(mesh, lambda: _prepare(path, wanted, known, check, mesh, storage))
    manifest = _same_on_all(mesh, path, prepared.manifest)
    _warn_of_unclaimed(path, manifest, prepared.claimed, mesh)
    run_on_all(mesh, prepared.reader.deliver)
    announce(f"successfully loaded checkpoint from {path.parent} at iteration {manifest.step}")
    return manifest.record


def load_newest(
    directory: Path,
    wanted: Callable[[], Wanted],
    mesh: ParallelMesh,
    *,
    known: LoadedCheckpoint | None = None,
    check: Check | None = None,
    also: Sequence[Path] = (),
    storage: Storage = DISK,
    announce: Announce = log.line,
) -> LoadedCheckpoint | None:
    """Loads the newest checkpoint that verifies on every rank; collective over the whole mesh.

    Damaged ones are skipped with a warning that says why. None means that there is nothing there at all.

    Args:
        wanted: called once for each attempt; must yield all tensors every time.
        known: what `newest_record` returned for this directory, so that no rank parses that manifest again.
        check: called with each folder and its record; one for which it raises DamagedError is skipped, too.
        also: other directories that are searched; of two checkpoints of one step, the one in `directory` is taken.

    Raises:
        CheckpointError: there are checkpoints and all are damaged, or the newest good one does not fit the run.
        StorageError: the system refused for a reason that has nothing to do with the checkpoints.
    """
    parsed = None if known is None else known.manifest

    def attempt(path: Path) -> LoadedCheckpoint:
        return LoadedCheckpoint(
            load(path, wanted(), mesh, known=parsed, check=check, storage=storage, announce=announce), path
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
    """The newest checkpoint whose manifest and file sizes are good; reads no tensors; collective over the whole mesh.

    Args:
        check: as in `load_newest`; without one, checkpoints of another run than the directory's are skipped.
        also: as in `load_newest`.

    Raises:
        CheckpointError: there are checkpoints and all are damaged.
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
    """A check of a checkpoint's record that raises DamagedError, so that it is skipped, if it is of another run.

    Args:
        run_id: the run that `directory` belongs to; empty accepts every checkpoint.
    """

    def check(path: Path, record: Mapping[str, Any]) -> None:
        other = run_id_of(record)
        if run_id and other and other != run_id:
            raise DamagedError(
                f"it belongs to run {other}, and {directory} to run {run_id}. To continue from it on purpose, give "
                f"--load {path} and another --save."
            )

    return check


def read_run_file(directory: Path, storage: Storage = DISK) -> Any:
    """The JSON with which a run has named a directory as its own.

    Raises:
        OSError, ValueError, RecursionError: there is none, or it cannot be read.
    """
    return json.loads(read_head(storage, directory / IDENTITY_NAME, _LARGEST_IDENTITY_BYTES))


def _run_of(directory: Path, storage: Storage) -> str:
    """The run that a directory says it belongs to; empty if it says nothing."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        value = read_run_file(directory, storage)
        return run_id_of(value) if isinstance(value, Mapping) else ""
    return ""


@dataclass(frozen=True)
class _Prepared:
    """What a rank has verified: the reader delivers it; `claimed` are the names of the tensors it wants parts of."""

    manifest: Manifest
    reader: CheckpointReader
    claimed: frozenset[str]


def _prepare(
    path: Path,
    wanted: Wanted,
    known: Manifest | None,
    check: Check | None,
    mesh: ParallelMesh,
    storage: Storage,
) -> _Prepared:
    manifest = read_manifest(path, storage, known)
    if check is not None:
        check(path, manifest.record)
    check_files(path, manifest, storage, mesh.control.rank, mesh.control.size)
    listed = list(wanted)
    reader = CheckpointReader(path, manifest, listed, storage)
    reader.verify()
    return _Prepared(manifest, reader, frozenset(key.name for key, _ in listed))


def _same_on_all(mesh: ParallelMesh, path: Path, manifest: Manifest) -> Manifest:
    if not is_same_on_all(mesh, bytes.fromhex(manifest.digest)):
        raise CheckpointError(f"the ranks see different checkpoints at {path}. All nodes must see the same directory.")
    return manifest


def _warn_of_unclaimed(path: Path, manifest: Manifest, claimed: frozenset[str], mesh: ParallelMesh) -> None:
    """Says which stored tensors no rank wanted: a smaller model than the saved one would otherwise load in silence."""
    names = manifest.catalogue.names()
    flags = torch.tensor([int(name in claimed) for name in names], dtype=torch.int32)
    left = [name for name, flag in zip(names, all_reduce_max(flags, mesh.control).tolist(), strict=True) if not flag]
    if left and mesh.control.rank == 0:
        more = f" and {len(left) - 5} more" if len(left) > 5 else ""
        log.warning(f"{path} holds tensors that this run's model does not have: {', '.join(left[:5])}{more}")


def _newest(
    directories: Sequence[Path],
    attempt: Callable[[Path], LoadedCheckpoint],
    mesh: ParallelMesh,
    storage: Storage,
    known: LoadedCheckpoint | None = None,
) -> LoadedCheckpoint | None:
    """The first success among the candidates of some directories, which only rank 0 lists.

    Args:
        known: what was newest there before; checkpoints that were passed over then are passed over in silence.
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
            "Restore one from a copy, or give --load an empty directory to start from scratch."
        )
    return None


def _candidates(directories: Sequence[Path], storage: Storage) -> list[str]:
    """The checkpoint folders in some directories, newest first, and of one step in the order of the directories.

    Any but the first may be out of reach; that is a warning, unless the first holds none: then what is out of reach may
    be all there is.
    """
    candidates = find(directories[0], storage=storage)
    for directory in directories[1:]:
        try:
            candidates += find(directory, storage=storage)
        except (CheckpointError, StorageError) as failure:
            if not candidates and isinstance(failure, StorageError):
                raise
            log.warning(f"looking for checkpoints elsewhere only: {failure}")
    return [str(candidate.path) for candidate in sorted(candidates, key=lambda candidate: -candidate.step)]


def _compare_with_hint(directory: Path, path: Path, skipped: list[str], storage: Storage) -> None:
    if skipped:
        log.warning(f"continuing from {path}, which is older than {len(skipped)} damaged or foreign checkpoint(s)")
    hint = _read_hint(directory / HINT_NAME, storage)
    if hint is None:
        return
    if hint != str(folder_step(path.name)) and not skipped:
        log.warning(
            f"{directory / HINT_NAME} says {printable(hint)}; ignoring it, the newest good checkpoint is {path.name}"
        )


def _read_hint(path: Path, storage: Storage) -> str | None:
    """The first characters of the hint; None if there is no such plain file."""
    try:
        return read_head(storage, path, _LONGEST_HINT_BYTES).decode(errors="replace").strip()
    except OSError:
        return None


@dataclass(frozen=True)
class OpenCheckpoint:
    """One checkpoint folder whose manifest and file sizes are good; its tensors are verified when they are read."""

    folder: Path
    manifest: Manifest
    record: Record

    @classmethod
    def newest(cls, path: Path) -> OpenCheckpoint:
        """The newest checkpoint in a folder, or the one that the folder is.

        Raises:
            CheckpointError: there is none, or all are damaged.
        """
        newest = newest_record(path, ParallelMesh.single())
        if newest is None or newest.manifest is None:
            raise CheckpointError(f"there is no checkpoint in {path}. Give a folder to which a run saved checkpoints.")
        return cls(newest.path, newest.manifest, Record.from_json(newest.record, newest.path))

    def tensors(self) -> dict[str, CheckpointTensor]:
        return self.manifest.catalogue.tensors()

    def read(self, keys: Sequence[PieceKey]) -> list[torch.Tensor]:
        """The values of pieces, verified but not necessarily finite; all of them are in memory at once.

        Shapes: flat, `[numel]` each, in the stored element type.

        Raises:
            CheckpointError: something is not stored, or has another shape.
            DamagedError: the bytes are not those that were written.
        """
        return read_pieces(self.folder, self.manifest, keys, finite=False)
