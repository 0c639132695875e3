"""Reads and writes schedules as CSV, in the format of `torch.distributed.pipelining`'s `format="compute_only"`.

A row lists the computations of one pipeline rank, in order: `0F3` is the forward pass of chunk 0 on micro-batch 3, `B`
a backward pass, `I` and `W` its halves (gradients of the input, of the weights). Empty cells are ignored. The file has
no messages: they are derived.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from megatron.errors import ConfigError, printable
from megatron.files.settings import read_text
from megatron.parallel.schedule.actions import Kind, Placement, Schedule
from megatron.parallel.schedule.simulation import Computation, Orders, shown

_CELL = re.compile(r"(\d{1,6})([FBIW])(\d{1,6})")
_MOST_BYTES = 64 << 20


def read_orders(path: str) -> tuple[Placement, int, Orders]:
    """Reads the placement, the number of micro-batches and the computations of each rank.

    Raises:
        ConfigError: the file cannot be read, or a computation is missing or duplicated. Deadlocks are not detected.
    """
    text = read_text(path, f"--pipeline-schedule {path}", _MOST_BYTES)
    # Cells contain no commas, so quotes, which some programs write, can simply be stripped.
    rows = [[cell.strip(' \t"') for cell in line.split(",")] for line in text.splitlines()]
    rows = [row for row in rows if any(row)]
    orders = [[_computation(path, rank, cell) for cell in row if cell] for rank, row in enumerate(rows)]
    for problem in _problems(orders):
        raise ConfigError(f"--pipeline-schedule {path}: {problem}")
    owners = {chunk: rank for rank, order in enumerate(orders) for _, chunk, _ in order}
    placement = Placement(tuple(owners[chunk] for chunk in range(len(owners))))
    return placement, 1 + max(micro_batch for _, _, micro_batch in orders[0]), orders


def schedule_text(schedule: Schedule) -> str:
    """The text of a schedule's file for `read_orders`."""
    rows = ([str(action) for action in program if not action.kind.is_message] for program in schedule.actions)
    return "".join(",".join(row) + "\n" for row in rows)


def _computation(path: str, rank: int, cell: str) -> Computation:
    match = _CELL.fullmatch(cell)
    if match is None:
        raise ConfigError(
            f"--pipeline-schedule {path}: {printable(cell, 40)} in the row of rank {rank} is not a computation. Write "
            "chunk, F, B, I or W, and micro-batch, such as 0F3."
        )
    return Kind(match[2]), int(match[1]), int(match[3])


def _problems(orders: Sequence[Sequence[Computation]]) -> Iterator[str]:
    """The problems of the rows, the first of each kind."""
    if not any(orders):
        yield "it has no computations. Write a row for each pipeline rank."
        return
    owners: dict[int, int] = {}
    for rank, order in enumerate(orders):
        for _, chunk, _ in order:
            if owners.setdefault(chunk, rank) != rank:
                yield f"chunk {chunk} is in the rows of ranks {owners[chunk]} and {rank}. Each chunk has one rank."
                return
    for chunk in range(len(owners)):
        if chunk not in owners:
            yield f"chunk {chunk} of 0 to {max(owners)} is missing. Number the chunks from 0, in the order of layers."
            return
    counts = Counter(owners.values())
    for rank in range(len(orders)):
        if counts[rank] != counts[0]:
            yield (
                f"rank {rank} has {counts[rank]} chunk{'s' * (counts[rank] != 1)} and rank 0 has {counts[0]}. All "
                "ranks must have the same number."
            )
            return
    yield from _ends_inside(owners, len(orders)) or _missing(orders, len(owners))


def _ends_inside(owners: Mapping[int, int], ranks: int) -> list[str]:
    """Rejects an end of the network on an inner rank: only outer ranks sum the gradients of tied embeddings."""
    last = max(owners)
    if owners[0] == 0 and owners[last] in (0, ranks - 1):
        return []
    return [
        f"the first chunk, 0, is on rank {owners[0]} and the last, {last}, on rank {owners[last]}. Put chunk 0 in the "
        f"first row, and chunk {last} in the first row or the last."
    ]


def _missing(orders: Sequence[Sequence[Computation]], chunks: int) -> Iterator[str]:
    """A duplicate or missing computation."""
    written = Counter(computation for order in orders for computation in order)
    computation, times = written.most_common(1)[0]
    if times > 1:
        yield f"{shown(computation)} is written {times} times. Write each computation once."
        return
    micro_batches = 1 + max(micro_batch for _, _, micro_batch in written)
    for chunk in range(chunks):
        for micro_batch in range(micro_batches):
            has = {kind for kind in "FBIW" if (Kind(kind), chunk, micro_batch) in written}
            if has not in ({"F", "B"}, {"F", "I", "W"}):
                yield (
                    f"chunk {chunk} has {', '.join(sorted(has)) or 'nothing'} for micro-batch {micro_batch}. It "
                    "needs F and either B or both I and W."
                )
                return
