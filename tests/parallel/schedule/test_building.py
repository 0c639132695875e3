"""Every schedule by name: complete, in order, within its memory, free of deadlocks, and as short as it should be."""

from __future__ import annotations

import random
import re
import time
from collections import Counter, defaultdict
from collections.abc import Sequence

import pytest

from megatron.config.sections.pipelines import SCHEDULE_CHUNKS
from megatron.errors import ConfigError
from megatron.parallel.schedule.actions import Kind, Program, Schedule
from megatron.parallel.schedule.building import SCHEDULES, build_schedule, schedule_costs
from tests.helpers.campaign_cases import mark_campaign
from tests.helpers.pipeline_programs import Execution

LAYOUTS = [
    (name, ranks, chunks, micro_batches)
    for name, (fewest, most) in SCHEDULE_CHUNKS.items()
    for ranks in (1, 2, 3, 4, 7)
    for chunks in ([2, 3, 5] if most is None else [fewest])
    for micro_batches in (1, 2, 3, 4, 5, 8, 13)
]
# At 4 ranks and 8 micro-batches, as others measured them for F = I = W; rounded to percent.
BUBBLES = {"1f1b": 27, "interleaved": 16, "zb-h1": 17, "interleaved-zb": 13, "zbv": 6, "v-half": 19, "v-1f1b": 26}


FEW = random.Random(0).sample(LAYOUTS, 90)


def larger_layouts(cases: int) -> list[tuple[str, int, int, int]]:
    """Layouts beyond the table, by chance."""
    chance = random.Random(cases)
    drawn = [chance.choice(LAYOUTS) for _ in range(cases // 20)]
    return [(name, chance.randint(1, 12), chunks, chance.randint(1, 60)) for name, _, chunks, _ in drawn]


@pytest.mark.parametrize("layout", mark_campaign(LAYOUTS, FEW), ids=str)
def test_programs_run_to_their_ends_in_every_order_of_events(layout: tuple[str, int, int, int]) -> None:
    check(build_schedule(*layout), seeds=2)


def test_larger_programs_too(request: pytest.FixtureRequest) -> None:
    for layout in larger_layouts(request.config.getoption("--cases")):
        check(build_schedule(*layout), seeds=1)


def check(schedule: Schedule, seeds: int) -> None:
    """All that must hold of every schedule."""
    every = [action for program in schedule.actions for action in program]
    assert max(Counter(every).values()) == 1
    computed = Counter(action.kind for action in every if not action.kind.is_message)
    passes = schedule.placement.chunks * schedule.micro_batches
    halves = {Kind.INPUT_BACKWARD: passes, Kind.WEIGHT_BACKWARD: passes}
    assert computed == {Kind.FORWARD: passes} | (halves if schedule.splits_backward else {Kind.BACKWARD: passes})
    for programs in (schedule.actions, schedule.forward_only()):
        assert_one_order_of_messages(programs)
        for seed in range(seeds):
            for sends_wait in (False, True):
                Execution(programs, schedule.placement, seed).run(sends_wait=sends_wait)
    for rank, program in enumerate(schedule.actions):
        assert most_alive(program) == schedule.peak_alive[rank] <= memory_limit(schedule, rank)


def most_alive(program: Program) -> int:
    """The most chunk activations at once."""
    alive = most = 0
    for action in program:
        if action.kind is Kind.FORWARD:
            alive += 1
        elif action.kind in (Kind.BACKWARD, Kind.WEIGHT_BACKWARD):
            alive -= 1
        most = max(most, alive)
    return most


def memory_limit(schedule: Schedule, rank: int) -> int:
    """What a rank may hold, from the papers: written down here apart from the code that keeps to it."""
    ranks, chunks = schedule.ranks, schedule.chunks_per_rank
    interleaved = 2 * (ranks - rank - 1) + (chunks - 1) * ranks + 1
    limits = {"1f1b": ranks - rank, "zb-h1": ranks, "zbv": 2 * ranks, "v-half": ranks + 1, "v-1f1b": 3 * ranks}
    return limits.get(schedule.name, interleaved)


def assert_one_order_of_messages(programs: Sequence[Program]) -> None:
    """Two ranks name their messages in the same order, whichever of them sends."""
    seen: dict[tuple[int, int], list[tuple[bool, int, int]]] = defaultdict(list)
    for rank, program in enumerate(programs):
        for action in program:
            if action.peer is not None:
                sends = action.kind in (Kind.SEND_FORWARD, Kind.SEND_BACKWARD)
                forward = action.kind in (Kind.SEND_FORWARD, Kind.RECEIVE_FORWARD)
                sender = action.chunk if sends else action.chunk + (-1 if forward else 1)
                seen[rank, action.peer].append((forward, sender, action.micro_batch))
    for (rank, peer), messages in seen.items():
        assert messages == seen[peer, rank]


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_bubble_is_as_small_as_it_should_be(name: str) -> None:
    chunks = SCHEDULE_CHUNKS[name][0]
    assert round(100 * build_schedule(name, 4, chunks, 8).bubble_ratio) == BUBBLES[name]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("gpipe", 2, 1, 4), "Unknown pipeline schedule 'gpipe'. Use one of 1f1b, interleaved, zb-h1"),
        (("1f1b", 2, 2, 4), "1f1b does not support 2 chunks per rank. Use 1"),
        (("interleaved", 2, 1, 4), "interleaved does not support 1 chunk per rank. Use 2"),
        (("zbv", 2, 3, 4), "zbv does not support 3 chunks per rank. Use 2"),
    ],
)
def test_what_does_not_exist_is_refused(arguments: tuple[str, int, int, int], said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        build_schedule(*arguments)


@pytest.mark.parametrize(("name", "chunks"), [("1f1b", 1), ("interleaved", 3), ("zb-h1", 1), ("zbv", 2)])
@pytest.mark.parametrize(("ranks", "micro_batches"), [(1, 2), (3, 6), (4, 7), (4, 2)])
def test_what_a_schedule_costs_is_known_without_its_programs(
    name: str, chunks: int, ranks: int, micro_batches: int
) -> None:
    built, costs = (make(name, ranks, chunks, micro_batches) for make in (build_schedule, schedule_costs))
    assert (costs.peak_alive, costs.placement) == (built.peak_alive, built.placement)
    assert costs.idle == pytest.approx(built.bubble_ratio)


def test_hundreds_of_ranks_take_seconds() -> None:
    began_at = time.process_time()
    costs = schedule_costs("zb-h1", 300, 1, 600)
    assert time.process_time() - began_at < 5
    assert costs.peak_alive == (300,) * 300 and 0.17 < costs.idle < 0.19
