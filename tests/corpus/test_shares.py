"""Contiguous shares of text files: every line once, in order, whatever the borders hit."""

from __future__ import annotations

import gzip
import random
from pathlib import Path

import pytest

from megatron.corpus.encode import EncodeOptions
from megatron.corpus.preprocess import preprocess_blocks
from megatron.corpus.progress import Progress
from megatron.corpus.shares import share_blocks
from megatron.errors import ConfigError, DataError
from tests.helpers.vocabulary import write_vocabulary


@pytest.mark.parametrize("seed", range(8))
def test_shares_hold_every_line_once_and_in_order(tmp_path: Path, seed: int) -> None:
    drawn = random.Random(seed)
    contents = []
    for _ in range(drawn.randrange(1, 5)):
        lines = [b"x" * drawn.choice([0, 1, 5, 300]) for _ in range(drawn.randrange(0, 40))]
        contents.append(b"\n".join(lines) + drawn.choice([b"", b"\n"]))
    paths = []
    for number, content in enumerate(contents):
        paths.append(str(tmp_path / f"{number}.jsonl"))
        Path(paths[-1]).write_bytes(content)
    for size in (1, 2, 3, 7, 50):
        given: dict[str, bytes] = dict.fromkeys(paths, b"")
        for rank in range(size):
            for block in share_blocks(paths, rank, size, 64):
                assert block.start == len(given[block.source])
                data = block.read()
                given[block.source] += data
                assert data.endswith(b"\n") or len(given[block.source]) == Path(block.source).stat().st_size
        assert list(given.values()) == contents


def test_what_cannot_be_cut_is_refused_to_several_ranks(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b"{}\n"))
    with pytest.raises(ConfigError, match=r"a\.jsonl\.gz can only be read from its beginning, so 2 ranks cannot share"):
        list(share_blocks([f"{tmp_path}/a.jsonl.gz"], 0, 2, 64))
    assert [block.read() for block in share_blocks([f"{tmp_path}/a.jsonl.gz"], 0, 1, 64)] == [b"{}\n"]


def test_a_bad_line_in_a_later_share_has_its_number_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "a"}\n' * 90 + b"bad\n" + b'{"text": "a"}\n' * 9)
    share = share_blocks([str(path)], 2, 3, 64)
    with pytest.raises(DataError, match=r"a\.jsonl:91: byte offset 1260: not JSON"):
        preprocess_blocks(
            share, f"{tmp_path}/out", EncodeOptions(write_vocabulary(tmp_path)), 1, Progress(None, 1, lambda text: None)
        )
