"""The benchmarks of pipelines and of overlap run, and measure what they say."""

from __future__ import annotations

import contextlib
import io
import json
from typing import Any

import pytest

from benchmarks import overlap, pipeline_host_cost, pipeline_idle
from tests.helpers.ranks import free_port, run_ranks


def figures_of(rank: int, port: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """What both print, by figure."""
    found = []
    for words in (
        lambda: pipeline_host_cost.main(["--rounds", "2", "--steps", "1", "--dtypes", "fp32", "--micro-batches", "2"]),
        lambda: pipeline_idle.measure(
            rank, pipeline_idle.IdleFlags(ranks=2, micro_batches=2, milliseconds=40, steps=1, schedules=("zbv",)), port
        ),
    ):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            words()
        records = [json.loads(line) for line in printed.getvalue().splitlines()]
        found.append({record["figure"]: record for record in records})
    return found[0], found[1]


def test_the_first_rank_prints_what_was_measured() -> None:
    (host, idle), others = run_ranks(figures_of, 2, free_port())
    assert others == ({}, {})
    for figure in ("step", "evaluation"):
        assert all(host[f"{engine}_{figure}"]["value"] > 0 for engine in ("own", "deepspeed"))
        low, high = host[f"ratio_{figure}"]["spread"]
        assert 0 < low <= host[f"ratio_{figure}"]["value"] <= high
    assert idle["zbv"]["simulated"] == 7.7 and 5 < idle["zbv"]["value"] < 100
    assert idle["zbv_held_above_simulation"]["value"] == 0 and idle["zbv_slept_longer"]["value"] >= 0


def test_overlap_is_measured_and_planned(capsys: pytest.CaptureFixture[str]) -> None:
    assert overlap.main(["--layers", "4", "--buckets", "4", "--milliseconds", "20", "--steps", "1"]) == 0
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {record["figure"]: record["planned"] for record in records} == {
        **{"zero1_blocking": 100, "zero1_overlapped": 25, "zero2_blocking": 100, "zero2_overlapped": 25},
    }
