"""Blocks: their bytes, from memory or from the file, and files that changed since they were cut."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.corpus.inputs.block import InputBlock, as_block_data, shown_path
from megatron.corpus.inputs.long_lines import LONG_LINE_BYTES
from megatron.errors import DataError


def test_a_block_gives_its_bytes_from_memory_or_from_the_file(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"0123456789")
    assert InputBlock(str(path), 3, 4, None, 4).read() == b"3456"
    assert InputBlock("gone", 3, 4, b"held", 4).read() == b"held"


def test_a_file_that_became_shorter_or_vanished_is_named(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"0123456789")
    with pytest.raises(DataError, match=r"in\.jsonl: ended at byte offset 10 instead of 12"):
        InputBlock(str(path), 3, 9, None, 9).read()
    with pytest.raises(DataError, match=r"gone: cannot be read past byte offset 3"):
        InputBlock(str(tmp_path / "gone"), 3, 9, None, 9).read()


def test_only_short_data_are_copied() -> None:
    short, long = bytearray(b"abc"), bytearray(LONG_LINE_BYTES)
    assert type(as_block_data(short)) is bytes and as_block_data(short) == b"abc"
    assert as_block_data(long) is long


def test_standard_input_has_a_name() -> None:
    assert shown_path("-") == "<stdin>" and shown_path("a.jsonl") == "a.jsonl"
