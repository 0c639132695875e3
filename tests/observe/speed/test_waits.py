"""The figures of one step are unknown until they are measured."""

from __future__ import annotations

from megatron.observe.speed.waits import Waits


def test_nothing_is_claimed_that_was_not_measured() -> None:
    waits = Waits()
    assert (waits.data_seconds, waits.communication_seconds, waits.transfer_seconds, waits.memory_bytes) == (None,) * 4
