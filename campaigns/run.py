"""Runs a campaign, prints a summary of its cases, and exits with 1 if one of them showed a problem.

python -m campaigns.run --list
python -m campaigns.run manifests --cases 100000 --seed 1 --jobs 2
python -m campaigns.run manifests --seed 1 --case 1234      runs one case again
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from campaigns.campaign import Campaign, Plan, Summary
from megatron import log, process_exit
from megatron.config import ConfigSection, flag, parse_flags


@dataclass(frozen=True)
class Entry:
    """A campaign in the catalog; its module defines `run_cases`.

    Args:
        cases: the default number of cases.
        sample: the number of cases in the test suite.
    """

    module: str
    description: str
    cases: int
    sample: int

    def load(self) -> Campaign:
        """Imports the campaign."""
        run_cases: Campaign = importlib.import_module(f"campaigns.{self.module}").run_cases
        return run_cases


CAMPAIGNS: Mapping[str, Entry] = {
    "kills": Entry("kills.training", "SIGKILL of ranks and launchers, at random moments and file operations", 200, 1),
    "preemption": Entry("kills.preemption", "SIGTERM at random moments of a run loses no step", 60, 1),
    "tool-kills": Entry("kills.tools", "SIGKILL of the tools that write files, at their file operations", 260, 4),
    "store-kills": Entry("kills.object_store", "SIGKILL of a run at its requests to an object store", 40, 1),
    "hangs": Entry("kills.hangs", "ranks that hang, fail or crash: every rank exits and the right one is named", 64, 1),
    "crash-states": Entry("damage.crash_states", "states that a power cut may leave on disk during saves", 10**6, 100),
    "checkpoint-damage": Entry("damage.checkpoint_mutations", "damaged files in checkpoint folders", 10**5, 100),
    "hostile-checkpoints": Entry("damage.hostile_checkpoints", "checkpoints with a malicious payload", 200, 4),
    "poison": Entry("damage.poison", "NaN, infinite, huge or flipped values on one rank during a run", 120, 1),
    "soak": Entry("soak", "a long run (cases = steps) whose memory, threads and files must not grow", 20_000, 240),
    "data-files": Entry("fuzzing.data_files", "damaged and hostile files of the data side", 10**5, 150),
    "settings": Entry("fuzzing.settings", "damaged and hostile configuration files", 10**5, 100),
    "manifests": Entry("fuzzing.manifests", "hostile manifests and records with matching digests", 10**5, 50),
    "requests": Entry("hostile_requests", "malformed and hostile requests to the inference server", 10_000, 100),
    "layouts": Entry("layouts.layouts", "random models and parallel layouts compared with one process", 1000, 3),
}


@dataclass(frozen=True)
class CampaignFlags(ConfigSection):
    """The campaign to run and the number of its cases."""

    name: str | None = flag(None, "the campaign to run", choices=tuple(CAMPAIGNS))
    list: bool = flag(False, "list the campaigns")
    cases: int | None = flag(None, "the number of cases", at_least=1)
    seed: int = flag(1, "the same seed and number give the same case", at_least=0)
    case: int | None = flag(None, "run only the case with this number", at_least=0)
    only: str = flag("", "run only kinds of cases whose name contains this text")
    jobs: int = flag(1, "cases that run at the same time, where the campaign supports it", at_least=1)
    report: str | None = flag(None, "write the counts and the problems to this JSON file")


def run_campaign(name: str, plan: Plan) -> Summary:
    """Runs the cases of a plan; each problem is logged when it occurs."""
    summary = Summary()
    for result in CAMPAIGNS[name].load()(plan):
        summary.add(result)
        if result.problem:
            log.error(
                f"case {result.number}, {result.kind}: {result.problem}\n"
                f"    run it again: python -m campaigns.run {name} --seed {plan.seed} --case {result.number}"
                + (f" --only {plan.only!r}" if plan.only else "")
            )
    return summary


def fast_folder() -> str | None:
    """A folder in memory, if the system has one: many cases write and sync many small files."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the campaign of the command line; 1 if a case showed a problem."""
    arguments = sys.argv[1:] if arguments is None else arguments
    program = "python -m campaigns.run"
    flags = parse_flags(CampaignFlags, arguments, program, __doc__ or "", positional="--name")
    if flags.list or not flags.name:
        for name, entry in CAMPAIGNS.items():
            log.line(f"{name:<20} {entry.description}")
        return 0
    started_at = time.monotonic()
    cases = flags.cases or CAMPAIGNS[flags.name].cases
    with tempfile.TemporaryDirectory(prefix="campaign-", dir=fast_folder()) as folder:
        plan = Plan(Path(folder).resolve(), flags.seed, cases, flags.case, flags.only, flags.jobs)
        summary = run_campaign(flags.name, plan)
    for line in summary.table():
        log.line(line)
    if flags.report:
        rows = [{"kind": kind, "outcome": outcome, "cases": count} for (kind, outcome), count in summary.counts.items()]
        problems = [vars(result) for result in summary.problems]
        Path(flags.report).write_text(json.dumps({"counts": rows, "problems": problems}, indent=1))
    log.line(f"{flags.name}: {summary.cases} cases of seed {flags.seed}, {time.monotonic() - started_at:.0f} s")
    return int(bool(summary.problems))


if __name__ == "__main__":
    process_exit.exit_with(main)
