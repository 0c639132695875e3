"""Masking of samples: spans of words up to a fixed share of each sample, or each token independently.

Spans are BERT's: the random draws match upstream in number, order and meaning, so the same tokens are masked. Single
tokens are masked with equal probability, as in RoBERTa and DeepSpeed's HelloDeepSpeed: one 64-bit number per position,
derived from the seed and the sample's index, decides everything about it. The upper half decides whether the token is
masked and by what, the lower half picks a random replacement.

Source: bigscience Megatron-DeepSpeed `megatron/data/dataset_utils.py` (`create_masked_lm_predictions`); spans, whole
words and replacements are as in Devlin et al., "BERT", 2019, and SpanBERT. Liu et al., "RoBERTa", 2019, section 4.1
(dynamic masking); deepspeedai/DeepSpeedExamples `training/HelloDeepSpeed/train_bert.py` (`masking_function`).
"""

from __future__ import annotations

from bisect import bisect_right

import numpy as np

from megatron.config.objective.masking import MaskingConfig
from megatron.data.datasets.masked.vocabulary import MaskedVocabulary

_HALF = np.uint64(32)
_LOWER = np.uint64(2**32 - 1)


def mask_spans(
    tokens: np.ndarray,
    most_tokens: int,
    rules: MaskingConfig,
    vocabulary: MaskedVocabulary,
    random: np.random.RandomState,
) -> tuple[np.ndarray, list[int]]:
    """Masks spans of words in a sample.

    Words are visited in random order; each starts a span of a random number of words, shortened if it does not fit.

    Shapes:
        tokens: int64 [n]; result: the model's inputs, int64 [n], and the masked positions in ascending order.

    Args:
        most_tokens: maximum length of a sample without special tokens; also bounds the number of masked tokens.
    """
    share = rules.mask_prob
    limit = int(min(share * most_tokens, max(1, round(len(tokens) * share))))
    positions, word_starts = _maskable(tokens, rules, vocabulary)
    order = np.arange(len(word_starts) - 1)
    random.shuffle(order)
    lengths = 1.0 / np.arange(1, rules.masking_ngrams + 1)
    lengths /= lengths.sum(keepdims=True)
    cumulative = np.cumsum(lengths / lengths.sum(keepdims=True))
    cumulative = (cumulative / cumulative[-1]).tolist()
    draw = random.random_sample
    inputs = tokens.copy()
    masked: set[int] = set()
    for word in order.tolist():
        if len(masked) >= limit:
            break
        count = 1 + bisect_right(cumulative, draw())
        span = positions[word_starts[word] : word_starts[min(word + count, len(word_starts) - 1)]]
        while len(masked) + len(span) > limit and count > 1:
            count -= 1
            span = positions[word_starts[word] : word_starts[min(word + count, len(word_starts) - 1)]]
        if len(masked) + len(span) > limit or not masked.isdisjoint(span):
            continue
        for position in span:
            inputs[position] = _replacement(int(tokens[position]), rules, vocabulary, random)
        masked.update(span)
    return inputs, sorted(masked)


def _maskable(tokens: np.ndarray, rules: MaskingConfig, vocabulary: MaskedVocabulary) -> tuple[list[int], list[int]]:
    """Returns the positions that may be masked, and the index of each word's first position, then their number."""
    positions = np.flatnonzero((tokens != vocabulary.cls_id) & (tokens != vocabulary.sep_id))
    starts_word = np.ones(len(positions), np.bool_)
    if rules.whole_word_masking:
        starts_word[1:] = ~vocabulary.continues[tokens[positions[1:]]]
    return positions.tolist(), [*np.flatnonzero(starts_word).tolist(), len(positions)]


def _replacement(token: int, rules: MaskingConfig, vocabulary: MaskedVocabulary, random: np.random.RandomState) -> int:
    """Returns the input for a masked token: the mask token, the token itself, or a random one."""
    shares = rules.random_replace_prob + rules.unmask_replace_prob
    if random.random_sample() < 1 - shares:
        return vocabulary.mask_id
    if random.random_sample() < rules.unmask_replace_prob / shares:
        return token
    return int(random.randint(0, vocabulary.size))


def mask_tokens(
    text: np.ndarray,
    maskable: np.ndarray,
    most: int,
    rules: MaskingConfig,
    vocabulary: MaskedVocabulary,
    numbers: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Masks single tokens of a sample, or whole words (`rules.whole_word_masking`).

    Shapes:
        text: int64 [s]; maskable: bool [s]; numbers: uint64 [s]; result: the model's inputs, int64 [s], and the mask,
        bool [s].

    Args:
        most: maximum number of masked tokens.
    """
    maskable = maskable & ~vocabulary.is_special[text]
    draws = numbers >> _HALF
    if rules.whole_word_masking:
        draws = draws[_first_of_word(text, maskable, vocabulary)]
    share, unmasked_share = rules.mask_prob, rules.random_replace_prob + rules.unmask_replace_prob
    is_masked = maskable & (draws < _bound(share))
    positions = np.flatnonzero(is_masked)
    if len(positions) > most:
        is_masked[positions[most:]] = False
        positions = positions[:most]
    drawn = draws[positions]
    others = vocabulary.drawable[
        ((numbers[positions] & _LOWER) * np.uint64(len(vocabulary.drawable)) >> _HALF).astype(int)
    ]
    replaced = np.where(drawn < _bound(share * (1 - rules.unmask_replace_prob)), others, text[positions])
    replaced[drawn < _bound(share * (1 - unmasked_share))] = vocabulary.mask_id
    inputs = text.copy()
    inputs[positions] = replaced
    return inputs, is_masked


def sample_numbers(seed: int, sample: int, count: int) -> np.ndarray:
    """Returns random numbers for a sample. Shapes: result uint64 [count]."""
    return np.random.Philox(key=np.array([seed, sample], np.uint64)).random_raw(count)


def _bound(share: float) -> np.uint64:
    return np.uint64(round(share * 2**32))


def _first_of_word(text: np.ndarray, maskable: np.ndarray, vocabulary: MaskedVocabulary) -> np.ndarray:
    """Returns the first position of each token's word; no word extends over a special token."""
    starts_word = ~vocabulary.continues[text]
    starts_word[0] = True
    starts_word[1:] |= ~maskable[:-1]
    return np.maximum.accumulate(np.where(starts_word, np.arange(len(text)), 0))
