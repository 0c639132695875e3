"""Parts of parameters in optimizers: slices of flat tensors, matrices of blocks, tensors in nested containers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from megatron.parallel.shard_spec import shard_spec_of


class MasterSlice(NamedTuple):
    """The part of a parameter that this rank updates.

    Attributes:
        first: its flat row-major offset in the parameter.
        values: its values in fp32, a view into `flat`.
        flat: the optimizer's tensor, the key of its state.
        offset: the part's offset in `flat`.
    """

    first: int
    values: torch.Tensor
    flat: torch.Tensor
    offset: int


# Returns the part of a parameter that this rank updates; None if it updates none.
SliceOf = Callable[[nn.Parameter], MasterSlice | None]


def is_block_matrix(parameter: nn.Parameter) -> bool:
    """Returns True for block matrices; False for embeddings, the output head and vectors."""
    return shard_spec_of(parameter).is_matrix and ".layers." in getattr(parameter, "global_name", "")


def has_whole_gradient(parameter: nn.Parameter) -> bool:
    """Returns True for block matrices whose gradient on each rank covers all tokens of a micro-batch; not experts'."""
    is_shared = ".experts." not in getattr(parameter, "global_name", "") and not shard_spec_of(parameter).summed_over
    return is_shared and is_block_matrix(parameter)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in nested containers."""
    if torch.is_tensor(value):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from tensors_in(item)
