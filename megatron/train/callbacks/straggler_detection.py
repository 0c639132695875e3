"""Straggler reports every 100 steps: the slowest rank, its phase, and how often."""

from __future__ import annotations

from megatron import log
from megatron.observe.straggler_report import REPORTS_TO_NAME, RankTimings
from megatron.train.callback import Callback, CallbackSetup
from megatron.train.run import Run
from megatron.train.steps import TrainedStep

INTERVAL_STEPS = 100


class StragglerDetection(Callback):
    """Reports the step times of this rank to rank 0, which compares them.

    Times are sent with the heartbeats of the watchdog, so that no rank waits. GPU times are read one step later, when
    they are available.
    """

    def __init__(self, setup: CallbackSetup) -> None:
        self._setup = setup
        self._before: TrainedStep | None = None
        self._timings: RankTimings | None = None
        self._named = -1

    @classmethod
    def of(cls, setup: CallbackSetup) -> Callback | None:
        return cls(setup) if setup.mesh.world.size > 1 else None

    def opened(self, run: Run) -> None:
        stage_ranks = run.mesh.world.size // run.mesh.pp.size
        if run.mesh.world.rank == 0:
            self._timings = RankTimings(lambda rank: rank // stage_ranks)

    def after_step(self, run: Run, step: TrainedStep) -> None:
        before, self._before = self._before, step
        if before is not None:
            messages = 0.0 if before.messages is None else before.messages.seconds()
            computing = max(0.0, before.seconds - before.data_seconds - messages)
            self._setup.watch.trained(before.data_seconds, computing)
        if self._timings is not None and step.progress.step % INTERVAL_STEPS == 0:
            self._report(step.progress.step, self._timings)

    def _report(self, step: int, timings: RankTimings) -> None:
        watch = self._setup.watch
        slowest = timings.report({entry["rank"]: entry["pace"] for entry in watch.ranks() if "pace" in entry})
        if slowest is None:
            return
        host = watch.host(slowest.rank)
        text = (
            f"rank {slowest.rank} on {host}: {slowest.phase} {slowest.worst_seconds:.3f} s per step, median "
            f"{slowest.median_seconds:.3f} s; slowest of {slowest.ranks} ranks in {slowest.times} of {slowest.reports} "
            "reports"
        )
        self._setup.activity.noted("slowest_rank", step, text)
        log.info(f"straggler report at step {step}: {text}")
        if slowest.is_straggler and self._named != slowest.rank:
            log.warning(
                f"rank {slowest.rank} on {host} is a straggler: in {REPORTS_TO_NAME} consecutive reports its "
                f"{slowest.phase} took {slowest.ratio:.2f} times the median, and every step waits for it. Check the "
                "clocks, temperature, links and other processes of that host, or exclude it."
            )
            self._setup.activity.noted("straggler", step, text)
        self._named = slowest.rank if slowest.is_straggler else -1
