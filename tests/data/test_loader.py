"""Batches: the same samples for every layout, masks, segments, and errors of the reading thread."""

import numpy as np
import pytest

from megatron.config import DataConfig
from megatron.data import loader as module
from megatron.data.build import build_split_datasets
from megatron.data.datasets.changed_samples import ShortenedDataset
from megatron.data.datasets.sample import Sample
from megatron.data.loader import BatchLoader, BatchOptions, predicted_positions, segment_ids
from megatron.data.read_ahead import ReadAhead
from megatron.data.sources.source import DataRequest
from megatron.errors import ConfigError, DataError
from tests.data.corpora import write_corpus
from tests.data.samples import GivenRows, batches_of_ranks, micro_batches

SEQUENCE_LENGTH = 8


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    prefix = write_corpus(tmp_path_factory.mktemp("data") / "corpus", [10, 3, 17] * 20)
    data = DataConfig(seq_length=SEQUENCE_LENGTH, data_path=(prefix,), split="1,0,0")
    datasets, _ = build_split_datasets(DataRequest(data, SEQUENCE_LENGTH, 7, (64, 0, 0), None))
    return datasets.train


def flattened(batches) -> list[tuple]:
    rows = []
    for batch in batches:
        segments = [None] * len(batch.tokens) if batch.segment_ids is None else batch.segment_ids.tolist()
        fields = (batch.sample_ids, batch.tokens, batch.labels, batch.loss_mask)
        rows += zip(*(field.tolist() for field in fields), segments, strict=True)
    return rows


@pytest.mark.parametrize("first", [0, 8, 40])
@pytest.mark.parametrize(
    "options", [BatchOptions(), BatchOptions(eod_id=5, vocab_size=700, eod_mask_loss=True, segments=True)]
)
def test_every_layout_sees_the_same_samples_of_a_global_batch(dataset, first, options):
    reference = flattened(micro_batches(dataset, 16, 16, first, options=options))
    assert [row[0] for row in reference] == list(range(first, first + 16))
    for dp_size in (1, 2, 4):
        for micro in (1, 2, 4):
            assert flattened(batches_of_ranks(dataset, dp_size, 16, micro, first, options=options)) == reference


def test_tokens_and_labels_are_shifted_by_one(dataset):
    (batch,) = micro_batches(dataset, 2, 2, first=3)
    assert batch.tokens.tolist() == [dataset[3][:-1].tolist(), dataset[4][:-1].tolist()]
    assert batch.labels.tolist() == [dataset[3][1:].tolist(), dataset[4][1:].tolist()]
    assert batch.tokens.dtype == batch.labels.dtype == batch.sample_ids.dtype == np.int64
    assert batch.loss_mask.dtype == np.float32 and batch.loss_mask.all() and batch.segment_ids is None


def test_end_of_document_masks_and_segments():
    tokens = np.array([[5, 1, 2, 5, 5, 3], [1, 2, 3, 4, 6, 7]])
    assert segment_ids(tokens, 5).tolist() == [[0, 1, 1, 1, 2, 3], [0, 0, 0, 0, 0, 0]]


def test_batches_optionally_contain_the_source_of_each_sample():
    rows = GivenRows([[1, 2]] * 8)
    batches = micro_batches(rows, 4, 2, first=4, stop_sample=7, options=BatchOptions(sources=True))
    assert [batch.source_ids.tolist() for batch in batches] == [[1, 2], [0, 0]]
    assert next(iter(micro_batches(rows, 1, 1))).source_ids is None


def test_no_loss_where_the_input_token_ends_a_document():
    options = BatchOptions(eod_id=0, eod_mask_loss=True)
    (batch,) = micro_batches(GivenRows([[1, 0, 2, 0]]), 1, 1, options=options)
    assert batch.loss_mask.tolist() == [[1, 0, 1]]


@pytest.mark.parametrize(("bad", "place"), [(9, "row 1 column 2 has id 9"), (-1, "row 1 column 2 has id -1")])
def test_an_id_outside_the_vocabulary_is_located(bad, place):
    rows = GivenRows([[1, 2, 3], [1, 2, bad], [1, 2, 3], [1, 2, 3]])
    with pytest.raises(DataError, match=rf"{place}, but the vocabulary has 9 entries"):
        list(micro_batches(rows, 4, 2, options=BatchOptions(vocab_size=9)))


