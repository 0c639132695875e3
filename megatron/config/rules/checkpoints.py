"""Checkpoints: which one a run starts from, which it writes and keeps, and runs that take weights and do not train."""

from __future__ import annotations

import os
from collections.abc import Iterator

from megatron.config.flags.paths import is_address
from megatron.config.rules.rule import notice, request_rule, run_rule
from megatron.config.run_sections import RunSections


@run_rule
def _loading(run: RunSections) -> Iterator[str]:
    loading = run.loading
    if loading.load_tag is not None and loading.ckpt_step not in (None, loading.load_step):
        yield f"--load-tag {loading.load_tag} and --ckpt-step {loading.ckpt_step} name two steps. Drop one of them."
    if loading.load_step is not None and loading.load is None:
        yield f"--ckpt-step {loading.load_step} needs --load, the folder that holds that checkpoint."
    if loading.from_scratch and loading.finetune:
        yield "--from-scratch and --finetune contradict each other: the first loads nothing. Drop one of them."
    if loading.exit_on_missing_checkpoint and loading.load is None:
        yield "--exit-on-missing-checkpoint needs --load, the folder that must hold a checkpoint."


@run_rule
def _saving(run: RunSections) -> Iterator[str]:
    saving = run.saving
    if saving.save_secondary_per_node and (saving.save_secondary is None or is_address(saving.save_secondary)):
        yield (
            f"--save-secondary-per-node needs --save-secondary, a folder on the disk of each node, not "
            f"{saving.save_secondary}. Give one, for example --save-secondary /local/checkpoints."
        )
    if saving.keep_last is None:
        for name, is_set in (("--keep-every", saving.keep_every is not None), ("--keep-best", saving.keep_best)):
            if is_set:
                yield (
                    f"{name} says which checkpoints are not deleted, and nothing is deleted without --keep-last. "
                    f"Give --keep-last, for example --keep-last 3, or drop {name}."
                )


@request_rule
def _weights(run: RunSections) -> Iterator[str]:
    loading, evaluation = run.loading, run.evaluation
    teacher, save = run.distillation.load_teacher, run.saving.save
    if teacher is not None and save is not None and os.path.realpath(teacher) == os.path.realpath(save):
        yield (
            f"--load-teacher {teacher} is the folder to which this run saves (--save {save}), so after a resume its "
            "newest checkpoint, the student's own, would be the teacher. Save to another folder, or name one of the "
            "teacher's checkpoints."
        )
    if loading.from_scratch and evaluation.eval_only:
        yield (
            "--from-scratch and --eval-only contradict each other: there would be no weights to evaluate. Drop one "
            "of them."
        )
    if loading.load is None:
        asks = {
            "--eval-only": evaluation.eval_only,
            "--finetune": loading.finetune and not loading.reset_iteration,
            "--reset-iteration": loading.reset_iteration,
        }
        for name, is_asked in asks.items():
            if is_asked:
                yield f"{name} needs --load, the folder of the checkpoint to take the weights from."


@notice
def _last_checkpoint_only(run: RunSections) -> Iterator[str]:
    """A crash would lose everything."""
    saving, planning = run.saving, run.planning
    if run.evaluation.eval_only or planning.plan_only or planning.dry_run_ranks:
        return
    if saving.save is not None and saving.save_interval is None and not saving.save_each_epoch:
        yield (
            f"--save {saving.save} without --save-interval: a checkpoint is written only where the run ends or is "
            "stopped. Give the steps between checkpoints, for example --save-interval 500."
        )
