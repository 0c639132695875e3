"""Parts of what an optimizer holds: tensors in nested containers, and the slice of a parameter in a flat one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch


class MasterSlice(NamedTuple):
    """The part of a parameter that this rank updates: its flat row-major offset in the parameter, its values in fp32,
    the tensor that they are a view into, which is the key of the torch optimizer's state, and its offset in that.
    """

    first: int
    values: torch.Tensor
    flat: torch.Tensor
    offset: int


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in nested containers."""
    if torch.is_tensor(value):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from tensors_in(item)
