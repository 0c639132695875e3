"""Checks that DeepSpeed holds what the closed form says, on two ranks in bf16; the table of scenario 003.4 does for
fp32.
"""

from __future__ import annotations

import pytest

from tests.helpers.ranks import run_ranks
from tools.runs.zero_stages import MeasuredCell, TableRun, cells_of, measure_cells

RUN = TableRun(1, 32, 2, 16, 256, 2, "bf16")
KINDS = ("parameters", "gradients", "optimizer")


def measured(rank: int) -> list[MeasuredCell]:
    """The table on one rank."""
    return measure_cells(RUN, cells_of(RUN.dtype))[1]


@pytest.fixture(scope="module")
def tables() -> list[list[MeasuredCell]]:
    """The rows of both ranks."""
    return run_ranks(measured, 2)


def test_every_amount_is_as_predicted_on_both_ranks(tables: list[list[MeasuredCell]]) -> None:
    wrong = [
        (rank, row.cell, kind, getattr(row.measured, kind), getattr(row.predicted, kind))
        for rank, rows in enumerate(tables)
        for row in rows
        for kind in KINDS
        if getattr(row.measured, kind) != pytest.approx(getattr(row.predicted, kind), rel=5e-3)
    ]
    assert not wrong
    assert all(row.measured.total > 100_000 for rows in tables for row in rows)
