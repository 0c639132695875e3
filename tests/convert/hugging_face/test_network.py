"""Slices make up a tensor; shapes come from the network without allocating it."""

from __future__ import annotations

import dataclasses
import math

import pytest

from megatron.convert.hugging_face.network import network_shapes, slices
from tests.helpers.networks import tiny_config


@pytest.mark.parametrize("limit_bytes", [1, 8, 100, 400, 10**9])
@pytest.mark.parametrize("shape", [(7,), (5, 6), (1, 8, 3), (3, 2, 4, 5)])
def test_slices_are_consecutive_and_small(shape: tuple[int, ...], limit_bytes: int) -> None:
    done = 0
    for start, stop in slices(shape, 2, limit_bytes):
        size = [high - low for low, high in zip(start, stop, strict=True)]
        first = sum(index * math.prod(shape[place + 1 :]) for place, index in enumerate(start))
        last = sum((index - 1) * math.prod(shape[place + 1 :]) for place, index in enumerate(stop))
        assert first == done and last + 1 == done + math.prod(size), "each is a range of elements, in order"
        assert 2 * math.prod(size) <= max(limit_bytes, 2 * (shape[-1] if len(shape) > 1 else 1))
        done += math.prod(size)
    assert done == math.prod(shape)


def test_shapes_are_logical_and_nothing_is_allocated() -> None:
    config = dataclasses.replace(tiny_config(), hidden_size=2**20, kv_channels=2**18)  # 8 TB a block
    shapes = network_shapes(config)
    assert shapes["decoder.layers.1.self_attention.linear_qkv.weight"] == (4, 3, 2**18, 2**20)
    assert shapes["embedding.word_embeddings.weight"] == (101, 2**20), "without padding"
    assert "output_layer.weight" not in shapes, "it is tied"
