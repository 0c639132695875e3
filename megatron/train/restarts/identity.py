"""The identity of a run, which its checkpoints and folders share.

It is drawn at the first start and kept through all restarts and layouts, in the record of each checkpoint and in
`run.json` of the --save folder. It identifies checkpoints copied from another run, and prevents mixing the steps of two
runs in one folder. Checkpoints of older versions and imported models have none: any run can resume from them, and none
deletes them. A fork of a run gets a new identity, since the steps of both would otherwise be indistinguishable.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron import log
from megatron.checkpoint import find, read_record
from megatron.checkpoint.manifest import read_manifest
from megatron.checkpoint.manifests.contents import Manifest
from megatron.checkpoint.record import Record, base_in, run_id_of
from megatron.checkpoint.recovery import IDENTITY_NAME, Candidate, read_run_file
from megatron.checkpoint.storage import DISK, write_file
from megatron.config.flags.paths import is_address
from megatron.errors import CheckpointError, DamagedError, StorageError, printable
from megatron.files.replacing import replace_file

_MOST_RECORDS = 4


@dataclass(frozen=True)
class RunIdentity:
    """The identity of a run.

    Attributes:
        run_id: 16 hexadecimal digits, drawn at the first start; empty if unknown.
        finetuned_from: the base checkpoint of a fine-tuning, see `base_of`; else empty.
        forked_from: the checkpoint of another run that it was forked from, see `base_of`, or `nothing`; else empty.
    """

    run_id: str = ""
    finetuned_from: Mapping[str, Any] = field(default_factory=dict)
    forked_from: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def new(
        cls, finetuned_from: Mapping[str, Any] | None = None, forked_from: Mapping[str, Any] | None = None
    ) -> RunIdentity:
        """A new identity."""
        return cls(secrets.token_hex(8), finetuned_from or {}, forked_from or {})

    @classmethod
    def from_json(cls, value: Any) -> RunIdentity | None:
        """Parses the output of `to_json`, or the same entries of a checkpoint's record; None if they are missing."""
        if not isinstance(value, Mapping) or not run_id_of(value):
            return None
        return cls(run_id_of(value), base_in(value, "finetuned_from"), base_in(value, "forked_from"))

    def to_json(self) -> dict[str, Any]:
        forked = {"forked_from": dict(self.forked_from)} if self.forked_from else {}
        return {"run_id": self.run_id, "finetuned_from": dict(self.finetuned_from), **forked}

    def __str__(self) -> str:
        name = f"run {self.run_id}" if self.run_id else "a run of an older version, without identity"
        if "flag" in self.forked_from:
            return f"{name}, started with {printable(self.forked_from['flag'], quoted=False)}"
        if self.forked_from:
            return f"{name}, forked from {base_text(self.forked_from)}"
        return f"{name}, a fine-tuning of {base_text(self.finetuned_from)}" if self.finetuned_from else name


def base_of(record: Record, manifest: Manifest) -> dict[str, Any]:
    """Describes the base checkpoint of a fine-tuning or fork: run, step, digest of its tensors, Hugging Face family.

    The digest, which is independent of path and time, identifies weights without a run, such as imported ones.
    """
    digests = "\n".join(sorted(file.sha256 for file in manifest.files))
    return {
        "run_id": record.run_id,
        "step": record.progress.step,
        "fingerprint": hashlib.sha256(digests.encode()).hexdigest(),
        **({"family": record.first_family} if record.first_family else {}),
    }


def nothing(flag: str) -> dict[str, Any]:
    """The base of a run that started at iteration 0 because of a flag, so that the same command resumes it."""
    return {"run_id": "", "step": 0, "fingerprint": hashlib.sha256(flag.encode()).hexdigest(), "flag": flag}


def is_same_base(one: Mapping[str, Any], other: Mapping[str, Any], *, at_any_step: bool = False) -> bool:
    """True if two results of `base_of` are the same checkpoint, or with `at_any_step` the same run."""
    if not one or not other:
        return False
    if one.get("run_id") and other.get("run_id"):
        return one["run_id"] == other["run_id"] and (at_any_step or one.get("step") == other.get("step"))
    return bool(one.get("fingerprint")) and one.get("fingerprint") == other.get("fingerprint")


