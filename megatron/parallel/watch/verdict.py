"""Which rank is the reason that a run ends, and what the user reads about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron.errors import ExitCode
from megatron.parallel.processes import ProcessIdentity
from megatron.parallel.watch.position import Heartbeat
from megatron.parallel.watch.stacks import main_stack

_MOST_LINES = 16
_AGAIN = "Saved checkpoints are intact: run the same command again."


@dataclass(frozen=True)
class RunEnd:
    """Why and how all ranks of a run end now.

    Attributes:
        code: the exit code of all of them.
        rank: the rank that it is about.
        text: what the user reads, without a prefix.
        silent: the ranks that do not answer, which somebody on their machine must end.
        stacks: the stacks of all ranks, if they were collected.
    """

    code: int
    rank: int
    text: str
    silent: tuple[int, ...] = ()
    stacks: str = ""


@dataclass(frozen=True)
class Account:
    """What is known of a rank when a run seems to hang.

    Attributes:
        silent_seconds: since its last message, if it does not answer.
        waits: whether its main thread waits for other ranks.
        stacks: of its threads, as `read_stacks` gives them.
    """

    rank: int
    process: ProcessIdentity
    heartbeat: Heartbeat
    silent_seconds: float | None = None
    waits: bool = False
    stacks: str = ""

    def __str__(self) -> str:
        if self.silent_seconds is not None:
            return f"rank {self.rank}: {self.heartbeat}, has not answered for {self.silent_seconds:.0f} s"
        state = ", waits for other ranks" if self.waits else ""
        return f"rank {self.rank}: {self.heartbeat}, no progress for {self.heartbeat.idle_seconds:.0f} s{state}"


def find_culprit(accounts: Sequence[Account], limit_seconds: float) -> Account | None:
    """The rank that the others wait for; None if all wait for one that makes progress.

    First one that does not answer; then one that is stuck in anything but communication, and among several of those, or
    if all are stuck in communication, the one that has come least far.

    Args:
        limit_seconds: without progress for this long, a rank is stuck.
    """
    silent = [account for account in accounts if account.silent_seconds is not None]
    if silent:
        return max(silent, key=lambda account: account.silent_seconds or 0.0)
    stuck = [account for account in accounts if account.heartbeat.idle_seconds >= limit_seconds]
    working = [account for account in stuck if not account.waits]
    if working or len(stuck) == len(accounts):
        return min(working or stuck, key=lambda account: account.heartbeat.place(), default=None)
    return None


def hang_verdict(culprit: Account, accounts: Sequence[Account]) -> RunEnd:
    """The end of a run because of a rank that hangs."""
    return RunEnd(
        ExitCode.HANG,
        culprit.rank,
        _hang_text(culprit, accounts),
        tuple(account.rank for account in accounts if account.silent_seconds is not None),
        "\n\n".join(f"{account} ({account.process})\n{account.stacks or _no_stack(account)}" for account in accounts),
    )


def lost_verdict(rank: int, process: ProcessIdentity, others: Heartbeat) -> RunEnd:
    """The end of a run because of a rank that has ended without a message.

    Args:
        others: where the other ranks are; what the lost one said last may be older.
    """
    text = (
        f"rank {rank} ({process}) ended without a message, while the others were in {others}. It was killed, for "
        f"example by the kernel because memory ran out (see dmesg or the scheduler's log), or it crashed. {_AGAIN}"
    )
    return RunEnd(ExitCode.REQUEUE, rank, text)


def rank_ranges(ranks: Sequence[int]) -> str:
    """Ranks in order, those that follow each other as one range: "0 to 7, 12"."""
    known = set(ranks)
    starts = sorted(rank for rank in known if rank - 1 not in known)
    ends = sorted(rank for rank in known if rank + 1 not in known)
    return ", ".join(f"{one}" if one == last else f"{one} to {last}" for one, last in zip(starts, ends, strict=True))


def _hang_text(culprit: Account, accounts: Sequence[Account]) -> str:
    if culprit.silent_seconds is not None:
        cause = (
            f"rank {culprit.rank} ({culprit.process}) has not answered for {culprit.silent_seconds:.0f} s: it is "
            f"stopped, or stuck outside Python. Its last report came from {culprit.heartbeat}."
        )
    else:
        flag = "--distributed-timeout-minutes" if culprit.heartbeat.is_starting else "--hang-timeout-seconds"
        cause = (
            f"rank {culprit.rank} ({culprit.process}) hangs: no progress for {culprit.heartbeat.idle_seconds:.0f} s in "
            f"{culprit.heartbeat}. If that only takes long, raise {flag}. It is in {main_stack(culprit.stacks)}"
        )
    others = [str(account) for account in accounts if account is not culprit]
    more = [f"and {len(others) - _MOST_LINES} more ranks"] if len(others) > _MOST_LINES else []
    return "\n".join([cause, *others[:_MOST_LINES], *more, f"All ranks end now. {_AGAIN}"])


def _no_stack(account: Account) -> str:
    return "  no stacks: it does not answer" if account.silent_seconds is not None else "  no stacks"
