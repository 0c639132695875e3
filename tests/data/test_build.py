"""Datasets from flags: splits, blends, the plan, and extended runs."""

import dataclasses
import json

import numpy as np
import pytest

from megatron.config import DataConfig
from megatron.data.build import describe, empty_splits
from megatron.data.order.plan import DataPlan, segment_seed
from megatron.data.sources import source_kinds
from megatron.errors import ConfigError, DataError
from tests.data.corpora import GOLDEN_LENGTHS, write_corpus
from tests.data.datasets.token_datasets import SEQUENCE_LENGTH, build, config, rows_of


def test_a_split_gives_three_disjoint_ranges(tmp_path):
    prefix = write_corpus(tmp_path / "corpus", [10] * 100)
    datasets, plan = build(config(prefix, split="80,10,10"), (50, 5, 5))
    seen = [{token for row in rows_of(part) for token in row} for part in (datasets.train, datasets.valid["valid"])]
    assert max(seen[0]) < 800 <= min(seen[1]) and max(seen[1]) < 900
    sources = [group.sources[0] for group in (plan.train, *plan.valid, *plan.test)]
    assert [(source.first, source.last) for source in sources] == [(0, 80), (80, 90), (90, 100)]
    line = f"train: {prefix} [0, 80): 50 samples (100.00%, target 100.00%), 0.50 epochs of 800"
    assert describe(datasets, plan)[0].startswith(line)


def test_evaluation_without_sequences_or_samples_is_absent(corpus):
    datasets, _ = build(config(corpus, split="1,0,0"), (9, 5, 5))
    assert datasets.valid == {} and datasets.test == {}
    datasets, _ = build(config(corpus, split="5,3,2"), (0, 2, 0))
    assert datasets.train is None and list(datasets.valid) == ["valid"] and datasets.test == {}


def test_a_split_that_was_asked_for_and_is_empty_is_named(tmp_path, corpus):
    prefix = write_corpus(tmp_path / "two", [10, 10])
    data = config(prefix, split="969, 30, 1")
    valid, test = empty_splits(data, build(data, (2, 2, 2))[1])
    asked = f"--split 969,30,1 gives it none of the sequences of --data-path {prefix} (2 are"
    assert valid.startswith(f"the valid split is empty: {asked}")
    assert "--valid-data-path" in valid and "--eval-iters 0" in valid and test.startswith("the test split is empty")
    for split in ("1,0,0", "5,3,2"):
        data = config(corpus, split=split)
        assert empty_splits(data, build(data, (2, 2, 2))[1]) == []
    data = config(corpus, split="1,0,0")
    (found,) = empty_splits(data, build(data, (2, 2, 2))[1], is_evaluated=True)
    assert found.startswith("no validation data (--split 1,0,0 gives it no share), so validation is skipped")
    data = DataConfig(seq_length=8, train_data_path=(corpus,))
    (found,) = empty_splits(data, build(data, (2, 2, 2))[1], is_evaluated=True)
    assert found.startswith("no validation data (none is named), so validation is skipped although --eval-inter")
    valid = (f"v: 1 0:0.1 {prefix}", f"w: 1 0:1 {prefix}")
    data = DataConfig(
        seq_length=8, train_weighted_split_paths=(f"t: 1 0:0.9 {prefix}",), valid_weighted_split_paths=valid
    )
    (found,) = empty_splits(data, build(data, (2, 2, 2))[1])
    assert found.startswith("the valid group v is empty: the ranges of its sources contain no sequence")


