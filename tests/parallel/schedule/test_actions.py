"""The vocabulary of schedules: kinds, placements and the programs of a pass without gradients."""

from __future__ import annotations

from collections import Counter

from megatron.parallel.schedule.actions import Action, Kind, Placement, without_backward_before
from megatron.parallel.schedule.building import build_schedule


def test_kinds_are_computations_or_messages() -> None:
    assert [kind.name for kind in Kind if not kind.is_message] == [
        "FORWARD",
        "BACKWARD",
        "INPUT_BACKWARD",
        "WEIGHT_BACKWARD",
    ]
    assert [kind for kind in Kind if not kind.is_of_backward] == [
        Kind.FORWARD,
        Kind.SEND_FORWARD,
        Kind.RECEIVE_FORWARD,
    ]


def test_a_loop_deals_chunks_out_in_turn() -> None:
    placement = Placement.loop(3, 2)
    assert [placement.owner(chunk) for chunk in range(placement.chunks)] == [0, 1, 2, 0, 1, 2]
    assert (placement.ranks, placement.chunks_of(1)) == (3, (1, 4))


def test_a_v_turns_round_at_the_last_rank() -> None:
    placement = Placement.v_shape(3)
    assert [placement.chunks_of(rank) for rank in range(3)] == [(0, 5), (1, 4), (2, 3)]


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
