"""The lines of HelloDeepSpeed. The loss is the mean since the last line; there it was the mean of all steps so far.

Source: microsoft/DeepSpeedExamples, training/HelloDeepSpeed/train_bert.py.
"""

from __future__ import annotations

from megatron.checkpoint.manifest import folder_name
from megatron.checkpoint.saving import SaveLines
from megatron.objective.metric import StepMetrics
from megatron.observe.console import LogPosition, shown_loss

SAVE_LINES = SaveLines(
    before=lambda step, directory: None,
    after=lambda step, directory: f"Saved model to {directory / folder_name(step)}",
)
LOSS_TAGS: tuple[str, str] | None = None


def iteration_lines(metrics: StepMetrics, position: LogPosition) -> list[str]:
    """The line of a log interval."""
    return [f"Loss: {shown_loss(metrics.value('lm_loss'), '.4f')}"]


def evaluation_lines(group: str, prefix: str, loss: float, position: LogPosition) -> list[str]:
    """The result of an evaluation; the original printed none."""
    return [f"{group} loss at {prefix}: {loss:.4f}"]
