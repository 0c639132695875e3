"""A blend that changes at a resume: what was consumed stays consumed, of every source."""

import dataclasses
import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.config import DataConfig
from megatron.data.build import build_split_datasets, describe
from megatron.data.order.index_map import plan_epochs
from megatron.data.order.plan import DataPlan, Phase, PhaseMember
from megatron.data.sources.source import DataRequest
from megatron.errors import DataError
from tests.data.corpora import write_corpus

SEQUENCE_LENGTH = 8
DOCUMENTS = [11, 5, 17, 8] * 30  # 1230 tokens, 153 samples an epoch


def build(data: DataConfig, samples: int, plan=None, consumed: int = 0):
    stored = plan and DataPlan.from_json(json.loads(json.dumps(plan.to_json())))
    return build_split_datasets(DataRequest(data, SEQUENCE_LENGTH, 1234, (samples, 0, 0), stored, consumed=consumed))


def blend(*words: str, change: bool = True) -> DataConfig:
    return DataConfig(seq_length=SEQUENCE_LENGTH, data_path=words, split="1,0,0", change_data_blend=change)


@pytest.fixture
def prefixes(tmp_path: Path) -> list[str]:
    return [write_corpus(tmp_path / f"part{k}", DOCUMENTS, first_id=10_000 * k) for k in range(4)]


def rows_of(dataset, first: int, last: int) -> list[list[int]]:
    return [dataset[sample].tolist() for sample in range(first, last)]


