"""The order of blends: golden values, both builders alike."""

import numpy as np
import pytest
from hypothesis import given, settings, strategies

from megatron.data.order import blend
from megatron.data.order.blend import blend_order
from tests.data.order.digests import md5


def test_golden_blends(builder):
    sources, samples = blend_order([0.5, 0.3, 0.2], 12)
    assert sources.tolist() == [0, 1, 2, 0, 1, 0, 2, 0, 1, 0, 0, 1] and sources.dtype == np.uint8
    assert samples.tolist() == [0, 0, 0, 1, 1, 2, 1, 3, 2, 4, 5, 3] and samples.dtype == np.int64
    assert blend_order([1 / 3, 1 / 3, 1 / 3], 9)[0].tolist() == [0, 1, 2] * 3
    sources, samples = blend_order([0.1, 0.2, 0.3, 0.4], 1000)
    assert sources[:12].tolist() == [3, 2, 1, 0, 3, 2, 3, 1, 2, 3, 0, 3]
    assert np.bincount(sources).tolist() == [100, 200, 300, 400]
    assert (md5(sources), md5(samples)) == ("ece1aa46887cc305d3b2aadb095f2933", "60f200718041d6445977e92ff43b38ae")


@pytest.mark.parametrize(("count", "dtype"), [(254, np.uint8), (255, np.int16), (33000, np.int32)])
def test_any_number_of_sources_can_be_blended(builder, count, dtype):
    sources, _ = blend_order([1 / count] * count, min(count, 300))
    assert sources.dtype == dtype and sources.tolist() == list(range(min(count, 300)))


@settings(max_examples=40, deadline=None)
@given(strategies.lists(strategies.floats(0.001, 1), min_size=1, max_size=6), strategies.integers(1, 200))
def test_blends_are_within_their_shares_at_every_length_and_equal_in_both_builders(raw, size):
    weights = [weight / sum(raw) for weight in raw]
    sources, samples = blend_order(weights, size)
    plain = blend._blend_order_python(weights, size, np.uint8)
    assert plain[0].tobytes() == sources.tobytes() and plain[1].tobytes() == samples.tobytes()
    taken = np.bincount(sources, minlength=len(weights))
    assert all(count <= np.ceil(size * weight + 1e-9) for count, weight in zip(taken, weights, strict=True))
    shorter = blend_order(weights, size // 2)
    assert shorter[0].tolist() == sources[: size // 2].tolist()
