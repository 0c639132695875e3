"""Files are recognized by their first bytes, and texts are not taken for something else."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import tarfile
import zipfile
from pathlib import Path

import pytest

from megatron.files.formats import FIRST_BYTES, LOOKS_LIKE, recognized, recognized_file

LINES = b'{"text": "one"}\n{"text": "two"}\n'


def tar_of(name: str) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        member = tarfile.TarInfo(name)
        member.size = len(LINES)
        archive.addfile(member, io.BytesIO(LINES))
    return stream.getvalue()


def zip_of(name: str) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr(zipfile.ZipInfo(name), LINES)  # a fixed time: all workers collect the same
    return stream.getvalue()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (gzip.compress(LINES, mtime=0), r"a gzip file\. Decompress it \(gunzip\), or .*\.gz$"),
        (bytes.fromhex("28b52ffd") + LINES, "a zstd file"),
        (bytes.fromhex("502a4d18") + LINES, "a zstd file"),
        (lzma.compress(LINES), "an xz file"),
        (bz2.compress(LINES), "a bzip2 file"),
        (bytes.fromhex("04224d18") + LINES, "an lz4 file"),
        (zip_of("in.jsonl"), "a zip archive"),
        (tar_of("in.jsonl"), "a tar archive"),
        (b"PAR1\x15\x04", "a Parquet file"),
        (b"ARROW1\x00\x00", "an Arrow file.*hf://"),
        (b"\xff\xff\xff\xff\x10\x01\x00\x00", "an Arrow file.*hf://"),
        (b"WARC/1.0\r\nWARC-Type: warcinfo\r\n", "a web archive"),
        (LINES.decode().encode("utf-16"), "UTF-16.*iconv"),
        (b"\xfe\xff\x00{", "UTF-16.*iconv"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:12\n", "git lfs pull"),
        (b"\n<!DOCTYPE html>\n", "web site"),
        (b"AA== 0\nAQ== 1\n", "ranks of tiktoken.*HFTokenizer"),
    ],
)
def test_first_bytes_tell_the_format(content: bytes, words: str) -> None:
    with pytest.raises(ValueError, match=f"{LOOKS_LIKE}.*{words}"):
        raise ValueError(recognized(content[:FIRST_BYTES]))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'[{"text": "a"}]', r"a JSON array.*jq -c '\.\[\]'"),
        (b'\n[\n  {\n "text": "a"\n }\n]', "a JSON array"),
        (b'{\r\n  "text": "a"\r\n}', "several lines.*jq -c"),
        (b'"id",text\n1,a\n', r"with a header \(csv\)"),
        (b"id\ttext\n1\ta\n", r"with a header \(csv\)"),
    ],
)
def test_what_is_not_lines_of_json_is_told_where_these_are_wanted(content: bytes, words: str) -> None:
    with pytest.raises(ValueError, match=f"{LOOKS_LIKE}.*{words}"):
        raise ValueError(recognized(content, as_lines=True))
    assert recognized(content) == ""


@pytest.mark.parametrize(
    "content",
    [b"", LINES, b"[INST] a [/INST]\n", b"Words, and more\n", b"one\ntwo\n", b"{ no JSON }\n", b"a 1\nb c\n", b"<s>\n"],
)
def test_texts_are_not_taken_for_something_else(content: bytes) -> None:
    assert recognized(content, as_lines=True) == ""


def test_a_file_that_is_what_its_name_says_is_not_told_to_be_renamed(tmp_path: Path) -> None:
    (tmp_path / "a.gz").write_bytes(gzip.compress(LINES)[:20])
    (tmp_path / "a.zst").write_bytes(gzip.compress(LINES))
    assert recognized_file(str(tmp_path / "a.gz")) == recognized_file(str(tmp_path / "none")) == ""
    assert "a gzip file" in recognized_file(str(tmp_path / "a.zst"))
