"""The data plan: extended, never reordered, and the same after JSON."""

import json
from dataclasses import replace

import pytest

from megatron.data.order.plan import DataPlan, GroupPlan, Phase, PhaseMember, SourcePlan, segment_seed
from megatron.errors import DataError

SOURCES = (SourcePlan("a/web", "f" * 64, 0, 100, 1000), SourcePlan("b/web", "e" * 64, 5, 25, 200, is_rows=True))
GROUP = GroupPlan("train", SOURCES, (Phase(0, (PhaseMember(0, 0.75), PhaseMember(1, 0.25))),))
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


def test_the_samples_of_a_mapped_source_are_counted_by_its_map() -> None:
    """`map_rows` is asked for the missing samples and the seed of each segment; the plan keeps its answer."""
    mapped = SourcePlan("c/bert", "d" * 64, 0, 10, 96, is_mapped=True)
    group = GroupPlan("train", (mapped,), (Phase(0, (PhaseMember(0, 1.0),), blended=False),))
    asked: list[tuple[int, int]] = []

    def map_rows(source: SourcePlan, samples: int, seed: int) -> int:
        asked.append((samples, seed))
        return samples + 3

    plan = replace(PLAN, train=group, test=()).extended((20, 0, 0), map_rows).extended((30, 0, 0), map_rows)
    assert asked == [(20, 1234), (7, segment_seed(1234, 1))] and plan.pass_samples == 12
    assert plan.train is not None and [part.rows for part in plan.train.sources[0].segments] == [23, 10]
    value = json.loads(json.dumps(plan.to_json()))
    assert DataPlan.from_json(value) == plan
    value["train"]["sources"][0]["segments"][0]["samples"] = 2**31
    with pytest.raises(DataError, match="a segment of 2147483648 samples has 23 rows"):
        DataPlan.from_json(value)


def test_a_plan_without_phases_is_read() -> None:
    older = PLAN.to_json() | {"format_version": 1, "test": []}
    group = dict(older["train"], blended=True)
    group.pop("phases")
    group["sources"] = [dict(source, weight=0.5) for source in group["sources"]]
    read = DataPlan.from_json({**older, "train": group}).train
    assert read is not None and read.phases == (Phase(0, (PhaseMember(0, 0.5), PhaseMember(1, 0.5))),)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"format_version": 9}, "has format 9; this version reads 1 and 2"),
        ({"seed": "x"}, r"incomplete \(ValueError: seed is 'x', not an integer from 0 to 4294967295\)"),
        ({"seed": True}, "seed is True, not an integer"),
        ({"seed": 2**32}, "seed is 4294967296, not an integer"),
        ({"format_version": True}, "has format True; this version reads"),
        ({"epoch_rule": 0}, "epoch_rule is 0, not a string"),
        ({"epoch_rule": "x\x1b[2J"}, r"epoch_rule is 'x\\x1b\[2J', not one of bigscience, nvidia"),
        ({"sequence_length": 0}, "sequence_length is 0, not an integer from 1"),
        ({"valid": None}, "valid is None, not a list"),
        ({"test": [3]}, r"incomplete \(TypeError"),
        ({"train": {"name": "train", "sources": [], "phases": [], "samples": 0}}, "group train has 0 phases"),
    ],
)
def test_a_plan_that_cannot_be_read_is_named(change: dict[str, object], text: str) -> None:
    with pytest.raises(DataError, match=text):
        DataPlan.from_json({**PLAN.to_json(), **change})


HOSTILE_GROUPS: list[tuple[tuple[object, ...], object, str]] = [
    (("samples",), 2**31, r"a phase takes 2147483648 samples from sources that have \d+"),
    (("samples",), 2**60, "samples is 1152921504606846976, not an integer"),
    (("samples",), 1.5, "samples is 1.5, not an integer"),
    (("name",), 5, "name is 5, not a string"),
    (("sources",), {}, "sources is {}, not a list"),
    (("sources", 0, "segments", 0, "samples"), 2**31, "a segment of 2147483648 samples has 124 rows, but its source"),
    (("sources", 0, "segments", 0, "rows"), 2**31, r"a segment of \d+ samples has 2147483648 rows, but its source"),
    (("sources", 1, "segments", 0, "rows"), 41, r"a segment of \d+ samples has 41 rows, but its source provides 40"),
    (("sources", 0, "tokens"), 1, "a segment of"),
    (("sources", 0, "tokens"), 0, "tokens is 0, not an integer from 1"),
    (("sources", 0, "first"), 100, r"a source has the range \[100, 100\)"),
    (("sources", 1, "is_rows"), 1, "is_rows is 1, not true or false"),
    (("sources", 0, "prefix"), None, "prefix is None, not a string"),
    (("phases", 0, "first"), 7, r"a phase spans samples 7 to|the first phase begins at sample 7"),
    (("phases", 0, "members"), [], r"a phase spans samples 0 to \d+ with 0 sources"),
    (("phases", 0, "consumed"), [0, 0, 0], "the weights of a phase sum to 1"),
    (("phases", 0, "consumed"), [10**6], "a phase takes"),
    (("phases", 0, "consumed"), ["x"], "consumed is 'x', not an integer"),
    (("phases", 0, "members", 0, "weight"), -1, "weight is -1, not a non-negative number"),
    (("phases", 0, "members", 0, "weight"), 7, "the weights of a phase sum to 7.25"),
    (("phases", 0, "members", 0, "weight"), True, "weight is True, not a non-negative number"),
    (("phases", 0, "members", 0, "source"), 2, "group train has 1 phases, which must refer to its 2 sources"),
    (("phases", 0, "blended"), 0, "blended is 0, not true or false"),
]


@pytest.mark.parametrize(("place", "entry", "text"), HOSTILE_GROUPS, ids=range(len(HOSTILE_GROUPS)))
def test_a_plan_that_contradicts_itself_is_refused_at_once(place: tuple[object, ...], entry: object, text: str) -> None:
    """A count alone must not make the next run build an order of billions of samples."""
    value = json.loads(json.dumps(PLAN.extended((100, 0, 7)).to_json()))
    holder = value["train"]
    for key in place[:-1]:
        holder = holder[key]
    holder[place[-1]] = entry
    with pytest.raises(DataError, match=text):
        DataPlan.from_json(value)


def test_an_epoch_takes_what_all_sources_make_in_one_pass() -> None:
    assert [source.pass_samples(8) for source in SOURCES] == [124, 20]
    assert [PLAN.epoch_of(consumed) for consumed in (0, 1, 144, 145, 288, 289)] == [0, 0, 0, 1, 1, 2]
    assert replace(PLAN, train=None).epoch_of(7) == 0
