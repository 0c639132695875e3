"""Compressed files are read to their very end: damage after a member, truncation, an empty file and a bomb are
rejected.
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron.errors import ConfigError, DataError
from trident.corpus.inputs import input_blocks
from trident.corpus.inputs.compressed import zstandard_library, zstandard_stream
from trident.corpus.inputs.input_blocks import blocks

MAKERS: dict[str, Callable[[bytes], bytes]] = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}


def text_of(path: Path, separator: str | None = None) -> bytes:
    return b"".join(block.read() for block in blocks([str(path)], 1000, separator))


@pytest.mark.parametrize("suffix", MAKERS)
def test_many_members_and_zeros_between_them(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"in{suffix}"
    members = [b"first\n" * 100_000, b"", b"second\n", b"third"]
    path.write_bytes(b"".join(MAKERS[suffix](member) + bytes(8) for member in members))
    assert text_of(path) == b"".join(members)


@pytest.mark.parametrize("suffix", MAKERS)
@pytest.mark.parametrize("rest", [b"garbage that is no member", b"\x00\x00\x01"])
def test_damage_after_a_member_is_not_the_end(tmp_path: Path, suffix: str, rest: bytes) -> None:
    path = tmp_path / f"in{suffix}"
    path.write_bytes(MAKERS[suffix](b"first\n") + rest)
    with pytest.raises(DataError, match=rf"in\{suffix}: cannot be read past byte offset [06] of its text"):
        text_of(path)
    path.write_bytes(MAKERS[suffix](b"first\n") + MAKERS[suffix](b"second\n")[:-5])
    with pytest.raises(DataError, match=rf"in\{suffix}: cannot be read past byte offset \d+ of its text"):
        text_of(path)


@pytest.mark.parametrize("suffix", [*MAKERS, ".zst"])
def test_an_empty_file_is_not_a_valid_compressed_file(tmp_path: Path, suffix: str) -> None:
    if suffix == ".zst":
        pytest.importorskip("zstandard", reason="the zstandard package is not installed")
    path = tmp_path / f"in.jsonl{suffix}"
    path.touch()
    with pytest.raises(DataError, match=rf"byte offset 0 of its text: it is empty, which no \{suffix} file is"):
        text_of(path)


@pytest.mark.parametrize("separator", [None, "\n\n"])
def test_a_huge_document_from_a_tiny_input_is_a_bomb(
    tmp_path: Path, separator: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(input_blocks, "_LONGEST_FREE_BYTES", 3 << 20)
    path = tmp_path / "in.txt.gz"
    path.write_bytes(gzip.compress(b"a\n\n" + bytes(8 << 20)))
    with pytest.raises(
        DataError, match=r"in\.txt\.gz: the document at byte offset \d of its text has more than [345],"
    ):
        text_of(path, separator)
    path.write_bytes(gzip.compress(b"many short documents\n\n" * 500_000))
    assert len(text_of(path, separator)) == 22 * 500_000
    plain = tmp_path / "in.txt"
    plain.write_bytes(bytes(8 << 20))
    assert len(text_of(plain, separator)) == 8 << 20


@pytest.mark.parametrize(("name", "separator"), [("in.jsonl", None), ("in.jsonl.gz", None), ("in.txt", "|")])
def test_an_endless_line_is_not_a_document(
    tmp_path: Path, name: str, separator: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(input_blocks, "_LONGEST_DOCUMENT_BYTES", 2 << 20)
    path = tmp_path / name
    data = b"{}\n" + bytes(4 << 20)
    path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    with pytest.raises(DataError, match=r"byte offset [03] of its text has more than 2,097,152 bytes"):
        text_of(path, separator)


def packed(*parts: bytes) -> bytes:
    zstandard = pytest.importorskip("zstandard", reason="the zstandard package is not installed")
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
    with pytest.raises(ConfigError, match=r"--output out\.zst requires the zstandard package .* or name it \.gz"):
        zstandard_library("out.zst", "--output", "name it .gz")
