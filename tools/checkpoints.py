"""Lists, inspects, verifies, copies, averages and deletes the checkpoints of a folder.

    python tools/checkpoints.py list checkpoints/gpt2
    python tools/checkpoints.py inspect checkpoints/gpt2
    python tools/checkpoints.py inspect checkpoints/gpt2/iter_0000500 --tensors 'decoder.layers.0.*' --moments --json
    python tools/checkpoints.py inspect checkpoints/gpt2 --compare checkpoints/again
    python tools/checkpoints.py verify checkpoints/gpt2 --all
    python tools/checkpoints.py copy checkpoints/gpt2 /archive/gpt2 --step 5000
    python tools/checkpoints.py average checkpoints/gpt2 --last 3 --save checkpoints/mean
    python tools/checkpoints.py average runs/a runs/b/iter_0000500 --coefficients 3 1 --save checkpoints/mean
    python tools/checkpoints.py prune checkpoints/gpt2 --keep-last 3 --keep-every 10000 --keep-best --dry-run

`list` reads no tensors. `inspect` prints the contents of a checkpoint of any layout, or the differences between two
(exit code 77 if tensors differ). `verify` reads every byte of the newest or of selected checkpoints. `copy` verifies
every byte against its digest and never overwrites another checkpoint. `average` writes the mean of the weights of
checkpoints of one network, in any layouts, for text generation or training with --finetune. `prune` applies the
retention flags of pretrain_gpt.py after verifying the newest checkpoint; it refuses the folder of a running run. Memory
does not grow with the size of the checkpoints. The exit code is 74 if a checkpoint is damaged or a folder cannot be
used.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron import log, process_exit
from megatron.config import ConfigSection, PathUse, flag, parse_flags
from megatron.errors import CheckpointError, ConfigError, ExitCode, LaunchError, StorageError, printable

if TYPE_CHECKING:
    from megatron.checkpoint.retention.summaries import ManifestSummary
    from trident.checkpoints.listing import ListedCheckpoint


@dataclass(frozen=True)
class FolderFlags(ConfigSection):
    """Flags of all commands."""

    load: str = flag(
        help="folder of checkpoints, or one checkpoint; also accepted as a positional argument", path=PathUse.FOLDER
    )


@dataclass(frozen=True)
class ListFlags(FolderFlags):
    """Flags of `list`."""

    json: bool = flag(False, "print one JSON object")


@dataclass(frozen=True)
class InspectFlags(FolderFlags):
    """Flags of `inspect`."""

    load: str = flag(
        help="folder of checkpoints (the newest is used), or one checkpoint; also accepted as a positional argument",
        path=PathUse.FOLDER,
    )
    compare: str | None = flag(None, "another checkpoint to compare with", path=PathUse.FOLDER)
    tensors: tuple[str, ...] = flag(
        (), "patterns of tensor names, such as 'decoder.layers.0.*'; all if unset", nargs="+"
    )
    moments: bool = flag(False, "also read optimizer moments")
    manifest_only: bool = flag(False, "print names, shapes and sizes without reading tensors")
    verify: bool = flag(False, "first verify all digests")
    json: bool = flag(False, "print one JSON object")

    def problems(self) -> Iterator[str]:
        """Yields violated rules between the flags."""
        for name in ("compare", "moments"):
            if self.manifest_only and getattr(self, name):
                yield f"--manifest-only cannot be combined with --{name}, which reads tensors. Drop one of them."


@dataclass(frozen=True)
class VerifyFlags(FolderFlags):
    """Flags of `verify`."""

    all: bool = flag(False, "verify all checkpoints, not only the newest")
    steps: tuple[int, ...] = flag((), "verify the checkpoints of these steps", nargs="+", at_least=0)

    def problems(self) -> Iterator[str]:
        """Yields violated rules between the flags."""
        if self.all and self.steps:
            yield "--all cannot be combined with --steps. Drop one of them."


@dataclass(frozen=True)
class PruneFlags(FolderFlags):
    """Flags of `prune`."""

    keep_last: int = flag(help="number of newest checkpoints to keep", at_least=1)
    keep_every: int | None = flag(None, "also keep checkpoints whose step is a multiple of this", at_least=1)
    keep_best: bool = flag(False, "also keep the checkpoint with the lowest validation loss")
    dry_run: bool = flag(False, "only print what would be deleted")


@dataclass(frozen=True)
class CopyFlags(FolderFlags):
    """Flags of `copy`."""

    save: str = flag(help="destination folder; also accepted as a positional argument", path=PathUse.FOLDER)
    step: int | None = flag(None, "step of the checkpoint to copy; the newest if unset", at_least=0)


@dataclass(frozen=True)
class AverageFlags(ConfigSection):
    """Flags of `average`."""

    load: tuple[str, ...] = flag(
        help="checkpoints, or folders whose newest checkpoint is used; also accepted as positional arguments",
        nargs="+",
        path=PathUse.FOLDER,
    )
    save: str = flag(help="folder for the checkpoint; it must not contain one", path=PathUse.FOLDER)
    last: int | None = flag(None, "average this many of the newest checkpoints of one folder", at_least=2)
    coefficients: tuple[float, ...] = flag(
        (), "relative weights of the checkpoints, in the same order; all equal if unset",
        nargs="+", above=0,
    )  # fmt: skip

    def problems(self) -> Iterator[str]:
        """Yields violated rules between the flags."""
        if self.last is not None and len(self.load) != 1:
            yield f"--last {self.last} requires one folder of checkpoints, got {len(self.load)}."
        if self.last is None and len(self.load) == 1:
            yield f"averaging requires at least two checkpoints, got only {self.load[0]}. Give more, or use --last N."
        count = self.last or len(self.load)
        if self.coefficients and len(self.coefficients) != count:
            yield f"--coefficients has {len(self.coefficients)} values for {count} checkpoints. Give one for each."


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns the exit code."""
    command, *arguments = (sys.argv[1:] if argv is None else argv) or [""]
    if command in ("-h", "--help"):
        log.line((__doc__ or "").strip() + f"\n\nCommands: {', '.join(_COMMANDS)}; each has --help.")
        return ExitCode.DONE
    if command not in _COMMANDS:
        raise ConfigError(f"checkpoints.py: unknown command {printable(command)}. Use one of: {', '.join(_COMMANDS)}.")
    section, run = _COMMANDS[command]
    if section is CopyFlags and len(arguments) > 1 and not any(text.startswith("-") for text in arguments[:2]):
        arguments.insert(1, "--save")
    return run(parse_flags(section, arguments, f"checkpoints.py {command}", __doc__ or "", positional="--load"))


