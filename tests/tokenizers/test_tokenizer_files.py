"""Tokenizer files that cannot be read."""

import gzip
from pathlib import Path

import pytest

from megatron.errors import ConfigError, DataError
from megatron.tokenizers.tokenizer import TokenizerChoice, build_tokenizer
from megatron.tokenizers.tokenizer_files import check_tokenizer_file
from tests.helpers.vocabulary import write_vocabulary


def test_a_vocabulary_that_is_not_utf8(tmp_path: Path) -> None:
    choice = write_vocabulary(tmp_path)
    Path(choice.vocab_file or "").write_bytes(b'{"\xff": 1}')
    with pytest.raises(DataError, match="demo-vocab.json .* cannot be read as UTF-8"):
        build_tokenizer(choice)


@pytest.mark.parametrize("kind", ["SentencePieceTokenizer", "PretrainedFromHF", "GPT2BPETokenizer"])
def test_a_tokenizer_file_of_another_format_is_recognized(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "tokenizer.model"
    path.write_bytes(b"AA== 0\nAQ== 1\nAg== 2\n")
    choice = TokenizerChoice(kind, str(path), str(path), str(path))
    with pytest.raises(DataError, match=r"tokenizer\.model.* looks like ranks of tiktoken\."):
        build_tokenizer(choice)
    path.write_bytes(gzip.compress(b"{}"))
    with pytest.raises(DataError, match=r"tokenizer\.model.* looks like a gzip file\.") as failure:
        build_tokenizer(choice)
    assert "Download or write the file again" not in str(failure.value)


def test_the_beginning_of_a_file_tells_its_format(tmp_path: Path) -> None:
    vocabulary = tmp_path / "vocab.json"
    vocabulary.write_text(' \n{"a": 0}')
    check_tokenizer_file(vocabulary, "--vocab-file", b"{")
    vocabulary.write_text("a\nb\n")
    check_tokenizer_file(vocabulary, "--vocab-file")
    with pytest.raises(DataError, match=r"vocab.json \(--vocab-file\) begins with 'a.nb.n'; it must begin with \{"):
        check_tokenizer_file(vocabulary, "--vocab-file", b"{")
    vocabulary.write_text("")
    with pytest.raises(DataError, match=r"vocab.json \(--vocab-file\) is empty; it must begin with \{"):
        check_tokenizer_file(vocabulary, "--vocab-file", b"{")
    with pytest.raises(ConfigError, match=f"--vocab-file {tmp_path}/none is not a file"):
        check_tokenizer_file(tmp_path / "none", "--vocab-file")
    with pytest.raises(DataError, match=r"\(--vocab-file\) cannot be read: it is a folder"):
        check_tokenizer_file(tmp_path, "--vocab-file")
