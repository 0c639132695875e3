"""Rows reach the ranks that they are for, and their gradients come back; other work goes on in between."""

from __future__ import annotations

import torch

from megatron.config import ParallelRequest
from megatron.parallel.expert.exchange import RowExchange, exchanged_counts
from megatron.parallel.joining import open_mesh
from megatron.parallel.mesh import Axis
from tests.helpers.ranks import run_ranks

SENT = ((1, 3), (0, 2))  # rows from each rank to each


def exchanged(rank: int) -> tuple[list[list[float]], list[list[float]], list[list[int]], list[float]]:
    axis = open_mesh(ParallelRequest(expert_model_parallel_size=2)).ep
    received = [sent[rank] for sent in SENT]
    exchange = RowExchange(axis, SENT[rank], received)
    rows = (10.0 * rank + torch.arange(sum(SENT[rank]))).unsqueeze(1).requires_grad_()
    sent = exchange.start(rows)
    other = rows.square().sum()
    arrived = exchange.arrived(sent)
    back = exchange.back()
    ((back.arrived(back.start(arrived * (rank + 1))) * 3).sum() + other).backward()
    counts = exchanged_counts(torch.arange(4) + 10 * rank, axis).tolist()
    even = RowExchange(axis)
    return (
        arrived.tolist(),
        rows.grad.tolist(),
        counts,
        even.arrived(even.start(torch.tensor([0.0, 1.0]) + rank)).tolist(),
    )  # type: ignore[union-attr]


def test_rows_and_gradients_travel() -> None:
    first, second = run_ranks(exchanged, 2)
    assert first[0] == [[0.0]] and second[0] == [[1.0], [2.0], [3.0], [10.0], [11.0]]
    assert first[1] == [[3.0], [6.0 + 2.0], [6.0 + 4.0], [6.0 + 6.0]]
    assert second[1] == [[6.0 + 20.0], [6.0 + 22.0]]
    assert first[2] == [[0, 1], [10, 11]] and second[2] == [[2, 3], [12, 13]]
    assert first[3] == [0.0, 1.0] and second[3] == [1.0, 2.0]


def test_one_rank_exchanges_nothing() -> None:
    rows = torch.ones(3, 2)
    exchange = RowExchange(Axis.single("ep"))
    assert exchange.is_idle and exchange.arrived(exchange.start(rows)) is rows
