"""The thread of a rank that sends its heartbeats and receives the order to end the run."""

from __future__ import annotations

import contextlib
import dataclasses
import selectors
import socket
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from megatron import log
from megatron.errors import ExitCode
from megatron.parallel.watch.coordinator import Coordinator, Failure, end_message
from megatron.parallel.watch.coordinator_link import Link
from megatron.parallel.watch.limits import ALONE_SECONDS, PING_SECONDS, WIND_DOWN_SECONDS, WatchLimits
from megatron.parallel.watch.opening import CoordinatorAddress
from megatron.parallel.watch.peers import Peers, relayed_message
from megatron.parallel.watch.position import END, Heartbeat, Position
from megatron.parallel.watch.stacks import read_stacks
from megatron.parallel.watch.verdict import RunEnd
from megatron.parallel.watch.wire import TEXT_CHARACTERS, Connection

_BUSY_SECONDS = 0.1
_FLUSH_SECONDS = 1.0
_CONNECT_SECONDS = 2.0
_ALL_CHARACTERS = 2**23  # of the stacks of all ranks
_LEAST_CHARACTERS = 1024


class WatchedRank(Protocol):
    """The rank that a channel runs on; all methods are called from the channel's thread."""

    def position(self) -> Position:
        """The position of the main thread."""

    def is_starting(self) -> bool:
        """True until the first step is finished."""

    def show(self, verdict: RunEnd) -> None:
        """Shows the user why the run ends; called only on the rank that decided."""

    def end(self, verdict: RunEnd) -> None:
        """Ends this rank."""


