"""Drawings of schedules: every computation is a box at its place, and the text says the same."""

from __future__ import annotations

import itertools
from xml.etree import ElementTree

import pytest

from megatron.config.sections.pipelines import SCHEDULE_CHUNKS
from megatron.parallel.schedule.actions import Schedule
from megatron.parallel.schedule.building import build_schedule
from tools.runs.schedule_drawing import svg, text_lines, timeline_of, title_of

NAMESPACE = "{http://www.w3.org/2000/svg}"


def small(name: str, chunks: int | None = None) -> Schedule:
    return build_schedule(name, 3, chunks or SCHEDULE_CHUNKS[name][0], 4)


@pytest.mark.parametrize("name", SCHEDULE_CHUNKS)
def test_every_computation_is_a_box_at_its_time(name: str) -> None:
    schedule = small(name)
    tree = ElementTree.fromstring(svg(schedule))
    boxes = [element for element in tree.iter(f"{NAMESPACE}rect") if element.get("class") == "box"]
    spans = timeline_of(schedule)
    assert len(boxes) == len(spans)
    rows: dict[float, list[tuple[float, float]]] = {}
    for box in boxes:
        left, width = float(box.get("x", "")), float(box.get("width", ""))
        rows.setdefault(float(box.get("y", "")), []).append((left, left + width))
    assert len(rows) == schedule.ranks
    unit = min(end - start for row in rows.values() for start, end in row)
    origin = min(start for row in rows.values() for start, _ in row)
    for rank, (_, row) in enumerate(sorted(rows.items())):
        drawn = sorted(((start - origin) / unit, (end - origin) / unit) for start, end in row)
        assert drawn == sorted((span.start, span.end) for span in spans if span.rank == rank)
        assert all(left[1] <= right[0] for left, right in itertools.pairwise(drawn))
    width = float(tree.get("viewBox", "").split()[2])
    assert all(end <= width for row in rows.values() for _, end in row)


def test_boxes_say_what_they_are() -> None:
    tree = ElementTree.fromstring(svg(small("zbv")))
    titles = [element.text for element in tree.iter(f"{NAMESPACE}title")]
    assert titles[0] == title_of(small("zbv")) == "zbv: 3 ranks x 2 chunks, 4 micro-batches, 7.7% idle"
    assert "gradients of the weights of chunk 5, micro-batch 3" in titles
    texts = {element.text for element in tree.iter(f"{NAMESPACE}text")}
    assert {"rank 2", "forward", "gradient of the input", "gradients of the weights", "paler: later chunk"} <= texts
    assert "backward" not in texts and "paler: later chunk" not in svg(small("1f1b"))


def test_lines_of_a_wide_terminal_have_micro_batches() -> None:
    lines = text_lines(build_schedule("1f1b", 2, 1, 2), 80)
    assert lines == [
        "1f1b: 2 ranks, 2 micro-batches, 33.3% idle",
        "rank 0 F0 F1 .  .  B0--- .  B1---",
        "rank 1 .  F0 B0--- F1 B1--- .  .",
        "F forward, B backward, . idle",
    ]


def test_lines_of_a_narrow_terminal_have_letters() -> None:
    lines = text_lines(small("v-1f1b"), 60)
    assert lines[1].startswith("rank 0 FFFF.fbbf")
    assert lines[-1].endswith(". idle; lower case: every second chunk of a rank")
    cut = text_lines(small("v-1f1b"), 20)
    assert all(len(line) <= 20 for line in cut[1:4])
    assert cut[-1].startswith("The terminal shows 13 of ") and "--draw FILE.svg draws all" in cut[-1]
