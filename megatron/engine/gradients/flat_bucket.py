"""A flat tensor in which others are sent, without a call for each of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class FlatBucket:
    """Room for tensors side by side, whose views are made once; it has memory only while it is open.

    Args:
        like: tensors of the shapes, on the device, and of the dtype unless another is given.

    Attributes:
        flat: all of it. `[n]`
        views: the place of each tensor, in its shape.
    """

    def __init__(self, like: Sequence[torch.Tensor], dtype: torch.dtype | None = None) -> None:
        sizes = [each.numel() for each in like]
        self.flat = torch.empty(sum(sizes), dtype=dtype or like[0].dtype, device=like[0].device)
        self.views = [part.view_as(each) for part, each in zip(self.flat.split(sizes), like, strict=True)]
        self._bytes = self.flat.untyped_storage().nbytes()
        self.is_open = True
        self.close()

    def open(self) -> torch.Tensor:
        """Takes memory; the values are not defined."""
        if not self.is_open:
            self.flat.untyped_storage().resize_(self._bytes)
            self.is_open = True
        return self.flat

    def fill(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Takes memory and copies tensors into it."""
        self.open()
        torch._foreach_copy_(self.views, list(tensors))
        return self.flat

    def close(self) -> None:
        """Frees the memory; nobody may use the views until it is opened again."""
        if self.is_open:
            self.flat.untyped_storage().resize_(0)
            self.is_open = False
