"""Which rank is behind, and what is said of it."""

from __future__ import annotations

import pytest

from megatron.errors import ExitCode
from megatron.parallel.processes import ProcessIdentity
from megatron.parallel.watch.position import Heartbeat
from megatron.parallel.watch.verdict import RankAccount, find_culprit, hang_verdict

PROCESS = ProcessIdentity("node7", "m", "n", 4711, "1", "cp 1 tp 0")


def account(
    rank: int, phase: str, step: int, idle: float, *, waits: bool = True, silent: float | None = None
) -> RankAccount:
    heartbeat = Heartbeat(phase, step, 10 * step, idle, is_starting=False)
    stacks = f"thread MainThread:\n  place{rank}.py:1 in f\nthread other:\n  x.py:2 in g"
    return RankAccount(rank, PROCESS, heartbeat, silent, waits, "" if silent else stacks)


@pytest.mark.parametrize(
    ("accounts", "culprit"),
    [
        # Two that do not answer: the one that fell silent first, however far the others are.
        ([account(0, "data", 2, 9), account(1, "step", 2, 9, silent=8), account(2, "step", 2, 9, silent=11)], 2),
        # One that works and is stuck, beside ranks that wait for it, one of which is behind it.
        ([account(0, "forward", 2, 9), account(1, "backward", 2, 9, waits=False), account(2, "p2p", 2, 9)], 1),
        # Several that are stuck in work: the one that has come least far.
        ([account(0, "step", 2, 9, waits=False), account(1, "data", 2, 9, waits=False)], 1),
        # All wait: a collective that not all have entered. The one that has come least far.
        ([account(0, "step", 3, 9), account(1, "save", 2, 9), account(2, "step", 3, 9)], 1),
        # All wait for one that is writing and makes progress.
        ([account(0, "save", 2, 30), account(1, "save", 2, 0.5, waits=False)], None),
        # One hangs in work while another one makes progress.
        ([account(0, "save", 2, 30, waits=False), account(1, "save", 2, 0.5, waits=False)], 0),
        ([], None),
    ],
)
def test_the_rank_that_the_others_wait_for(accounts: list[RankAccount], culprit: int | None) -> None:
    found = find_culprit(accounts, 5)
    assert (None if found is None else found.rank) == culprit


def test_a_report_names_the_rank_its_place_and_its_stack() -> None:
    accounts = [account(0, "p2p", 7, 30), account(1, "forward", 7, 31, waits=False)]
    verdict = hang_verdict(accounts[1], accounts)
    assert (verdict.code, verdict.rank, verdict.silent) == (ExitCode.HANG, 1, ())
    first, second, *_ = verdict.text.partition("rank 0: ")[0].splitlines()
    assert first == (
        "rank 1 (process 4711 on node7, cp 1 tp 0) hangs: no progress for 31 s in phase forward of step 7. If "
        "that only takes long, raise --hang-timeout-seconds. It is in thread MainThread:"
    )
    assert second == "  place1.py:1 in f"
    assert "\nrank 0: phase p2p of step 7, no progress for 30 s, waits for other ranks\n" in verdict.text
    assert "in g" not in verdict.text and verdict.stacks.count("in g") == 2


def test_a_rank_that_does_not_answer_is_called_stopped() -> None:
    accounts = [account(rank, "step", 7, 30) for rank in range(40)]
    accounts[5] = account(5, "data", 7, 1, silent=31)
    verdict = hang_verdict(accounts[5], accounts)
    assert verdict.silent == (5,)
    assert "rank 5 (process 4711 on node7, cp 1 tp 0) has not replied for 31 s: it is stopped, or" in verdict.text
    assert "rank 16:" in verdict.text and "rank 17:" not in verdict.text and "and 23 more ranks" in verdict.text
    assert "rank 5: phase data of step 7, no reply for 31 s" in verdict.stacks
