"""Contiguous shares of text files, one a rank: together they hold every line once, in order."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

from megatron.corpus.sources import Block, blocks
from megatron.errors import ConfigError

_SEARCH_BYTES = 1 << 16


def share_blocks(paths: Sequence[str], rank: int, size: int, block_bytes: int) -> Iterator[Block]:
    """Blocks of whole lines of one rank's share; the shares differ by no more than a line of bytes.

    Raises:
        ConfigError: there are several ranks, and an input can be read from its beginning only.
    """
    if size == 1:
        yield from blocks(paths, block_bytes)
        return
    for path in paths:
        beginning = next(blocks((path,), _SEARCH_BYTES), None)
        if beginning is not None and beginning.data is not None:
            raise ConfigError(
                f"--input {path} can only be read from its beginning, so {size} ranks cannot share it. Decompress it, "
                "or use tools/preprocess_data.py with --workers."
            )
    lengths = [os.path.getsize(path) for path in paths]
    total = sum(lengths)
    first, last = total * rank // size, total * (rank + 1) // size
    before = 0
    for path, length in zip(paths, lengths, strict=True):
        start, stop = max(first - before, 0), min(last - before, length)
        before += length
        if start < stop:
            yield from _cut(path, start, stop, length, block_bytes)


def _cut(path: str, first: int, last: int, length: int, block_bytes: int) -> Iterator[Block]:
    with open(path, "rb", buffering=0) as file:

        def line_start(offset: int) -> int:
            """The first offset from here on at which a line begins, or the end of the file."""
            if offset == 0:
                return 0
            position = offset - 1
            while position < length:
                file.seek(position)
                near = file.read(_SEARCH_BYTES)
                found = near.find(b"\n")
                if found >= 0:
                    return position + found + 1
                if not near:
                    break
                position += len(near)
            return length

        start, stop = line_start(first), line_start(last)
        while start < stop:
            end = min(line_start(min(start + block_bytes, length)), stop)
            yield Block(path, start, end - start, None, end - start)
            start = end
