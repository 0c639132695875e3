"""Restores a run from a checkpoint: finds it, checks it, and loads its tensors into the engine.

The identity of the run, and its --save folder, are checked before anything is loaded (see restarts/identity.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron import log
from megatron.checkpoint import LoadedCheckpoint, find, folder_of_step, load_newest, newest_record
from megatron.checkpoint.manifest import MANIFEST_NAME, folder_step, read_manifest
from megatron.checkpoint.record import Progress, Record
from megatron.checkpoint.recovery import only_of_run
from megatron.checkpoint.retention.node_copies import Nodes, collect
from megatron.checkpoint.storage import DISK
from megatron.config import LoadingConfig, OptimConfig, RunConfig
from megatron.config.flags.paths import is_address
from megatron.config.schedule import is_done
from megatron.config.sections.optimizers import AVERAGING
from megatron.config.sections.reporting import MEGATRON_STYLE
from megatron.engine.engine import Engine
from megatron.engine.state import pieces_to_load, refresh_weights
from megatron.errors import CheckpointError, ConfigError, StorageError
from megatron.parallel.agreement import run_on_all, run_on_first
from megatron.parallel.mesh import ParallelMesh
from megatron.tokenizers.record import check_same_tokenizer
from megatron.tokenizers.tokenizer import Tokenizer
from megatron.train.restarts.identity import (
    RunIdentity,
    base_of,
    base_text,
    checkpoints_in,
    holds_checkpoint_of,
    identity_of,
    is_same_base,
    is_same_folder,
    nothing,
    read_identity,
    reject_foreign_save,
    write_identity,
)

_NO_NEWER = (
    "no newer checkpoint. If later ones were deleted there to go back, the copies undo that: stop the run, and delete "
    "the later copies, too, or use --ckpt-step, another --save and another --save-secondary."
)


@dataclass(frozen=True)
class SavedRun:
    """The checkpoint that a run resumes from: its record and location. Its tensors are not verified yet.

    Attributes:
        folder_run_id: the run that its folder belongs to; empty if irrelevant.
        secondary: the folder of copies, which is also searched.
    """

    record: Record
    found: LoadedCheckpoint
    folder_run_id: str = ""
    secondary: Path | None = None


@dataclass(frozen=True)
class Start:
    """The start of a run.

    Attributes:
        config: as requested, but a fine-tuning or fork that has saved before resumes from its own folder.
        saved: the checkpoint it resumes from, or loads weights from; None for a new run.
        identity: the identity of the run.
        is_restart: the run has been started before, even if it saved nothing.
    """

    config: RunConfig
    saved: SavedRun | None
    identity: RunIdentity
    is_restart: bool = False


def find_start(config: RunConfig, mesh: ParallelMesh) -> Start:
    """Finds the checkpoint and the identity of the run, and writes it into the --save folder; collective over the mesh.

    Raises:
        CheckpointError: see `find_saved_run`; or the --save or --save-secondary folder belongs to another run.
    """
    copies = config.saving.save_secondary
    secondary = None if copies is None else Path(copies)
    saved = find_saved_run(config, mesh, None if config.loading.finetune else secondary)
    base = saved
    # One rank resolves the paths for all: links may have different targets on other nodes, and collectives follow.
    identity, continues = run_on_first(mesh, lambda: _branch(config, base, secondary))
    if continues:
        config = _resume_from_save(config)
        saved = find_saved_run(config, mesh, secondary)
    identity = identity or run_on_first(mesh, lambda: _identity(config, saved).to_json())
    load = config.loading.load
    if saved is None and load is not None and not config.loading.from_scratch and mesh.world.rank == 0:
        _log_missing_checkpoint(config, Path(load).absolute())
    if saved is not None and saved.found.path.parent == secondary and mesh.world.rank == 0:
        log.warning(f"resuming from the copy {saved.found.path}: --load {load} has {_NO_NEWER}")
    settled = RunIdentity.from_json(identity) or RunIdentity()
    if secondary is not None and not config.evaluation.eval_only:
        is_first = Nodes.of(mesh).is_first if config.saving.save_secondary_per_node else mesh.control.rank == 0
        run_on_all(mesh, lambda: _claim_secondary(secondary, settled, config, saved) if is_first else None)

    def write() -> bool:
        if config.saving.save is None:
            return False
        is_known = read_identity(Path(config.saving.save)) == settled
        if not is_known:
            write_identity(Path(config.saving.save), settled)
        return is_known

    return Start(config, saved, settled, not config.evaluation.eval_only and run_on_first(mesh, write))


def find_saved_run(config: RunConfig, mesh: ParallelMesh, secondary: Path | None = None) -> SavedRun | None:
    """The checkpoint this run resumes from; None for a new run; collective over the mesh.

    Args:
        secondary: a folder of copies; also searched unless --load is a single checkpoint.

    Raises:
        CheckpointError: `--load` has no usable checkpoint although one is required, or `--save` has checkpoints of
            another run.
    """
    loading, saving = config.loading, config.saving
    if loading.from_scratch:
        return None
    if loading.load is None:
        if saving.save is not None:
            run_on_first(mesh, lambda: reject_foreign_save(str(saving.save)))
        return None
    source = _source(config, mesh)
    if loading.load_step is not None or run_on_first(mesh, lambda: _is_checkpoint(source)):
        secondary = None
    also = () if secondary is None else (secondary,)
    folder_run_id = run_on_first(mesh, lambda: next(filter(None, map(_run_id_of_folder, (source, *also))), ""))
    if secondary is not None and saving.save_secondary_per_node:
        newest = _newest_on_nodes(source, secondary, folder_run_id, mesh)
        secondary = None
    else:
        newest = newest_record(source, mesh, check=only_of_run(folder_run_id, source), also=also)
    if newest is not None:
        return SavedRun(Record.from_json(newest.record, newest.path), newest, folder_run_id, secondary)
    for flag, is_set in (("--eval-only", config.evaluation.eval_only), ("--finetune", loading.finetune)):
        if is_set:
            raise CheckpointError(
                f"--load {loading.load} has no checkpoint, but {flag} needs its weights. Use the checkpoint folder of "
                "an earlier run."
            )
    if loading.exit_on_missing_checkpoint:
        raise CheckpointError(
            f"--load {loading.load} has no checkpoint, but --exit-on-missing-checkpoint is set. Use the checkpoint "
            "folder of an earlier run."
        )
    return None


def _newest_on_nodes(source: Path, copies: Path, folder_run_id: str, mesh: ParallelMesh) -> LoadedCheckpoint | None:
    """The newest checkpoint of a folder, after restoring a newer one from the nodes' copies; collective."""
    check = only_of_run(folder_run_id, source)
    newest, damage = None, None
    try:
        newest = newest_record(source, mesh, check=check)
    except CheckpointError as failure:
        damage = failure
    after_step = -1 if newest is None else folder_step(newest.path.name) or 0
    if collect(copies, source, mesh, after_step=after_step, check=check) is not None:
        if mesh.world.rank == 0:
            log.warning(f"restored a checkpoint from the nodes' copies: --load {source} had {_NO_NEWER}")
        return newest_record(source, mesh, check=check)
    if damage is not None:
        raise damage
    return newest