def _list(flags: ListFlags) -> int:
    from megatron.checkpoint import find
    from megatron.checkpoint.storage import DISK
    from trident.checkpoints.listing import entries_in
    from trident.checkpoints.summary import table

    directory = Path(flags.load)
    entries = entries_in(directory, DISK)
    if not entries:
        find(directory)  # raises for a checkpoint of another program
    if flags.json:
        content = {"directory": str(directory), "checkpoints": [entry.to_json() for entry in entries]}
        log.line(json.dumps(content))
        return ExitCode.DONE
    if not entries:
        log.line(f"{directory} holds no checkpoint")
        return ExitCode.DONE
    heading = ("checkpoint", "state", "layout", "run", "step", "size", "validation loss")
    for line in table(heading, [_row(entry) for entry in entries], texts=4):
        log.line(line)
    for entry in entries:
        if entry.problem:
            log.line(f"{entry.path.name}: {entry.problem}")
    _print_best(entries)
    return ExitCode.DONE


def _print_best(entries: Sequence[ListedCheckpoint]) -> None:
    """Prints the checkpoint with the lowest validation loss, unless it is the newest."""
    known = [entry for entry in entries if entry.summary is not None and not entry.problem]
    rated = [(entry.summary.validation_loss, -entry.step, entry.path) for entry in known if entry.summary is not None]
    losses = [(loss, step, path) for loss, step, path in rated if loss is not None]
    if losses and min(losses)[2] != known[0].path:
        log.line(f"lowest validation loss: {min(losses)[2].name} (--load {min(losses)[2]})")


