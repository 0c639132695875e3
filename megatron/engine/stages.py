"""Assigns the layers of a network to the chunks of a pipeline."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.model.interface.layer_cost import MATRICES_ONLY, TokenWork
from megatron.model.interface.network import LayerKind, LayerSpec
from megatron.parallel.schedule.actions import Placement
from megatron.parallel.schedule.division import BY_COST, Division


def stage_bounds(
    specs: Sequence[LayerSpec],
    placement: Placement,
    division: Division = BY_COST,
    work: TokenWork = MATRICES_ONLY,
    *,
    may_be_empty: bool = False,
) -> list[int]:
    """The boundaries of the chunks in the list of layers: chunk `i` runs `specs[bounds[i]:bounds[i + 1]]`.

    Boundaries lie between blocks. Layers before the first block belong to the first chunk, layers after the last block
    to the last. Layers cost their operations; in a network that does not name them, blocks cost their parameters.

    Args:
        work: what layers compute for a token.
        may_be_empty: whether chunks may go without a block if there are too few: those after the first ones.

    Raises:
        ConfigError: there are fewer blocks than chunks.
    """
    blocks = [index for index, spec in enumerate(specs) if spec.kind is LayerKind.BLOCK]
    filled = Placement(placement.owners[: len(blocks)]) if may_be_empty else placement
    costs = [spec.cost.flops(work.pairs) for spec in specs]
    if not any(costs):
        costs = [spec.cost.parameters if spec.kind is LayerKind.BLOCK else 0 for spec in specs]
    ends = (sum(costs[: blocks[0]]), int(work.head_share * sum(costs[blocks[-1] + 1 :]))) if blocks else (0, 0)
    counts = division.counts([costs[index] for index in blocks], ends, filled)
    bounds, taken = [0], 0
    for count in [*counts, *[0] * (placement.chunks - filled.chunks)][:-1]:
        taken += count
        bounds.append(blocks[taken] if taken < len(blocks) else blocks[-1] + 1)
    return [*bounds, len(specs)]
