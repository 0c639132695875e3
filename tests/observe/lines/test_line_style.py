"""What a style is told besides the metrics."""

from __future__ import annotations

import dataclasses

import pytest

from megatron.observe.console import Moment


def test_a_moment_is_frozen_and_starts_in_the_first_epoch() -> None:
    moment = Moment(1, 2)
    assert (moment.epoch, moment.seconds_left) == (0, None)
    with pytest.raises(dataclasses.FrozenInstanceError):
        moment.step = 3  # type: ignore[misc]
