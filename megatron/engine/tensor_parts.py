"""Parameters as optimizers see them: matrices of blocks, slices in flat tensors, and tensors in nested containers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from megatron.parallel.shard_spec import shard_spec_of


class MasterSlice(NamedTuple):
    """The part of a parameter that this rank updates: its flat row-major offset in the parameter, its values in fp32,
    the tensor that they are a view into, which is the key of the torch optimizer's state, and its offset in that.
    """

    first: int
    values: torch.Tensor
    flat: torch.Tensor
    offset: int


# The part of a parameter that this rank updates; None if it updates none.
SliceOf = Callable[[nn.Parameter], MasterSlice | None]


def is_block_matrix(parameter: nn.Parameter) -> bool:
    """Whether a parameter is a matrix of a block; embeddings, the head and vectors are none."""
    return shard_spec_of(parameter).is_matrix and ".layers." in getattr(parameter, "global_name", "")


def has_whole_gradient(parameter: nn.Parameter) -> bool:
    """Whether it is a matrix of a block, of no experts, of which every rank has the gradient of all of its samples."""
    is_shared = ".experts." not in getattr(parameter, "global_name", "") and not shard_spec_of(parameter).summed_over
    return is_shared and is_block_matrix(parameter)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in nested containers."""
    if torch.is_tensor(value):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from tensors_in(item)
