"""Masked samples from the data flags: splits by documents, blends, passes, resumed orders, and wrong data."""

import json

import numpy as np
import pytest

from megatron.config import DataConfig, MaskingConfig
from megatron.data.build import build_split_datasets, check_sources, epoch_samples
from megatron.data.datasets.masked.masked_options import MaskedOptions
from megatron.data.loader import BatchOptions
from megatron.data.order.plan import DataPlan
from megatron.data.order.sentence_map import SentenceRules, build_sentence_map
from megatron.data.sources.source import DataRequest, SourceUse
from megatron.errors import ConfigError, DataError
from tests.data.datasets.masked.corpora import VOCABULARY, write_sentences, write_texts
from tests.data.samples import batches_of_ranks

LENGTH, SEED = 32, 1234
KINDS = ("sentences", "documents", "stream")


@pytest.fixture(scope="module")
def prefixes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    return tuple(write_sentences(folder / f"{name}_text_sentence", 50, seed).prefix for seed, name in enumerate("ab"))


def options_of(kind):
    return MaskedOptions(MaskingConfig(masked_samples=kind))


def built(data, kind, tokenizer, samples=(60, 8, 0), plan=None, **more):
    return build_split_datasets(
        DataRequest(data, LENGTH, SEED, samples, plan, tokenizer=tokenizer, masked=options_of(kind), **more)
    )


def data_of(*paths, **more):
    return DataConfig(seq_length=LENGTH, data_path=paths, split="80,20,0", **more)


def test_the_order_of_sentences_is_upstreams(prefixes, word_tokenizer):
    datasets, plan = built(data_of(prefixes[0]), "sentences", word_tokenizer, (200, 0, 0))
    file = datasets.train.file.indexed
    table = build_sentence_map(file.lengths, file.documents[:41], SentenceRules(LENGTH - 3, 0.1, 2), 200, SEED)
    assert len(datasets.train) == len(table) == plan.train.sources[0].rows
    firsts = [datasets.train.spans(number)[0].sequence for number in range(len(table))]
    assert firsts == table[:, 0].tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_a_stored_plan_gives_the_same_samples_and_is_continued(prefixes, word_tokenizer, kind):
    data = data_of(prefixes[0])
    first, plan = built(data, kind, word_tokenizer)
    stored = DataPlan.from_json(json.loads(json.dumps(plan.to_json())))
    assert stored == plan
    wanted = len(first.train) + 5
    longer, extended = built(data, kind, word_tokenizer, (wanted, 8, 0), stored, consumed=20)
    assert len(longer.train) >= wanted and len(extended.train.sources[0].segments) == 2
    for number in (0, 30, len(first.train) - 1):
        assert longer.train[number].tolist() == first.train[number].tolist()
    again, _ = built(data, kind, word_tokenizer, (wanted, 8, 0), DataPlan.from_json(extended.to_json()))
    assert again.train[wanted - 1].tolist() == longer.train[wanted - 1].tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_blends_and_weighted_groups(prefixes, word_tokenizer, kind):
    blended, plan = built(data_of("0.75", prefixes[0], "0.25", prefixes[1]), kind, word_tokenizer)
    origins = [blended.train.source_of(number) for number in range(40)]
    assert origins.count(0) == 30 and len(plan.train.sources) == 2
    data = DataConfig(
        seq_length=LENGTH,
        train_weighted_split_paths=(f"mix: 1 0:0.5 {prefixes[0]}, 1 0.5:1 {prefixes[1]}",),
        valid_weighted_split_paths=(f"rest: 1 0.5:1 {prefixes[0]}",),
    )
    datasets, _ = built(data, kind, word_tokenizer)
    assert set(datasets.valid) == {"rest"} and datasets.train.read(3).labels is not None


@pytest.mark.parametrize("kind", KINDS)
def test_a_pass_over_the_data(prefixes, word_tokenizer, kind):
    data = data_of(prefixes[0])
    count = epoch_samples(DataRequest(data, LENGTH, SEED, tokenizer=word_tokenizer, masked=options_of(kind)))
    datasets, plan = built(data, kind, word_tokenizer, (count, 0, 0))
    assert len(datasets.train) == count == plan.pass_samples


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_share_a_batch_without_overlap(prefixes, word_tokenizer, kind):
    datasets, _ = built(data_of(prefixes[0]), kind, word_tokenizer)
    settings = BatchOptions(
        eod_id=word_tokenizer.eod_id,
        vocab_size=VOCABULARY,
        segments=True,
        predictions=options_of(kind).predictions(LENGTH),
    )

    def rows(ranks):
        return batches_of_ranks(datasets.train, ranks, 8, 2, first=8, stop_sample=14, options=settings)

    for one, two in zip(rows(1), rows(2), strict=True):
        for name in ("sample_ids", "tokens", "labels", "loss_mask", "segment_ids", "token_types", "predicted"):
            assert np.array_equal(getattr(one, name), getattr(two, name)), name
        assert (one.swapped is None) == (kind != "sentences")
    last = rows(2)[-1]
    assert not last.loss_mask.any() and (last.swapped is None or last.swapped.tolist() == [-1, -1])
    places = np.take_along_axis(one.loss_mask, one.predicted, axis=1)
    assert (places.sum(axis=1) == one.loss_mask.sum(axis=1)).all()


def test_data_that_fit_no_masked_samples(prefixes, word_tokenizer, tmp_path):
    texts = write_texts(tmp_path / "web_text_document", [5, 9, 20]).prefix
    with pytest.raises(DataError, match=r"web_text_document has no document of two sentences.*--split-sentences"):
        built(data_of(texts), "sentences", word_tokenizer)
    assert built(data_of(texts), "documents", word_tokenizer, (4, 0, 0))[0].train is not None
    with pytest.raises(ConfigError, match="Masked samples require the mask token of a tokenizer"):
        built(data_of(texts), "stream", None)
    (tmp_path / "chat.jsonl").write_text('{"prompt": "a", "answer": "b"}\n')
    with pytest.raises(ConfigError, match=r"chat.jsonl is not a token file, which --objective masked requires"):
        check_sources(data_of(f"{tmp_path}/chat.jsonl"), SourceUse(LENGTH, "masked"))
    with pytest.raises(ConfigError, match=r"mongodb://host/database is not a token file"):
        check_sources(data_of("mongodb://host/database"), SourceUse(LENGTH, "masked"))
    check_sources(data_of(*prefixes[:1]), SourceUse(LENGTH, "masked"))


def test_a_plan_of_another_kind_of_samples_is_refused(prefixes, word_tokenizer):
    data = data_of(prefixes[0])
    _, plan = built(data, "sentences", word_tokenizer)
    with pytest.raises(DataError, match="training data differs from the run to resume|holds"):
        built(data, "stream", word_tokenizer, plan=plan, consumed=8)
