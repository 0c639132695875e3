"""Packed pairs of inputs and targets: tokens, segments, masks, splits, resumption, and what is refused.

The fields and what holds of them are those of upstream's `test_decoder_packed_mtf_dataloader` and
`test_finetune_t0_non_causal_decoder_get_batch_pipe`.
"""

import dataclasses
import itertools
from pathlib import Path

import numpy as np
import pytest

from megatron.config import DataConfig
from megatron.data.build import (
    SplitDatasets,
    build_split_datasets,
    check_sources,
)
from megatron.data.formats.sidecar import Sidecar
from megatron.data.loader import BatchOptions
from megatron.data.order.plan import DataPlan, GroupPlan, Phase, PhaseMember
from megatron.data.sources.pairs import TokenPairs
from megatron.data.sources.source import DataRequest, SourceUse
from megatron.data.sources.source_kinds import open_source
from megatron.errors import ConfigError, DataError
from megatron.tokenizers.record import TokenizerRecord
from tests.data.corpora import write_corpus
from tests.data.samples import micro_batches
from tests.data.sidecars import write_sidecar
from tests.data.token_pairs import TARGET, token_ids, write_pairs

LENGTH = 16
DRAWN = np.random.default_rng(3)
LENGTHS = [(int(inputs), int(targets)) for inputs, targets in DRAWN.integers(1, 6, (40, 2))]
OPTIONS = BatchOptions(eod_id=0, segments=True, prefixes=True)


@pytest.fixture
def pairs(tmp_path: Path) -> str:
    return write_pairs(tmp_path / "tasks", LENGTHS)


def _build(prefix, samples=(20, 0, 0), plan=None, seed=1234, **flags) -> tuple[SplitDatasets, DataPlan]:
    data = DataConfig(seq_length=LENGTH, data_path=(prefix,), **{"split": "1,0,0", **flags})
    return build_split_datasets(DataRequest(data, LENGTH, seed, samples, plan))


def _pairs_of(tokens: np.ndarray) -> list[int]:
    """The pairs of a row in their order."""
    numbers = tokens[tokens >= TARGET] // 100 - TARGET // 100 - 1
    return list(dict.fromkeys(numbers.tolist()))


def test_a_row_holds_whole_pairs_and_its_masks_say_which(pairs: str) -> None:
    (datasets, plan) = _build(pairs)
    seen: list[int] = []
    assert plan.train is not None
    epoch = plan.train.sources[0].last
    for batch in micro_batches(datasets.train, epoch - epoch % 2, 2, options=OPTIONS):
        assert batch.tokens.dtype == batch.segment_ids.dtype == np.int64
        assert batch.prefix_mask.dtype == np.bool_ and batch.loss_mask.dtype == np.float32
        for row in range(2):
            text = np.append(batch.tokens[row], batch.labels[row, -1])
            members = _pairs_of(text)
            seen += members
            expected, segments, inputs, targets = [], [], [], []
            for number, pair in enumerate(members):
                for part in (0, 1):
                    ids = token_ids(pair, part, LENGTHS[pair][part]).tolist()
                    expected += ids
                    segments += [number] * len(ids)
                    inputs += [part == 0] * len(ids)
                    targets += [part == 1] * len(ids)
            padding = LENGTH + 1 - len(expected)
            assert text.tolist() == expected + [0] * padding
            assert batch.segment_ids[row].tolist() == (segments + [len(members)] * padding)[:-1]
            assert batch.prefix_mask[row].tolist() == (inputs + [False] * padding)[:-1]
            assert batch.loss_mask[row].tolist() == (targets + [False] * padding)[1:]
    assert len(set(seen)) == len(seen)


def test_rows_are_packed_greedily(pairs: str) -> None:
    datasets, plan = _build(pairs)
    assert plan.train is not None and datasets.train is not None
    rows = plan.train.sources[0].last
    assert rows < len(LENGTHS) / 1.5
    order = [_pairs_of(datasets.train[sample]) for sample in range(rows)]
    assert sorted(pair for row in order for pair in row) == list(range(len(LENGTHS)))
    sizes = [sum(map(sum, (LENGTHS[pair] for pair in row))) for row in order]
    in_file = sorted(range(rows), key=lambda place: _packed_place(order[place]))
    for earlier, later in itertools.pairwise(in_file):
        assert sizes[earlier] + sum(LENGTHS[order[later][0]]) > LENGTH + 1


def _packed_place(members: list[int]) -> int:
    order = np.arange(len(LENGTHS))
    np.random.RandomState(1234).shuffle(order)
    return order.tolist().index(members[0])


def test_splits_divide_pairs_not_rows(pairs: str) -> None:
    datasets, _ = _build(pairs, (5, 2, 2), split="70,20,10")
    parts = [datasets.train, datasets.valid["valid"], datasets.test["test"]]
    found = [{pair for sample in range(len(part)) for pair in _pairs_of(part[sample])} for part in parts if part]
    assert [(min(part), max(part)) for part in found] == [(0, 27), (28, 35), (36, 39)]


def test_a_longer_run_continues_the_stored_order(pairs: str) -> None:
    short, plan = _build(pairs, (10, 0, 0))
    longer, extended = _build(pairs, (200, 0, 0), DataPlan.from_json(plan.to_json()))
    assert short.train is not None and longer.train is not None and extended.train is not None
    assert len(extended.train.sources[0].segments) == 2
    for sample in range(len(short.train)):
        assert np.array_equal(short.train[sample], longer.train[sample])
    with pytest.raises(DataError, match="The training data differs from the run to resume"):
        _build(pairs, (10, 0, 0), plan, split="50,50,0")


