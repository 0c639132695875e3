"""The data of --skip-train-iteration-range, which caused a spike of the loss."""

from __future__ import annotations

from megatron import log
from megatron.config.schedule import range_to_skip
from megatron.train.part import Part, PartSetup
from megatron.train.run import Run


class SkippedRanges(Part):
    """Skips the data of the ranges without training on them."""

    @classmethod
    def of(cls, setup: PartSetup) -> Part | None:
        return cls() if setup.config.safety.skip_ranges else None

    def before_step(self, run: Run) -> None:
        skipped = range_to_skip(run.config.safety.skip_ranges, run.progress.step)
        if skipped is not None:
            first, last = skipped
            log.info(f"Skipped iterations {first} to {last} due to --skip-train-iteration-range flag.")
            run.pass_over(last - first + 1)
