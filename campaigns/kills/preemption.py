"""SIGTERM at random moments of a run: `python -m campaigns.run preemption --cases 60`.

In each case a run is interrupted once, at a moment drawn between its start and its end: while it starts, builds its
indexes, trains, evaluates or saves. Wherever a step had been trained, none may be lost: the newest checkpoint is that
of the last step reported. The same command then continues to the end, with the losses of an uninterrupted run.
"""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from campaigns.campaign import Plan, Result
from megatron.errors import ExitCode
from tests.checkpoint.retention.checkpoints import steps
from tests.helpers.machines.rank_processes import RankEnd, run_rank_processes
from tests.helpers.tiny_run import TinyCorpus, losses, write_tiny_corpus

STEPS = 14
# Tensor and pipeline sizes.
LAYOUTS = ((1, 1), (2, 1), (1, 2), (2, 2))
_LIMIT_SECONDS = 180.0
# Before its flags are read a process has no handler yet and ends as every program does.
_CODES = (ExitCode.DONE, ExitCode.REQUEUE, -signal.SIGTERM, 128 + signal.SIGTERM)


@dataclass(frozen=True)
class Outcome:
    """The outcome of a case.

    Args:
        last_step: the last step reported before the interruption; 0 before the first.
        saved_step: the step of the newest checkpoint then.
        seconds: from the signal to the end of the last rank.
    """

    layout: tuple[int, int]
    moment_seconds: float
    codes: tuple[int, ...]
    last_step: int
    saved_step: int
    seconds: float
    problem: str = ""


def flags_of(corpus: TinyCorpus, folder: Path, layout: tuple[int, int]) -> list[str]:
    """The command line of a run that saves and evaluates now and then."""
    return corpus.flags(
        folder=folder,
        train_iters=STEPS,
        save_interval=5,
        eval_interval=4,
        hidden_dropout=0.1,
        attention_dropout=0,
        tensor_model_parallel_size=layout[0],
        pipeline_model_parallel_size=layout[1],
        data_cache_path=folder / "cache",
    )


def train(flags: Sequence[str], layout: tuple[int, int], signal_at: float | None = None) -> list[RankEnd]:
    """Runs the program on the ranks of a layout; all get SIGTERM at that `time.time()`, if any."""

    def interrupt(processes: Sequence[subprocess.Popen[bytes]]) -> None:
        if signal_at is not None:
            time.sleep(max(0.0, signal_at - time.time()))
            for process in processes:
                process.send_signal(signal.SIGTERM)

    return run_rank_processes(["pretrain_gpt.py", *flags], layout[0] * layout[1], _LIMIT_SECONDS, interrupt)


def texts_of(ends: Sequence[RankEnd]) -> str:
    """The exit code and the messages of each rank."""
    return "\n".join(f"rank {rank}, code {end.code}:\n{end.errors}" for rank, end in enumerate(ends))


def run_case(
    corpus: TinyCorpus, folder: Path, layout: tuple[int, int], moment_seconds: float, expected: dict[int, float]
) -> Outcome:
    """Interrupts one run and continues it."""
    flags = flags_of(corpus, folder, layout)
    due_at = time.time() + moment_seconds
    ends = train(flags, layout, due_at)
    seconds = max(0.0, max(end.at for end in ends) - due_at)
    codes, text = tuple(end.code for end in ends), texts_of(ends)
    metrics = folder / "run" / "metrics.jsonl"
    last = max(losses(folder), default=0) if metrics.exists() else 0
    outcome = Outcome(layout, moment_seconds, codes, last, max(steps(folder / "checkpoints"), default=0), seconds)
    if any(code not in _CODES for code in codes):
        return replace(outcome, problem=f"exit codes {codes}:\n{text}")
    if outcome.saved_step != last:
        return replace(
            outcome, problem=f"step {last} was trained, and the newest checkpoint is of {outcome.saved_step}:\n{text}"
        )
    ends = train(flags, layout)
    if any(end.code for end in ends):
        return replace(outcome, problem=f"the same command failed:\n{texts_of(ends)}")
    if losses(folder) != expected:
        return replace(outcome, problem="the losses differ from those of an uninterrupted run")
    return outcome


def run_cases(plan: Plan) -> Iterator[Result]:
    """Runs the cases, in turn over the layouts; `seconds` run from the signal to the end of the last rank."""
    corpus = write_tiny_corpus(plan.folder)
    expected, lengths = {}, {}
    for number in plan.numbers:
        layout = LAYOUTS[number % len(LAYOUTS)]
        if layout not in expected:
            alone = plan.folder / f"alone{layout[0]}{layout[1]}"
            started_at = time.monotonic()
            ends = train(flags_of(corpus, alone, layout), layout)
            if any(end.code for end in ends):
                raise RuntimeError(f"an uninterrupted run failed:\n{texts_of(ends)}")
            lengths[layout], expected[layout] = time.monotonic() - started_at, losses(alone)
        moment = plan.random(number).uniform(0.0, lengths[layout])
        outcome = run_case(corpus, plan.folder / f"case{number}", layout, moment, expected[layout])
        name = {0: "before the first step", STEPS: "after the last step"}.get(outcome.last_step, "during training")
        problem = outcome.problem and f"signal after {moment:.2f} s: {outcome.problem}"
        yield Result(number, f"tp{layout[0]} pp{layout[1]}", name, problem, outcome.seconds)
