"""When and why a coordinator ends the run, with the time as an argument and connections to nobody."""

from __future__ import annotations

import json
import random
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from megatron.errors import ExitCode
from megatron.parallel.processes import ProcessIdentity
from megatron.parallel.watch.coordinator import Coordinator, Failure, end_message
from megatron.parallel.watch.limits import PING_SECONDS, WIND_DOWN_SECONDS, WatchLimits
from megatron.parallel.watch.position import PHASES, Heartbeat
from megatron.parallel.watch.verdict import RunEnd
from megatron.parallel.watch.wire import Connection

LIMITS = WatchLimits(hang_seconds=40, start_seconds=100)
TOKEN = "a" * 32


class Rig:
    """A coordinator and the other ranks' ends of its connections."""

    def __init__(self, rank: int = 0, first: int | None = None, size: int = 3, limits: WatchLimits = LIMITS) -> None:
        processes = [ProcessIdentity("here", "m", "n", 100 + number, "1") for number in range(size)]
        self.coordinator = Coordinator(rank, first, processes, TOKEN, limits, 0.0)
        self.ends: dict[int, socket.socket] = {}
        self.near: dict[int, Connection] = {}
        for number in range(size):
            if number != rank:
                self.connect(number, {"kind": "hello", "token": TOKEN, "rank": number})
        self.coordinator.set_own_heartbeat(heartbeat("forward", 5), 0.0)

    def connect(self, number: int, hello: dict[str, Any]) -> None:
        ours, theirs = socket.socketpair()
        self.ends[number], self.near[number] = theirs, Connection(ours)
        self.coordinator.peers.accept(self.near[number], 0.0)
        self.say(number, 0.0, **hello)

    def say(self, number: int, now: float, **message: Any) -> None:
        content = json.dumps(message).encode()
        self.ends[number].sendall(len(content).to_bytes(4, "big") + content)
        self.coordinator.receive(self.near[number], now)

    def beat(self, number: int, now: float, phase: str = "forward", step: int = 5, idle: float = 0.0) -> None:
        self.say(number, now, kind="beat", **heartbeat(phase, step, idle).values())

    def report(self, number: int, now: float, idle: float, *, waits: bool, phase: str = "forward") -> None:
        self.say(number, now, kind="report", waits=waits, stacks="s", **heartbeat(phase, 5, idle).values())

    def fail(self, number: int, now: float, code: int, text: str, *, ready: bool = True) -> None:
        self.say(number, now, kind="failure", code=code, text=text, ready=ready)

    def die(self, number: int, now: float) -> None:
        self.ends[number].close()
        self.coordinator.receive(self.near[number], now)

    def received(self, number: int) -> list[str]:
        """The kinds of the messages that a rank was sent since the last call."""
        far = Connection(self.ends[number])
        kinds = [message.kind for message in far.receive()]
        self.ends[number].setblocking(True)
        return kinds


def heartbeat(phase: str, step: int, idle: float = 0.0, *, starting: bool = False) -> Heartbeat:
    return Heartbeat(phase, step, 10 * step, idle, starting)


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_only_ranks_that_know_the_token_are_members(rig: Rig) -> None:
    assert [member.connection is not None for member in rig.coordinator.members] == [False, True, True]
    for number, hello in enumerate(
        [
            {"kind": "hello", "token": "b" * 32, "rank": 2},
            {"kind": "hello", "token": TOKEN, "rank": 1},
            {"kind": "hello", "token": TOKEN, "rank": 0},
            {"kind": "hello", "token": TOKEN, "rank": 3},
            {"kind": "hello", "rank": 2},
            {"kind": "end", "token": TOKEN, "rank": 2},
            {"kind": "hello", "token": TOKEN, "rank": 2, "more": "x" * 256},
        ]
    ):
        rig.connect(100 + number, hello)
        assert rig.near[100 + number].is_lost
    assert rig.coordinator.tick(1.0) is None


def test_a_stranger_that_says_nothing_is_sent_away(rig: Rig) -> None:
    ours, theirs = socket.socketpair()
    silent = Connection(ours)
    assert rig.coordinator.peers.accept(silent, 0.0)
    rig.coordinator.tick(9.0)
    assert not silent.is_lost
    rig.coordinator.tick(11.0)
    assert silent.is_lost
    crowd = [socket.socketpair() for _ in range(80)]
    admitted = [rig.coordinator.peers.accept(Connection(ours), 0.0) for ours, _ in crowd]
    assert admitted[0] and not admitted[-1]
    for pair in (*crowd, (theirs,)):
        for end in pair:
            end.close()


