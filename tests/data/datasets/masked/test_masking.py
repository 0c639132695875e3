"""Hidden phrases: whole words, no more than asked for, never a separator."""

import numpy as np
import pytest
from hypothesis import given, settings, strategies

from megatron.config import MaskingConfig
from megatron.data.datasets.masked.masking import mask_spans, mask_tokens, sample_numbers
from tests.data.datasets.masked.corpora import CLS, FIRST_WORD, MASK, PAD, SEP, VOCABULARY, WORDS, continues

TEXTS = strategies.lists(
    strategies.one_of(strategies.just(SEP), strategies.integers(FIRST_WORD, FIRST_WORD + WORDS - 1)), max_size=60
).map(lambda words: np.array([CLS, *words, SEP]))
SEEDS = strategies.integers(0, 2**32 - 1)


@settings(max_examples=80, deadline=None)
@given(TEXTS, strategies.sampled_from([0.05, 0.15, 0.5, 0.95]), strategies.integers(1, 5), SEEDS)
def test_what_is_hidden(vocabulary, text, share, ngrams, seed):
    rules = MaskingConfig(mask_prob=share, masking_ngrams=ngrams)
    shown, hidden = mask_spans(text, len(text), rules, vocabulary, np.random.RandomState(seed))
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


RULES = MaskingConfig(masked_samples="documents")
SEQUENCE, BATCH, BATCHES = 64, 8, 10_000


def test_the_shares_over_ten_thousand_batches_of_eight(vocabulary):
    """The statistic of HelloDeepSpeed's own test; a batch is laid end to end, its edges are never hidden."""
    random = np.random.RandomState(0)
    text = random.randint(FIRST_WORD, FIRST_WORD + WORDS, (BATCH, SEQUENCE))
    text[:, 0], text[:, -1] = CLS, SEP
    text = text.reshape(-1)
    may_hide = (text != CLS) & (text != SEP)
    hidden_tokens = randomly = kept = 0
    for batch in range(BATCHES):
        shown, hidden = mask_tokens(text, may_hide, len(text), RULES, vocabulary, sample_numbers(7, batch, len(text)))
        is_kept = hidden & (shown == text)
        hidden_tokens += int(hidden.sum())
        kept += int(is_kept.sum())
        randomly += int((hidden & ~is_kept & (shown != MASK)).sum())
    total = BATCHES * int(may_hide.sum())
    same_by_chance = 0.015 / WORDS  # a random token that is the hidden one
    assert hidden_tokens / total == pytest.approx(0.15, abs=1e-3)
    assert randomly / total == pytest.approx(0.015 - same_by_chance, abs=1e-3)
    assert kept / total == pytest.approx(0.015 + same_by_chance, abs=1e-3)


@settings(max_examples=80, deadline=None)
@given(
    strategies.lists(strategies.integers(0, VOCABULARY - 1), min_size=1, max_size=80),
    strategies.sampled_from([0.05, 0.5, 0.99]),
    strategies.booleans(),
    strategies.integers(0, 2**32 - 1),
    strategies.integers(0, 2**40),
)
def test_special_tokens_are_neither_hidden_nor_shown(vocabulary, ids, share, whole_words, seed, sample):
    text = np.array(ids)
    may_hide = np.random.RandomState(seed).random_sample(len(text)) < 0.9
    rules = MaskingConfig(
        masked_samples="stream", mask_prob=share, whole_word_masking=whole_words, random_replace_prob=0.7
    )
    numbers = sample_numbers(seed, sample, len(text))
    shown, hidden = mask_tokens(text, may_hide, len(text), rules, vocabulary, numbers)
    special = {PAD, CLS, SEP, MASK, VOCABULARY - 2, VOCABULARY - 1}
    assert not special & set(text[hidden].tolist()) and not hidden[~may_hide].any()
    assert (shown == text)[~hidden].all() and not (special - {MASK}) & set(shown[hidden].tolist())
    again, _ = mask_tokens(text, may_hide, len(text), rules, vocabulary, sample_numbers(seed, sample, len(text)))
    assert again.tolist() == shown.tolist()
    if whole_words:
        for place in range(1, len(text)):
            if (
                continues(int(text[place]))
                and may_hide[place]
                and may_hide[place - 1]
                and text[place - 1] not in special
            ):
                assert hidden[place] == hidden[place - 1]


def test_no_more_than_the_most_are_hidden(vocabulary):
    text = np.full(50, FIRST_WORD)
    rules = MaskingConfig(masked_samples="stream", mask_prob=0.99, random_replace_prob=0.0, unmask_replace_prob=0.0)
    shown, hidden = mask_tokens(text, np.ones(50, bool), 7, rules, vocabulary, sample_numbers(1, 1, 50))
    assert hidden.sum() == 7 and (shown == MASK).sum() == 7
