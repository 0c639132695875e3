"""Tokenizer files that cannot be read."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from megatron.errors import DataError
from megatron.tokenizers.tokenizer import build_tokenizer
from tests.helpers.vocabulary import write_vocabulary


def test_a_vocabulary_that_is_not_utf8(tmp_path: Path) -> None:
    choice = write_vocabulary(tmp_path)
    Path(choice.vocab_file or "").write_bytes(b'{"\xff": 1}')
    with pytest.raises(DataError, match="demo-vocab.json .* cannot be read as UTF-8"):
        build_tokenizer(choice)


def test_a_vocabulary_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    choice = write_vocabulary(tmp_path)

    def broken_disk(path: Path) -> bytes:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(Path, "read_bytes", broken_disk)
    with pytest.raises(DataError, match=r"demo-vocab.json \(--vocab-file\) cannot be read: Input/output error"):
        build_tokenizer(choice)
