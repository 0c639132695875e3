"""Ranks that hang, fail or die at chosen places of a run: `python -m campaigns.run hangs --cases 60`.

In each case one rank of a run is struck by a fault. All ranks must end, within the time limit for one that hangs and
within seconds for one that fails or dies, with the right exit code, and one message must name the rank that was struck.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from campaigns.campaign import Plan, Result
from megatron.errors import ExitCode
from tests.helpers.machines.rank_processes import RankEnd, run_rank_processes
from tests.helpers.tiny_run import TinyCorpus, write_tiny_corpus

HANG_SECONDS = 8  # a healthy step of four ranks takes seconds on a machine with other work
# Ranks, and the flags of the layout; in a ring (cp2) a rank waits for another in the middle of attention.
_STAGES = {"pipeline_model_parallel_size": 2}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2": (2, {"tensor_model_parallel_size": 2}),
    "dp2": (2, {}),
    "pp2": (2, {**_STAGES, "pipeline_schedule": "1f1b"}),
    "tp2pp2": (4, {**_STAGES, "tensor_model_parallel_size": 2, "pipeline_schedule": "zbv"}),
    "cp2": (2, {"context_parallel_size": 2, "attention_dropout": 0}),
}
PHASES = ("data", "forward", "p2p", "backward", "step", "evaluation", "save")
STARTS = ("join", "load", "index")  # a rank that is stopped there is found; one that is stuck, only after minutes
HANGS = ("stop", "spin", "sleep", "hold")
ENDS = {"kill": -9, "error": int(ExitCode.DATA), "exit": 9, "bug": 1}
_LIMIT_SECONDS = 120.0
# What loaded machines may need beyond the five seconds that are promised.
_SLACK_SECONDS = 60.0


@dataclass(frozen=True)
class Fault:
    """A fault and where it strikes.

    Args:
        kind: one of `HANGS` or `ENDS`.
        phase: one of `PHASES`, or of `STARTS`, or `init`, or `loader`, the thread that reads ahead.
    """

    layout: str
    kind: str
    rank: int
    phase: str
    step: int = 3

    @property
    def is_hang(self) -> bool:
        """True if the rank stays and makes no progress."""
        return self.kind in HANGS

    def codes(self) -> list[int]:
        """The exit codes of all ranks."""
        common = {"error": int(ExitCode.DATA), "bug": 1}.get(self.kind, int(ExitCode.REQUEUE))
        if self.is_hang:
            common = int(ExitCode.HANG)
        found = [common] * LAYOUTS[self.layout][0]
        if self.kind in ("stop", "hold"):
            found[self.rank] = -9  # killed by another rank
        elif self.kind in ENDS:
            found[self.rank] = ENDS[self.kind]
        return found


@dataclass(frozen=True)
class Outcome:
    """The outcome of a case; `seconds` from the fault to the end of the last rank."""

    fault: Fault
    seconds: float
    is_named: bool
    problem: str


def run_case(corpus: TinyCorpus, folder: Path, fault: Fault) -> Outcome:
    """Runs the program with a fault."""
    world_size, layout = LAYOUTS[fault.layout]
    note = folder / "struck"
    folder.mkdir()
    flags = corpus.flags(
        "--hang-timeout-seconds",
        str(HANG_SECONDS),
        folder=folder,
        train_iters=8,
        save_interval=3,
        eval_interval=3,
        micro_batch_size=1,
        lr_warmup_fraction=None,
        num_layers=4,
        **layout,
    )
    settings = {"kind": fault.kind, "rank": fault.rank, "phase": fault.phase, "step": fault.step, "note": str(note)}
    settings["hang_seconds"] = HANG_SECONDS
    words = ["-m", "campaigns.kills.faulty_run", json.dumps(settings), *flags]
    try:
        ends = run_rank_processes(words, world_size, _LIMIT_SECONDS)
    except AssertionError as failure:
        return Outcome(fault, _LIMIT_SECONDS, False, str(failure))
    if not note.exists():
        return Outcome(fault, 0.0, False, f"the fault did not strike: {[end.code for end in ends]}")
    seconds = max(end.at for end in ends) - float(note.read_text())
    messages = [line for end in ends for line in end.errors.splitlines() if re.match(r"(\[rank \d+\] )?error: ", line)]
    is_named = len(messages) == 1 and _names(fault, messages[0])
    return Outcome(fault, seconds, is_named, "; ".join(_problems(fault, ends, seconds, messages, folder)))


def _names(fault: Fault, message: str) -> bool:
    """True if a message names the rank; while the ranks join, another rank reports it."""
    if fault.phase == "join":
        return f"error: rank {fault.rank} (" in message
    return message.startswith(f"[rank {fault.rank}] error: ")


def _problems(fault: Fault, ends: list[RankEnd], seconds: float, messages: list[str], folder: Path) -> Iterator[str]:
    texts = "\n".join(end.errors for end in ends)
    codes = [end.code for end in ends]
    if codes != fault.codes():
        yield f"exit codes {codes} and not {fault.codes()}:\n{texts}"
    if len(messages) != 1 or not _names(fault, messages[0]):
        yield f"the messages are {messages}:\n{texts}"
    if fault.layout == "cp2" and not re.search(rf", cp {fault.rank}\b.*\) ", messages[0] if messages else ""):
        yield f"the message does not say where in the ring the rank is:\n{texts}"
    if "Traceback" in texts and fault.kind != "bug":
        yield f"a traceback:\n{texts}"
    if seconds > _SLACK_SECONDS + (HANG_SECONDS if fault.is_hang else 0):
        yield f"it took {seconds:.1f} s"
    reports = [*folder.glob("run/hang-*.txt"), *folder.glob("checkpoints/hang-*.txt")]
    if fault.is_hang and len(reports) != (fault.phase != "join"):
        yield f"{len(reports)} files of stacks"
    if fault.kind in ("spin", "sleep") and not any("in strike" in path.read_text() for path in reports):
        yield "the stacks do not show the fault"


def draw(number: int, drawn: random.Random) -> Fault:
    """The fault of a case: kinds and layouts in turn, so that 40 cases have every pair; the rest at random."""
    kinds = [*HANGS, *ENDS]
    layout = list(LAYOUTS)[number % len(LAYOUTS)]
    kind = kinds[5 * number % len(kinds)]  # the first two cases are a hang and an error
    world_size, has_stages = LAYOUTS[layout][0], "pipeline_schedule" in LAYOUTS[layout][1]
    phases = [phase for phase in PHASES if has_stages or phase != "p2p"]
    places = phases if kind in HANGS else [*phases, "init"]  # a hang in start-up is only found after minutes
    if kind in ("sleep", "spin", "error", "kill"):
        places.append("loader")
    if kind == "stop" and layout == "dp2":
        places.extend(STARTS)
    return Fault(layout, kind, drawn.randrange(world_size), drawn.choice(places), 3)


def run_cases(plan: Plan) -> Iterator[Result]:
    """Runs the cases; `seconds` run from the fault to the end of the last rank."""
    corpus = write_tiny_corpus(plan.folder)
    for number in plan.numbers:
        fault = draw(number, plan.random(number))
        outcome = run_case(corpus, plan.folder / f"case{number}", fault)
        problem = outcome.problem and f"{fault}: {outcome.problem}"
        yield Result(number, fault.kind, "named" if outcome.is_named else "ended", problem, outcome.seconds)
