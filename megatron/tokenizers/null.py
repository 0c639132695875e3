"""Ids written as numbers, for runs that need a vocabulary and no text.

Source: NVIDIA Megatron-LM `megatron/core/tokenizers/text/libraries/null_tokenizer.py`: the last id ends a document.
"""

from collections.abc import Sequence

import numpy as np

from megatron.config.sections.data import NULL_TOKENIZER
from megatron.errors import ConfigError, DataError, printable
from megatron.tokenizers.library import Ids, Lengths, Tokenizer, TokenizerProperties


def null_tokenizer(count: str | None) -> Tokenizer:
    """Makes a tokenizer of that many ids.

    Raises:
        ConfigError: it is not a number.
    """
    size = _number(count or "", 2**31 - 1)
    if not size:
        raise ConfigError(
            f"--tokenizer-type {NULL_TOKENIZER} has no ids with --tokenizer-model {count}. Give their number: "
            "--vocab-size 50304 for training, --tokenizer-model 50304 for a tool."
        )
    facts = TokenizerProperties(NULL_TOKENIZER, eod_id=size - 1, vocab_size=size, identity=lambda: f"ids {size}")
    return Tokenizer(facts, _Numbers(size - 1), None, lambda: {"ids": [str(size)]})


class _Numbers:
    """Numbers with blanks between them."""

    name, can_cut_before_spaces, description = "numbers", False, None

    def __init__(self, largest: int) -> None:
        self._largest = largest

    def encode_flat(self, texts: Sequence[str]) -> tuple[Ids, Lengths]:
        rows = [[(word, _number(word, self._largest)) for word in text.split()] for text in texts]
        flat = [entry for row in rows for entry in row]
        wrong = next((word for word, number in flat if number is None), None)
        if wrong is not None:
            raise DataError(
                f"{printable(wrong)} is not an id of --tokenizer-type {NULL_TOKENIZER}, which reads numbers from 0 to "
                f"{self._largest}. Name the tokenizer of the text."
            )
        return np.array([number for _, number in flat], np.uint32), np.array([len(row) for row in rows], np.int64)

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(map(str, ids))

    def written(self, token: int) -> str | None:
        return str(token) if token <= self._largest else None


def _number(word: str, largest: int) -> int | None:
    """The number that a word is; None if it is none, or too large."""
    return int(word) if word.isdecimal() and len(word) <= len(str(largest)) and int(word) <= largest else None