def test_a_short_last_batch_is_padded_with_samples_without_loss(dataset):
    options = BatchOptions(eod_id=3, segments=True)
    rows = flattened(batches_of_ranks(dataset, 2, 8, 2, first=8, stop_sample=11, options=options))
    assert [row[0] for row in rows] == list(range(8, 16))
    assert [sum(row[3]) for row in rows] == [8, 8, 8, 0, 0, 0, 0, 0]
    assert rows[2][1] == dataset[10][:-1].tolist() and rows[3][1] == [3] * 8
    assert [row[4] for row in rows[3:]] == [[0] * 8] * 5  # one document, although every token ends one


class MaskedRows(GivenRows):
    """Samples with labels of their own; the second token of sample k is hidden, and the third of odd ones."""

    def read(self, sample: int) -> Sample:
        labels = self.rows[sample]
        is_hidden = np.array([False, True, sample % 2 == 1, False])
        return Sample(
            np.where(is_hidden, 7, labels),
            is_hidden,
            segment_ids=np.array([0, 0, 0, 1]),
            labels=labels,
            token_types=np.array([0, 0, 1, 0]),
            is_swapped=sample % 2 == 0,
        )


MASKED_OPTIONS = BatchOptions(eod_id=5, vocab_size=9, segments=True, predictions=3)


def test_samples_with_labels_of_their_own_and_padding_after_the_last():
    rows = MaskedRows([[1, 2, 3, 0], [1, 4, 6, 0], [1, 8, 8, 0]])
    batches = micro_batches(rows, 6, 2, stop_sample=3, options=MASKED_OPTIONS)
    first, second, third = batches
    assert first.tokens.tolist() == [[1, 7, 3, 0], [1, 7, 7, 0]] and first.labels.tolist() == rows.rows[:2].tolist()
    assert first.loss_mask.tolist() == [[0, 1, 0, 0], [0, 1, 1, 0]] and first.loss_mask.dtype == np.float32
    assert first.predicted.tolist() == [[1, 0, 0], [1, 2, 0]] and first.predicted.dtype == np.int64
    assert first.segment_ids.tolist() == [[0, 0, 0, 1]] * 2 and first.token_types.tolist() == [[0, 0, 1, 0]] * 2
    assert [batch.swapped.tolist() for batch in batches] == [[1, 0], [1, -1], [-1, -1]]
    for name in ("tokens", "labels", "loss_mask", "segment_ids", "token_types", "predicted", "swapped"):
        shapes = {(getattr(batch, name).shape, getattr(batch, name).dtype) for batch in batches}
        assert len(shapes) == 1, name
    assert not second.loss_mask[1].any() and not third.loss_mask.any() and not third.predicted.any()


def test_the_first_place_is_never_predicted_and_no_more_than_planned():
    assert predicted_positions(np.array([[0, 0.5, 1], [0, 0, 0]]), 2).tolist() == [[1, 2], [0, 0]]
    with pytest.raises(DataError, match="has 2 tokens to predict, expected at most 1"):
        predicted_positions(np.array([[0, 1, 1], [0, 0, 0]]), 1)
    with pytest.raises(DataError, match="first token"):
        predicted_positions(np.array([[1, 0, 0]]), 2)


def test_a_batch_that_cannot_be_split_evenly_is_rejected(dataset):
    with pytest.raises(ConfigError, match="global batch of 6 samples .* 2 data-parallel ranks .*multiple of 4"):
        micro_batches(dataset, 6, 2, dp_size=2)


def test_options_that_need_an_end_of_document_token():
    with pytest.raises(ConfigError, match="require an end-of-document token"):
        BatchOptions(eod_mask_loss=True)


def test_samples_beyond_the_plan_are_an_error(dataset):
    with pytest.raises(DataError, match=f"Sample {len(dataset)} was requested, but {len(dataset)} samples are planned"):
        list(micro_batches(dataset, 1, 1, first=len(dataset)))


