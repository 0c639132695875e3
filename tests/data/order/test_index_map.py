"""The order of samples: golden vectors of Megatron's own functions, for the compiled builder and for NumPy."""

import numpy as np
import pytest
from hypothesis import given, settings, strategies

from megatron.data.order import index_map
from megatron.data.order.index_map import build_indices, plan_epochs, sample_index
from megatron.errors import DataError
from tests.data.corpora import GOLDEN_LENGTHS
from tests.data.order.digests import md5

LENGTHS = np.array(GOLDEN_LENGTHS, np.int32)
ONE_EPOCH_DOCUMENTS = [7, 2, 9, 1, 0, 8, 4, 5, 6, 3]
ONE_EPOCH_ROWS = [(0, 0), (2, 1), (2, 9), (3, 6), (5, 0), (6, 0), (8, 0), (8, 8), (8, 16), (9, 4)]
TWO_EPOCH_ROWS = [(10, 0), (11, 4), (12, 0), (13, 7), (14, 6), (15, 7), (17, 2), (18, 7), (18, 15), (19, 3)]


def test_golden_two_epochs_with_a_separate_last_one(builder):
    indices = build_indices(LENGTHS, np.arange(10), 8, 12, 1234)
    assert indices.document.tolist() == [*ONE_EPOCH_DOCUMENTS, 7, 3, 5, 1, 4, 8, 0, 2, 6, 9]
    assert [tuple(row) for row in indices.sample.tolist()] == ONE_EPOCH_ROWS + TWO_EPOCH_ROWS
    assert indices.shuffle.tolist() == [7, 4, 1, 5, 3, 0, 2, 8, 6, 11, 13, 14, 18, 10, 9, 17, 16, 12, 15]


def test_golden_thousand_documents(builder):
    lengths = ((37 * np.arange(1000)) % 211 + 1).astype(np.int32)
    plan = plan_epochs(int(lengths.sum()), 128, 2000, "bigscience")
    assert (int(lengths.sum()), plan.epochs, plan.separate, plan.samples) == (105877, 3, True, 2481)
    indices = build_indices(lengths, np.arange(1000), 128, 2000, 1234)
    assert [md5(array) for array in indices] == [
        "7c5eb2a8a4bb6d7c7051c05a8d482714",
        "8dd40c25d65df998ec025a9b978cea4e",
        "f6ba9c5daa022e5d6343424183df9709",
    ]


def test_the_nvidia_rule_merges_the_last_epoch_from_eighty_percent(builder):
    """9 samples an epoch: 8 of the last one are less than 95 % (8.55, rounded down) and more than 80 % (7.2)."""
    bigscience, nvidia = plan_epochs(80, 8, 16, "bigscience"), plan_epochs(80, 8, 16, "nvidia")
    assert (bigscience.separate, nvidia.separate) == (True, False)
    indices = build_indices(LENGTHS, np.arange(10), 8, 16, 1234, "nvidia")
    together = np.tile(np.arange(10, dtype=np.int32), 2)
    random = np.random.RandomState(1234)
    random.shuffle(together)
    shuffle = np.arange(19, dtype=np.uint32)
    random.shuffle(shuffle)
    assert indices.document.tolist() == together.tolist() and indices.shuffle.tolist() == shuffle.tolist()


@settings(max_examples=40, deadline=None)
@given(
    lengths=strategies.lists(strategies.integers(0, 40), min_size=1, max_size=30).filter(sum),
    sequence_length=strategies.integers(1, 20),
    samples=strategies.integers(0, 60),
    seed=strategies.integers(0, 2**32 - 1),
    rule=strategies.sampled_from(["bigscience", "nvidia"]),
)
def test_rows_follow_upstreams_order_of_documents(lengths, sequence_length, samples, seed, rule):
    sizes = np.array(lengths, np.int32)
    indices = build_indices(sizes, np.arange(len(sizes)), sequence_length, samples, seed, rule)
    rows = [(0, 0)]
    place, offset = 0, 0
    for _ in range(len(indices.shuffle)):
        remaining = sequence_length + 1
        while True:
            left = lengths[indices.document[place]] - offset
            remaining -= left
            if remaining <= 0:
                offset += remaining + left - 1
                break
            place, offset = place + 1, 0
        rows.append((place, offset))
    assert [tuple(row) for row in indices.sample.tolist()] == rows
    plain = index_map._sample_index_numpy(sizes, indices.document, sequence_length, len(rows) - 1, np.int32)
    assert plain.tobytes() == indices.sample.tobytes()
    assert len(indices.shuffle) >= samples and sorted(indices.shuffle.tolist()) == list(range(len(rows) - 1))


def test_rows_that_need_64_bits_get_them(builder):
    lengths = np.array([2**31 - 1, 2**31 - 1], np.int32)
    document = np.array([1, 0], np.int32)
    rows = sample_index(lengths, document, 2**30, 3)
    assert rows.dtype == np.int32 and rows.tolist() == [[0, 0], [0, 2**30], [1, 1], [1, 2**30 + 1]]
    wide = sample_index(lengths, document.astype(np.int64), 2**30, 3)
    assert wide.tolist() == rows.tolist()


