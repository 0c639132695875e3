"""Cuts by a few candidates remove what sorting the whole vocabulary removes, also where scores are equal."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from megatron.inference.sampling import Sampling
from megatron.inference.sampling.cutting import cut

SETTINGS = st.builds(
    Sampling,
    top_k=st.integers(0, 12),
    top_p=st.sampled_from([0.0, 0.05, 0.3, 0.5, 0.9, 0.999]),
    min_p=st.sampled_from([0.0, 0.01, 0.2, 0.7, 1.0]),
    typical_p=st.sampled_from([0.0, 0.0, 0.2, 0.9]),
)


@example([Sampling(), Sampling(top_p=0.9, typical_p=0.2)], 0, 2.0)  # typicality removes the last candidate
@given(st.lists(SETTINGS, min_size=1, max_size=4), st.integers(0, 10**6), st.sampled_from([0.5, 2.0, 8.0]))
def test_candidates_are_enough_or_everything_is_sorted(settings: list[Sampling], seed: int, spread: float) -> None:
    draws = torch.Generator().manual_seed(seed)
    scores = (torch.randn(len(settings), 60, generator=draws) * spread).round()  # many are equal
    scores[:, 50:] = float("-inf")
    scores -= scores.amax(dim=-1, keepdim=True)
    expected = cut(scores, settings, candidates=60)
    assert torch.equal(cut(scores, settings, candidates=5), expected)
    for row, one in enumerate(settings):
        assert torch.equal(cut(scores[row : row + 1], [one], candidates=5)[0], expected[row])


@pytest.mark.parametrize(
    ("scores", "settings", "kept"),
    [
        ([0.0, -1.0, -1.0, -1.0, -2.0, -3.0, -4.0, -5.0, -6.0], Sampling(top_k=2), [0, 1, 2, 3]),  # equal to the 2nd
        ([0.0] * 9, Sampling(top_p=0.5), [0, 1, 2, 3, 4]),  # more than two candidates are needed
        ([0.0] * 9, Sampling(min_p=1.0), list(range(9))),
        ([-9.0] * 8 + [0.0], Sampling(top_p=0.9), [8]),
        ([-9.0] * 8 + [0.0], Sampling(min_p=0.5), [8]),
    ],
)
def test_rows_for_which_two_candidates_are_too_few_or_enough(
    scores: list[float], settings: Sampling, kept: list[int]
) -> None:
    found = cut(torch.tensor([scores]), [settings], candidates=2)
    assert torch.nonzero(found[0] > float("-inf")).flatten().tolist() == kept
