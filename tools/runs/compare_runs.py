"""Compares the logged steps of two runs; the exit code is 0 if they agree, 77 if not.

    python tools/runs/compare_runs.py killed/metrics.jsonl resumed/metrics.jsonl --after 60 --tolerance 1e-6

For a single run that was resumed in its folder, compares the steps that it logged twice.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron import log, process_exit
from megatron.config import ConfigSection, PathUse, flag, parse_flags
from megatron.errors import ExitCode


@dataclass(frozen=True)
class CompareFlags(ConfigSection):
    """Flags of this program."""

    runs: tuple[str, ...] = flag(
        help="one or two run folders or metrics.jsonl files; also accepted as positional arguments",
        nargs="+",
        path=PathUse.FILE_OR_FOLDER,
    )
    after: int = flag(0, "compare only steps after this one, usually the last saved step", at_least=0)
    tolerance: float = flag(1e-6, "maximum relative difference of a loss", at_least=0)
    norm_tolerance: float = flag(1e-4, "maximum relative difference of a gradient norm", at_least=0)

    def problems(self) -> Iterator[str]:
        if len(self.runs) > 2:
            yield f"--runs expects one or two runs, got {len(self.runs)} ({' '.join(self.runs)})."


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the comparison and returns the exit code."""
    flags = parse_flags(
        CompareFlags,
        sys.argv[1:] if argv is None else argv,
        description="Compares the logged steps of two runs.",
        positional="--runs",
    )

    from trident.dashboard.curves.run_pair import pair_up, read_pair, table, verdict

    pairs = pair_up(*read_pair(flags.runs), after=flags.after)
    agree, sentence = verdict(pairs, flags.tolerance, flags.norm_tolerance)
    for text in (*table(pairs), sentence):
        log.line(text)
    return ExitCode.DONE if agree else ExitCode.NUMERICS


if __name__ == "__main__":
    process_exit.exit_with(main)
