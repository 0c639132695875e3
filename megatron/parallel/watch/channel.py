"""The thread of a rank that tells the others where it is and learns from them when the run must end."""

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
from megatron.parallel.watch.hub_link import Link
from megatron.parallel.watch.hub_state import Failure, Hub, end_message
from megatron.parallel.watch.limits import ALONE_SECONDS, PING_SECONDS, WIND_DOWN_SECONDS, WatchLimits
from megatron.parallel.watch.opening import HubAddress
from megatron.parallel.watch.peers import Peers, passed_on
from megatron.parallel.watch.position import END, Heartbeat, Position
from megatron.parallel.watch.stacks import read_stacks
from megatron.parallel.watch.verdict import RunEnd
from megatron.parallel.watch.wire import TEXT_CHARACTERS, Connection

_BUSY_SECONDS = 0.1
_FLUSH_SECONDS = 1.0
_CONNECT_SECONDS = 2.0
_ALL_CHARACTERS = 2**23  # of the stacks of all ranks
_LEAST_CHARACTERS = 1024


class Watched(Protocol):
    """What the thread asks of the rank that it runs on; all of it is called from the thread."""

    def position(self) -> Position:
        """Where the main thread is."""

    def is_starting(self) -> bool:
        """Whether the first step is not finished."""

    def speak(self, verdict: RunEnd) -> None:
        """Shows the user why the run ends; only on the rank that decided it."""

    def end(self, verdict: RunEnd) -> None:
        """Ends this rank."""