def test_a_rank_without_progress_is_asked_for_its_stacks_and_named(rig: Rig) -> None:
    rig.beat(1, 30.0, idle=30)
    rig.beat(2, 30.0, "backward", idle=29)
    rig.coordinator.set_own_heartbeat(heartbeat("backward", 5, 29), 30.0)
    assert rig.coordinator.tick(30.0) is None
    rig.received(1)
    assert rig.coordinator.tick(41.0) is None and rig.coordinator.report_requested
    assert rig.received(1) == ["report"]
    rig.coordinator.set_own_report(True, "own")
    rig.report(1, 41.1, 41, waits=False)
    rig.report(2, 41.1, 40, waits=True, phase="backward")
    verdict = rig.coordinator.tick(41.2)
    assert verdict is not None and (verdict.code, verdict.rank, verdict.silent) == (ExitCode.HANG, 1, ())
    rig.coordinator.peers.send(end_message(verdict))
    assert rig.received(2) == ["report", "end"]


def test_a_rank_that_does_not_answer_is_named_and_to_be_killed(rig: Rig) -> None:
    rig.coordinator.set_own_heartbeat(heartbeat("forward", 5, 40), 40.0)
    rig.beat(1, 40.0, idle=40)
    assert rig.coordinator.tick(41.0) is None
    rig.coordinator.set_own_report(True, "own")
    rig.report(1, 41.1, 41, waits=True)
    assert rig.coordinator.tick(42.0) is None
    verdict = rig.coordinator.tick(41.0 + LIMITS.answer_seconds)
    assert verdict is not None and (verdict.code, verdict.rank, verdict.silent) == (ExitCode.HANG, 2, (2,))


def test_ranks_that_wait_for_one_that_works_are_left_alone(rig: Rig) -> None:
    rig.beat(1, 40.0, "save", idle=40)
    rig.beat(2, 40.0, "save")
    rig.coordinator.set_own_heartbeat(heartbeat("save", 5, 40), 40.0)
    assert rig.coordinator.tick(41.0) is None
    for number, (idle, waits) in ((1, (41, True)), (2, (0.2, False))):
        rig.report(number, 41.1, idle, waits=waits, phase="save")
    rig.coordinator.set_own_report(True, "own")
    assert rig.coordinator.tick(41.2) is None
    rig.received(1)
    assert rig.coordinator.tick(41.3) is None and rig.received(1) == []  # not again at once
    assert rig.coordinator.tick(41.2 + LIMITS.beat_seconds) is None and rig.received(1) == ["report"]


def test_start_up_may_take_longer_until_one_rank_has_finished_a_step() -> None:
    rig = Rig()
    for number in (1, 2):
        rig.say(number, 70.0, kind="beat", **heartbeat("init", 0, 70.0, starting=True).values())
    rig.coordinator.set_own_heartbeat(heartbeat("forward", 1, 70.0, starting=True), 70.0)
    assert rig.coordinator.tick(99.0) is None and not rig.coordinator.is_busy
    assert rig.coordinator.tick(101.0) is None and rig.coordinator.is_busy
    rig = Rig()
    rig.say(1, 0.0, kind="beat", **heartbeat("init", 0, starting=True).values())
    assert rig.coordinator.tick(41.0) is None and rig.coordinator.is_busy


def test_a_rank_that_is_stopped_in_start_up_is_found_as_early_as_later() -> None:
    rig = Rig()
    for number, now in ((1, 39.0), (2, 0.0)):
        rig.say(number, now, kind="beat", **heartbeat("init", 0, now, starting=True).values())
    rig.coordinator.set_own_heartbeat(heartbeat("init", 0, 39.0, starting=True), 39.0)
    assert rig.coordinator.tick(39.5) is None and not rig.coordinator.is_busy
    assert rig.coordinator.tick(40.5) is None and rig.coordinator.is_busy
    rig.report(1, 40.6, 40.6, waits=True, phase="init")
    rig.coordinator.set_own_report(True, "s")
    verdict = rig.coordinator.tick(40.5 + LIMITS.answer_seconds)
    assert verdict is not None and (verdict.code, verdict.rank, verdict.silent) == (ExitCode.HANG, 2, (2,))
    assert "has not replied for 46 s: it is stopped" in verdict.text


def test_without_a_limit_no_rank_counts_as_hanging_but_deaths_are_noticed() -> None:
    rig = Rig(limits=WatchLimits(0, 600))
    assert rig.coordinator.tick(10_000.0) is None and not rig.coordinator.is_busy
    rig.die(2, 10_000.0)
    rig.beat(1, 10_000.0)
    rig.coordinator.set_own_failure(Failure(ExitCode.REQUEUE, "lost", True), 10_000.1)
    verdict = rig.coordinator.tick(10_000.2)
    assert verdict is not None and (verdict.code, verdict.rank) == (ExitCode.REQUEUE, 2)
    assert "ended without a message" in verdict.text


def test_time_in_which_the_whole_job_was_suspended_does_not_count(rig: Rig) -> None:
    rig.coordinator.discount(500.0)
    assert rig.coordinator.tick(539.0) is None and not rig.coordinator.is_busy


