"""Assigns the layers of a network to pipeline stages."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.config.layout import stages_problems
from megatron.errors import ConfigError
from megatron.model.interface.network import LayerKind, LayerSpec


def stage_bounds(specs: Sequence[LayerSpec], stages: int) -> list[int]:
    """The boundaries of the stages in the list of layers: stage `i` runs `specs[bounds[i]:bounds[i + 1]]`.

    Stage boundaries lie between blocks. Layers before the first block belong to the first stage, layers after the last
    block to the last.

    Raises:
        ConfigError: there are fewer blocks than stages.
    """
    blocks = [index for index, spec in enumerate(specs) if spec.kind is LayerKind.BLOCK]
    costs = [specs[index].cost.parameters for index in blocks]
    bounds, taken = [0], 0
    for count in blocks_per_stage(costs, stages)[:-1]:
        taken += count
        bounds.append(blocks[taken])
    return [*bounds, len(specs)]


def blocks_per_stage(costs: Sequence[int], stages: int) -> list[int]:
    """How many consecutive blocks each pipeline stage holds.

    Blocks of equal cost are distributed evenly. Remaining blocks go to the middle stages first, which hold no other
    layers, then to the first (embedding) and finally to the last (head). With unequal costs, the cost of the most
    expensive stage is minimized.

    Raises:
        ConfigError: there are fewer blocks than stages; such a stage would lack an optimizer parameter group, and
            DeepSpeed's collectives would wait for it until they time out.
    """
    for problem in stages_problems(len(costs), stages):
        raise ConfigError(problem)
    if len(set(costs)) > 1:
        return _balanced_counts(costs, stages)
    counts = [len(costs) // stages] * stages
    receivers = [*range(1, stages - 1), 0, stages - 1]
    for stage in receivers[: len(costs) % stages]:
        counts[stage] += 1
    return counts


def _balanced_counts(costs: Sequence[int], stages: int) -> list[int]:
    """Counts of consecutive blocks that minimize the cost of the most expensive stage, found by bisection."""
    low, high = max(costs), sum(costs)
    while low < high:
        limit = (low + high) // 2
        if len(_greedy_counts(costs, stages, limit)) <= stages:
            high = limit
        else:
            low = limit + 1
    return _greedy_counts(costs, stages, low)


def _greedy_counts(costs: Sequence[int], stages: int, limit: int) -> list[int]:
    """Fills one stage after another up to `limit`, keeping a block for each later stage; may return more than `stages`
    counts.
    """
    counts, spent = [0], 0
    for index, cost in enumerate(costs):
        left = len(costs) - index
        if counts[-1] and (spent + cost > limit or left <= stages - len(counts)):
            counts.append(0)
            spent = 0
        counts[-1] += 1
        spent += cost
    return counts
