"""Overlapping windows: every token but the first is scored exactly once, with the context that the stride leaves."""

from __future__ import annotations

import pytest

from megatron.evaluation.tasks.windows import overlapping_windows


def test_the_windows_of_a_short_text() -> None:
    windows = list(overlapping_windows(range(10), window=4, stride=2))
    assert [(query.tokens, query.first_target) for query in windows] == [
        ((0, 1, 2, 3, 4), 1),
        ((2, 3, 4, 5, 6), 3),
        ((4, 5, 6, 7, 8), 3),
        ((6, 7, 8, 9), 3),
    ]


@pytest.mark.parametrize("length", [2, 3, 7, 8, 9, 16, 17, 33, 100])
@pytest.mark.parametrize("window", [1, 2, 7, 8])
@pytest.mark.parametrize("stride", [1, 3, 8, 50])
def test_every_token_is_scored_once(length: int, window: int, stride: int) -> None:
    windows = list(overlapping_windows(range(length), window, stride))
    assert [token for query in windows for token in query.targets] == list(range(1, length))
    stride = min(stride, window)
    for number, query in enumerate(windows):
        assert len(query.tokens) <= window + 1
        assert query.tokens[0] == number * stride  # upstream's windows begin there
        assert query.first_target == (1 if number == 0 else window + 1 - stride)


@pytest.mark.parametrize("length", [0, 1])
def test_a_text_without_a_second_token_has_no_window(length: int) -> None:
    assert list(overlapping_windows(range(length), 4, 2)) == []
