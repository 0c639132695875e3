"""Weights & Biases, when asked for; the only file that imports `wandb`.

Without a network, WANDB_MODE=offline keeps everything in the folder of --wandb-save-dir; `wandb sync` uploads it later.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.checkpoint.record import Progress
from megatron.errors import ConfigError
from megatron.observe.console import perplexity
from megatron.observe.metrics import Metrics


class WeightsAndBiases:
    """One W&B run.

    Args:
        project: where the run appears (--wandb-project).
        name: the run's name; W&B invents one if empty.
        directory: local folder of the run's files; W&B's default if empty.

    Raises:
        ConfigError: the package is not installed.
    """

    def __init__(self, project: str, name: str, directory: str) -> None:
        try:
            import wandb
        except ImportError as failure:
            raise ConfigError(
                f"--wandb-project {project} needs the package wandb, which cannot be imported ({failure}). Install it "
                "with: pip install wandb"
            ) from failure
        self._run: Any = wandb.init(project=project, name=name or None, dir=directory or None)

    def start(self, progress: Progress, arguments: Mapping[str, Any]) -> None:
        """Shows the arguments beside the curves."""
        self._run.config.update(dict(arguments), allow_val_change=True)

    def step(self, metrics: Metrics) -> None:
        """Sends nothing: one point per log interval is enough for a remote service."""

    def interval(self, metrics: Metrics) -> None:
        """Sends the figures of a log interval."""
        self._run.log(interval_values(metrics), step=metrics.iteration)

    def evaluation(self, progress: Progress, group: str, loss: float) -> None:
        """Sends a validation or test loss."""
        values = {f"lm-loss-validation/{group}": loss, f"lm-loss-validation/{group} ppl": perplexity(loss)}
        self._run.log(values, step=progress.step)

    def close(self) -> None:
        """Ends the W&B run."""
        self._run.finish()


def interval_values(metrics: Metrics) -> dict[str, float]:
    """What is sent for one log interval; figures that are not known are left out."""
    values: dict[str, float | None] = {
        "lm-loss-training": metrics.lm_loss,
        "learning-rate": metrics.learning_rate,
        "batch-size": metrics.global_batch_size,
        "loss-scale": metrics.loss_scale,
        "grad-norm": metrics.gradient_norm,
        "consumed-samples": metrics.consumed_samples,
        "consumed-tokens": metrics.consumed_tokens,
        "iteration-time": metrics.seconds_per_iteration,
        "samples-per-second": metrics.samples_per_second,
        "tokens-per-second": metrics.tokens_per_second,
        "tflops-per-gpu": metrics.teraflops_per_device,
    }
    values |= {f"lm-loss-training/{name}": one.lm_loss for name, one in (metrics.source_losses or {}).items()}
    return {name: value for name, value in values.items() if value is not None}
