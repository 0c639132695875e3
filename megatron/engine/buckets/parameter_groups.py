"""Division of a rank's parameters into the optimizer's groups, which are the buckets of data-parallel messages."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from megatron.engine.buckets.bucket_queue import in_buckets
from megatron.parallel.mesh import ParallelMesh
from megatron.parallel.shard_spec import shard_spec_of

NO_CHUNKS: Mapping[int, int] = types.MappingProxyType({})


def parameter_groups(
    parameters: Iterable[nn.Parameter],
    kind_of: Callable[[nn.Parameter], tuple[Any, ...]],
    mesh: ParallelMesh,
    tied: Sequence[nn.Parameter] = (),
    chunks: Mapping[int, int] = NO_CHUNKS,
    bucket_elements: int | None = None,
) -> list[list[nn.Parameter]]:
    """Groups parameters whose updates are alike, in the order of their kinds.

    A tied weight is a separate group, so that both stages divide it alike over their data-parallel ranks.

    Args:
        parameters: the trained parameters, in the order of the network.
        kind_of: returns all that makes an update different, sortable.
        tied: the weights that another stage also holds.
        chunks: the chunk of each parameter, by its id, if the rank has several.
        bucket_elements: divides each group into buckets of this size, if data-parallel ranks divide it: each is
            exchanged once a backward pass has completed it, and divided over all ranks. Chunks, and parameters whose
            gradients are summed over other ranks first, have separate buckets.
    """
    groups: dict[tuple[Any, ...], list[nn.Parameter]] = {}
    tied_numbers = {id(parameter): number for number, parameter in enumerate(tied, start=1)}
    for parameter in parameters:
        key = *kind_of(parameter), tied_numbers.get(id(parameter), 0)
        if bucket_elements is not None:
            key = *key, is_partial(parameter), -chunks.get(id(parameter), 0)
        groups.setdefault(key, []).append(parameter)
    divided: list[list[nn.Parameter]] = []
    for _, members in sorted(groups.items(), key=lambda item: item[0]):
        is_alone = shard_spec_of(members[0]).replicas(mesh).size == 1
        divided += [members] if bucket_elements is None or is_alone else in_buckets(members, bucket_elements)
    return divided


def is_partial(parameter: nn.Parameter) -> bool:
    """Returns True if the gradients of ranks with different tokens are summed before they are averaged."""
    return any(axis.size > 1 for axis in shard_spec_of(parameter).summed_over)
