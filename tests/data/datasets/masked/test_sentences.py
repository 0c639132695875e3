"""Sentence pairs: every sample as a plain implementation of upstream's description makes it."""

import numpy as np
import pytest

from megatron.config import MaskingConfig
from megatron.data.datasets.masked.masked_options import MaskedOptions
from megatron.data.datasets.masked.sentences import SentenceDataset, SentenceFile
from megatron.data.order.index_cache import IndexCache
from megatron.data.order.plan import Segment
from megatron.data.order.sentence_map import SentenceRules, build_sentence_map
from megatron.errors import DataError
from tests.data.datasets.masked.corpora import write_sentences
from tests.data.datasets.masked.upstream_sample import plain_sample

LENGTH, SEED = 40, 1234


def opened(indexed, vocabulary, folder, length=LENGTH, **options):
    options = MaskedOptions(MaskingConfig(), **options)
    return SentenceFile(indexed, length, options, vocabulary, IndexCache(folder))


@pytest.mark.parametrize(("pairs", "length", "seed"), [(True, 40, SEED), (True, 24, 2**32 - 3), (False, 30, 7)])
def test_samples_are_those_of_the_description(sentences, vocabulary, tmp_path, pairs, length, seed):
    file = opened(sentences, vocabulary, tmp_path, length, pairs=pairs)
    rules = SentenceRules(length - 3, 0.1, 2 if pairs else 1)
    table = build_sentence_map(sentences.lengths, sentences.documents, rules, 150, seed)
    dataset = SentenceDataset(file, 0, len(file), [Segment(150, seed, len(table))])
    assert len(dataset) == len(table) >= 150
    seen = {"swapped": 0, "short": 0, "cut": 0}
    for number, (first, last, target) in enumerate(table.tolist()):
        texts = [sentences[sentence].tolist() for sentence in range(first, last)]
        plain, sample = plain_sample(texts, target, length, 0.15, seed, number, pairs=pairs), dataset.read(number)
        assert sample.tokens.tolist() == dataset[number].tolist() == plain.tokens
        assert {int(place): int(sample.labels[place]) for place in np.flatnonzero(sample.loss_mask)} == plain.labels
        assert sample.token_types.tolist() == plain.types
        assert sample.is_swapped == (plain.is_swapped if pairs else None)
        seen["swapped"] += plain.is_swapped
        seen["short"] += target < length - 3
        seen["cut"] += sum(map(len, texts)) > target
    assert seen["short"] and seen["cut"] and (not pairs or 0.3 < seen["swapped"] / len(table) < 0.7)


def test_segments_follow_each_other_and_spans_name_sentences(sentences, vocabulary, tmp_path):
    file = opened(sentences, vocabulary, tmp_path)
    segments = [Segment(9, seed, len(file.table(10, 30, 9, seed))) for seed in (SEED, 77)]
    both, second = SentenceDataset(file, 10, 30, segments), SentenceDataset(file, 10, 30, segments[1:])
    assert len(both) == sum(segment.rows for segment in segments)
    assert both[segments[0].rows + 4].tolist() == second[4].tolist()
    first, last = int(sentences.documents[10]), int(sentences.documents[30])
    for number in (0, len(both) - 1):
        spans = both.spans(number)
        assert len(spans) >= 2 and all(first <= span.sequence < last for span in spans)
        assert [span.tokens for span in spans] == [int(sentences.lengths[span.sequence]) for span in spans]
    assert f"sequences {spans[0].sequence} to {spans[-1].sequence}" in both.locate(len(both) - 1, 4)
    with pytest.raises(IndexError, match=f"Sample {len(both)} is out of range"):
        both.read(len(both))


def test_a_plan_of_other_data_is_refused(sentences, vocabulary, tmp_path):
    file = opened(sentences, vocabulary, tmp_path)
    with pytest.raises(DataError, match=r"planned with 5 samples of .*corpus_text_sentence.* yield \d+ with"):
        SentenceDataset(file, 0, 40, [Segment(5, SEED, 5)])


def test_a_token_of_another_vocabulary_is_located(vocabulary, tmp_path):
    indexed = write_sentences(tmp_path / "other", documents=3, seed=9)
    (tmp_path / "other.bin").write_bytes(np.full(indexed.tokens, 500, np.uint16).tobytes())
    file = opened(indexed, vocabulary, tmp_path)
    rows = len(file.table(0, 3, 1, SEED))
    with pytest.raises(DataError, match=r"other.bin: token 0 from sequence \d+ on has id 500, but the vocabulary"):
        SentenceDataset(file, 0, 3, [Segment(1, SEED, rows)]).read(0)


def test_the_map_is_kept_next_to_the_data(sentences, vocabulary, tmp_path):
    table = opened(sentences, vocabulary, tmp_path).table(0, 40, 30, SEED)
    kept = IndexCache(tmp_path, build=False)
    again = SentenceFile(sentences, LENGTH, MaskedOptions(MaskingConfig()), vocabulary, kept).table(0, 40, 30, SEED)
    assert len(list(tmp_path.glob("sentences-*-map.npy"))) == 1 and np.array_equal(table, again)
