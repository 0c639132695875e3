"""A run: its components, and its progress."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.checkpoint.record import Progress
from megatron.config import RunConfig
from megatron.config.schedule import is_done, samples_after
from megatron.data.loader import Batch
from megatron.engine.engine import Engine
from megatron.observe.report import Report
from megatron.parallel.mesh import ParallelMesh
from megatron.train.run_data import RunData
from megatron.train.stop import Stopping
from megatron.train.watchdog import Watch


@dataclass
class Run:
    """The components of a run; only `progress` is reassigned."""

    config: RunConfig
    mesh: ParallelMesh
    engine: Engine
    data: RunData
    report: Report
    stopping: Stopping
    watch: Watch
    progress: Progress

    @property
    def is_done(self) -> bool:
        ranges, done = self.config.safety.skip_ranges, self.progress
        return is_done(self.config.optim, done.step, done.consumed_samples, ranges, done.consumed_tokens)

    def is_due(self, interval: int | None) -> bool:
        """True if an action that runs every `interval` steps is due after the current step."""
        return bool(interval) and self.progress.step % (interval or 1) == 0

    @property
    def next_length(self) -> int:
        """Tokens per sample in the next step; fewer than --seq-length early in a curriculum."""
        return self.config.optim.length_of_step(self.progress.step + 1)

    def train_batches(self) -> Sequence[Batch]:
        return self.data.train_batches(self.progress.consumed_samples, self.next_length)

    def skip_batches(self, batches: int) -> None:
        """Consumes the data of the next batches without training on them or counting steps."""
        progress = self.progress
        consumed = samples_after(self.config.optim, batches, progress.consumed_samples)
        tokens = progress.consumed_tokens + (consumed - progress.consumed_samples) * self.next_length
        self.progress = dataclasses.replace(progress, consumed_samples=consumed, consumed_tokens=tokens)
