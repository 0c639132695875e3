"""How long documents are in tokens."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.corpus.stores.lengths import length_histogram
from megatron.data.stores.document_store import open_store
from megatron.errors import DataError
from megatron.tokenizers.tokenizer import build_tokenizer
from tests.corpus.stores.imports import jsonl, put
from tests.data.databases import Database
from tests.helpers.vocabulary import write_vocabulary


def test_every_document_is_in_one_bin(sqlite_database: Database, tmp_path: Path) -> None:
    tokenizer = build_tokenizer(write_vocabulary(tmp_path, 300))
    texts = ["".join(chr(97 + (number * 7 + place) % 26) for place in range(number % 40)) for number in range(1, 1500)]
    put(sqlite_database, "web", jsonl(tmp_path / "a.jsonl", [text or "x" for text in texts]))
    lengths = [len(tokenizer.encode_flat([text or "x"])[0]) for text in texts]
    found = length_histogram(open_store(sqlite_database.address("web")), tokenizer, 5, 20)
    assert found.counts[:4] == tuple(sum(low <= one < low + 5 for one in lengths) for low in (0, 5, 10, 15))
    assert found.counts[4] == sum(one >= 20 for one in lengths) > 0
    assert (found.documents, found.tokens, found.longest) == (len(texts), sum(lengths), max(lengths))


def test_an_empty_store_is_refused(sqlite_database: Database, tmp_path: Path) -> None:
    put(sqlite_database, "web", jsonl(tmp_path / "a.jsonl", []))
    with pytest.raises(DataError, match="holds no documents to count"):
        length_histogram(
            open_store(sqlite_database.address("web")), build_tokenizer(write_vocabulary(tmp_path, 300)), 1, 1
        )
