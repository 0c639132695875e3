"""What a style is told besides the metrics."""

from __future__ import annotations

import dataclasses

import pytest

from megatron.observe.console import LogPosition


def test_a_moment_is_frozen_and_starts_in_the_first_epoch() -> None:
    position = LogPosition(1, 2)
    assert (position.epoch, position.seconds_left) == (0, None)
    with pytest.raises(dataclasses.FrozenInstanceError):
        position.step = 3  # type: ignore[misc]
