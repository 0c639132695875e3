"""The lines of dsGPT2, without the time of day that its logger puts before them.

What follows the loss there went to Weights & Biases only. The loss is the one that is minimized: the mean over samples
with --loss-mean samples.

Source: jisngprk/dsGPT2, ds_trainer.py.
"""

from __future__ import annotations

from megatron.checkpoint.manifest import folder_name
from megatron.checkpoint.saving import SaveLines
from megatron.objective.metric import StepMetrics
from megatron.observe.console import LogPosition, shown_loss

SAVE_LINES = SaveLines(
    before=lambda step, directory: None,
    after=lambda step, directory: f"INFO: [Rank - 0, MODEL SAVE]: {directory / folder_name(step)}",
)
LOSS_TAGS: tuple[str, str] | None = None


def iteration_lines(metrics: StepMetrics, position: LogPosition) -> list[str]:
    """The line of a log interval."""
    loss = metrics.value("lm_loss" if metrics.value("sample_loss") is None else "sample_loss")
    return [f"INFO: [Loss] {shown_loss(loss, 'f')} | {_place(position)} | lr: {metrics.value('learning_rate'):.6e}"]


def evaluation_lines(group: str, prefix: str, loss: float, position: LogPosition) -> list[str]:
    """The result of one evaluation; it names the data group unless that is the validation data."""
    label = "eval" if group == "valid" else f"eval {group}"
    return [f"INFO: [Loss ({label})] {loss:f} | {_place(position)}"]


def _place(position: LogPosition) -> str:
    return f"epoch: {position.epoch} | step: {position.step}/{position.train_iterations}"
