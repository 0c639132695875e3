"""Ranks that are connected for real: signs of life, planned ends, several machines, and what a rank decides alone."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from megatron.errors import ExitCode
from megatron.parallel.joining import open_mesh, rendezvous
from megatron.parallel.mesh import ParallelMesh
from megatron.parallel.watch import opening
from megatron.parallel.watch.channel import Channel
from megatron.parallel.watch.coordinator import Coordinator
from megatron.parallel.watch.coordinator_link import Link
from megatron.parallel.watch.limits import ALONE_SECONDS, WIND_DOWN_SECONDS, WatchLimits
from megatron.parallel.watch.opening import connect_ranks
from megatron.parallel.watch.position import first_position
from megatron.parallel.watch.stacks import main_stack, read_stacks
from megatron.parallel.watch.verdict import RunEnd
from megatron.parallel.watch.wire import Connection
from megatron.train.watchdog import Watch
from tests.helpers.layouts import Layout
from tests.helpers.ranks import run_ranks


class Rank:
    """What a channel asks of its rank; notes how it is ended."""

    def __init__(self) -> None:
        self.place = first_position()
        self.said: list[RunEnd] = []
        self.ended = threading.Event()

    def position(self) -> Any:
        return self.place

    def is_starting(self) -> bool:
        return False

    def show(self, verdict: RunEnd) -> None:
        self.said.append(verdict)

    def end(self, verdict: RunEnd) -> None:
        self.ended.set()


def refuse(*_: Any, **__: Any) -> None:
    raise OSError("no route to host")


def connect_three(rank: int) -> dict[str, Any]:
    """Connects three ranks as on one machine, on two, and where one cannot be reached."""
    mesh = open_mesh(Layout())
    found: dict[str, Any] = {}
    for name, differing in (("one", ()), ("two", (2,))):
        opening.network_namespace = lambda differing=differing: f"net {rank in differing}"  # type: ignore[misc]
        watch = Watch()
        watch.open(mesh, rendezvous(), WatchLimits(20, 40))
        assert watch._connected is not None
        found[name] = watch._connected.coordinators
        found[f"{name} answers"] = watch.peers_answer()
        dist.barrier()
        with watch:
            pass
        dist.barrier()
    if rank == 1:
        opening.socket = SimpleNamespace(**{**vars(socket), "create_connection": refuse})  # type: ignore[assignment]
    found["none"] = connect_ranks(mesh, rendezvous()) is None
    watch = Watch()
    watch.open(mesh, rendezvous(), WatchLimits(20, 40))
    found["unwatched"] = watch.peers_answer() and not watch.fail(1, "shown by the caller")
    return found


def test_ranks_connect_on_one_machine_and_on_several() -> None:
    for found in run_ranks(connect_three, 3):
        assert found["one"] == (0, 1) and found["two"] == (0, 2)
        assert found["one answers"] and found["two answers"]
        assert found["none"] and found["unwatched"]


def test_one_process_is_watched_without_a_socket() -> None:
    rank, limits = Rank(), WatchLimits(hang_seconds=1, start_seconds=1)
    meeting = connect_ranks(ParallelMesh.single(), ("nowhere.invalid", 1))
    assert meeting is not None and meeting.listener is None
    coordinator = Coordinator(0, None, meeting.processes, "", limits, time.monotonic())
    Channel(rank, limits, [], coordinator, None, 0, 1).start()
    assert rank.ended.wait(120)
    assert [(verdict.code, verdict.rank) for verdict in rank.said] == [(ExitCode.HANG, 0)]
    assert "in test_one_process_is_watched_without_a_socket" in rank.said[0].text


@pytest.fixture
def links() -> list[Link]:
    return [Link(Connection(socket.socketpair()[0]), coordinator, 0.0) for coordinator in (0, 1)]


def third_rank(links: list[Link]) -> Channel:
    return Channel(Rank(), WatchLimits(hang_seconds=40, start_seconds=100), links, None, None, 2, 3)


def test_a_rank_whose_hubs_have_died_speaks_for_itself(links: list[Link]) -> None:
    channel = third_rank(links)
    links[0].lost_at = 5.0
    assert channel._decide(20.0) is None
    links[1].lost_at = 20.0
    assert channel._decide(20.1) is None
    verdict = channel._decide(20.1 + WIND_DOWN_SECONDS)
    assert verdict is not None and (verdict.code, verdict.silent) == (ExitCode.REQUEUE, ())
    assert "ranks 0 and 1 ended without a message" in verdict.text


def test_a_rank_whose_hubs_do_not_answer_ends_them_and_itself(links: list[Link]) -> None:
    channel = third_rank(links)
    links[1].received_at = 3.0
    assert channel._decide(48.0) is None
    verdict = channel._decide(49.0 + ALONE_SECONDS)
    assert verdict is not None and (verdict.code, verdict.silent) == (ExitCode.HANG, (0, 1))
    assert "ranks 0 and 1 have sent nothing for 50 s" in verdict.text


def test_a_rank_whose_hubs_have_finished_is_left_alone(links: list[Link]) -> None:
    channel = third_rank(links)
    links[0].has_left = links[1].has_left = True
    assert channel._decide(10_000.0) is None


def test_time_in_which_the_process_was_stopped_is_no_silence(links: list[Link]) -> None:
    channel = third_rank(links)
    began_at = time.monotonic() - 1000
    channel._discount_suspension(began_at, 995.0)
    assert links[0].received_at == 0.0  # a little late, as on a loaded machine
    channel._discount_suspension(began_at, 4.0)
    assert links[0].received_at == pytest.approx(996, abs=5)


def test_time_in_which_the_process_was_stopped_is_no_lack_of_progress(links: list[Link]) -> None:
    """Whether the thread had seen the last progress before that, or the main thread made it meanwhile."""
    for is_seen in (True, False):
        channel, now = third_rank(links), time.monotonic()
        if not is_seen:
            channel._heartbeat(now - 1020)
        channel._watched.place = first_position()._replace(at_seconds=now - 1010)
        if is_seen:
            channel._heartbeat(now - 1005)
        channel._discount_suspension(now - 1000, 0.0)
        assert channel._heartbeat(now).idle_seconds == pytest.approx(10, abs=5)
        channel._watched.place = first_position()._replace(at_seconds=now + 2)
        assert channel._heartbeat(now + 3).idle_seconds == pytest.approx(1)


def held_in(module: str, look: Callable[[], None], until: list[Any]) -> Callable[[], None]:
    """A function of a module of that name, which looks and stays in its own frame until there is something."""
    lines = ("def held():", "    look()", "    while not until:", "        pass")
    names: dict[str, Any] = {"__name__": module, "look": look, "until": until}
    exec(compile("\n".join(lines), f"/{module}.py", "exec"), names)
    return names["held"]


def test_stacks_tell_work_from_waiting() -> None:
    found: list[tuple[str, bool]] = []

    def read_soon() -> None:
        time.sleep(0.05)
        found.append(read_stacks(100_000))

    def look() -> None:
        found.clear()
        threading.Thread(target=read_soon).start()

    for module, waits in (
        ("torch.distributed.distributed_c10d", True),
        ("deepspeed.runtime.pipe.p2p", True),
        ("megatron.parallel.messages", True),
        ("megatron.parallel.tensor.layers", False),
        ("torch.distributed_tools", False),
    ):
        held_in(module, look, found)()
        text, found_waits = found[0]
        assert found_waits == waits, module
        assert f"/{module}.py" in main_stack(text)
        assert main_stack(text).startswith("thread MainThread:\n  ")


def test_a_main_thread_that_hands_over_waits_as_its_thread_does() -> None:
    ready, done = threading.Event(), threading.Event()
    found: list[tuple[str, bool]] = []

    def look() -> None:
        time.sleep(0.05)
        found.append(read_stacks(1000))
        done.set()

    writer = threading.Thread(target=held_in("torch.distributed.distributed_c10d", ready.set, found))
    writer.start()
    ready.wait()
    threading.Thread(target=look).start()
    done.wait()  # in the module threading
    writer.join()
    assert found[0][1]