def _row(entry: ListedCheckpoint) -> tuple[str, ...]:
    from trident.checkpoints.summary import size_text

    known = entry.summary
    size = "" if entry.size_bytes is None else size_text(entry.size_bytes)
    name = printable(entry.path.name, quoted=False)
    if known is None:
        return name, entry.state, "", "", str(entry.step), size, ""
    layout = " ".join(f"{axis} {ranks}" for axis, ranks in known.layout.items())
    loss = "" if known.validation_loss is None else f"{known.validation_loss:.6g}"
    return name, entry.state, layout, known.run_id[:8], str(entry.step), size, loss


def _inspect(flags: InspectFlags) -> int:
    from megatron.checkpoint import verify
    from megatron.checkpoint.recovery import OpenCheckpoint
    from trident.checkpoints.differences import compare, comparison_lines
    from trident.checkpoints.summary import summarize, summary_lines

    paths = [Path(path) for path in (flags.load, flags.compare) if path is not None]
    opened = [OpenCheckpoint.newest(path) for path in paths]
    if flags.verify:
        for checkpoint in opened:
            verify(checkpoint.folder)
    if len(opened) > 1:
        comparison = compare(opened[0], opened[1], flags.tensors, with_moments=flags.moments)
        _show(flags, comparison.to_json(), comparison_lines(comparison))
        return ExitCode.DONE if comparison.holds_same_tensors else ExitCode.NUMERICS
    summary = summarize(opened[0], flags.tensors, with_values=not flags.manifest_only, with_moments=flags.moments)
    _show(flags, summary.to_json(), summary_lines(summary))
    return ExitCode.DONE


def _show(flags: InspectFlags, value: object, lines: Iterator[str]) -> None:
    for line in [json.dumps(value, ensure_ascii=False)] if flags.json else lines:
        log.line(line)


def _verify(flags: VerifyFlags) -> int:
    from megatron.checkpoint import verify
    from trident.checkpoints.summary import size_text

    paths = _checkpoints(Path(flags.load), flags.steps)
    wrong = 0
    for path in paths if flags.all or flags.steps else paths[:1]:
        try:
            manifest = verify(path)
        except (CheckpointError, StorageError) as failure:
            log.error(str(failure))
            wrong += 1
            continue
        size = size_text(sum(file.size_bytes for file in manifest.files))
        log.line(f"{path} is valid: verified all {len(manifest.files)} files ({size})")
    return ExitCode.STORAGE if wrong else ExitCode.DONE


def _average(flags: AverageFlags) -> int:
    from megatron.checkpoint.recovery import OpenCheckpoint
    from trident.checkpoints.average import WeightedCheckpoint, average

    opened = [OpenCheckpoint.newest(path) for path in _folders(flags)]
    coefficients = flags.coefficients or (1.0,) * len(opened)
    shares = [WeightedCheckpoint(checkpoint, share) for checkpoint, share in zip(opened, coefficients, strict=True)]
    averaged = average(shares, Path(flags.save))
    log.line(f"wrote the mean of {len(shares)} checkpoints to {averaged}")
    return 0


def _folders(flags: AverageFlags) -> list[Path]:
    """The folders to average; with `--last`, from the oldest to the newest.

    Raises:
        CheckpointError: the folder holds fewer checkpoints than requested.
    """
    from megatron.checkpoint import find

    if flags.last is None:
        return [Path(path) for path in flags.load]
    candidates = find(Path(flags.load[0]))
    if len(candidates) < flags.last:
        raise CheckpointError(
            f"--last {flags.last}: {flags.load[0]} holds {len(candidates)} checkpoints. Use a smaller number, or list "
            "them."
        )
    return [candidate.path for candidate in reversed(candidates[: flags.last])]


def _prune(flags: PruneFlags) -> int:
    from megatron.checkpoint.publish import sweep
    from megatron.checkpoint.retention.pruning import Pruner, RetentionRules
    from megatron.checkpoint.storage import DISK
    from megatron.train.restarts.identity import identity_of
    from trident.checkpoints.listing import entries_in

    directory = Path(flags.load)
    if directory in _checkpoints(directory):
        raise CheckpointError(f"{directory} is a checkpoint. Give the folder that contains it.")
    identity = identity_of(directory)
    run_id = "" if identity is None else identity.run_id
    retention = Pruner(RetentionRules(flags.keep_last, flags.keep_every, flags.keep_best), DISK)
    if flags.dry_run:
        expired = retention.plan(retention.newest_in(directory, run_id))
        leftovers = [entry for entry in entries_in(directory, DISK) if entry.is_leftover]
        for entry in leftovers:
            log.line(f"would clean up {entry.path} ({entry.state})")
        _print_summaries("would delete", expired)
        return ExitCode.DONE
    with _locked(directory, "nothing was deleted"):
        sweep(directory, DISK)
        newest = retention.newest_in(directory, run_id)
        expired = retention.plan(newest)
        deleted = retention.apply(newest.path)
    _print_summaries("deleted", [summary for summary in expired if summary.path in deleted])
    return ExitCode.DONE if len(deleted) == len(expired) else ExitCode.STORAGE


