"""A run: what it consists of, and the one value that changes at every step."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron import log
from megatron.checkpoint.record import Progress
from megatron.config import RunConfig
from megatron.config.schedule import is_done, samples_after, samples_per_epoch
from megatron.data.loader import Batch
from megatron.engine.engine import Engine
from megatron.observe.report import Report
from megatron.parallel.mesh import ParallelMesh
from megatron.train.run_data import RunData
from megatron.train.stop import Stopping

if TYPE_CHECKING:  # their methods are given the run
    from megatron.train.callback import CallbackList
    from megatron.train.checkpoints import Saves
    from megatron.train.validation import Evaluator


@dataclass
class Run:
    """What a run consists of. Only `progress` is ever reassigned: after a step, and when that turns out to be a bad
    one.
    """

    config: RunConfig
    mesh: ParallelMesh
    engine: Engine
    data: RunData
    report: Report
    evaluator: Evaluator
    saves: Saves
    stopping: Stopping
    callbacks: CallbackList
    progress: Progress

    @property
    def is_done(self) -> bool:
        """Whether the planned training is finished."""
        ranges, done = self.config.safety.skip_ranges, self.progress
        return is_done(self.config.optim, done.step, done.consumed_samples, ranges, done.consumed_tokens)

    @property
    def next_length(self) -> int:
        """Tokens of each sample in the next step; fewer than --seq-length early in a curriculum."""
        return self.config.optim.length_of_step(self.progress.step + 1)

    def train_batches(self) -> Sequence[Batch]:
        """This rank's micro-batches of the next global batch."""
        return self.data.train_batches(self.progress.consumed_samples, self.next_length)

    def pass_over(self, batches: int) -> None:
        """Consumes the data of the next batches without training on them; the step stays as it is."""
        progress = self.progress
        consumed = samples_after(self.config.optim, batches, progress.consumed_samples)
        tokens = progress.consumed_tokens + (consumed - progress.consumed_samples) * self.next_length
        self.progress = dataclasses.replace(progress, consumed_samples=consumed, consumed_tokens=tokens)

    def completed_epoch(self, consumed_before: int) -> bool:
        """Whether the last step completed a pass of --epochs over the training data. Logs it; of passes shorter than
        the interval between log lines, only passes that complete at a log line, and the last one.

        Args:
            consumed_before: samples that were consumed before the step.
        """
        epochs, optim = self.config.finetuning.epochs, self.config.optim
        samples = samples_per_epoch(epochs, optim)
        if epochs is None or samples is None:
            return False
        completed = self.progress.consumed_samples // samples
        if completed <= consumed_before // samples:
            return False
        is_long = samples >= self.config.report.log_interval * optim.global_batch_size
        if is_long or self.is_done or self.is_due(self.config.report.log_interval):
            log.info(f"epoch {min(completed, epochs)}/{epochs} is complete after iteration {self.progress.step}")
        return True

    def is_due(self, interval: int | None) -> bool:
        """Whether an action that runs every `interval` steps is due after this one."""
        return bool(interval) and self.progress.step % (interval or 1) == 0
