"""When the run saves, evaluates, reports and stops, and where it writes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass

from megatron.config.flags.fields import flag
from megatron.config.flags.section import ConfigSection
from megatron.errors import ConfigError

_TAG = re.compile(r"(?:global_step|iter_)0*(\d+)")
LOG_STYLES = ("megatron", "jax_lm", "dsgpt2", "all_in_one", "hello_deepspeed")
RUN_FILES = ("megatron", "hello_deepspeed")
_LEVELS = ("debug", "info", "warning", "error", "critical")


@dataclass(frozen=True)
class ControlConfig(ConfigSection):
    """Checkpoints, evaluation, exits and reports."""

    model_preset: str | None = flag(
        None, "a published architecture by name, a file in examples/configs; --config and the command line win"
    )
    config: str | None = flag(None, "JSON or YAML file with flags by name; the command line wins")
    save: str | None = flag(None, "folder checkpoints are written to")
    save_interval: int | None = flag(None, "steps between checkpoints", at_least=1)
    save_each_epoch: bool = flag(False, "also save at the end of each pass of --epochs")
    no_save_optim: bool = flag(False, "leave the optimizer state out of checkpoints")
    load: str | None = flag(None, "folder to resume from")
    ckpt_step: int | None = flag(None, "step of the checkpoint in --load; the newest if unset", at_least=0)
    load_tag: str | None = flag(None, "the same as a name, such as iter_0000500 or global_step500")
    no_load_optim: bool = flag(False, "take the weights of a checkpoint but not its optimizer state")
    finetune: bool = flag(False, "take only the weights of a checkpoint and start at step 0")
    reset_iteration: bool = flag(False, "as --finetune, but with the optimizer state of the checkpoint")
    from_scratch: bool = flag(False, "start at step 0 although --load or --save holds checkpoints")
    exit_on_missing_checkpoint: bool = flag(False, "stop with an error if --load holds no checkpoint")
    log_interval: int = flag(100, "steps between log lines", at_least=1)
    eval_interval: int = flag(1000, "steps between evaluations", at_least=1)
    eval_iters: int = flag(100, "global batches per evaluation; 0 evaluates nothing", at_least=0)
    full_validation: bool = flag(
        False, "evaluate on all validation and test data once, instead of --eval-iters global batches"
    )
    eval_each_epoch: bool = flag(False, "also evaluate at the end of each pass of --epochs")
    eval_tasks: str | None = flag(
        None,
        "YAML or JSON file of tasks (see docs/evaluation.md) that every evaluation also runs; results join the metrics",
    )
    sample_prompts: str | None = flag(
        None,
        "text file with one prompt a line; every evaluation continues them greedily and writes samples.jsonl into the "
        "run folder",
    )
    sample_tokens: int = flag(32, "most new tokens of each sample of --sample-prompts", at_least=1)
    eval_only: bool = flag(False, "evaluate the loaded checkpoint and exit", spelled=("--skip-train",), numeric=True)
    exit_interval: int | None = flag(None, "save and exit when the step is a multiple of this", at_least=1)
    exit_duration_in_mins: int | None = flag(None, "save and exit after this many minutes", at_least=0)
    exit_on_signal: bool = flag(
        True, "on SIGTERM or SIGUSR1 save and exit with code 75", spelled=("--exit-signal-handler",)
    )
    kill_switch_path: str | None = flag(
        None, "save and exit as soon as this file exists", spelled=("--kill-switch-file",)
    )
    skip_train_iteration_range: tuple[str, ...] = flag(
        (),
        "ranges A-B of steps whose data is consumed without training on it; step A is then taken on the data of step "
        "B + 1, unless that is beyond --train-samples or --train-tokens",
        nargs="+",
    )
    run_dir: str | None = flag(
        None,
        "folder of this run's config.json, logs and metrics; with {run} or {experiment} in it, here and in other "
        "folders that becomes a new name",
    )
    run_files: str = flag(
        "megatron",
        "names of the files that describe the source code and the program's flags in the run folder: git.txt and "
        "git.diff, or HelloDeepSpeed's githash.log, gitdiff.log and hparams.json",
        choices=RUN_FILES,
    )
    program_flags: str | None = flag(
        None, "JSON object of the flags of the program that started the run, kept in its folder"
    )
    metrics_file: str | None = flag(None, "JSON-lines file of metrics; metrics.jsonl in the run folder if unset")
    log_path: str | None = flag(None, "folder that also gets the printed flags")
    log_style: str = flag(
        "megatron", "whose lines of steps, evaluations and saves are printed; files are the same", choices=LOG_STYLES
    )
    log_level: str | None = flag(None, "least severe message rank 0 shows", choices=_LEVELS)
    log_level_replica: str | None = flag(
        None,
        "the same for the other ranks",
        choices=_LEVELS,
        ignored="the other ranks show only warnings and errors",
    )
    tensorboard_dir: str | None = flag(None, "folder for TensorBoard scalars; none are written if unset")
    tensorboard_log_interval: int = flag(1, "steps between TensorBoard scalars", at_least=1)
    tensorboard_queue_size: int = flag(1000, "TensorBoard events buffered before they are written", at_least=1)
    log_params_norm: bool = flag(
        False, "log the L2 norm of the weights", ignored="the norm of the weights is not computed yet"
    )
    log_num_zeros_in_grad: bool = flag(
        False, "log the number of zeros in the gradient", ignored="zeros in the gradient are not counted yet"
    )
    log_per_source_loss: bool = flag(False, "log the loss of each source of the training blend as well")
    log_timers_to_tensorboard: bool = flag(False, "write timers to TensorBoard")
    log_batch_size_to_tensorboard: bool = flag(False, "write the batch size to TensorBoard")
    log_learning_rate_to_tensorboard: bool = flag(
        True, "write the learning rate to TensorBoard", spelled=("--no-log-learnig-rate-to-tensorboard",)
    )
    log_loss_scale_to_tensorboard: bool = flag(True, "write the loss scale to TensorBoard")
    log_validation_ppl_to_tensorboard: bool = flag(False, "write the validation perplexity to TensorBoard")
    wandb_project: str = flag("", "Weights & Biases project; nothing is sent if empty")
    wandb_entity: str = flag("", "user or team at Weights & Biases; the default of the account if empty")
    wandb_exp_name: str = flag("", "name of the run at Weights & Biases")
    wandb_save_dir: str = flag("", "folder for Weights & Biases files")

    @property
    def skip_ranges(self) -> tuple[tuple[int, int], ...]:
        """The ranges of steps to skip: 1-based, inclusive, sorted, with overlapping ranges merged."""
        merged: list[tuple[int, int]] = []
        for first, last in sorted(_read_range(text) for text in self.skip_train_iteration_range):
            if merged and first <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(last, merged[-1][1]))
            else:
                merged.append((first, last))
        return tuple(merged)

    @property
    def takes_optimizer_state(self) -> bool:
        """Whether the moments of the checkpoint in --load are taken over with its weights."""
        return not self.no_load_optim and (self.reset_iteration or not self.finetune)

    @property
    def load_step(self) -> int | None:
        """The step of the checkpoint that is asked for; None for the newest."""
        named = None if self.load_tag is None else _TAG.fullmatch(self.load_tag)
        return self.ckpt_step if named is None else int(named.group(1))

    def _step_problems(self) -> Iterator[str]:
        """Rules for the choice of a checkpoint."""
        if self.load_tag is not None and _TAG.fullmatch(self.load_tag) is None:
            yield f"--load-tag {self.load_tag} names no step. Write it like iter_0000500, or use --ckpt-step 500."
        elif self.load_tag is not None and self.ckpt_step not in (None, self.load_step):
            yield f"--load-tag {self.load_tag} and --ckpt-step {self.ckpt_step} name two steps. Drop one of them."
        if self.load_step is not None and self.load is None:
            yield f"--ckpt-step {self.load_step} needs --load, the folder that holds that checkpoint."

    def complete(self) -> None:
        if self.reset_iteration:
            self.set_derived("finetune", True)

    def problems(self) -> Iterator[str]:
        yield from self._step_problems()
        for name in ("save", "load", "run_dir"):
            yield from folder_problems(f"--{name.replace('_', '-')}", getattr(self, name))
        if self.save is not None and self.save_interval is None:
            yield (
                f"--save {self.save} needs --save-interval, the steps between checkpoints, for example --save-interval "
                "500."
            )
        if self.program_flags is not None and not _is_json_object(self.program_flags):
            yield f"--program-flags {self.program_flags[:80]} is not a JSON object, such as '{{\"h_dim\": 256}}'."
        for text in self.skip_train_iteration_range:
            try:
                _read_range(text)
            except ConfigError as failure:
                yield from failure.problems
        if self.from_scratch and self.finetune:
            yield "--from-scratch and --finetune contradict each other: the first loads nothing. Drop one of them."
        if self.from_scratch and self.eval_only:
            yield (
                "--from-scratch and --eval-only contradict each other: there would be no weights to evaluate. Drop one "
                "of them."
            )
        if self.exit_on_missing_checkpoint and self.load is None:
            yield "--exit-on-missing-checkpoint needs --load, the folder that must hold a checkpoint."


def folder_problems(flag: str, folder: str | None) -> Iterator[str]:
    """Refuses an address where a folder belongs: it would be the name of a local folder."""
    if folder is not None and re.match(r"[A-Za-z][\w+.-]*:/", folder):
        yield (
            f"{flag} {folder} is an address, and a folder is needed. Mount the storage and give the path of the folder "
            "there."
        )


def _is_json_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def _read_range(text: str) -> tuple[int, int]:
    first, _, last = text.partition("-")
    if not (first.isdecimal() and last.isdecimal()) or not 1 <= int(first) <= int(last):
        raise ConfigError(
            f"--skip-train-iteration-range {text} is not a range of steps. Write A-B with 1 <= A <= B, for example 2-4."
        )
    return int(first), int(last)