def test_no_tokens_is_an_error_and_not_an_endless_loop():
    with pytest.raises(DataError, match="5 samples were requested from documents that hold 0 tokens"):
        build_indices(np.zeros(3, np.int32), np.arange(3), 8, 5, 1)


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_a_seed_that_numpy_cannot_take_is_named(seed):
    with pytest.raises(DataError, match=rf"The seed {seed} \(--seed\)"):
        build_indices(LENGTHS, np.arange(10), 8, 9, seed)


def test_an_order_that_does_not_fit_in_memory_is_rejected():
    with pytest.raises(DataError, match="10000000000 samples of 2048 tokens need .* epochs of 10 documents"):
        build_indices(LENGTHS, np.arange(10), 2048, 10**10, 1)


def test_documents_that_end_early_are_an_error(builder):
    with pytest.raises(ValueError, match="document"):
        sample_index(LENGTHS, np.arange(10, dtype=np.int32), 8, 10)


@settings(max_examples=40, deadline=None)
@given(
    size=strategies.integers(0, 1000),
    seed=strategies.integers(0, 2**32 - 1),
    dtype=strategies.sampled_from([np.int32, np.uint32, np.int64]),
    draws=strategies.sampled_from([3, 1 << 20]),
)
def test_the_shuffle_is_numpys_and_leaves_the_generator_where_numpy_does(size, seed, dtype, draws):
    theirs, ours = np.random.RandomState(seed), np.random.RandomState(seed)
    expected, found = np.arange(size, dtype=dtype), np.arange(2 * size, dtype=dtype)[:size]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(index_map, "_DRAWS_AT_ONCE", draws)
        for _ in range(2):
            theirs.shuffle(expected)
            index_map.shuffle(ours, found)
    assert found.tolist() == expected.tolist()
    assert theirs.randint(0, 2**32, 8, dtype=np.uint32).tolist() == ours.randint(0, 2**32, 8, dtype=np.uint32).tolist()


@pytest.mark.parametrize("size", [2**k + step for k in (1, 7, 16) for step in (-1, 0, 1)])
def test_the_shuffle_is_numpys_at_the_powers_of_two(builder, size):
    expected, found = np.arange(size), np.arange(size)
    np.random.RandomState(5).shuffle(expected)
    index_map.shuffle(np.random.RandomState(5), found)
    assert np.array_equal(expected, found)


def test_the_compiled_builder_checks_everything():
    compiled = index_map.compiled_builder()
    if compiled is None:
        pytest.skip("the compiled index builder is not built here")
    order = np.arange(10, dtype=np.int32)
    for lengths, documents, length, samples, message in (
        (LENGTHS, np.array([0, 10], np.int32), 8, 1, "entry 1 names sequence 10 of 10"),
        (LENGTHS, np.array([-1], np.int32), 8, 1, "entry 0 names sequence -1 of 10"),
        (np.array([4, -7], np.int32), np.array([0, 1], np.int32), 8, 1, "sequence 1 has the negative length -7"),
        (LENGTHS, order, 8, 10, "documents end inside sample 9 of 10"),
        (LENGTHS, order, 0, 1, "sequence length 0 must be at least 1"),
        (LENGTHS, order, 8, -1, "number of samples -1"),
        (LENGTHS, order.astype(np.int16), 8, 1, "must be int32 or int64"),
        (LENGTHS, order.astype(np.uint32), 8, 1, "must be signed integers"),
        (LENGTHS, order.reshape(2, 5), 8, 1, "one-dimensional"),
    ):
        with pytest.raises(ValueError, match=message):
            compiled.build_sample_index(lengths, documents, length, samples, False)
    for weights, size, message in (
        ([], 3, "at least one weight"),
        ([0.5, float("nan")], 3, "weight 1 is nan"),
        ([0.5, -0.5], 3, "weight 1 is -0.5"),
        ([0.5, 0.5], -1, "the size -1"),
    ):
        with pytest.raises(ValueError, match=message):
            compiled.build_blend_index(np.array(weights, np.float64), size)
    draws = np.zeros(4, np.uint32)
    for values, place, message in (
        (np.zeros((2, 2), np.int32), 0, "one-dimensional"),
        (np.zeros(8, np.int32)[::2], 1, "contiguous"),
        (np.zeros(4, np.int32), 4, "place 4 is not one of 4 entries"),
        (np.zeros(4, np.int32), -1, "place -1 is not one of 4"),
        (np.zeros(4, np.uint16), 1, "4 or 8 bytes each"),
    ):
        with pytest.raises(ValueError, match=message):
            compiled.shuffle(values, place, draws)


def test_a_missing_builder_is_reported_once(monkeypatch, capsys):
    monkeypatch.setattr(index_map, "_compiled", None)
    index_map.compiled_builder.cache_clear()
    try:
        assert index_map.compiled_builder() is None and index_map.compiled_builder() is None
    finally:
        monkeypatch.undo()
        index_map.compiled_builder.cache_clear()
    assert capsys.readouterr().err.count("compiled index builder is not installed") == 1
