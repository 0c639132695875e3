"""Choosing whole words and phrases to hide, as BERT's data set does: a fixed number of tokens in each sample.

The draws are upstream's in number, order and meaning, so the same tokens are hidden.

Source: bigscience Megatron-DeepSpeed `megatron/data/dataset_utils.py` (`create_masked_lm_predictions`); phrases, whole
words and replacements are as in Devlin et al., "BERT", 2019, and SpanBERT.
"""

from __future__ import annotations

from bisect import bisect_right

import numpy as np

from megatron.config.objective.masking import MaskingConfig
from megatron.data.datasets.masked.vocabulary import MaskedVocabulary


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
    """The places that may be hidden, and where each word begins among them, with one past the last at the end."""
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
