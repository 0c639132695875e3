"""Every hundred steps, which rank was slowest, in what, and whether it always is."""

from __future__ import annotations

from megatron import log
from megatron.observe.straggler_report import REPORTS_TO_NAME, RankTimings
from megatron.train.callback import Callback, CallbackSetup
from megatron.train.run import Run
from megatron.train.steps import TrainedStep

INTERVAL_STEPS = 100


class StragglerDetection(Callback):
    """Says of each step how long this rank needed for it; rank 0 compares.

    What the ranks say goes over the connections of the watch, with its signs of life: no rank waits for another. What a
    GPU has done is looked at one step later, when it has.
    """

    def __init__(self, setup: CallbackSetup) -> None:
        self._setup = setup
        self._before: TrainedStep | None = None
        self._comparison: RankTimings | None = None
        self._named = -1

    @classmethod
    def of(cls, setup: CallbackSetup) -> Callback | None:
        return cls(setup) if setup.mesh.world.size > 1 else None

    def opened(self, run: Run) -> None:
        stage_ranks = run.mesh.world.size // run.mesh.pp.size
        if run.mesh.world.rank == 0:
            self._comparison = RankTimings(lambda rank: rank // stage_ranks)

    def after_step(self, run: Run, step: TrainedStep) -> None:
        before, self._before = self._before, step
        if before is not None:
            messages = 0.0 if before.messages is None else before.messages.seconds()
            computing = max(0.0, before.seconds - before.data_seconds - messages)
            self._setup.watch.trained(before.data_seconds, computing)
        if self._comparison is not None and step.progress.step % INTERVAL_STEPS == 0:
            self._report(step.progress.step, self._comparison)

    def _report(self, step: int, comparison: RankTimings) -> None:
        watch = self._setup.watch
        slowest = comparison.report({entry["rank"]: entry["pace"] for entry in watch.ranks() if "pace" in entry})
        if slowest is None:
            return
        host = watch.host(slowest.rank)
        text = (
            f"rank {slowest.rank} on {host}: {slowest.phase} {slowest.worst_seconds:.3f} s a step, median "
            f"{slowest.median_seconds:.3f} s; slowest of {slowest.ranks} ranks in {slowest.times} of {slowest.reports} "
            "reports"
        )
        self._setup.activity.noted("slowest_rank", step, text)
        log.info(f"slowest rank at step {step}: {text}")
        if slowest.is_straggler and self._named != slowest.rank:
            log.warning(
                f"rank {slowest.rank} on {host} is a straggler: for {REPORTS_TO_NAME} reports in a row its "
                f"{slowest.phase} took {slowest.ratio:.2f} times the median, and every step waits for it. Look at the "
                "clocks, the temperature, the links and other programs of that host, or leave it out."
            )
            self._setup.activity.noted("straggler", step, text)
        self._named = slowest.rank if slowest.is_straggler else -1
