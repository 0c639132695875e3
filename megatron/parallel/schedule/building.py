"""Named schedules, and their construction."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from megatron.config.sections.pipelines import SCHEDULE_CHUNKS, SPLIT_SCHEDULES, is_schedule_file
from megatron.errors import ConfigError
from megatron.parallel.schedule.actions import Kind, Placement, Program, Schedule
from megatron.parallel.schedule.generation import GreedySchedule, fixed_orders
from megatron.parallel.schedule.schedule_files import read_orders
from megatron.parallel.schedule.simulation import Computation, Orders, bubble_ratio, peak_alive, simulate, with_messages


@dataclass(frozen=True)
class NamedSchedule:
    """The definition of a named schedule.

    Attributes:
        is_v_shaped: chunks are placed in a V, so that the first rank has the last chunk.
        limit: the maximum number of chunk activations on a rank, from the rank, the number of ranks and the chunks of
            each; None for schedules with a fixed order.
    """

    is_v_shaped: bool = False
    limit: Callable[[int, int, int], int] | None = None

    def placement(self, ranks: int, chunks_per_rank: int) -> Placement:
        return Placement.v_shape(ranks) if self.is_v_shaped else Placement.loop(ranks, chunks_per_rank)


def _interleaved_limit(rank: int, ranks: int, chunks: int) -> int:
    return 2 * (ranks - rank - 1) + (chunks - 1) * ranks + 1


# Limits: ZB-H1 holds on every rank as much as the first rank of 1F1B; ZBV the same, in chunks of half the size; V-half
# half of that plus one; V-shaped 1F1B 1.5 times as much as ZBV: with less, its idle share hardly falls with the number
# of micro-batches.
# Source: Qi et al., "Zero Bubble Pipeline Parallelism" (2023) for ZB-H1, "Pipeline Parallelism with Controllable
# Memory" (2024) for the V shapes.
SCHEDULES = {
    "1f1b": NamedSchedule(),
    "interleaved": NamedSchedule(),
    "zb-h1": NamedSchedule(limit=lambda rank, ranks, chunks: ranks),
    "interleaved-zb": NamedSchedule(limit=_interleaved_limit),
    "zbv": NamedSchedule(is_v_shaped=True, limit=lambda rank, ranks, chunks: 2 * ranks),
    "v-half": NamedSchedule(is_v_shaped=True, limit=lambda rank, ranks, chunks: ranks + 1),
    "v-1f1b": NamedSchedule(is_v_shaped=True, limit=lambda rank, ranks, chunks: 3 * ranks),
}


@lru_cache(maxsize=32)
def build_schedule(name: str, ranks: int, chunks_per_rank: int, micro_batches: int) -> Schedule:
    """Builds a schedule, or returns it from a cache.

    Args:
        name: of `SCHEDULES`, or a file (`schedule_files.py`), which must match the other arguments.

    Raises:
        ConfigError: the name is unknown, the schedule does not support these ranks, chunks or micro-batches, or the
            file is invalid or deadlocks.
    """
    if is_schedule_file(name):
        return _schedule_of_file(name, ranks, chunks_per_rank, micro_batches)
    named = SCHEDULES.get(name)
    if named is None:
        raise ConfigError(f"Unknown pipeline schedule {name!r}. Use one of {', '.join(SCHEDULES)}, or FILE.csv.")
    fewest, most = SCHEDULE_CHUNKS[name]
    if chunks_per_rank < fewest or (most is not None and chunks_per_rank > most):
        nearest = fewest if chunks_per_rank < fewest else most
        chunks = _count(chunks_per_rank, "chunk")
        raise ConfigError(f"The pipeline schedule {name} does not support {chunks} per rank. Use {nearest}.")
    greedy = _greedy(name, ranks, chunks_per_rank, micro_batches)
    orders = fixed_orders(ranks, chunks_per_rank, micro_batches) if greedy is None else greedy.orders()
    return schedule_of(name, named.placement(ranks, chunks_per_rank), micro_batches, orders)


@dataclass(frozen=True)
class ScheduleCosts:
    """The costs of a schedule.

    Attributes:
        idle: see `Schedule.bubble_ratio`.
        peak_alive: see `Schedule.peak_alive`.
        placement: of the chunks.
    """

    idle: float
    peak_alive: tuple[int, ...]
    placement: Placement


@lru_cache(maxsize=4096)
def schedule_costs(name: str, ranks: int, chunks_per_rank: int, micro_batches: int) -> ScheduleCosts:
    """The costs of a schedule without its programs, which take many times as long to build.

    1F1B has a closed form, and so has interleaved if the number of micro-batches is a multiple of the ranks.

    Source: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM" (2021),
    section 2.2.
    """
    if name == "1f1b" or (name == "interleaved" and micro_batches % ranks == 0):
        passes, later = micro_batches * chunks_per_rank, (chunks_per_rank - 1) * ranks
        alive = [min(passes, (1 if chunks_per_rank == 1 else 2) * after + later + 1) for after in range(ranks)]
        placement = SCHEDULES[name].placement(ranks, chunks_per_rank)
        return ScheduleCosts((ranks - 1) / (passes + ranks - 1), tuple(reversed(alive)), placement)
    greedy = _greedy(name, ranks, chunks_per_rank, micro_batches)
    if greedy is None:
        schedule = build_schedule(name, ranks, chunks_per_rank, micro_batches)
        return ScheduleCosts(schedule.bubble_ratio, schedule.peak_alive, schedule.placement)
    busy = 3 * micro_batches * chunks_per_rank  # a forward pass and both halves of a backward pass
    return ScheduleCosts(1 - busy / greedy.end, greedy.peak_alive, SCHEDULES[name].placement(ranks, chunks_per_rank))


def _greedy(name: str, ranks: int, chunks_per_rank: int, micro_batches: int) -> GreedySchedule | None:
    """The greedy schedule of this name; None for schedules with a fixed order and for files."""
    named = SCHEDULES.get(name)
    if named is None or named.limit is None:
        return None
    limits = [named.limit(rank, ranks, chunks_per_rank) for rank in range(ranks)]
    placement = named.placement(ranks, chunks_per_rank)
    return GreedySchedule(placement, micro_batches, limits, splits=name in SPLIT_SCHEDULES)


@lru_cache(maxsize=32)
def idle_share(
    name: str, ranks: int, chunks_per_rank: int, micro_batches: int, chunk_costs: tuple[float, ...] = ()
) -> float:
    """`bubble_ratio` of a schedule with costs of chunks in any unit; empty for equal costs.

    Raises:
        ConfigError: as `build_schedule`.
    """
    schedule = build_schedule(name, ranks, chunks_per_rank, micro_batches)
    if len(set(chunk_costs)) < 2:
        return schedule.bubble_ratio
    return bubble_ratio(simulate(schedule.orders, schedule.placement, chunk_costs=chunk_costs), ranks)


@lru_cache(maxsize=32)
def forward_programs(name: str, ranks: int, chunks_per_rank: int, micro_batches: int) -> tuple[Program, ...]:
    """The programs of forward passes only, for any number of micro-batches, even if a file has another number.

    Raises:
        ConfigError: as `build_schedule`.
    """
    if not is_schedule_file(name):
        return build_schedule(name, ranks, chunks_per_rank, micro_batches).forward_only()
    placement, _, _ = read_orders(name)
    orders: list[list[Computation]] = [[] for _ in range(ranks)]
    for group in range(0, micro_batches, ranks):
        for chunk in range(placement.chunks):
            batches = range(group, min(group + ranks, micro_batches))
            orders[placement.owner(chunk)] += [(Kind.FORWARD, chunk, batch) for batch in batches]
    return with_messages(simulate(orders, placement), placement)


def _schedule_of_file(path: str, ranks: int, chunks_per_rank: int, micro_batches: int) -> Schedule:
    placement, batches, orders = read_orders(path)
    chunks = len(placement.chunks_of(0))
    misfits = {
        f"{_count(placement.ranks, 'rank')} (--pipeline-model-parallel-size {ranks})": placement.ranks != ranks,
        f"{_count(chunks, 'chunk')} per rank (--virtual-pipeline-model-parallel-size {chunks_per_rank})": (
            chunks != chunks_per_rank
        ),
        f"{_count(batches, 'micro-batch', 'es')} (a step has {micro_batches}: --global-batch-size)": (
            batches != micro_batches
        ),
    }
    for misfit, is_wrong in misfits.items():
        if is_wrong:
            raise ConfigError(f"--pipeline-schedule {path} is for {misfit}. Use that number, or another schedule.")
    try:
        return schedule_of(path, placement, batches, orders)
    except ConfigError as failure:
        raise ConfigError(
            f"--pipeline-schedule {path}: {failure}. Change the order of one of these ranks."
        ) from failure


def _count(number: int, noun: str, plural: str = "s") -> str:
    return f"{number} {noun}{plural if number != 1 else ''}"


def schedule_of(name: str, placement: Placement, micro_batches: int, orders: Orders) -> Schedule:
    """Builds the schedule of given computations: adds messages and costs.

    Raises:
        ConfigError: the computations deadlock.
    """
    timeline = simulate(orders, placement)
    return Schedule(
        name=name,
        ranks=placement.ranks,
        chunks_per_rank=len(placement.chunks_of(0)),
        micro_batches=micro_batches,
        placement=placement,
        actions=with_messages(timeline, placement),
        bubble_ratio=bubble_ratio(timeline, placement.ranks),
        peak_alive=peak_alive(orders),
    )
