"""BERT's WordPiece from a `vocab.txt` with one token per line, in the order of ids.

Source: google-research/bert `tokenization.py` (`FullTokenizer`); Megatron-DeepSpeed `megatron/tokenizer/tokenizer.py`
(`_BertWordPieceTokenizer`), which appends `[BOS]` and `[EOS]` to the vocabulary.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np

from megatron.errors import ConfigError, DataError
from megatron.tokenizers.library import (
    Ids,
    Lengths,
    RustReference,
    Tokenizer,
    TokenizerProperties,
    rust_tokenizer,
)
from megatron.tokenizers.tokenizer_files import canonical, read_tokenizer_file, require_tokenizers

UNKNOWN_TOKEN = "[UNK]"
ADDED_TOKENS = ("[BOS]", "[EOS]")
CONTINUATION = "##"
_SPECIAL = re.compile(r"[\[<]\S+[\]>]")  # texts are cut at brackets, so no text contains it
_LONGEST_WORD = 200  # characters; a longer word is unknown
_MOST_WORDS = 1 << 17  # in memory, about 40 MB
_LONGEST_KNOWN = 64  # characters; longer ones are rarely repeated
_DROPPED_SPACES = re.compile("[\x0b\x0c\x1c-\x1f\x85]")  # white space in Python, but BERT removes it without splitting


def wordpiece_tokenizer(kind: str, vocab_file: str | None, known_library: str | None) -> Tokenizer:
    """Loads a `vocab.txt`; `[EOS]` ends a document (upstream has no such token for BERT's vocabularies).

    `BertWordPieceLowerCase` converts words to lower case without accents, so decoding does not restore the text. A
    final Greek sigma becomes σ, as in Hugging Face's tokenizers; BERT's code writes ς.

    Raises:
        ConfigError: the file is missing.
        DataError: the file is damaged.
    """
    if not vocab_file:
        raise ConfigError(f"--tokenizer-type {kind} requires --vocab-file (a vocab.txt with one token per line).")
    vocabulary = _vocabulary(vocab_file)
    lower_case = kind == "BertWordPieceLowerCase"
    tokenizer = wordpiece(vocabulary, lower_case)
    facts = TokenizerProperties(
        kind,
        eod_id=vocabulary["[EOS]"],
        vocab_size=len(vocabulary),
        identity=lambda: canonical({"wordpiece": vocabulary, "lower_case": lower_case}),
        special_ids=lambda: {token: number for token, number in vocabulary.items() if _SPECIAL.fullmatch(token)},
        unknown_id=vocabulary[UNKNOWN_TOKEN],
    )
    return rust_tokenizer(facts, tokenizer, known_library, WordByWord(tokenizer))


def wordpiece(vocabulary: dict[str, int], lower_case: bool) -> Any:
    """Builds BERT's rules in `tokenizers`: clean, split at spaces, punctuation and Chinese characters."""
    require_tokenizers()
    from tokenizers import Tokenizer as Reference
    from tokenizers import decoders, models, normalizers, pre_tokenizers

    model = models.WordPiece(vocab=vocabulary, unk_token=UNKNOWN_TOKEN, max_input_chars_per_word=_LONGEST_WORD)
    reference = Reference(model)
    reference.normalizer = normalizers.BertNormalizer(lowercase=lower_case)
    reference.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    reference.decoder = decoders.WordPiece(prefix=CONTINUATION, cleanup=False)
    return reference


class WordByWord(RustReference):
    """BERT's rules with a cache of words: the ids of a word do not depend on its context."""

    can_cut_before_spaces = True

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(tokenizer)
        self._words = _KnownWords(tokenizer)

    def encode_flat(self, texts: Sequence[str]) -> tuple[Ids, Lengths]:
        """Ids of all texts back to back, and how many belong to each."""
        flat = array("I")
        lengths = np.empty(len(texts), np.int64)
        for number, text in enumerate(texts):
            before = len(flat)
            if _DROPPED_SPACES.search(text):
                flat.extend(self._tokenizer.encode(text).ids)
            else:
                flat.extend(chain.from_iterable(map(self._words.__getitem__, text.split())))
            lengths[number] = len(flat) - before
        return np.frombuffer(flat, np.uint32) if flat else np.empty(0, np.uint32), lengths


class _KnownWords(dict[str, list[int]]):
    """Cached ids of words."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__()
        self._tokenizer = tokenizer

    def __missing__(self, word: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(word).ids
        if len(word) <= _LONGEST_KNOWN:
            if len(self) >= _MOST_WORDS:
                self.clear()
            self[word] = ids
        return ids


def _vocabulary(path: str) -> dict[str, int]:
    lines = read_tokenizer_file(path, "--vocab-file").split("\n")
    if lines and not lines[-1]:
        lines.pop()
    vocabulary: dict[str, int] = {}
    for number, line in enumerate(lines):
        token = line.rstrip("\r")
        if not token or token in vocabulary:
            wrong = f"repeats {token!r:.200} of line {vocabulary[token] + 1}" if token else "is empty"
            raise DataError(f"{path}:{number + 1} (--vocab-file) {wrong}; each line must be a distinct token.")
        vocabulary[token] = number
    if UNKNOWN_TOKEN not in vocabulary:
        raise DataError(
            f"{path} (--vocab-file) has no {UNKNOWN_TOKEN} among its {len(vocabulary)} lines for unknown words. "
            "Use BERT's vocab.txt, or one written by tools/train_tokenizer.py --model-type wordpiece."
        )
    for token in ADDED_TOKENS:
        vocabulary.setdefault(token, len(vocabulary))
    return vocabulary
