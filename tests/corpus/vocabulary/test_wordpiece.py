"""WordPiece vocabularies: the same ids from vocab.txt and tokenizer.json."""

from __future__ import annotations

import random
from pathlib import Path

from megatron.corpus.vocabulary.learning import (
    byte_level_files,
    save_vocabulary,
    train_byte_level,
)
from megatron.corpus.vocabulary.unigram import train_unigram
from megatron.corpus.vocabulary.wordpiece import train_wordpiece
from megatron.tokenizers.tokenizer import LibraryTokenizer, TokenizerChoice, build_tokenizer
from tests.helpers.vocabulary import hard_documents

SOURCE = [Path(random.__file__).read_text(encoding="utf-8"), *hard_documents(100, seed=1)]


def load(folder: Path, files: dict[str, bytes], kind: str, suffix: str) -> LibraryTokenizer:
    save_vocabulary(str(folder / "v"), files)
    path = str(folder / f"v{suffix}")
    if suffix in (".model", "-tokenizer.json"):
        return build_tokenizer(TokenizerChoice(kind, tokenizer_name_or_path=path))
    return build_tokenizer(TokenizerChoice(kind, vocab_file=path, merge_file=str(folder / "v-merges.txt")))


def learned(model_type: str, vocab_size: int = 900, special: tuple[str, ...] = ()) -> dict[str, bytes]:
    if model_type == "unigram":
        return train_unigram(SOURCE, vocab_size, special)
    if model_type == "wordpiece":
        return train_wordpiece(lambda: SOURCE, vocab_size, special=special, lower_case=True)
    return byte_level_files(*train_byte_level(SOURCE, vocab_size, special=special), special)


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
