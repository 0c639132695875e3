"""Optional reporting to Weights & Biases; the only file that imports `wandb`.

Without network access, WANDB_MODE=offline keeps all data in --wandb-save-dir; `wandb sync` uploads it later.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from typing import Any

from megatron.checkpoint.record import Progress
from megatron.errors import ConfigError, StorageError
from megatron.objective.metric import StepMetrics
from megatron.observe.console import perplexity
from megatron.observe.metrics import TaskOutcome
from megatron.observe.names import named


class WeightsAndBiases:
    """One W&B run.

    Args:
        project: W&B project of the run (--wandb-project).
        name: name of the run; W&B generates one if empty.
        directory: local folder for the run's files; W&B's default if empty.
        entity: user or team; the account's default if empty.

    Raises:
        ConfigError: the package is not installed.
        StorageError: the run cannot be opened there, whatever the reason.
    """

    is_buffered = False

    def __init__(self, project: str, name: str, directory: str, entity: str = "") -> None:
        try:
            import wandb
        except ImportError as failure:
            raise _missing(project, f"cannot be imported ({failure})") from failure
        self.name = f"Weights & Biases project {project}"
        try:
            self._run: Any = wandb.init(
                project=project, name=name or None, dir=directory or None, entity=entity or None
            )
        except (Exception, SystemExit) as failure:  # the client raises errors of many libraries
            reason = str(failure).strip().rstrip(".") or type(failure).__name__
            raise StorageError(
                f"--wandb-project {project} cannot be opened: {reason}. Set WANDB_MODE=offline to keep its data in "
                "--wandb-save-dir, or drop the flag."
            ) from failure

    def start(self, progress: Progress, arguments: Mapping[str, Any]) -> None:
        self._run.config.update(dict(arguments), allow_val_change=True)

    def step(self, metrics: StepMetrics) -> None:
        """Sends nothing: one point per log interval is enough for a remote service."""

    def interval(self, metrics: StepMetrics) -> None:
        self._run.log(dict(named(metrics, "wandb")), step=metrics.value("iteration"))

    def evaluation(self, progress: Progress, group: str, loss: float | None) -> None:
        """Sends a validation or test loss, if there is one."""
        if loss is None:
            return
        values = {f"lm-loss-validation/{group}": loss, f"lm-loss-validation/{group} ppl": perplexity(loss)}
        self._run.log(values, step=progress.step)

    def task(self, progress: Progress, task: TaskOutcome) -> None:
        """Sends the figures of a task of --eval-tasks."""
        values = {f"tasks/{task.name}/{metric}": value for metric, value in task.figures.items()}
        self._run.log(values, step=progress.step)

    def passed(self, progress: Progress, batch: Mapping[str, int], number: int) -> None:
        self._run.log({"passed batches": number}, step=progress.step)

    def failed_save(self, progress: Progress, step: int, reason: str, number: int) -> None:
        self._run.log({"failed saves": number}, step=progress.step)

    def close(self) -> None:
        self._run.finish()


def check_wandb(project: str) -> None:
    """Checks that the package is installed, without the seconds that importing it takes.

    Raises:
        ConfigError: it is not.
    """
    if sys.modules.get("wandb") is None and importlib.util.find_spec("wandb") is None:
        raise _missing(project, "is not installed")


def _missing(project: str, what: str) -> ConfigError:
    return ConfigError(
        f"--wandb-project {project} needs the package wandb, which {what}. Install it with: pip install wandb"
    )
