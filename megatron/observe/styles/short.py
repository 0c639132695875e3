"""Short lines that fit a terminal of 120 columns; the default of `train_on_text.py`.

Fields that a run does not have, or that are as usual, are omitted; metrics.jsonl has everything.
"""

from __future__ import annotations

from megatron.checkpoint.manifest import folder_name
from megatron.checkpoint.saving import SaveLines
from megatron.objective.metric import StepMetrics
from megatron.observe.console import LogPosition, perplexity, shown_loss
from megatron.observe.quantities import duration, short_count

SAVE_LINES = SaveLines(
    before=lambda step, directory: None,
    after=lambda step, directory: f"saved {directory / folder_name(step)}",
)
LOSS_TAGS: tuple[str, str] | None = None


def iteration_lines(metrics: StepMetrics, position: LogPosition) -> list[str]:
    """The line of a log interval."""
    value = metrics.value
    fields = [f"step {value('iteration')}/{value('train_iterations')}", f"loss {shown_loss(value('lm_loss'), '.4f')}"]
    if value("distillation_loss") is not None:
        fields.append(f"kd {value('distillation_loss'):.4f}")
    if value("gradient_norm") is not None:
        fields.append(f"gradient {value('gradient_norm'):.3f}")
    fields += [f"rate {value('learning_rate'):.2e}", f"{short_count(value('tokens_per_second'))} tokens/s"]
    if value("skipped_iterations"):
        fields.append(f"{value('skipped_iterations')} skipped")
    if position.seconds_left is not None:
        fields.append(f"{duration(position.seconds_left)} left")
    return [" | ".join(fields)]


def evaluation_lines(group: str, prefix: str, loss: float, position: LogPosition) -> list[str]:
    """The result of one evaluation."""
    step = f"step {position.step}/{position.train_iterations}"
    return [f"{step} | {group} loss {loss:.4f} | perplexity {perplexity(loss):.2f}"]
