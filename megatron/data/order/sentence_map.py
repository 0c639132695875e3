"""The sentence map: samples for BERT, made of whole sentences of one document each, in Megatron's order.

A sample ends once it reaches its target length, which is drawn per sample: the sequence length for most, shorter for a
few. The compiled builder (`csrc/index_builder`) and the Python code below produce the same bytes.

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
"""In tokens; a document with a longer sentence is skipped, unless it is its only sentence."""

_MOST_EPOCHS = 2**31 - 2
_MOST_SAMPLES = 2**32
_LARGEST_UINT32 = 2**32 - 1
_DRAWS_AT_ONCE = 1 << 12
_STATE_SIZE, _STATE_MIDDLE = 312, 156  # of the Mersenne Twister
_MULTIPLIER = 6364136223846793005
_LOW_BITS = np.uint64((1 << 31) - 1)
_MATRIX = np.uint64(0xB5026F5AA96619E9)
_LARGEST_UINT64 = (1 << 64) - 1


@dataclass(frozen=True)
class SentenceRules:
    """The rules for cutting documents into samples.

    Args:
        most_tokens: maximum length of a sample, without special tokens.
        short_share: probability of a shorter sample; its inverse is rounded to an integer.
        least_sentences: minimum sentences of a sample, 2 if it has two parts; shorter documents are skipped.
    """

    most_tokens: int
    short_share: float
    least_sentences: int

    @property
    def short_ratio(self) -> int:
        """One in this many samples is short; 0 for none."""
        return math.floor(1 / self.short_share + 0.5) if self.short_share else 0


def usable_documents(lengths: np.ndarray, documents: np.ndarray, least_sentences: int) -> np.ndarray:
    """Returns the documents that samples are made of.

    Shapes:
        lengths: [N], tokens of every sentence; documents: [D + 1], first sentence of each, then the end; result:
        int64 [n, 2], first sentence and one past the last of each.
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
    """Returns the samples of as many whole passes over the documents as `samples` needs, shuffled together.

    Shapes:
        lengths: int32 [N], tokens of every sentence of the file; documents: [D + 1], the slice of the document table
        to use; result: [rows, 3], first sentence of each sample, one past its last, and its maximum length; uint32, or
        uint64 if the file has more sentences.

    Args:
        samples: at least 1.
        epochs: maximum number of passes; unlimited in training.

    Raises:
        DataError: no document has enough sentences, too many samples are requested, or NumPy rejects the seed.
    """
    check_seed(seed)
    if samples > _MOST_SAMPLES:
        raise DataError(
            f"{samples} samples of sentences exceed the maximum of {_MOST_SAMPLES} per index. Train for fewer samples."
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
    """Yields the samples of one document, given the lengths of its sentences."""
    tokens, start, target = 0, first, next(draws)
    end = first + len(lengths)
    for sentence, length in enumerate(lengths, start=first + 1):
        tokens += length
        left = end - sentence
        is_full = tokens >= target and left > 1 and sentence - start >= least_sentences
        if is_full or not left:
            yield start, sentence, target
            tokens, start, target = 0, sentence, next(draws)


def _drawn_lengths(rules: SentenceRules, seed: int) -> Iterator[int]:
    """Yields the target length of each sample in tokens."""
    if not rules.short_ratio:
        while True:
            yield rules.most_tokens
    random = np.random.RandomState(seed)
    while True:
        drawn = random.randint(0, 2**32, _DRAWS_AT_ONCE, np.uint32).astype(np.int64)
        short = 2 + drawn % (rules.most_tokens - 1)
        yield from np.where(drawn % rules.short_ratio, rules.most_tokens, short).tolist()


def _shuffled(rows: int, seed: int) -> list[int]:
    # Swaps each row with a drawn one up to it, from the last row down.
    order = list(range(rows))
    indices = np.arange(rows - 1, 0, -1, dtype=np.uint64)
    drawn = mersenne_numbers(seed + 1, len(indices)) % (indices + np.uint64(1))
    for index, other in zip(indices.tolist(), drawn.tolist(), strict=True):
        order[index], order[other] = order[other], order[index]
    return order


def _nothing_usable_text(lengths: np.ndarray, documents: np.ndarray, rules: SentenceRules) -> str:
    count, most = len(documents) - 1, int(np.diff(documents).max(initial=0))
    if most < rules.least_sentences:
        return (
            f"None of the {count} documents has {rules.least_sentences} sentences, so they yield no sample. If the "
            "data is not split into sentences, preprocess it with --split-sentences and use the files that end in "
            "_sentence; if the documents are too few, widen their range."
        )
    return (
        f"Each of the {count} documents with {rules.least_sentences} sentences has a sentence of more than "
        f"{LONGEST_SENTENCE} tokens (the longest {int(lengths[int(documents[0]) : int(documents[-1])].max())}), so "
        "they yield no sample. Is the data split into sentences? Preprocess it with --split-sentences."
    )


def mersenne_numbers(seed: int, count: int) -> np.ndarray:
    """Returns the first numbers of C++'s `std::mt19937_64`, which NumPy lacks.

    Shapes:
        result: uint64 [count].

    Source: Nishimura, "Tables of 64-bit Mersenne Twisters", ACM TOMACS 10 (4), 2000; ISO C++ [rand.predef].
    """
    state = _initial_state(seed)
    blocks = []
    for _ in range(-(-count // _STATE_SIZE)):
        _advance(state)
        blocks.append(_tempered(state))
    return np.concatenate([np.empty(0, np.uint64), *blocks])[:count]


def _initial_state(seed: int) -> np.ndarray:
    state = [seed & _LARGEST_UINT64]
    for index in range(1, _STATE_SIZE):
        state.append((_MULTIPLIER * (state[-1] ^ state[-1] >> 62) + index) & _LARGEST_UINT64)
    return np.array(state, np.uint64)


def _advance(state: np.ndarray) -> None:
    # Each word depends on its successor and on the word half the state further on.
    for first, last, other in ((0, _STATE_MIDDLE, _STATE_MIDDLE), (_STATE_MIDDLE, _STATE_SIZE - 1, -_STATE_MIDDLE)):
        state[first:last] = _twisted(
            state[first:last], state[first + 1 : last + 1], state[first + other : last + other]
        )
    state[-1:] = _twisted(state[-1:], state[:1], state[_STATE_MIDDLE - 1 : _STATE_MIDDLE])


def _twisted(word: np.ndarray, successor: np.ndarray, other: np.ndarray) -> np.ndarray:
    mixed = (word & ~_LOW_BITS) | (successor & _LOW_BITS)
    return other ^ (mixed >> np.uint64(1)) ^ np.where(mixed & np.uint64(1), _MATRIX, np.uint64(0))


def _tempered(state: np.ndarray) -> np.ndarray:
    numbers = state ^ ((state >> np.uint64(29)) & np.uint64(0x5555555555555555))
    numbers ^= (numbers << np.uint64(17)) & np.uint64(0x71D67FFFEDA60000)
    numbers ^= (numbers << np.uint64(37)) & np.uint64(0xFFF7EEE000000000)
    return numbers ^ (numbers >> np.uint64(43))
