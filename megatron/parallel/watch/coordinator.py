"""The coordinator of a run: collects the positions of all ranks and decides when and why the run ends.

Two ranks run one; the second acts only if the first exits or does not act. Pure state: time is an argument, and sockets
are read and written only when the thread calls.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron.errors import ExitCode
from megatron.parallel.processes import ProcessIdentity
from megatron.parallel.watch.limits import PING_SECONDS, WIND_DOWN_SECONDS, WatchLimits
from megatron.parallel.watch.peers import LOST, Peers
from megatron.parallel.watch.position import END, Heartbeat
from megatron.parallel.watch.verdict import RankAccount, RunEnd, find_culprit, hang_verdict, lost_verdict, rank_ranges
from megatron.parallel.watch.wire import MESSAGE_BYTES, Connection, MessageFields

_FROM_RANK = re.compile(r"\Arank (\d+): ")  # the prefix that `run_on_all` adds


@dataclass(frozen=True)
class Failure:
    """The error that made a rank exit.

    Attributes:
        is_ready: the rank has closed its files and may be terminated.
    """

    code: int
    text: str
    is_ready: bool = False

    def cause(self) -> str:
        """The text without the prefix that names a rank."""
        return _FROM_RANK.sub("", self.text)

    def source(self, rank: int) -> int:
        """The rank of the error's origin, if `rank` reported it."""
        named = _FROM_RANK.match(self.text)
        return rank if named is None else int(named[1])


@dataclass
class RankState:
    """A coordinator's view of a rank.

    Attributes:
        connection: None for the coordinator's own rank, and before a rank has connected.
        has_left: the rank announced a regular exit.
        lost_at: when its connection closed without such an announcement.
        report: whether it waits for other ranks, and its stacks; None until it has replied.
    """

    rank: int
    received_at: float
    heartbeat: Heartbeat = field(default_factory=Heartbeat)
    connection: Connection | None = None
    has_left: bool = False
    lost_at: float | None = None
    failure: Failure | None = None
    failed_at: float = 0.0
    report: tuple[bool, str] | None = None

    @property
    def is_present(self) -> bool:
        return not self.has_left and self.lost_at is None and self.failure is None


