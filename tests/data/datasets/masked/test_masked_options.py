"""How many tokens of a sample are hidden at most, and how sentences are cut."""

from __future__ import annotations

import pytest

from megatron.config import LossConfig, MaskingConfig
from megatron.data.datasets.masked.masked_options import MaskedOptions
from megatron.errors import ConfigError


def test_options_are_for_the_masked_objective():
    masking = MaskingConfig(mask_prob=0.2)
    assert MaskedOptions.of(masking, LossConfig(), pairs=True) is None
    assert MaskedOptions.of(masking, LossConfig(objective="masked"), pairs=False) == MaskedOptions(masking, False)


def test_the_most_hidden_tokens():
    assert MaskedOptions(MaskingConfig()).predictions(512) == 76
    stream = MaskedOptions(MaskingConfig(masked_samples="stream"))
    assert stream.predictions(512) == 126 and stream.predictions(10) == 8


@pytest.mark.parametrize(("kind", "length"), [("sentences", 9), ("documents", 2)])
def test_samples_that_are_too_short(kind, length):
    options = MaskedOptions(MaskingConfig(masked_samples=kind))
    with pytest.raises(ConfigError, match=f"--seq-length {length} with --mask-prob 0.15 leaves no token"):
        options.predictions(length)


def test_how_sentences_are_cut():
    rules = MaskedOptions(MaskingConfig(short_seq_prob=0.25), pairs=False).sentence_rules(128)
    assert (rules.most_tokens, rules.short_ratio, rules.least_sentences) == (125, 4, 1)
    assert MaskedOptions(MaskingConfig()).sentence_rules(128).least_sentences == 2
