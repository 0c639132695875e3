"""Pieces of named tensors, described independently of any layout, and the targets of loaded pieces."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch

from megatron.parallel.shard_spec import ShardSpec, shard_spec_of

Kind = Literal["weight", "master", "exp_avg", "exp_avg_sq", "average"]


@dataclass(frozen=True)
class PieceKey:
    """A flat range inside a box of a global tensor.

    The box is `start[i] <= index[i] < stop[i]` in the tensor of shape `shape`. Its elements are numbered row-major from
    0, and the piece holds elements `first` to `last - 1`.

    Attributes:
        is_optional: nothing is loaded if a checkpoint lacks the tensor.
    """

    name: str
    kind: Kind
    shape: tuple[int, ...]
    start: tuple[int, ...]
    stop: tuple[int, ...]
    first: int
    last: int
    is_optional: bool = dataclasses.field(default=False, compare=False)

    @property
    def numel(self) -> int:
        return self.last - self.first

    @property
    def box_shape(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in zip(self.start, self.stop, strict=True))

    @property
    def box_numel(self) -> int:
        return math.prod(self.box_shape)

    @classmethod
    def of(
        cls,
        spec: ShardSpec,
        name: str,
        kind: Kind,
        first: int = 0,
        last: int | None = None,
        *,
        is_optional: bool = False,
    ) -> PieceKey:
        """A flat range of this rank's shard of a parameter; by default the whole shard."""
        last = spec.box_numel if last is None else last
        return cls(name, kind, spec.shape, spec.start, spec.stop, first, last, is_optional)

    def narrowed(self, first: int, last: int) -> PieceKey:
        """The elements `first` to `last` of this piece."""
        return dataclasses.replace(self, first=self.first + first, last=self.first + last)

    def of_kind(self, kind: Kind) -> PieceKey:
        """The same elements of another kind."""
        # called for every save, so not by the slower `dataclasses.replace`
        return PieceKey(self.name, kind, self.shape, self.start, self.stop, self.first, self.last, self.is_optional)


def filling(
    targets: Iterable[tuple[PieceKey, torch.Tensor]],
) -> Iterator[tuple[PieceKey, Callable[[torch.Tensor], None]]]:
    """Turns (piece, flat target tensor) pairs into the (piece, function that fills the target) pairs of loading."""
    for key, target in targets:
        yield key, _filler(target)


def filling_weights(
    parameters: Iterable[torch.Tensor],
) -> Iterator[tuple[PieceKey, Callable[[torch.Tensor], None]]]:
    """This rank's shard of every weight or state, with the function that fills it; padding rows stay unchanged.

    A tied copy of a weight of another pipeline stage is loaded from the original.
    """
    return filling(
        (_weight_key(spec, parameter), parameter.detach().view(-1)[: spec.box_numel])
        for parameter in parameters
        if (spec := shard_spec_of(parameter)).box_numel
    )


def _weight_key(spec: ShardSpec, parameter: torch.Tensor) -> PieceKey:
    is_optional = getattr(parameter, "is_optional", False)
    return PieceKey.of(spec, parameter.global_name, "weight", is_optional=is_optional)  # type: ignore[attr-defined]


def _filler(target: torch.Tensor) -> Callable[[torch.Tensor], None]:
    def fill(values: torch.Tensor) -> None:
        with torch.no_grad():
            target.copy_(values)

    return fill
