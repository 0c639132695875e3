"""Inputs are cut into whole lines whatever their compression and the size of the blocks."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import random
import sys
from pathlib import Path

import pytest
import zstandard

from megatron.errors import ConfigError, DataError
from trident.corpus.inputs.compressed import zstandard_stream
from trident.corpus.inputs.input_blocks import blocks, check_inputs, total_bytes

COMPRESSORS = {".jsonl": bytes, ".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}


def sample(seed: int = 0, newline_at_end: bool = True) -> bytes:
    drawn = random.Random(seed)
    lines = [b"x" * drawn.choice([0, 1, 5, 80, 1000, 70_000, 200_000]) for _ in range(60)]
    return b"\n".join(lines) + (b"\n" if newline_at_end else b"")


@pytest.mark.parametrize("newline_at_end", [True, False])
@pytest.mark.parametrize("block_bytes", [1, 100, 65_536, 65_537, 1 << 20, 1 << 30])
@pytest.mark.parametrize("suffix", COMPRESSORS)
def test_blocks_are_whole_lines_and_cover_the_input(
    tmp_path: Path, suffix: str, block_bytes: int, newline_at_end: bool
) -> None:
    data = sample(1, newline_at_end)
    path = tmp_path / f"in{suffix}"
    path.write_bytes(COMPRESSORS[suffix](data))
    found = list(blocks([str(path)], block_bytes))
    texts = [block.read() for block in found]
    assert b"".join(texts) == data
    assert all(text.endswith(b"\n") for text in texts[:-1])
    assert [block.start for block in found] == [sum(map(len, texts[:index])) for index in range(len(texts))]
    assert all(block.size == len(text) for block, text in zip(found, texts, strict=True))
    assert sum(block.input_bytes for block in found) == path.stat().st_size == total_bytes([str(path)])
    if suffix == ".jsonl":
        assert all(block.data is None for block in found)


def test_several_gzip_members_and_an_empty_file(tmp_path: Path) -> None:
    (tmp_path / "a.gz").write_bytes(gzip.compress(b"1\n") + gzip.compress(b"2\n"))
    (tmp_path / "b.jsonl").write_bytes(b"")
    (tmp_path / "c.gz").write_bytes(gzip.compress(b""))
    assert [
        block.read() for block in blocks([str(tmp_path / name) for name in ("a.gz", "b.jsonl", "c.gz")], 1 << 20)
    ] == [b"1\n2\n"]


@pytest.mark.parametrize("parts", [[3000], [1, 1500, 0, 1499]])
def test_zstandard(tmp_path: Path, parts: list[int]) -> None:
    data = sample(parts[0]) if len(parts) == 1 else b"".join(sample(count) for count in parts)
    path = tmp_path / "in.jsonl.zst"
    frames = [zstandard.ZstdCompressor().compress(sample(count)) for count in parts]
    path.write_bytes(b"".join(frames))
    assert b"".join(block.read() for block in blocks([str(path)], 1000)) == data
    for cut in (1, 3, 10, len(frames[-1]) - 1):
        path.write_bytes(b"".join(frames)[:-cut])
        with pytest.raises(DataError, match=r"in.jsonl.zst: cannot be read past byte offset \d+ .*ends inside"):
            list(blocks([str(path)], 1000))
    path.write_bytes(b"".join(frames) + b"what is this?")
    with pytest.raises(DataError, match="in.jsonl.zst"):
        list(blocks([str(path)], 1000))


def test_a_zstandard_bomb_does_not_fill_the_memory(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl.zst"
    compressor = zstandard.ZstdCompressor(level=1).compressobj()
    with path.open("wb") as file:
        for _ in range(50):
            file.write(compressor.compress(bytes(4 << 20)))
        file.write(compressor.flush())
    assert path.stat().st_size < 100_000
    with path.open("rb") as file, zstandard_stream(file, "in") as stream:
        assert max(len(chunk) for chunk in iter(lambda: stream.read1(1 << 30), b"")) <= 32 << 20


def test_missing_zstandard_is_reported_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "in.zst"
    path.write_bytes(b"")
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(ConfigError, match=r"in\.zst requires the zstandard package"):
        check_inputs([str(path)])


def test_standard_input_and_pipes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(sample(3))))
    found = list(blocks(["-"], 10_000))
    assert b"".join(block.read() for block in found) == sample(3) and found[0].source == "<stdin>"
    assert total_bytes(["-"]) is None
    end, beginning = os.pipe()
    os.write(beginning, b"a\nb\n")
    os.close(beginning)
    check_inputs([f"/dev/fd/{end}"])
    assert [block.read() for block in blocks([f"/dev/fd/{end}"], 1 << 20)] == [b"a\nb\n"]
    os.close(end)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(ConfigError, match=r"pipe cannot be read: it is a pipe, not a regular file"):
        check_inputs([str(pipe)])


@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".xz"])
@pytest.mark.parametrize("damage", ["cut", "garbage", "flip"])
def test_damaged_compression_is_a_data_error(tmp_path: Path, suffix: str, damage: str) -> None:
    whole = COMPRESSORS[suffix](bytes(random.Random(5).choices(b"abc\n", k=300_000)))
    middle = len(whole) // 2
    data = {
        "cut": whole[:middle],
        "garbage": b"no such format",
        "flip": whole[:middle] + b"\xff\x00\xff" + whole[middle + 3 :],
    }[damage]
    path = tmp_path / f"in{suffix}"
    path.write_bytes(data)
    with pytest.raises(DataError, match=rf"in\{suffix}: cannot be read past byte offset \d+"):
        list(blocks([str(path)], 1000))


def test_missing_inputs_are_named_together(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"/nowhere/a cannot be read: No such file(.|\n)*is a folder(.|\n)*"
    ) as caught:
        check_inputs(["/nowhere/a", str(tmp_path)])
    assert len(caught.value.problems) == 2
    with pytest.raises(ConfigError, match="lists standard input .* 2 times"):
        check_inputs(["-", "-"])


def test_a_file_that_shrinks_or_vanishes_while_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"1\n2\n")
    block = next(blocks([str(path)], 1 << 20))
    path.write_bytes(b"1\n")
    with pytest.raises(DataError, match="ended at byte offset 2 instead of 4"):
        block.read()
    path.unlink()
    with pytest.raises(DataError, match="cannot be read past byte offset 0"):
        block.read()
