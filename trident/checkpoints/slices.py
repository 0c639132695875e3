"""Cuts the tensors of a checkpoint into slices of bounded size, whatever layout wrote it and however large they are."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

from megatron.checkpoint.catalogue import ITEM_BYTES
from megatron.checkpoint.layout import whole
from megatron.parallel.pieces import Kind, PieceKey

SLICE_BYTES = 32 * 2**20


def batches(tensors: Iterable[tuple[str, Kind, tuple[int, ...]]]) -> Iterator[list[PieceKey]]:
    """Flat ranges that make up tensors (name, kind, shape), in order, in lists that may be in memory at once.

    A range has at most `SLICE_BYTES` in float32, and so has a list together, so that small tensors are read at once.
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
