"""The samples of sentences: golden values of Megatron's own function, for the compiled builder and for Python."""

import numpy as np
import pytest
from hypothesis import given, settings, strategies

from megatron.data.order import sentence_map
from megatron.data.order.index_map import compiled_builder
from megatron.data.order.sentence_map import SentenceRules, build_sentence_map, mersenne_numbers, usable_documents
from megatron.errors import DataError
from tests.data.order.digests import md5

COUNTS = 7 * np.arange(300) % 9 + 1  # sentences of each document
DOCUMENTS = np.concatenate([[0], np.cumsum(COUNTS)])
LENGTHS = (53 * np.arange(DOCUMENTS[-1]) % 61 + 3).astype(np.int32)


@pytest.fixture
def map_builder(builder, monkeypatch):
    if builder == "numpy":
        monkeypatch.setattr(sentence_map, "compiled_builder", lambda: None)


@pytest.mark.parametrize(
    ("short_share", "least", "rows", "digest"),
    [
        (0.1, 2, 1214, "27aaa0263ecfa877aef566958686e166"),
        (0.1, 1, 1321, "28989d85806dd7d47cc8de651bc96cd2"),
        (0.0, 2, 1185, "21fdcabe063e5d3fae30c78f9d978dd4"),
    ],
)
def test_golden_maps(map_builder, short_share, least, rows, digest):
    table = build_sentence_map(LENGTHS, DOCUMENTS, SentenceRules(125, short_share, least), 2000, 1234, epochs=3)
    assert len(table) == rows and md5(table) == digest and table.dtype == np.uint32
    if (short_share, least) == (0.1, 2):
        assert table[:4].tolist() == [[462, 465, 125], [1355, 1359, 125], [1474, 1477, 125], [1056, 1058, 48]]


def test_a_pass_is_finished_before_the_samples_are_counted(map_builder):
    rules = SentenceRules(125, 0.1, 2)
    one, two = (build_sentence_map(LENGTHS, DOCUMENTS, rules, samples, 1234) for samples in (1, 600))
    assert len(one) == len(build_sentence_map(LENGTHS, DOCUMENTS, rules, len(one), 1234)) < 600 <= len(two)
    single = sorted(one.tolist())
    assert [row[0] for row in single] == sorted(row[0] for row in single) and len(two) < 1214


def test_documents_that_are_left_out():
    lengths = np.array([600, 5, 5, 5, 600, 5, 5], np.int32)
    documents = np.array([0, 1, 2, 2, 4, 6, 7])
    assert usable_documents(lengths, documents, 1).tolist() == [[0, 1], [1, 2], [2, 4], [6, 7]]
    assert usable_documents(lengths, documents, 2).tolist() == [[2, 4]]


def test_data_without_sentences_are_refused(map_builder):
    lengths, documents = np.full(4, 90, np.int32), np.arange(5)
    with pytest.raises(DataError, match="None of the 4 documents has 2 sentences.*--split-sentences"):
        build_sentence_map(lengths, documents, SentenceRules(125, 0.1, 2), 1, 1)
    assert len(build_sentence_map(lengths, documents, SentenceRules(125, 0.1, 1), 1, 1)) == 4
    with pytest.raises(DataError, match=r"more than 512 tokens \(the longest 700\)"):
        build_sentence_map(np.array([700, 3], np.int32), np.array([0, 2]), SentenceRules(125, 0.1, 2), 1, 1)
    with pytest.raises(DataError, match="4294967297 samples of sentences"):
        build_sentence_map(lengths, documents, SentenceRules(125, 0.1, 1), 2**32 + 1, 1)


@settings(max_examples=40, deadline=None)
@given(
    counts=strategies.lists(strategies.integers(0, 6), min_size=1, max_size=12).filter(lambda counts: max(counts) > 1),
    lengths=strategies.lists(strategies.integers(0, 40), min_size=72, max_size=72),
    rules=strategies.builds(
        SentenceRules,
        strategies.integers(2, 60),
        strategies.sampled_from([0.0, 0.1, 0.35, 1.0]),
        strategies.sampled_from([1, 2]),
    ),
    samples=strategies.integers(1, 60),
    seed=strategies.integers(0, 2**32 - 1),
)
def test_every_pass_has_every_sentence_once_and_both_builders_agree(counts, lengths, rules, samples, seed):
    documents = np.concatenate([[0], np.cumsum(counts)])
    sizes = np.array(lengths[: documents[-1]], np.int32)
    table = build_sentence_map(sizes, documents, rules, samples, seed)
    assert len(table) >= samples and table[:, 2].max() <= rules.most_tokens and table[:, 2].min() >= 2
    seen = np.zeros(len(sizes), np.int64)
    for first, last, _ in table.tolist():
        assert last - first >= rules.least_sentences
        document = np.searchsorted(documents, first, side="right")
        assert last <= documents[document]
        seen[first:last] += 1
    usable = usable_documents(sizes, documents, rules.least_sentences)
    passes = seen[usable[0, 0]]
    expected = np.zeros(len(sizes), np.int64)
    for first, last in usable.tolist():
        expected[first:last] = passes
    assert seen.tolist() == expected.tolist()
    if compiled_builder() is not None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sentence_map, "compiled_builder", lambda: None)
            assert build_sentence_map(sizes, documents, rules, samples, seed).tolist() == table.tolist()


def test_the_compiled_builder_checks_everything():
    compiled = compiled_builder()
    if compiled is None:
        pytest.skip("the compiled index builder is not built here")
    lengths = np.full(4, 9, np.int32)

    def build(firsts, lasts, most_tokens=20, least=1):
        places = np.array(firsts, np.int64), np.array(lasts, np.int64)
        return compiled.build_sentence_map(lengths, *places, 1, 1, most_tokens, 10, 1, least, False)

    with pytest.raises(ValueError, match="document 1 has the sentences 2 to 5 of 4"):
        build([0, 2], [2, 5])
    with pytest.raises(ValueError, match="document 0 has the sentences -1 to 2"):
        build([-1], [2])
    with pytest.raises(ValueError, match="a last for each first"):
        build([0], [])
    with pytest.raises(ValueError, match="not 1 and 1"):
        build([0], [2], most_tokens=1)
    with pytest.raises(ValueError, match="not 20 and 0"):
        build([0], [2], least=0)
    assert build([], []).shape == (0, 3)


def test_the_ten_thousandth_number_is_that_of_the_standard() -> None:
    """ISO C++ [rand.predef]: the 10000th invocation of a default `mt19937_64`, whose seed is 5489."""
    assert int(mersenne_numbers(5489, 10_000)[-1]) == 9981545732273789042
