"""Cleaning as the work of a pool of workers: results cross the pipes as JSON and arrays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import numpy as np

from megatron.corpus.cleaning.cleaner import Changed, CleanedBlock, Cleaner, Dropped
from megatron.corpus.cleaning.contamination import EvaluationSets
from megatron.corpus.cleaning.documents.clean_options import CleanOptions
from megatron.corpus.inputs.block import InputBlock
from megatron.corpus.workers.pool import BlockWork, Message


class CleanWork(BlockWork[CleanedBlock]):
    """Cleans blocks."""

    title = "cleaning"

    def __init__(self, cleaner: Cleaner) -> None:
        self.cleaner = cleaner

    def recipe(self) -> tuple[Callable[..., CleanWork], tuple[Any, ...]]:
        """What the cleaner was made from."""
        return _rebuilt, (self.cleaner.options, self.cleaner.evaluation, self.cleaner.counts)

    def run(self, block: InputBlock) -> CleanedBlock:
        """Cleans a block, see `Cleaner.clean`."""
        return self.cleaner.clean(block)

    def pack(self, result: CleanedBlock) -> Message:
        """Counts and documents as JSON; the arrays and bytes as they are."""
        kinds: dict[str, Any] = {}
        buffers: list[Any] = []
        for name in (entry.name for entry in fields(result)):
            value = getattr(result, name)
            if isinstance(value, bytes):
                kinds[name] = None
                buffers.append(value)
            elif isinstance(value, np.ndarray):
                kinds[name] = [value.dtype.str, list(value.shape)]
                buffers.append(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)
        counts = {"documents": result.documents, "dropped": result.dropped, "changed": result.changed}
        return Message({**counts, "kinds": kinds}, buffers)

    def unpack(self, facts: dict[str, Any], buffers: list[bytearray], reply: Callable[[Any], None]) -> CleanedBlock:
        """The block as the worker had it."""
        cleaned = CleanedBlock(
            facts["documents"],
            [Dropped(*entry) for entry in facts["dropped"]],
            [Changed(*entry) for entry in facts["changed"]],
        )
        for (name, kind), data in zip(facts["kinds"].items(), buffers, strict=True):
            setattr(cleaned, name, bytes(data) if kind is None else np.frombuffer(data, kind[0]).reshape(kind[1]))
        return cleaned


def _rebuilt(options: CleanOptions, evaluation: EvaluationSets | None, counts: bool) -> CleanWork:
    return CleanWork(Cleaner(options, evaluation, counts))