class Channel:
    """A rank's part in the watch over a run.

    Args:
        links: to the hubs on other ranks, the first hub first.
        hub: the hub on this rank, if it has one, and the socket on which the other ranks connect to it.
        size: ranks of the run.
        relayed: the ranks for which this one passes messages on, where it has no hub.
        hubs: where to connect if the rank that passes this one's messages on is gone; none if there is no such rank.
    """

    def __init__(
        self,
        watched: Watched,
        limits: WatchLimits,
        links: Sequence[Link],
        hub: Hub | None,
        listener: socket.socket | None,
        rank: int,
        size: int,
        relayed: Peers | None = None,
        hubs: Sequence[HubAddress] = (),
    ) -> None:
        self._watched = watched
        self._limits = limits
        self._links = list(links)
        self._hub = hub
        self._peers = relayed if hub is None else hub.peers
        self._hubs = tuple(hubs)
        self._is_relayed = bool(hubs)
        self._listener = listener
        self._rank = rank
        self._size = size
        self._failure: Failure | None = None
        self._reported: Failure | None = None
        self._questions: list[Callable[[int], None]] = []
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
        """Reports this rank's error to the hubs; later calls only change whether it is ready. False if no hub knows."""
        if not self.is_alive or self._thread is threading.current_thread():
            return False
        if self._hub is None and not any(link.is_open for link in self._links):
            return False
        self._failure = dataclasses.replace(self._failure or failure, is_ready=failure.is_ready)
        self._wake()
        until = time.monotonic() + _FLUSH_SECONDS
        while self._reported != self._failure and time.monotonic() < until:
            time.sleep(0.005)
        return self._reported == self._failure

    @property
    def has_first_hub(self) -> bool:
        """Whether the first hub is on another rank and can be reached, so that the run does not need this rank."""
        return any((link.hub == 0 or self._is_relayed) and link.is_open for link in self._links)

    def ranks(self) -> list[dict[str, Any]]:
        """What the hub on this rank knows of each rank; nothing without one. Any thread may call it."""
        return [] if self._hub is None else self._hub.ranks(time.monotonic())

    def leave(self) -> None:
        """Says that this rank ends as planned, and waits for the thread."""
        self._is_leaving = True
        self._wake()
        if self._thread is not threading.current_thread():
            self._thread.join(2 * _FLUSH_SECONDS)

    def count_silent(self) -> int | None:
        """How many ranks give no sign of life when they are asked for one; None if no hub answers."""
        counts: list[int] = []
        is_answered = threading.Event()

        def answer(count: int) -> None:
            counts.append(count)
            is_answered.set()

        self._questions.append(answer)
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
            self._say_goodbye(None)
        finally:
            self._close()

    def _watch(self) -> None:
        while True:
            began_at = time.monotonic()
            self._sleep_out(began_at, self._wait(began_at))
            now = time.monotonic()
            verdict = self._end_ordered()
            if verdict is not None:
                self._flush()  # those for whom this rank passes messages on have been told
                self._watched.end(verdict)
                return
            self._reach_hubs(now)
            if self._is_leaving:
                self._say_goodbye(self._heartbeat(now))
                return
            self._tell(self._heartbeat(now), now)
            verdict = self._decide(now)
            if verdict is not None:
                self._watched.speak(verdict)
                if self._peers is not None:
                    self._peers.send(end_message(verdict))
                    self._flush()
                self._watched.end(verdict)
                return

    def _wait(self, now: float) -> float:
        """Waits for messages or for what is due next, and reads them; returns how long it was to wait at most."""
        limit_seconds = _BUSY_SECONDS if self._is_busy() else max(0.0, self._beat_at - now)
        self._select_writers()
        ready = self._selector.select(limit_seconds)
        heard_at = time.monotonic()
        # Links first: an order to end comes before the end of the connections of those who obeyed it.
        for key, _ in sorted(ready, key=lambda entry: not isinstance(entry[0].data, Link)):
            self._serve(key, heard_at)
        return limit_seconds

    def _is_busy(self) -> bool:
        """Whether something is due within seconds, without a message that would announce it."""
        if self._reported is not None or any(link.lost_at is not None for link in self._links):
            return True
        return self._hub is not None and self._hub.is_busy

    def _serve(self, key: selectors.SelectorKey, now: float) -> None:
        if key.fileobj is self._woken:
            with contextlib.suppress(BlockingIOError):
                self._woken.recv(4096)
        elif key.fileobj is self._listener:
            self._accept(now)
        elif isinstance(key.data, Link):
            key.data.connection.flush()
            for message in key.data.hear(now, self._size):
                if self._peers is not None:
                    rank = message.whole("to", self._size - 1) if message.has("to") else None
                    self._peers.pass_down(message, rank)
            if not key.data.is_open:
                self._selector.unregister(key.fileobj)
        elif isinstance(key.data, Connection) and self._peers is not None:
            key.data.flush()
            self._hear(key.data, now)
            if key.data.is_lost:
                self._selector.unregister(key.fileobj)

    def _hear(self, connection: Connection, now: float) -> None:
        """Reads what a rank sent, for the hub on this rank, and passes it on to the hubs on others if it must be."""
        if self._peers is None:
            return
        is_for_all = self._peers.passes_on(connection)
        heard = self._peers.hear_all(connection) if self._hub is None else self._hub.hear(connection, now)
        for rank, message in heard if is_for_all or self._peers.passes_on(connection) else ():
            for link in self._links:
                if link.is_open:
                    link.connection.send(passed_on(rank, message))

    def _reach_hubs(self, now: float) -> None:
        """Connects to the hubs themselves if the rank that passes on what this one sends is gone or does not answer."""
        if not self._hubs:
            return
        link, beat_seconds = self._links[0], self._limits.beat_seconds
        is_lost = link.lost_at is not None and not link.has_left
        has_left = link.has_left and now - link.heard_at > beat_seconds and self._watched.position().phase != END
        patience = max(self._limits.hang_seconds / 2, 1.5 * beat_seconds)
        is_silent = self._limits.hang_seconds > 0 and now - link.heard_at > patience
        if not (is_lost or has_left or is_silent):
            return
        addresses, self._hubs = self._hubs, ()
        for address in addresses:
            with contextlib.suppress(OSError):
                connected = socket.create_connection((address.address, address.port), timeout=_CONNECT_SECONDS)
                opened = Link.open(connected, address, self._rank, now)
                opened.wants_heartbeat = True
                opened.connection.blocked = self._blocked
                self._selector.register(opened.connection, selectors.EVENT_READ, opened)
                self._links.append(opened)
        self._reported = None  # they have not heard of it

    def _accept(self, now: float) -> None:
        if self._listener is None or self._peers is None:
            return
        with contextlib.suppress(OSError):
            while True:
                connection = Connection(self._listener.accept()[0])
                connection.blocked = self._blocked
                if self._peers.admit(connection, now):
                    self._selector.register(connection, selectors.EVENT_READ, connection)

    def _select_writers(self) -> None:
        """Waits for writing only where something is left to send."""
        for connection in self._blocked ^ self._writing:
            if connection.is_lost:
                continue
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection in self._blocked else 0)
            self._selector.modify(connection, events, self._selector.get_key(connection).data)
        self._writing = set(self._blocked)

    def _sleep_out(self, began_at: float, limit_seconds: float) -> None:
        """Leaves out of all counts a time in which the whole process was stopped, as a suspended job is."""
        now = time.monotonic()
        late_seconds = now - began_at - limit_seconds
        if late_seconds < self._limits.nap_seconds:
            return
        self._idle_from, self._last_nap = self._idle_from + late_seconds, (late_seconds, now)
        for link in self._links:
            link.heard_at += late_seconds
        if self._hub is not None:
            self._hub.sleep(late_seconds)

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

    def _tell(self, heartbeat: Heartbeat, now: float) -> None:
        is_due = now >= self._beat_at
        stacks, waits = "", False
        if any(link.wants_report for link in self._links) or (self._hub is not None and self._hub.wants_report):
            stacks, waits = read_stacks(min(TEXT_CHARACTERS, max(_LEAST_CHARACTERS, _ALL_CHARACTERS // self._size)))
        for link in self._links:
            if not link.is_open:
                continue
            if link.wants_report:
                link.tell_report(heartbeat, waits, stacks)
            elif is_due or link.wants_heartbeat:
                link.tell(heartbeat)
        if self._hub is not None:
            self._hub.note(heartbeat, now)
            if self._hub.wants_report and stacks:
                self._hub.note_report(waits, stacks)
        if is_due and self._peers is not None:
            self._peers.close_unknown(now)
            self._peers.send({"kind": "beat"})
        if is_due:
            self._beat_at = now + self._limits.beat_seconds
        self._ask(now)
        self._tell_failure(now)

    def _ask(self, now: float) -> None:
        while self._questions:
            answer = self._questions.pop()
            link = next((link for link in self._links if link.is_open), None)
            if self._hub is not None:
                self._hub.ask_for_life(answer, now)
            elif link is not None:
                link.ask_for_life(answer)

    def _tell_failure(self, now: float) -> None:
        failure = self._failure
        if failure is None or self._reported == failure:
            return
        for link in self._links:
            if link.is_open:
                link.tell_failure(failure)
        if self._hub is not None:
            self._hub.note_failure(failure, now)
        self._reported = failure

    def _end_ordered(self) -> RunEnd | None:
        return next((link.end for link in self._links if link.end is not None), None)

    def _decide(self, now: float) -> RunEnd | None:
        """Why the run ends, if this rank is the one that must say it."""
        if self._hub is not None:
            if now < self._look_at and not self._hub.is_urgent:
                return None
            self._look_at = now + (_BUSY_SECONDS if self._hub.is_busy else 1.0)
            return self._hub.tick(now)
        lost = [link for link in self._links if link.lost_at is not None and not link.has_left]
        there = [link for link in self._links if link.is_open]
        numbers = " and ".join(str(link.hub) for link in self._links)
        again = "Saved checkpoints are intact: run the same command again."
        if lost and not there and now - max(link.lost_at or 0.0 for link in lost) > WIND_DOWN_SECONDS:
            text = f"ranks {numbers} ended without a message, and nobody else speaks for the run. {again}"
            return RunEnd(ExitCode.REQUEUE, self._rank, text)
        limit = self._limits.hang_seconds
        patience = limit + self._limits.answer_seconds + ALONE_SECONDS
        if limit and there and all(now - link.heard_at > patience for link in there):
            text = f"ranks {numbers} have not answered for {patience:.0f} s: they are stopped, or cut off. {again}"
            return RunEnd(ExitCode.HANG, self._rank, text, tuple(link.hub for link in there))
        return None

    def _say_goodbye(self, last: Heartbeat | None) -> None:
        """Says that this rank ends as planned, and where it was last."""
        for link in self._links:
            if link.is_open:
                if last is not None:
                    link.tell(last)
                link.send("bye")
        if self._hub is not None:
            self._hub.say_goodbye()
        elif self._peers is not None:
            self._peers.send({"kind": "bye"})
        self._flush()

    def _flush(self) -> None:
        """Sends what is left, for as long as that may take at the end of a run."""
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
