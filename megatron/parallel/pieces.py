"""A piece: part of a named tensor, described without any layout, and the box arithmetic on it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Kind = Literal["weight", "master", "exp_avg", "exp_avg_sq"]


@dataclass(frozen=True)
class PieceKey:
    """A flat range inside a box of a global tensor.

    The box is `start[i] <= index[i] < stop[i]` in the tensor of shape `shape`; its elements are numbered row-major from
    0, and the piece holds those with `first <= number < last`.
    """

    name: str
    kind: Kind
    shape: tuple[int, ...]
    start: tuple[int, ...]
    stop: tuple[int, ...]
    first: int
    last: int

    @property
    def numel(self) -> int:
        """How many elements the piece holds."""
        return self.last - self.first

    @property
    def box_shape(self) -> tuple[int, ...]:
        """The sides of the box."""
        return tuple(stop - start for start, stop in zip(self.start, self.stop, strict=True))

    @property
    def box_numel(self) -> int:
        """How many elements the whole box holds."""
        return math.prod(self.box_shape)
