"""A flat tensor for sending many tensors in one message."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class FlatBucket:
    """A buffer for contiguous copies of tensors, with permanent views; it has memory only while it is open.

    Args:
        like: tensors with the shapes and the device of the views.
        dtype: of the buffer; `like`'s by default.

    Attributes:
        flat: the buffer. `[n]`
        views: a view for each tensor, in its shape.
    """

    def __init__(self, like: Sequence[torch.Tensor], dtype: torch.dtype | None = None) -> None:
        sizes = [each.numel() for each in like]
        self.flat = torch.empty(sum(sizes), dtype=dtype or like[0].dtype, device=like[0].device)
        self.views = [part.view_as(each) for part, each in zip(self.flat.split(sizes), like, strict=True)]
        self._bytes = self.flat.untyped_storage().nbytes()
        self.is_open = True
        self.close()

    def open(self) -> torch.Tensor:
        """Allocates the memory; the values are undefined."""
        if not self.is_open:
            self.flat.untyped_storage().resize_(self._bytes)
            self.is_open = True
        return self.flat

    def fill(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Allocates the memory and copies tensors into it."""
        self.open()
        torch._foreach_copy_(self.views, list(tensors))
        return self.flat

    def close(self) -> None:
        """Frees the memory; the views must not be used until it is opened again."""
        if self.is_open:
            self.flat.untyped_storage().resize_(0)
            self.is_open = False