class Channel:
    """A rank's thread for the monitoring of a run.

    Args:
        links: to the coordinators on other ranks, the first coordinator first.
        coordinator: of this rank, if it has one.
        listener: the socket that accepts other ranks' connections, if any connect.
        size: number of ranks.
        relayed: the ranks whose messages this one relays, if it has no coordinator.
        coordinators: where to connect if the rank that relays this one's messages is lost; empty without such a rank.
    """

    def __init__(
        self,
        watched: WatchedRank,
        limits: WatchLimits,
        links: Sequence[Link],
        coordinator: Coordinator | None,
        listener: socket.socket | None,
        rank: int,
        size: int,
        relayed: Peers | None = None,
        coordinators: Sequence[CoordinatorAddress] = (),
    ) -> None:
        self._watched = watched
        self._limits = limits
        self._links = list(links)
        self._coordinator = coordinator
        self._peers = relayed if coordinator is None else coordinator.peers
        self._coordinators = tuple(coordinators)
        self._is_relayed = bool(coordinators)
        self._listener = listener
        self._rank = rank
        self._size = size
        self._failure: Failure | None = None
        self._reported: Failure | None = None
        self._requests: list[Callable[[int], None]] = []
        self._is_leaving = False
        self._seen: Position | None = None
        self._idle_from = 0.0
        self._last_nap = (0.0, 0.0)
        self._beat_at = 0.0
        self._look_at = 0.0
        self._blocked: set[Connection] = set()
        self._writing: set[Connection] = set()
        self._selector = selectors.DefaultSelector()
        self._waker, self._woken = socket.socketpair()
        for end in (self._waker, self._woken):
            end.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._selector.register(self._woken, selectors.EVENT_READ)
        if self._listener is not None:
            self._selector.register(self._listener, selectors.EVENT_READ)
        for link in self._links:
            link.connection.blocked = self._blocked
            self._selector.register(link.connection, selectors.EVENT_READ, link)
        self._thread.start()

    def fail(self, failure: Failure) -> bool:
        """Reports this rank's error; later calls only change whether it is ready.

        Returns:
            False if the error reached no coordinator.
        """
        if not self.is_alive or self._thread is threading.current_thread():
            return False
        if self._coordinator is None and not any(link.is_open for link in self._links):
            return False
        self._failure = dataclasses.replace(self._failure or failure, is_ready=failure.is_ready)
        self._wake()
        until = time.monotonic() + _FLUSH_SECONDS
        while self._reported != self._failure and time.monotonic() < until:
            time.sleep(0.005)
        return self._reported == self._failure

    @property
    def reaches_first_coordinator(self) -> bool:
        """True if the first coordinator is on another rank and reachable, so that the run does not need this rank."""
        return any((link.coordinator == 0 or self._is_relayed) and link.is_open for link in self._links)

    def ranks(self) -> list[dict[str, Any]]:
        """`Coordinator.ranks`; empty if this rank has no coordinator. Any thread may call it."""
        return [] if self._coordinator is None else self._coordinator.ranks(time.monotonic())

    def leave(self) -> None:
        """Announces a regular exit and waits for the thread."""
        self._is_leaving = True
        self._wake()
        if self._thread is not threading.current_thread():
            self._thread.join(2 * _FLUSH_SECONDS)

    def count_silent(self) -> int | None:
        """Returns the number of ranks that do not reply to a ping; None if no coordinator replies."""
        counts: list[int] = []
        is_answered = threading.Event()

        def answer(count: int) -> None:
            counts.append(count)
            is_answered.set()

        self._requests.append(answer)
        self._wake()
        is_answered.wait(PING_SECONDS + 0.5)
        return counts[0] if counts else None

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            self._waker.send(b"w")

    def _run(self) -> None:
        try:
            self._watch()
        except Exception:  # whatever it is: training must not end because it is watched
            log.warning(f"this rank is no longer watched:\n{traceback.format_exc()}")
            self._announce_exit(None)
        finally:
            self._close()

    def _watch(self) -> None:
        while True:
            began_at = time.monotonic()
            self._discount_suspension(began_at, self._wait(began_at))
            now = time.monotonic()
            verdict = self._end_ordered()
            if verdict is not None:
                self._flush()  # the order to end has been relayed
                self._watched.end(verdict)
                return
            self._reach_coordinators(now)
            if self._is_leaving:
                self._announce_exit(self._heartbeat(now))
                return
            self._report(self._heartbeat(now), now)
            verdict = self._decide(now)
            if verdict is not None:
                self._watched.show(verdict)
                if self._peers is not None:
                    self._peers.send(end_message(verdict))
                    self._flush()
                self._watched.end(verdict)
                return

    def _wait(self, now: float) -> float:
        """Reads messages, waiting until something is due; returns the longest time it had to wait."""
        limit_seconds = _BUSY_SECONDS if self._is_busy() else max(0.0, self._beat_at - now)
        self._select_writers()
        ready = self._selector.select(limit_seconds)
        received_at = time.monotonic()
        # Links first: an order to end takes precedence over connections that closed because of it.
        for key, _ in sorted(ready, key=lambda entry: not isinstance(entry[0].data, Link)):
            self._serve(key, received_at)
        return limit_seconds

    def _is_busy(self) -> bool:
        """True if something is due within seconds that no message would announce."""
        if self._reported is not None or any(link.lost_at is not None for link in self._links):
            return True
        return self._coordinator is not None and self._coordinator.is_busy

    def _serve(self, key: selectors.SelectorKey, now: float) -> None:
        if key.fileobj is self._woken:
            with contextlib.suppress(BlockingIOError):
                self._woken.recv(4096)
        elif key.fileobj is self._listener:
            self._accept(now)
        elif isinstance(key.data, Link):
            key.data.connection.flush()
            for message in key.data.receive(now, self._size):
                if self._peers is not None:
                    rank = message.whole("to", self._size - 1) if message.has("to") else None
                    self._peers.relay_down(message, rank)
            if not key.data.is_open:
                self._selector.unregister(key.fileobj)
        elif isinstance(key.data, Connection) and self._peers is not None:
            key.data.flush()
            self._receive(key.data, now)
            if key.data.is_lost:
                self._selector.unregister(key.fileobj)

    def _receive(self, connection: Connection, now: float) -> None:
        """Reads the messages of a rank, for this rank's coordinator, or to be relayed to the coordinators of others."""
        if self._peers is None:
            return
        is_for_all = self._peers.is_relayed(connection)
        received = (
            self._peers.receive_all(connection)
            if self._coordinator is None
            else self._coordinator.receive(connection, now)
        )
        for rank, message in received if is_for_all or self._peers.is_relayed(connection) else ():
            for link in self._links:
                if link.is_open:
                    link.connection.send(relayed_message(rank, message))

    def _reach_coordinators(self, now: float) -> None:
        """Connects to the coordinators directly if the rank that relays this one's messages is lost or silent."""
        if not self._coordinators:
            return
        link, beat_seconds = self._links[0], self._limits.beat_seconds
        is_lost = link.lost_at is not None and not link.has_left
        has_left = link.has_left and now - link.received_at > beat_seconds and self._watched.position().phase != END
        limit_seconds = max(self._limits.hang_seconds / 2, 1.5 * beat_seconds)
        is_silent = self._limits.hang_seconds > 0 and now - link.received_at > limit_seconds
        if not (is_lost or has_left or is_silent):
            return
        addresses, self._coordinators = self._coordinators, ()
        for address in addresses:
            with contextlib.suppress(OSError):
                connected = socket.create_connection((address.address, address.port), timeout=_CONNECT_SECONDS)
                opened = Link.open(connected, address, self._rank, now)
                opened.heartbeat_requested = True
                opened.connection.blocked = self._blocked
                self._selector.register(opened.connection, selectors.EVENT_READ, opened)
                self._links.append(opened)
        self._reported = None  # report the error again, to the coordinators

    def _accept(self, now: float) -> None:
        if self._listener is None or self._peers is None:
            return
        with contextlib.suppress(OSError):
            while True:
                connection = Connection(self._listener.accept()[0])
                connection.blocked = self._blocked
                if self._peers.accept(connection, now):
                    self._selector.register(connection, selectors.EVENT_READ, connection)

    def _select_writers(self) -> None:
        """Selects for writing the connections with unsent data."""
        for connection in self._blocked ^ self._writing:
            if connection.is_lost:
                continue
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection in self._blocked else 0)
            self._selector.modify(connection, events, self._selector.get_key(connection).data)
        self._writing = set(self._blocked)

    def _discount_suspension(self, began_at: float, limit_seconds: float) -> None:
        """Excludes a suspension of the whole process from all measurements."""
        now = time.monotonic()
        late_seconds = now - began_at - limit_seconds
        if late_seconds < self._limits.nap_seconds:
            return
        self._idle_from, self._last_nap = self._idle_from + late_seconds, (late_seconds, now)
        for link in self._links:
            link.received_at += late_seconds
        if self._coordinator is not None:
            self._coordinator.discount(late_seconds)

    def _heartbeat(self, now: float) -> Heartbeat:
        position = self._watched.position()
        if position is not self._seen:
            nap_seconds, woken_at = self._last_nap
            began_at = position.at_seconds
            self._seen = position
            self._idle_from = min(woken_at, began_at + nap_seconds) if began_at < woken_at else began_at
        idle_seconds = max(0.0, now - self._idle_from)
        is_starting = self._watched.is_starting()
        return Heartbeat(position.phase, position.step, position.events, idle_seconds, is_starting, position.pace)

    def _report(self, heartbeat: Heartbeat, now: float) -> None:
        is_due = now >= self._beat_at
        stacks, waits = "", False
        if any(link.report_requested for link in self._links) or (
            self._coordinator is not None and self._coordinator.report_requested
        ):
            stacks, waits = read_stacks(min(TEXT_CHARACTERS, max(_LEAST_CHARACTERS, _ALL_CHARACTERS // self._size)))
        for link in self._links:
            if not link.is_open:
                continue
            if link.report_requested:
                link.send_report(heartbeat, waits, stacks)
            elif is_due or link.heartbeat_requested:
                link.send_heartbeat(heartbeat)
        if self._coordinator is not None:
            self._coordinator.set_own_heartbeat(heartbeat, now)
            if self._coordinator.report_requested and stacks:
                self._coordinator.set_own_report(waits, stacks)
        if is_due and self._peers is not None:
            self._peers.close_unknown(now)
            self._peers.send({"kind": "beat"})
        if is_due:
            self._beat_at = now + self._limits.beat_seconds
        self._forward_requests(now)
        self._send_failure(now)

    def _forward_requests(self, now: float) -> None:
        while self._requests:
            answer = self._requests.pop()
            link = next((link for link in self._links if link.is_open), None)
            if self._coordinator is not None:
                self._coordinator.ping_all(answer, now)
            elif link is not None:
                link.ping_all(answer)

    def _send_failure(self, now: float) -> None:
        failure = self._failure
        if failure is None or self._reported == failure:
            return
        for link in self._links:
            if link.is_open:
                link.send_failure(failure)
        if self._coordinator is not None:
            self._coordinator.set_own_failure(failure, now)
        self._reported = failure

    def _end_ordered(self) -> RunEnd | None:
        return next((link.end for link in self._links if link.end is not None), None)

    def _decide(self, now: float) -> RunEnd | None:
        """Returns the end of the run, if this rank has to decide it now."""
        if self._coordinator is not None:
            if now < self._look_at and not self._coordinator.is_urgent:
                return None
            self._look_at = now + (_BUSY_SECONDS if self._coordinator.is_busy else 1.0)
            return self._coordinator.tick(now)
        lost = [link for link in self._links if link.lost_at is not None and not link.has_left]
        there = [link for link in self._links if link.is_open]
        numbers = " and ".join(str(link.coordinator) for link in self._links)
        again = "Saved checkpoints are intact: run the same command again."
        if lost and not there and now - max(link.lost_at or 0.0 for link in lost) > WIND_DOWN_SECONDS:
            text = f"ranks {numbers} ended without a message, and no other rank coordinates the run. {again}"
            return RunEnd(ExitCode.REQUEUE, self._rank, text)
        limit = self._limits.hang_seconds
        silent_seconds = limit + self._limits.answer_seconds + ALONE_SECONDS
        if limit and there and all(now - link.received_at > silent_seconds for link in there):
            text = f"ranks {numbers} have sent nothing for {silent_seconds:.0f} s: stopped, or unreachable. {again}"
            return RunEnd(ExitCode.HANG, self._rank, text, tuple(link.coordinator for link in there))
        return None

    def _announce_exit(self, last: Heartbeat | None) -> None:
        """Announces a regular exit, with the last heartbeat."""
        for link in self._links:
            if link.is_open:
                if last is not None:
                    link.send_heartbeat(last)
                link.send("bye")
        if self._coordinator is not None:
            self._coordinator.announce_exit()
        elif self._peers is not None:
            self._peers.send({"kind": "bye"})
        self._flush()

    def _flush(self) -> None:
        """Sends what is left, within the time allowed at the end of a run."""
        until = time.monotonic() + _FLUSH_SECONDS
        while self._blocked and time.monotonic() < until:
            for connection in list(self._blocked):
                connection.flush()
            time.sleep(0.01)

    def _close(self) -> None:
        for key in list(self._selector.get_map().values()):
            if isinstance(key.data, Connection):
                key.data.close()
        for link in self._links:
            link.connection.close()
        if self._listener is not None:
            self._listener.close()
        self._selector.close()
        self._waker.close()
        self._woken.close()
