"""How many tokens of a sample are hidden at most, and how sentences are cut."""

import pytest

from megatron.config import MaskingConfig
from megatron.data.datasets.masked.masked_options import MaskedOptions
from megatron.errors import ConfigError


def test_the_most_hidden_tokens():
    assert MaskedOptions(MaskingConfig()).predictions(512) == 76
    stream = MaskedOptions(MaskingConfig(masked_samples="stream"))
    assert stream.predictions(512) == 126 and stream.predictions(10) == 8


@pytest.mark.parametrize(("kind", "length"), [("sentences", 9), ("documents", 2)])
def test_samples_that_are_too_short(kind, length):
    options = MaskedOptions(MaskingConfig(masked_samples=kind))
    with pytest.raises(ConfigError, match=f"--seq-length {length} with --mask-prob 0.15 leaves no token"):
        options.predictions(length)
