"""The flags of sampling and of beam search: upstream's spellings, bounds, and the biases in words."""

from __future__ import annotations

import pytest

from megatron.config import parse_flags
from megatron.config.sampling_flags import BeamFlags, SamplingFlags, read_logit_bias
from megatron.errors import ConfigError


def test_the_spellings_of_upstream() -> None:
    words = "--temperature 0.5 --greedy --top_k 5 --top_p 0.9"
    assert parse_flags(SamplingFlags, words.split()) == SamplingFlags(temperature=0.5, greedy=True, top_k=5, top_p=0.9)
    assert parse_flags(SamplingFlags, ["--top-k", "5", "--top-p", "0.9"]) == SamplingFlags(top_k=5, top_p=0.9)


def test_all_other_flags() -> None:
    words = "--min-p 0.1 --typical_p 0.2 --repetition-penalty 1.2 --frequency_penalty -1 --presence-penalty 2"
    assert parse_flags(SamplingFlags, [*words.split(), "--logit-bias", "5=-100", "7=1.5"]) == SamplingFlags(
        min_p=0.1, typical_p=0.2, repetition_penalty=1.2, frequency_penalty=-1.0, presence_penalty=2.0,
        logit_bias=("5=-100", "7=1.5"),
    )  # fmt: skip
    words = "--num_beams 4 --length-penalty -0.5 --early-stopping never"
    assert parse_flags(BeamFlags, words.split()) == BeamFlags(num_beams=4, length_penalty=-0.5, early_stopping="never")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--temperature -1", r"--temperature -1\.0 is out of range. It must be at least 0"),
        ("--top_p 1.5", r"--top-p 1\.5 is out of range"),
        ("--min-p 2", r"--min-p 2\.0 is out of range"),
        ("--typical-p -1", r"--typical-p -1\.0 is out of range"),
        ("--top_k -1", "--top-k -1 is out of range"),
        ("--repetition-penalty 0", r"--repetition-penalty 0\.0 is out of range. It must be at least 0\.01"),
        ("--frequency-penalty 3", r"--frequency-penalty 3\.0 is out of range. It must be at most 2"),
        ("--presence-penalty -3", r"--presence-penalty -3\.0 is out of range"),
        ("--logit-bias", "--logit-bias expects at least one value"),
        ("--logit-bias 5", "--logit-bias 5 is invalid. Expected a token id and a bias from -100 to 100, for example"),
    ],
)
def test_values_that_cannot_be_used(words: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse_flags(SamplingFlags, words.split())


@pytest.mark.parametrize("word", ["5=101", "5=nan", "-5=1", "a=1", "5=", "=1", "5:1", "5=1=1"])
def test_biases_that_cannot_be_used(word: str) -> None:
    with pytest.raises(ConfigError, match=f"--logit-bias {word} is invalid. Expected a token id"):
        read_logit_bias([word])


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--num-beams 0", "--num-beams 0 is out of range"),
        ("--num-beams 257", "--num-beams 257 is out of range. It must be at most 256"),
        ("--length-penalty 11", r"--length-penalty 11\.0 is out of range"),
        ("--early-stopping soon", "--early-stopping soon is unknown. Use one of: false, true, never"),
        ("--num-beams 2 --top_p 0.9", r"--top-p 0\.9 cannot be combined with --num-beams 2: it is for sampling"),
        ("--num-beams 2 --logit-bias 5=1 6=1", "--logit-bias 5=1 6=1 cannot be combined with --num-beams"),
        ("--num-beams 2 --greedy", "--greedy True cannot be combined with --num-beams"),
        ("--length-penalty 2", r"--length-penalty 2\.0 requires beam search. Give --num-beams, or drop"),
        ("--early-stopping true", "--early-stopping true requires beam search"),
    ],
)
def test_searches_that_cannot_be_done(words: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        parse_flags(BeamFlags, words.split())
