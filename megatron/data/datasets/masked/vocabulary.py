"""The properties of a vocabulary that masking depends on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from megatron.errors import ConfigError, DataError
from megatron.tokenizers.library import CLS, MASK, PAD, ROLES, SEP
from megatron.tokenizers.tokenizer import Tokenizer
from megatron.tokenizers.wordpiece import CONTINUATION

_SPACES = ("Ġ", "Ċ", "▁")  # space and line end in byte-level BPE, space in SentencePiece


@dataclass(frozen=True)
class MaskedVocabulary:
    """The token ids used in masked samples.

    Shapes:
        is_special: bool [v], tokens that are never masked; continues: bool [v], tokens that continue a word; drawable:
        int64 [n], tokens that may replace a masked one if special tokens may not.

    Args:
        eod_id: the end-of-document token in token files; None if the tokenizer has none.
    """

    cls_id: int
    sep_id: int
    mask_id: int
    pad_id: int
    eod_id: int | None
    is_special: np.ndarray
    continues: np.ndarray
    drawable: np.ndarray

    @property
    def size(self) -> int:
        return len(self.is_special)

    @staticmethod
    def of(tokenizer: Tokenizer, *, needs_all: bool) -> MaskedVocabulary:
        """Reads the vocabulary of a tokenizer.

        Args:
            needs_all: require a token for every role, as for sentence pairs; otherwise the end-of-document token stands
                in for all but the mask token.

        Raises:
            ConfigError: the tokenizer lacks a token.
        """
        ids = dict(tokenizer.roles)
        eod_id = _end_of_document(tokenizer)
        if eod_id is not None and not needs_all:
            ids = {CLS: eod_id, SEP: eod_id, PAD: eod_id, **ids}
        if len(ids) < len(ROLES):
            raise ConfigError(_missing_text(tokenizer, [role for role in ROLES if role not in ids]))
        written = [tokenizer.written(token) for token in range(tokenizer.vocab_size)]
        is_special = np.array([text is None for text in written])
        is_special[[*tokenizer.special_ids.values(), *ids.values()]] = True
        continues = _word_rule(written)
        return MaskedVocabulary(
            ids[CLS],
            ids[SEP],
            ids[MASK],
            ids[PAD],
            eod_id,
            is_special,
            np.array([text is not None and continues(text) for text in written]) & ~is_special,
            np.flatnonzero(~is_special & (np.arange(len(written)) != tokenizer.unknown_id)),
        )

    def check_ids(self, ids: np.ndarray, locate: Callable[[int], str]) -> None:
        """Checks that the vocabulary contains all tokens of a text.

        Args:
            locate: describes the location of the token at an index.

        Raises:
            DataError: a token is outside the vocabulary.
        """
        if len(ids) and (int(ids.max()) >= self.size or int(ids.min()) < 0):
            index = int(np.flatnonzero((ids >= self.size) | (ids < 0))[0])
            raise DataError(
                f"{locate(index)} has id {int(ids[index])}, but the vocabulary has {self.size} entries. The data was "
                "tokenized by another tokenizer, or it is damaged."
            )


def _word_rule(written: list[str | None]) -> Callable[[str], bool]:
    """Returns a predicate for tokens that continue a word; WordPiece marks these, other families a word's first."""
    known = [text for text in written if text is not None]
    if any(text.startswith(CONTINUATION) for text in known) or not any(text.startswith(_SPACES) for text in known):
        return lambda text: text.startswith(CONTINUATION)
    return lambda text: not text.startswith(_SPACES)


def _end_of_document(tokenizer: Tokenizer) -> int | None:
    try:
        return tokenizer.eod_id
    except ConfigError:
        return None


def _missing_text(tokenizer: Tokenizer, roles: list[str]) -> str:
    names = {CLS: "[CLS] or <s>", SEP: "[SEP] or </s>", MASK: "[MASK] or <mask>", PAD: "[PAD] or <pad>"}
    return (
        f"The tokenizer {tokenizer.name} has no {', '.join(f'{role} token ({names[role]})' for role in roles)}, which "
        "masked samples require. Use the tokenizer of a BERT or RoBERTa model, or train a vocabulary: "
        "tools/train_tokenizer.py --model-type wordpiece, or --special-tokens '<s>' '<pad>' '</s>' '<unk>' '<mask>'."
    )
