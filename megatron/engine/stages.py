"""Assigns the layers of a network to pipeline stages."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.config.layout import blocks_per_stage
from megatron.model.interface.network import LayerKind, LayerSpec


def stage_bounds(specs: Sequence[LayerSpec], stages: int, *, may_be_empty: bool = False) -> list[int]:
    """The boundaries of the stages in the list of layers: stage `i` runs `specs[bounds[i]:bounds[i + 1]]`.

    Stage boundaries lie between blocks. Layers before the first block belong to the first stage, layers after the last
    block to the last.

    Args:
        may_be_empty: whether stages may go without a block if there are too few: those after the first ones.

    Raises:
        ConfigError: there are fewer blocks than stages.
    """
    blocks = [index for index, spec in enumerate(specs) if spec.kind is LayerKind.BLOCK]
    costs = [specs[index].cost.parameters for index in blocks]
    filled = min(stages, len(blocks)) if may_be_empty else stages
    bounds, taken = [0], 0
    for count in [*blocks_per_stage(costs, filled), *[0] * (stages - filled)][:-1]:
        taken += count
        bounds.append(blocks[taken] if taken < len(blocks) else blocks[-1] + 1)
    return [*bounds, len(specs)]