def _log_missing_checkpoint(config: RunConfig, folder: Path) -> None:
    """Logs that a run starts anew; a warning, unless it will save there itself, as the first start of a run does."""
    load, save = str(config.loading.load), config.saving.save
    is_upstreams = config.report.log_style == MEGATRON_STYLE  # then scripts look for upstream's words
    upstream = f" (Unable to find latest file at {folder / 'latest'})" if is_upstreams and not is_address(load) else ""
    if save is not None and Path(save).absolute() == folder:
        log.info(f"no checkpoint in {load} yet: starting at iteration 0{upstream}")
        return
    parent = next((parent for parent in folder.parents if parent.is_dir()), folder.parent)
    state = "exists but has no checkpoint" if folder.is_dir() else f"does not exist (nearest existing folder: {parent})"
    state, target = f": the folder {folder} {state}", "path"
    if is_address(load):
        state, target = " has no checkpoint", "address"
    log.warning(
        f"--load {load}{state}. The run starts at iteration 0{upstream}. If it should resume from a checkpoint, stop "
        f"it and correct the {target}; --exit-on-missing-checkpoint makes this an error."
    )


def check_tokenizer(loading: LoadingConfig, record: Record, tokenizer: Tokenizer) -> None:
    """Checks that the tokenizer is the one the checkpoint was trained with.

    Raises:
        CheckpointError: it is not.
    """
    check_same_tokenizer(f"the checkpoint in {loading.load} was trained", record.tokenizer, tokenizer, CheckpointError)


