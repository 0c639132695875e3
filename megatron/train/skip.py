"""`--skip-train-iteration-range`: data that is passed over, to get around a stretch that made the loss spike."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from megatron import log
from megatron.config import OptimConfig
from megatron.train.progress import Progress, global_batch_size


@dataclass(frozen=True)
class SkipRanges:
    """Ranges of iterations whose data is not trained on, sorted and merged where they overlap.

    The numbering goes on without a gap: iteration A is trained next, on the data of iteration B + 1. Unlike upstream's,
    a range passes over whole global batches and moves the consumed samples, so a later resume is right.
    """

    ranges: tuple[tuple[int, int], ...] = ()

    @classmethod
    def parse(cls, texts: Sequence[str], progress: Progress) -> SkipRanges:
        """Reads `a-b` texts that the configuration has checked; ranges already behind are dropped."""
        merged: list[tuple[int, int]] = []
        for first, last in sorted((int(a), int(b)) for a, _, b in (text.partition("-") for text in texts)):
            if merged and first <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(last, merged[-1][1]))
            else:
                merged.append((first, last))
        return cls(tuple(pair for pair in merged if pair[0] > progress.step))

    @property
    def iteration_count(self) -> int:
        """Iterations whose data will be passed over."""
        return sum(last - first + 1 for first, last in self.ranges)

    def passed(self, progress: Progress, optim: OptimConfig, sequence_length: int) -> Progress:
        """Progress after the data of a range that starts at the next iteration was passed over.

        Unchanged if none does.
        """
        for first, last in self.ranges:
            if first != progress.step + 1:
                continue
            log.info(f"Skipped iterations {first} to {last} due to --skip-train-iteration-range flag.")
            for _ in range(first, last + 1):
                samples = global_batch_size(optim, progress.consumed_samples)
                progress = dataclasses.replace(
                    progress,
                    consumed_samples=progress.consumed_samples + samples,
                    consumed_tokens=progress.consumed_tokens + samples * sequence_length,
                )
        return progress
