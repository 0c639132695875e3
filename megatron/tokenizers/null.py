"""Ids written as numbers, for runs that need a vocabulary but no text.

Source: NVIDIA Megatron-LM `megatron/core/tokenizers/text/libraries/null_tokenizer.py`: the last id ends a document.
"""

from collections.abc import Sequence

import numpy as np

from megatron.config.sections.data import NULL_TOKENIZER
from megatron.errors import ConfigError, DataError, printable
from megatron.tokenizers.library import Ids, Lengths, Tokenizer, TokenizerProperties


def null_tokenizer(count: str | None) -> Tokenizer:
    """Builds a tokenizer of `count` ids.

    Raises:
        ConfigError: `count` is not a number.
    """
    size = _number(count or "", 2**31 - 1)
    if not size:
        raise ConfigError(
            f"--tokenizer-type {NULL_TOKENIZER}: --tokenizer-model {count} is not a number of ids. Use --vocab-size "
            "50304 for training, --tokenizer-model 50304 for a tool."
        )
    facts = TokenizerProperties(NULL_TOKENIZER, eod_id=size - 1, vocab_size=size, identity=lambda: f"ids {size}")
    return Tokenizer(facts, _Numbers(size - 1), None, lambda: {"ids": [str(size)]})


class _Numbers:
    """Numbers separated by blanks."""

    name, can_cut_before_spaces, description = "numbers", False, None

    def __init__(self, largest: int) -> None:
        self._largest = largest

    def encode_flat(self, texts: Sequence[str]) -> tuple[Ids, Lengths]:
        rows = [text.split() for text in texts]
        numbers = [number for row in rows for number in row]
        wrong = next((number for number in numbers if _number(number, self._largest) is None), None)
        if wrong is not None:
            raise DataError(
                f"{printable(wrong)} is not an id of --tokenizer-type {NULL_TOKENIZER}, which reads numbers from 0 to "
                f"{self._largest}. Use the tokenizer of the text."
            )
        return np.array([*map(int, numbers)], np.uint32), np.array([*map(len, rows)], np.int64)

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(map(str, ids))

    def written(self, token: int) -> str | None:
        return str(token) if token <= self._largest else None


def _number(text: str, largest: int) -> int | None:
    """Parses a number; None if it is invalid or too large."""
    return int(text) if text.isdecimal() and len(text) <= len(str(largest)) and int(text) <= largest else None