def load_tensors(config: RunConfig, engine: Engine, saved: SavedRun | None) -> tuple[Record | None, Progress]:
    """Loads weights and optimizer state of the newest valid checkpoint; collective over the mesh.

    Without the state of an optimizer that averages its iterates, the average becomes the weights.

    Returns:
        the record of the loaded checkpoint (an older one if `saved` is damaged) and the progress at the start of
        training; None and iteration 0 without a checkpoint.

    Raises:
        CheckpointError: it has no optimizer state although that is required, does not match, or was removed.
    """
    loading = config.loading
    if saved is None:
        return None, Progress()
    with_optimizer = loading.takes_optimizer_state
    if with_optimizer and not saved.record.has_optimizer_state:
        raise CheckpointError(
            f"the checkpoint in {loading.load} was saved with --no-save-optim and has no optimizer state. Resume "
            "with --no-load-optim (the moments start from zero) or with --finetune."
        )
    source = _source(config, engine.mesh)
    optimizer = _saved_optim(saved.record).get("optimizer")
    starts_from_averages = not with_optimizer and optimizer in AVERAGING
    loaded = load_newest(
        source,
        lambda: pieces_to_load(engine, with_optimizer=with_optimizer, starts_from_averages=starts_from_averages),
        engine.mesh,
        known=saved.found,
        check=only_of_run(saved.folder_run_id, source),
        also=() if saved.secondary is None else (saved.secondary,),
    )
    if loaded is None:
        raise CheckpointError(f"the checkpoint in {loading.load} was removed while it was being loaded. Start again.")
    record = Record.from_json(loaded.record, loaded.path)
    updates, weight = (record.optimizer_updates, record.averaging_weight) if with_optimizer else (None, 0.0)
    restarts = loading.finetune and not with_optimizer
    refresh_weights(engine, updates, averaging_weight=weight, restarts_averages=restarts)
    if with_optimizer:
        engine.view.restore_loss_scale(record.loss_scale)
    if starts_from_averages:
        log.info(f"training starts from the average of the iterates in {loaded.path} (--optimizer {optimizer})")
    if loading.finetune:
        what = "weights and optimizer state" if with_optimizer else "weights"
        log.info(f"finetuning the {what} of {loaded.path} from iteration 0")
        return record, Progress()
    progress = record.progress
    log.info(
        f"resumed {loaded.path}: iteration {progress.step}, {progress.consumed_samples} samples, "
        f"{progress.consumed_tokens} tokens consumed"
    )
    _warn_of_dropped_average(engine, record)
    return record, progress


def _warn_of_dropped_average(engine: Engine, record: Record) -> None:
    """Warns of an average of the weights in a checkpoint that the run does not continue."""
    decay = _saved_optim(record).get("ema_decay")
    if decay is not None and engine.averages is None and engine.mesh.world.rank == 0:
        log.warning(
            f"the checkpoint has an average of the weights (--ema-decay {decay}), which this run drops: evaluations "
            f"and checkpoints no longer use it. To keep it, add --ema-decay {decay}."
        )


def _saved_optim(record: Record) -> Mapping[str, Any]:
    """The optimizer section of the run that saved a checkpoint."""
    optim = record.config.get("optim")
    return optim if isinstance(optim, Mapping) else {}


def warn_if_done(optim: OptimConfig, progress: Progress) -> None:
    """Warns that a resumed run has nothing left to train."""
    if is_done(optim, progress.step, progress.consumed_samples, (), progress.consumed_tokens):
        log.shared_warning(
            f"the checkpoint is at iteration {progress.step} ({progress.consumed_samples} samples) and the "
            f"run ends at iteration {optim.train_iters}: nothing is left to train. Raise --train-iters, "
            f"--train-samples or --train-tokens to continue."
        )


def _source(config: RunConfig, mesh: ParallelMesh) -> Path:
    """The folder to search for checkpoints: the --load folder, or one step in it; collective over the mesh.

    Raises:
        CheckpointError: there is no checkpoint of the step, or --save has later ones, and the next run would resume
            from them.
    """
    loading, saving = config.loading, config.saving
    directory, step = Path(str(loading.load)), loading.load_step
    if step is None:
        return directory

    def choose() -> str:
        folder = folder_of_step(directory, step)
        later = [each.step for each in find(directory)] if is_same_folder(saving.save, directory) else []
        if later and later[0] > step:
            raise CheckpointError(
                f"--ckpt-step {step} is older than the checkpoint of step {later[0]} in --save {saving.save}, from "
                "which the next run would resume. Use another --save folder."
            )
        return str(folder)

    return Path(run_on_first(mesh, choose))


