"""Which sentences make up the samples of BERT: whole sentences of one document each, in Megatron's order.

A document is cut where a sample has reached its number of tokens, which is drawn for every sample: most of them may be
as long as the sequence, a few are shorter. The compiled builder (`csrc/index_builder`) and the Python code below give
the same bytes.

Source: bigscience Megatron-DeepSpeed `megatron/data/helpers.cpp` (`build_mapping`) and `megatron/data/dataset_utils.py`
(`get_samples_mapping`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from megatron.data.order.index_map import check_seed, compiled_builder
from megatron.errors import DataError

LONGEST_SENTENCE = 512
"""Tokens; a document with a longer sentence is left out, unless it is the only one."""

_MOST_EPOCHS = 2**31 - 2
_MOST_SAMPLES = 2**32
_LARGEST_UINT32 = 2**32 - 1
_DRAWS_AT_ONCE = 1 << 12
_STATE_WORDS, _MIDDLE_WORD = 312, 156  # of the Mersenne Twister
_MULTIPLIER = 6364136223846793005
_LOW_BITS = np.uint64((1 << 31) - 1)
_MATRIX = np.uint64(0xB5026F5AA96619E9)
_LARGEST_UINT64 = (1 << 64) - 1


@dataclass(frozen=True)
class SentenceRules:
    """How documents are cut.

    Args:
        most_tokens: of a sample, without the tokens that are added to it.
        short_share: probability of a shorter sample; 1 over it is rounded to an integer.
        least_sentences: a sample's; 2 if it is to have two parts, and shorter documents are left out.
    """

    most_tokens: int
    short_share: float
    least_sentences: int

    @property
    def short_ratio(self) -> int:
        """One of this many samples is short; 0 for none."""
        return math.floor(1 / self.short_share + 0.5) if self.short_share else 0


def usable_documents(lengths: np.ndarray, documents: np.ndarray, least_sentences: int) -> np.ndarray:
    """The documents that samples are made of.

    Shapes:
        lengths: [N], tokens of every sentence; documents: [D + 1], the sentence at which each begins, and the end;
        result: int64 [n, 2], first sentence and one past the last of each.
    """
    firsts, lasts = documents[:-1].astype(np.int64), documents[1:].astype(np.int64)
    too_long = np.concatenate([[0], np.cumsum(lengths > LONGEST_SENTENCE)])
    has_long = too_long[lasts] > too_long[firsts]
    counts = lasts - firsts
    is_usable = (counts >= least_sentences) & ((counts == 1) | ~has_long)
    return np.stack([firsts, lasts], axis=1)[is_usable]


def build_sentence_map(
    lengths: np.ndarray,
    documents: np.ndarray,
    rules: SentenceRules,
    samples: int,
    seed: int,
    epochs: int = _MOST_EPOCHS,
) -> np.ndarray:
    """The samples of as many whole passes over the documents as `samples` needs, shuffled all together.

    Shapes:
        lengths: int32 [N], tokens of every sentence of the file; documents: [D + 1], the part of the document table
        that is to be used; result: [rows, 3], the first sentence of each sample, one past its last, and the most tokens
        of it; uint32, or uint64 if the file has more sentences than that can count.

    Args:
        samples: at least 1.
        epochs: most passes; unlimited in training.

    Raises:
        DataError: no document has enough sentences, too many samples are asked for, or NumPy cannot take the seed.
    """
    check_seed(seed)
    if samples > _MOST_SAMPLES:
        raise DataError(
            f"{samples} samples of sentences are more than the {_MOST_SAMPLES} that an index holds. Train for fewer."
        )
    usable = usable_documents(lengths, documents, rules.least_sentences)
    if not len(usable):
        raise DataError(_nothing_usable_text(lengths, documents, rules))
    wide = len(lengths) > _LARGEST_UINT32
    builder = compiled_builder()
    if builder is not None:
        return builder.build_sentence_map(
            np.ascontiguousarray(lengths, np.int32),
            np.ascontiguousarray(usable[:, 0]),
            np.ascontiguousarray(usable[:, 1]),
            epochs,
            samples,
            rules.most_tokens,
            rules.short_ratio,
            seed,
            rules.least_sentences,
            wide,
        )
    rows: list[tuple[int, int, int]] = []
    draws = _drawn_lengths(rules, seed)
    for _ in range(epochs):
        if len(rows) >= samples:
            break
        for first, last in usable.tolist():
            rows += _rows_of_document(lengths[first:last].tolist(), first, rules.least_sentences, draws)
    table = np.array(rows, np.uint64 if wide else np.uint32)
    return table[_shuffled(len(rows), seed)]


def _rows_of_document(
    lengths: list[int], first: int, least_sentences: int, draws: Iterator[int]
) -> Iterator[tuple[int, int, int]]:
    """The samples of one document, whose sentences have these lengths."""
    tokens, begin, wanted = 0, first, next(draws)
    end = first + len(lengths)
    for sentence, length in enumerate(lengths, start=first + 1):
        tokens += length
        left = end - sentence
        is_full = tokens >= wanted and left > 1 and sentence - begin >= least_sentences
        if is_full or not left:
            yield begin, sentence, wanted
            tokens, begin, wanted = 0, sentence, next(draws)


def _drawn_lengths(rules: SentenceRules, seed: int) -> Iterator[int]:
    """The number of tokens at which each sample ends."""
    if not rules.short_ratio:
        while True:
            yield rules.most_tokens
    random = np.random.RandomState(seed)
    while True:
        drawn = random.randint(0, 2**32, _DRAWS_AT_ONCE, np.uint32).astype(np.int64)
        short = 2 + drawn % (rules.most_tokens - 1)
        yield from np.where(drawn % rules.short_ratio, rules.most_tokens, short).tolist()


def _shuffled(rows: int, seed: int) -> list[int]:
    """The order that swapping each row with a drawn one up to it gives, from the last row on."""
    order = list(range(rows))
    places = np.arange(rows - 1, 0, -1, dtype=np.uint64)
    chosen = mersenne_numbers(seed + 1, len(places)) % (places + np.uint64(1))
    for place, other in zip(places.tolist(), chosen.tolist(), strict=True):
        order[place], order[other] = order[other], order[place]
    return order


def _nothing_usable_text(lengths: np.ndarray, documents: np.ndarray, rules: SentenceRules) -> str:
    count, most = len(documents) - 1, int(np.diff(documents).max(initial=0))
    if most < rules.least_sentences:
        return (
            f"None of the {count} documents has {rules.least_sentences} sentences, so no sample can be made of them. "
            "If the data were not split into sentences, preprocess them with --split-sentences and name the files "
            "that end in _sentence; if these are too few documents, widen their range."
        )
    return (
        f"Each of the {count} documents that have {rules.least_sentences} sentences holds one of more than "
        f"{LONGEST_SENTENCE} tokens (the longest {int(lengths[int(documents[0]) : int(documents[-1])].max())}), so "
        "no sample can be made of them. Were the data split into sentences? Preprocess them with --split-sentences."
    )


def mersenne_numbers(seed: int, count: int) -> np.ndarray:
    """The first numbers of the C++ standard's `std::mt19937_64`, which NumPy does not have.

    Shapes:
        result: uint64 [count].

    Source: Nishimura, "Tables of 64-bit Mersenne Twisters", ACM TOMACS 10 (4), 2000; ISO C++ [rand.predef].
    """
    state = _first_words(seed)
    blocks = []
    for _ in range(-(-count // _STATE_WORDS)):
        _advance(state)
        blocks.append(_tempered(state))
    return np.concatenate([np.empty(0, np.uint64), *blocks])[:count]


def _first_words(seed: int) -> np.ndarray:
    words = [seed & _LARGEST_UINT64]
    for place in range(1, _STATE_WORDS):
        words.append((_MULTIPLIER * (words[-1] ^ words[-1] >> 62) + place) & _LARGEST_UINT64)
    return np.array(words, np.uint64)


def _advance(state: np.ndarray) -> None:
    """Replaces the words by the next ones. A word needs its successor, and one half the state further on."""
    for first, last, other in ((0, _MIDDLE_WORD, _MIDDLE_WORD), (_MIDDLE_WORD, _STATE_WORDS - 1, -_MIDDLE_WORD)):
        state[first:last] = _twisted(
            state[first:last], state[first + 1 : last + 1], state[first + other : last + other]
        )
    state[-1:] = _twisted(state[-1:], state[:1], state[_MIDDLE_WORD - 1 : _MIDDLE_WORD])


def _twisted(word: np.ndarray, successor: np.ndarray, other: np.ndarray) -> np.ndarray:
    mixed = (word & ~_LOW_BITS) | (successor & _LOW_BITS)
    return other ^ (mixed >> np.uint64(1)) ^ np.where(mixed & np.uint64(1), _MATRIX, np.uint64(0))


def _tempered(state: np.ndarray) -> np.ndarray:
    numbers = state ^ ((state >> np.uint64(29)) & np.uint64(0x5555555555555555))
    numbers ^= (numbers << np.uint64(17)) & np.uint64(0x71D67FFFEDA60000)
    numbers ^= (numbers << np.uint64(37)) & np.uint64(0xFFF7EEE000000000)
    return numbers ^ (numbers >> np.uint64(43))
