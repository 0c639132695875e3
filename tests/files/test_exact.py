"""Reads and writes that take several system calls."""

from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.files.exact import read_exactly, read_into, write_all


@given(st.binary(max_size=40), st.integers(0, 50), st.integers(1, 7))
def test_short_reads_are_continued(data: bytes, size: int, at_once: int) -> None:
    stream = io.BytesIO(data)

    def read(count: int, done: int) -> bytes:
        assert stream.tell() == done
        return stream.read(min(count, at_once))

    assert read_exactly(read, size) == data[:size]


@given(st.binary(max_size=40), st.integers(0, 50), st.integers(1, 7))
def test_a_target_is_filled_in_place(data: bytes, size: int, at_once: int) -> None:
    target = bytearray(size)

    def read(view: memoryview, done: int) -> int:
        part = data[done : done + min(len(view), at_once)]
        view[: len(part)] = part
        return len(part)

    count = read_into(read, memoryview(target))
    assert count == min(size, len(data)) and target[:count] == data[:size]


@given(st.binary(max_size=40), st.integers(1, 7))
def test_short_writes_are_continued(data: bytes, at_once: int) -> None:
    written = bytearray()

    def write(view: memoryview, done: int) -> int:
        assert done == len(written)
        written.extend(view[:at_once])
        return min(len(view), at_once)

    write_all(write, data)
    assert written == data


def test_a_write_that_accepts_nothing_is_an_error() -> None:
    with pytest.raises(OSError, match="the file system accepts no more bytes"):
        write_all(lambda view, done: 0, b"abc")
