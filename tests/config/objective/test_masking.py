"""Flags of masked language modelling: what follows from the kind of samples, and what contradicts it."""

from __future__ import annotations

import pytest

from megatron.config import MaskingConfig
from megatron.errors import ConfigError


def test_sentences_are_masked_as_upstream_does_and_other_samples_token_by_token():
    sentences = MaskingConfig()
    assert (sentences.mask_prob, sentences.short_seq_prob) == (0.15, 0.1)
    assert sentences.masked_samples == "sentences" and sentences.whole_word_masking and sentences.masking_ngrams == 3
    stream = MaskingConfig(masked_samples="stream")
    assert not stream.whole_word_masking and stream.masking_ngrams == 1
    assert MaskingConfig(whole_word_masking=False).masking_ngrams == 3


@pytest.mark.parametrize("share", [0.0, 1.0, -0.5])
def test_some_tokens_are_predicted_but_not_all(share):
    with pytest.raises(ConfigError, match=f"--mask-prob {share}"):
        MaskingConfig(mask_prob=share)


def test_shares_of_what_predicted_tokens_are_shown_as():
    with pytest.raises(ConfigError, match="--unmask-replace-prob 1.5"):
        MaskingConfig(unmask_replace_prob=1.5)
