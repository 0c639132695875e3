"""How many blocks the chunks of a pipeline hold."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from itertools import pairwise

import pytest

from megatron.config.sections.parallel import ParallelRequest
from megatron.config.sections.pipelines import SCHEDULE_CHUNKS
from megatron.errors import ConfigError
from megatron.parallel.schedule.actions import Placement
from megatron.parallel.schedule.building import build_schedule
from megatron.parallel.schedule.division import BY_COST, EVENLY, Division
from megatron.parallel.schedule.simulation import simulate

BLOCK = 1000


def counts_of(layers: int, placement: Placement, head: float = 0.0, division: Division = BY_COST) -> list[int]:
    """The division of equal blocks.

    Args:
        head: what the head costs, in blocks.
    """
    return division.counts([BLOCK] * layers, (0, round(BLOCK * head)), placement)


@pytest.mark.parametrize(
    ("layers", "placement", "head", "counts"),
    [
        (4, Placement.loop(1, 1), 9, [4]),
        (8, Placement.loop(4, 1), 0, [2, 2, 2, 2]),
        (8, Placement.loop(4, 1), 1, [2, 2, 2, 2]),
        (5, Placement.loop(2, 1), 0, [3, 2]),
        (5, Placement.loop(4, 1), 0, [1, 2, 1, 1]),
        (6, Placement.loop(4, 1), 0, [1, 2, 2, 1]),
        (7, Placement.loop(4, 1), 0, [2, 2, 2, 1]),
        (24, Placement.loop(4, 1), 2, [6, 7, 7, 4]),
        (32, Placement.loop(8, 1), 2.4, [4, 5, 5, 4, 4, 4, 4, 2]),
        (12, Placement.loop(4, 1), 20, [3, 4, 4, 1]),
        (24, Placement.loop(4, 2), 2, [3, 4, 4, 3, 3, 3, 3, 1]),
        (12, Placement.v_shape(4), 0, [2, 2, 2, 2, 1, 1, 1, 1]),
        (20, Placement.v_shape(4), 0, [3, 3, 3, 3, 2, 2, 2, 2]),
        (13, Placement.v_shape(4), 0, [2, 2, 2, 2, 2, 1, 1, 1]),
        (12, Placement.v_shape(4), 5, [1, 2, 2, 2, 2, 1, 1, 1]),
    ],
)
def test_the_most_expensive_rank_is_as_cheap_as_it_can_be(
    layers: int, placement: Placement, head: float, counts: list[int]
) -> None:
    assert counts_of(layers, placement, head) == counts


def test_blocks_of_different_costs_are_balanced() -> None:
    generator = random.Random(0)
    for _ in range(200):
        costs = [generator.randint(1, 20) for _ in range(generator.randint(2, 9))]
        stages, ends = generator.randint(1, len(costs)), (generator.randint(0, 3), generator.randint(0, 60))
        counts = BY_COST.counts(costs, ends, Placement.loop(stages, 1))
        assert (len(counts), sum(counts), min(counts) >= 1) == (stages, len(costs), True)
        divisions = compositions(len(costs), stages)
        assert dearest(costs, ends, counts) == min(dearest(costs, ends, other) for other in divisions)


def dearest(blocks: Sequence[int], ends: tuple[int, int], counts: Sequence[int]) -> int:
    """Cost of the most expensive stage."""
    costs = [*blocks]
    costs[0] += ends[0]
    costs[-1] += ends[1]
    return max(sum(costs[a:b]) for a, b in pairwise(itertools.accumulate(counts, initial=0)))


def compositions(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    """All ways to write `total` as an ordered sum of `parts` positive numbers."""
    for cuts in itertools.combinations(range(1, total), parts - 1):
        yield tuple(b - a for a, b in pairwise((0, *cuts, total)))


def test_alternating_blocks_in_several_chunks_are_close_to_the_best() -> None:
    """Every other block has experts; the best division of eight chunks is out of reach of a search through all."""
    placement, blocks, head = Placement.v_shape(4), [BLOCK, 2500] * 24, 4000
    counts = BY_COST.counts(blocks, (0, head), placement)
    bounds = [*itertools.accumulate(counts, initial=0)]
    chunks = [sum(blocks[a:b]) + head * (b == len(blocks)) for a, b in pairwise(bounds)]
    ranks = [sum(chunks[chunk] for chunk in placement.chunks_of(rank)) for rank in range(4)]
    assert max(ranks) <= 1.04 * sum(ranks) / 4


# The most that a division may cost over an even one. Orders of the schedules with limits are made for equal chunks, so
# that one may fit an uneven division better or worse, whatever its costs are.
MOST = {"1f1b": 1.0, "interleaved": 1.0, "zb-h1": 1.01, "interleaved-zb": 1.01, "zbv": 1.02, "v-half": 1.02}


@pytest.mark.parametrize("name", SCHEDULE_CHUNKS)
def test_a_step_is_not_slower_than_with_blocks_spread_evenly(name: str) -> None:
    chunks, gains = SCHEDULE_CHUNKS[name][0], []
    for layers, ranks, batches in [(12, 4, 8), (13, 4, 8), (20, 4, 12), (24, 4, 16), (18, 2, 8), (32, 8, 16)]:
        schedule = build_schedule(name, ranks, chunks, batches)
        for head in (0, 0.3, 1, 2.04, 5.4):
            times = []
            for counts in (counts_of(layers, schedule.placement, head), evenly(layers, ranks * chunks)):
                costs = [*counts[:-1], counts[-1] + head]
                spans = simulate(schedule.orders, schedule.placement, chunk_costs=costs)
                times.append(max(span.end for span in spans))
            assert times[0] <= MOST.get(name, 1.05) * times[1] + 1e-9, (layers, ranks, head, times)
            gains.append(times[1] / times[0] - 1)
    assert sum(gains) / len(gains) > 0.03


def evenly(layers: int, chunks: int) -> list[int]:
    """Equal numbers of blocks; the rest goes to the chunks in the middle."""
    return counts_of(layers, Placement.loop(chunks, 1))


@pytest.mark.parametrize(("layers", "stages"), [(1, 2), (3, 4), (12, 16)])
def test_fewer_blocks_than_chunks_are_rejected(layers: int, stages: int) -> None:
    sentence = rf"{layers} layers? cannot fill {stages} pipeline stages \(--num-layers {layers}, .*at most {layers} "
    with pytest.raises(ConfigError, match=sentence):
        counts_of(layers, Placement.loop(stages, 1))


@pytest.mark.parametrize(
    ("flags", "layers", "placement", "counts"),
    [
        ({"pp_partition_method": "type:transformer"}, 24, Placement.loop(4, 1), [6, 6, 6, 6]),
        ({"pp_partition_method": "type:transformer|embedding"}, 70, Placement.loop(12, 1), [5, *[6] * 10, 5]),
        ({"account_for_loss_in_pipeline_split": True}, 23, Placement.loop(4, 1), [6, 6, 6, 5]),
        ({"account_for_embedding_in_pipeline_split": True}, 23, Placement.loop(4, 1), [5, 6, 6, 6]),
        ({"account_for_loss_in_pipeline_split": True}, 23, Placement.loop(4, 2), [3, 3, 3, 3, 3, 3, 3, 2]),
        ({"decoder_first_pipeline_num_layers": 3}, 12, Placement.loop(4, 1), [3, 3, 3, 3]),
        ({"decoder_first_pipeline_num_layers": 5}, 11, Placement.loop(4, 1), [5, 2, 2, 2]),
        ({"decoder_last_pipeline_num_layers": 2}, 20, Placement.loop(4, 2), [3, 3, 3, 1, 3, 3, 3, 1]),
        (
            {"decoder_first_pipeline_num_layers": 4, "decoder_last_pipeline_num_layers": 3},
            13,
            Placement.loop(4, 1),
            [4, 3, 3, 3],
        ),
        ({"num_layers_per_virtual_pipeline_stage": 3}, 24, Placement.loop(4, 2), [3] * 8),
    ],
)
def test_flags_that_count_blocks_decide_for_themselves(
    flags: dict[str, object], layers: int, placement: Placement, counts: list[int]
) -> None:
    division = Division.of(ParallelRequest(pipeline_model_parallel_size=placement.ranks, **flags))
    assert counts_of(layers, placement, 5, division) == counts


def test_no_flag_means_costs() -> None:
    assert Division.of(ParallelRequest(pipeline_model_parallel_size=4)) == BY_COST
    assert counts_of(24, Placement.loop(4, 1), 5, EVENLY) == [6, 6, 6, 6]
