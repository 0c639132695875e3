"""What a style of --log-style consists of, and what it is given besides the metrics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from megatron.checkpoint.saving import SaveLines
from megatron.observe.metrics import StepMetrics


@dataclass(frozen=True)
class Moment:
    """Where a run is when a line is printed.

    Attributes:
        step: steps that are complete.
        train_iterations: planned steps of the run.
        epoch: number of the pass over the training data that the last sample belongs to, from 0.
        seconds_left: estimated time to the end of the run, evaluations and saves included; None before a step was
            timed.
    """

    step: int
    train_iterations: int
    epoch: int = 0
    seconds_left: float | None = None


class LineStyle(Protocol):
    """The lines of steps, evaluations and saves; no line where a sequence is empty.

    Attributes:
        LOSS_TAGS: the TensorBoard tags under which its users look for the training and the validation loss, in
            addition to upstream's.
    """

    SAVE_LINES: SaveLines
    LOSS_TAGS: tuple[str, str] | None

    def iteration_lines(self, metrics: StepMetrics, moment: Moment) -> Sequence[str]:
        """The lines of a log interval.

        Args:
            metrics: the mean over the interval's steps; it has no loss if none of their tokens counts.
        """

    def evaluation_lines(self, group: str, prefix: str, loss: float, moment: Moment) -> Sequence[str]:
        """The result of one evaluation.

        Args:
            group: name of the data group, `valid` or `test` unless the user named it.
            prefix: the point in training, such as "iteration 100".
            loss: mean loss per token, in nats.
        """
