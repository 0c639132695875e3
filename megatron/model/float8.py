"""Which products of a network are computed in eight bits."""

from __future__ import annotations

import math
from collections.abc import Collection

from megatron.kernels.float8 import MULTIPLE, Float8
from megatron.model.gpt import BLOCKS
from megatron.model.interface.network import LayerStack
from megatron.parallel.shard_spec import shard_spec_of
from megatron.parallel.tensor.layers import ColumnParallelLinear, RowParallelLinear


def use_float8(stack: LayerStack, float8: Float8, blocks: Collection[int]) -> tuple[int, int]:
    """Has the split matrices of these blocks multiplied in eight bits: those of attention and of dense feed-forward
    layers, not those of experts and routers.

    Returns:
        How many matrices this rank has in these blocks, and of how many the sizes allow it.
    """
    names = {f"{BLOCKS}.{index}" for index in blocks}
    count = fitting = 0
    for spec, module in stack.named_layers():
        for layer in module.modules() if spec.name in names else ():
            if isinstance(layer, ColumnParallelLinear | RowParallelLinear):
                layer.float8 = float8
                *outputs, inputs = shard_spec_of(layer.weight).local_shape
                count += 1
                fitting += math.prod(outputs) % MULTIPLE == 0 and inputs % MULTIPLE == 0
    return count, fitting
