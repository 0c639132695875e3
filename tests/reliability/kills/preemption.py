"""SIGTERM at random moments of a run: `python -m tests.reliability.kills.preemption --cases 60`.

In each case a run is interrupted once, at a moment drawn between its start and its end: while it starts, builds its
indexes, trains, evaluates or saves. Wherever a step had been trained, none may be lost: the newest checkpoint is that
of the last step reported. The same command then continues to the end, with the losses of a run that was left alone.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron.errors import ExitCode
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
    """What a case found.

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
    """How each rank ended, and its messages."""
    return "\n".join(f"rank {rank}, code {end.code}:\n{end.errors}" for rank, end in enumerate(ends))


def newest_step(folder: Path) -> int:
    """The step of the newest checkpoint of a run; 0 if it has none."""
    return max((int(path.name[5:]) for path in (folder / "checkpoints").glob("iter_*")), default=0)


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
    outcome = Outcome(layout, moment_seconds, codes, last, newest_step(folder), seconds)
    if any(code not in _CODES for code in codes):
        return _with(outcome, f"exit codes {codes}:\n{text}")
    if outcome.saved_step != last:
        return _with(outcome, f"step {last} was trained, and the newest checkpoint is of {outcome.saved_step}:\n{text}")
    ends = train(flags, layout)
    if any(end.code for end in ends):
        return _with(outcome, f"the same command did not end well:\n{texts_of(ends)}")
    if losses(folder) != expected:
        return _with(outcome, "the losses differ from those of a run that was left alone")
    return outcome


def campaign(folder: Path, cases: int, seed: int) -> list[Outcome]:
    """Runs cases in turn over the layouts."""
    drawn = random.Random(seed)
    corpus = write_tiny_corpus(folder)
    expected, lengths, found = {}, {}, []
    for number in range(cases):
        layout = LAYOUTS[number % len(LAYOUTS)]
        if layout not in expected:
            alone = folder / f"alone{layout[0]}{layout[1]}"
            began_at = time.monotonic()
            ends = train(flags_of(corpus, alone, layout), layout)
            if any(end.code for end in ends):
                raise RuntimeError(f"a run that was left alone did not end well:\n{texts_of(ends)}")
            lengths[layout], expected[layout] = time.monotonic() - began_at, losses(alone)
        moment = drawn.uniform(0.0, lengths[layout])
        found.append(run_case(corpus, folder / f"case{number}", layout, moment, expected[layout]))
    return found


def _with(outcome: Outcome, problem: str) -> Outcome:
    return Outcome(**{**asdict(outcome), "problem": problem})


def main() -> int:
    """Runs the campaign and prints its figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = campaign(Path(folder), asked.cases, asked.seed)
    for outcome in found:
        if outcome.problem:
            print(outcome.layout, f"{outcome.moment_seconds:.2f} s", outcome.problem, file=sys.stderr)
    seconds = sorted(outcome.seconds for outcome in found)
    figures = {
        "cases": len(found),
        "problems": sum(bool(outcome.problem) for outcome in found),
        "before_the_first_step": sum(outcome.last_step == 0 for outcome in found),
        "after_the_last_step": sum(outcome.last_step == STEPS for outcome in found),
        "steps_lost": sum(outcome.last_step - outcome.saved_step for outcome in found),
        "median_seconds_to_end": round(seconds[len(seconds) // 2], 2),
        "most_seconds_to_end": round(seconds[-1], 2),
    }
    print(json.dumps(figures))
    return int(figures["problems"] > 0)


if __name__ == "__main__":
    sys.exit(main())
