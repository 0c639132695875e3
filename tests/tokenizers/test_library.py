"""Tokenizers of a library: round trips, and ids around every row."""

from pathlib import Path

import numpy as np
import pytest
import tokenizers

from megatron.errors import DataError
from megatron.tokenizers.library import RustReference
from megatron.tokenizers.tokenizer import add_special_tokens, build_tokenizer
from tests.helpers.vocabulary import hard_documents, write_vocabulary


def test_round_trip_and_empty_texts(tmp_path: Path) -> None:
    tokenizer = build_tokenizer(write_vocabulary(tmp_path))
    for text in hard_documents(100):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("") == [] and tokenizer.encode_batch([]) == []
    assert [len(ids) for ids in tokenizer.encode_batch(["", "a", ""])] == [0, 1, 0]


def test_the_bytes_of_tokens_join_to_the_text(tmp_path: Path) -> None:
    tokenizer = build_tokenizer(write_vocabulary(tmp_path))
    for text in hard_documents(60):
        assert b"".join(tokenizer.token_bytes(token) or b"?" for token in tokenizer.encode(text)) == text.encode()


def test_a_pattern_that_takes_too_many_attempts_ends_in_a_sentence() -> None:
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex("(a+)+$"), "isolated")
    with pytest.raises(DataError, match="fails on a text: .*retry-limit-in-match over. Check the patterns"):
        RustReference(tokenizer).encode_flat(["a" * 2000 + "b"])


@pytest.mark.parametrize("long_rows", [True, False])
def test_surround_puts_ids_around_every_row(long_rows: bool) -> None:
    lengths = np.array([700, 900] if long_rows else [2, 0, 3], dtype=np.int64)
    ids = np.arange(int(lengths.sum()), dtype=np.uint16)
    result, longer = add_special_tokens(ids, lengths, [7, 8], [9])
    rows = np.split(ids, np.cumsum(lengths)[:-1])
    assert result.tolist() == [token for row in rows for token in [7, 8, *row.tolist(), 9]]
    assert longer.tolist() == (lengths + 3).tolist() and result.dtype == np.uint16