def _is_checkpoint(source: Path) -> bool:
    try:
        return DISK.exists(source / MANIFEST_NAME)
    except OSError as failure:
        raise StorageError(
            f"cannot read {source}: {failure.strerror or failure}. Check it and start again."
        ) from failure


def _run_id_of_folder(source: Path) -> str:
    """The run that a folder belongs to; empty for the folder of a single checkpoint, which is always accepted."""
    identity = None if _is_checkpoint(source) else identity_of(source)
    return "" if identity is None else identity.run_id


def _claim_secondary(folder: Path, identity: RunIdentity, config: RunConfig, saved: SavedRun | None) -> None:
    """Writes the run's identity into the folder of copies.

    Raises:
        ConfigError: it is the --save folder.
        CheckpointError: it has checkpoints of another run, or later ones than the one selected by --load.
    """
    saving = config.saving
    if is_same_folder(saving.save, folder):
        raise ConfigError(
            f"--save-secondary {folder} is the folder of --save {saving.save}, so there would be no second copy. Use "
            "another folder, preferably on another disk."
        )
    candidates, owner = checkpoints_in(folder), identity_of(folder)
    if candidates and owner is not None and owner.run_id != identity.run_id and not config.loading.from_scratch:
        raise CheckpointError(
            f"--save-secondary {folder} has checkpoints of {owner} (newest: iteration {candidates[0].step}), but this "
            f"is {identity}: their steps would be mixed in one folder. Use another --save-secondary folder."
        )
    newest = candidates[0].step if candidates else -1
    if saved is not None and _names_one(config, saved) and newest > saved.record.progress.step:
        raise CheckpointError(
            f"--save-secondary {folder} has a copy of iteration {newest}, which the next run would resume from, but "
            f"this run goes back to iteration {saved.record.progress.step}. Use another --save-secondary folder."
        )
    if read_identity(folder) != identity:
        write_identity(folder, identity)


def _identity(config: RunConfig, saved: SavedRun | None) -> RunIdentity:
    """The identity of a run that starts from scratch or resumes from `saved`.

    Raises:
        CheckpointError: --save has checkpoints of another run.
    """
    loading, saving = config.loading, config.saving
    save = None if saving.save is None else Path(saving.save)
    if saved is None:
        # A run that has not saved yet keeps its identity, since its earlier starts count.
        owner = None if save is None else read_identity(save)
        return RunIdentity.new() if owner is None or owner.finetuned_from or owner.forked_from else owner
    record = saved.record
    if save is None or config.evaluation.eval_only:
        return RunIdentity.from_json(record.to_json()) or RunIdentity.new()
    candidates, owner = checkpoints_in(save), identity_of(save)
    if owner is not None and candidates and record.run_id and record.run_id != owner.run_id:
        resumed = RunIdentity.from_json(record.to_json())
        raise CheckpointError(
            f"--save {save} has checkpoints of {owner} (newest: iteration {candidates[0].step}), but --load "
            f"{loading.load} resumes {resumed}: their steps would be mixed in one folder. Use another --save folder."
        )
    return RunIdentity.from_json(record.to_json()) or owner or RunIdentity.new()


def _names_one(config: RunConfig, saved: SavedRun) -> bool:
    """True if the flags select a specific checkpoint, not the newest one of a folder."""
    return config.loading.load_step is not None or saved.found.path == Path(str(config.loading.load))


def _is_branch(config: RunConfig, base: SavedRun | None) -> bool:
    """True if the run is not the run of --load: a fine-tuning; a fork, which starts from a specific checkpoint and
    saves elsewhere; or a run that starts at iteration 0 while --save may have checkpoints.
    """
    loading, save = config.loading, config.saving.save
    if loading.from_scratch or (loading.finetune and base is not None):
        return True
    if save is None or config.evaluation.eval_only or loading.load is None:
        return False
    if base is not None and not _names_one(config, base):
        return False
    return not is_same_folder(save, loading.load if base is None else base.found.path.parent)


