"""What happened in a run, in sentences."""

from __future__ import annotations

import numpy as np

from trident.dashboard import records as cleaning
from trident.dashboard.events import Event, end_of, from_records, from_skips, with_skips


def test_starts_saves_and_ends_in_the_order_of_time() -> None:
    records = [
        {"kind": "start", "step": 0, "at": 1.0, "world_size": 1},
        {"kind": "start", "step": 4, "at": 5.0, "world_size": 8},
        {"kind": "save", "iteration": 4, "text": "iter_0000004", "at": 3.0},
        {"kind": "failed_save", "iteration": 5, "text": "cannot write x: No space left on device.", "at": 5.5},
        {"kind": "passed", "iteration": 6, "first_sample": 8, "last_sample": 11, "at": 6.0},
        {"kind": "stopped", "iteration": 9, "text": "asked by mongodb://a:secret1@h/d", "at": 9.0},
        {"kind": "unknown"},
        {"kind": "failed", "iteration": "?", "text": "", "at": "yesterday"},
    ]
    found = list(from_records(records[:6]))
    assert [event.kind for event in found] == ["start", "save", "lost", "resume", "failed_save", "passed", "stopped"]
    assert found[0].text == "Started on 1 rank." and found[3].text == "Resumed after step 4 on 8 ranks."
    assert "killed" in found[2].text and found[2].level == "bad" and "samples 8 to 11" in found[5].text
    assert found[4].text == "Step 5 was not saved: cannot write x: No space left on device." and found[4].level == "bad"
    assert "secret1" not in found[6].text and found[6].iteration == 9
    strange = list(from_records(cleaning.event_records(records[6:])))
    assert [(event.kind, event.text, event.at, event.iteration) for event in strange] == [
        ("failed", "The run failed.", None, None)
    ]
    assert found[1].to_json() == {
        "kind": "save",
        "text": "Saved iter_0000004.",
        "level": "good",
        "at": 3.0,
        "iteration": 4,
    }


def test_the_end_is_that_of_the_last_start() -> None:
    start, failed = {"kind": "start", "at": 1.0}, {"kind": "failed", "at": 2.0}
    assert end_of([]) == end_of([start]) == "" and end_of([start, failed]) == "failed"
    assert end_of([start, failed, {"kind": "start", "at": 3.0}]) == ""
    assert end_of([failed, start, {"kind": "finished", "at": 4.0}]) == "finished"


def test_skipped_steps_in_a_row_are_one_event() -> None:
    steps = np.arange(1, 1001)
    skipped, bad = np.zeros(1000, np.float32), np.zeros(1000, np.float32)
    skipped[[4, 5, 6, 99]], bad[99] = 1, 1
    first, second = from_skips(steps, skipped, bad)
    assert first.text == "3 updates were skipped at steps 5 to 7." and first.level == "notice" and first.iteration == 7
    assert second.text == "1 update was skipped at step 100. The loss or the gradient was not finite."
    assert list(from_skips(steps, np.empty(0), np.empty(0))) == [] == list(from_skips(steps, skipped * 0, bad * 0))
    skipped[::2] = 1
    assert len(list(from_skips(steps, skipped, bad))) == 200


def test_skips_stand_where_their_step_belongs() -> None:
    dated = [Event("start", "", iteration=0), Event("save", "", iteration=50), Event("resume", "", iteration=50)]
    skips = [Event("skip", "", iteration=20), Event("skip", "", iteration=60)]
    assert [event.kind for event in with_skips(dated, skips)] == ["start", "skip", "save", "resume", "skip"]
    assert with_skips([], skips) == skips