def of_source(rows, number: int) -> list[list[int]]:
    return [row for row in rows if row[0] // 10_000 == number]


def counts_of(rows) -> list[int]:
    return np.bincount([row[0] // 10_000 for row in rows], minlength=4).tolist()


def test_a_resume_in_the_new_phase_and_one_before_it_give_the_same_order(prefixes):
    _, plan = build(blend("3", prefixes[0], "1", prefixes[1]), 40)
    then = blend("1", prefixes[1], "1", prefixes[2])
    once, changed = build(then, 100, plan, consumed=40)
    later, kept = build(blend("1", prefixes[1], "1", prefixes[2], change=False), 100, changed, consumed=60)
    assert kept == changed
    again, repeated = build(then, 100, plan, consumed=40)
    assert repeated == changed
    assert rows_of(later.train, 60, 100) == rows_of(once.train, 60, 100) == rows_of(again.train, 60, 100)
    longer, _ = build(then, 400, changed, consumed=60)
    assert rows_of(longer.train, 60, 100) == rows_of(once.train, 60, 100)


def test_a_removed_source_is_remembered(prefixes, capsys):
    first, plan = build(blend("1", prefixes[0], "1", prefixes[1]), 20)
    second, without = build(blend(prefixes[0]), 30, plan, consumed=20)
    for suffix in (".idx", ".bin"):
        shutil.move(prefixes[1] + suffix, prefixes[1] + "-away" + suffix)
    third, back = build(blend("1", prefixes[0], "3", prefixes[1] + "-away"), 50, without, consumed=30)
    assert [phase.first for phase in back.train.phases] == [0, 20, 30]
    assert back.train.phases[2].consumed == (20, 10) and back.train.sources[1].prefix.endswith("-away")
    rows = rows_of(first.train, 0, 20) + rows_of(second.train, 20, 30) + rows_of(third.train, 30, 50)
    assert counts_of(rows) == [25, 25, 0, 0] and len({tuple(row) for row in rows}) == 50
    text = capsys.readouterr().err
    assert (
        f"changes at sample 20: {prefixes[0]} (0.5 -> 1) continues after 10 of its samples; {prefixes[1]} is removed"
        in text
    )
    assert (
        f"changes at sample 30: {prefixes[0]} (1 -> 0.25) continues after 20 of its samples; {prefixes[1]}-away" in text
    )


def test_the_lines_before_step_1_count_earlier_phases(prefixes):
    _, plan = build(blend("1", prefixes[0], "1", prefixes[1]), 100)
    datasets, changed = build(blend("1", prefixes[0], "3", prefixes[2]), 200, plan, consumed=100)
    lines = describe(datasets, changed)
    assert lines[0] == (
        f"train from sample 100 on: {prefixes[0]} [0, 120): 25 samples (25.00%, target 25.00%) after 50, 0.49 epochs "
        "of 1,230 tokens"
    )
    assert len(lines) == 2 and "75 samples (75.00%, target 75.00%), 0.49 epochs" in lines[1]


def test_data_of_an_earlier_phase_is_opened_only_when_needed(prefixes):
    first, plan = build(blend("1", prefixes[0], "1", prefixes[1]), 20)
    _, changed = build(blend("1", prefixes[0], "1", prefixes[2]), 40, plan, consumed=20)
    everything, _ = build(blend("1", prefixes[0], "1", prefixes[2]), 40, changed)
    assert rows_of(everything.train, 0, 20) == rows_of(first.train, 0, 20)
    assert "part1.bin" in everything.train.locate(1, 0) and everything.train.source_of(1) == 1
    Path(prefixes[1] + ".bin").unlink()
    later, _ = build(blend("1", prefixes[0], "1", prefixes[2]), 40, changed, consumed=20)
    with pytest.raises(DataError, match="Sample 19 was consumed before the blend changed at sample 20"):
        later.train[19]
    with pytest.raises(IndexError, match="Sample 40 is out of range: 40 samples are planned"):
        later.train[40]


def test_a_change_without_the_flag_is_refused(prefixes):
    _, plan = build(blend("3", prefixes[0], "1", prefixes[1]), 20)
    message = r"it had 0\.75 × .*part0 .*this run has 0\.5 × .*add --change-data-blend to continue .*--finetune"
    with pytest.raises(DataError, match=message):
        build(blend("1", prefixes[0], "1", prefixes[1], change=False), 40, plan, consumed=20)


def test_a_plan_that_counts_other_tokens_than_the_data_has_is_refused(prefixes):
    _, plan = build(blend(prefixes[0]), 20)
    (source,) = plan.train.sources
    rows = plan_epochs(source.tokens + 1000, SEQUENCE_LENGTH, source.segments[0].samples, "bigscience").samples
    segment = replace(source.segments[0], rows=rows)
    forged = replace(plan.train, sources=(replace(source, tokens=source.tokens + 1000, segments=(segment,)),))
    with pytest.raises(DataError, match=r"lists .*part0 \[0, 120\) with 2230 tokens, but it holds 1230\."):
        build(blend(prefixes[0]), 40, replace(plan, train=forged), consumed=20)


def test_the_same_blend_in_another_order_or_location_is_not_a_change(prefixes, tmp_path):
    first, plan = build(blend("3", prefixes[0], "1", prefixes[1], "2", prefixes[2], change=False), 20)
    moved = write_corpus(tmp_path / "moved", DOCUMENTS)
    words = ("2", prefixes[2], "1", prefixes[1], "3", moved)
    second, kept = build(blend(*words, change=False), 20, plan, consumed=10)
    assert len(kept.train.phases) == 1 and kept.train.sources[0].prefix == moved
    assert rows_of(second.train, 0, 20) == rows_of(first.train, 0, 20)


def test_a_source_named_twice_remains_two_sources(prefixes):
    datasets, plan = build(blend("1", prefixes[0], "1", prefixes[0]), 20)
    assert plan.train.source_names() == ("part0", "part0#2")
    assert "part0 (in the log: part0#2) [0, 120)" in describe(datasets, plan)[1]
    _, changed = build(blend("1", prefixes[0], "3", prefixes[0]), 40, plan, consumed=20)
    assert len(changed.train.sources) == 2 and changed.train.phases[1].consumed == (10, 10)


def test_a_change_before_the_first_sample_or_twice_at_one_place_leaves_no_empty_phase(prefixes):
    _, plan = build(blend("1", prefixes[0], "1", prefixes[1]), 20)
    _, changed = build(blend("1", prefixes[0], "3", prefixes[1]), 20, plan)
    assert [phase.first for phase in changed.train.phases] == [0] and changed.train.phases[0].weights == [0.25, 0.75]
    _, once = build(blend("1", prefixes[0], "3", prefixes[1]), 40, plan, consumed=20)
    _, twice = build(blend("1", prefixes[0], "4", prefixes[2]), 40, once, consumed=20)
    assert [phase.first for phase in twice.train.phases] == [0, 20]
    assert twice.train.phases[1].consumed[:2] == (10, 10) and twice.train.phases[1].weights == [0.2, 0.8]


def test_another_range_of_a_file_is_another_source_and_the_line_says_so(prefixes, capsys):
    def ranges(text: str) -> DataConfig:
        return DataConfig(
            seq_length=SEQUENCE_LENGTH,
            train_weighted_split_paths=(f"A: 1 {text} {prefixes[0]}",),
            change_data_blend=True,
        )

    _, plan = build(ranges("0:0.5"), 20)
    _, changed = build(ranges("0:1"), 40, plan, consumed=20)
    assert len(changed.train.sources) == 2 and changed.train.phases[1].consumed == (20,)
    assert "begins at its first sample (its range was [0, 60): the overlap may repeat)" in capsys.readouterr().err


@pytest.fixture(scope="module")
def shared_prefixes(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("shared")
    return [write_corpus(folder / f"part{k}", DOCUMENTS, first_id=10_000 * k) for k in range(3)]


@settings(max_examples=25, deadline=None)
@given(
    steps=st.lists(
        st.tuples(st.lists(st.integers(0, 4), min_size=3, max_size=3).filter(any), st.integers(0, 120)),
        min_size=1,
        max_size=5,
    )
)
def test_any_changes_read_every_source_in_one_order_without_gaps(shared_prefixes, steps):
    """Each step trains a number of samples with these weights (0: not used), then stops."""
    plan, consumed, rows = None, 0, []
    for weights, samples in steps:
        pairs = zip(weights, shared_prefixes, strict=True)
        words = [word for weight, prefix in pairs if weight for word in (str(weight), prefix)]
        datasets, plan = build(blend(*words), consumed + samples + 30, plan, consumed)
        rows += rows_of(datasets.train, consumed, consumed + samples)
        consumed += samples
    for number, prefix in enumerate(shared_prefixes):
        taken = of_source(rows, number)
        source = next((source for source in plan.train.sources if source.prefix == prefix), None)
        if source is None or not source.segments:
            assert taken == []
            continue
        # the source alone, planned in the same steps, has the order that it must have had
        whole = dataclasses.replace(
            plan.train,
            sources=(source,),
            phases=(Phase(0, (PhaseMember(0, 1.0),), blended=False),),
            samples=source.rows,
        )
        stored = dataclasses.replace(plan, train=whole)
        order = build(blend(prefix, change=False), source.rows, stored)[0].train
        assert taken == rows_of(order, 0, len(taken))
