"""What a conversion must know of our network without building it: the names and logical shapes of its tensors."""

from __future__ import annotations

from collections.abc import Iterator

from megatron.config import ModelConfig
from megatron.model.interface.network import LayerStack
from megatron.model.networks import network_layers
from megatron.parallel.mesh import ParallelMesh
from megatron.parallel.shard_spec import shard_spec_of


def network_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of the network in the order of its layers, with its logical shape; allocates nothing."""
    stack = LayerStack(network_layers(config, ParallelMesh.single("meta")))
    return {name: shard_spec_of(parameter).shape for name, parameter in stack.named_parameters()}


def slices(
    shape: tuple[int, ...], item_bytes: int, limit_bytes: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Boxes (start, stop) of at most so many bytes that make up a tensor, each a range of its elements, in order.

    A single row of the last dimension is never cut.
    """
    yield from _slices((), shape, item_bytes, limit_bytes)


def _slices(
    fixed: tuple[int, ...], rest: tuple[int, ...], item_bytes: int, limit_bytes: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    row_bytes = item_bytes
    for size in rest[1:]:
        row_bytes *= size
    start = tuple(fixed)
    stop = tuple(index + 1 for index in fixed)
    if not rest or row_bytes * rest[0] <= limit_bytes or (len(rest) == 1 and fixed):
        yield start + (0,) * len(rest), stop + rest
    elif row_bytes <= limit_bytes or len(rest) == 1:
        rows = max(1, limit_bytes // row_bytes)
        for first in range(0, rest[0], rows):
            last = min(first + rows, rest[0])
            yield start + (first,) + (0,) * (len(rest) - 1), stop + (last,) + rest[1:]
    else:
        for index in range(rest[0]):
            yield from _slices((*fixed, index), rest[1:], item_bytes, limit_bytes)