def test_another_length_or_seed_is_another_packing(pairs: str, tmp_path: Path) -> None:
    rows = {}
    for length, seed in ((LENGTH, 1), (LENGTH, 2), (2 * LENGTH, 1), (LENGTH, 1)):
        data = DataConfig(seq_length=length, data_path=(pairs,), split="1,0,0", data_cache_path=str(tmp_path / "cache"))
        datasets, _ = build_split_datasets(DataRequest(data, length, seed, (5, 0, 0)))
        assert datasets.train is not None and len(datasets.train[0]) == length + 1
        rows[length, seed] = datasets.train[0].tolist()
    assert len({str(row) for row in rows.values()}) == 3
    assert len(list((tmp_path / "cache").glob("packed-*.json"))) == 3


def test_a_token_can_be_found_again(pairs: str) -> None:
    datasets, _ = _build(pairs)
    assert datasets.train is not None
    tokens = datasets.train[3]
    for position, token in enumerate(tokens.tolist()):
        place = datasets.train.locate(3, position)
        side, number = ("targets", token - TARGET) if token >= TARGET else ("inputs", token)
        stored = f"{pairs}_{side}_document.bin: token {number % 100} of sequence {number // 100 - 1}"
        assert place == stored if token else f"{pairs}: padding at {position} of row " in place


def test_pairs_that_no_row_holds_are_named_and_left_out(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    prefix = write_pairs(tmp_path / "long", [(10, 8), (4, 4), (9, 8), (9, 9)])
    datasets, _ = _build(prefix)
    assert datasets.train is not None
    assert {pair for sample in range(20) for pair in _pairs_of(datasets.train[sample])} == {1, 2}
    assert f"2 of 4 pairs of {prefix} have more than the 17 tokens of a row, the longest 18" in capfd.readouterr().err
    only = write_pairs(tmp_path / "longer", [(30, 8)])
    with pytest.raises(DataError, match="1 of 1 pairs .* none is left to train on. Use --seq-length 37"):
        _build(only)


def test_a_pair_without_inputs_is_not_predicted_from_the_one_before(tmp_path: Path) -> None:
    datasets, _ = _build(write_pairs(tmp_path / "bare", [(0, 4)] * 8))
    assert datasets.train is not None
    sample = datasets.train.read(0)
    assert sample.loss_mask is not None and sample.prefix_mask is not None and not sample.prefix_mask.any()
    assert sample.loss_mask.tolist() == ([True] * 3 + [False]) * 4


def test_sources_and_objectives_that_do_not_go_together(pairs: str, tmp_path: Path) -> None:
    data = DataConfig(seq_length=LENGTH, data_path=(pairs,))
    check_sources(data, SourceUse(LENGTH, "multitask"))
    with pytest.raises(ConfigError, match=r"tasks_inputs_document.idx\), which --objective causal does not support"):
        check_sources(data, SourceUse(LENGTH))
    corpus = DataConfig(seq_length=LENGTH, data_path=(write_corpus(tmp_path / "corpus", [5]),))
    with pytest.raises(DataError, match=r"requires pairs .*/corpus_inputs_document.idx and .*--json-keys inputs targ"):
        check_sources(corpus, SourceUse(LENGTH, "multitask"))


def test_inputs_without_their_targets_are_refused(pairs: str, tmp_path: Path) -> None:
    write_corpus(tmp_path / "tasks_targets_document", [3] * 39)
    with pytest.raises(DataError, match=r"tasks_inputs_document has 40 sequences and .*tasks_targets_document has 39"):
        TokenPairs(pairs)
    (tmp_path / "tasks_targets_document.idx").unlink()
    with pytest.raises(DataError, match=r"tasks_targets_document"):
        check_sources(DataConfig(seq_length=LENGTH, data_path=(pairs,)), SourceUse(LENGTH, "multitask"))


def test_records_that_are_missing_on_one_side_are_pointed_out(pairs: str, capfd: pytest.CaptureFixture[str]) -> None:
    made_with = TokenizerRecord("GPT2BPETokenizer", "ab" * 32, 500, 499)
    sidecar = Sidecar(42, 2, 0, 40, 120, append_eod=False, tokenizer=made_with)
    write_sidecar(f"{pairs}_targets_document", sidecar)
    TokenPairs(pairs)
    written = capfd.readouterr().err
    assert "2 records without tokens were skipped in " in written and "tasks_targets_document." in written


def test_a_plan_of_other_ranges_cannot_be_read(pairs: str) -> None:
    source = open_source(pairs, DataRequest(DataConfig(seq_length=LENGTH), LENGTH, 1))
    planned = source.plan(0, 20, "train")
    group = GroupPlan("train", (planned,), (Phase(0, (PhaseMember(0, 1.0),)),)).extended(20, LENGTH, 1, "bigscience")
    plan = DataPlan(LENGTH, 1, "bigscience", group, (), ())
    assert len(source.dataset(group.sources[0], group, plan)) >= 20
    with pytest.raises(DataError, match=r"planned with other ranges of .*tasks than the current flags"):
        source.dataset(dataclasses.replace(planned, fingerprint="0" * 64), group, plan)
