"""Round trips through a tokenizer: what comes back and what is lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.vocabulary import hard_documents
from tests.trident.corpus.vocabulary.learned import learned, load
from trident.corpus.vocabulary.round_trip import round_trip

WORLD = [
    "Pijamalı hasta yağız şoföre çabucak güvendi.",
    "다람쥐 헌 쳇바퀴에 타고파",
    "👩‍👩‍👧 👍🏽 🇹🇷",
    "a\r\n\tb  c\x00\u2028",
]


@pytest.mark.parametrize("model_type", ["bpe", "unigram"])
def test_every_text_round_trips(tmp_path: Path, model_type: str) -> None:
    files = learned(model_type)
    tokenizers = [load(tmp_path, files, "HFTokenizer", "-tokenizer.json")]
    if model_type == "bpe":
        tokenizers.append(load(tmp_path, files, "GPT2BPETokenizer", "-vocab.json"))
    else:
        tokenizers.append(load(tmp_path, files, "SentencePieceTokenizer", ".model"))
    for tokenizer in tokenizers:
        found = round_trip(tokenizer, [*WORLD, *hard_documents(), "<0x41> <0xFF>", "<unused0> [PAD]"])
        assert found.inexact == 0, found.differences
        assert tokenizer.is_exact == (model_type == "bpe")
        assert found.documents == 313 and found.text_bytes > found.tokens > 0 and found.seconds > 0


def test_a_lossy_round_trip_reports_the_differences(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, learned("wordpiece"), "BertWordPieceLowerCase", "-vocab.txt")
    found = round_trip(tokenizer, ["def random ( self )", "It is\nA ☃", ""])
    assert (found.documents, found.inexact, found.unknown, found.words) == (3, 1, 1, 9)
    assert [(one.document, one.position, one.was) for one in found.differences] == [(1, 0, "It is\nA ☃")]
    assert "unknown: 1 tokens" in found.report()[2] and "2 of 3 documents" in found.report()[4]
    assert "0 of 0 documents" in round_trip(tokenizer, []).report()[4]


def test_special_tokens_around_a_text_are_not_part_of_the_round_trip(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, learned("unigram"), "Llama2Tokenizer", ".model")
    found = round_trip(tokenizer, WORLD[:1])
    assert found.inexact == 0 and found.tokens == len(tokenizer.encode(WORLD[0])) - 1