def is_same_folder(one: str | Path | None, other: str | Path | None) -> bool:
    """True if two paths lead to the same folder; False if one is None."""
    return one is not None and other is not None and os.path.realpath(one) == os.path.realpath(other)


def base_text(base: Mapping[str, Any]) -> str:
    """The base of a fine-tuning or a fork, for messages."""
    if base.get("run_id"):
        return f"run {base['run_id']} at iteration {base.get('step')}"
    return f"the weights {str(base.get('fingerprint'))[:12]}"


def read_identity(directory: Path) -> RunIdentity | None:
    """The identity in the file of a folder; None if the file is missing or damaged."""
    path = directory / IDENTITY_NAME
    try:
        identity = RunIdentity.from_json(read_run_file(directory))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, RecursionError) as failure:
        log.warning(f"{path} cannot be read ({failure}); the checkpoints next to it are read instead")
        return None
    if identity is None:
        log.warning(f"{path} names no run; the checkpoints next to it are read instead")
    return identity


def identity_of(directory: Path) -> RunIdentity | None:
    """The run that a folder belongs to, by its file, else by its newest checkpoints; None if unknown.

    Raises:
        CheckpointError: the file is missing, and the checkpoints belong to several runs.
    """
    identity = read_identity(directory)
    if identity is not None:
        return identity
    seen: dict[str, tuple[RunIdentity, Path]] = {}
    for candidate in checkpoints_in(directory)[:_MOST_RECORDS]:
        with contextlib.suppress(CheckpointError, StorageError):  # damaged ones are reported where they are loaded
            identity = RunIdentity.from_json(read_manifest(candidate.path).record)
            if identity is not None:
                seen.setdefault(identity.run_id, (identity, candidate.path))
    if len(seen) > 1:
        listed = ", ".join(f"{path.name} of run {run_id}" for run_id, (_, path) in seen.items())
        raise CheckpointError(
            f"{directory} has checkpoints of several runs and no {IDENTITY_NAME} that identifies its run: {listed}. "
            "Move the other run's checkpoints elsewhere, or use the folder of one checkpoint as --load and another "
            "--save folder."
        )
    return next((identity for identity, _ in seen.values()), None)


def checkpoints_in(directory: Path) -> list[Candidate]:
    """The checkpoint folders of a --save folder, newest first, without files of other programs."""
    try:
        return find(directory)
    except CheckpointError:
        return []


def holds_checkpoint_of(run_id: str, candidates: Sequence[Candidate]) -> bool:
    """True if a checkpoint belongs to a run; a damaged one counts, and is reported when it is loaded."""
    for candidate in candidates:
        try:
            if run_id_of(read_record(candidate.path)) == run_id:
                return True
        except DamagedError:
            return True
    return False


def reject_foreign_save(directory: str, reason: str = "--load is not given") -> None:
    """Raises CheckpointError if the --save folder of a run that starts at iteration 0 has checkpoints."""
    candidates = find(Path(directory))
    if candidates:
        raise CheckpointError(
            f"--save {directory} already has checkpoints (newest: iteration {candidates[0].step}), but {reason}. Add "
            f"--load {directory} to resume from them, --from-scratch to overwrite them, or use another folder."
        )


def write_identity(directory: Path, identity: RunIdentity) -> None:
    """Writes the identity of a run into a folder; a failure is a warning, since checkpoints contain it, too."""
    path = directory / IDENTITY_NAME
    try:
        DISK.make_directories(directory)
        content = (json.dumps(identity.to_json(), indent=2) + "\n").encode()
        if is_address(path):
            DISK.remove_file(path)
            write_file(DISK, path, content)
        else:
            replace_file(path, content)
    except OSError as failure:
        log.warning(f"{path} cannot be written: {failure.strerror or failure}. Checkpoints identify their run, too.")
