"""Bias, penalties, temperature and cuts: by hand, in their order, and equal to what `transformers` computes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from transformers import (
    LogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from megatron.errors import ConfigError
from megatron.inference.sampling import Chooser, Sampling
from megatron.inference.sampling.processing import adjust, warp

PROBABILITIES = torch.tensor([[0.5, 0.2, 0.15, 0.1, 0.05]])
SCORES = PROBABILITIES.log()


def _distribution(scores: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    return warp(scores, [sampling] * len(scores)).softmax(-1)


def _kept(**settings: Any) -> list[int]:
    return torch.nonzero(_distribution(SCORES, Sampling(**settings))[0]).flatten().tolist()


def _adjusted(scores: torch.Tensor, sampling: Sampling, prompt: list[int], text: list[int]) -> torch.Tensor:
    chooser = Chooser(sampling, prompt)
    for token in text:
        chooser.append(token)
    return adjust(scores, [chooser])


def test_by_default_it_is_the_softmax() -> None:
    torch.testing.assert_close(_distribution(SCORES, Sampling()), PROBABILITIES)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_temperature_divides_the_logits(temperature: float) -> None:
    expected = (SCORES / temperature).softmax(-1)
    torch.testing.assert_close(_distribution(SCORES, Sampling(temperature=temperature)), expected)


@pytest.mark.parametrize("temperature", [1e-300, 1e-12, 1e38])
def test_no_temperature_overflows(temperature: float) -> None:
    found = _distribution(torch.tensor([[900.0, 899.0, -1e30, float("-inf")]]), Sampling(temperature=temperature))
    expected = [[1.0, 0.0, 0.0, 0.0]] if temperature < 1 else [[1 / 3, 1 / 3, 1 / 3, 0.0]]
    torch.testing.assert_close(found, torch.tensor(expected))


@pytest.mark.parametrize(("top_k", "kept"), [(0, 5), (1, 1), (3, 3), (5, 5), (99, 5)])
def test_top_k_keeps_the_most_probable(top_k: int, kept: int) -> None:
    assert _kept(top_k=top_k) == list(range(kept))


def test_top_k_keeps_ties_with_the_last() -> None:
    found = _distribution(torch.tensor([[1.0, 2.0, 2.0, 3.0]]), Sampling(top_k=2))
    assert (found > 0).tolist() == [[False, True, True, True]]


@pytest.mark.parametrize(
    ("top_p", "kept"),
    # the token that crosses the threshold stays: 0.5 alone reaches 0.45; 0.5 + 0.2 crosses 0.6; and so on
    [(0.0, 5), (1e-30, 1), (0.01, 1), (0.45, 1), (0.6, 2), (0.75, 3), (0.9, 4), (0.97, 5), (1.0, 5)],
)
def test_top_p_keeps_the_first_past_the_threshold(top_p: float, kept: int) -> None:
    found = _distribution(SCORES, Sampling(top_p=top_p))
    assert int((found > 0).sum()) == kept
    torch.testing.assert_close(found[0, :kept], PROBABILITIES[0, :kept] / PROBABILITIES[0, :kept].sum())


def test_top_p_keeps_no_more_than_it_needs() -> None:
    found = _distribution(torch.tensor([[0.5, 0.25, 0.25]]).log(), Sampling(top_p=0.5))
    assert found.tolist() == [[1.0, 0.0, 0.0]]


@pytest.mark.parametrize(("min_p", "kept"), [(0.0, 5), (0.09, 5), (0.11, 4), (0.29, 3), (0.31, 2), (1.0, 1)])
def test_min_p_is_a_fraction_of_the_highest_probability(min_p: float, kept: int) -> None:
    assert _kept(min_p=min_p) == list(range(kept))


def test_typical_keeps_what_is_nearest_to_the_entropy() -> None:
    # The entropy is 1.333 nats. Distances of the information: 0.64, 0.28, 0.56, 0.97, 1.66, so 1, 2, 0, 3, 4.
    assert _kept(typical_p=0.1) == [1]
    assert _kept(typical_p=0.3) == [1, 2]
    assert _kept(typical_p=0.5) == [0, 1, 2]
    assert _kept(typical_p=0.9) == [0, 1, 2, 3]
    assert _kept(typical_p=0.0) == _kept(typical_p=1.0) == [0, 1, 2, 3, 4]


def test_the_cuts_do_not_depend_on_the_order_of_the_vocabulary() -> None:
    order = torch.tensor([3, 0, 4, 2, 1])
    for sampling in (Sampling(top_p=0.6), Sampling(top_k=2), Sampling(min_p=0.3), Sampling(typical_p=0.3)):
        found = _distribution(SCORES[:, order], sampling)
        torch.testing.assert_close(found, _distribution(SCORES, sampling)[:, order])


def test_each_cut_works_on_what_the_one_before_left() -> None:
    # Of the best two, renormalized, the first has 0.5 / 0.7 = 0.714, which reaches 0.7 alone; of all, it would not.
    assert _kept(top_k=2, top_p=0.7) == [0]
    assert _kept(top_p=0.7) == [0, 1]
    # Of the best two, the entropy is 0.598 nats and the first is nearest to it; of all, the second is.
    assert _kept(top_p=0.6, typical_p=0.1) == [0]
    assert _kept(min_p=0.35, typical_p=0.1) == [0]


def test_every_row_has_its_own_settings() -> None:
    settings = [
        Sampling(), Sampling(temperature=0.5), Sampling(top_k=2), Sampling(top_p=0.6), Sampling(min_p=0.25),
        Sampling(typical_p=0.4), Sampling(temperature=2.0, top_k=4, top_p=0.9, min_p=0.1, typical_p=0.8),
    ]  # fmt: skip
    scores = torch.randn(len(settings), 300, generator=torch.Generator().manual_seed(1)) * 3
    together = warp(scores, settings)
    for row, sampling in enumerate(settings):
        assert torch.equal(together[row], warp(scores[row : row + 1], [sampling])[0])


def test_bias_and_penalties_by_hand() -> None:
    scores = torch.tensor([[2.0, -2.0, 1.0, 0.5, 0.0]])
    assert _adjusted(scores, Sampling(logit_bias=((0, -3.0), (4, 100.0), (4, -1.0))), [], []).tolist() == [
        [-1.0, -2.0, 1.0, 0.5, 99.0]
    ]
    # Prompt and text count, each token once.
    repetition = Sampling(repetition_penalty=2.0)
    assert _adjusted(scores, repetition, [0, 1, 0], [3]).tolist() == [[1.0, -4.0, 1.0, 0.25, 0.0]]
    # Only the text counts, as often as a token is in it.
    assert _adjusted(scores, Sampling(frequency_penalty=0.5), [0, 1], [2, 2, 3]).tolist() == [
        [2.0, -2.0, 0.0, 0.0, 0.0]
    ]
    assert _adjusted(scores, Sampling(presence_penalty=-0.5), [0, 1], [2, 2, 3]).tolist() == [
        [2.0, -2.0, 1.5, 1.0, 0.0]
    ]


def test_the_bias_comes_first_and_the_repetition_penalty_before_the_others() -> None:
    sampling = Sampling(logit_bias=((0, 4.0),), repetition_penalty=2.0, frequency_penalty=1.0, presence_penalty=0.25)
    assert _adjusted(torch.tensor([[2.0, 1.0]]), sampling, [], [0, 0]).tolist() == [[(2 + 4) / 2 - 2 * 1.0 - 0.25, 1.0]]


def test_scores_that_nothing_changes_are_not_copied() -> None:
    assert _adjusted(SCORES, Sampling(top_k=3, temperature=0.5), [1], [2]) is SCORES
    before = SCORES.clone()
    _adjusted(SCORES, Sampling(presence_penalty=1.0), [1], [2])
    assert torch.equal(SCORES, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_bias_may_be_a_whole_number(dtype: torch.dtype) -> None:
    history = Chooser(Sampling(logit_bias=((1, 2), (1, 1))), (0,))
    assert adjust(torch.zeros(1, 3, dtype=dtype), [history]).tolist() == [[0.0, 3.0, 0.0]]


def test_a_bias_for_a_token_that_does_not_exist() -> None:
    with pytest.raises(ConfigError, match=r"logit_bias has token 5, and the vocabulary ends at 4"):
        _adjusted(SCORES, Sampling(logit_bias=((5, 1.0),)), [], [])


PROMPT, TEXT = [5, 17, 5, 99], [3, 17, 17]
REFERENCES: dict[str, tuple[Sampling, list[LogitsProcessor]]] = {
    "temperature": (Sampling(temperature=0.7), [TemperatureLogitsWarper(0.7)]),
    "top_k": (Sampling(top_k=20), [TopKLogitsWarper(20)]),
    "top_p": (Sampling(top_p=0.8), [TopPLogitsWarper(0.8)]),
    "min_p": (Sampling(min_p=0.05), [MinPLogitsWarper(0.05)]),
    "typical": (Sampling(typical_p=0.6), [TypicalLogitsWarper(0.6)]),
    "repetition": (Sampling(repetition_penalty=1.3), [RepetitionPenaltyLogitsProcessor(1.3)]),
    "bias": (Sampling(logit_bias=((3, 4.0), (8, -100.0))), [SequenceBiasLogitsProcessor([[[3], 4.0], [[8], -100.0]])]),
    "all": (
        Sampling(
            temperature=1.5, top_k=150, top_p=0.95, min_p=0.01, typical_p=0.9, repetition_penalty=1.2,
            logit_bias=((3, 4.0), (17, -2.0)),
        ),
        [
            SequenceBiasLogitsProcessor([[[3], 4.0], [[17], -2.0]]),
            RepetitionPenaltyLogitsProcessor(1.2), TemperatureLogitsWarper(1.5), TopKLogitsWarper(150),
            TopPLogitsWarper(0.95), MinPLogitsWarper(0.01), TypicalLogitsWarper(0.9),
        ],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFERENCES)
def test_equal_to_transformers(name: str) -> None:
    sampling, processors = REFERENCES[name]
    scores = torch.randn(40, 400, generator=torch.Generator().manual_seed(7)) * 3
    scores[::2, 10:13] = scores[::2, :1]  # ties
    scores[1::2, 350:] = -math.inf  # padding of the vocabulary
    choosers = [Chooser(sampling, PROMPT) for _ in scores]
    for chooser in choosers:
        for token in TEXT:
            chooser.append(token)
    found = warp(adjust(scores, choosers), [sampling] * len(scores))
    expected = scores.clone()
    for processor in processors:
        expected = processor(torch.tensor([PROMPT + TEXT] * len(scores)), expected)
    assert torch.equal(found.isneginf(), expected.isneginf())
    torch.testing.assert_close(found.softmax(-1), expected.softmax(-1))
