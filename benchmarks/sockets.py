"""Sockets of each rank of a run of real ranks on this machine: the open mesh, after messages of every kind, watched.

    python benchmarks/sockets.py --ranks 2 4 8 16

Prints one JSON line per measurement. The ranks are forked once torch is imported. Rank 0 also holds the store at which
torch's groups meet, with connections from every rank; under torchrun the agent holds it. `most_at_16384` is counted
from the shape of the trees, without processes.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmarks.figures import print_figure
from megatron import process_exit
from megatron.config import ConfigSection, flag, parse_flags
from megatron.parallel import messages
from megatron.parallel.joining import open_mesh, rendezvous
from megatron.parallel.rank_tree import children_of
from megatron.parallel.watch.opening import connect_ranks
from tests.helpers.layouts import Layout
from tests.helpers.ranks import free_port


@dataclass(frozen=True)
class SocketFlags(ConfigSection):
    """Flags of this program."""

    ranks: tuple[int, ...] = flag((2, 4, 8, 16), "numbers of ranks to start, one after the other", at_least=2)


def main(argv: Sequence[str] | None = None) -> int:
    """Starts each number of ranks and prints the sockets of rank 0 and the most of the others."""
    words = sys.argv[1:] if argv is None else argv
    flags = parse_flags(SocketFlags, words, prog="sockets.py", description=__doc__ or "")
    for size in flags.ranks:
        counts = sockets_of(size)
        for name in counts[0]:
            others = max(count[name] for count in counts[1:])
            print_figure("sockets", name, others, "sockets", ranks=size, on_rank_0=counts[0][name])
    most = max(2 * (len(children_of(rank, 16_384)) + (rank > 0)) for rank in range(16_384))
    print_figure("sockets", "most_at_16384_of_both_trees", most, "sockets")
    return 0


def sockets_of(size: int) -> list[dict[str, int]]:
    """The sockets of each of `size` ranks, by what opened them."""
    context = multiprocessing.get_context("fork")
    answers: Any = context.Queue()
    port = free_port()
    processes = [context.Process(target=_count, args=(rank, size, port, answers)) for rank in range(size)]
    for process in processes:
        process.start()
    counts = dict(answers.get(timeout=300) for _ in processes)
    for process in processes:
        process.join()
    return [counts[rank] for rank in range(size)]


def _count(rank: int, size: int, port: int, answers: Any) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(size))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    counted_sockets(rank, answers)


def counted_sockets(rank: int, answers: Any) -> None:
    """Joins the other ranks, sends them messages of every kind, and puts rank and number of sockets into `answers`."""
    before = _open_sockets()
    mesh = open_mesh(Layout())
    joined = _open_sockets()
    messages.all_gather_json(rank, mesh.control)
    messages.PendingMaximum(rank, mesh.background).wait()
    steered = _open_sockets()
    messages.all_reduce_sum(torch.ones(1000), mesh.gradient)
    messages.broadcast(torch.ones(1000), mesh.gradient)
    trained = _open_sockets()
    meeting = connect_ranks(mesh, rendezvous())
    watched = _open_sockets()
    answers.put(
        (
            rank,
            {
                "joining": joined - before,
                "control_and_background_messages": steered - joined,
                "gradients_over_gloo": trained - steered,
                "watch": watched - trained,
                "all": watched - before,
            },
        )
    )
    messages.all_gather_json(rank, mesh.control)
    if meeting is not None:
        meeting.close()


def _open_sockets() -> int:
    count = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            count += os.readlink(f"/proc/self/fd/{name}").startswith("socket:")
        except OSError:  # the folder itself, closed by now
            continue
    return count


if __name__ == "__main__":
    process_exit.exit_with(main)