@pytest.mark.parametrize(("first", "then"), [(9, 12), (9, 40), (5, 9), (22, 23), (1, 200)])
def test_an_extended_run_continues_where_the_planned_order_ends(corpus, first, then):
    """Token by token: the old samples keep their places; each segment then uses every sample of whole epochs once."""
    data = config(corpus)
    short, plan = build(data, (first, 0, 0))
    stored = DataPlan.from_json(json.loads(json.dumps(plan.to_json())))
    long, extended = build(data, (then, 0, 0), plan=stored)
    assert len(long.train) >= then
    assert rows_of(long.train)[: len(short.train)] == rows_of(short.train)
    start = 0
    for number, segment in enumerate(extended.train.sources[0].segments):
        inputs = np.array([row[:-1] for row in rows_of(long.train, start, start + segment.rows)])
        start += segment.rows
        epochs = -(-(segment.samples * SEQUENCE_LENGTH + 1) // 80)
        counts = np.bincount(inputs.ravel(), minlength=80)
        # Whole epochs hold each of the 80 tokens once an epoch, except the end that fills no sample.
        assert segment.seed == segment_seed(1234, number)
        assert counts.max() <= epochs and counts.sum() == (epochs * 80 - 1) // SEQUENCE_LENGTH * SEQUENCE_LENGTH
        assert (epochs - counts).sum() <= SEQUENCE_LENGTH
    assert start == len(long.train)


def test_a_blend_follows_the_greedy_order_and_can_be_extended(tmp_path):
    prefixes = [write_corpus(tmp_path / f"part{k}", [11, 5, 17] * 4, first_id=1000 * k) for k in range(3)]
    data = config("5", prefixes[0], "3", prefixes[1], "2", prefixes[2])
    datasets, plan = build(data, (12, 0, 0))
    assert [row[0] // 1000 for row in rows_of(datasets.train)] == [0, 1, 2, 0, 1, 0, 2, 0, 1, 0, 0, 1]
    assert plan.train.phases[0].weights == [0.5, 0.3, 0.2]
    assert [source.segments[0].samples for source in plan.train.sources] == [7, 4, 3]
    assert datasets.train.source_of(2) == 2 and "part2.bin" in datasets.train.locate(2, 0)
    longer, extended = build(data, (500, 0, 0), plan=plan)
    assert rows_of(longer.train)[:12] == rows_of(datasets.train)
    assert np.bincount([row[0] // 1000 for row in rows_of(longer.train)]).tolist() == [250, 150, 100]
    for number, source in enumerate(extended.train.sources):
        alone = [row for row in rows_of(longer.train) if row[0] // 1000 == number]
        first_segment = alone[: source.segments[0].rows]
        assert len({tuple(row) for row in first_segment}) == len(first_segment)
    lines = describe(longer, extended)
    assert len(lines) == 3 and "150 samples (30.00%, target 30.00%)" in lines[1]


def test_a_source_without_sequences_is_skipped_and_its_weight_redistributed(tmp_path, capsys):
    large = write_corpus(tmp_path / "large", [10] * 100)
    small = write_corpus(tmp_path / "small", [10], first_id=5000)
    other = write_corpus(tmp_path / "other", [10] * 100, first_id=9000)
    datasets, plan = build(config("2", large, "6", small, "2", other, split="90,10,0"), (10, 4, 0))
    assert [source.prefix for source in plan.valid[0].sources] == [large, other]
    assert plan.valid[0].phases[0].weights == [0.5, 0.5]
    assert len(datasets.valid["valid"]) == 4
    assert "small has no tokens in its range [1, 1) and is skipped" in capsys.readouterr().err


def test_sources_without_weights_are_mixed_by_their_tokens(tmp_path, capsys):
    long, short, single = (
        write_corpus(tmp_path / name, [20] * count) for name, count in (("l", 6), ("s", 2), ("x", 1))
    )
    datasets, plan = build(config(long, short, single, split="1,1,0"), samples=(12, 2, 0))
    assert [member.weight for member in plan.train.phases[0].members] == [0.6, 0.2, 0.2]  # 60, 20 and 20 tokens
    assert [member.weight for member in plan.valid[0].phases[0].members] == [0.75, 0.25]
    assert "x has no tokens in its range [1, 1) and is skipped." in capsys.readouterr().err
    separate = build(DataConfig(seq_length=8, train_data_path=(long, single)), samples=(7, 0, 0))[1]
    assert [member.weight for member in separate.train.phases[0].members] == [6 / 7, 1 / 7]
    assert len(datasets.train) == 12
    assert build(config(long, short, single, split="1,1,0"), plan=plan)[1].train == plan.train


def test_weighted_groups_have_names_and_ranges(tmp_path):
    first = write_corpus(tmp_path / "first", [10] * 10)
    second = write_corpus(tmp_path / "second", [10] * 10, first_id=1000)
    data = DataConfig(
        seq_length=8,
        train_weighted_split_paths=(f"MAIN: 0.7 0:0.8 {first}, 0.3 0:1 {second}",),
        valid_weighted_split_paths=(f"WEB: 1 0.8:0.9 {first}", f"BOOKS: 1 0.9:1 {first}, 1 0:1 {second}"),
    )
    datasets, plan = build(data, (10, 2, 2))
    assert plan.train.name == "MAIN" and list(datasets.valid) == ["WEB", "BOOKS"] and datasets.test == {}
    assert {token for row in rows_of(datasets.valid["WEB"]) for token in row} <= set(range(80, 90))
    twice = dataclasses.replace(data, valid_weighted_split_paths=(f"A: 1 0:1 {first}", f"A: 1 0:1 {second}"))
    with pytest.raises(ConfigError, match="weighted groups A, A share a name"):
        build(twice)


def test_evaluation_uses_the_same_samples_when_the_run_is_extended(tmp_path):
    data = config(write_corpus(tmp_path / "corpus", [10] * 100), split="80,20,0")
    short, plan = build(data, (9, 4, 0))
    longer, _ = build(data, (900, 30, 0), plan=plan)
    assert rows_of(longer.valid["valid"], 0, 4) == rows_of(short.valid["valid"], 0, 4)


def test_a_plan_moves_with_its_files_but_not_to_other_data(tmp_path):
    prefix = write_corpus(tmp_path / "corpus", GOLDEN_LENGTHS)
    datasets, plan = build(config(prefix))
    moved = write_corpus(tmp_path / "moved", GOLDEN_LENGTHS)
    again, after = build(config(moved), plan=plan)
    assert rows_of(again.train) == rows_of(datasets.train) and after.train.sources[0].prefix == moved
    other = write_corpus(tmp_path / "other", [9] * 10)
    with pytest.raises(DataError, match=r"differs from the run to resume: .*corpus \[0, 10\) .*other .*--finetune"):
        build(config(other), plan=plan)
    with pytest.raises(DataError, match="this run has none"):
        build(DataConfig(seq_length=8), (0, 0, 0), plan=plan)
    with pytest.raises(DataError, match="planned with --seq-length 8, this run has --seq-length 16"):
        build(config(prefix), plan=plan, sequence_length=16)
    with pytest.raises(DataError, match="planned with --seed 1234, this run has --seed 1"):
        build(config(prefix), plan=plan, seed=1)


def test_evaluation_data_may_change_on_a_resume(tmp_path, capsys):
    train = write_corpus(tmp_path / "train", [10] * 10)
    first = write_corpus(tmp_path / "first", [10] * 10)
    second = write_corpus(tmp_path / "second", [11] * 10)
    _, plan = build(DataConfig(seq_length=8, train_data_path=(train,), valid_data_path=(first,)), (9, 3, 0))
    datasets, after = build(
        DataConfig(seq_length=8, train_data_path=(train,), valid_data_path=(second,)), (9, 3, 0), plan=plan
    )
    assert after.valid[0].sources[0].prefix == second and len(datasets.valid["valid"]) >= 3
    assert "the evaluation data valid changed" in capsys.readouterr().err


def test_the_order_is_that_of_the_stored_epoch_rule(corpus):
    _, plan = build(config(corpus, index_epoch_rule="nvidia"), (16, 0, 0))
    datasets, after = build(config(corpus), (16, 0, 0), plan=plan)
    nvidia, _ = build(config(corpus, index_epoch_rule="nvidia"), (16, 0, 0))
    assert after.epoch_rule == "nvidia" and rows_of(datasets.train) == rows_of(nvidia.train)


def test_training_without_data_reports_what_is_missing(tmp_path):
    with pytest.raises(DataError, match="No training data. Name it with --data-path"):
        build(DataConfig(seq_length=8))
    prefix = write_corpus(tmp_path / "corpus", [10])
    with pytest.raises(DataError, match="No tokens are left for training: --data-path .* with --split 0,1,0"):
        build(config(prefix, split="0,1,0"))
    empty = write_corpus(tmp_path / "empty", [0, 0, 0])
    with pytest.raises(DataError, match=r"No tokens are left for training: --data-path .*empty with"):
        build(config(empty))


def test_a_split_of_empty_documents_is_left_out(tmp_path, capsys):
    prefix = write_corpus(tmp_path / "corpus", [100, 0])
    datasets, plan = build(config(prefix, split="1,1,0"))
    assert datasets.train is not None and plan.valid == () == tuple(datasets.valid)
    assert "valid: " in (said := capsys.readouterr().err)
    assert f"{prefix} has no tokens in its range [1, 2) and is skipped." in said
    both = config("1", prefix, "3", write_corpus(tmp_path / "other", [0, 100]), split="1,1,0")
    assert [group.sources[0].prefix for group in (build(both)[1].train, *build(both)[1].valid)] == [
        prefix, str(tmp_path / "other"),
    ]  # fmt: skip
    assert "and is skipped; its weight 3 is shared by the others" in capsys.readouterr().err


def test_the_other_processes_load_what_the_first_built(tmp_path, corpus, monkeypatch):
    data = config(corpus, data_cache_path=str(tmp_path / "cache"))
    first, _ = build(data, (30, 0, 0))
    monkeypatch.setattr(source_kinds, "build_indices", lambda *arguments: pytest.fail("the index is built twice"))
    second, _ = build(data, (30, 0, 0), build_indices=False)
    assert rows_of(first.train) == rows_of(second.train)
    assert not (tmp_path / "index-cache").exists()


def test_two_nodes_with_folders_of_their_own_have_the_same_order(tmp_path, corpus):
    first, _ = build(config(corpus, data_cache_path=str(tmp_path / "node1")), (30, 0, 0))
    second, _ = build(config(corpus, data_cache_path=str(tmp_path / "node2")), (30, 0, 0), build_indices=False)
    assert rows_of(first.train) == rows_of(second.train)


def test_a_file_of_floats_is_not_a_token_file(tmp_path, corpus):
    idx = bytearray((tmp_path / "corpus.idx").read_bytes())
    idx[17] = 7
    (tmp_path / "corpus.idx").write_bytes(idx)
    with pytest.raises(DataError, match="holds float32 values; token ids must be integers"):
        build(config(corpus))
