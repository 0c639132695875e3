"""The vocabulary of schedules: kinds, placements and the programs of a pass without gradients."""

from __future__ import annotations

from collections import Counter

from megatron.parallel.schedule.actions import Action, Kind, without_backward_before
from megatron.parallel.schedule.building import build_schedule


def test_without_gradients_the_order_stays() -> None:
    schedule = build_schedule("zb-h1", 2, 1, 2)
    assert [str(action) for action in schedule.forward_only()[0]] == ["0F0", "0SF0", "0F1", "0SF1"]
    assert schedule.forward_only()[1][0] == Action(Kind.RECEIVE_FORWARD, 1, 0, peer=0)


def test_chunks_without_gradients_neither_compute_nor_are_sent_any() -> None:
    schedule = build_schedule("interleaved", 2, 2, 3)
    assert without_backward_before(schedule.actions[0], 0) == schedule.actions[0]
    left = [action for program in schedule.actions for action in without_backward_before(program, 2)]
    counts = Counter((action.kind, action.chunk) for action in left)
    assert {chunk for kind, chunk in counts if kind is Kind.FORWARD} == {0, 1, 2, 3}
    assert {chunk for kind, chunk in counts if kind is Kind.BACKWARD} == {2, 3}
    assert {chunk for kind, chunk in counts if kind is Kind.SEND_BACKWARD} == {3}
    assert {chunk for kind, chunk in counts if kind is Kind.RECEIVE_BACKWARD} == {2}
    assert set(counts.values()) == {3}