class Coordinator:
    """The state of a coordinator.

    Args:
        rank: the rank it runs on.
        first: the rank of the coordinator that acts before this one; None if this is the first.
        processes: the processes of all ranks.
    """

    def __init__(
        self,
        rank: int,
        first: int | None,
        processes: Sequence[ProcessIdentity],
        token: str,
        limits: WatchLimits,
        now: float,
    ) -> None:
        self.rank = rank
        self.members = [RankState(number, now) for number in range(len(processes))]
        self.is_urgent = False
        self._first = first
        self._processes = processes
        self.peers = Peers(token, len(processes), rank)
        self._limits = limits
        self._requested_at: float | None = None
        self._unreported: set[int] = set()
        self._look_at = now
        self._first_cause_at: float | None = None
        self._pinged_at: float | None = None
        self._requests: list[Callable[[int], None]] = []

    def receive(self, connection: Connection, now: float) -> list[tuple[int, MessageFields]]:
        """Returns the messages that have arrived; the caller drops the connection if it is lost afterwards."""
        received = self.peers.receive(connection)
        for rank, message in received:
            try:
                self._on_message(self.members[rank], connection, message, now)
            except ValueError:
                connection.is_lost = True
        if connection.is_lost:
            lost = self.peers.remove(connection)
            if lost is not None:
                self._on_lost(self.members[lost], now)
                received.append((lost, LOST))
        return received

    def set_own_heartbeat(self, heartbeat: Heartbeat, now: float) -> None:
        """Sets the position of the coordinator's own rank."""
        member = self.members[self.rank]
        member.heartbeat, member.received_at = heartbeat, now

    def set_own_report(self, waits: bool, stacks: str) -> None:
        self._on_report(self.members[self.rank], waits, stacks)

    def set_own_failure(self, failure: Failure, now: float) -> None:
        self._on_failure(self.members[self.rank], failure, now)

    def announce_exit(self) -> None:
        """Announces to all ranks the regular exit of the coordinator's own rank."""
        self.members[self.rank].has_left = True
        self._send({"kind": "bye"})

    def discount(self, seconds: float) -> None:
        """Excludes a suspension of this process from all measurements."""
        for member in self.members:
            member.received_at += seconds

    def ping_all(self, answer: Callable[[int], None], now: float) -> None:
        """Pings all ranks; `answer` is called with the number of ranks that did not reply."""
        self._requests.append(answer)
        if self._pinged_at is None:
            self._pinged_at = now
            self._send({"kind": "ping"})

    def ranks(self, now: float) -> list[dict[str, Any]]:
        """The position of each rank in its last message, for display; only reads, so any thread may call it."""
        return [
            {
                "rank": member.rank,
                "state": "here" if member.is_present else "left" if member.has_left else "lost",
                "phase": member.heartbeat.phase,
                "step": member.heartbeat.step,
                "idle_seconds": member.heartbeat.idle_seconds,
                "pace": list(member.heartbeat.pace),
                "heard_seconds": round(max(0.0, now - member.received_at), 3),
            }
            for member in self.members
        ]

    @property
    def is_busy(self) -> bool:
        """True while a reply or a deadline is due within seconds."""
        return self._requested_at is not None or bool(self._requests) or self._first_cause_at is not None

    @property
    def report_requested(self) -> bool:
        """True if the stacks of the coordinator's own rank are missing."""
        return self._requested_at is not None and self.rank in self._unreported

    def tick(self, now: float) -> RunEnd | None:
        """Checks all ranks; returns the end of the run if it must end."""
        self.is_urgent = False
        self.peers.close_unknown(now)
        self._complete_requests(now)
        if not self._acts(now):
            return None
        causes = [member for member in self.members if member.lost_at is not None or member.failure is not None]
        if causes:
            return self._judge_causes(causes, now)
        if self._requested_at is None:
            if now >= self._look_at and any(self._is_suspect(member, now) for member in self.members):
                self._request_stacks(now)
            return None
        return self._judge_hang(now, self._limit()) if self._has_all_reports(now) else None

    def _acts(self, now: float) -> bool:
        """True for the first coordinator, and for the second if the first is gone or does not act."""
        if self._first is None:
            return True
        first = self.members[self._first]
        if first.has_left or first.lost_at is not None:
            return True
        if self._first_cause_at is not None:  # all ranks were pinged then
            return first.received_at < self._first_cause_at and self._oldest_cause(now) > WIND_DOWN_SECONDS
        return self._is_silent(first, now)

    def _oldest_cause(self, now: float) -> float:
        """Seconds since the first error or loss of a rank."""
        return 0.0 if self._first_cause_at is None else now - self._first_cause_at

    def _limit(self) -> float:
        if not self._limits.hang_seconds:
            return 0.0
        # One rank that has finished a step shows that all have; the heartbeats of the others may be older.
        starting = all(member.heartbeat.is_starting for member in self.members if member.is_present)
        return self._limits.start_seconds if starting else self._limits.hang_seconds

    def _is_suspect(self, member: RankState, now: float) -> bool:
        limit = self._limit()
        if not limit or not member.is_present or member.heartbeat.phase == END:
            return False
        return self._is_silent(member, now) or member.heartbeat.idle_seconds + now - member.received_at >= limit

    def _is_silent(self, member: RankState, now: float) -> bool:
        # Heartbeats come from a thread of their own, so no work, not even a long start, explains their absence.
        limit = self._limits.hang_seconds
        return limit > 0 and now - member.received_at >= limit

    def _request_stacks(self, now: float) -> None:
        self._requested_at = now
        self._unreported = {member.rank for member in self.members if member.is_present}
        for member in self.members:
            member.report = None
        self._send({"kind": "report"})

    def _has_all_reports(self, now: float) -> bool:
        return not self._unreported or (
            self._requested_at is not None and now - self._requested_at >= self._limits.answer_seconds
        )

    def _judge_hang(self, now: float, limit: float) -> RunEnd | None:
        self._requested_at, self._look_at = None, now + max(self._limits.beat_seconds, limit / 10)
        watched = [member for member in self.members if member.is_present and member.heartbeat.phase != END]
        accounts = [self._account(member, now, limit) for member in watched]
        culprit = find_culprit(accounts, limit)
        return None if culprit is None else hang_verdict(culprit, accounts)

    def _account(self, member: RankState, now: float, limit: float) -> RankAccount:
        silent_seconds = now - member.received_at
        least_seconds = max(min(limit, self._limits.hang_seconds) / 2, self._limits.answer_seconds)
        is_silent = member.report is None and silent_seconds >= least_seconds
        waits, stacks = member.report or (False, "")
        process = self._processes[member.rank]
        return RankAccount(member.rank, process, member.heartbeat, silent_seconds if is_silent else None, waits, stacks)

    def _judge_causes(self, causes: Sequence[RankState], now: float) -> RunEnd | None:
        """Returns the first error or loss once all other ranks have exited or had time to.

        Errors that only report the loss of another rank come last; if there are no others, a rank that hangs may be
        their cause.
        """
        if self._requested_at is not None and self._has_all_reports(now):
            hang = self._judge_hang(now, max(self._limits.hang_seconds, 2 * self._limits.answer_seconds) / 2)
            return hang or self._verdict_on(self._earliest(causes))
        cause, waited_seconds = self._earliest(causes), self._oldest_cause(now)
        is_unclear = cause.failure is not None and cause.failure.code == ExitCode.REQUEUE
        present = any(member.is_present for member in self.members)
        # Only rank 0 has files of the run open, and it notices the exit of another rank when they communicate.
        if (present if is_unclear else self.members[0].is_present) and waited_seconds < WIND_DOWN_SECONDS:
            return None
        if waited_seconds < PING_SECONDS and self._silent_ranks():
            return None  # the reply to the ping may still arrive
        is_lost = any(member.lost_at is not None and member.failure is None for member in causes)
        if waited_seconds < (WIND_DOWN_SECONDS if is_lost else self._limits.closing_seconds) and any(
            member.failure is not None and not member.failure.is_ready and member.lost_at is None for member in causes
        ):
            return None
        if present and is_unclear:
            if self._requested_at is None:
                self._request_stacks(now)
            return None
        return self._verdict_on(cause)

    def _earliest(self, causes: Sequence[RankState]) -> RankState:
        def order(member: RankState) -> tuple[bool, float]:
            if member.failure is None:
                return False, member.lost_at or 0.0
            return member.failure.code == ExitCode.REQUEUE, member.failed_at

        return min(causes, key=order)

    def _verdict_on(self, cause: RankState) -> RunEnd:
        silent = self._silent_ranks()
        if cause.failure is not None:
            return RunEnd(
                cause.failure.code, cause.rank, cause.failure.text + self._affected_ranks(cause.failure), silent
            )
        others = [member.heartbeat for member in self.members if member is not cause]
        furthest = max(others, key=Heartbeat.progress, default=cause.heartbeat)
        verdict = lost_verdict(cause.rank, self._processes[cause.rank], furthest)
        return RunEnd(verdict.code, verdict.rank, verdict.text, silent)

    def _affected_ranks(self, failure: Failure) -> str:
        """A line that names the ranks with this error, if several have it and it is not the loss of another rank."""
        ranks = {
            member.failure.source(member.rank)
            for member in self.members
            if member.failure is not None and member.failure.cause() == failure.cause()
        }
        if len(ranks) < 2 or failure.code == ExitCode.REQUEUE:
            return ""
        who = f"All {len(ranks)} ranks" if len(ranks) == len(self.members) else f"Ranks {rank_ranges(sorted(ranks))}"
        return f"\n{who} ended with this error."

    def _silent_ranks(self) -> tuple[int, ...]:
        """The ranks that have sent no message since the first error or loss."""
        since = self._first_cause_at or 0.0
        return tuple(
            member.rank
            for member in self.members
            if member.is_present and member.rank != self.rank and member.received_at < since
        )

    def _on_message(self, member: RankState, connection: Connection, message: MessageFields, now: float) -> None:
        if member.rank == self.rank:
            raise ValueError("a coordinator receives no message from its own rank")
        kind = message.kind
        member.received_at = now
        if kind == "hello":
            member.connection = connection
        elif kind == "lost":
            self._on_lost(member, now)
        elif kind == "beat":
            member.heartbeat = Heartbeat.read(message)
        elif kind == "report":
            member.heartbeat = Heartbeat.read(message)
            self._on_report(member, message.flag("waits"), message.text("stacks"))
        elif kind == "failure":
            failure = Failure(message.whole("code", 255), message.text("text"), message.flag("ready"))
            self._on_failure(member, failure, now)
        elif kind == "bye":
            member.has_left = True
        elif kind == "ask":
            self.ping_all(lambda count: connection.send({"kind": "life", "silent": count, "to": member.rank}), now)
        else:
            raise ValueError(f"unknown kind of message: {kind}")

    def _on_report(self, member: RankState, waits: bool, stacks: str) -> None:
        member.report = (waits, stacks)
        self._unreported.discard(member.rank)
        self.is_urgent = self.is_urgent or not self._unreported

    def _on_failure(self, member: RankState, failure: Failure, now: float) -> None:
        if member.failure is None:
            member.failed_at = now
        member.failure = dataclasses.replace(member.failure or failure, is_ready=failure.is_ready)
        self._on_cause(now)

    def _on_lost(self, member: RankState, now: float) -> None:
        if not member.has_left and member.lost_at is None:
            member.lost_at = now
            self._on_cause(now)

    def _on_cause(self, now: float) -> None:
        self.is_urgent = True
        if self._first_cause_at is None:
            self._first_cause_at = now  # the run must end: find out which ranks still reply
            self.ping_all(lambda count: None, now)

    def _complete_requests(self, now: float) -> None:
        if self._pinged_at is None:
            return
        silent = [
            member
            for member in self.members
            if not member.has_left
            and member.rank != self.rank
            and (member.lost_at is not None or member.received_at < self._pinged_at)
        ]
        if silent and now - self._pinged_at < PING_SECONDS:
            return
        for answer in self._requests:
            answer(len(silent))
        self._requests, self._pinged_at = [], None

    def _send(self, message: dict[str, object]) -> None:
        self.peers.send(message)


def end_message(verdict: RunEnd) -> dict[str, object]:
    """The message that terminates a rank."""
    message = {"code": verdict.code, "rank": verdict.rank, "silent": list(verdict.silent)[:1024]}
    return {"kind": "end", **message, "text": verdict.text[: MESSAGE_BYTES // 8]}