def _has_gone_on(config: RunConfig, saved: SavedRun) -> bool:
    """True if --save is not the --load folder and has later checkpoints of the same run, from the same command.

    Raises:
        CheckpointError: --load selects one of the checkpoints in --save, and there are later ones.
    """
    save = config.saving.save
    if save is None or config.evaluation.eval_only or is_same_folder(save, config.loading.load):
        return False
    step = saved.record.progress.step - (saved.found.path.parent == saved.secondary)  # not a copy of what is there
    later = [each for each in checkpoints_in(Path(save)) if each.step > step]
    owner = identity_of(Path(save)) if later else None
    is_same = owner is not None and owner.run_id == saved.record.run_id
    if is_same and _names_one(config, saved):
        raise CheckpointError(
            f"--load {config.loading.load} is older than the checkpoint of step {later[0].step} in --save {save}, from "
            f"which the next run would resume. Use another --save folder, or load the newest checkpoint with "
            f"--load {save}."
        )
    return is_same


def _branch(config: RunConfig, base: SavedRun | None, secondary: Path | None) -> tuple[dict[str, Any] | None, bool]:
    """The identity, as JSON, of a branch (see `_is_branch`), else None; and True if the run resumes from --save or
    --save-secondary, because it has saved before.

    Raises:
        CheckpointError: --save is the folder of the base, or has checkpoints of another run.
    """
    loading, saving = config.loading, config.saving
    if not _is_branch(config, base):
        return None, base is not None and _has_gone_on(config, base)
    if base is None:
        taken = nothing("--from-scratch" if loading.from_scratch else f"--load {loading.load}")
    else:
        taken = base_of(base.record, base.found.manifest or read_manifest(base.found.path))
    earlier = None if base is None else base.record.finetuned_from
    new = RunIdentity.new(taken) if loading.finetune else RunIdentity.new(earlier, taken)
    if saving.save is None or config.evaluation.eval_only:
        return new.to_json(), False
    save = Path(saving.save)
    if base is not None and any(is_same_folder(save, folder) for folder in (loading.load, base.found.path.parent)):
        raise CheckpointError(
            f"--finetune with --load {loading.load} and --save {save}: the steps of the fine-tuning would be mixed "
            "with the steps of its base run. Use another --save folder; to resume the base run, drop --finetune."
        )
    of_any_step = base is not None and loading.load_step is None and base.found.path != Path(str(loading.load))

    def is_same_run(owner: RunIdentity | None) -> bool:
        started_from = {} if owner is None else owner.finetuned_from if loading.finetune else owner.forked_from
        return is_same_base(started_from, taken, at_any_step=of_any_step)

    candidates, owner = checkpoints_in(save), identity_of(save)
    if base is None and not loading.from_scratch and not is_same_run(owner):
        reject_foreign_save(str(save), f"--load {loading.load} has none")
    if candidates and base is not None and not is_same_run(owner):
        branch, flag = ("fine-tuning", "--finetune") if loading.finetune else ("fork", "--ckpt-step")
        raise CheckpointError(
            f"--save {save} has checkpoints of {owner or RunIdentity()} (newest: iteration {candidates[0].step}), but "
            f"this is a {branch} of {base_text(taken)} (--load {loading.load}): their steps would be mixed in one "
            f"folder. Use another --save folder, or resume the existing run with --load {save} and without {flag}."
        )
    if not candidates and secondary is not None:  # the --save folder may be lost
        copied = identity_of(secondary)
        if is_same_run(copied):
            candidates, owner = checkpoints_in(secondary), copied
    if owner is None or not is_same_run(owner):
        return new.to_json(), False
    # Earlier checkpoints in the folder of a run that started from scratch do not belong to it.
    return owner.to_json(), holds_checkpoint_of(owner.run_id, candidates)


def _resume_from_save(config: RunConfig) -> RunConfig:
    """The flags for resuming a run that has saved before, without those that select its base."""
    loading, save = config.loading, config.saving.save
    ignored = "at iteration 0 (--from-scratch)" if loading.from_scratch else f"from --load {loading.load}"
    log.info(
        f"this run has saved before and resumes from --save {save}, not {ignored}. To start over, use another --save."
    )
    switches = dict.fromkeys(("finetune", "reset_iteration", "no_load_optim", "from_scratch"), False)
    changes: Mapping[str, Any] = {**switches, "ckpt_step": None, "load_tag": None}
    return dataclasses.replace(config, loading=dataclasses.replace(loading, load=save, **changes))
