"""GPT2-ALL-IN's line of a step; evaluations and saves are announced in Megatron's words.

There the number was always 0, and a line came for every forward pass; here it comes for every --log-interval steps,
with the mean loss over them.

Source: geroldcsendes/gpt2-all-in, gpt2_ai/train/trainer.py.
"""

from __future__ import annotations

from megatron.objective.metric import StepMetrics
from megatron.observe.console import LogPosition, shown_loss
from megatron.observe.styles import megatron

SAVE_LINES = megatron.SAVE_LINES
LOSS_TAGS: tuple[str, str] | None = ("loss_train", "loss_valid")
evaluation_lines = megatron.evaluation_lines


def iteration_lines(metrics: StepMetrics, position: LogPosition) -> list[str]:
    """The line of a log interval."""
    return [f"Step: {metrics.value('iteration')} | Loss: {shown_loss(metrics.value('lm_loss'), '.3f')}"]
