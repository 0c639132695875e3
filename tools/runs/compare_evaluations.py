"""Compares two checkpoints by the results of tools/evaluate.py on the same tasks, with a paired test.

    python tools/evaluate.py --load checkpoints/a --tasks tasks.yaml --output a.json
    python tools/evaluate.py --load checkpoints/b --tasks tasks.yaml --output b.json
    python tools/runs/compare_evaluations.py a.json b.json

Prints for every metric both values, their difference with a confidence interval, and its p-value, also corrected for
the number of metrics.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron import log, process_exit
from megatron.config import ConfigSection, PathUse, flag, parse_flags


@dataclass(frozen=True)
class CompareFlags(ConfigSection):
    """Flags of this program."""

    results: tuple[str, ...] = flag(
        help="two result files of tools/evaluate.py; also accepted as positional arguments",
        nargs="+",
        path=PathUse.SMALL_FILE,
    )
    resamples: int = flag(10_000, "number of resamples for each interval and test", at_least=100)
    confidence: float = flag(0.95, "confidence level of the intervals", above=0, below=1)
    seed: int = flag(1234, "random seed", at_least=0)
    output: str | None = flag(None, "JSON file for the comparison", path=PathUse.NEW_FILE)

    def problems(self) -> Iterator[str]:
        """Yields violated rules between the flags."""
        if len(self.results) != 2:
            yield f"--results expects two files, got {len(self.results)} ({' '.join(self.results)})."


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the comparison."""
    flags = parse_flags(
        CompareFlags,
        sys.argv[1:] if argv is None else argv,
        prog="compare_evaluations.py",
        description=__doc__ or "",
        positional="--results",
    )

    from megatron.files.replacing import write_atomically
    from trident.evaluate.results import read_results
    from trident.evaluate.significance import Resampling, compare_results, comparison_lines

    resampling = Resampling(flags.resamples, flags.confidence, flags.seed)
    first, second = (read_results(Path(path)) for path in flags.results)
    differences = compare_results(first, second, resampling)
    for letter, path, results in zip("AB", flags.results, (first, second), strict=True):
        checkpoint = results.get("checkpoint", {})
        log.line(f"{letter}: {checkpoint.get('path')} ({path})")
    for text in comparison_lines(differences, resampling):
        log.line(text)
    if flags.output is not None:
        tree = {"results": flags.results, **asdict(resampling), "differences": [asdict(one) for one in differences]}
        text = json.dumps(tree, indent=1) + "\n"
        write_atomically(Path(flags.output), text.encode())
    return 0


if __name__ == "__main__":
    process_exit.exit_with(main)
