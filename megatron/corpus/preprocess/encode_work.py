"""Encoding in worker processes: lengths go to the parent, ids stay in the worker until it knows their place.

The parent alone knows the order of the blocks, and so at which offset of the unfinished file the ids of each belong; it
replies with that, and the worker writes them there itself.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron.corpus.inputs.block import InputBlock
from megatron.corpus.inputs.lines import BadLine
from megatron.corpus.preprocess.copying import write_at
from megatron.corpus.preprocess.encode import BlockEncoder, EncodedBlock, EncodedKey, EncodeOptions
from megatron.corpus.workers.pool import BlockWork, Message
from megatron.files.failures import storage_error
from megatron.files.replacing import start_write_back


class EncodeWork(BlockWork[EncodedBlock]):
    """Encodes blocks; a spawned worker loads the tokenizer again, but does not check its fast encoder again."""

    title = "preprocessing"
    is_finished_by_reply = True

    def __init__(self, encoder: BlockEncoder) -> None:
        self.encoder = encoder

    def recipe(self) -> tuple[Callable[..., EncodeWork], tuple[Any, ...]]:
        """Options, and the library that the fast encoder was found to agree with."""
        return _rebuilt, (self.encoder.options, self.encoder.tokenizer.library)

    def run(self, block: InputBlock) -> EncodedBlock:
        """Encodes a block, see `BlockEncoder.encode`."""
        return self.encoder.encode(block)

    def pack(self, result: EncodedBlock) -> Message:
        """All but the ids."""
        tables = [(key.lengths, key.sequences_per_document) for key in result.keys]
        facts = {
            "has_documents": [documents is not None for _, documents in tables],
            "lines": result.lines,
            "empty": result.empty,
            "bad": [[bad.line, bad.offset, bad.reason] for bad in result.bad],
            "bad_count": result.bad_count,
        }
        return Message(facts, [table for pair in tables for table in pair if table is not None])

    def unpack(self, facts: dict[str, Any], buffers: list[bytearray], reply: Callable[[Any], None]) -> EncodedBlock:
        """The block without its ids; its `place` replies to the worker."""
        rest = iter(buffers)

        def table() -> npt.NDArray[np.int64]:
            return np.frombuffer(next(rest), np.int64)

        keys = tuple(EncodedKey(None, table(), table() if has else None) for has in facts["has_documents"])
        bad = tuple(BadLine(*entry) for entry in facts["bad"])
        return EncodedBlock(keys, facts["lines"], facts["empty"], bad, facts["bad_count"], reply)

    def finish(self, result: EncodedBlock, reply: Sequence[tuple[str, int]]) -> None:
        """Writes the ids of each key to their place (path, byte offset) in the unfinished `.bin` file.

        Raises:
            StorageError: they cannot be written.
        """
        for key, (path, offset) in zip(result.keys, reply, strict=True):
            if key.ids is None or not key.ids.size:
                continue
            try:
                descriptor = os.open(path, os.O_WRONLY)
                try:
                    write_at(descriptor, key.ids.view(np.uint8).data, offset)
                    start_write_back(descriptor, offset, key.ids.nbytes)
                finally:
                    os.close(descriptor)
            except OSError as failure:
                raise storage_error(Path(path), failure) from failure


def _rebuilt(options: EncodeOptions, known_library: str) -> EncodeWork:
    return EncodeWork(BlockEncoder(options, known_library))
