"""The child process that interprets pickles: `python -m megatron.convert.pickles.child MEMORY SECONDS`.

It gets files as open descriptors and the ranges to read on its standard input, gives up every right that it can
(new files, sockets, processes, memory, time), and only then reads the first byte. The answer is one line of JSON.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from typing import Any

from megatron.convert.pickles.containers import FileRange, read_range
from megatron.convert.pickles.description import describe
from megatron.convert.pickles.values import RefusedError


def main(words: list[str]) -> None:
    """Answers one request.

    Args:
        words: bytes of memory, seconds of processor time.
    """
    memory_bytes, processor_seconds = map(int, words)
    _give_up_rights(memory_bytes, processor_seconds)
    text = json.dumps(_answers(memory_bytes)).encode()
    while text:
        text = text[os.write(1, text) :]


def _answers(memory_bytes: int) -> list[dict[str, Any]]:
    """A description or a refusal for each range that is asked for."""
    request = bytearray()
    while block := os.read(0, 2**16):
        request += block

    def range_of(file: int, begin: int, end: int) -> FileRange:
        return FileRange(lambda offset_bytes, count: os.pread(file, count, offset_bytes), begin, end)

    return [_answer(range_of(*row), memory_bytes) for row in json.loads(bytes(request))]


def _answer(file: FileRange, memory_bytes: int) -> dict[str, Any]:
    try:
        return describe(read_range(file))
    except RefusedError as failure:
        return {"refused": str(failure)}
    except MemoryError:
        return {"refused": f"it needs more than the {memory_bytes} bytes of memory that reading may take"}
    except Exception as failure:  # damage that no check foresees is refused as well
        return {"refused": f"it is damaged ({type(failure).__name__})"}


def _give_up_rights(memory_bytes: int, processor_seconds: int) -> None:
    """Sets limits that cannot be raised again. Without new descriptors no file, socket or pipe can be opened."""
    limits = {
        resource.RLIMIT_AS: memory_bytes,
        resource.RLIMIT_CPU: processor_seconds,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NPROC: 0,
        resource.RLIMIT_NOFILE: 0,
    }
    for kind, limit in limits.items():
        _, hard = resource.getrlimit(kind)
        lowest = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(kind, (lowest, lowest))


if __name__ == "__main__":
    main(sys.argv[1:])
