"""Hidden phrases: whole words, no more than asked for, never a separator."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings, strategies

from megatron.config import MaskingConfig
from megatron.data.datasets.masked.phrases import hide_phrases
from tests.data.datasets.masked.corpora import CLS, FIRST_WORD, MASK, SEP, VOCABULARY, WORDS, continues

TEXTS = strategies.lists(
    strategies.one_of(strategies.just(SEP), strategies.integers(FIRST_WORD, FIRST_WORD + WORDS - 1)), max_size=60
).map(lambda words: np.array([CLS, *words, SEP]))
SEEDS = strategies.integers(0, 2**32 - 1)


@settings(max_examples=80, deadline=None)
@given(TEXTS, strategies.sampled_from([0.05, 0.15, 0.5, 0.95]), strategies.integers(1, 5), SEEDS)
def test_what_is_hidden(vocabulary, text, share, ngrams, seed):
    rules = MaskingConfig(mask_prob=share, masking_ngrams=ngrams)
    shown, hidden = hide_phrases(text, len(text), rules, vocabulary, np.random.RandomState(seed))
    assert hidden == sorted(set(hidden)) and len(hidden) <= max(1, round(share * len(text)))
    assert not {CLS, SEP} & set(text[hidden].tolist())
    kept = np.delete(np.arange(len(text)), hidden)
    assert (shown[kept] == text[kept]).all() and shown.max() < VOCABULARY and shown.min() >= 0
    words: list[list[int]] = []
    for place in np.flatnonzero((text != CLS) & (text != SEP)).tolist():
        if words and continues(int(text[place])):
            words[-1].append(place)
        else:
            words.append([place])
    for word in words:
        assert len(set(word) & set(hidden)) in (0, len(word))
    if ngrams == 1 and words and min(map(len, words)) <= share * len(text):
        assert hidden


@settings(max_examples=20, deadline=None)
@given(TEXTS, SEEDS)
def test_shares_of_what_is_shown(vocabulary, text, seed):
    for given_shares, expected in (
        ({"random_replace_prob": 0.0, "unmask_replace_prob": 0.0}, lambda hidden: np.full(len(hidden), MASK)),
        ({"random_replace_prob": 0.0, "unmask_replace_prob": 1.0}, lambda hidden: text[hidden]),
    ):
        rules = MaskingConfig(mask_prob=0.5, whole_word_masking=False, **given_shares)
        shown, hidden = hide_phrases(text, len(text), rules, vocabulary, np.random.RandomState(seed))
        assert shown[hidden].tolist() == expected(hidden).tolist()


def test_the_shares_of_upstream(vocabulary):
    random, rules = np.random.RandomState(3), MaskingConfig()
    text = np.array([CLS, *random.randint(FIRST_WORD, FIRST_WORD + WORDS, 509), SEP])
    counts = {"hidden": 0, "mask": 0, "same": 0}
    for seed in range(60):
        shown, hidden = hide_phrases(text, len(text), rules, vocabulary, np.random.RandomState(seed))
        counts["hidden"] += len(hidden)
        counts["mask"] += int((shown[hidden] == MASK).sum())
        counts["same"] += int((shown[hidden] == text[hidden]).sum())
    assert counts["hidden"] == 60 * 76  # 0.15 of 511 tokens, rounded down
    assert abs(counts["mask"] / counts["hidden"] - 0.8) < 0.02 and abs(counts["same"] / counts["hidden"] - 0.1) < 0.02
