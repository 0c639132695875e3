"""Compares pipeline schedules by idle time and activation memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from megatron.config.sections.pipelines import SCHEDULE_CHUNKS
from megatron.parallel.schedule.actions import Schedule
from megatron.parallel.schedule.building import build_schedule, schedule_costs
from megatron.parallel.schedule.schedule_files import read_orders


def schedule_with_sizes(name: str, ranks: int, chunks_per_rank: int | None, micro_batches: int) -> Schedule:
    """Builds the schedule of this name with these sizes.

    Args:
        chunks_per_rank: the minimum of the schedule if None.

    Raises:
        ConfigError: see `build_schedule`.
    """
    fewest, _ = SCHEDULE_CHUNKS.get(name, (1, None))
    return build_schedule(name, ranks, fewest if chunks_per_rank is None else chunks_per_rank, micro_batches)


def schedule_of_file(
    path: str, ranks: int | None = None, chunks_per_rank: int | None = None, micro_batches: int | None = None
) -> Schedule:
    """Builds the schedule of a file, with the file's sizes unless given.

    Raises:
        ConfigError: see `build_schedule`, which refuses other sizes than the file's.
    """
    placement, count, _ = read_orders(path)
    return build_schedule(
        path, ranks or placement.ranks, chunks_per_rank or len(placement.chunks_of(0)), micro_batches or count
    )


def table_lines(ranks: int, chunks_per_rank: int | None, micro_batches: int) -> Iterator[str]:
    """A table of all schedules that support this number of chunks."""
    yield f"{ranks} rank{'s' * (ranks != 1)}, {micro_batches} micro-batch{'es' * (micro_batches != 1)}"
    yield f"{'schedule':<16}{'chunks':>6}{'idle':>8}   activations held, in micro-batches of a stage, by rank"
    for name, (fewest, most) in SCHEDULE_CHUNKS.items():
        if chunks_per_rank is None or fewest <= chunks_per_rank <= (most or chunks_per_rank):
            chunks = fewest if chunks_per_rank is None else chunks_per_rank
            costs = schedule_costs(name, ranks, chunks, micro_batches)
            yield f"{name:<16}{chunks:>6}{costs.idle:>8.1%}   {held_text(costs.peak_alive, chunks)}"


def held_text(peak_alive: Sequence[int], chunks_per_rank: int) -> str:
    """The peak activations of each rank, in micro-batches of all its layers."""
    return " ".join(f"{round(alive / chunks_per_rank, 1):g}" for alive in peak_alive)