def _print_summaries(verb: str, summaries: Sequence[ManifestSummary]) -> None:
    from trident.checkpoints.summary import size_text

    for summary in summaries:
        log.line(f"{verb} {summary.path} ({size_text(summary.size_bytes)})")
    if not summaries:
        log.line("every checkpoint is kept")


def _copy(flags: CopyFlags) -> int:
    from megatron.checkpoint import read_record
    from megatron.checkpoint.retention.copying import copy_checkpoint
    from megatron.parallel.mesh import ParallelMesh
    from megatron.train.restarts.identity import RunIdentity, identity_of, read_identity, write_identity

    directory, target, mesh = Path(flags.load), Path(flags.save), ParallelMesh.single()
    source = _checkpoints(directory, () if flags.step is None else (flags.step,))[0]
    identity, folder_identity = RunIdentity.from_json(read_record(source)), read_identity(source.parent)
    if identity is None or (folder_identity is not None and folder_identity.run_id == identity.run_id):
        identity = folder_identity
    with _locked(target, "nothing was copied"):
        target_identity = identity_of(target)
        if target_identity is not None and identity is not None and target_identity.run_id != identity.run_id:
            raise CheckpointError(
                f"{target} holds checkpoints of run {target_identity.run_id}, but {source} is of run "
                f"{identity.run_id}: their steps would be mixed in one folder. Copy it to another folder."
            )
        made = copy_checkpoint(source, target, mesh, flag="--save")
        if identity is not None and target_identity is None:
            write_identity(target, identity)
    log.line(f"{source} is in {target} already" if made is None else f"copied {source} to {made}")
    return ExitCode.DONE


@contextlib.contextmanager
def _locked(directory: Path, refusal: str) -> Iterator[None]:
    """Locks a folder against runs that save to it. Object stores have no lock, and no run saves to them.

    Raises:
        LaunchError: a run is using the folder.
    """
    from megatron.checkpoint import CheckpointLock
    from megatron.config.flags.paths import is_address
    from megatron.parallel.mesh import ParallelMesh

    if is_address(directory):
        yield
        return
    lock = CheckpointLock(directory, ParallelMesh.single())
    try:
        lock.acquire()
    except LaunchError as failure:
        raise LaunchError(f"{refusal}: {failure}") from failure
    try:
        yield
    finally:
        lock.release()


def _checkpoints(directory: Path, steps: Sequence[int] = ()) -> list[Path]:
    """The checkpoints of a folder, newest first, or the checkpoints of the given steps in their order.

    Raises:
        CheckpointError: there is none, or none of a step.
    """
    from megatron.checkpoint import find

    candidates = find(directory)
    if not candidates:
        raise CheckpointError(f"no checkpoint in {directory}. Use the folder of a run's checkpoints.")
    if not steps:
        return [candidate.path for candidate in candidates]
    by_step = {candidate.step: candidate.path for candidate in reversed(candidates)}
    missing = [str(step) for step in steps if step not in by_step]
    if missing:
        raise CheckpointError(
            f"{directory} has no checkpoint of step {', '.join(missing)}. It has these steps: "
            f"{', '.join(map(str, sorted(by_step)))}."
        )
    return [by_step[step] for step in steps]


_COMMANDS: dict[str, tuple[type[ConfigSection], Callable[[Any], int]]] = {
    "list": (ListFlags, _list),
    "inspect": (InspectFlags, _inspect),
    "verify": (VerifyFlags, _verify),
    "copy": (CopyFlags, _copy),
    "average": (AverageFlags, _average),
    "prune": (PruneFlags, _prune),
}


if __name__ == "__main__":
    process_exit.exit_with(main)
