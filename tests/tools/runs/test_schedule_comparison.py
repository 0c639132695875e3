"""Schedules side by side; tests/tools/runs/test_plan.py has the whole table."""

from __future__ import annotations

import pytest

from megatron.errors import ConfigError
from megatron.parallel.schedule.building import build_schedule
from tools.runs.schedule_comparison import held_text, schedule_with_sizes, table_lines


def test_a_name_gets_the_fewest_chunks_it_takes() -> None:
    assert schedule_with_sizes("interleaved", 2, None, 4) is build_schedule("interleaved", 2, 2, 4)
    assert schedule_with_sizes("interleaved", 2, 3, 4) is build_schedule("interleaved", 2, 3, 4)
    with pytest.raises(ConfigError, match="no pipeline schedule 'gpipe'"):
        schedule_with_sizes("gpipe", 2, None, 4)


def test_what_ranks_hold_is_counted_in_whole_stages() -> None:
    assert held_text(build_schedule("interleaved", 4, 2, 8).peak_alive, 2) == "5.5 4.5 3.5 2.5"


def test_only_what_takes_these_chunks_is_listed() -> None:
    assert [line.split()[0] for line in list(table_lines(2, 1, 4))[2:]] == ["1f1b", "zb-h1"]
