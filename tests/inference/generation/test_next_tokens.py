"""The end of a step: why a text ends there. How tokens are chosen on several ranks is tested in `test_ranks.py`."""

from __future__ import annotations

import pytest
import torch

from megatron.errors import NumericsError
from megatron.inference.generation.next_tokens import choose_on_all, finish_of, last_length
from megatron.inference.generation.request import Request
from megatron.inference.sampling import Chooser
from tests.inference.networks import GREEDY, load

REQUEST = Request("a", (1, 2, 3), 5, GREEDY, stop_ids=frozenset({7}))


def test_a_stop_token_counts_more_than_the_length() -> None:
    assert finish_of(REQUEST, 4, 7, 8) is None
    assert finish_of(REQUEST, 4, 8, 8) == "length"
    assert finish_of(REQUEST, 7, 8, 8) == "stop"


def test_a_text_ends_at_its_limit_or_at_the_last_position() -> None:
    assert last_length(REQUEST, load()) == 8
    assert last_length(REQUEST, load({"max_position_embeddings": 6})) == 6


def test_of_equal_scores_the_lowest_token_is_chosen() -> None:
    scores = torch.zeros(1, 132)
    scores[0, [50, 20, 120]] = 1.0  # 120 is no word
    assert choose_on_all(scores, [Chooser(GREEDY, (1,))], load())[0].token == 20
    with pytest.raises(NumericsError, match="NaN"):
        choose_on_all(scores * float("nan"), [Chooser(GREEDY, (1,))], load())
