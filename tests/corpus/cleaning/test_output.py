"""Output files of a cleaning run: compressed by their suffix, the same bytes every time."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from megatron.corpus.cleaning.output import check_output, write_lines
from megatron.errors import ConfigError

LINES = b'{"text": "a"}\n' * 1000


def unpacked(path: Path) -> bytes:
    data = path.read_bytes()
    if path.suffix == ".gz":
        return gzip.decompress(data)
    if path.suffix == ".zst":
        return pytest.importorskip("zstandard").ZstdDecompressor().decompressobj().decompress(data)  # type: ignore[no-any-return]
    return data


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".jsonl.zst"])
def test_the_suffix_determines_the_compression(tmp_path: Path, suffix: str) -> None:
    for name in ("a", "b"):
        write_lines(str(tmp_path / (name + suffix)), lambda lines: lines.write(LINES))
    first, second = (tmp_path / (name + suffix) for name in ("a", "b"))
    assert unpacked(first) == LINES and first.read_bytes() == second.read_bytes()


def test_a_failure_leaves_nothing(tmp_path: Path) -> None:
    def fail(lines: object) -> None:
        raise ValueError("stop")

    with pytest.raises(ValueError, match="stop"):
        write_lines(str(tmp_path / "a.jsonl.gz"), fail)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("suffix", [".bz2", ".xz", ".parquet"])
def test_other_suffixes_are_refused(suffix: str) -> None:
    with pytest.raises(ConfigError, match=rf"--output out{suffix}: \{suffix} is not written"):
        check_output("--output", f"out{suffix}")
