"""Choosing what to hide in a masked sample: phrases, a fixed number of tokens in each sample, or each token by chance.

Phrases are BERT's: the draws are upstream's in number, order and meaning, so the same tokens are hidden. Tokens are
hidden with the same probability each, as RoBERTa and DeepSpeed's HelloDeepSpeed do: one 64-bit number for every place
of a sample decides everything about it, the upper half whether it is hidden and what is shown there, the lower half
which token if it is a random one. The numbers follow from the seed and the sample's number.

Source: bigscience Megatron-DeepSpeed `megatron/data/dataset_utils.py` (`create_masked_lm_predictions`); phrases, whole
words and replacements are as in Devlin et al., "BERT", 2019, and SpanBERT. Liu et al., "RoBERTa", 2019, section 4.1
(masked anew in every epoch); deepspeedai/DeepSpeedExamples `training/HelloDeepSpeed/train_bert.py`
(`masking_function`).
"""

from __future__ import annotations

from bisect import bisect_right

import numpy as np

from megatron.config.objective.masking import MaskingConfig
from megatron.data.datasets.masked.vocabulary import MaskedVocabulary

_HALF = np.uint64(32)
_LOWER = np.uint64(2**32 - 1)


def hide_phrases(
    tokens: np.ndarray,
    most_tokens: int,
    rules: MaskingConfig,
    vocabulary: MaskedVocabulary,
    random: np.random.RandomState,
) -> tuple[np.ndarray, list[int]]:
    """Hides phrases of a sample.

    A phrase begins at every word; phrases are visited in random order, each cut to a random number of words and, if
    it does not fit, to fewer.

    Shapes:
        tokens: int64 [n]; result: the tokens as they are shown, int64 [n], and the places of the hidden ones, in
        ascending order.

    Args:
        most_tokens: of the sample, without those that were added to it; the share of hidden tokens is taken of it too.
    """
    share = rules.mask_prob
    wanted = int(min(share * most_tokens, max(1, round(len(tokens) * share))))
    places, words = _words(tokens, rules, vocabulary)
    order = np.arange(len(words) - 1)
    random.shuffle(order)
    lengths = 1.0 / np.arange(1, rules.masking_ngrams + 1)
    lengths /= lengths.sum(keepdims=True)
    limits = np.cumsum(lengths / lengths.sum(keepdims=True))
    limits = (limits / limits[-1]).tolist()
    draw = random.random_sample
    shown = tokens.copy()
    hidden: set[int] = set()
    for word in order.tolist():
        if len(hidden) >= wanted:
            break
        count = 1 + bisect_right(limits, draw())
        phrase = places[words[word] : words[min(word + count, len(words) - 1)]]
        while len(hidden) + len(phrase) > wanted and count > 1:
            count -= 1
            phrase = places[words[word] : words[min(word + count, len(words) - 1)]]
        if len(hidden) + len(phrase) > wanted or not hidden.isdisjoint(phrase):
            continue
        for place in phrase:
            shown[place] = _shown_instead(int(tokens[place]), rules, vocabulary, random)
        hidden.update(phrase)
    return shown, sorted(hidden)


def _words(tokens: np.ndarray, rules: MaskingConfig, vocabulary: MaskedVocabulary) -> tuple[list[int], list[int]]:
    """The positions that may be hidden, and where each word begins among them, with one past the last at the end."""
    places = np.flatnonzero((tokens != vocabulary.cls_id) & (tokens != vocabulary.sep_id))
    begins = np.ones(len(places), np.bool_)
    if rules.whole_word_masking:
        begins[1:] = ~vocabulary.continues[tokens[places[1:]]]
    return places.tolist(), [*np.flatnonzero(begins).tolist(), len(places)]


def _shown_instead(
    token: int, rules: MaskingConfig, vocabulary: MaskedVocabulary, random: np.random.RandomState
) -> int:
    """What is shown in place of a hidden token: the mask token, the token itself, or any of the vocabulary."""
    shares = rules.random_replace_prob + rules.unmask_replace_prob
    if random.random_sample() < 1 - shares:
        return vocabulary.mask_id
    if random.random_sample() < rules.unmask_replace_prob / shares:
        return token
    return int(random.randint(0, vocabulary.size))


def hide_tokens(
    text: np.ndarray,
    may_hide: np.ndarray,
    most: int,
    rules: MaskingConfig,
    vocabulary: MaskedVocabulary,
    numbers: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Hides tokens of a sample, or whole words if the rules say so.

    Shapes:
        text: int64 [s]; may_hide: bool [s]; numbers: uint64 [s]; result: the tokens as they are shown, int64 [s], and
        which are hidden, bool [s].

    Args:
        most: the most tokens that are hidden; others stay.
    """
    may_hide = may_hide & ~vocabulary.is_special[text]
    draws = numbers >> _HALF
    if rules.whole_word_masking:
        draws = draws[_first_of_word(text, may_hide, vocabulary)]
    share, shown = rules.mask_prob, rules.random_replace_prob + rules.unmask_replace_prob
    is_hidden = may_hide & (draws < _bound(share))
    places = np.flatnonzero(is_hidden)
    if len(places) > most:
        is_hidden[places[most:]] = False
        places = places[:most]
    drawn = draws[places]
    others = vocabulary.drawable[
        ((numbers[places] & _LOWER) * np.uint64(len(vocabulary.drawable)) >> _HALF).astype(int)
    ]
    replaced = np.where(drawn < _bound(share * (1 - rules.unmask_replace_prob)), others, text[places])
    replaced[drawn < _bound(share * (1 - shown))] = vocabulary.mask_id
    result = text.copy()
    result[places] = replaced
    return result, is_hidden


def sample_numbers(seed: int, sample: int, count: int) -> np.ndarray:
    """Random numbers of a sample. Shapes: result uint64 [count]."""
    return np.random.Philox(key=np.array([seed, sample], np.uint64)).random_raw(count)


def _bound(share: float) -> np.uint64:
    return np.uint64(round(share * 2**32))


def _first_of_word(text: np.ndarray, may_hide: np.ndarray, vocabulary: MaskedVocabulary) -> np.ndarray:
    """The position where the word of each token begins; no word goes beyond a special token."""
    begins = ~vocabulary.continues[text]
    begins[0] = True
    begins[1:] |= ~may_hide[:-1]
    return np.maximum.accumulate(np.where(begins, np.arange(len(text)), 0))
