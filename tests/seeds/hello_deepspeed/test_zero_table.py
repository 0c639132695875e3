"""The memory of each ZeRO stage, measured and predicted by one command, and equal losses."""

from __future__ import annotations

import contextlib
import io
import math
import re

import pytest

from tests.helpers.ranks import run_ranks
from tools.runs import zero_table

CELL = re.compile(r"([\d,]+) \(([\d,]+)\)")


def table(rank: int) -> list[str]:
    """The lines that the command prints on one rank."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert zero_table.main(["--num-layers", "1", "--hidden-size", "32"]) == 0
    return printed.getvalue().splitlines()


@pytest.mark.full
def test_003_4_every_zero_stage_holds_what_is_predicted() -> None:
    first, second = run_ranks(table, 2)
    assert second == []
    _, *rows = first
    names = [tuple(row.split()[:2]) for row in rows]
    assert names == [
        ("0", "no"), ("1", "no"), ("1", "optimizer"), ("2", "no"), ("2", "optimizer"), ("3", "no"), ("3", "optimizer"),
        ("3", "all"),
    ]  # fmt: skip
    amounts = [[(_number(measured), _number(predicted)) for measured, predicted in CELL.findall(row)] for row in rows]
    for cells in amounts:
        assert [measured for measured, _ in cells] == pytest.approx([predicted for _, predicted in cells], rel=5e-3)
    parameters = [cells[0][0] for cells in amounts]
    optimizer = [cells[2][0] for cells in amounts]
    assert parameters[:5] == [parameters[0]] * 5
    assert parameters[5:] == pytest.approx([parameters[0] / 2] * 3, rel=1e-2)
    assert optimizer[0] == pytest.approx(2 * parameters[0], rel=1e-2)
    # At stages 1 and 2 the weights of the network are the optimizer's; offloaded, and at stage 3, it has copies.
    copies = [0.0 if row in (("1", "no"), ("2", "no")) else 0.5 for row in names[1:]]
    assert optimizer[1:] == pytest.approx([(1 + copy) * parameters[0] for copy in copies], rel=1e-2)
    losses = [float(row.split()[-1]) for row in rows]
    assert losses == pytest.approx([losses[0]] * 8, abs=1e-5)
    assert losses[0] < math.log(512) - 0.1  # what a network knows before it has learnt


def _number(text: str) -> int:
    return int(text.replace(",", ""))