def test_a_rank_at_its_planned_end_is_not_missed(rig: Rig) -> None:
    rig.say(1, 1.0, kind="bye")
    rig.die(1, 1.1)
    rig.beat(2, 39.0)
    rig.coordinator.set_own_heartbeat(heartbeat("end", 5), 1.0)
    assert rig.coordinator.tick(60.0) is None and not rig.coordinator.is_busy


class TestErrors:
    """Which of several errors is shown."""

    def test_the_first_error_counts(self, rig: Rig) -> None:
        rig.fail(2, 1.0, 65, "bad data")
        rig.fail(1, 1.1, 65, "another")
        rig.coordinator.set_own_failure(Failure(65, "own", True), 1.2)
        assert rig.coordinator.tick(1.3) == RunEnd(65, 2, "bad data")

    def test_an_error_of_several_ranks_is_shown_once(self) -> None:
        rig = Rig(size=6)
        for rank, text in ((4, "disk full"), (1, "rank 4: disk full"), (2, "other"), (3, "disk full")):
            rig.fail(rank, 1.0 + rank / 100 if rank != 4 else 1.0, 74, text)
        rig.coordinator.set_own_failure(Failure(74, "disk full", True), 1.2)
        rig.beat(5, 1.2)
        verdict = rig.coordinator.tick(1.3)
        assert verdict == RunEnd(74, 4, "disk full\nRanks 0, 3 to 4 ended with this error.")

    def test_the_first_rank_has_time_to_close_its_files(self, rig: Rig) -> None:
        rig.fail(2, 1.0, 65, "bad data")
        assert rig.coordinator.tick(1.1) is None
        rig.coordinator.set_own_failure(Failure(ExitCode.REQUEUE, "lost", False), 1.2)
        assert rig.coordinator.tick(1.3) is None
        rig.coordinator.set_own_failure(Failure(ExitCode.REQUEUE, "", True), 1.4)
        rig.beat(1, 1.4)
        verdict = rig.coordinator.tick(1.5)
        assert verdict is not None and verdict.text == "bad data"

    def test_a_rank_that_is_stopped_meanwhile_is_to_be_killed(self, rig: Rig) -> None:
        rig.fail(2, 1.0, 65, "bad data")
        assert "ping" in rig.received(1)
        verdict = rig.coordinator.tick(1.0 + WIND_DOWN_SECONDS)
        assert verdict is not None and verdict.silent == (1,)

    def test_a_save_that_is_being_written_is_finished_where_all_ranks_failed_alike(self, rig: Rig) -> None:
        for number in (1, 2):
            rig.fail(number, 1.0, 77, "NaN", ready=False)
        rig.coordinator.set_own_failure(Failure(77, "NaN", True), 1.0)
        assert rig.coordinator.tick(20.0) is None
        for number in (1, 2):
            rig.fail(number, 20.0, 77, "", ready=True)
        assert rig.coordinator.tick(20.1) == RunEnd(77, 0, "NaN\nAll 3 ranks ended with this error.")

    def test_a_lost_rank_is_the_cause_of_what_others_say_of_it(self, rig: Rig) -> None:
        rig.fail(1, 1.0, ExitCode.REQUEUE, "another rank ended")
        rig.coordinator.set_own_failure(Failure(ExitCode.REQUEUE, "another rank ended", True), 1.0)
        assert rig.coordinator.tick(1.1) is None
        rig.die(2, 1.2)
        verdict = rig.coordinator.tick(1.3)
        assert verdict is not None and verdict.rank == 2 and "ended without a message" in verdict.text

    def test_a_rank_that_hangs_is_the_cause_of_a_collective_that_timed_out(self, rig: Rig) -> None:
        rig.coordinator.set_own_failure(Failure(ExitCode.REQUEUE, "timed out", True), 30.0)
        rig.fail(1, 30.0, ExitCode.REQUEUE, "timed out")
        assert rig.coordinator.tick(30.0 + WIND_DOWN_SECONDS) is None
        verdict = rig.coordinator.tick(30.0 + WIND_DOWN_SECONDS + LIMITS.answer_seconds)
        assert verdict is not None and (verdict.code, verdict.rank, verdict.silent) == (ExitCode.HANG, 2, (2,))

    def test_if_no_rank_hangs_the_text_of_the_collective_is_shown(self, rig: Rig) -> None:
        rig.coordinator.set_own_failure(Failure(ExitCode.REQUEUE, "timed out", True), 30.0)
        rig.fail(1, 30.0, ExitCode.REQUEUE, "timed out")
        assert rig.coordinator.tick(30.0 + WIND_DOWN_SECONDS) is None
        rig.report(2, 32.5, 0.1, waits=False)
        assert rig.coordinator.tick(32.6) == RunEnd(ExitCode.REQUEUE, 0, "timed out")


