"""Joining a run: an open mesh and messages over it, one process without a rendezvous, and what stops a rank."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import resource
import time
from datetime import timedelta

import pytest
import torch

from megatron.errors import HangError, LaunchError
from megatron.parallel import joining, messages, processes
from megatron.parallel.joining import JoinMonitor, close_mesh, open_mesh
from megatron.parallel.launchers import Ranks
from megatron.parallel.processes import ProcessIdentity
from tests.helpers.layouts import Layout
from tests.helpers.ranks import LAUNCH_VARIABLES, run_ranks


def _meet_again(rank: int) -> list[float]:
    sums, stores = [], []
    for _ in range(2):
        mesh = open_mesh(Layout())
        stores.append(torch.distributed.distributed_c10d._get_default_store())  # it lives on, as under torchrun
        sums.append(messages.all_reduce_sum(torch.tensor([rank + 1.0]), mesh.world).item())
        close_mesh(mesh)
    return sums


def test_the_same_processes_open_a_second_mesh() -> None:
    assert run_ranks(_meet_again, 2, timeout_seconds=120) == [[3.0, 3.0]] * 2


def _no_rendezvous(*_: object, **__: object) -> None:
    raise AssertionError("a single process looks for others")


def _alone(rank: int) -> tuple[int, int]:
    for name in LAUNCH_VARIABLES:
        os.environ.pop(name, None)
    torch.distributed.rendezvous = torch.distributed.distributed_c10d.rendezvous = _no_rendezvous
    mesh = open_mesh(Layout())
    size = torch.distributed.get_world_size(mesh.dp.group)
    close_mesh(mesh)
    assert not torch.distributed.is_initialized()
    return mesh.world.size, size


def test_plain_python_opens_a_mesh_of_one_without_a_rendezvous() -> None:
    assert run_ranks(_alone, 1) == [(1, 1)]


def test_an_unknown_host_in_a_node_list_is_reported_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr(joining.time, "sleep", waits.append)
    ranks = Ranks(1, 4, 0, "node001.invalid", 12345, "srun")
    calling = JoinMonitor(1, 4, "node001.invalid:12345", 60.0)
    with pytest.raises(LaunchError, match=r"Rank 1 of 4 cannot resolve 'node001\.invalid'.*Set MASTER_ADDR"):
        joining._join(ranks, "gloo", timedelta(minutes=1), calling)
    assert waits == [1, 1]


def test_an_unknown_host_given_by_hand_is_warned_of_before_the_wait(capsys: pytest.CaptureFixture[str]) -> None:
    joining._check_address(Ranks(1, 4, 0, "pod-0.invalid", 12345, "environment"))
    assert "Rank 1 of 4 cannot resolve 'pod-0.invalid'" in capsys.readouterr().err


def _wait_for_nobody(rank: int) -> str:
    if rank == 2:
        return ""
    joining.timedelta = lambda minutes: timedelta(seconds=2)  # type: ignore[assignment, misc]
    with pytest.raises(HangError) as refused:
        open_mesh(Layout())
    return str(refused.value)


def test_a_rank_that_never_joins_is_named_after_the_timeout() -> None:
    texts = run_ranks(_wait_for_nobody, 3)
    for text in texts[:2]:
        assert text.startswith("rank 2 has not joined the other ranks of 3 at 127.0.0.1:")
        assert "within 2 s (--distributed-timeout-minutes): stopped, crashed or unreachable." in text


class BusyStore:
    """The keys of a store whose every answer takes its share of a limited rate, as with so many ranks that ask it."""

    RATE = 65_000  # questions a second, measured with several clients of one TCPStore on two cores

    def __init__(self, asking: int, *, answers: bool = True) -> None:
        self.kept: dict[str, str] = {}
        self.questions = 0
        self._asking = asking
        self._answers = answers

    def _answer(self) -> None:
        self.questions += 1
        time.sleep(self._asking / self.RATE if self._answers else 3600)

    def set(self, key: str, value: str) -> None:
        self._answer()
        self.kept[key] = value

    def get(self, key: str) -> bytes:
        self._answer()
        return self.kept[key].encode()

    def add(self, key: str, count: int) -> int:
        self._answer()
        self.kept[key] = str(int(self.kept.get(key, 0)) + count)
        return int(self.kept[key])

    def check(self, keys: list[str]) -> bool:
        self._answer()
        return all(key in self.kept for key in keys)

    def delete_key(self, key: str) -> bool:
        return self.kept.pop(key, None) is not None


def _late(rank: int, size: int, store: BusyStore) -> JoinMonitor:
    calling = JoinMonitor(rank, size, "node1:1234", 0.0)
    calling._store = store  # type: ignore[assignment]
    return calling


@pytest.mark.parametrize("size", [512, 16_384])
def test_of_many_ranks_one_finds_who_is_missing_and_the_others_read_it(size: int) -> None:
    """Each rank asks a number of questions that does not grow with the ranks, no more often than a store answers."""
    store = BusyStore(asking=size // 16)
    store.kept |= {f"{joining._FIRST}/{rank}": "{}" for rank in range(size) if rank not in (7, size - 1)}
    expected = f"rank 7, {size - 1} have not joined the other ranks of {size} at node1:1234 within 0 s"
    finder = _late(5, size, store).missing()
    assert expected in str(finder)
    assert store.questions < 80
    before = store.questions
    reader = _late(9, size, store)
    assert str(reader.missing()) == str(finder)
    assert store.questions - before <= 8
    assert 2 * size / reader._poll_seconds < BusyStore.RATE


def test_of_ranks_that_came_those_that_do_not_answer_are_missing_and_a_later_turn_looks_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(joining, "_ANSWER_SECONDS", 0.3)
    store = BusyStore(asking=1)
    gone = dataclasses.asdict(dataclasses.replace(ProcessIdentity.own(), host="node7", machine="another"))
    store.kept |= {f"{joining._FIRST}/{rank}": json.dumps(gone) for rank in range(40)}
    store.kept |= {f"{joining._ANSWERED}/{rank}": "yes" for rank in range(40)}
    assert _late(0, 40, store).missing() is None
    assert joining._GAVE_UP not in store.kept
    for rank in range(20, 40):
        del store.kept[f"{joining._ANSWERED}/{rank}"]
    missing = str(_late(0, 40, store).missing())
    assert missing.startswith(f"rank 20 (process {os.getpid()} on node7), 21 (process ")
    assert ", 4 more have not joined" in missing


class LateStore(BusyStore):
    """Of which rank 7 comes when it has been looked for."""

    def check(self, keys: list[str]) -> bool:
        are_there = super().check(keys)
        if keys == [f"{joining._FIRST}/7"]:
            self.kept[keys[0]] = json.dumps(dataclasses.asdict(ProcessIdentity.own()))
        return are_there


def test_a_rank_that_comes_a_moment_too_late_is_not_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ProcessIdentity, "kill", _no_rendezvous)
    store = LateStore(asking=1)
    store.kept |= {f"{joining._FIRST}/{rank}": "{}" for rank in range(16) if rank != 7}
    assert str(_late(3, 16, store).missing()).startswith("rank 7 has not joined the other ranks of 16 ")


def test_a_store_that_does_not_answer_blames_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "_ANSWER_SECONDS", -0.9)
    monkeypatch.setattr(ProcessIdentity, "kill", _no_rendezvous)
    missing = _late(3, 64, BusyStore(asking=1, answers=False)).missing()
    assert "rank 3 waited 0 s" in str(missing)
    assert "the missing ranks are unknown, because the store at node1:1234 does not reply" in str(missing)


def test_rank_0_may_open_a_connection_for_every_rank_before_it_opens_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Started under a limit that many systems have, the ranks of a run of 1,000 would not all reach the store."""
    opened: list[int] = []
    limit = [256, 8192]
    monkeypatch.setattr(processes.resource, "getrlimit", lambda _: tuple(limit))
    monkeypatch.setattr(processes.resource, "setrlimit", lambda _, limits: limit.__setitem__(slice(None), limits))
    monkeypatch.setattr(
        joining.dist, "TCPStore", lambda *_, **__: opened.append(limit[0]) or torch.distributed.HashStore()
    )
    ranks = Ranks(0, 1000, 0, "127.0.0.1", 12345, "srun")
    joining._open_store(ranks, timedelta(minutes=1))
    assert (opened, limit) == ([5024], [5024, 8192])
    joining._open_store(dataclasses.replace(ranks, rank=1, world_size=10_000), timedelta(minutes=1))
    with pytest.raises(LaunchError, match=r"10,000 ranks.*may not open the 40,064 files.*ulimit -Hn 40064"):
        joining._open_store(dataclasses.replace(ranks, world_size=10_000), timedelta(minutes=1))
    assert len(opened) == 2


