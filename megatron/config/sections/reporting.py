"""Logging: log lines, files, TensorBoard, Weights & Biases, the progress bar and profiles."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass

from megatron.config.flags.fields import flag
from megatron.config.flags.paths import PathUse, address_problems
from megatron.config.flags.program import LOG_STYLES
from megatron.config.flags.section import ConfigSection

MEGATRON_STYLE = "megatron"
_LEVELS = ("debug", "info", "warning", "error", "critical")


@dataclass(frozen=True)
class ReportConfig(ConfigSection):
    """Log lines, the run folder and other destinations of metrics."""

    log_interval: int = flag(100, "steps between log lines", at_least=1)
    run_dir: str | None = flag(
        None,
        "folder for config.json, logs and metrics of the run; {run} and {experiment}, here and in other folders, are "
        "replaced by a generated name",
        path=PathUse.FOLDER,
    )
    run_files: str = flag(
        "megatron",
        "naming scheme for the files in the run folder that record the source code and the program's flags: megatron "
        "(git.txt, git.diff), or one defined by the program",
    )
    program_flags: str | None = flag(
        None, "JSON object with the flags of the program that started the run, stored in the run folder"
    )
    metrics_file: str | None = flag(
        None, "JSON Lines file for metrics; metrics.jsonl in the run folder if unset", path=PathUse.NEW_FILE
    )
    log_path: str | None = flag(None, "folder for a copy of the printed flags", path=PathUse.FOLDER)
    log_style: str = flag(
        MEGATRON_STYLE,
        f"format of the log lines of steps, evaluations and saves: {' or '.join(LOG_STYLES)}, or one defined by the "
        "program",
    )
    log_level: str | None = flag(None, "log level of rank 0", choices=_LEVELS)
    log_level_replica: str | None = flag(
        None,
        "log level of the other ranks",
        choices=_LEVELS,
        ignored="the other ranks log only warnings and errors",
    )
    tensorboard_dir: str | None = flag(None, "folder for TensorBoard logs; disabled if unset", path=PathUse.FOLDER)
    tensorboard_log_interval: int = flag(1, "steps between TensorBoard entries", at_least=1)
    tensorboard_queue_size: int = flag(1000, "size of TensorBoard's queue of pending events", at_least=1)
    log_params_norm: bool = flag(
        False, "log the L2 norm of the weights every --log-interval steps, and of each layer in metrics.jsonl"
    )
    log_grad_norm: bool = flag(
        False, "record the L2 norm of each layer's gradient before clipping; the global norm is always logged"
    )
    log_num_zeros_in_grad: bool = flag(False, "log the number of zeros in the gradients")
    log_gradient_noise_scale: bool = flag(
        False,
        "log the simple gradient noise scale in samples (McCandlish et al. 2018), computed from micro-batch and "
        "global-batch gradients",
    )
    log_per_source_loss: bool = flag(False, "log the loss of each source of the training blend")
    log_timers_to_tensorboard: bool = flag(False, "write timers to TensorBoard")
    log_batch_size_to_tensorboard: bool = flag(False, "write the batch size to TensorBoard")
    log_learning_rate_to_tensorboard: bool = flag(
        True, "write the learning rate to TensorBoard", spelled=("--no-log-learnig-rate-to-tensorboard",)
    )
    log_loss_scale_to_tensorboard: bool = flag(True, "write the loss scale to TensorBoard")
    log_validation_ppl_to_tensorboard: bool = flag(False, "write the validation perplexity to TensorBoard")
    wandb_project: str = flag("", "Weights & Biases project; disabled if empty", spelled=("--wandb-project-name",))
    wandb_entity: str = flag(
        "",
        "Weights & Biases user or team; the account's default if empty",
        spelled=("--wandb-entity-name",),
    )
    wandb_exp_name: str = flag("", "Weights & Biases run name", spelled=("--wandb-name",))
    wandb_save_dir: str = flag("", "folder for Weights & Biases files", path=PathUse.FOLDER)

    def problems(self) -> Iterator[str]:
        yield from address_problems("--run-dir", self.run_dir)
        if self.program_flags is not None and not _is_json_object(self.program_flags):
            yield f"--program-flags {self.program_flags[:80]} must be a JSON object, such as '{{\"h_dim\": 256}}'."


def _is_json_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


# Megatron-LM's defaults.
_START, _STEPS = 10, 2
PROFILES = ("pt", "pt-full")


@dataclass(frozen=True)
class WatchingConfig(ConfigSection):
    """Progress bar, utilization and profiles."""

    progress_bar: bool = flag(
        True, "progress bar instead of log lines on a terminal; log.txt in the run folder has the lines"
    )
    peak_tflops: float | None = flag(
        None,
        "peak TFLOP/s per device, for MFU; the bfloat16 peak of known GPUs if unset",
        above=0,
    )
    profile: tuple[str, ...] | None = flag(
        None,
        "profile some steps with torch.profiler: traces and operator tables in the run folder; pt-full adds shapes, "
        "memory and stacks",
        nargs="*",
        choices=PROFILES,
    )
    profile_step_start: int | None = flag(
        None, f"completed steps before profiling starts; {_START} if unset", at_least=0
    )
    profile_step_end: int | None = flag(
        None, f"completed steps before profiling ends; {_STEPS} after the start if unset", at_least=1
    )
    profile_steps: str | None = flag(None, "profiling start and end, as START,END", spelled=("--profile_steps",))
    profile_ranks: tuple[int, ...] = flag((0,), "ranks to profile", nargs="+", at_least=0)

    @property
    def profile_is_full(self) -> bool:
        """True if the profile has shapes, memory and stacks."""
        return self.profile is not None and "pt-full" in self.profile

    @property
    def profiled_steps(self) -> tuple[int, int] | None:
        """The first and the last step of the profile; None without one."""
        if self.profile is None:
            return None
        start, end = _two_numbers(self.profile_steps or "") or (self.profile_step_start, self.profile_step_end)
        if start is None:
            start = _START if end is None else max(0, end - _STEPS)
        return start + 1, start + _STEPS if end is None else end

    def problems(self) -> Iterator[str]:
        if len(self.profile or ()) > 1:
            yield f"--profile {' '.join(self.profile or ())} names {len(self.profile or ())} kinds. Name one, or none."
        if self.profile_steps is not None and _two_numbers(self.profile_steps) is None:
            yield f"--profile-steps {self.profile_steps} is invalid. Expected START,END, for example 2,4."
        elif self.profile_steps is not None and (self.profile_step_start, self.profile_step_end) != (None, None):
            yield (
                f"--profile-steps {self.profile_steps} cannot be combined with --profile-step-start and "
                "--profile-step-end. Drop one of the two."
            )
        elif self.profiled_steps is not None and self.profiled_steps[0] > self.profiled_steps[1]:
            first, last = self.profiled_steps
            yield (
                f"--profile-step-end {last} is not after --profile-step-start {first - 1}, so no step is profiled. "
                f"Use --profile-step-end {first} for one step."
            )


def _two_numbers(text: str) -> tuple[int, int] | None:
    start, _, end = text.partition(",")
    return (int(start), int(end)) if start.strip().isdecimal() and end.strip().isdecimal() else None
