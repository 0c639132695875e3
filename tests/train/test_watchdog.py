"""What a rank says of its place, and what a watch of one process does."""

from __future__ import annotations

import time

from megatron.train.watchdog import Watch


def test_a_phase_is_progress_and_keeps_the_step() -> None:
    watch = Watch()
    time.sleep(0.02)
    assert watch.seconds_without_progress() >= 0.02
    watch.enter("data", 3)
    assert watch.seconds_without_progress() < 0.02
    assert watch.longest_seconds() == 0  # start-up is not compared with
    time.sleep(0.02)
    watch.enter("forward")
    assert watch.longest_seconds() >= 0.02
    before = watch._position
    watch.beat()
    after = watch._position
    assert (after.phase, after.step, after.events) == ("forward", 3, before.events + 1)
    assert after.at_seconds >= before.at_seconds


def test_a_process_alone_has_nobody_to_tell() -> None:
    with Watch() as watch:
        assert watch.peers_answer()
        assert not watch.fail(1, "shown by the caller")