@pytest.mark.parametrize(("hard", "is_enough"), [(1024, True), (4 * 2 + 64, True), (4 * 2 + 63, False)])
def test_a_low_hard_limit_refuses_only_what_does_not_fit(
    monkeypatch: pytest.MonkeyPatch, hard: int, is_enough: bool
) -> None:
    monkeypatch.setattr(processes.resource, "getrlimit", lambda _: (64, hard))
    monkeypatch.setattr(processes.resource, "setrlimit", lambda _, limits: None)
    monkeypatch.setattr(joining.dist, "TCPStore", lambda *_, **__: torch.distributed.HashStore())
    with contextlib.nullcontext() if is_enough else pytest.raises(LaunchError, match="open the 72 files"):
        joining._open_store(Ranks(0, 2, 0, "127.0.0.1", 12345, "srun"), timedelta(minutes=1))


def test_a_rank_whose_neighbour_answered_and_ended_does_not_wait_for_ever() -> None:
    store = torch.distributed.HashStore()
    ours, theirs = (JoinMonitor(rank, 2, "node1:1234", 0.3, _no_rendezvous) for rank in range(2))
    store.set(f"{joining._ANSWERED}/1", "yes")  # it looked for a missing rank, found none, and ended
    theirs._store = store
    store.set(f"{joining._FIRST}/1", json.dumps(dataclasses.asdict(ProcessIdentity.own())))
    store.add(joining._FIRST, 1)
    ours.begin(store)
    with pytest.raises(HangError, match=r"rank 0 waited 0.3 s .* the missing ranks are unknown"):
        ours.finish()


def _under_a_low_limit(rank: int) -> tuple[int, int]:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
    mesh = open_mesh(Layout())
    total = messages.all_reduce_sum(torch.ones(1), mesh.world).item()
    return int(total), resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def test_a_lowered_soft_limit_is_raised_where_the_store_is() -> None:
    assert run_ranks(_under_a_low_limit, 2) == [(2, 4 * 2 + 1024), (2, 64)]
