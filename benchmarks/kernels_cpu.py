"""Times of the compiled operations and of their torch equivalents on the CPU, in turns in one process.

    python tools/build_kernels.py && python benchmarks/kernels_cpu.py

Prints one JSON line per operation, size, dtype, number of threads and pass (forward alone, and forward with backward):
how many times faster than torch, the median of paired rounds, with their range; then the geometric mean of every
operation and of all. Beside each stands what a run with `--kernels torch` calls, eagerly; a bias, which such a run
leaves to the matrix product, is added by an operation of its own. Seconds are those of the processor, all threads
together: on a shared machine wall time measures the others' load. `--table` prints Markdown instead, and below it the
geometric means in the form of megatron/kernels/native/measured.py.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.figures import print_figure
from megatron import process_exit
from megatron.config import ConfigSection, flag, parse_flags
from megatron.errors import ConfigError

if TYPE_CHECKING:
    from benchmarks.operations import Case
    from megatron.kernels.choice import Implementation

SIZES = ("2048x256", "2048x1024", "1000x771", "512x8064")


@dataclass(frozen=True)
class KernelFlags(ConfigSection):
    """Flags of this program."""

    operations: tuple[str, ...] = flag((), "operations to measure; all that the library has if not given", nargs="+")
    sizes: tuple[str, ...] = flag(SIZES, "rows x columns, such as 2048x256", nargs="+")
    dtypes: tuple[str, ...] = flag(("float32", "bfloat16"), "precisions", nargs="+")
    threads: tuple[int, ...] = flag((1, 2), "numbers of threads", nargs="+")
    rounds: int = flag(7, "counted rounds of each", at_least=1)
    milliseconds: int = flag(20, "how long one turn lasts, about", at_least=1)
    library: str | None = flag(None, "folder of the library; the package's if not given")
    table: bool = flag(False, "print a table of all, in Markdown, instead of JSON lines")


@dataclass(frozen=True)
class Row:
    """The measurements of one case: speed relative to torch, over the rounds."""

    operation: str
    label: str
    dtype: str
    threads: int
    passes: str
    ratios: tuple[float, ...]
    microseconds: float
    torch_microseconds: float

    @property
    def ratio(self) -> float:
        """The median over the rounds."""
        return statistics.median(self.ratios)


def main(argv: Sequence[str] | None = None) -> int:
    """Measures every case and prints the figures."""
    words = list(sys.argv[1:] if argv is None else argv)
    flags = parse_flags(KernelFlags, words, prog="kernels_cpu.py", description=__doc__ or "")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # a waiting thread must not count as one that works

    rows = []
    for row in measure(flags):
        rows.append(row)
        if not flags.table:
            show(row)
    if flags.table:
        print("\n".join(markdown(rows)), flush=True)
        return 0
    for operation in dict.fromkeys(row.operation for row in rows):
        own = [row.ratio for row in rows if row.operation == operation]
        print_figure(
            "kernels_cpu", "geometric_mean_of_operation", statistics.geometric_mean(own), "ratio", operation=operation
        )
    mean = statistics.geometric_mean([row.ratio for row in rows])
    print_figure(
        "kernels_cpu", "geometric_mean", mean, "ratio", cases=len(rows), slowest=min(row.ratio for row in rows)
    )
    return 0


def measure(flags: KernelFlags) -> Iterator[Row]:
    """Every case, one after another.

    Raises:
        ConfigError: no library is built, or it lacks an operation.
    """
    import torch

    from benchmarks.operations import CASES, Size, cases
    from megatron.kernels.native.library import REBUILD, library

    found = library(None if flags.library is None else Path(flags.library))
    known = [] if found is None else [name for name in CASES if found.has(name, "cpu")]
    chosen = flags.operations or known
    missing = [name for name in chosen if name not in known]
    if missing or not chosen:
        raise ConfigError(f"No compiled {', '.join(missing) or 'operations'} to measure. Build them: {REBUILD}")
    for threads in flags.threads:
        torch.set_num_threads(threads)
        for operation in chosen:
            for dtype in flags.dtypes:
                for size in flags.sizes:
                    shape = Size(*map(int, size.split("x")))
                    for case in cases(operation, shape, getattr(torch, dtype), torch.device("cpu")):
                        for passes in ("forward", "both") if case.inputs else ("forward",):
                            yield in_turns(case, passes, dtype, threads, flags)


def in_turns(case: Case, passes: str, dtype: str, threads: int, flags: KernelFlags) -> Row:
    """Both implementations alternately, the first of a pair changing; the first pair is a warm-up."""
    from megatron.kernels.choice import Implementation

    run: Callable[[Implementation], None] = case.forward if passes == "forward" else case.both
    run(Implementation.TORCH)
    run(Implementation.CSRC)
    repeats = max(1, round(flags.milliseconds / 1000 / max(1e-7, seconds(run, Implementation.TORCH, 1))))
    pairs = []
    for turn in range(flags.rounds + 1):
        order = [Implementation.TORCH, Implementation.CSRC][:: 1 if turn % 2 else -1]
        taken = {implementation: seconds(run, implementation, repeats) for implementation in order}
        if turn:
            pairs.append((taken[Implementation.TORCH], taken[Implementation.CSRC]))
    return Row(
        case.operation,
        case.label,
        dtype,
        threads,
        passes,
        tuple(theirs / max(ours, 1e-9) for theirs, ours in pairs),
        statistics.median(ours for _, ours in pairs) * 1e6,
        statistics.median(theirs for theirs, _ in pairs) * 1e6,
    )


def seconds(run: Callable[[Implementation], None], implementation: Implementation, repeats: int) -> float:
    """Processor time of one call, of all threads."""
    began_at = time.process_time()
    for _ in range(repeats):
        run(implementation)
    return (time.process_time() - began_at) / repeats


def show(row: Row) -> None:
    """Prints a case as a JSON line."""
    print_figure(
        "kernels_cpu",
        "ratio_to_torch",
        row.ratio,
        "ratio",
        spread=(min(row.ratios), max(row.ratios)),
        operation=row.operation,
        case=row.label,
        dtype=row.dtype,
        threads=row.threads,
        passes=row.passes,
        microseconds=round(row.microseconds, 1),
        torch_microseconds=round(row.torch_microseconds, 1),
    )


def markdown(rows: Sequence[Row]) -> Iterator[str]:
    """A table with a line per case and thread count, and the geometric means."""
    yield "| operation | case | dtype | threads | forward, times faster (range) | forward and backward |"
    yield "|---|---|---|---|---|---|"
    cells: dict[tuple[str, str, str, int], dict[str, Row]] = {}
    for row in rows:
        cells.setdefault((row.operation, row.label, row.dtype, row.threads), {})[row.passes] = row
    for (operation, label, dtype, threads), found in cells.items():
        texts = [
            f"{row.ratio:.2f} ({min(row.ratios):.2f} to {max(row.ratios):.2f})" if row else ""
            for row in (found.get("forward"), found.get("both"))
        ]
        yield f"| {operation} | {label} | {dtype} | {threads} | {' | '.join(texts)} |"
    yield ""
    for operation in dict.fromkeys(row.operation for row in rows):
        own = [row.ratio for row in rows if row.operation == operation]
        yield f"{operation}: geometric mean {statistics.geometric_mean(own):.2f}, slowest case {min(own):.2f}.  "
    yield f"All: geometric mean {statistics.geometric_mean([row.ratio for row in rows]):.2f}."
    yield ""
    yield "```python"
    for name, speed in speeds(rows).items():
        yield f'"{name}": {speed:.2f},'
    yield "```"


def speeds(rows: Sequence[Row]) -> dict[str, float]:
    """The geometric mean of every operation of `--kernels`, of what a training step calls."""
    found: dict[str, list[float]] = {}
    for row in rows:
        if row.operation != "multi_tensor":
            found.setdefault("optimizer" if row.operation == "adamw" else row.operation, []).append(row.ratio)
    return {name: statistics.geometric_mean(ratios) for name, ratios in found.items()}


if __name__ == "__main__":
    process_exit.exit_with(main)
