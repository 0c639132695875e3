"""Checkpoints: loading, saving and retention, and runs that require weights."""

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
        yield f"--load-tag {loading.load_tag} contradicts --ckpt-step {loading.ckpt_step}. Drop one of them."
    if loading.load_step is not None and loading.load is None:
        yield f"--ckpt-step {loading.load_step} requires --load, the folder of the checkpoint."
    if loading.from_scratch and loading.finetune:
        yield "--from-scratch cannot be combined with --finetune: it loads no checkpoint. Drop one of them."
    if loading.exit_on_missing_checkpoint and loading.load is None:
        yield "--exit-on-missing-checkpoint requires --load, the folder that must hold a checkpoint."


@run_rule
def _saving(run: RunSections) -> Iterator[str]:
    saving = run.saving
    if saving.save_secondary_per_node and (saving.save_secondary is None or is_address(saving.save_secondary)):
        yield (
            "--save-secondary-per-node requires --save-secondary with a node-local folder, not "
            f"{saving.save_secondary}. Use for example --save-secondary /local/checkpoints."
        )
    if saving.keep_last is None:
        for name, is_set in (("--keep-every", saving.keep_every is not None), ("--keep-best", saving.keep_best)):
            if is_set:
                yield (
                    f"{name} requires --keep-last, without which no checkpoint is deleted. Add it, for example "
                    f"--keep-last 3, or drop {name}."
                )


@request_rule
def _weights(run: RunSections) -> Iterator[str]:
    loading, evaluation = run.loading, run.evaluation
    teacher, save = run.distillation.load_teacher, run.saving.save
    if teacher is not None and save is not None and os.path.realpath(teacher) == os.path.realpath(save):
        yield (
            f"--load-teacher {teacher} is the folder this run saves to (--save {save}): after a resume, the newest "
            "checkpoint, that of the student, would be the teacher. Save to another folder, or select one of the "
            "teacher's checkpoints."
        )
    if loading.from_scratch and evaluation.eval_only:
        yield "--from-scratch cannot be combined with --eval-only, which evaluates a checkpoint. Drop one of them."
    if loading.load is None:
        requested = {
            "--eval-only": evaluation.eval_only,
            "--finetune": loading.finetune and not loading.reset_iteration,
            "--reset-iteration": loading.reset_iteration,
        }
        for name, is_set in requested.items():
            if is_set:
                yield f"{name} requires --load, the folder of the checkpoint with the weights."


@notice
def _last_checkpoint_only(run: RunSections) -> Iterator[str]:
    saving, planning = run.saving, run.planning
    if run.evaluation.eval_only or planning.plan_only or planning.dry_run_ranks:
        return
    if saving.save is not None and saving.save_interval is None and not saving.save_each_epoch:
        yield (
            f"--save {saving.save} without --save-interval: a checkpoint is only written at the end, or when the run "
            "is stopped. Set the steps between checkpoints, for example --save-interval 500."
        )
