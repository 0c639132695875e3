"""Cuts the tensors of a checkpoint of any layout into slices of bounded size."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

from megatron.checkpoint.catalogue import ITEM_BYTES
from megatron.checkpoint.layout import whole
from megatron.parallel.pieces import Kind, PieceKey

SLICE_BYTES = 32 * 2**20


def batches(tensors: Iterable[tuple[str, Kind, tuple[int, ...]]]) -> Iterator[list[PieceKey]]:
    """Flat ranges that cover tensors (name, kind, shape) in order, grouped into batches.

    A batch has at most `SLICE_BYTES` in float32: large tensors are cut, small ones are read together.
    """
    most = max(1, SLICE_BYTES // ITEM_BYTES["F32"])
    batch: list[PieceKey] = []
    filled = 0
    for tensor in itertools.starmap(whole, tensors):
        for first in range(0, tensor.numel, most):
            key = tensor.narrowed(first, min(first + most, tensor.numel))
            if batch and filled + key.numel > most:
                yield batch
                batch, filled = [], 0
            batch.append(key)
            filled += key.numel
    if batch:
        yield batch
