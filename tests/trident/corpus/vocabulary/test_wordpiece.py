"""WordPiece vocabularies: the same ids from vocab.txt and tokenizer.json."""

from __future__ import annotations

from pathlib import Path

from tests.trident.corpus.vocabulary.learned import learned, load


def test_wordpiece_ids_are_the_same_both_ways(tmp_path: Path) -> None:
    files = learned("wordpiece")
    lines = files["-vocab.txt"].decode().splitlines()
    assert lines[:5] == ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"] and len(lines) == 900
    by_lines = load(tmp_path, files, "BertWordPieceLowerCase", "-vocab.txt")
    by_json = load(tmp_path, files, "HFTokenizer", "-tokenizer.json")
    for text in ("Random numbers, SEEDED by me: 12.5", "Straße éa"):
        assert by_lines.encode(text) == by_json.encode(text)
        assert len(by_lines.encode(text)) < len(text)
    assert by_lines.eod_id == by_json.eod_id == 901
    for tokenizer in (by_lines, by_json):
        assert tokenizer.roles == {"cls": 2, "sep": 3, "mask": 4, "pad": 0}