@pytest.fixture
def ahead():
    thread = ReadAhead()
    yield thread
    thread.close()


# the size changes (ramp-up) and the data jumps (a skipped range): what was read ahead is then the wrong batch
REQUESTS = ((0, 8), (8, 8), (16, 4), (20, 4), (40, 8), (48, 8), (0, 8))


def test_the_loader_returns_batches_in_any_requested_order(dataset, ahead):
    with (
        BatchLoader(dataset, micro_batch_size=2, dp_rank=1, dp_size=2, ahead=ahead) as loader,
        BatchLoader(dataset, micro_batch_size=2, dp_rank=1, dp_size=2) as direct,
        BatchLoader(dataset, micro_batch_size=2, ahead=ahead) as evaluation,
    ):
        for first, size in REQUESTS:
            batches = loader.micro_batches(first, size)
            assert flattened(batches) == flattened(direct.micro_batches(first, size))
            assert [row[0] for row in flattened(evaluation.micro_batches(0, 2, stop_sample=3))] == [0, 1]
            assert [row[0] for row in flattened(batches)] == [
                number for number in range(first, first + size) if number % 4 >= 2
            ]


@pytest.mark.parametrize(("tokens", "batches"), [(1, 1), (11, 2), (1 << 16, 8)])
def test_small_batches_are_prefetched_several_at_a_time_but_never_beyond_the_end(ahead, monkeypatch, tokens, batches):
    monkeypatch.setattr(module, "_AHEAD_TOKENS", tokens)
    rows = GivenRows([[k, k] for k in range(44)])
    with BatchLoader(rows, micro_batch_size=2, ahead=ahead) as loader:
        loader.micro_batches(0, 4)
        for until in [4 + 4 * batches * burst for burst in (1, 2)]:
            loader._pending[-1][1].result()
            assert rows.read_numbers == list(range(min(until, 44)))
            for first in range(until - 4 * batches, min(until, 44), 4):
                assert loader.micro_batches(first, 4)[0].tokens[0, 0] == first
        for first in range(until, 44, 4):
            loader.micro_batches(first, 4)
        assert not loader._pending and rows.read_numbers == list(range(44))
        evaluation = [loader.micro_batches(first, 4, stop_sample=6) for first in (0, 4)]
        assert [int(batch.loss_mask.sum()) for batch in evaluation[1]] == [2, 0]


def test_an_error_in_the_thread_is_raised_when_the_batch_is_requested(ahead):
    rows = GivenRows([[1, 2]] * 12 + [[1, 99]] * 8)
    with BatchLoader(rows, micro_batch_size=4, options=BatchOptions(vocab_size=10), ahead=ahead) as loader:
        for first in (0, 4, 8):
            assert len(loader.micro_batches(first, 4)) == 1
        with pytest.raises(DataError, match="row 12 column 1 has id 99"):
            loader.micro_batches(12, 4)


def test_shortened_samples_keep_their_first_tokens_and_what_follows_each(dataset):
    options = BatchOptions(eod_id=1, segments=True)
    first, short = (
        next(iter(micro_batches(of, 2, 2, options=options))) for of in (dataset, ShortenedDataset(dataset, 3))
    )
    for name in ("tokens", "labels", "loss_mask", "segment_ids"):
        assert getattr(short, name).shape == (2, 3) and getattr(short, name).flags.c_contiguous
        assert (getattr(short, name) == getattr(first, name)[:, :3]).all()
    assert (short.labels[:, -1] == first.tokens[:, 3]).all() and (short.sample_ids == first.sample_ids).all()


def test_a_loader_goes_on_with_samples_of_another_length(dataset, ahead):
    with BatchLoader(dataset, micro_batch_size=4, ahead=ahead) as loader:
        whole = [loader.micro_batches(first, 4)[0].tokens for first in (0, 4)]
        loader.read_from(ShortenedDataset(dataset, 3))  # the next batch is being read ahead
        assert (loader.micro_batches(4, 4)[0].tokens == whole[1][:, :3]).all()
        assert loader.micro_batches(8, 4)[0].tokens.shape == (4, 3)