class TestSecondHub:
    """The coordinator on rank 1, which acts only in the place of the first."""

    def test_it_leaves_everything_to_a_first_hub_that_lives(self) -> None:
        rig = Rig(rank=1, first=0)
        rig.beat(0, 41.0)
        assert rig.coordinator.tick(45.0) is None and not rig.coordinator.is_busy
        rig.fail(2, 45.0, 65, "bad data")
        rig.beat(0, 45.1)
        assert rig.coordinator.tick(60.0) is None

    def test_it_acts_if_the_first_does_not(self) -> None:
        rig = Rig(rank=1, first=0)
        rig.fail(2, 1.0, 65, "bad data")
        assert rig.coordinator.tick(1.1) is None
        verdict = rig.coordinator.tick(1.1 + WIND_DOWN_SECONDS)
        assert verdict is not None and verdict.text == "bad data" and verdict.silent == (0,)

    def test_it_acts_if_the_first_has_died(self) -> None:
        rig = Rig(rank=1, first=0)
        rig.die(0, 1.0)
        assert rig.coordinator.tick(1.1) is None  # does rank 2 answer?
        rig.beat(2, 1.2)
        verdict = rig.coordinator.tick(1.3)
        assert verdict is not None and (verdict.code, verdict.rank) == (ExitCode.REQUEUE, 0)
        assert verdict.silent == ()

    def test_it_does_not_wait_long_for_one_that_is_stopped(self) -> None:
        rig = Rig(rank=1, first=0)
        rig.die(0, 1.0)
        verdict = rig.coordinator.tick(1.0 + PING_SECONDS)
        assert verdict is not None and verdict.silent == (2,)

    def test_it_acts_if_the_first_does_not_answer(self) -> None:
        rig = Rig(rank=1, first=0)
        rig.beat(2, 41.0, idle=41)
        rig.coordinator.set_own_heartbeat(heartbeat("forward", 5, 41), 41.0)
        assert rig.coordinator.tick(41.0) is None and rig.coordinator.report_requested
        rig.coordinator.set_own_report(True, "own")
        rig.report(2, 41.0, 41, waits=True)
        verdict = rig.coordinator.tick(41.0 + LIMITS.answer_seconds)
        assert verdict is not None and (verdict.code, verdict.rank, verdict.silent) == (ExitCode.HANG, 0, (0,))


def test_a_question_for_life_is_answered_with_the_number_of_silent_ranks(rig: Rig) -> None:
    counts: list[int] = []
    rig.coordinator.ping_all(counts.append, 5.0)
    assert rig.received(1) == ["ping"]
    rig.beat(1, 5.1)
    rig.coordinator.tick(5.2)
    assert counts == []
    rig.coordinator.tick(7.0)
    assert counts == [1]
    rig.say(1, 8.0, kind="ask")
    rig.beat(1, 8.1)
    rig.beat(2, 8.1)
    rig.coordinator.tick(8.2)
    assert rig.received(1) == ["ping", "life"]


def damaged(drawn: random.Random) -> Iterator[dict[str, Any]]:
    """Messages of a member that lost its mind."""
    kinds = ["beat", "report", "failure", "bye", "ask", "hello", "end", "", 7]
    values = [0, -1, 2**80, 1.5, "x" * 20_000, None, True, [], {}, "beat", len(PHASES)]
    names = ["phase", "step", "events", "idle", "starting", "waits", "stacks", "code", "text", "ready", "silent"]
    for _ in range(400):
        yield {"kind": drawn.choice(kinds), **{name: drawn.choice(values) for name in names if drawn.random() < 0.8}}


def test_a_member_that_sends_nonsense_is_dropped_and_breaks_nothing() -> None:
    drawn = random.Random(3)
    rig = Rig(size=3)
    for message in damaged(drawn):
        if rig.near[1].is_lost:
            rig = Rig(size=3)
        rig.say(1, 1.0, **message)
        rig.coordinator.tick(1.0)
        rig.received(2)


def test_it_says_where_each_rank_was_at_its_last_message(rig: Rig) -> None:
    rig.beat(1, 3.0, phase="backward", step=6, idle=0.5)
    rig.die(2, 4.0)
    first, second, third = rig.coordinator.ranks(10.0)
    assert (first["rank"], first["state"], first["phase"], first["step"]) == (0, "here", "forward", 5)
    assert second == {
        "rank": 1, "state": "here", "phase": "backward", "step": 6, "idle_seconds": 0.5, "pace": [0, 0, 0],
            "heard_seconds": 7.0,
    }  # fmt: skip
    assert third["state"] == "lost"
    rig.say(1, 11.0, kind="bye")
    assert rig.coordinator.ranks(12.0)[1]["state"] == "left"
