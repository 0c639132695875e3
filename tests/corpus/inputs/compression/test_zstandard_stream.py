"""Streams of `.zst` files: all frames, and an error where a file was truncated."""

from __future__ import annotations

import io
import sys

import pytest

from megatron.corpus.inputs.zstandard_stream import zstandard_library, zstandard_stream
from megatron.errors import ConfigError

zstandard = pytest.importorskip("zstandard")


def packed(*parts: bytes) -> bytes:
    return b"".join(zstandard.ZstdCompressor().compress(part) for part in parts)


def test_all_frames_are_read() -> None:
    parts = (b"a" * 100_000, b"", b"b" * 7)
    assert zstandard_stream(io.BytesIO(packed(*parts)), "x.zst").read() == b"".join(parts)
    assert zstandard_stream(io.BytesIO(b""), "x.zst").read() == b""


@pytest.mark.parametrize("lost", [1, 4, 9])
def test_a_truncated_file_is_an_error(lost: int) -> None:
    data = packed(b"first", b"second one")
    with pytest.raises(EOFError, match="the file ends inside a compressed frame"):
        zstandard_stream(io.BytesIO(data[:-lost]), "x.zst").read()


def test_a_missing_package_is_named_with_the_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(ConfigError, match=r"--output out\.zst needs the zstandard package .* or name it \.gz"):
        zstandard_library("out.zst", "--output", "name it .gz")
