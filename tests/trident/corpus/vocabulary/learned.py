"""Vocabularies of each kind learned from a small source, and tokenizers loaded from their files."""

from __future__ import annotations

import random
from pathlib import Path

from megatron.tokenizers.tokenizer import Tokenizer, TokenizerChoice, build_tokenizer
from tests.helpers.vocabulary import hard_documents
from trident.corpus.vocabulary.learning import byte_level_files, save_vocabulary, train_byte_level
from trident.corpus.vocabulary.unigram import train_unigram
from trident.corpus.vocabulary.wordpiece import train_wordpiece

SOURCE = [Path(random.__file__).read_text(encoding="utf-8"), *hard_documents(100, seed=1)]


def learned(model_type: str, vocab_size: int = 900, special: tuple[str, ...] = ()) -> dict[str, bytes]:
    """The files of a vocabulary learned from `SOURCE`, by their suffix."""
    if model_type == "unigram":
        return train_unigram(SOURCE, vocab_size, special)
    if model_type == "wordpiece":
        return train_wordpiece(lambda: SOURCE, vocab_size, special=special, lower_case=True)
    return byte_level_files(*train_byte_level(SOURCE, vocab_size, special=special), special)


def load(folder: Path, files: dict[str, bytes], kind: str, suffix: str) -> Tokenizer:
    """Saves the files of a vocabulary and builds the tokenizer of this kind from the file with this suffix."""
    save_vocabulary(str(folder / "v"), files)
    path = str(folder / f"v{suffix}")
    if suffix in (".model", "-tokenizer.json"):
        return build_tokenizer(TokenizerChoice(kind, tokenizer_name_or_path=path))
    return build_tokenizer(TokenizerChoice(kind, vocab_file=path, merge_file=str(folder / "v-merges.txt")))
