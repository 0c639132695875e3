"""The data plan: extended, never reordered, and the same after JSON."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from megatron.data.order.plan import DataPlan, GroupPlan, Member, Phase, Segment, SourcePlan, segment_seed
from megatron.errors import DataError

SOURCES = (SourcePlan("a/web", "f" * 64, 0, 100, 1000), SourcePlan("b/web", "e" * 64, 5, 25, 200, is_rows=True))
GROUP = GroupPlan("train", SOURCES, (Phase(0, (Member(0, 0.75), Member(1, 0.25))),))
PLAN = DataPlan(8, 1234, "bigscience", GROUP, (), (replace(GROUP, name="test"),))


def test_a_plan_round_trips_through_json() -> None:
    plan = PLAN.extended((50, 0, 7))
    assert DataPlan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


def test_extending_appends_segments_with_seeds_of_their_own() -> None:
    first = PLAN.extended((50, 0, 0))
    longer = first.extended((5000, 0, 0))
    for before, after in zip(first.train.sources, longer.train.sources, strict=True):  # type: ignore[union-attr]
        assert after.segments[: len(before.segments)] == before.segments
        assert [segment.seed for segment in after.segments] == [segment_seed(1234, n) for n in range(2)]
    assert longer.extended((10, 0, 0)) == longer
    assert segment_seed(1234, 0) == 1234 and segment_seed(1234, 1) != segment_seed(1235, 1)


def test_a_row_source_is_planned_in_whole_epochs() -> None:
    rows = PLAN.extended((90, 0, 0)).train.sources[1]  # type: ignore[union-attr]
    assert rows.rows == 40 and rows.segments == (Segment(23, 1234, 40),)


def test_phases_have_lengths_and_sources_have_names() -> None:
    group = replace(GROUP, phases=(*GROUP.phases, Phase(30, GROUP.phases[0].members, (22, 8))), samples=100)
    assert (group.length_of(0), group.length_of(1)) == (30, 70)
    assert group.phases[1].consumed_of(1) == 8 and group.phases[0].consumed_of(1) == 0
    assert group.source_names() == ("web", "web#2")


def test_a_plan_without_phases_is_read() -> None:
    older = PLAN.to_json() | {"format_version": 1, "test": []}
    group = dict(older["train"], blended=True)
    group.pop("phases")
    group["sources"] = [dict(source, weight=0.5) for source in group["sources"]]
    read = DataPlan.from_json({**older, "train": group}).train
    assert read is not None and read.phases == (Phase(0, (Member(0, 0.5), Member(1, 0.5))),)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"format_version": 9}, "has format 9; this version reads 1 and 2"),
        ({"seed": "x"}, r"incomplete \(ValueError: invalid literal"),
        ({"train": {"name": "train", "sources": [], "phases": [], "samples": 0}}, "group train has 0 phases"),
    ],
)
def test_a_plan_that_cannot_be_read_is_named(change: dict[str, object], text: str) -> None:
    with pytest.raises(DataError, match=text):
        DataPlan.from_json({**PLAN.to_json(), **change})
