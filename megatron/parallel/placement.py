"""Where a rank's part of a parameter sits in the global parameter."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Placement:
    """The box that the local tensor fills in the global one.

    Args:
        shape: of the global tensor, without vocabulary padding.
        start: first index of the box on each dimension.
        stop: one beyond the last index. Padded vocabulary rows lie beyond it, at the end of the local tensor's
        dimension 0. split: whether tensor-parallel ranks hold different boxes.
    """

    shape: tuple[int, ...]
    start: tuple[int, ...]
    stop: tuple[int, ...]
    split: bool

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Placement:
        """A parameter of which every rank holds all."""
        return cls(shape, (0,) * len(shape), shape, False)

    @classmethod
    def part(cls, shape: tuple[int, ...], dimension: int, rank: int, size: int) -> Placement:
        """Part `rank` of `size` equal ones along a dimension."""
        width = shape[dimension] // size
        start, stop = [0] * len(shape), list(shape)
        start[dimension], stop[dimension] = rank * width, (rank + 1) * width
        return cls(shape, tuple(start), tuple(stop), size > 1)

    @property
    def box_shape(self) -> tuple[int, ...]:
        """The sides of the box."""
        return tuple(stop - start for start, stop in zip(self.start, self.stop, strict=True))


def place(parameter: torch.nn.Parameter, placement: Placement) -> torch.nn.Parameter:
    """Marks a parameter with its placement, and as tensor parallel where it is split.

    DeepSpeed's gradient norm counts a parameter once per model-parallel group unless it carries
    `tensor_model_parallel`.
    """
    parameter.placement = placement  # type: ignore[attr-defined]
    if placement.split:
        parameter.tensor_model_parallel = True  # type: ignore[attr-defined]
    return parameter


def placement_of(parameter: torch.Tensor) -> Placement:
    """The placement of a parameter; all of it if nobody said otherwise."""
    placement: Placement | None = getattr(parameter, "placement", None)
    return placement or Placement.whole(tuple(parameter.shape))
