"""What lines may say: anything at all, and no line stops the page."""

from __future__ import annotations

import json
import math
import tempfile
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trident.dashboard.run_folders import step, write_run
from trident.dashboard.board import Board
from trident.dashboard.configuration import differences
from trident.dashboard.followed_run import DashboardRun, View
from trident.dashboard.records import (
    event_records,
    heartbeats_record,
    is_shallow,
    layout,
    metric_records,
    number,
    sample_records,
    whole,
)
from trident.dashboard.table import AXES

STRANGE: list[Any] = [
    None, True, -1, 0, 2**53, 2**63, 2**64 - 1, 10**30, 1e308, -1e308, 5e-324, math.nan, math.inf, "NaN", "Infinity",
    "-Infinity", "abc", "", "\x00\x1b[2J", [], [1, 2], [[1], [2]], {}, {"lm_loss": [1]}, {"a": {"lm_loss": "NaN"}},
]  # fmt: skip
KINDS = ["evaluation", "task", "start", "passed", "save", "finished", "failed", ["step"], {"a": 1}, None]
NAMES = [
    "iteration", "train_iterations", "consumed_tokens", "seconds_per_iteration", "lm_loss", "source_losses", "routing",
    "skipped_iterations", "nan_iterations", "group", "task", "figures", "step", "at", "text", "world_size", "samples",
    "first_sample", "axes", "ranks", "parallel", "control", "provenance", "tokens_per_second", "new metric",
]  # fmt: skip


def strange_record(random: Random) -> dict[str, Any]:
    """A step or another record, some of whose values are not what they should be."""
    record = {**step(random.randint(1, 40)), "kind": random.choice(["step", "step", *KINDS])}
    for name in random.sample(NAMES, random.randint(0, 3)):
        value = random.choice([*STRANGE, random.randint(0, 40), random.uniform(-1e3, 1e3)])
        record[name] = random.choice([value, value, [value], {random.choice(NAMES): value}])
    return record


def strange_lines(random: Random) -> bytes:
    """A few of them as lines, and some that are no records."""
    lines = [json.dumps(strange_record(random)).encode() for _ in range(random.randint(1, 5))]
    return b"\n".join([*lines, random.choice([b"", b"[1]", b"\xff", lines[0][:30]]), lines[-1], b""])


def ask_everything(run: DashboardRun) -> None:
    """Asks a run all that the page asks, as JSON."""
    summary = run.summary()
    assert "cannot be parsed" not in summary["problem"], summary["problem"]
    json.dumps([summary, run.details()], allow_nan=False)
    differences([run.configuration_rows(), {}])
    run.save_folder()
    for metric in summary["metrics"]:
        for axis in AXES:
            for view in (View(axis, 3, 0.9, (0.0, 30.0)), View(axis, 5, is_logarithmic=True)):
                for _, curve in run.curves(metric, view):
                    json.dumps([curve.x.tolist(), curve.extent], allow_nan=False)
                    assert len(curve.x) == len(curve.low) == len(curve.high) == len(curve.line)


@settings(max_examples=60)
@given(random=st.randoms(use_true_random=True))
def test_no_line_stops_a_run(random: Random) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "run"
        folder.mkdir()
        for file_name in ("metrics.jsonl", "events.jsonl", "samples.jsonl"):
            (folder / file_name).write_bytes(strange_lines(random))
        for file_name in ("heartbeats.json", "config.json"):
            (folder / file_name).write_text(json.dumps(strange_record(random)))
        board = Board([Path(name)])
        board.search()
        for _ in range(4):
            with (folder / "metrics.jsonl").open("ab") as file:
                file.write(strange_lines(random))
            board.poll()
        ask_everything(board.runs[1])


def test_a_first_look_survives_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trident.dashboard.followed_run._LONG_FILE_BYTES", 10)
    lines = [{**step(at), name: value} for at, value in enumerate(STRANGE, 1) for name in NAMES]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    board = Board([tmp_path])
    board.search()
    board.runs[1].load_preview()
    ask_everything(board.runs[1])
    while board.poll():
        pass
    ask_everything(board.runs[1])


def test_numbers_have_limits() -> None:
    assert whole(3) == 3 and [whole(value) for value in (True, 3.0, "3", -1, 2**53)] == [None] * 5
    assert number(3) == 3.0 and number(2**64) == 2.0**64 and number(-1) == -1.0
    assert [number(value, 0.0) for value in (True, "3", math.nan, math.inf, -1, [])] == [None] * 6


def test_steps_keep_what_is_right() -> None:
    bad = {"consumed_tokens": "Infinity", "seconds_per_iteration": 1e308}
    (one,) = metric_records([step(3, source_losses="abc", **bad)])
    assert set(step(3)) - set(one) == set(bad)
    assert one["lm_loss"] == step(3)["lm_loss"] and metric_records([step(4)]) == [step(4)]
    assert metric_records([step(2**63), {"kind": "evaluation", "iteration": 2**64 - 1}, {"kind": ["step"]}, 7]) == []
    task = {"kind": "task", "iteration": 2, "task": "arc", "group": 5, "figures": [1], "consumed_tokens": math.inf}
    kept = {"kind": "task", "iteration": 2, "task": "arc", "figures": {}, "consumed_tokens": None}
    assert metric_records([task]) == [kept]


def test_events_samples_and_heartbeats_keep_what_is_right() -> None:
    assert event_records([{"kind": ["step"]}, {"kind": {"a": 1}}, {}, 3]) == []
    (event,) = event_records([{"kind": "start", "at": "yesterday", "step": 4, "world_size": [1], "text": {}}])
    assert (event["at"], event["step"], event["world_size"], event["text"]) == (None, 4, None, "")
    pairs = [{"prompt": "Once", "text": " upon"}, {"prompt": 1, "text": ""}, "no pair"]
    (one,) = sample_records([{"iteration": 5, "at": 1.0, "samples": pairs}, {"iteration": 2**64 - 1}, []])
    assert one == {"iteration": 5, "at": 1.0, "samples": pairs[:1]}
    beats = heartbeats_record(
        {
            "axes": [["tp", 2], ["pp", "many"], 7],
            "ranks": [{"rank": 1, "phase": "data", "step": 3, "idle_seconds": "NaN", "state": []}, {"rank": -1}, None],
        }
    )
    assert beats == {"axes": [("tp", 2)], "ranks": [{"rank": 1, "phase": "data", "step": 3}]}
    assert heartbeats_record({"axes": [["tp", 65_536], ["pp", 2]]}) == {"axes": [], "ranks": []}


def test_layouts_that_no_browser_could_draw_are_left_out(tmp_path: Path) -> None:
    assert layout({"parallel": {"data_parallel_size": 8}}) == {"pp": 1, "dp": 8, "tp": 1}
    assert layout({"parallel": {"data_parallel_size": 2**50}}) == {"pp": 1, "tp": 1} and layout({"parallel": []}) == {}
    assert is_shallow({"a": [{"b": 1}]}) and not is_shallow(json.loads("[" * 500 + "]" * 500))
    folder = write_run(tmp_path / "a", steps=1, parallel={"tensor_model_parallel_size": "two"})
    board = Board([folder])
    board.search()
    board.poll()
    assert board.summaries()[0]["layout"] == {"pp": 1, "dp": 1, "tp": 1}
