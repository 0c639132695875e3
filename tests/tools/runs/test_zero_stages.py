"""Checks the cells and the lines of the table; scenario 003.4 trains them."""

from __future__ import annotations

import pytest

from megatron.engine.memory.closed_form import Amounts
from tools.runs.zero_stages import Cell, MeasuredCell, cells_of, largest_difference, table_lines

ROWS = [
    MeasuredCell(Cell(0), Amounts(4000, 4000, 8000, 16000), Amounts(4000, 4000, 8004, 16004), 6.0, 5.0),
    MeasuredCell(Cell(3, True, True), Amounts(2000, 4000, 6000, 0), Amounts(2000, 4000, 6001, 1), 6.0, 5.25),
]


def test_nothing_is_offloaded_where_nothing_is_divided() -> None:
    cells = cells_of("fp32")
    assert [(cell.stage, cell.offload) for cell in cells] == [
        (0, "no"), (1, "no"), (1, "optimizer"), (2, "no"), (2, "optimizer"), (3, "no"), (3, "optimizer"), (3, "all"),
    ]  # fmt: skip
    assert cells_of("bf16") == cells[1:]  # half precision at stage 0 runs as stage 1


def test_a_cell_is_what_a_deepspeed_file_says() -> None:
    settings = Cell(3, offloads_optimizer=True, offloads_parameters=True).settings()["zero_optimization"]
    assert settings["offload_optimizer"] == settings["offload_param"] == {"device": "cpu"}
    assert settings["stage3_param_persistence_threshold"] == 0
    assert "offload_optimizer" not in Cell(2).settings()["zero_optimization"]


@pytest.mark.parametrize(("shows_device", "device"), [(False, "(0)"), (True, "1 (0)")])
def test_a_line_shows_what_was_measured_and_predicted(shows_device: bool, device: str) -> None:
    headings, first, last = table_lines(ROWS, shows_device=shows_device)
    assert headings.split("  ")[0] == "stage"
    assert "8,004 (8,000)" in first
    assert last.split("  ")[-2:] == [device, "5.250000"]


def test_the_difference_is_between_last_losses() -> None:
    assert largest_difference(ROWS) == 0.25
