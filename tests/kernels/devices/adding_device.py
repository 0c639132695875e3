"""A CPU with the products that torch has for CUDA: of half precision, added to a sum in float32."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from megatron.kernels import products


class AddingDevice:
    """`addmm` and `mm` as torch has them for CUDA, without rounding in between.

    Args:
        mixes: whether the sum may have another dtype than the matrices.

    Attributes:
        calls: how often a product was added to a sum of another dtype.
    """

    def __init__(self, *, mixes: bool = True) -> None:
        self.mixes, self.calls = mixes, 0
        self._addmm, self._mm = torch.addmm, torch.mm

    def addmm(
        self,
        total: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        *,
        beta: float = 1,
        out_dtype: torch.dtype | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """In place if there is an `out_dtype`."""
        if out_dtype is None:
            return self._addmm(total, a, b, beta=beta) if out is None else self._addmm(total, a, b, beta=beta, out=out)
        if total.dtype is not a.dtype and not self.mixes:
            raise RuntimeError(f"self and mat2 must have the same dtype, but got {total.dtype} and {b.dtype}")
        assert out is total and out.dtype is out_dtype
        self.calls += 1
        product = a.to(out_dtype) @ b.to(out_dtype)
        return out.add_(product) if beta else out.copy_(product)

    def mm(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        *,
        out_dtype: torch.dtype | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """With `out_dtype` from factors of that dtype."""
        if out_dtype is None:
            return self._mm(a, b) if out is None else self._mm(a, b, out=out)
        return a.to(out_dtype) @ b.to(out_dtype)


@contextmanager
def adding_device(device: object) -> Iterator[None]:
    """Replaces `addmm` and `mm` of this CPU by those of `device`."""
    products._adds_to_float32.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(products, "_ADDING_DEVICES", ("cpu",))
        for name in ("addmm", "mm"):
            patch.setattr(torch, name, getattr(device, name))
        yield
    products._adds_to_float32.cache_clear()
