"""What the watchdog is told when a run ends."""

from __future__ import annotations

from unittest import mock

import pytest

from megatron.errors import DataError, PeerLostError
from megatron.parallel.watch.position import END
from megatron.train.callbacks.watching import Watching
from megatron.train.watchdog import Watch


@pytest.mark.parametrize(
    ("error", "phase"),
    [
        (None, END),
        (DataError("sample 7 is damaged"), END),
        (PeerLostError("another rank has ended"), "backward"),
        (RuntimeError("Connection closed by peer [127.0.0.1]:4711"), "backward"),
    ],
)
def test_a_rank_that_lost_another_still_says_what_it_did_then(error: BaseException | None, phase: str) -> None:
    watch = Watch()
    watch.enter("backward", 3)
    Watching(watch).close(mock.Mock(), error)
    assert (watch.position().phase, watch.position().step) == (phase, 3)
