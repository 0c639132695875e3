"""The rank that causes the end of a run, and the message to the user."""

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
    """The order to end a run.

    Attributes:
        code: the exit code of all ranks.
        rank: the rank that causes the end.
        text: the message to the user, without a prefix.
        silent: the ranks that do not reply, which another process on their machine must terminate.
        stacks: the stacks of all ranks, if they were collected.
    """

    code: int
    rank: int
    text: str
    silent: tuple[int, ...] = ()
    stacks: str = ""


@dataclass(frozen=True)
class RankAccount:
    """The state of a rank when a run seems to hang.

    Attributes:
        silent_seconds: time since its last message, if it does not reply.
        waits: its main thread waits for other ranks.
        stacks: of its threads, from `read_stacks`.
    """

    rank: int
    process: ProcessIdentity
    heartbeat: Heartbeat
    silent_seconds: float | None = None
    waits: bool = False
    stacks: str = ""

    def __str__(self) -> str:
        if self.silent_seconds is not None:
            return f"rank {self.rank}: {self.heartbeat}, no reply for {self.silent_seconds:.0f} s"
        state = ", waits for other ranks" if self.waits else ""
        return f"rank {self.rank}: {self.heartbeat}, no progress for {self.heartbeat.idle_seconds:.0f} s{state}"


def find_culprit(accounts: Sequence[RankAccount], limit_seconds: float) -> RankAccount | None:
    """Finds the rank that the others wait for; None if it makes progress.

    A rank that does not reply comes first, then one that is stuck outside communication. Among several of these, or if
    all are stuck in communication, it is the one that is furthest behind.

    Args:
        limit_seconds: a rank without progress for this long is stuck.
    """
    silent = [account for account in accounts if account.silent_seconds is not None]
    if silent:
        return max(silent, key=lambda account: account.silent_seconds or 0.0)
    stuck = [account for account in accounts if account.heartbeat.idle_seconds >= limit_seconds]
    working = [account for account in stuck if not account.waits]
    if working or len(stuck) == len(accounts):
        return min(working or stuck, key=lambda account: account.heartbeat.progress(), default=None)
    return None


def hang_verdict(culprit: RankAccount, accounts: Sequence[RankAccount]) -> RunEnd:
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
        others: the position of the other ranks; the last report of the lost one may be older.
    """
    text = (
        f"rank {rank} ({process}) ended without a message, while the others were in {others}. It was killed, for "
        f"example by the kernel because memory ran out (see dmesg or the scheduler's log), or it crashed. {_AGAIN}"
    )
    return RunEnd(ExitCode.REQUEUE, rank, text)


def rank_ranges(ranks: Sequence[int]) -> str:
    """Formats ranks in order, consecutive ones as a range: "0 to 7, 12"."""
    known = set(ranks)
    starts = sorted(rank for rank in known if rank - 1 not in known)
    ends = sorted(rank for rank in known if rank + 1 not in known)
    return ", ".join(f"{one}" if one == last else f"{one} to {last}" for one, last in zip(starts, ends, strict=True))


def _hang_text(culprit: RankAccount, accounts: Sequence[RankAccount]) -> str:
    if culprit.silent_seconds is not None:
        cause = (
            f"rank {culprit.rank} ({culprit.process}) has not replied for {culprit.silent_seconds:.0f} s: it is "
            f"stopped, or stuck outside Python. Its last report was in {culprit.heartbeat}."
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


def _no_stack(account: RankAccount) -> str:
    return "  no stacks: no reply" if account.silent_seconds is not None else "  no stacks"
